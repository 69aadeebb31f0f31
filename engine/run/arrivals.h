// SPDX-License-Identifier: Apache-2.0
#ifndef KVM_ENGINE_RUN_ARRIVALS_H_
#define KVM_ENGINE_RUN_ARRIVALS_H_

#include <atomic>
#include <mutex>
#include <vector>

#include "base/assert.h"
#include "base/reserve.h"

namespace kvm::engine {

class Scheduler;
struct Request;

// Arrivals are requests for which something has come from a slow tier, on any thread, so that the
// driver looks at them.
class Arrivals {
 public:
  explicit Arrivals(Scheduler* scheduler) : scheduler_(scheduler) {}

  // Driver: room for n requests. Throws std::bad_alloc.
  void reserve(size_t n) {
    const std::lock_guard lock(mutex_);
    reserve_growing(posted_, n);
  }
  // Any thread. A request stands here once, however often it is posted. Wakes the driver.
  void post(Request* request) noexcept;
  // Likewise, for something that is no request's.
  void post() noexcept;
  // Driver, without a lock: whether anything has been posted since the last take().
  bool has_any() const { return has_any_.load(std::memory_order_relaxed); }
  // Driver: takes one; null: there are no more, and has_any() is false from here on.
  Request* take();
  // Driver: the request does not stand here any more.
  void forget(Request* request);

 private:
  Scheduler* const scheduler_;
  std::mutex mutex_;
  std::vector<Request*> posted_;  // guarded by mutex_, and so is Request::is_posted
  std::atomic<bool> has_any_{false};
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RUN_ARRIVALS_H_
