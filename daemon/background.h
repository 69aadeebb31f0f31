// SPDX-License-Identifier: Apache-2.0
// A thread for work that takes long and must not hold the dispatcher up: allocating shared memory
// (0.7 s a GiB) and unmapping it.
#ifndef KVM_DAEMON_BACKGROUND_H_
#define KVM_DAEMON_BACKGROUND_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "base/status.h"

namespace kvm::daemon {

// A BackgroundThread runs jobs one after the other, in order. Destruction runs what is left, then
// ends the thread. Threads: any.
class BackgroundThread {
 public:
  explicit BackgroundThread(const char* name) : name_(name) {}
  ~BackgroundThread();

  // Begins to run jobs. Fails: LIMIT (the system refuses a thread).
  Status start();
  // A job throws nothing. Throws std::bad_alloc: the job is still the caller's.
  void post(std::function<void()>&& job);

 private:
  void run();

  const char* name_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_BACKGROUND_H_
