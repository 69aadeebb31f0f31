// SPDX-License-Identifier: Apache-2.0
// Times in nanoseconds of CLOCK_MONOTONIC. UINT64_MAX: never.
//
// now_ns() is for measuring. Code that acts when a time has come (a deadline, a period, a pause)
// goes by a Clock, so that tests can move it by hand (tests/sim/simulated_clock.h).
#ifndef KVM_BASE_CLOCK_H_
#define KVM_BASE_CLOCK_H_

#include <time.h>

#include <cstdint>
#include <functional>

namespace kvm {

inline uint64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

inline uint64_t add_saturating(uint64_t a, uint64_t b) {
  return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

// 0 when the deadline has passed.
inline uint64_t time_left(uint64_t deadline_ns) {
  if (deadline_ns == UINT64_MAX) {
    return UINT64_MAX;
  }
  const uint64_t now = now_ns();
  return now < deadline_ns ? deadline_ns - now : 0;
}

// Threads: any.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual uint64_t now_ns() const = 0;
  // How long who acts at `deadline_ns` may block: 0 when it has come, UINT64_MAX when nothing but
  // being woken ends the wait.
  virtual uint64_t patience_ns(uint64_t deadline_ns) const = 0;
  // `wake` is called when time has jumped: who blocks then asks for his patience again. One at a
  // time; {} takes it back, and it is not running any more when this returns. Real time never
  // jumps.
  virtual void set_wake(std::function<void()> wake) = 0;
};

// The real one.
class SystemClock final : public Clock {
 public:
  uint64_t now_ns() const override { return kvm::now_ns(); }
  uint64_t patience_ns(uint64_t deadline_ns) const override { return time_left(deadline_ns); }
  void set_wake(std::function<void()>) override {}
};

inline Clock* system_clock() {
  static SystemClock clock;
  return &clock;
}

}  // namespace kvm

#endif  // KVM_BASE_CLOCK_H_
