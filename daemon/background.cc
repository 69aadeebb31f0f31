// SPDX-License-Identifier: Apache-2.0
#include "daemon/background.h"

#include <fmt/format.h>
#include <pthread.h>

#include <system_error>
#include <utility>

namespace kvm::daemon {

Status BackgroundThread::start() {
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    return Status(KVM_ERR_LIMIT,
                  fmt::format("the system refuses the thread {}: {}", name_, error.what()));
  }
  ::pthread_setname_np(thread_.native_handle(), name_);
  return Status::ok();
}

BackgroundThread::~BackgroundThread() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void BackgroundThread::post(std::function<void()>&& job) {
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  changed_.notify_one();
}

void BackgroundThread::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) {
      return;
    }
    std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    job = nullptr;  // The job frees what it owns here, not under the lock.
    lock.lock();
  }
}

}  // namespace kvm::daemon
