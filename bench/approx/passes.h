// SPDX-License-Identifier: Apache-2.0
// One decode step of one layer, all kv heads, on all threads of a team: exactly, or by an
// approximate mode. What the timed benches interleave.
#ifndef KVM_BENCH_APPROX_PASSES_H_
#define KVM_BENCH_APPROX_PASSES_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "bench/approx/data.h"
#include "bench/approx/solver.h"
#include "bench/ceiling.h"

namespace kvm::bench {

// Heads of a page are taken together, and states merged by whichever thread completes a node, as
// the engine does.
class ExactPass {
 public:
  ExactPass(const DataSet& data, Team& team);
  // Seconds of one step with the queries of `set`.
  double run(uint32_t set);
  // Solves problems of some heads, whose plan is that of all.
  void solve(std::vector<attention::Problem> problems);
  const float* o(uint32_t head) const { return o_.data() + head * o_stride_; }

 private:
  void work(uint32_t thread);
  void climb(uint32_t head, uint32_t chunk);

  const DataSet& data_;
  Team& team_;
  size_t o_stride_;
  std::vector<float> o_, lse_;
  std::vector<attention::Problem> problems_;
  attention::Plan plan_;
  size_t state_bytes_ = 0;
  uint32_t task_chunks_ = 1;
  std::unique_ptr<HugeBuffer> prepared_, states_, scratch_;
  std::vector<std::atomic<uint8_t>> arrived_;  // [head][chunk]
  std::atomic<uint32_t> next_{0};
};

// Where the time of approximate passes went, seconds summed over threads.
struct PassTimes {
  double plan = 0;
  double prepare = 0;
  double shards = 0;
  double finish = 0;
  uint64_t n_heads = 0;  // that were passed
  void add(const PassTimes& o) {
    plan += o.plan;
    prepare += o.prepare;
    shards += o.shards;
    finish += o.finish;
    n_heads += o.n_heads;
  }
};

// Heads are shared out over the threads, and the shards of a head where there are several. Those
// that have to be answered exactly are so together, after all others, as in the engine.
class ApproxPass {
 public:
  // indexes: one for each head, alive as long as the pass.
  ApproxPass(const DataSet& data, std::vector<attention::HeadIndex> indexes,
             const attention::ApproxParams& params, Team& team);
  double run(uint32_t set);
  const float* o(uint32_t head) const { return heads_[head]->o.data(); }
  const float* lse(uint32_t head) const { return heads_[head]->lse.data(); }
  const attention::ApproxReport& report(uint32_t head) const { return heads_[head]->report; }
  // Returns the times of all runs so far.
  PassTimes times() const;

 private:
  struct Head {
    std::vector<float> o, lse;
    attention::ApproxReport report;
    attention::Problem problem;
    attention::ApproxInput input;
    attention::ApproxPlan plan;
    GrowingBuffer prepared, states;
    std::atomic<bool> is_prepared{false};
    std::atomic<uint32_t> left{0};
    bool is_answered = true;
  };
  struct Task {
    uint32_t head;
    uint32_t shard;  // kPrepare: what comes before the shards
  };
  static constexpr uint32_t kPrepare = UINT32_MAX;

  void plan(uint32_t set);
  void work(uint32_t thread);
  void prepare(Head* head, uint32_t thread);
  void finish(Head* head, uint32_t thread);

  const DataSet& data_;
  Team& team_;
  uint32_t set_ = 0;
  std::vector<std::unique_ptr<Head>> heads_;
  std::vector<Task> tasks_;
  std::vector<GrowingBuffer> scratch_;  // [thread]
  std::vector<Solver> solvers_;         // [thread], for heads that are planned exact
  ExactPass exact_;                     // for heads that are not, and end so
  std::vector<PassTimes> times_;        // [thread]
  std::atomic<uint32_t> next_{0};
};

}  // namespace kvm::bench

#endif  // KVM_BENCH_APPROX_PASSES_H_
