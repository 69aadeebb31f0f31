// SPDX-License-Identifier: Apache-2.0
// error: how wrong each mode is, against the keys and bytes that it reads.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

#include "bench/approx/baselines.h"
#include "bench/approx/index.h"
#include "bench/approx/parallel.h"
#include "bench/approx/refined.h"
#include "bench/approx/settings.h"
#include "bench/approx/tally.h"
#include "bench/harness.h"

namespace kvm::bench {
namespace {

using attention::ApproxMode;
using attention::ApproxParams;
using attention::HeadIndex;
using attention::Proposal;

// Heads that are in memory at once.
constexpr uint32_t kBatch = 6;

struct Method {
  std::string mode;
  std::string code;   // what proposes: sketch kind, K and L, "oracle"
  double budget = 0;  // share of the keys, for each head; 0: none
  double eps = 0;
  std::string rows = "bf16";
};

bool operator<(const Method& a, const Method& b) {
  return std::tie(a.mode, a.code, a.budget, a.eps, a.rows) <
         std::tie(b.mode, b.code, b.budget, b.eps, b.rows);
}

// One kind of data at one length.
class ErrorRun {
 public:
  ErrorRun(const Options& options, const std::string& data, uint32_t tokens)
      : options_(options), threads_(thread_count(options)) {
    spec_.name = data;
    spec_.tokens = tokens;
    spec_.sets = options.quick ? 2 : 4;
    budgets_ = options.quick ? std::vector<double>{0.01, 0.02}
                             : std::vector<double>{0.0025, 0.005, 0.01, 0.02, 0.05, 0.1};
  }

  void run(Report* report) {
    uint32_t n_heads = options_.heads != 0 ? options_.heads : options_.quick ? 6 : 12;
    if (is_recorded(spec_.name)) {
      n_heads = std::min(n_heads, require(count_recorded_heads(spec_.name), "data"));
    }
    while (n_heads_ < n_heads) {
      spec_.first_head = n_heads_;
      spec_.heads = std::min(kBatch, n_heads - n_heads_);
      case_ = make_case(spec_, threads_, true);
      n_heads_ += static_cast<uint32_t>(case_.data.heads.size());
      measure_rivals();
      for (const SketchChoice& choice : sketch_choices()) {
        if (is_asked(options_.codes, choice.name)) {
          measure_sketches(choice, "bf16");
        }
      }
      measure_hashes();
      measure_int8();
      measure_refined();
    }
    for (const Method& method : order_) {
      add_row(report, method);
    }
  }

 private:
  using Solve = std::function<void(uint32_t head, uint32_t set, Tally* tally)>;

  // Says whether --mode or --code leaves a name in.
  static bool is_asked(const std::vector<std::string>& names, const std::string& name) {
    return names.empty() || std::find(names.begin(), names.end(), name) != names.end();
  }

  void measure(const Method& method, const Solve& solve) {
    if (!is_asked(options_.modes, method.mode) || !is_asked(options_.codes, method.code)) {
      return;
    }
    if (!tallies_.contains(method)) {
      order_.push_back(method);
    }
    Tally& tally = tallies_[method];
    const auto n_heads = static_cast<uint32_t>(case_.data.heads.size());
    const uint32_t n_sets = case_.data.heads[0].n_sets();
    parallel_for(threads_, size_t{n_heads} * n_sets, [&](size_t i) {
      solve(static_cast<uint32_t>(i / n_sets), static_cast<uint32_t>(i % n_sets), &tally);
    });
  }

  uint64_t rows(const Method& method, uint32_t head, uint32_t set) const {
    const auto n = static_cast<double>(case_.data.heads[head].n_visible(set));
    return std::max<uint64_t>(1, static_cast<uint64_t>(method.budget * n));
  }

  void measure_exact(const std::string& rows) {
    measure({"exact", "none", 0, 0, rows}, [&](uint32_t h, uint32_t set, Tally* tally) {
      const Solved solved = thread_solver().solve_exact(case_.data.heads[h], set);
      tally->add(case_, h, set, solved.o.data(), solved.lse.data(), solved.report);
    });
  }

  void measure_int8() {
    case_.data.use_int8_rows(threads_);
    measure_exact("int8");
    if (is_asked(options_.codes, sketch_choices()[0].name)) {
      measure_sketches(sketch_choices()[0], "int8");
    }
    case_.data.use_own_rows();
  }

  void measure_rivals() {
    measure_exact("bf16");
    std::vector<std::unique_ptr<PageBounds>> bounds(case_.data.heads.size());
    parallel_for(threads_, bounds.size(),
                 [&](size_t h) { bounds[h] = std::make_unique<PageBounds>(case_.data.heads[h]); });
    for (const double budget : budgets_) {
      Method method{"oracle_topk", "oracle", budget, 0};
      measure(method, [&](uint32_t h, uint32_t set, Tally* tally) {
        tally->add(case_, h, set,
                   oracle_top_k(case_.data.heads[h], case_.logits[h][set], rows(method, h, set)));
      });
      method = {"uniform_residual", "oracle", budget};
      measure(method, [&](uint32_t h, uint32_t set, Tally* tally) {
        tally->add(case_, h, set,
                   uniform_residual(case_.data.heads[h], case_.logits[h][set], rows(method, h, set),
                                    seed(h, set)));
      });
      method = {"page_bounds", "minmax16", budget};
      measure(method, [&](uint32_t h, uint32_t set, Tally* tally) {
        tally->add(case_, h, set,
                   page_bounds(case_.data.heads[h], case_.logits[h][set], *bounds[h], set,
                               rows(method, h, set)));
      });
    }
  }

  // A mode of the product. `indexes`: one for each head.
  void measure_mode(Method method, ApproxMode mode, Proposal proposal,
                    const std::vector<HeadIndex>& indexes) {
    measure(method, [&](uint32_t h, uint32_t set, Tally* tally) {
      ApproxParams params;
      params.mode = mode;
      params.proposal = proposal;
      params.budget = method.budget > 0 ? rows(method, h, set) : 0;
      params.eps = method.eps > 0 ? static_cast<float>(method.eps) : params.eps;
      params.delta = 0.1f;
      params.seed = seed(h, set);
      const Solved solved = thread_solver().solve(case_.data.heads[h], set, indexes[h], params);
      tally->add(case_, h, set, solved.o.data(), solved.lse.data(), solved.report);
    });
  }

  void measure_sketches(const SketchChoice& choice, const std::string& rows) {
    const std::vector<double> tolerances =
        options_.quick ? std::vector<double>{0.03} : std::vector<double>{0.03, 0.05, 0.06, 0.1};
    const std::string& code = choice.name;
    const auto sketches = build_sketches(case_.data, {choice.kind, options_.observed}, threads_);
    const std::vector<HeadIndex> indexes = indexes_of(sketches);
    const Proposal proposal = Proposal::kSketch;
    for (const double budget : budgets_) {
      measure_mode({"topk", code, budget, 0, rows}, ApproxMode::kTopK, proposal, indexes);
      measure_mode({"sampled", code, budget, 0, rows}, ApproxMode::kSampled, proposal, indexes);
    }
    for (const double eps : tolerances) {
      measure_mode({"sampled", code, 0, eps, rows}, ApproxMode::kSampled, proposal, indexes);
      measure_mode({"verified", code, 0, eps, rows}, ApproxMode::kVerified, proposal, indexes);
    }
  }

  void measure_hashes() {
    for (const hash_index::LshParams& params : lsh_choices(options_.quick)) {
      const std::string code = lsh_name(params);
      if (!is_asked(options_.codes, code)) {
        continue;
      }
      const auto tables = build_tables(case_.data, params, threads_);
      measure({"magicpig_fp64", code}, [&](uint32_t h, uint32_t set, Tally* tally) {
        tally->add(case_, h, set,
                   magicpig(case_.data.heads[h], case_.logits[h][set], *tables[h], set));
      });
      const std::vector<HeadIndex> indexes = indexes_of(tables);
      measure_mode({"magicpig", code}, ApproxMode::kSampled, Proposal::kLsh, indexes);
      measure_mode({"topk", code}, ApproxMode::kTopK, Proposal::kLsh, indexes);
    }
  }

  // Additions that the product does not have (refined.h). Only where a mode asks for them by name,
  // for they take as long as all the rest.
  void measure_refined() {
    const std::vector<std::string> modes = {"sampled_fp64", "refined_fp64", "means_fp64"};
    if (std::none_of(modes.begin(), modes.end(), [&](const std::string& mode) {
          return !options_.modes.empty() && is_asked(options_.modes, mode);
        })) {
      return;
    }
    const size_t n_heads = case_.data.heads.size();
    std::vector<std::unique_ptr<BlockMeans>> means(n_heads);
    parallel_for(threads_, n_heads,
                 [&](size_t h) { means[h] = std::make_unique<BlockMeans>(case_.data.heads[h]); });
    for (const SketchChoice& choice : sketch_choices()) {
      if (!choice.kind) {
        continue;
      }
      const auto sketches = build_sketches(case_.data, {choice.kind, options_.observed}, threads_);
      const bool coarsest = *choice.kind == hash_index::SketchKind::kBits1;
      for (const uint32_t bits :
           coarsest ? std::vector<uint32_t>{2, 4} : std::vector<uint32_t>{4}) {
        measure_refinement(choice.name, bits, sketches);
      }
      const auto proposed = propose_all([&](uint32_t h, uint32_t set) {
        return propose(case_.data.heads[h], set, case_.logits[h][set], *sketches[h], nullptr);
      });
      measure_draws("sampled_fp64", choice.name,
                    [&](uint32_t h, uint32_t set, uint64_t count, uint64_t draw) {
                      return sample(case_.data.heads[h], case_.logits[h][set], proposed[h][set],
                                    count, draw);
                    });
      measure_draws("means_fp64", choice.name,
                    [&](uint32_t h, uint32_t set, uint64_t count, uint64_t draw) {
                      return sample_with_means(case_.data.heads[h], case_.logits[h][set],
                                               proposed[h][set], *means[h], count, draw);
                    });
      if (coarsest && is_asked(options_.modes, "sampled_fp64")) {
        const auto ideal = propose_all([&](uint32_t h, uint32_t set) {
          return propose_ideally(case_.data.heads[h], set, case_.logits[h][set], *sketches[h]);
        });
        measure_draws(
            "sampled_fp64", "oracle", [&](uint32_t h, uint32_t set, uint64_t count, uint64_t draw) {
              return sample(case_.data.heads[h], case_.logits[h][set], ideal[h][set], count, draw);
            });
      }
    }
  }

  void measure_refinement(const std::string& coarse, uint32_t bits,
                          const std::vector<std::unique_ptr<Sketches>>& sketches) {
    if (!is_asked(options_.modes, "refined_fp64")) {
      return;
    }
    std::vector<std::unique_ptr<FineCodes>> codes(sketches.size());
    parallel_for(threads_, codes.size(), [&](size_t h) {
      codes[h] = std::make_unique<FineCodes>(case_.data.heads[h], *sketches[h], bits);
    });
    const auto proposed = propose_all([&](uint32_t h, uint32_t set) {
      return propose(case_.data.heads[h], set, case_.logits[h][set], *sketches[h], codes[h].get());
    });
    for (const uint32_t reach : {2u, 4u, 8u}) {
      measure_draws("refined_fp64", fmt::format("{}>{}b x{}", coarse, bits, reach),
                    [&](uint32_t h, uint32_t set, uint64_t count, uint64_t draw) {
                      return sample_refined(case_.data.heads[h], case_.logits[h][set],
                                            proposed[h][set], count, reach, draw);
                    });
    }
  }

  using Propose = std::function<Proposed(uint32_t head, uint32_t set)>;
  std::vector<std::vector<Proposed>> propose_all(const Propose& one) const {
    const uint32_t n_sets = case_.data.heads[0].n_sets();
    std::vector<std::vector<Proposed>> out(case_.data.heads.size(), std::vector<Proposed>(n_sets));
    parallel_for(threads_, out.size() * n_sets, [&](size_t i) {
      out[i / n_sets][i % n_sets] =
          one(static_cast<uint32_t>(i / n_sets), static_cast<uint32_t>(i % n_sets));
    });
    return out;
  }

  // Two draws of each query set, the same for all that are compared.
  using DrawOne =
      std::function<Estimate(uint32_t head, uint32_t set, uint64_t count, uint64_t seed)>;
  void measure_draws(const std::string& mode, const std::string& code, const DrawOne& draw) {
    for (const double budget : budgets_) {
      const Method method{mode, code, budget};
      measure(method, [&](uint32_t h, uint32_t set, Tally* tally) {
        for (uint64_t i = 0; i < 2; ++i) {
          tally->add(case_, h, set, draw(h, set, rows(method, h, set), 2 * seed(h, set) + i));
        }
      });
    }
  }

  uint64_t seed(uint32_t head, uint32_t set) const {
    return (spec_.first_head + head) * 1000003ull + set * 7919ull + spec_.seed;
  }

  void add_row(Report* report, const Method& method) {
    const Tally& tally = tallies_[method];
    report->add({{"data", case_.data.name},
                 {"mode", method.mode},
                 {"code", method.code},
                 {"rows", method.rows},
                 {"tokens", case_.data.n_tokens},
                 {"budget", method.budget},
                 {"eps", method.eps},
                 {"keys_read_fraction", tally.keys_fraction()},
                 {"bytes_fraction", tally.bytes_fraction()},
                 {"rel_error_mean", tally.error_mean()},
                 {"rel_error_p95", tally.error_percentile(0.95)},
                 {"rel_error_p99", tally.error_percentile(0.99)},
                 {"lse_error", tally.lse_error()},
                 {"heads", n_heads_},
                 {"queries", tally.n_rows()}});
  }

  const Options& options_;
  uint32_t threads_;
  DataSpec spec_;
  std::vector<double> budgets_;
  Case case_;
  uint32_t n_heads_ = 0;
  std::map<Method, Tally> tallies_;
  std::vector<Method> order_;
};

}  // namespace

int run_error(const Options& options) {
  Report report("error", options);
  for (const std::string& data : chosen_data(options, {"model", "real", "diffuse", "gauss"})) {
    for (const uint32_t tokens : chosen_tokens(options, data, {default_tokens(data)})) {
      ErrorRun(options, data, tokens).run(&report);
    }
  }
  return report.finish();
}

}  // namespace kvm::bench
