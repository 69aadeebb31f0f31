// SPDX-License-Identifier: Apache-2.0
#include "ipc/doorbell.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <string>

namespace kvm::ipc {

Result<Fd> make_doorbell() {
  Fd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd.is_open()) {
    return Status(KVM_ERR_LIMIT, std::string("eventfd: ") + ::strerror(errno));
  }
  return fd;
}

Status watch_doorbell(const Fd& epoll, const Fd& doorbell, uint64_t token) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  event.data.u64 = token;
  if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, doorbell.get(), &event) != 0) {
    return Status(KVM_ERR_IO, std::string("epoll_ctl: ") + ::strerror(errno));
  }
  return Status::ok();
}

void ring_doorbell(const Fd& doorbell) {
  const uint64_t one = 1;
  // A failure leaves nothing to do: the daemon also finds the entry when anything else wakes it.
  [[maybe_unused]] const ssize_t n = ::write(doorbell.get(), &one, sizeof(one));
}

}  // namespace kvm::ipc
