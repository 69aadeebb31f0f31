// SPDX-License-Identifier: Apache-2.0
// What `short` measures: one sequence behind a daemon or in an engine of this process, and where
// the time of a step went; and how much of the machine its host gave to others meanwhile.
//
// Threads: one.
#ifndef KVM_BENCH_SHORT_SERVICE_H_
#define KVM_BENCH_SHORT_SERVICE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "bench/daemon_child.h"
#include "bench/wall_client.h"

namespace kvm::bench {

enum class Where : uint8_t { kDaemon, kEmbedded };
const char* where_name(Where where);

// Seconds of one step. They add up.
struct StepTime {
  double total() const { return outside + waiting + computing; }
  double outside = 0;    // on the way to the service and back: transport, being woken
  double waiting = 0;    // in the service, before its first task and after its last
  double computing = 0;  // from the first task's start to the last one's end
  // Beside the sum, and embedded only: threads at work while it computed, as a mean.
  double threads = 0;
};

class ShortService {
 public:
  // `spin`: of a daemon. spin_ns: of the client's queue.
  ShortService(Where where, uint32_t threads, uint32_t tokens, const DaemonSpin& spin,
               uint64_t spin_ns);
  ~ShortService();

  StepTime step();
  // REQUIRES: kDaemon.
  void run_ceiling() { daemon_->run_ceiling(seq_, 0); }
  const DaemonChild& daemon() const { return *daemon_; }

 private:
  std::unique_ptr<DaemonChild> daemon_;
  std::unique_ptr<WallClient> client_;
  kvm_seq_id seq_ = 0;
  uint64_t busy_ns_ = 0;  // of its threads so far
};

// The share of processor time that the host kept from this machine, over what lies between
// begin() and end() of each part. To be read from /proc/stat, which counts hundredths of a second.
class StealMeter {
 public:
  void begin();
  void end();
  double share() const { return all_ == 0 ? 0 : stolen_ / all_; }

 private:
  double begin_stolen_ = 0;
  double begin_all_ = 0;
  double stolen_ = 0;
  double all_ = 0;
};

// By how much each part of the slowest tenth of the steps exceeds that of all, as medians: where
// slow steps spend what makes them slow. `threads` is the slow steps' own.
StepTime excess_of_slow(const std::vector<StepTime>& steps);
// Of all steps: what they took as a whole.
std::vector<double> totals(const std::vector<StepTime>& steps);

}  // namespace kvm::bench

#endif  // KVM_BENCH_SHORT_SERVICE_H_
