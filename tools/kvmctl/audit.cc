// SPDX-License-Identifier: Apache-2.0
#include "tools/kvmctl/audit.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "tools/kvmctl/series.h"

namespace kvm::tools {
namespace {

ErrorSummary read_errors(const Series& series, const std::string& labels) {
  ErrorSummary errors;
  const std::string braces = "{" + labels + "}";
  errors.n_rows = count_of(series, "kvm_audit_error_count" + braces);
  if (errors.n_rows != 0) {
    const std::vector<Bucket> buckets =
        read_buckets(series, fmt::format("kvm_audit_error_bucket{{{},le=\"", labels));
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
  const Series series = read_series(text, "kvm_audit_");
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
