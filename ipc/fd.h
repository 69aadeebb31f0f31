// SPDX-License-Identifier: Apache-2.0
// Fd: owns a file descriptor.
//
// Threads: a value.
#ifndef KVM_IPC_FD_H_
#define KVM_IPC_FD_H_

#include <unistd.h>

#include <utility>

namespace kvm::ipc {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  // The descriptor, which is the caller's to close from now on.
  int release() { return std::exchange(fd_, -1); }
  void reset() {
    if (fd_ >= 0) {
      ::close(fd_);
      fd_ = -1;
    }
  }

 private:
  int fd_ = -1;
};

}  // namespace kvm::ipc

#endif  // KVM_IPC_FD_H_
