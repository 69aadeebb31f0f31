// SPDX-License-Identifier: Apache-2.0
#include "base/assert.h"
#include "tests/fuzz/targets.h"
#include "tools/kvmctl/audit.h"

namespace kvm::testing {

void run_stats_text(std::span<const uint8_t> input) {
  const std::string_view text(reinterpret_cast<const char*>(input.data()), input.size());
  const auto summary = tools::summarize_audits(text);
  if (!summary.has_value()) {
    return;
  }
  KVM_ASSERT(summary->modes.size() < 64);
  for (const tools::AuditedModeSummary& mode : summary->modes) {
    (void)mode.over_share();
    (void)mode.allowed_share();
  }
}

}  // namespace kvm::testing
