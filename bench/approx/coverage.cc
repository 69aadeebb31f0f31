// SPDX-License-Identifier: Apache-2.0
// coverage: how often answers are further off than they say. A row is one q head of one request (a
// query set of a kv head), a trial is a row with one seed. An answer that was exact is right.
//
//   verified   misses: errors above eps; bar misses: errors above the bar that was reported
//   sampled    with a budget of keys: bar misses alone
//
// A cell (data, what was asked for) fails where the mean over its trials exceeds delta by three
// standard errors, or where a row does so on its own: rows whose misses are above delta after the
// first seeds (one-sided, at 5 %) get kFreshSeeds others, and fail where those refute "at most
// delta", with Holm's correction (1979) over all rows that were tried again.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>

#include <fmt/format.h>

#include "attention/sampled/pilot.h"
#include "bench/approx/parallel.h"
#include "bench/approx/settings.h"
#include "bench/approx/tally.h"
#include "bench/harness.h"

namespace kvm::bench {
namespace {

using attention::ApproxMode;
using attention::ApproxParams;
using attention::HeadIndex;

constexpr uint32_t kBatch = 6;  // heads that are in memory at once
constexpr uint32_t kFreshSeeds = 5000;
constexpr double kSuspect = 0.05;     // risk of trying a row again for nothing
constexpr double kFamilyRisk = 0.01;  // of failing a run for nothing
constexpr double kMostErrors = 3;     // standard errors of the mean above delta

struct Asked {
  double eps = 0;  // 0: a budget alone
  uint64_t budget = 0;
  double delta = 0;

  bool is_verified() const { return eps > 0 && budget == 0; }
};

struct Misses {
  uint64_t of_eps = 0;
  uint64_t of_bar = 0;
};

struct Cell {
  uint64_t trials = 0;
  uint64_t fallbacks = 0;
  Misses misses;
  double worst_row = 0;      // largest share of a row's trials, of eps and bar
  double keys_fraction = 0;  // sum over problems
  uint64_t problems = 0;
  std::vector<double> errors;  // of sampled trials
};

// A row that was tried again.
struct Again {
  size_t cell = 0;
  std::string row;
  uint64_t misses = 0;  // of eps or bar, whichever are more
  double p_value = 1;
};

// P(X >= n) of a binomial.
double binomial_tail(uint64_t n, uint64_t trials, double chance) {
  if (n == 0) {
    return 1;
  }
  double sum = 0;
  for (uint64_t i = n; i <= trials; ++i) {
    const auto x = static_cast<double>(i);
    const auto all = static_cast<double>(trials);
    const double term =
        std::exp(std::lgamma(all + 1) - std::lgamma(x + 1) - std::lgamma(all - x + 1) +
                 x * std::log(chance) + (all - x) * std::log1p(-chance));
    sum += term;
    if (term < 1e-18 * sum) {
      break;
    }
  }
  return std::min(sum, 1.0);
}

class CoverageRun {
 public:
  CoverageRun(const Options& options, const std::string& data, uint32_t tokens)
      : options_(options), threads_(thread_count(options)), asked_(make_asked(options)) {
    spec_.name = data;
    spec_.tokens = tokens;
    spec_.sets = 4;
    n_seeds_ = options.seeds != 0 ? options.seeds : options.quick ? 20 : 200;
    n_heads_ = options.heads != 0 ? options.heads : options.quick ? 12 : is_fragile(data) ? 15 : 36;
    if (options.dim != 0) {
      spec_.dim = options.dim;
    } else if (is_fragile(data)) {
      spec_.dim = 64;
    }
    if (is_recorded(data)) {
      spec_.sets = 16;
      n_heads_ = std::min(options.heads != 0 ? options.heads : UINT32_MAX,
                          require(count_recorded_heads(data), "data"));
    }
    spec_.seed = options.data_seed;
    cells_.resize(asked_.size());
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
    judge_rows(report);
    for (size_t i = 0; i < asked_.size(); ++i) {
      add_row(report, asked_[i], cells_[i], done);
    }
  }

 private:
  static std::vector<Asked> make_asked(const Options& options) {
    std::vector<Asked> out;
    for (const double delta : {0.1, 0.01}) {
      for (const double eps : {0.03, 0.05, 0.10}) {
        if (!options.quick || eps == 0.05) {
          out.push_back({eps, 0, delta});
        }
      }
      for (const uint64_t budget : {200, 600}) {
        if (!options.quick || budget == 200) {
          out.push_back({0, budget, delta});
        }
      }
      out.push_back({0.03, 200, delta});
    }
    return out;
  }

  ApproxParams params_of(const Asked& asked, uint64_t seed) const {
    ApproxParams params;
    params.mode = asked.is_verified() ? ApproxMode::kVerified
                  : asked.eps > 0     ? ApproxMode::kBalanced
                                      : ApproxMode::kSampled;
    params.eps = static_cast<float>(asked.eps > 0 ? asked.eps : 0.03);
    params.budget = asked.budget;
    params.delta = static_cast<float>(asked.delta);
    params.seed = seed;
    return params;
  }

  void measure(const Case& c, const std::vector<HeadIndex>& indexes) {
    const uint32_t n_sets = c.data.heads[0].n_sets();
    const size_t n_problems = c.data.heads.size() * n_sets;
    parallel_for(threads_, n_problems * asked_.size(), [&](size_t i) {
      const auto h = static_cast<uint32_t>(i / asked_.size() / n_sets);
      const auto set = static_cast<uint32_t>(i / asked_.size() % n_sets);
      const size_t cell = i % asked_.size();
      const HeadData& head = c.data.heads[h];
      std::vector<Misses> rows(head.group);
      Cell sums;
      for (uint32_t seed = 0; seed < n_seeds_; ++seed) {
        count(c, h, set, asked_[cell], indexes[h], 1 + seed, &rows, &sums);
      }
      std::vector<Again> again = try_again(c, h, set, cell, indexes[h], rows);
      add(cell, rows, sums, std::move(again));
    });
  }

  // One seed of a problem.
  static void count_row(const Case& c, uint32_t h, uint32_t set, uint32_t g, const Asked& asked,
                        const Solved& solved, Misses* row, Cell* sums) {
    const HeadData& head = c.data.heads[h];
    sums->trials += 1;
    if (solved.planned_exact || solved.report.err_o[g] == 0) {
      sums->fallbacks += 1;
      return;
    }
    const double error =
        relative_error(solved.o.data() + size_t{g} * head.dim,
                       c.answers[h][set].o.data() + size_t{g} * head.dim, head.dim);
    sums->errors.push_back(error);
    const bool of_eps = asked.is_verified() && !(error <= asked.eps);
    const bool of_bar = !(error <= static_cast<double>(solved.report.err_o[g]));
    row->of_eps += of_eps ? 1 : 0;
    row->of_bar += of_bar ? 1 : 0;
  }

  void count(const Case& c, uint32_t h, uint32_t set, const Asked& asked, const HeadIndex& index,
             uint64_t seed, std::vector<Misses>* rows, Cell* sums) const {
    const HeadData& head = c.data.heads[h];
    const uint64_t own =
        seed * 1000003 + set + uint64_t{head.n_sets()} * (spec_.first_head + h) + 1;
    ApproxParams params = params_of(asked, own);
    // As of a long context: answers that are exact because it is short say nothing of bars.
    params.max_read_fraction = static_cast<float>(attention::max_read_fraction(
        params, make_problem(head, set, nullptr, nullptr), UINT64_MAX));
    const Solved solved = thread_solver().solve(head, set, index, params);
    sums->problems += 1;
    sums->keys_fraction += static_cast<double>(solved.report.keys_read) /
                           static_cast<double>(solved.report.keys_present);
    for (uint32_t g = 0; g < head.group; ++g) {
      count_row(c, h, set, g, asked, solved, &(*rows)[g], sums);
    }
  }

  // Fresh seeds for a problem with a row that may be at fault.
  std::vector<Again> try_again(const Case& c, uint32_t h, uint32_t set, size_t cell,
                               const HeadIndex& index, const std::vector<Misses>& rows) const {
    const double delta = asked_[cell].delta;
    const auto is_suspect = [&](const Misses& m) {
      return binomial_tail(std::max(m.of_eps, m.of_bar), n_seeds_, delta) < kSuspect;
    };
    std::vector<Again> out;
    if (options_.quick || std::none_of(rows.begin(), rows.end(), is_suspect)) {
      return out;
    }
    std::vector<Misses> fresh(rows.size());
    Cell sums;
    for (uint32_t seed = 0; seed < kFreshSeeds; ++seed) {
      count(c, h, set, asked_[cell], index, 1000000 + seed, &fresh, &sums);
    }
    for (size_t g = 0; g < rows.size(); ++g) {
      if (!is_suspect(rows[g])) {
        continue;
      }
      Again again;
      again.cell = cell;
      again.row = fmt::format("head {} ({}), query set {}, q head {}", spec_.first_head + h,
                              c.data.heads[h].type, set, g);
      again.misses = std::max(fresh[g].of_eps, fresh[g].of_bar);
      again.p_value = binomial_tail(again.misses, kFreshSeeds, delta);
      out.push_back(again);
    }
    return out;
  }

  void add(size_t cell, const std::vector<Misses>& rows, const Cell& sums,
           std::vector<Again> again) {
    const std::lock_guard lock(mutex_);
    Cell& to = cells_[cell];
    to.trials += sums.trials;
    to.fallbacks += sums.fallbacks;
    to.keys_fraction += sums.keys_fraction;
    to.problems += sums.problems;
    to.errors.insert(to.errors.end(), sums.errors.begin(), sums.errors.end());
    for (const Misses& row : rows) {
      to.misses.of_eps += row.of_eps;
      to.misses.of_bar += row.of_bar;
      to.worst_row =
          std::max(to.worst_row, static_cast<double>(std::max(row.of_eps, row.of_bar)) / n_seeds_);
    }
    again_.insert(again_.end(), again.begin(), again.end());
  }

  // Holm: the smallest p-value meets the risk over their number, the next over one less, ...
  void judge_rows(Report* report) {
    std::sort(again_.begin(), again_.end(),
              [](const Again& a, const Again& b) { return a.p_value < b.p_value; });
    rows_failed_.assign(asked_.size(), 0);
    for (size_t i = 0; i < again_.size(); ++i) {
      const Again& again = again_[i];
      if (again.p_value > kFamilyRisk / static_cast<double>(again_.size() - i)) {
        break;
      }
      const Asked& asked = asked_[again.cell];
      rows_failed_[again.cell] += 1;
      report->fail(fmt::format("{} {}: {}: {} of {} fresh seeds missed, where delta is {}", name_,
                               describe(asked), again.row, again.misses, kFreshSeeds, asked.delta));
    }
  }

  static std::string describe(const Asked& asked) {
    if (asked.is_verified()) {
      return fmt::format("verified eps {}", asked.eps);
    }
    return asked.eps > 0 ? fmt::format("sampled budget {} eps {}", asked.budget, asked.eps)
                         : fmt::format("sampled budget {}", asked.budget);
  }

  void add_row(Report* report, const Asked& asked, const Cell& cell, uint32_t heads) {
    const auto trials = static_cast<double>(cell.trials);
    const auto share = [](double part, double whole) { return whole > 0 ? part / whole : 0.0; };
    double sum = 0;
    for (const double error : cell.errors) {
      sum += error;
    }
    const double miss_rate = share(static_cast<double>(cell.misses.of_eps), trials);
    const double bar_miss_rate = share(static_cast<double>(cell.misses.of_bar), trials);
    // Rows of a group share their sample: as if each problem were one trial.
    const double allowed =
        asked.delta + kMostErrors * std::sqrt(asked.delta * (1 - asked.delta) /
                                              static_cast<double>(cell.problems));
    const size_t at = static_cast<size_t>(&cell - cells_.data());
    if (std::max(miss_rate, bar_miss_rate) > allowed) {
      report->fail(
          fmt::format("{} {} delta {}: {:.4f} of the errors exceed eps and {:.4f} the bar, "
                      "at most {:.4f} may",
                      name_, describe(asked), asked.delta, miss_rate, bar_miss_rate, allowed));
    }
    const auto tried_again = static_cast<uint64_t>(
        std::count_if(again_.begin(), again_.end(), [&](const Again& a) { return a.cell == at; }));
    report->add(
        {{"data", name_},
         {"tokens", tokens_},
         {"mode", asked.is_verified() ? "verified" : "sampled"},
         {"eps", asked.eps},
         {"budget", asked.budget},
         {"delta", asked.delta},
         {"trials", cell.trials},
         {"heads", heads},
         {"dim", spec_.dim},
         {"seeds", n_seeds_},
         {"miss_rate", miss_rate},
         {"bar_miss_rate", bar_miss_rate},
         {"worst_row", cell.worst_row},
         {"rows_again", tried_again},
         {"rows_failed", rows_failed_[at]},
         {"fallback_rate", share(static_cast<double>(cell.fallbacks), trials)},
         {"keys_read_fraction", share(cell.keys_fraction, static_cast<double>(cell.problems))},
         {"rel_error_mean", share(sum, static_cast<double>(cell.errors.size()))},
         {"rel_error_p99", percentile(cell.errors, 0.99)}});
  }

  const Options& options_;
  uint32_t threads_;
  DataSpec spec_;
  std::vector<Asked> asked_;
  uint32_t n_heads_ = 0;
  uint32_t n_seeds_ = 0;
  std::string name_;
  uint32_t tokens_ = 0;
  std::mutex mutex_;
  std::vector<Cell> cells_;
  std::vector<Again> again_;
  std::vector<uint64_t> rows_failed_;
};

}  // namespace

int run_coverage(const Options& options) {
  Report report("coverage", options);
  std::vector<std::string> all = {"model"};
  all.insert(all.end(), fragile_names().begin(), fragile_names().end());
  for (const std::string& data : chosen_data(options, all)) {
    const uint32_t tokens = is_fragile(data) ? 8192 : 131072;
    for (const uint32_t n : chosen_tokens(options, data, {tokens})) {
      CoverageRun(options, data, n).run(&report);
    }
  }
  report.note(
      "miss_rate, bar_miss_rate: of all trials, exact answers counted as right; worst_row: "
      "of the row with most; docs/performance.md says when a cell fails");
  return report.finish();
}

}  // namespace kvm::bench
