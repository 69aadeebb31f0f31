// SPDX-License-Identifier: Apache-2.0
#include "tiers/host/page_memory.h"

#include <sys/mman.h>

#include "base/assert.h"
#include "base/children.h"

namespace kvm::tiers {
namespace {

#if !defined(MADV_DONTNEED_LOCKED)
constexpr int MADV_DONTNEED_LOCKED = 24;  // Linux 5.18
#endif
#if !defined(MADV_POPULATE_WRITE)
constexpr int MADV_POPULATE_WRITE = 23;  // Linux 5.14
#endif

class SystemPageMemory final : public PageMemory {
 public:
  std::byte* reserve(uint64_t size_bytes) override {
    void* mapping =
        mmap(nullptr, size_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) {
      return nullptr;
    }
    // A refusal (a kernel without transparent huge pages) costs speed only. Said once for the whole
    // range, so that the mapping does not split when parts of it become accessible.
    (void)madvise(mapping, size_bytes, MADV_HUGEPAGE);
    leave_out_of_children(mapping, size_bytes);
    // An embedded engine's process may lock what it maps (mlockall): the system would fill parts
    // when they become accessible, of which most are not in use.
    (void)munlock(mapping, size_bytes);
    return static_cast<std::byte*>(mapping);
  }

  bool open(std::byte* data, uint64_t size_bytes) override {
    return mprotect(data, size_bytes, PROT_READ | PROT_WRITE) == 0;
  }

  // Only where something has locked the memory (an embedded engine's process may call mlockall)
  // does the first try fail.
  void discard(std::byte* data, uint64_t size_bytes) override {
    KVM_ASSERT(madvise(data, size_bytes, MADV_DONTNEED) == 0 ||
               madvise(data, size_bytes, MADV_DONTNEED_LOCKED) == 0);
  }

  void touch(std::byte* data, uint64_t size_bytes) override {
    (void)madvise(data, size_bytes, MADV_POPULATE_WRITE);
  }

  void release(std::byte* data, uint64_t size_bytes) override { munmap(data, size_bytes); }
};

}  // namespace

PageMemory* system_page_memory() {
  static SystemPageMemory memory;
  return &memory;
}

}  // namespace kvm::tiers
