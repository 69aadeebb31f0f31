// SPDX-License-Identifier: Apache-2.0
// kvmctl audit shows the audits of approximate answers, out of the service's metrics.
#ifndef KVM_TOOLS_KVMCTL_AUDIT_H_
#define KVM_TOOLS_KVMCTL_AUDIT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvm::tools {

// An ErrorSummary is of relative errors of o. Quantiles are of buckets a factor of 1.4 to 2 wide,
// between whose bounds they are interpolated.
struct ErrorSummary {
  uint64_t n_rows = 0;
  double mean = 0;
  double p95 = 0;
  double p99 = 0;
};

struct AuditedModeSummary {
  std::string mode;
  uint64_t n_answers = 0;
  ErrorSummary true_error;
  ErrorSummary estimated_error;  // of rows with an error bar
  uint64_t n_over = 0;           // of them, true above estimated
  double allowed_over = 0;       // of them, by what was asked for

  // Shares of the rows with a bar; nothing where there are none.
  std::optional<double> over_share() const;
  std::optional<double> allowed_share() const;
};

struct AuditSummary {
  uint64_t every = 0;  // 0: audits are off
  uint64_t n_busy = 0;
  uint64_t n_given_up = 0;
  uint64_t n_unfit = 0;
  std::vector<AuditedModeSummary> modes;
};

// Reads Prometheus' text as kvm_get_stats_text gives it. Nothing where it has no audits.
std::optional<AuditSummary> summarize_audits(std::string_view text);

}  // namespace kvm::tools

#endif  // KVM_TOOLS_KVMCTL_AUDIT_H_
