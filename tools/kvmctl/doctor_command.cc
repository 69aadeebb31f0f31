// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "tools/kvmctl/cli.h"
#include "tools/kvmctl/doctor.h"

namespace kvm::tools {
namespace {

int run_doctor(const Common& common) {
  kvm_client_info info{};
  info.struct_size = sizeof(info);
  kvm_client* client = nullptr;
  const kvm_status status = connect(common, &client);
  DaemonFacts facts;
  facts.why_none = status == KVM_OK ? "" : kvm_last_error();
  if (status == KVM_OK && kvm_client_get_info(client, &info) == KVM_OK) {
    facts.info = &info;
    facts.metrics = text_of(client, kvm_get_stats_text, "metrics");
  }
  kvm_client_close(client);
  const std::vector<Finding> findings = examine(facts);
  const bool has_problem = std::any_of(findings.begin(), findings.end(), [](const Finding& of) {
    return of.verdict == Verdict::kProblem;
  });
  const int exit_status = facts.info == nullptr ? kExitConnection
                          : has_problem         ? kExitCheck
                                                : kExitOk;
  if (common.json) {
    Json out = Json::array();
    for (const Finding& finding : findings) {
      out.push_back({{"subject", finding.subject},
                     {"verdict", verdict_name(finding.verdict)},
                     {"found", finding.found},
                     {"consequence", finding.consequence}});
    }
    print_json(out);
    return exit_status;
  }
  std::vector<std::vector<std::string>> rows;
  for (const Finding& finding : findings) {
    rows.push_back({finding.subject, verdict_name(finding.verdict), finding.found});
    if (!finding.consequence.empty()) {
      rows.push_back({"", "", "-> " + finding.consequence});
    }
  }
  print_table(rows);
  return exit_status;
}

}  // namespace

void add_doctor_command(Cli* cli) {
  cli->add("doctor", "what this machine offers to kvm, and what a fallback costs", run_doctor);
}

}  // namespace kvm::tools
