// SPDX-License-Identifier: Apache-2.0
// The policy of layers that decoding skips (Unified Layer Skipping, arXiv 2404.06954): what the
// prompt left there is of no use once the prompt is over.
#ifndef KVM_POLICIES_PROMPT_H_
#define KVM_POLICIES_PROMPT_H_

#include "policies/policy.h"

namespace kvm::policies {

// Keeps everything until the prompt is committed; then drops the full pages, and those of what
// comes later.
const Policy& prompt();

}  // namespace kvm::policies

#endif  // KVM_POLICIES_PROMPT_H_
