// SPDX-License-Identifier: Apache-2.0
#ifndef KVM_ENGINE_SPACE_MODE_CHOICE_H_
#define KVM_ENGINE_SPACE_MODE_CHOICE_H_

#include <cstdint>

#include "base/status.h"
#include "kvm.h"

namespace kvm::engine {

// A ModeChoice says which keys are read and how good the answer shall be: for a request, or for
// those of a space that do not say. Field meanings are those of kvm_step_params.
struct ModeChoice {
  uint32_t mode = KVM_MODE_EXACT;
  uint32_t proposal = KVM_PROPOSAL_DEFAULT;
  float eps = 0;
  float delta = 0;
  uint64_t budget = 0;

  bool operator==(const ModeChoice&) const = default;
};

// Checks a mode and its numbers, by themselves and together. prefix: of the fields in the sentence.
Status check_choice(const ModeChoice& choice, const char* prefix = "");

}  // namespace kvm::engine

#endif  // KVM_ENGINE_SPACE_MODE_CHOICE_H_
