// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "tools/kvmctl/audit.h"
#include "tools/kvmctl/cli.h"

namespace kvm::tools {
namespace {

Json errors_json(const ErrorSummary& errors) {
  if (errors.n_rows == 0) {
    return {{"mean", nullptr}, {"p95", nullptr}, {"p99", nullptr}};
  }
  return {{"mean", errors.mean}, {"p95", errors.p95}, {"p99", errors.p99}};
}

Json share_json(const std::optional<double>& share) { return share ? Json(*share) : Json(); }

void print_audit_json(const AuditSummary& summary) {
  Json modes = Json::array();
  for (const AuditedModeSummary& mode : summary.modes) {
    modes.push_back({{"mode", mode.mode},
                     {"answers", mode.n_answers},
                     {"rows", mode.true_error.n_rows},
                     {"rows_with_bar", mode.estimated_error.n_rows},
                     {"true_error", errors_json(mode.true_error)},
                     {"estimated_error", errors_json(mode.estimated_error)},
                     {"rows_over", mode.n_over},
                     {"over_share", share_json(mode.over_share())},
                     {"allowed_share", share_json(mode.allowed_share())}});
  }
  print_json(
      {{"every", summary.every},
       {"skipped",
        {{"busy", summary.n_busy}, {"given_up", summary.n_given_up}, {"unfit", summary.n_unfit}}},
       {"modes", modes}});
}

void add_errors(const ErrorSummary& errors, std::vector<std::string>* row) {
  for (const double value : {errors.mean, errors.p95, errors.p99}) {
    row->push_back(errors.n_rows == 0 ? "-" : percent_text(value));
  }
}

int run_audit(const Common& common) {
  const Connection connection(common);
  const std::optional<AuditSummary> summary =
      summarize_audits(text_of(connection.get(), kvm_get_stats_text, "metrics"));
  if (!summary) {
    fail("this kvmd knows no audits", kExitService);
  }
  if (common.json) {
    print_audit_json(*summary);
    return kExitOk;
  }
  std::vector<std::vector<std::string>> rows = {{"MODE", "ANSWERS", "ROWS", "TRUE ERROR", "P95",
                                                 "P99", "ESTIMATED", "P95", "P99", "OVER",
                                                 "ALLOWED"}};
  for (const AuditedModeSummary& mode : summary->modes) {
    std::vector<std::string> row = {mode.mode, std::to_string(mode.n_answers),
                                    std::to_string(mode.true_error.n_rows)};
    add_errors(mode.true_error, &row);
    add_errors(mode.estimated_error, &row);
    for (const std::optional<double>& share : {mode.over_share(), mode.allowed_share()}) {
      row.push_back(share ? percent_text(*share) : "-");
    }
    rows.push_back(std::move(row));
  }
  print_table(rows);
  if (summary->every == 0) {
    fmt::print("Audits are off: kvmd's audit_every is 0.\n");
    return kExitOk;
  }
  fmt::print(
      "OVER is the share of rows whose true error exceeded the estimated one; it should be at most "
      "ALLOWED.\nOne of {} approximate answers is computed again. Skipped: {} that found the queue "
      "full, {} that made way to a request or whose client left, {} with log weights.\n",
      summary->every, summary->n_busy, summary->n_given_up, summary->n_unfit);
  return kExitOk;
}

}  // namespace

void add_audit_command(Cli* cli) {
  cli->add("audit", "true errors of approximate answers beside the estimated ones", run_audit);
}

}  // namespace kvm::tools
