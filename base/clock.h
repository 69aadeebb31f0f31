// SPDX-License-Identifier: Apache-2.0
// Times in nanoseconds of CLOCK_MONOTONIC. UINT64_MAX: never.
#ifndef KVM_BASE_CLOCK_H_
#define KVM_BASE_CLOCK_H_

#include <time.h>

#include <cstdint>

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

}  // namespace kvm

#endif  // KVM_BASE_CLOCK_H_
