// SPDX-License-Identifier: Apache-2.0
#include "daemon/prefix_memory.h"

#include <fcntl.h>
#include <string.h>

#include <cerrno>
#include <string>

namespace kvm::daemon {

Result<ipc::Fd> PrefixMemory::share(uint32_t uid) const {
  ipc::Fd fd(::fcntl(tables_.at(uid).fd.get(), F_DUPFD_CLOEXEC, 0));
  if (!fd.is_open()) {
    return Status(KVM_ERR_LIMIT, std::string("kvmd has no descriptor left: ") + ::strerror(errno));
  }
  return fd;
}

}  // namespace kvm::daemon
