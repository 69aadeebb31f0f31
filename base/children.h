// SPDX-License-Identifier: Apache-2.0
// Memory that children of fork() have nothing from: they could use none of it (handles answer
// FORKED), and would keep it alive, or copied page by page, when this process has long given it
// back.
//
// Threads: pure functions.
#ifndef KVM_BASE_CHILDREN_H_
#define KVM_BASE_CHILDREN_H_

#include <sys/mman.h>

#include <cstdint>

namespace kvm {

// Leaves the whole pages of a mapping out of the memory of children. A refusal costs memory only.
inline void leave_out_of_children(void* data, uint64_t size_bytes) {
  (void)::madvise(data, size_bytes, MADV_DONTFORK);
}

}  // namespace kvm

#endif  // KVM_BASE_CHILDREN_H_
