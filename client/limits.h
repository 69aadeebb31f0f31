// SPDX-License-Identifier: Apache-2.0
#ifndef KVM_CLIENT_LIMITS_H_
#define KVM_CLIENT_LIMITS_H_

#include "kvm.h"

namespace kvm::client {

// The limits of ipc/wire.h, which hold for an engine in this process as well.
void fill_limits(kvm_client_info* info);

}  // namespace kvm::client

#endif  // KVM_CLIENT_LIMITS_H_
