// SPDX-License-Identifier: Apache-2.0
// Waits that spin, and when they should not.
//
// A thread that yields its core gets it back within a microsecond or two where nobody else wants
// it, and after a slice of the system's scheduler, some milliseconds, where another thread
// computes or spins without yielding. One that blocks instead is woken at once: the scheduler
// favours threads that have slept. So who finds that a yield took long blocks, and does not spin
// for a while; the while doubles each time, and shrinks with every wait that spinning served well.
#ifndef KVM_BASE_SPIN_H_
#define KVM_BASE_SPIN_H_

#include <sched.h>

#include <algorithm>
#include <cstdint>

#include "base/clock.h"

namespace kvm {

// One wait that spins: relax() goes between two looks at what is waited for. It pauses at first,
// and then offers the core to others, of which one may be the thread that is waited for: on a
// machine whose cores are all busy, spinning would else take the time of those that compute.
class Spin {
 public:
  // False: the core was offered, and another thread has kept it for kLateNs or longer.
  bool relax() {
    if (is_brief()) {
      ++n_;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      return true;
    }
    const uint64_t begin_ns = now_ns();
    ::sched_yield();
    return now_ns() - begin_ns < kLateNs;
  }
  // True as long as the core has not been offered yet.
  bool is_brief() const { return n_ < kPauses; }

 private:
  // A few microseconds, in which an exchange with a peer that spins as well is over.
  static constexpr uint32_t kPauses = 256;
  // Threads that spin beside each other hand the core on in 2 us each (measured on Linux 6.18).
  static constexpr uint64_t kLateNs = 50'000;
  uint32_t n_ = 0;
};

// One thread keeps here what it has found out about the core that it spins on. Threads: that one.
class CoreShare {
 public:
  static constexpr uint64_t kFirstPauseNs = 5'000'000;
  static constexpr uint64_t kMostPauseNs = 1'280'000'000;

  // Says whether waits should block after a few microseconds.
  bool is_contended(uint64_t now_ns) const { return now_ns < until_ns_; }
  // A yield took long.
  void note_late(uint64_t now_ns) {
    pause_ns_ = std::clamp(2 * pause_ns_, kFirstPauseNs, kMostPauseNs);
    until_ns_ = now_ns + pause_ns_;
  }
  // A wait has yielded, and never for long.
  void note_in_time() { pause_ns_ = pause_ns_ < kFirstPauseNs ? 0 : pause_ns_ - pause_ns_ / 8; }

 private:
  uint64_t pause_ns_ = 0;
  uint64_t until_ns_ = 0;
};

// One wait by a thread with a CoreShare: keeps the two in step.
class SharedSpin {
 public:
  // So many late yields are no reason to block: where the threads that are waited for may be what
  // had the core.
  explicit SharedSpin(CoreShare* share, uint32_t n_forgiven = 0)
      : share_(share), n_forgiven_(n_forgiven) {}
  // Between two looks. False: to be waited for by blocking from now on.
  bool relax() {
    if (spin_.is_brief()) {
      return spin_.relax();
    }
    if (!is_asked_) {
      is_asked_ = true;
      if (share_->is_contended(now_ns())) {
        is_late_ = true;
        return false;
      }
    }
    if (!spin_.relax()) {
      if (n_forgiven_ > 0) {
        --n_forgiven_;
        return true;
      }
      is_late_ = true;
      share_->note_late(now_ns());
    }
    return !is_late_;
  }
  // At the end of the wait.
  void finish() {
    if (is_asked_ && !is_late_) {
      share_->note_in_time();
    }
  }

 private:
  CoreShare* share_;
  Spin spin_;
  uint32_t n_forgiven_;
  bool is_asked_ = false;
  bool is_late_ = false;
};

}  // namespace kvm

#endif  // KVM_BASE_SPIN_H_
