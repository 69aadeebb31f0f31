// SPDX-License-Identifier: Apache-2.0
#ifndef KVM_CLIENT_STATUS_NAME_H_
#define KVM_CLIENT_STATUS_NAME_H_

#include "kvm.h"

namespace kvm::client {

// As kvm_status_name.
const char* status_name(kvm_status status);

}  // namespace kvm::client

#endif  // KVM_CLIENT_STATUS_NAME_H_
