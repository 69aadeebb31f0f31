// SPDX-License-Identifier: Apache-2.0
// The memory of users' tables of prefixes, which their clients get to read.
//
// Threads: the dispatcher.
#ifndef KVM_DAEMON_PREFIX_MEMORY_H_
#define KVM_DAEMON_PREFIX_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <utility>

#include "base/status.h"
#include "ipc/fd.h"
#include "ipc/memory.h"

namespace kvm::daemon {

class PrefixMemory {
 public:
  // As engine::PrefixMemory.
  Result<std::span<std::byte>> make(uint32_t uid, uint64_t size_bytes) {
    KVM_TRY_ASSIGN(ipc::SharedMemory memory, ipc::create_shared_memory("kvm-prefixes", size_bytes,
                                                                       ipc::PeerAccess::kReadOnly));
    const ipc::SharedMemory& made = tables_.insert_or_assign(uid, std::move(memory)).first->second;
    return std::as_writable_bytes(std::span(made.mapping.data(), size_bytes));
  }
  // A descriptor of a user's. Fails: LIMIT (descriptors). REQUIRES: it was made.
  Result<ipc::Fd> share(uint32_t uid) const;

 private:
  std::map<uint32_t, ipc::SharedMemory> tables_;
};

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_PREFIX_MEMORY_H_
