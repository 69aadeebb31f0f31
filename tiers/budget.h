// SPDX-License-Identifier: Apache-2.0
// MemoryBudget: a hard cap in physical bytes. Whoever is about to touch memory charges it first.
#ifndef KVM_TIERS_BUDGET_H_
#define KVM_TIERS_BUDGET_H_

#include <algorithm>
#include <cstdint>

#include "base/assert.h"

namespace kvm::tiers {

// INVARIANT: used_bytes() <= capacity_bytes().
// Threads: one.
class MemoryBudget {
 public:
  explicit MemoryBudget(uint64_t capacity_bytes) : capacity_bytes_(capacity_bytes) {}
  MemoryBudget(const MemoryBudget&) = delete;
  MemoryBudget& operator=(const MemoryBudget&) = delete;

  // False, and nothing charged, when the cap would be passed.
  [[nodiscard]] bool charge(uint64_t size_bytes) {
    if (size_bytes > free_bytes()) {
      return false;
    }
    used_bytes_ += size_bytes;
    peak_bytes_ = std::max(peak_bytes_, used_bytes_);
    return true;
  }
  void uncharge(uint64_t size_bytes) {
    KVM_ASSERT(size_bytes <= used_bytes_);
    used_bytes_ -= size_bytes;
  }

  uint64_t capacity_bytes() const { return capacity_bytes_; }
  uint64_t used_bytes() const { return used_bytes_; }
  uint64_t free_bytes() const { return capacity_bytes_ - used_bytes_; }
  uint64_t peak_bytes() const { return peak_bytes_; }

 private:
  const uint64_t capacity_bytes_;
  uint64_t used_bytes_ = 0;
  uint64_t peak_bytes_ = 0;
};

}  // namespace kvm::tiers

#endif  // KVM_TIERS_BUDGET_H_
