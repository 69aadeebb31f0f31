// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/disk_system.h"

#include <fcntl.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include <cerrno>

#include "base/clock.h"

namespace kvm::tiers {
namespace {

Status refused(const std::string& path, const char* what, int error) {
  return Status(KVM_ERR_IO, path + ": " + what + " the directory: " + ::strerror(error));
}

}  // namespace

Status sync_directory(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) {
    return refused(path, "opening", errno);
  }
  const int error = ::fsync(fd) == 0 ? 0 : errno;
  ::close(fd);
  return error == 0 ? Status::ok() : refused(path, "syncing", error);
}

uint64_t random_id() {
  uint64_t id = 0;
  while (id == 0) {
    id = now_ns();  // where the system draws none
    (void)!::getrandom(&id, sizeof(id), 0);
  }
  return id;
}

}  // namespace kvm::tiers
