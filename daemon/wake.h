// SPDX-License-Identifier: Apache-2.0
// Wakes the dispatcher out of epoll_wait. Writers pay a system call only while it sleeps.
#ifndef KVM_DAEMON_WAKE_H_
#define KVM_DAEMON_WAKE_H_

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "ipc/fd.h"

namespace kvm::daemon {

// Threads: wake() any; the rest the dispatcher.
class Wake {
 public:
  Wake() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

  int fd() const { return fd_.get(); }

  // To be called after what the dispatcher is to see has been published.
  void wake() {
    // SYNC: read-modify-writes of one word here and by the dispatcher, so one comes first: either
    // this one sees that it sleeps, or its second look sees what was published before this call.
    if (sleeping_.fetch_add(0, std::memory_order_acq_rel) != 0) {
      const uint64_t one = 1;
      [[maybe_unused]] const ssize_t n = ::write(fd_.get(), &one, sizeof(one));
    }
  }
  // Announces sleep. The dispatcher must look at everything once more before it blocks.
  // SYNC: here and in finish_sleep: acquires what was published before the calls of wake() so far.
  void prepare_sleep() { sleeping_.exchange(1, std::memory_order_acq_rel); }
  void finish_sleep() {
    sleeping_.exchange(0, std::memory_order_acq_rel);
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t n = ::read(fd_.get(), &count, sizeof(count));
  }

 private:
  ipc::Fd fd_;
  std::atomic<uint32_t> sleeping_{0};
};

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_WAKE_H_
