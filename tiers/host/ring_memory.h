// SPDX-License-Identifier: Apache-2.0
// RingMemory: the memory that rings of frames are cut from, through which pages of a slow tier pass
// on their way to those who read them once.
//
// It is charged to the budget when it grows, and never shrinks: who waits for a ring waits for
// other rings, and for nothing else.
//
// Threads: one, the driver's; the bytes of rings may be used by any.
// Memory: size_bytes(); the list of free stretches.
#ifndef KVM_TIERS_HOST_RING_MEMORY_H_
#define KVM_TIERS_HOST_RING_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "tiers/budget.h"
#include "tiers/host/page_memory.h"

namespace kvm::tiers {

class RingMemory {
 public:
  // LIMIT: of addresses; memory is taken as it grows.
  static constexpr uint64_t kMaxBytes = uint64_t{4} << 30;
  static constexpr uint64_t kAlign = 4096;

  // `budget` and `memory` must outlive it.
  explicit RingMemory(MemoryBudget* budget, PageMemory* memory = system_page_memory())
      : budget_(budget), memory_(memory) {}
  // REQUIRES: everything was given back.
  ~RingMemory();
  RingMemory(const RingMemory&) = delete;
  RingMemory& operator=(const RingMemory&) = delete;

  // Makes it at least so large. Fails: NO_SPACE (the budget), NO_MEMORY (the system refused), LIMIT
  // (kMaxBytes). Throws std::bad_alloc. Nothing has changed then.
  Status grow_to(uint64_t size_bytes);
  uint64_t size_bytes() const { return size_bytes_; }
  uint64_t free_bytes() const;

  // A stretch of memory, aligned to kAlign; null: there is none now. Throws std::bad_alloc: nothing
  // has changed.
  std::byte* take(uint64_t size_bytes);
  // REQUIRES: take(size_bytes) returned it.
  void give_back(std::byte* data, uint64_t size_bytes);

 private:
  struct Stretch {
    uint64_t begin = 0;
    uint64_t end = 0;
  };

  MemoryBudget* const budget_;
  PageMemory* const memory_;
  std::byte* base_ = nullptr;  // of kMaxBytes, once it has grown
  uint64_t size_bytes_ = 0;
  uint64_t n_taken_ = 0;
  // By address, none touching another. Has room for one more than there are rings.
  std::vector<Stretch> free_;
};

}  // namespace kvm::tiers

#endif  // KVM_TIERS_HOST_RING_MEMORY_H_
