// SPDX-License-Identifier: Apache-2.0
#include "daemon/snapshots.h"

#include <chrono>
#include <utility>

#include "base/clock.h"

namespace kvm::daemon {

std::shared_ptr<const StatsSnapshot> Snapshots::get(uint64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  const uint64_t asked_ns = now_ns();
  const auto is_fresh = [&] { return latest_ != nullptr && latest_ns_ + kMaxAgeNs >= asked_ns; };
  if (!is_fresh() && !stopped_) {
    wanted_.store(true, std::memory_order_relaxed);
    // SYNC: wake() has the fence that orders wanted_ with the dispatcher's second look.
    wake_();
    changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns),
                      [&] { return stopped_ || is_fresh(); });
  }
  return is_fresh() ? latest_ : nullptr;
}

void Snapshots::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
}

void Snapshots::publish(StatsSnapshot snapshot) {
  auto latest = std::make_shared<const StatsSnapshot>(std::move(snapshot));
  {
    const std::lock_guard lock(mutex_);
    latest_ = std::move(latest);
    latest_ns_ = now_ns();
    wanted_.store(false, std::memory_order_relaxed);
  }
  changed_.notify_all();
}

}  // namespace kvm::daemon
