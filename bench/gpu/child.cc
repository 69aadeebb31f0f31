// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu/child.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace kvm::bench::gpu {
namespace {

constexpr int kPatienceMs = 120'000;

}  // namespace

Link::~Link() { ::close(fd_); }

bool Link::send(double value, int fd) const {
  iovec io{&value, sizeof(value)};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
  }
  return ::sendmsg(fd_, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(value));
}

bool Link::ready() const {
  pollfd poll{fd_, POLLIN, 0};
  return ::poll(&poll, 1, 0) > 0;
}

std::optional<Link::Message> Link::receive() const {
  pollfd poll{fd_, POLLIN, 0};
  if (::poll(&poll, 1, kPatienceMs) <= 0) {
    return std::nullopt;
  }
  Message out;
  iovec io{&out.value, sizeof(out.value)};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  if (::recvmsg(fd_, &message, MSG_CMSG_CLOEXEC) != static_cast<ssize_t>(sizeof(out.value))) {
    return std::nullopt;
  }
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
    std::memcpy(&out.fd, CMSG_DATA(header), sizeof(out.fd));
  }
  return out;
}

struct Child::Ends {
  Ends() {
    int fds[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, fds) != 0) {
      std::perror("socketpair");
      std::exit(2);
    }
    ours = fds[0];
    theirs = fds[1];
  }
  int ours;
  int theirs;
};

Child::Child(const std::string& role) : Child(role, Ends()) {}

Child::Child(const std::string& role, const Ends& ends) : link_(ends.ours) {
  const std::string number = std::to_string(ends.theirs);
  pid_ = ::fork();
  if (pid_ == 0) {
    ::close(ends.ours);
    ::execl("/proc/self/exe", "kvm_gpu_check", "child", "--role", role.c_str(), number.c_str(),
            nullptr);
    ::_exit(2);
  }
  ::close(ends.theirs);
}

Child::~Child() { kill_now(); }

void Child::kill_now() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
  }
}

}  // namespace kvm::bench::gpu
