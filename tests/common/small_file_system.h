// SPDX-License-Identifier: Apache-2.0
// A file system of a test's own, with an end that can be reached. Only the thread that made it, and
// those that it starts, see it: it is mounted in a mount namespace of theirs, over a temporary
// directory. That takes the right to mount (CAP_SYS_ADMIN).
#ifndef KVM_TESTS_COMMON_SMALL_FILE_SYSTEM_H_
#define KVM_TESTS_COMMON_SMALL_FILE_SYSTEM_H_

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "tests/common/temporary_directory.h"

namespace kvm::testing {

class SmallFileSystem {
 public:
  // Of a type that needs no device: "tmpfs", "ramfs".
  SmallFileSystem(const char* type, const char* options) {
    if (is_apart() && ::mount("kvm-test", path().c_str(), type, 0, options) != 0) {
      refusal_ = std::string("mounting ") + type + ": " + std::strerror(errno);
    }
  }
  // Made by `make`, a program, in a file of this size, and mounted from it.
  SmallFileSystem(const char* make, uint64_t size_bytes) {
    const std::string image = directory_ / "image";
    const std::string folder = directory_ / "root";
    const std::string script = std::string(make) + " -q " + image + " && mkdir " + folder +
                               " && mount -o loop " + image + " " + folder;
    if (!is_apart()) {
      return;
    }
    const int fd = ::open(image.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    const bool has_image = fd >= 0 && ::ftruncate(fd, static_cast<off_t>(size_bytes)) == 0;
    ::close(fd);
    if (!has_image || std::system((script + " 2>/dev/null").c_str()) != 0) {
      refusal_ = std::string(make) + ", or a loop device for what it makes, is not to be had";
      return;
    }
    path_ = folder;
  }
  ~SmallFileSystem() {
    if (refusal_.empty()) {
      ::umount2(path().c_str(), MNT_DETACH);
    }
  }
  SmallFileSystem(const SmallFileSystem&) = delete;
  SmallFileSystem& operator=(const SmallFileSystem&) = delete;

  // Why there is none; empty: there is one.
  const std::string& refusal() const { return refusal_; }
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  bool is_apart() {
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) {
      refusal_ = std::string("a mount namespace: ") + std::strerror(errno);
    }
    return refusal_.empty();
  }

  const TemporaryDirectory directory_;
  std::string path_ = directory_.path();
  std::string refusal_;
};

// A file that takes so much of the disk. Returns whether there was room.
inline bool put_aside(const std::string& path, uint64_t size_bytes) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  const bool is_ok = fd >= 0 && ::posix_fallocate(fd, 0, static_cast<off_t>(size_bytes)) == 0;
  ::close(fd);
  return is_ok;
}

}  // namespace kvm::testing

#endif  // KVM_TESTS_COMMON_SMALL_FILE_SYSTEM_H_
