// SPDX-License-Identifier: Apache-2.0
#include "engine/run/arrivals.h"

#include <algorithm>

#include "engine/run/request.h"
#include "engine/tasks/scheduler.h"

namespace kvm::engine {

void Arrivals::post(Request* request) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (request->is_posted) {
      return;
    }
    KVM_ASSERT(posted_.size() < posted_.capacity());
    request->is_posted = true;
    posted_.push_back(request);
    // SYNC: under the lock, as in take().
    has_any_.store(true, std::memory_order_relaxed);
  }
  scheduler_->wake_driver();
}

void Arrivals::post() noexcept {
  {
    const std::lock_guard lock(mutex_);
    has_any_.store(true, std::memory_order_relaxed);
  }
  scheduler_->wake_driver();
}

Request* Arrivals::take() {
  const std::lock_guard lock(mutex_);
  if (posted_.empty()) {
    has_any_.store(false, std::memory_order_relaxed);
    return nullptr;
  }
  Request* request = posted_.back();
  posted_.pop_back();
  request->is_posted = false;
  return request;
}

void Arrivals::forget(Request* request) {
  const std::lock_guard lock(mutex_);
  if (request->is_posted) {
    std::erase(posted_, request);
    request->is_posted = false;
  }
}

}  // namespace kvm::engine
