// SPDX-License-Identifier: Apache-2.0
// A Clock that stands still until it is moved: what would take minutes happens at once, and what
// must not happen before its time can be seen not to.
//
// Threads: any.
#ifndef KVM_TESTS_SIM_SIMULATED_CLOCK_H_
#define KVM_TESTS_SIM_SIMULATED_CLOCK_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>

#include "base/clock.h"

namespace kvm::testing {

class SimulatedClock final : public Clock {
 public:
  uint64_t now_ns() const override { return now_ns_.load(); }
  uint64_t patience_ns(uint64_t deadline_ns) const override {
    return deadline_ns <= now_ns() ? 0 : UINT64_MAX;
  }
  void set_wake(std::function<void()> wake) override {
    const std::lock_guard lock(mutex_);
    wake_ = std::move(wake);
  }

  void advance(uint64_t ns) {
    now_ns_.fetch_add(ns);
    const std::lock_guard lock(mutex_);
    if (wake_) {
      wake_();
    }
  }

 private:
  // Not 0, which stands for "none" in places.
  std::atomic<uint64_t> now_ns_{1'000'000'000};
  std::mutex mutex_;
  std::function<void()> wake_;  // guarded by mutex_
};

}  // namespace kvm::testing

#endif  // KVM_TESTS_SIM_SIMULATED_CLOCK_H_
