// SPDX-License-Identifier: Apache-2.0
// The sentence that kvm_last_error returns, and the library's log.
#ifndef KVM_CLIENT_LAST_ERROR_H_
#define KVM_CLIENT_LAST_ERROR_H_

#include <string_view>

#include "base/status.h"

namespace kvm::client {

// Keeps the sentence for this thread, cut to what fits. Threads: any.
void set_last_error(std::string_view sentence);
const char* last_error();

using LogCallback = void (*)(int level, const char* message, void* user);
// Threads: any.
void set_log_callback(LogCallback callback, void* user);
void log_message(int level, const char* message);

}  // namespace kvm::client

#endif  // KVM_CLIENT_LAST_ERROR_H_
