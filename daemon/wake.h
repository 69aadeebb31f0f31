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
    // SYNC: full fence here and in prepare_sleep: either the dispatcher's second look sees what was
    // published before this call, or this load sees that it sleeps.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_relaxed)) {
      const uint64_t one = 1;
      [[maybe_unused]] const ssize_t n = ::write(fd_.get(), &one, sizeof(one));
    }
  }
  // Announces sleep. The dispatcher must look at everything once more before it blocks.
  void prepare_sleep() {
    sleeping_.store(true, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  void finish_sleep() {
    sleeping_.store(false, std::memory_order_relaxed);
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t n = ::read(fd_.get(), &count, sizeof(count));
  }

 private:
  ipc::Fd fd_;
  std::atomic<bool> sleeping_{false};
};

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_WAKE_H_
