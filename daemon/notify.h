// SPDX-License-Identifier: Apache-2.0
// Tells the service manager how kvmd is doing: datagrams to $NOTIFY_SOCKET, as sd_notify(3)
// documents. A few lines here instead of a dependency on libsystemd.
#ifndef KVM_DAEMON_NOTIFY_H_
#define KVM_DAEMON_NOTIFY_H_

#include <cstdint>
#include <string_view>

namespace kvm::daemon {

// Sends e.g. "READY=1". Does nothing without $NOTIFY_SOCKET; never blocks. Returns whether sent.
bool notify_service_manager(std::string_view state);

// After how long without "WATCHDOG=1" the service manager takes this process for hung
// ($WATCHDOG_USEC, $WATCHDOG_PID); 0: never.
uint64_t watchdog_timeout_ns();

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_NOTIFY_H_
