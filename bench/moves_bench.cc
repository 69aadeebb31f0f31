// SPDX-License-Identifier: Apache-2.0
// moves: what it costs that pages move. Sequences that decode lie scattered among others, which are
// freed: their pages move together while they are read.
#include <algorithm>
#include <utility>
#include <vector>

#include "base/limits.h"
#include "bench/decode_steps.h"
#include "bench/engine_rig.h"
#include "bench/harness.h"
#include "bench/timing.h"

namespace kvm::bench {
namespace {

constexpr uint32_t kSequences = 32;
constexpr uint32_t kOthers = 7;  // beside each of them: eight pages are an extent
constexpr uint32_t kForks = 100;
constexpr double kSettleSeconds = 1.0;
constexpr int kIdleSteps = 4;  // without moves: all is moved

class MovesRun {
 public:
  MovesRun(uint32_t n_blocks, uint32_t n_threads)
      : n_blocks_(n_blocks),
        rig_(shape_, 1, n_threads,
             uint64_t{n_blocks} * kPageTokens * shape_.token_bytes() * kSequences * (kOthers + 1) +
                 (uint64_t{512} << 20)),
        steps_(&rig_, shape_, kSequences) {
    fill();
  }

  void run(Report* report) {
    steps_.run_for(kSettleSeconds);  // warms up
    const std::vector<double> before = steps_.run_for(kSettleSeconds);
    for (const kvm_seq_id other : others_) {
      rig_.free(other);
    }
    const kvm_stats begin = rig_.engine().stats();
    steps_.take_stalls_us();
    std::vector<double> during;
    double moving_s = 0;
    uint64_t n_moved = begin.n_pages_moved;
    for (int n_idle_steps = 0; n_idle_steps < kIdleSteps;) {
      const double took = steps_.run();
      const uint64_t n_moved_before = std::exchange(n_moved, rig_.engine().stats().n_pages_moved);
      n_idle_steps = n_moved == n_moved_before ? n_idle_steps + 1 : 0;
      if (n_idle_steps == 0) {
        during.push_back(took);
        moving_s += took;
      }
    }
    const kvm_stats end = rig_.engine().stats();
    const std::vector<double> stalls = steps_.take_stalls_us();
    const std::vector<double> after = steps_.run_for(kSettleSeconds);
    const double quiet = (median(before) + median(after)) / 2;
    const uint64_t page_bytes = kPageTokens * shape_.token_bytes();
    const double moved =
        static_cast<double>((end.n_pages_moved - begin.n_pages_moved) * page_bytes);
    report->add({{"sequences", kSequences},
                 {"forks", kForks},
                 {"tokens", uint64_t{n_blocks_} * kPageTokens},
                 {"used_gib_before", gib(begin.host_used_bytes)},
                 {"used_gib_after", gib(end.host_used_bytes)},
                 {"pages_gib", gib(end.host_page_bytes)},
                 {"moved_gbps", moved / moving_s * 1e-9},
                 {"step_ms", quiet * 1e3},
                 {"step_ms_moving", median(during) * 1e3},
                 {"decode_slowdown", median(during) / quiet - 1},
                 {"dispatcher_stall_p99_us", percentile(stalls, 0.99)},
                 {"dispatcher_stall_max_us", percentile(stalls, 1)},
                 {"pages_copied", end.n_pages_copied - begin.n_pages_copied}});
  }

 private:
  static double gib(uint64_t bytes) { return static_cast<double>(bytes) / (1 << 30); }

  void fill() {
    const uint64_t bytes = uint64_t{kPageTokens} * shape_.n_kv_heads * shape_.head_dim * 2;
    const Memory k(bytes);
    const Memory v(bytes);
    for (uint32_t i = 0; i < kSequences; ++i) {
      steps_.add(rig_.create());
      for (uint32_t j = 0; j < kOthers; ++j) {
        others_.push_back(rig_.create());
      }
    }
    for (uint32_t block = 0; block < n_blocks_; ++block) {
      fill_random_bf16(k.as<uint16_t>(), k.size_bytes() / 2, 2 * block);
      fill_random_bf16(v.as<uint16_t>(), v.size_bytes() / 2, 2 * block + 1);
      for (uint32_t i = 0; i < kSequences; ++i) {
        rig_.append(steps_.seqs()[i], 0, 1, kPageTokens, k, v);
        for (uint32_t j = 0; j < kOthers; ++j) {
          rig_.append(others_[i * kOthers + j], 0, 1, kPageTokens, k, v);
        }
      }
    }
    for (const kvm_seq_id seq : steps_.seqs()) {
      for (uint32_t i = 0; i < kForks; ++i) {
        rig_.fork(seq);
      }
    }
  }

  const Shape shape_;
  const uint32_t n_blocks_;
  Rig rig_;
  DecodeSteps steps_;
  std::vector<kvm_seq_id> others_;
};

}  // namespace

int run_moves(const Options& options) {
  Report report("moves", options);
  const Shape shape;
  const uint64_t block_bytes = kPageTokens * shape.token_bytes() * kSequences * (kOthers + 1);
  const uint64_t n_blocks =
      options.quick ? 4 : std::clamp<uint64_t>(memory_budget_bytes(options) / block_bytes, 8, 256);
  MovesRun(static_cast<uint32_t>(n_blocks), thread_count(options)).run(&report);
  return report.finish();
}

}  // namespace kvm::bench
