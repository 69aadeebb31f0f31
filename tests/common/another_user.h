// SPDX-License-Identifier: Apache-2.0
// Connecting as somebody who is not root: kvmd asks the kernel who connected, and the kernel notes
// the user of the thread that did.
#ifndef KVM_TESTS_COMMON_ANOTHER_USER_H_
#define KVM_TESTS_COMMON_ANOTHER_USER_H_

#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "base/assert.h"

namespace kvm::testing {

// While it lives, the calling thread alone is another user. REQUIRES: is_possible().
class AnotherUser {
 public:
  static bool is_possible() { return ::geteuid() == 0; }
  // Lets others come to a socket.
  static void admit_to(const std::string& socket_path) {
    KVM_ASSERT(::chmod(std::filesystem::path(socket_path).parent_path().c_str(), 0755) == 0);
    KVM_ASSERT(::chmod(socket_path.c_str(), 0666) == 0);
  }

  // The system call, not the function: that changes all threads.
  AnotherUser() { KVM_ASSERT(::syscall(SYS_setresuid, -1, kNobody, -1) == 0); }
  ~AnotherUser() { KVM_ASSERT(::syscall(SYS_setresuid, -1, 0, -1) == 0); }
  AnotherUser(const AnotherUser&) = delete;
  AnotherUser& operator=(const AnotherUser&) = delete;

 private:
  static constexpr uid_t kNobody = 65534;
};

}  // namespace kvm::testing

#endif  // KVM_TESTS_COMMON_ANOTHER_USER_H_
