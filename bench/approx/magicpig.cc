// SPDX-License-Identifier: Apache-2.0
// magicpig: MagicPIG's estimator as a mode of ours: its speed against exact steps, its error over
// several draws of the planes, and how often keys are candidates against the formula.
#include <cmath>
#include <mutex>

#include "bench/approx/parallel.h"
#include "bench/approx/timed.h"

namespace kvm::bench {
namespace {

using attention::ApproxMode;
using attention::ApproxParams;
using attention::Proposal;
using hash_index::LshParams;

ApproxParams make_params() {
  ApproxParams params;
  params.mode = ApproxMode::kSampled;
  params.proposal = Proposal::kLsh;
  params.seed = 1;
  return params;
}

struct Spread {
  double mean = 0;
  double standard_error = 0;
};

Spread spread_of(const std::vector<double>& x) {
  const auto n = static_cast<double>(x.size());
  double sum = 0, square = 0;
  for (const double value : x) {
    sum += value;
    square += value * value;
  }
  const double mean = sum / n;
  const double variance = n > 1 ? std::max(0.0, square - n * mean * mean) / (n - 1) : 0;
  return {mean, std::sqrt(variance / n)};
}

// Mean errors over fresh planes.
Spread error_over_seeds(TimedLayer* layer, LshParams params, uint32_t n_seeds) {
  std::vector<double> errors;
  for (uint32_t seed = 1; seed <= n_seeds; ++seed) {
    params.seed = seed;
    const auto tables = build_tables(layer->data().data, params, layer->threads());
    ApproxPass pass(layer->data().data, indexes_of(tables), make_params(), layer->team());
    Tally tally;
    layer->add_errors(&pass, &tally);
    errors.push_back(tally.error_mean());
  }
  return spread_of(errors);
}

// The first 64 keys of a head against its first query set: each pair's frequency over `n_seeds`
// draws of the planes, in standard deviations from its probability.
struct Frequencies {
  double within_3_sigma = 0;  // share of the pairs
  double z_rms = 0;           // 1 where the formula is right
};

Frequencies count_candidates(const HeadData& whole, LshParams params, uint32_t n_seeds,
                             uint32_t threads) {
  constexpr uint32_t kKeys = 64;
  HeadData head = whole;
  head.runs = whole.runs.subspan(1, 1);
  KvRun run = head.runs[0];
  run.position = 0;
  head.runs = head.kernel_runs = {&run, 1};
  head.q_position.assign(1, kKeys - 1);
  std::vector<uint32_t> counts(size_t{kKeys} * head.group);
  std::vector<double> expected(counts.size());
  std::mutex mutex;
  parallel_for(threads, n_seeds, [&](size_t seed) {
    LshParams own = params;
    own.seed = seed + 1;
    const LshTables tables(head, hash_index::make_planes(own, head.dim), own);
    const LshTables::Candidates found = tables.lookup(head, 0);
    const std::lock_guard lock(mutex);
    for (uint32_t g = 0; g < head.group; ++g) {
      for (size_t i = 0; i < found.ids[g].size(); ++i) {
        const size_t pair = g * kKeys + found.ids[g][i];
        counts[pair] += 1;
        expected[pair] = found.inclusion[g][i];
      }
    }
  });
  Frequencies out;
  double pairs = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    const double u = expected[i];
    // A normal approximation wants some hits and some misses.
    if (u * n_seeds < 10 || (1 - u) * n_seeds < 10) {
      continue;
    }
    const double z = (counts[i] - u * n_seeds) / std::sqrt(n_seeds * u * (1 - u));
    out.within_3_sigma += std::fabs(z) <= 3 ? 1 : 0;
    out.z_rms += z * z;
    pairs += 1;
  }
  out.within_3_sigma /= std::max(pairs, 1.0);
  out.z_rms = std::sqrt(out.z_rms / std::max(pairs, 1.0));
  return out;
}

void run_case(const Options& options, const std::string& data, uint32_t tokens, Report* report) {
  TimedLayer layer(options, data, tokens);
  for (const LshParams& params : lsh_choices(options.quick)) {
    const auto tables = build_tables(layer.data().data, params, layer.threads());
    std::vector<Rival> rivals;
    rivals.push_back(
        layer.make_rival("magicpig", lsh_name(params), make_params(), indexes_of(tables)));
    rivals[0].index_bytes_per_token = bytes_per_token(layer.data().data, tables);
    layer.time(&rivals);
    const uint32_t n_seeds = options.quick ? 3 : 20;
    const Spread error = error_over_seeds(&layer, params, n_seeds);
    const Frequencies frequencies = count_candidates(layer.data().data.heads[0], params,
                                                     options.quick ? 100 : 1000, layer.threads());
    layer.add_row(report, rivals[0],
                  {{"seeds", n_seeds},
                   {"error_over_seeds", error.mean},
                   {"standard_error", error.standard_error},
                   {"within_3_sigma", frequencies.within_3_sigma},
                   {"z_rms", frequencies.z_rms}});
  }
}

}  // namespace

int run_magicpig(const Options& options) {
  Report report("magicpig", options);
  for (const std::string& data : chosen_data(options, {"real", "diffuse"})) {
    for (const uint32_t tokens : chosen_tokens(options, data, {98304})) {
      run_case(options, data, tokens, &report);
    }
  }
  return report.finish();
}

}  // namespace kvm::bench
