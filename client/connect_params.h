// SPDX-License-Identifier: Apache-2.0
// Reads a caller's kvm_connect_params.  Threads: any.
#ifndef KVM_CLIENT_CONNECT_PARAMS_H_
#define KVM_CLIENT_CONNECT_PARAMS_H_

#include "base/status.h"
#include "client/backend.h"
#include "kvm.h"

namespace kvm::client {

// Where and as whom to connect; NULL: what kvm.h says of NULL. Fails: INVALID.
Result<ConnectOptions> read_connect_params(const kvm_connect_params* params);

}  // namespace kvm::client

#endif  // KVM_CLIENT_CONNECT_PARAMS_H_
