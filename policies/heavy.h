// SPDX-License-Identifier: Apache-2.0
// Keep the tokens that got most attention (heavy hitters: H2O, arXiv 2306.14048).
#ifndef KVM_POLICIES_HEAVY_H_
#define KVM_POLICIES_HEAVY_H_

#include "policies/policy.h"

namespace kvm::policies {

// For each list, of one head: the candidates are the tokens of the pages that sinks_recent would
// drop, and those that were kept of such pages before. The n_heavy with the largest mass stay,
// where mass is the sum of a token's column sums, those that queries of the service left and those
// of kvm_observe; of equal ones the earlier.
const Policy& heavy();

}  // namespace kvm::policies

#endif  // KVM_POLICIES_HEAVY_H_
