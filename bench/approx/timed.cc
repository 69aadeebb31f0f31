// SPDX-License-Identifier: Apache-2.0
#include "bench/approx/timed.h"

#include <algorithm>
#include <cmath>

namespace kvm::bench {
namespace {

constexpr uint32_t kKvHeads = 8;

DataSpec make_spec(const Options& options, const std::string& data, uint32_t tokens) {
  DataSpec spec;
  spec.name = data;
  spec.tokens = tokens;
  spec.heads = kKvHeads;
  spec.sets = options.quick ? 2 : 6;
  return spec;
}

}  // namespace

TimedLayer::TimedLayer(const Options& options, const std::string& data, uint32_t tokens)
    : options_(options),
      team_(thread_count(options)),
      case_(make_case(make_spec(options, data, tokens), thread_count(options), false)),
      exact_(std::make_unique<ExactPass>(case_.data, team_)) {}

Rival TimedLayer::make_rival(std::string mode, std::string code,
                             const attention::ApproxParams& params,
                             const std::vector<attention::HeadIndex>& indexes) {
  Rival rival;
  rival.mode = std::move(mode);
  rival.code = std::move(code);
  rival.params = params;
  rival.budget = static_cast<double>(params.budget) / case_.data.n_tokens;
  rival.pass = std::make_unique<ApproxPass>(case_.data, indexes, params, team_);
  return rival;
}

void TimedLayer::add_errors(ApproxPass* pass, Tally* tally) {
  for (uint32_t set = 0; set < n_sets(); ++set) {
    pass->run(set);
    for (uint32_t h = 0; h < case_.data.heads.size(); ++h) {
      tally->add(case_, h, set, pass->o(h), pass->lse(h), pass->report(h));
    }
  }
}

double TimedLayer::find_budget(const attention::ApproxParams& params,
                               const std::vector<attention::HeadIndex>& indexes, double error) {
  double low = std::log(5e-4), high = std::log(0.25);
  for (int step = 0; step < 8; ++step) {
    const double middle = 0.5 * (low + high);
    attention::ApproxParams trial = params;
    trial.budget = static_cast<uint64_t>(std::exp(middle) * case_.data.n_tokens);
    ApproxPass pass(case_.data, indexes, trial, team_);
    Tally tally;
    add_errors(&pass, &tally);
    (tally.error_mean() <= error ? high : low) = middle;
  }
  return std::exp(high);
}

double TimedLayer::run_rival(Rival* rival, uint32_t set) {
  if (rival->rows == "int8") {
    case_.data.use_int8_rows(threads());
  }
  const double seconds =
      rival->pass != nullptr ? rival->pass->run(set) : rival->exact_pass->run(set);
  case_.data.use_own_rows();
  for (uint32_t h = 0; h < case_.data.heads.size(); ++h) {
    if (rival->pass != nullptr) {
      rival->tally->add(case_, h, set, rival->pass->o(h), rival->pass->lse(h),
                        rival->pass->report(h));
    } else {
      attention::ApproxReport report;
      report.keys_present = report.keys_read = case_.data.n_tokens;
      const uint64_t dim = case_.data.heads[h].dim;
      report.bytes_read = case_.data.n_tokens * (rival->rows == "int8" ? 2 * (dim + 2) : 4 * dim);
      rival->tally->add(case_, h, set, rival->exact_pass->o(h), nullptr, report);
    }
  }
  return seconds;
}

void TimedLayer::time(std::vector<Rival>* rivals) {
  for (Rival& rival : *rivals) {
    run_rival(&rival, 0);
    rival.tally = std::make_unique<Tally>();
  }
  for (uint32_t r = 0; r < options_.repeats; ++r) {
    for (Rival& rival : *rivals) {
      const uint32_t set = r % n_sets();
      rival.exact_seconds.push_back(exact_->run(set));
      rival.seconds.push_back(run_rival(&rival, set));
    }
  }
}

void TimedLayer::add_row(Report* report, const Rival& rival,
                         std::vector<std::pair<std::string, nlohmann::json>> more) const {
  const double seconds = median(rival.seconds);
  const double exact = median(rival.exact_seconds);
  std::vector<std::pair<std::string, nlohmann::json>> fields = {
      {"data", case_.data.name},
      {"tokens", case_.data.n_tokens},
      {"threads", team_.size()},
      {"mode", rival.mode},
      {"code", rival.code},
      {"rows", rival.rows},
      {"budget", rival.budget},
      {"ms", seconds * 1e3},
      {"exact_ms", exact * 1e3},
      {"speedup", exact / seconds},
      {"rel_error_mean", rival.tally->error_mean()},
      {"keys_read_fraction", rival.tally->keys_fraction()},
      {"bytes_fraction", rival.tally->bytes_fraction()},
      {"index_bytes_per_token", rival.index_bytes_per_token}};
  if (rival.pass != nullptr) {
    const PassTimes t = rival.pass->times();
    const double us = 1e6 / static_cast<double>(std::max<uint64_t>(t.n_heads, 1));
    fields.insert(fields.end(), {{"plan_us_per_head", t.plan * us},
                                 {"prepare_us_per_head", t.prepare * us},
                                 {"shards_us_per_head", t.shards * us},
                                 {"finish_us_per_head", t.finish * us}});
  }
  fields.insert(fields.end(), more.begin(), more.end());
  report->add(std::move(fields));
}

}  // namespace kvm::bench
