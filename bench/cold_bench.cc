// SPDX-License-Identifier: Apache-2.0
// cold: attention over contexts that lie in a slow tier, against the tier alone. The tier is a
// simulated one, of 3 GB/s and 0.1 ms: what is judged is whether the engine keeps it busy.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "base/limits.h"
#include "bench/engine_rig.h"
#include "bench/harness.h"
#include "bench/timing.h"
#include "tiers/simulated/simulated_tier.h"

namespace kvm::bench {
namespace {

constexpr uint64_t kTierBytesPerS = 3'000'000'000;
constexpr uint64_t kTierLatencyNs = 100'000;
// A ring has two windows of 8,192 tokens at most: contexts are three times that.
constexpr uint64_t kContextTokens = 3 * 2 * 8192;
constexpr uint32_t kChunkRows = 512;

struct Case {
  const char* name;
  uint32_t n_query;
  uint32_t n_sequences;
};

class ColdRun {
 public:
  ColdRun(uint64_t n_tokens, uint32_t n_sequences, uint32_t n_threads)
      : n_tokens_(n_tokens),
        tier_({.bytes_per_s = kTierBytesPerS, .latency_ns = kTierLatencyNs}),
        rig_(shape_, 1, n_threads,
             2 * n_tokens * shape_.token_bytes() * n_sequences + (uint64_t{512} << 20), &tier_) {
    for (uint32_t i = 0; i < n_sequences; ++i) {
      seqs_.push_back(rig_.create());
      rig_.fill(seqs_.back(), 0, n_tokens, i * 1000003);
      require(rig_.engine().send_away(seqs_.back()), "sending away");
    }
    while (rig_.engine().is_sending()) {
      turn();
    }
  }

  void run(const Case& of, uint32_t repeats, Report* report) {
    const std::vector<kvm_seq_id> seqs(seqs_.begin(), seqs_.begin() + of.n_sequences);
    const uint64_t rows = uint64_t{of.n_query} * of.n_sequences * shape_.n_q_heads;
    const Memory q(rows * shape_.head_dim * 2);
    const Memory o(rows * shape_.head_dim * 4);
    const Memory lse(rows * 4);
    fill_random_bf16(q.as<uint16_t>(), q.size_bytes() / 2, 7);
    const uint64_t n_pages = n_tokens_ / kPageTokens * of.n_sequences;
    const uint64_t bytes = n_pages * kPageTokens * shape_.token_bytes();
    std::vector<double> times;
    stalls_us_.clear();
    const uint64_t n_before = tier_.n_reads();
    for (uint32_t i = 0; i < repeats; ++i) {
      times.push_back(attend(rig_.attend(seqs, of.n_query, q, o, lse)));
    }
    const double reads = static_cast<double>(tier_.n_reads() - n_before);
    const double seconds = median(times);
    report->add({{"case", of.name},
                 {"tokens", n_tokens_},
                 {"sequences", of.n_sequences},
                 {"n_query", of.n_query},
                 {"ms", seconds * 1e3},
                 {"cold_gbps", static_cast<double>(bytes) / seconds * 1e-9},
                 {"fraction_of_tier",
                  static_cast<double>(bytes) / seconds / static_cast<double>(kTierBytesPerS)},
                 {"page_reads_per_page", reads / static_cast<double>(n_pages) / repeats},
                 {"dispatcher_stall_p99_us", percentile(stalls_us_, 0.99)},
                 {"dispatcher_stall_max_us", percentile(stalls_us_, 1)}});
  }

 private:
  // Drives the engine as kvmd does; a driver that has nothing to do leaves its core to others.
  void turn() {
    engine::Engine& engine = rig_.engine();
    if (!engine.work()) {
      engine.wait(1'000'000);
    }
    const uint64_t begin_ns = now_ns();
    engine.poll();
    stalls_us_.push_back(static_cast<double>(now_ns() - begin_ns) * 1e-3);
  }

  // Returns seconds.
  double attend(StepRequest step) {
    bool is_done = false;
    const double begin_s = now_s();
    rig_.engine().submit(rig_.client(), {}, std::move(step), [&](kvm::RequestResult&& result) {
      require(result.status, "attend");
      is_done = true;
    });
    while (!is_done) {
      turn();
    }
    return now_s() - begin_s;
  }

  const Shape shape_;
  const uint64_t n_tokens_;
  tiers::SimulatedTier tier_;
  Rig rig_;
  std::vector<kvm_seq_id> seqs_;
  std::vector<double> stalls_us_;
};

}  // namespace

int run_cold(const Options& options) {
  Report report("cold", options);
  const uint64_t n_tokens = options.quick ? 8192 : kContextTokens;
  const uint32_t n_sequences = options.quick ? 2 : 4;
  ColdRun run(n_tokens, n_sequences, thread_count(options));
  run.run({"decode", 1, 1}, options.repeats, &report);
  run.run({"decode", 1, n_sequences}, options.repeats, &report);
  run.run({"chunk", options.quick ? 32 : kChunkRows, 1}, options.quick ? 1 : 3, &report);
  return report.finish();
}

}  // namespace kvm::bench
