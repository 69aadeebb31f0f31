// SPDX-License-Identifier: Apache-2.0
// Quotas (engine/store/quota.h) in the structures of kvm.h.
//
// Threads: pure functions.
#ifndef KVM_ENGINE_STORE_QUOTA_INFO_H_
#define KVM_ENGINE_STORE_QUOTA_INFO_H_

#include "engine/store/quota.h"
#include "kvm.h"

namespace kvm::engine {

kvm_client_entry client_entry(const ClientUsage& usage);
kvm_user_entry user_entry(const TenantUsage& usage);
// 0 leaves a limit as it is. Fails: INVALID (nothing is changed, reserved fields, whose).
Result<LimitChanges> limit_changes(const kvm_quota_params& params);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_QUOTA_INFO_H_
