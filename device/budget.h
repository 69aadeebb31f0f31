// SPDX-License-Identifier: Apache-2.0
// Budget: how much of something several owners may have together.  Threads: any.
#ifndef KVM_DEVICE_BUDGET_H_
#define KVM_DEVICE_BUDGET_H_

#include <atomic>
#include <cstdint>

namespace kvm::device {

class Budget {
 public:
  explicit Budget(uint64_t capacity) : capacity_(capacity) {}

  // False: there is not so much left, and nothing has been taken.
  bool take(uint64_t n) {
    uint64_t used = used_.load(std::memory_order_relaxed);
    do {
      if (n > capacity_ - used) {
        n_refused_.fetch_add(1, std::memory_order_relaxed);
        return false;
      }
    } while (!used_.compare_exchange_weak(used, used + n, std::memory_order_relaxed));
    return true;
  }
  void give_back(uint64_t n) { used_.fetch_sub(n, std::memory_order_relaxed); }

  uint64_t capacity() const { return capacity_; }
  uint64_t used() const { return used_.load(std::memory_order_relaxed); }
  // Times that somebody did not get what there was not.
  uint64_t n_refused() const { return n_refused_.load(std::memory_order_relaxed); }

 private:
  const uint64_t capacity_;
  std::atomic<uint64_t> used_{0};
  std::atomic<uint64_t> n_refused_{0};
};

}  // namespace kvm::device

#endif  // KVM_DEVICE_BUDGET_H_
