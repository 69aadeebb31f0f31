// SPDX-License-Identifier: Apache-2.0
// Writes completion eventfds through io_uring. A client shares the open file behind its eventfd and
// can make any direct write block (clear O_NONBLOCK, saturate the counter); an io_uring write waits
// inside the kernel instead. Where io_uring is not available, eventfds are not offered.
//
// Threads: the dispatcher.
#ifndef KVM_DAEMON_URING_NOTIFIER_H_
#define KVM_DAEMON_URING_NOTIFIER_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "base/status.h"

namespace kvm::daemon {

class UringNotifier {
 public:
  // Fails: UNSUPPORTED (built without liburing, or refused by the kernel), with the reason.
  static Result<std::unique_ptr<UringNotifier>> open();
  virtual ~UringNotifier() = default;

  // Readable when reap() has something to do.
  virtual int fd() const = 0;
  // Adds 1 to the eventfd. `token` (not 0) comes back from reap() when it is done; until then the
  // same token must not be used again. Returns false when nothing was begun (try again later).
  virtual bool notify(int eventfd, uint64_t token) = 0;
  // Gives up a write that may still be waiting; its token comes back from reap() all the same.
  virtual void cancel(uint64_t token) = 0;
  // Calls `done` for each finished write.
  virtual void reap(const std::function<void(uint64_t token)>& done) = 0;
};

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_URING_NOTIFIER_H_
