// SPDX-License-Identifier: Apache-2.0
#ifndef KVM_DAEMON_CLOCK_H_
#define KVM_DAEMON_CLOCK_H_

#include <time.h>

#include <cstdint>

namespace kvm::daemon {

// CLOCK_MONOTONIC.
inline uint64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_CLOCK_H_
