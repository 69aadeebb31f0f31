// SPDX-License-Identifier: Apache-2.0
#include "client/connect_params.h"

#include <string.h>

#include <cstdio>
#include <iterator>
#include <string>

#include "base/limits.h"
#include "client/checks.h"
#include "ipc/socket.h"
#include "ipc/struct_size.h"

namespace kvm::client {

namespace {

constexpr uint64_t kDefaultTimeoutNs = 5'000'000'000;

std::string process_name() {
  std::string name;
  if (FILE* file = std::fopen("/proc/self/comm", "re"); file != nullptr) {
    char buffer[64] = "";
    if (std::fgets(buffer, sizeof(buffer), file) != nullptr) {
      name.assign(buffer, ::strcspn(buffer, "\n"));
    }
    std::fclose(file);
  }
  return name;
}

}  // namespace

Result<ConnectOptions> read_connect_params(const kvm_connect_params* params) {
  kvm_connect_params p;
  KVM_TRY(ipc::read_params(params, &p, "kvm_connect_params"));
  KVM_TRY(check_flags(p.flags, 0, "kvm_connect_params"));
  KVM_TRY(check_reserved(p.reserved, std::size(p.reserved), "kvm_connect_params"));
  ConnectOptions options;
  options.socket_path = p.socket_path != nullptr ? p.socket_path : ipc::find_socket_path();
  options.client_name = p.client_name != nullptr ? p.client_name : process_name();
  if (options.client_name.size() > kMaxNameBytes) {
    return Status(KVM_ERR_INVALID, "client_name has " + std::to_string(options.client_name.size()) +
                                       " bytes; at most " + std::to_string(kMaxNameBytes));
  }
  options.timeout_ns = p.timeout_ns != 0 ? p.timeout_ns : kDefaultTimeoutNs;
  return options;
}

}  // namespace kvm::client
