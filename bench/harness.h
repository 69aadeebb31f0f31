// SPDX-License-Identifier: Apache-2.0
// Every benchmark of kvm-bench shares this: options, medians, the table and the JSON lines.
//
// A benchmark measures the limit and the thing it judges in the same run, interleaved, and reports
// the ratio of medians. A ratio above kMaxFraction means that the ceiling was none: the run fails.
#ifndef KVM_BENCH_HARNESS_H_
#define KVM_BENCH_HARNESS_H_

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "bench/timing.h"
#include "engine/engine.h"

namespace kvm::bench {

inline constexpr double kMaxFraction = 1.02;

struct Options {
  std::string json_path;      // empty: no JSON
  uint32_t threads = 0;       // 0: one per core
  uint32_t repeats = 9;       // medians of this many; at least 7
  uint64_t memory_bytes = 0;  // that KV may take; 0: 70 % of what is free
  uint64_t max_tokens = 98304;
  std::string peer;                // "torch"
  std::string codec;               // of stored K and V; empty: all that a benchmark has
  std::vector<std::string> modes;  // of decode, error, death; empty: exact alone, all, all
  std::string policy;              // of policies: a preset; empty: what the bench has
  std::vector<std::string> codes;  // of error; empty: all
  // For the benches of approximate attention; empty or 0: what the bench takes by itself.
  std::vector<std::string> data;  // names of bench/approx/data.h, or .kvrec files
  std::vector<uint32_t> tokens;
  uint32_t heads = 0;       // kv heads, independent of each other
  uint32_t dim = 0;         // of coverage: of generated keys and values
  uint32_t seeds = 0;       // of coverage, for each request
  uint64_t data_seed = 1;   // of coverage: of what is generated
  double budget = 0;        // of decode: share of the keys that sampled and topk read; 0: found
  uint32_t observed = 0;    // query sets that the index may see
  uint32_t runs = 0;        // of death: kills; 0: what the bench takes by itself
  std::string directory;    // of those over a disk: where its files go; empty: here
  uint64_t size_bytes = 0;  // of disk: that are written; 0: what the bench takes by itself
  bool quick = false;       // small sizes: that it runs, and figures of no weight
};

// Rows of one benchmark: printed as an aligned table when it is done, written as JSON lines.
class Report {
 public:
  Report(std::string bench, const Options& options) : bench_(std::move(bench)), options_(options) {}
  // Fields in the order of printing. A "fraction" above kMaxFraction marks the run as failed, or
  // above what was set: against a rival there is no such bound.
  void add(std::vector<std::pair<std::string, nlohmann::json>> fields);
  void set_max_fraction(double fraction) { max_fraction_ = fraction; }
  void note(const std::string& text);
  // A note that makes the run fail.
  void fail(const std::string& text);
  // Columns that are written as JSON alone.
  void hide(std::vector<std::string> columns) { hidden_ = std::move(columns); }
  // Prints the table and appends the JSON lines. Returns the process's exit status.
  int finish();

 private:
  std::string bench_;
  Options options_;
  std::vector<nlohmann::ordered_json> rows_;
  std::vector<std::string> notes_;
  std::vector<std::string> hidden_;
  double max_fraction_ = kMaxFraction;
  bool failed_ = false;
};

// The memory that a bench may use: what was asked for, or most of what the machine has free.
uint64_t memory_budget_bytes(const Options& options);
// Likewise of threads: one for each core.
uint32_t thread_count(const Options& options);

// Ends the program with the sentence of an error.
void require(const Status& status, const char* what);
template <typename T>
T require(Result<T> result, const char* what) {
  require(result.status(), what);
  return std::move(result).value();
}

// Runs one request on an engine to its end; the calling thread helps.
template <typename Request>
kvm::RequestResult run(engine::Engine& engine, engine::ClientId client, Request&& request) {
  kvm::RequestResult out;
  bool done = false;
  engine.submit(client, {}, std::forward<Request>(request), [&](kvm::RequestResult&& result) {
    out = std::move(result);
    done = true;
  });
  while (!done) {
    if (!engine.work()) {
      engine.poll();
    }
  }
  return out;
}

// Fast pseudo-random bf16 values, 0.5 <= |x| < 2; distinct for every seed.
void fill_random_bf16(uint16_t* data, uint64_t count, uint64_t seed);

int run_exact(const Options& options);
int run_prefill(const Options& options);
int run_append(const Options& options);
int run_fork(const Options& options);
int run_moves(const Options& options);
int run_cold(const Options& options);
int run_cold_sampled(const Options& options);
int run_disk(const Options& options);
int run_disk_moves(const Options& options);
int run_overflow(const Options& options);
int run_resume(const Options& options);
int run_paused(const Options& options);
int run_recover(const Options& options);
int run_ipc(const Options& options);
int run_decode(const Options& options);
int run_policies(const Options& options);
int run_death(const Options& options);
int run_fairness(const Options& options);
int run_short(const Options& options);
int run_prefix(const Options& options);
int run_update(const Options& options);
int run_bridge(const Options& options);
// bench/approx
int run_error(const Options& options);
int run_coverage(const Options& options);
int run_sampled(const Options& options);
int run_magicpig(const Options& options);
int run_drift(const Options& options);
int run_scan(const Options& options);

}  // namespace kvm::bench

#endif  // KVM_BENCH_HARNESS_H_
