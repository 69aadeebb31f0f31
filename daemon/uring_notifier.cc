// SPDX-License-Identifier: Apache-2.0
#include "daemon/uring_notifier.h"

#include <string.h>

#include <string>

#if KVM_HAVE_URING
#include <liburing.h>
#endif

namespace kvm::daemon {

#if KVM_HAVE_URING

namespace {

// Entries of the ring. Each queue has at most one write under way, so a full ring is rare and only
// delays a notification.
constexpr unsigned kEntries = 256;

class RingNotifier final : public UringNotifier {
 public:
  ~RingNotifier() override {
    if (open_) {
      ::io_uring_queue_exit(&ring_);
    }
  }

  int init() {
    const int rc = ::io_uring_queue_init(kEntries, &ring_, 0);
    open_ = rc == 0;
    return rc;
  }

  int fd() const override { return ring_.ring_fd; }

  bool notify(int eventfd, uint64_t token) override {
    io_uring_sqe* sqe = ::io_uring_get_sqe(&ring_);
    if (sqe == nullptr) {
      return false;
    }
    ::io_uring_prep_write(sqe, eventfd, &one_, sizeof(one_), 0);
    ::io_uring_sqe_set_data64(sqe, token);
    return ::io_uring_submit(&ring_) >= 0;
  }

  void cancel(uint64_t token) override {
    if (io_uring_sqe* sqe = ::io_uring_get_sqe(&ring_)) {
      ::io_uring_prep_cancel64(sqe, token, 0);
      ::io_uring_sqe_set_data64(sqe, 0);
      ::io_uring_submit(&ring_);
    }
  }

  void reap(const std::function<void(uint64_t token)>& done) override {
    io_uring_cqe* cqe = nullptr;
    while (::io_uring_peek_cqe(&ring_, &cqe) == 0) {
      const uint64_t token = ::io_uring_cqe_get_data64(cqe);
      ::io_uring_cqe_seen(&ring_, cqe);
      if (token != 0) {
        done(token);
      }
    }
  }

 private:
  io_uring ring_{};
  bool open_ = false;
  uint64_t one_ = 1;
};

}  // namespace

Result<std::unique_ptr<UringNotifier>> UringNotifier::open() {
  auto notifier = std::make_unique<RingNotifier>();
  if (const int rc = notifier->init(); rc != 0) {
    return Status(KVM_ERR_UNSUPPORTED, std::string("io_uring: ") + ::strerror(-rc));
  }
  return std::unique_ptr<UringNotifier>(std::move(notifier));
}

#else

Result<std::unique_ptr<UringNotifier>> UringNotifier::open() {
  return Status(KVM_ERR_UNSUPPORTED, "io_uring: this kvmd was built without liburing");
}

#endif

}  // namespace kvm::daemon
