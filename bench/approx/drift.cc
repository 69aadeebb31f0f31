// SPDX-License-Identifier: Apache-2.0
// drift: means and axes of keys and queries move over the last 32,768 tokens. An index that grew
// with them, its frames made before their keys were there, against one made at the end.
#include "bench/approx/parallel.h"
#include "bench/approx/settings.h"
#include "bench/approx/tally.h"

namespace kvm::bench {
namespace {

using attention::ApproxParams;

// The queries of the data lie in the last 4,096 steps.
void measure(const Case& c, const std::vector<attention::HeadIndex>& indexes, double budget,
             uint32_t threads, Tally* tally) {
  const uint32_t n_sets = c.data.heads[0].n_sets();
  parallel_for(threads, c.data.heads.size() * n_sets, [&](size_t i) {
    const auto h = static_cast<uint32_t>(i / n_sets);
    const auto set = static_cast<uint32_t>(i % n_sets);
    ApproxParams params;
    params.mode = attention::ApproxMode::kSampled;
    params.budget = static_cast<uint64_t>(budget * c.data.n_tokens);
    params.seed = 1 + i;
    const Solved solved = thread_solver().solve(c.data.heads[h], set, indexes[h], params);
    tally->add(c, h, set, solved.o.data(), solved.lse.data(), solved.report);
  });
}

void run_case(const Options& options, uint32_t tokens, Report* report) {
  const uint32_t threads = thread_count(options);
  DataSpec spec;
  spec.name = "drift";
  spec.tokens = tokens;
  spec.heads = 6;
  spec.sets = options.quick ? 4 : 16;
  Tally grown, fresh;
  const uint32_t n_heads = options.heads != 0 ? options.heads : options.quick ? 6 : 12;
  for (spec.first_head = 0; spec.first_head < n_heads; spec.first_head += spec.heads) {
    const Case c = make_case(spec, threads, false);
    SketchOptions own;
    const auto grown_index = build_sketches(c.data, own, threads);
    measure(c, indexes_of(grown_index), 0.01, threads, &grown);
    own.fresh = true;
    const auto fresh_index = build_sketches(c.data, own, threads);
    measure(c, indexes_of(fresh_index), 0.01, threads, &fresh);
  }
  report->add({{"data", "drift"},
               {"tokens", tokens},
               {"drift_tokens", std::min(32768u, tokens / 2)},
               {"budget", 0.01},
               {"queries", grown.n_rows()},
               {"rel_error_mean", grown.error_mean()},
               {"fresh_rel_error_mean", fresh.error_mean()},
               {"ratio", grown.error_mean() / fresh.error_mean()},
               {"keys_read_fraction", grown.keys_fraction()},
               {"fresh_keys_read_fraction", fresh.keys_fraction()}});
}

}  // namespace

int run_drift(const Options& options) {
  Report report("drift", options);
  for (const uint32_t tokens : chosen_tokens(options, "drift", {65536, 131072})) {
    run_case(options, tokens, &report);
  }
  return report.finish();
}

}  // namespace kvm::bench
