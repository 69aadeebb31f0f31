// SPDX-License-Identifier: Apache-2.0
#ifndef KVM_DAEMON_LOGGING_H_
#define KVM_DAEMON_LOGGING_H_

#include <string>

namespace kvm::daemon {

// Sends log messages of at least `level` (error, warning, info, debug) to the standard error
// stream: with priorities that journald understands when it reads them, with times otherwise.
void set_up_logging(const std::string& level);

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_LOGGING_H_
