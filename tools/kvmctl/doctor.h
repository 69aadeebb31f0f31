// SPDX-License-Identifier: Apache-2.0
// kvmctl doctor says what this machine offers to kvm, what kvmd falls back to where something is
// missing, and what the fallback costs. Reads /proc, /sys and limits; changes nothing.
#ifndef KVM_TOOLS_KVMCTL_DOCTOR_H_
#define KVM_TOOLS_KVMCTL_DOCTOR_H_

#include <string>
#include <vector>

#include "kvm.h"

namespace kvm::tools {

enum class Verdict { kGood, kFallback, kProblem };

struct Finding {
  std::string subject;
  Verdict verdict = Verdict::kGood;
  std::string found;
  std::string consequence;  // empty when good
};

// DaemonFacts are what is known of the daemon.
struct DaemonFacts {
  const kvm_client_info* info = nullptr;  // null: no daemon answers
  std::string why_none;                   // with null: the reason
  std::string metrics;                    // as kvm_get_stats_text gives them; "" where it does not
};

// Limits are those of kvmd where /proc shows it, and else of this process; the finding says which.
std::vector<Finding> examine(const DaemonFacts& facts);

const char* verdict_name(Verdict verdict);

}  // namespace kvm::tools

#endif  // KVM_TOOLS_KVMCTL_DOCTOR_H_
