// SPDX-License-Identifier: Apache-2.0
#include "engine/attend/cost_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <new>
#include <system_error>

#include "base/limits.h"
#include "engine/attend/calibration.h"

namespace kvm::engine {
namespace {

// The rates are those of rows of so many bytes.
constexpr double kBf16Bytes = 512;
constexpr double kInt8Bytes = 260;
constexpr double kRows = 4;
constexpr double kDims = 256;
// A sample may have to grow, or end up exact: of the time that exact takes only this share is
// counted on.
constexpr double kShare = 0.5;
// A pilot reads so many rows, and a sample no fewer.
constexpr double kProbeRows = 64;
// A lookup reads two bytes of each of some tables for each key, and counts.
constexpr double kLookupBytes = 16;
// Candidates of one row; their K is read to score them. Two tables of 150 that agree in 10 bits:
// 2 to 4 % of the keys.
constexpr double kCandidates = 0.04;
constexpr double kMostCandidates = 0.25;
// Of pages that are away: the ring holds half of a shard's, and no shard has all too many more than
// the others.
constexpr double kMostDrawn = 0.4;

struct Rate {
  const char* name;
  double CostModel::*member;
};
constexpr Rate kRates[] = {{"exact_bf16", &CostModel::exact_bf16},
                           {"exact_int8", &CostModel::exact_int8},
                           {"scan", &CostModel::scan},
                           {"gather", &CostModel::gather},
                           {"start", &CostModel::start}};
constexpr double kMostNs = 1e9;
constexpr double kMostThreads = 1024;

// A number in [least, most]; nothing else.
std::optional<double> parse_number(std::string_view text, double least, double most) {
  const std::string copy(text);
  char* end = nullptr;
  const double value = std::strtod(copy.c_str(), &end);
  const bool whole = !copy.empty() && *end == '\0';
  return whole && value >= least && value <= most ? std::optional(value) : std::nullopt;
}

Status bad_part(std::string_view part) {
  std::string names;
  for (const Rate& rate : kRates) {
    names += std::string(rate.name) + ", ";
  }
  return {KVM_ERR_INVALID,
          fmt::format("cost_model has the part '{}'; it must be \"measure\", or NAME=NUMBER with "
                      "commas between: {}nanoseconds above 0 and up to {:.0f}, and threads, 1 to "
                      "{:.0f}",
                      part, names, kMostNs, kMostThreads)};
}

// Sets what one part says and its bit in *seen. False where it says nothing, or something twice.
bool apply_part(std::string_view part, CostModel* model, uint32_t* seen) {
  const size_t equals = part.find('=');
  if (equals == std::string_view::npos) {
    return false;
  }
  const std::string_view name = part.substr(0, equals);
  const std::string_view text = part.substr(equals + 1);
  uint32_t bit = 1u << std::size(kRates);
  if (name == "threads") {
    const std::optional<double> value = parse_number(text, 1, kMostThreads);
    model->threads = static_cast<uint32_t>(value.value_or(0));
  }
  bool is_known = name == "threads" && model->threads != 0;
  for (size_t i = 0; i < std::size(kRates); ++i) {
    if (name == kRates[i].name) {
      const std::optional<double> value = parse_number(text, 1e-6, kMostNs);
      model->*kRates[i].member = value.value_or(0);
      bit = 1u << i;
      is_known = value.has_value();
    }
  }
  const bool is_new = (*seen & bit) == 0;
  *seen |= bit;
  return is_known && is_new;
}

double stream_rate(const CostModel& model, const ProblemCost& problem) {  // ns a byte
  return problem.is_scaled ? model.exact_int8 / kInt8Bytes : model.exact_bf16 / kBf16Bytes;
}

// A key is computed with for each row, and rates are those of kRows.
double row_share(const ProblemCost& problem) { return std::max(1.0, problem.rows / kRows); }

double gather_ns(const CostModel& model, const ProblemCost& problem) {
  const double alone = std::max(model.gather - model.exact_bf16, 0.0);
  const double read = static_cast<double>(problem.row_bytes) * stream_rate(model, problem);
  return alone + read * row_share(problem);
}

// Without pages that are away.
double compute_ns(const CostModel& model, const ProblemCost& problem) {
  const double read = static_cast<double>(problem.n_present) *
                      static_cast<double>(problem.row_bytes) * row_share(problem);
  return std::max(static_cast<double>(problem.exact_bytes), read) * stream_rate(model, problem);
}

double fixed_ns(const CostModel& model, const ProblemCost& problem) {
  const double share = static_cast<double>(problem.n_present - problem.n_indexed) /
                       static_cast<double>(std::max<uint64_t>(problem.n_present, 1));
  return share * compute_ns(model, problem);
}

// Infinite where so many rows are not drawn from pages that are away.
double drawn_pages_ns(const ProblemCost& problem, double n_rows) {
  if (problem.n_pages_away == 0) {
    return 0;
  }
  const auto all = static_cast<double>(problem.n_pages_away);
  const double always =
      static_cast<double>(problem.n_present - problem.n_indexed) / double{kPageTokens};
  const double drawn = n_rows * problem.n_sharing;
  const double pages = always - all * std::expm1(-drawn / all);
  return pages > kMostDrawn * all ? std::numeric_limits<double>::infinity()
                                  : pages * problem.page_ns;
}

// Returns the share of the keys that hash tables are expected to propose for all rows together.
double candidate_share(const ProblemCost& problem) {
  return std::min(kCandidates * problem.rows, kMostCandidates);
}

// Rows beside those always read that fit into a time.
double rows_within(const CostModel& model, const ProblemCost& problem, double time_ns) {
  if (problem.n_pages_away != 0) {
    double fits = 0;
    double most = static_cast<double>(problem.n_indexed);
    for (int i = 0; i < 40; ++i) {
      const double middle = (fits + most) / 2;
      (approx_ns(model, problem, middle) <= time_ns ? fits : most) = middle;
    }
    return fits;
  }
  const double each = gather_ns(model, problem) * (problem.is_hashed ? 0.5 : 1.0);
  return std::max(0.0, (time_ns - approx_ns(model, problem, 0)) / each);
}

}  // namespace

Result<std::optional<CostModel>> parse_cost_model(std::string_view text) {
  if (text.empty() || text == "measure") {
    return std::optional<CostModel>();
  }
  CostModel model;
  uint32_t seen = 0;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view part = text.substr(begin, end - begin);
    if (!apply_part(part, &model, &seen)) {
      return bad_part(part);
    }
    begin = end + 1;
  }
  for (size_t i = 0; i < std::size(kRates); ++i) {
    if ((seen >> i & 1) == 0) {
      return Status(KVM_ERR_INVALID, fmt::format("cost_model lacks {}; all rates are given, or "
                                                 "none (\"measure\")",
                                                 kRates[i].name));
    }
  }
  return std::optional<CostModel>(model);
}

std::string format_cost_model(const CostModel& model) {
  std::string out;
  for (const Rate& rate : kRates) {
    out += fmt::format("{}{}={:.4g}", out.empty() ? "" : ",", rate.name, model.*rate.member);
  }
  return model.threads == 0 ? out : out + fmt::format(",threads={}", model.threads);
}

double exact_ns(const CostModel& model, const ProblemCost& problem) {
  return std::max(compute_ns(model, problem), problem.stream_ns);
}

double approx_ns(const CostModel& model, const ProblemCost& problem, double n_rows) {
  const double n = static_cast<double>(problem.n_indexed);
  const double always = model.start + fixed_ns(model, problem) + drawn_pages_ns(problem, n_rows);
  const double gather = gather_ns(model, problem);
  if (problem.is_hashed) {
    const double candidates = candidate_share(problem) * gather / 2;
    const double each = kLookupBytes * stream_rate(model, problem) + candidates;
    return always + n * each + n_rows * gather / 2;
  }
  const double work = row_share(problem) * problem.dim / kDims;
  return always + n * model.scan * work + n_rows * gather;
}

AutoChoice choose_for_error(const CostModel& model, const ProblemCost& problem) {
  AutoChoice choice;
  if (problem.is_hashed || problem.n_indexed == 0) {
    return choice;
  }
  const double time = kShare * exact_ns(model, problem);
  const double most = rows_within(model, problem, time);
  if (most < kProbeRows * problem.rows) {
    return choice;
  }
  choice.mode = AutoMode::kVerified;
  // Not 0, which would mean a default.
  const double fraction = most / static_cast<double>(problem.n_present);
  choice.max_read_fraction = static_cast<float>(std::clamp(fraction, 1e-6, 1.0));
  return choice;
}

AutoChoice choose_for_time(const CostModel& model, const ProblemCost& problem, double time_ns) {
  AutoChoice choice;
  const double exact = exact_ns(model, problem);
  const double rows = std::max<uint32_t>(problem.rows, 1);
  if (exact <= time_ns || problem.n_indexed == 0) {
    return choice;
  }
  const double fitting = rows_within(model, problem, time_ns) / rows;
  const double budget = std::max(std::floor(fitting), static_cast<double>(kLeastBudget));
  if (approx_ns(model, problem, budget * rows) >= exact) {
    return choice;
  }
  const bool has_all =
      budget * rows >= candidate_share(problem) * static_cast<double>(problem.n_indexed);
  choice.mode = problem.is_hashed && !has_all ? AutoMode::kTopK : AutoMode::kSampled;
  choice.budget = static_cast<uint64_t>(std::min(budget, static_cast<double>(problem.n_indexed)));
  return choice;
}

Costs::~Costs() {
  if (measuring_.joinable()) {
    measuring_.join();
  }
}

void Costs::prepare() {
  if (pinned_ || measuring_.joinable()) {
    return;
  }
  try {
    measuring_ = std::thread([n = n_threads_] {
      try {
        (void)measured_costs(n);
      } catch (const std::bad_alloc&) {
        // As below.
      }
    });
  } catch (const std::system_error&) {
    // The first request that needs the model measures.
  }
}

std::string Costs::text() const {
  const CostModel* model = pinned_ ? &*pinned_ : find_measured_costs(n_threads_);
  return model == nullptr ? "" : format_cost_model(*model);
}

const CostModel& Costs::model() const { return pinned_ ? *pinned_ : measured_costs(n_threads_); }

}  // namespace kvm::engine
