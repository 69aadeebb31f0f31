// SPDX-License-Identifier: Apache-2.0
// Recognises the child of a fork without a system call per check.
#ifndef KVM_CLIENT_PROCESS_TOKEN_H_
#define KVM_CLIENT_PROCESS_TOKEN_H_

#include <cstdint>

namespace kvm::client {

// A number that is the same for the whole life of this process, and another in every child. Handles
// keep it; a handle whose number is not the present one was inherited. Threads: any.
uint64_t process_token();

}  // namespace kvm::client

#endif  // KVM_CLIENT_PROCESS_TOKEN_H_
