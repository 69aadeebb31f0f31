// SPDX-License-Identifier: Apache-2.0
// Policies that go by position: keep everything; keep the first and the last tokens, and drop the
// others or fold them into one entry.
#ifndef KVM_POLICIES_SINKS_RECENT_H_
#define KVM_POLICIES_SINKS_RECENT_H_

#include "policies/policy.h"

namespace kvm::policies {

// Every token stays: asks for no events.
const Policy& full();

// A query at p sees positions < n_sinks and > p - n_recent. Drops the pages of which every token x
// has x >= n_sinks and x + n_recent + slack < n_committed: a query at n_committed - slack - 1 or
// later does not see them, the last committed token's own included.
const Policy& sinks_recent();

// Folds the pages that sinks_recent would drop. A query sees what is stored, and the folded entry
// for the rest.
const Policy& sinks_recent_fold();

}  // namespace kvm::policies

#endif  // KVM_POLICIES_SINKS_RECENT_H_
