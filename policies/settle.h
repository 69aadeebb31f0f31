// SPDX-License-Identifier: Apache-2.0
// The policy of lists whose codec needs whole pages: full pages that have been committed are stored
// as the list says, once.
#ifndef KVM_POLICIES_SETTLE_H_
#define KVM_POLICIES_SETTLE_H_

#include "policies/policy.h"

namespace kvm::policies {

// Demotes the pages from ListView::settled_end to the last full one that is committed.
const Policy& settle();

}  // namespace kvm::policies

#endif  // KVM_POLICIES_SETTLE_H_
