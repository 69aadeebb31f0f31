// SPDX-License-Identifier: Apache-2.0
#include "daemon/notify.h"

#include <stddef.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "daemon/values.h"
#include "ipc/fd.h"

namespace kvm::daemon {

bool notify_service_manager(std::string_view state) {
  const char* path = std::getenv("NOTIFY_SOCKET");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path == nullptr || (path[0] != '/' && path[0] != '@')) {
    return false;
  }
  const size_t length = std::strlen(path);
  if (length >= sizeof(address.sun_path)) {
    return false;
  }
  std::memcpy(address.sun_path, path, length);
  if (path[0] == '@') {
    address.sun_path[0] = '\0';  // An abstract address: its first byte is zero.
  }
  const ipc::Fd fd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length);
  return fd.is_open() && ::sendto(fd.get(), state.data(), state.size(), MSG_DONTWAIT | MSG_NOSIGNAL,
                                  reinterpret_cast<const sockaddr*>(&address), size) >= 0;
}

uint64_t watchdog_timeout_ns() {
  const char* microseconds = std::getenv("WATCHDOG_USEC");
  const char* pid = std::getenv("WATCHDOG_PID");
  if (microseconds == nullptr ||
      (pid != nullptr && parse_integer(pid) != static_cast<uint64_t>(::getpid()))) {
    return 0;
  }
  const uint64_t timeout_us = parse_integer(microseconds).value_or(0);
  return timeout_us < UINT64_MAX / 1000 ? timeout_us * 1000 : 0;
}

}  // namespace kvm::daemon
