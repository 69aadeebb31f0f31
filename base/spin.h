// SPDX-License-Identifier: Apache-2.0
#ifndef KVM_BASE_SPIN_H_
#define KVM_BASE_SPIN_H_

#include <sched.h>

#include <cstdint>

namespace kvm {

// One wait that spins: relax() goes between two looks at what is waited for. It pauses at first,
// and then offers the core to others, of which one may be the thread that is waited for: on a
// machine whose cores are all busy, spinning would else take the time of those that compute.
class Spin {
 public:
  void relax() {
    if (n_ >= kPauses) {
      ::sched_yield();
      return;
    }
    ++n_;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

 private:
  // A few microseconds, in which an exchange with a peer that spins as well is over.
  static constexpr uint32_t kPauses = 256;
  uint32_t n_ = 0;
};

}  // namespace kvm

#endif  // KVM_BASE_SPIN_H_
