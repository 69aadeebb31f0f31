// SPDX-License-Identifier: Apache-2.0
// coverage: how often verified answers miss what was asked of them. A trial is one q head, one
// query and one seed; a trial that was answered exactly is a fallback and no evidence.
#include <atomic>
#include <cmath>
#include <mutex>

#include "bench/approx/parallel.h"
#include "bench/approx/settings.h"
#include "bench/approx/tally.h"
#include "bench/harness.h"

namespace kvm::bench {
namespace {

using attention::ApproxParams;
using attention::HeadIndex;

constexpr uint32_t kBatch = 6;  // heads that are in memory at once

struct Asked {
  double eps = 0;
  double delta = 0;
};

struct Counts {
  uint64_t trials = 0;
  uint64_t fallbacks = 0;
  uint64_t misses = 0;      // of those that were sampled: the error exceeds eps
  uint64_t bar_misses = 0;  // the error exceeds the bar that was reported
  double keys_fraction = 0;
  uint64_t problems = 0;
  std::vector<double> errors;  // of sampled trials
};

class CoverageRun {
 public:
  CoverageRun(const Options& options, const std::string& data, uint32_t tokens)
      : options_(options), threads_(thread_count(options)), asked_(make_asked(options)) {
    spec_.name = data;
    spec_.tokens = tokens;
    spec_.sets = 4;
    n_heads_ = options.heads != 0 ? options.heads : options.quick ? 12 : 204;
    if (is_recorded(data)) {
      spec_.sets = 16;
      n_heads_ = std::min(options.heads != 0 ? options.heads : UINT32_MAX,
                          require(count_recorded_heads(data), "data"));
    }
    counts_.resize(asked_.size());
  }

  void run(Report* report) {
    uint32_t done = 0;
    while (done < n_heads_) {
      spec_.first_head = done;
      spec_.heads = std::min(kBatch, n_heads_ - done);
      const Case c = make_case(spec_, threads_, false);
      const auto sketches = build_sketches(c.data, {{}, options_.observed}, threads_);
      name_ = c.data.name;
      tokens_ = std::max(tokens_, c.data.n_tokens);
      measure(c, indexes_of(sketches));
      done += static_cast<uint32_t>(c.data.heads.size());
    }
    for (size_t i = 0; i < asked_.size(); ++i) {
      add_row(report, asked_[i], counts_[i], done);
    }
  }

 private:
  static std::vector<Asked> make_asked(const Options& options) {
    std::vector<Asked> out;
    for (const double eps : {0.03, 0.05, 0.10}) {
      for (const double delta : {0.1, 0.01}) {
        if (!options.quick || eps == 0.05) {
          out.push_back({eps, delta});
        }
      }
    }
    return out;
  }

  // Of each query set, so that all heads together make the trials.
  uint32_t count_seeds(const HeadData& head) const {
    const uint64_t trials = options_.trials != 0 ? options_.trials : options_.quick ? 600 : 10000;
    const uint64_t for_seed = uint64_t{n_heads_} * head.n_sets() * head.group;
    return static_cast<uint32_t>((trials + for_seed - 1) / for_seed);
  }

  void measure(const Case& c, const std::vector<HeadIndex>& indexes) {
    const size_t n_heads = c.data.heads.size();
    const uint32_t n_sets = c.data.heads[0].n_sets();
    const uint32_t n_seeds = count_seeds(c.data.heads[0]);
    parallel_for(threads_, n_heads * n_sets, [&](size_t i) {
      const auto h = static_cast<uint32_t>(i / n_sets);
      const auto set = static_cast<uint32_t>(i % n_sets);
      Solver solver;
      for (size_t a = 0; a < asked_.size(); ++a) {
        for (uint32_t seed = 0; seed < n_seeds; ++seed) {
          ApproxParams params;
          params.mode = attention::ApproxMode::kVerified;
          params.eps = static_cast<float>(asked_[a].eps);
          params.delta = static_cast<float>(asked_[a].delta);
          params.seed = 1 + seed + n_seeds * (set + uint64_t{n_sets} * (spec_.first_head + h));
          count(c, h, set, asked_[a], solver.solve(c.data.heads[h], set, indexes[h], params),
                &counts_[a]);
        }
      }
    });
  }

  void count(const Case& c, uint32_t h, uint32_t set, const Asked& asked, const Solved& solved,
             Counts* counts) {
    const HeadData& head = c.data.heads[h];
    const attention::ApproxReport& report = solved.report;
    const std::lock_guard lock(mutex_);
    counts->problems += 1;
    counts->keys_fraction +=
        static_cast<double>(report.keys_read) / static_cast<double>(report.keys_present);
    for (uint32_t g = 0; g < head.group; ++g) {
      counts->trials += 1;
      // Exact rows carry no error of sampling.
      if (solved.planned_exact || report.err_o[g] == 0) {
        counts->fallbacks += 1;
        continue;
      }
      const double error =
          relative_error(solved.o.data() + size_t{g} * head.dim,
                         c.answers[h][set].o.data() + size_t{g} * head.dim, head.dim);
      counts->errors.push_back(error);
      counts->misses += error > asked.eps ? 1 : 0;
      counts->bar_misses += error > report.err_o[g] ? 1 : 0;
    }
  }

  void add_row(Report* report, const Asked& asked, const Counts& counts, uint32_t heads) const {
    const double sampled = static_cast<double>(counts.trials - counts.fallbacks);
    const auto share = [](double part, double whole) { return whole > 0 ? part / whole : 0.0; };
    double sum = 0;
    for (const double error : counts.errors) {
      sum += error;
    }
    report->add(
        {{"data", name_},
         {"tokens", tokens_},
         {"eps", asked.eps},
         {"delta", asked.delta},
         {"trials", counts.trials},
         {"heads", heads},
         {"miss_rate", share(static_cast<double>(counts.misses), sampled)},
         {"bar_miss_rate", share(static_cast<double>(counts.bar_misses), sampled)},
         {"fallback_rate",
          share(static_cast<double>(counts.fallbacks), static_cast<double>(counts.trials))},
         {"keys_read_fraction", share(counts.keys_fraction, static_cast<double>(counts.problems))},
         {"rel_error_mean", share(sum, sampled)},
         {"rel_error_p99", percentile(counts.errors, 0.99)}});
  }

  const Options& options_;
  uint32_t threads_;
  DataSpec spec_;
  std::vector<Asked> asked_;
  uint32_t n_heads_ = 0;
  std::string name_;
  uint32_t tokens_ = 0;
  std::mutex mutex_;
  std::vector<Counts> counts_;
};

}  // namespace

int run_coverage(const Options& options) {
  Report report("coverage", options);
  for (const std::string& data : chosen_data(options, {"model"})) {
    for (const uint32_t tokens : chosen_tokens(options, data, {131072})) {
      CoverageRun(options, data, tokens).run(&report);
    }
  }
  report.note("miss_rate and bar_miss_rate are of the trials that were not answered exactly");
  return report.finish();
}

}  // namespace kvm::bench
