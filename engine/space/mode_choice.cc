// SPDX-License-Identifier: Apache-2.0
#include "engine/space/mode_choice.h"

#include <fmt/format.h>

#include <cmath>

#include "engine/space/refusal.h"

namespace kvm::engine {
namespace {

// Checks what the numbers of an approximate mode mean together. EXACT ignores them.
Status check_together(const ModeChoice& choice, const char* prefix) {
  if (choice.mode <= KVM_MODE_EXACT) {
    return Status::ok();
  }
  if (choice.proposal == KVM_PROPOSAL_GRAPH) {
    return {
        KVM_ERR_UNSUPPORTED,
        fmt::format("{}proposal GRAPH is not offered by this service; SKETCH and LSH are", prefix),
        static_cast<uint32_t>(Refusal::kGraph)};
  }
  if (choice.mode == KVM_MODE_TOPK && choice.budget == 0) {
    return refuse(
        Refusal::kTopkBudget,
        "{0}budget is 0 with {0}mode TOPK; it must say of how many keys an answer is made", prefix);
  }
  if (choice.mode == KVM_MODE_VERIFIED && choice.proposal == KVM_PROPOSAL_LSH) {
    return refuse(Refusal::kVerifiedLsh,
                  "{0}proposal is LSH with {0}mode VERIFIED; it gives no error bar to verify: "
                  "SKETCH does",
                  prefix);
  }
  return Status::ok();
}

}  // namespace

Status check_choice(const ModeChoice& choice, const char* prefix) {
  if (choice.mode > KVM_MODE_AUTO) {
    return refuse(Refusal::kMode, "{}mode is {}; the largest known is {}", prefix, choice.mode,
                  uint32_t{KVM_MODE_AUTO});
  }
  if (choice.proposal > KVM_PROPOSAL_GRAPH) {
    return refuse(Refusal::kProposal, "{}proposal is {}; the largest known is {}", prefix,
                  choice.proposal, uint32_t{KVM_PROPOSAL_GRAPH});
  }
  if (!std::isfinite(choice.eps) || choice.eps < 0 || choice.eps >= 1) {
    return refuse(Refusal::kEps, "{}eps is {}; it must lie in (0, 1), or be 0 for the default",
                  prefix, choice.eps);
  }
  if (!std::isfinite(choice.delta) || choice.delta < 0 || choice.delta >= 1) {
    return refuse(Refusal::kDelta, "{}delta is {}; it must lie in (0, 1), or be 0 for the default",
                  prefix, choice.delta);
  }
  return check_together(choice, prefix);
}

}  // namespace kvm::engine
