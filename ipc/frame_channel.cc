// SPDX-License-Identifier: Apache-2.0
#include "ipc/frame_channel.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>

#include "ipc/socket.h"

namespace kvm::ipc {
namespace {

constexpr uint32_t kMagic = 0x464d564b;  // "KVMF"
// Of the rest of a frame that has begun.
constexpr uint64_t kRestTimeoutNs = 10'000'000'000;

struct Head {
  uint32_t magic = kMagic;
  uint32_t kind = 0;
  uint32_t n_bytes = 0;
  uint32_t n_fds = 0;
};

Status gone() { return Status(KVM_ERR_DISCONNECTED, "the other side has closed the channel"); }
Status broken(const char* what) {
  return Status(KVM_ERR_PROTOCOL, std::string("a frame of the channel ") + what);
}

// Takes the descriptors of a message: the first one, where `into` has none; others are closed.
// False: there were others.
bool take_fds(msghdr* message, Fd* into) {
  bool good = (message->msg_flags & MSG_CTRUNC) == 0;
  for (cmsghdr* part = CMSG_FIRSTHDR(message); part != nullptr; part = CMSG_NXTHDR(message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    const size_t n = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < n; ++i) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(part) + i * sizeof(int), sizeof number);
      Fd one(number);
      if (into->is_open()) {
        good = false;
      } else {
        *into = std::move(one);
      }
    }
  }
  return good;
}

}  // namespace

Result<std::pair<Fd, Fd>> FrameChannel::make_pair() {
  int ends[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return Status(KVM_ERR_LIMIT, "no descriptors left for a channel");
  }
  return std::pair<Fd, Fd>(Fd(ends[0]), Fd(ends[1]));
}

Status FrameChannel::send(uint32_t kind, std::span<const uint8_t> bytes, int fd) {
  if (bytes.size() > kMaxFrameBytes) {
    return Status(KVM_ERR_INVALID, "a frame of " + std::to_string(bytes.size()) +
                                       " bytes; allowed are " + std::to_string(kMaxFrameBytes));
  }
  Head head;
  head.kind = kind;
  head.n_bytes = static_cast<uint32_t>(bytes.size());
  head.n_fds = fd >= 0 ? 1 : 0;
  const auto* const head_bytes = reinterpret_cast<const uint8_t*>(&head);
  const size_t n_all = sizeof head + bytes.size();
  alignas(cmsghdr) std::array<uint8_t, CMSG_SPACE(sizeof(int))> control{};
  for (size_t sent = 0; sent < n_all;) {
    std::array<iovec, 2> parts{};
    size_t n_parts = 0;
    if (sent < sizeof head) {
      parts[n_parts++] = {const_cast<uint8_t*>(head_bytes) + sent, sizeof head - sent};
    }
    const size_t body_sent = sent > sizeof head ? sent - sizeof head : 0;
    if (body_sent < bytes.size()) {
      parts[n_parts++] = {const_cast<uint8_t*>(bytes.data()) + body_sent, bytes.size() - body_sent};
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = n_parts;
    if (sent == 0 && fd >= 0) {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      cmsghdr* const rights = CMSG_FIRSTHDR(&message);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(sizeof fd);
      std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
    }
    const ssize_t n = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) {
      continue;
    }
    if (n <= 0) {
      return gone();
    }
    sent += static_cast<size_t>(n);
  }
  return Status::ok();
}

Status FrameChannel::receive_all(uint8_t* to, size_t n, Fd* fd) {
  bool good = true;
  for (size_t done = 0; done < n;) {
    iovec part{to + done, n - done};
    alignas(cmsghdr) std::array<uint8_t, CMSG_SPACE(4 * sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t got = ::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN) {
      KVM_TRY(wait_readable(socket_, kRestTimeoutNs).is_ok() ? Status::ok() : gone());
      continue;
    }
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got <= 0) {
      return gone();
    }
    good = take_fds(&message, fd) && good;
    done += static_cast<size_t>(got);
  }
  return good ? Status::ok() : broken("has more than one descriptor");
}

Status FrameChannel::receive(uint64_t timeout_ns, Frame* into, uint32_t max_bytes) {
  into->fd.reset();
  into->bytes.clear();
  KVM_TRY(wait_readable(socket_, timeout_ns));
  Head head;
  KVM_TRY(receive_all(reinterpret_cast<uint8_t*>(&head), sizeof head, &into->fd));
  if (head.magic != kMagic || head.n_bytes > max_bytes ||
      head.n_fds != (into->fd.is_open() ? 1u : 0u)) {
    return broken("has a head that is none");
  }
  into->kind = head.kind;
  into->bytes.resize(head.n_bytes);
  Fd none;
  KVM_TRY(receive_all(into->bytes.data(), head.n_bytes, &none));
  return none.is_open() ? broken("has a descriptor in its middle") : Status::ok();
}

void FrameChannel::shut_down() const { ::shutdown(socket_.get(), SHUT_RDWR); }

}  // namespace kvm::ipc
