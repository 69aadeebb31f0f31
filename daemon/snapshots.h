// SPDX-License-Identifier: Apache-2.0
// How another thread gets a copy of the counters that belong to the dispatcher: it asks, the
// dispatcher copies at the end of its turn, and the asker makes a text of the copy in its own time.
// A copy serves whoever asks within kMaxAgeNs, so asking often costs the dispatcher nothing more.
#ifndef KVM_DAEMON_SNAPSHOTS_H_
#define KVM_DAEMON_SNAPSHOTS_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "daemon/stats_snapshot.h"

namespace kvm::daemon {

class Snapshots {
 public:
  // LIMIT: ten copies a second at most, each a few microseconds of the dispatcher's time.
  static constexpr uint64_t kMaxAgeNs = 100'000'000;

  // `wake` wakes the dispatcher.
  explicit Snapshots(std::function<void()> wake) : wake_(std::move(wake)) {}

  // A copy at most kMaxAgeNs old. Null when the dispatcher has not made one within timeout_ns.
  // Threads: any but the dispatcher.
  std::shared_ptr<const StatsSnapshot> get(uint64_t timeout_ns);
  // From now on get() answers at once that there is none. Threads: any.
  void stop();

  // Says whether somebody waits for publish(). Threads: the dispatcher, both.
  bool is_wanted() const { return wanted_.load(std::memory_order_relaxed); }
  void publish(StatsSnapshot snapshot);

 private:
  std::function<void()> wake_;
  // SYNC: a hint; what is published is ordered by the mutex.
  std::atomic<bool> wanted_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<const StatsSnapshot> latest_;
  uint64_t latest_ns_ = 0;
  bool stopped_ = false;
};

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_SNAPSHOTS_H_
