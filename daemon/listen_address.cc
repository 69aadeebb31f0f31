// SPDX-License-Identifier: Apache-2.0
#include "daemon/listen_address.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <string_view>

#include "base/limits.h"
#include "daemon/values.h"
#include "ipc/socket.h"

namespace kvm::daemon {
namespace {

constexpr int kBacklog = 16;

std::optional<uint16_t> parse_port(std::string_view text) {
  const std::optional<uint64_t> number = parse_integer(text);
  return number && *number >= 1 && *number <= 65535 ? std::optional(static_cast<uint16_t>(*number))
                                                    : std::nullopt;
}

Status listen_error(uint16_t port) {
  const kvm_status code = errno == EADDRINUSE ? KVM_ERR_BUSY
                          : errno == EACCES   ? KVM_ERR_PERMISSION
                                              : KVM_ERR_IO;
  return Status(
      code, fmt::format("cannot listen at port {} for metrics: {}", port, std::strerror(errno)));
}

Result<ipc::Fd> listen_at_loopback(const ListenAddress& address) {
  const bool is_v4 = address.kind == ListenAddress::Kind::kTcp4;
  ipc::Fd fd(::socket(is_v4 ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_port = htons(address.port);
  v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(address.port);
  v6.sin6_addr = in6addr_loopback;
  const auto* to =
      is_v4 ? reinterpret_cast<const sockaddr*>(&v4) : reinterpret_cast<const sockaddr*>(&v6);
  const int on = 1;
  if (!fd.is_open() || ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
      ::bind(fd.get(), to, is_v4 ? sizeof(v4) : sizeof(v6)) != 0 ||
      ::listen(fd.get(), kBacklog) != 0) {
    return listen_error(address.port);
  }
  return fd;
}

}  // namespace

Result<ListenAddress> parse_listen_address(const std::string& text) {
  ListenAddress address;
  if (text == "off") {
    return address;
  }
  const auto refuse = [&] {
    return Status(KVM_ERR_INVALID, fmt::format("'{}' is no address for metrics; allowed are {}",
                                               text, kListenAddressAllowed));
  };
  if (text.starts_with("unix:")) {
    address.kind = ListenAddress::Kind::kUnix;
    address.path = text.substr(std::strlen("unix:"));
    if (!address.path.starts_with('/') || address.path.size() > kMaxSocketPathBytes) {
      return refuse();
    }
    return address;
  }
  const std::string_view v4 = "127.0.0.1:";
  const std::string_view v6 = "[::1]:";
  if (!text.starts_with(v4) && !text.starts_with(v6)) {
    return refuse();
  }
  address.kind = text.starts_with(v4) ? ListenAddress::Kind::kTcp4 : ListenAddress::Kind::kTcp6;
  const std::optional<uint16_t> port =
      parse_port(std::string_view(text).substr(text.starts_with(v4) ? v4.size() : v6.size()));
  if (!port) {
    return refuse();
  }
  address.port = *port;
  return address;
}

Result<ipc::Fd> listen_for_streams(const ListenAddress& address, mode_t mode) {
  return address.kind == ListenAddress::Kind::kUnix
             ? ipc::listen_at(address.path, mode, SOCK_STREAM)
             : listen_at_loopback(address);
}

}  // namespace kvm::daemon
