// SPDX-License-Identifier: Apache-2.0
#include "tools/kvmctl/audit.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <map>
#include <utility>

namespace kvm::tools {
namespace {

// Name with labels -> value, as the lines stand.
using Series = std::map<std::string, double, std::less<>>;

struct Bucket {
  double bound = 0;
  double below = 0;  // rows up to it
};

Series read_series(std::string_view text) {
  Series series;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const size_t space = line.rfind(' ');
    if (line.starts_with("kvm_audit_") && space != std::string_view::npos) {
      series.emplace(line.substr(0, space),
                     std::strtod(std::string(line.substr(space + 1)).c_str(), nullptr));
    }
  }
  return series;
}

double value_of(const Series& series, const std::string& name) {
  const auto found = series.find(name);
  return found == series.end() ? 0 : found->second;
}

uint64_t count_of(const Series& series, const std::string& name) {
  // Any text may stand there: what is no count is taken as the nearest one.
  constexpr double kMost = 0x1p63;
  const double value = value_of(series, name);
  return value > 0 ? static_cast<uint64_t>(std::min(value, kMost)) : 0;
}

// In the order of their bounds.
std::vector<Bucket> read_buckets(const Series& series, const std::string& labels) {
  const std::string prefix = fmt::format("kvm_audit_error_bucket{{{},le=\"", labels);
  std::map<double, double> sorted;
  for (auto it = series.lower_bound(prefix); it != series.end() && it->first.starts_with(prefix);
       ++it) {
    const std::string text = it->first.substr(prefix.size());
    const double bound = text.starts_with('+') ? std::numeric_limits<double>::infinity()
                                               : std::strtod(text.c_str(), nullptr);
    if (!std::isnan(bound)) {  // which has no place in an order
      sorted[bound] = it->second;
    }
  }
  std::vector<Bucket> buckets;
  for (const auto& [bound, below] : sorted) {
    buckets.push_back({bound, below});
  }
  return buckets;
}

// Between the bounds of a bucket errors count as spread evenly over the logarithm.
double quantile(const std::vector<Bucket>& buckets, double share) {
  const double rank = share * (buckets.empty() ? 0 : buckets.back().below);
  Bucket before;
  for (const Bucket& bucket : buckets) {
    if (bucket.below >= rank && bucket.below > before.below) {
      const double part = (rank - before.below) / (bucket.below - before.below);
      if (std::isinf(bucket.bound)) {
        return before.bound;  // at least
      }
      return before.bound == 0 ? bucket.bound * part
                               : before.bound * std::pow(bucket.bound / before.bound, part);
    }
    before = bucket;
  }
  return before.bound;
}

ErrorSummary read_errors(const Series& series, const std::string& labels) {
  ErrorSummary errors;
  const std::string braces = "{" + labels + "}";
  errors.n_rows = count_of(series, "kvm_audit_error_count" + braces);
  if (errors.n_rows != 0) {
    const std::vector<Bucket> buckets = read_buckets(series, labels);
    errors.mean =
        value_of(series, "kvm_audit_error_sum" + braces) / static_cast<double>(errors.n_rows);
    errors.p95 = quantile(buckets, 0.95);
    errors.p99 = quantile(buckets, 0.99);
  }
  return errors;
}

std::optional<double> share_of(double part, uint64_t whole) {
  return whole == 0 ? std::nullopt : std::optional(part / static_cast<double>(whole));
}

}  // namespace

std::optional<double> AuditedModeSummary::over_share() const {
  return share_of(static_cast<double>(n_over), estimated_error.n_rows);
}

std::optional<double> AuditedModeSummary::allowed_share() const {
  return share_of(allowed_over, estimated_error.n_rows);
}

std::optional<AuditSummary> summarize_audits(std::string_view text) {
  const Series series = read_series(text);
  if (!series.contains("kvm_audit_every")) {
    return std::nullopt;
  }
  AuditSummary summary;
  summary.every = count_of(series, "kvm_audit_every");
  summary.n_busy = count_of(series, "kvm_audit_skipped_total{reason=\"busy\"}");
  summary.n_given_up = count_of(series, "kvm_audit_skipped_total{reason=\"given_up\"}");
  summary.n_unfit = count_of(series, "kvm_audit_skipped_total{reason=\"unfit\"}");
  for (const char* name : {"topk", "sampled", "verified"}) {
    const std::string label = fmt::format("mode=\"{}\"", name);
    const std::string braces = "{" + label + "}";
    AuditedModeSummary mode;
    mode.mode = name;
    mode.n_answers = count_of(series, "kvm_audit_answers_total" + braces);
    mode.true_error = read_errors(series, label + ",kind=\"true\"");
    mode.estimated_error = read_errors(series, label + ",kind=\"estimated\"");
    mode.n_over = count_of(series, "kvm_audit_over_rows_total" + braces);
    mode.allowed_over = value_of(series, "kvm_audit_allowed_over_rows_total" + braces);
    summary.modes.push_back(std::move(mode));
  }
  return summary;
}

}  // namespace kvm::tools
