// SPDX-License-Identifier: Apache-2.0
// Where metrics may be served: a Unix socket or a port of the loopback interface, nowhere else.
//
// Threads: values.
#ifndef KVM_DAEMON_LISTEN_ADDRESS_H_
#define KVM_DAEMON_LISTEN_ADDRESS_H_

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "base/status.h"
#include "ipc/fd.h"

namespace kvm::daemon {

inline constexpr const char* kListenAddressAllowed =
    "off, unix:/PATH (at most 107 bytes), 127.0.0.1:PORT or [::1]:PORT";

struct ListenAddress {
  enum class Kind : uint8_t { kOff, kUnix, kTcp4, kTcp6 };
  Kind kind = Kind::kOff;
  std::string path;   // kUnix
  uint16_t port = 0;  // the others
};

// Fails: INVALID.
Result<ListenAddress> parse_listen_address(const std::string& text);

// A non-blocking listening stream socket; a Unix one gets the permission bits `mode`, and replaces
// a socket file that nobody listens on. REQUIRES: kind is not kOff.
// Fails: BUSY (somebody listens there), EXISTS (a file that is no socket), PERMISSION, LIMIT, IO.
Result<ipc::Fd> listen_for_streams(const ListenAddress& address, mode_t mode);

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_LISTEN_ADDRESS_H_
