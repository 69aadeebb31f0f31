// SPDX-License-Identifier: Apache-2.0
// kvm_merge: the merge of attention states in the caller's memory.
#ifndef KVM_CLIENT_MERGE_H_
#define KVM_CLIENT_MERGE_H_

#include "base/status.h"
#include "kvm.h"

namespace kvm::client {

// `params` in this library's form. Fails: INVALID; nothing is written then. Threads: any.
Status merge_states(const kvm_merge_params& params);

}  // namespace kvm::client

#endif  // KVM_CLIENT_MERGE_H_
