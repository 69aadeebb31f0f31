// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/uring_disk.h"

#if KVM_HAVE_URING
#include <liburing.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/assert.h"
#include "base/clock.h"
#include "tiers/disk/disk_files.h"
#include "tiers/disk/disk_memory.h"
#endif

namespace kvm::tiers {

#if KVM_HAVE_URING

namespace {

constexpr uint64_t kNsPerS = 1'000'000'000;
// A kernel that is out of memory says EAGAIN: a few times it is asked again at once, then after a
// pause.
constexpr uint32_t kEagerRetries = 3;
constexpr uint64_t kPauseNs = 100'000;

class UringDisk final : public DiskIo {
 public:
  // Throws std::bad_alloc.
  UringDisk(const DiskIoOptions& options, DiskMemory memory)
      : options_(options),
        files_(options.n_files, options.is_read_only),
        memory_(std::move(memory)) {
    KVM_ASSERT(options.queue_depth != 0);
    again_.reserve(options.queue_depth);
  }
  ~UringDisk() override {
    KVM_ASSERT(n_in_flight_ == 0);
    if (is_open_) {
      ::io_uring_queue_exit(&ring_);
    }
    if (wake_fd_ >= 0) {
      ::close(wake_fd_);
    }
  }
  UringDisk(const UringDisk&) = delete;
  UringDisk& operator=(const UringDisk&) = delete;

  // Returns 0, or -errno of the refusal.
  int init() {
    wake_fd_ = ::eventfd(0, EFD_CLOEXEC);
    if (wake_fd_ < 0) {
      return -errno;
    }
    // One more than ops, for the look at wake_fd_.
    int rc = ::io_uring_queue_init(options_.queue_depth + 1, &ring_, IORING_SETUP_COOP_TASKRUN);
    if (rc == -EINVAL) {  // before Linux 5.19
      rc = ::io_uring_queue_init(options_.queue_depth + 1, &ring_, 0);
    }
    if (rc != 0) {
      return rc;
    }
    is_open_ = true;
    has_files_ = ::io_uring_register_files_sparse(&ring_, options_.n_files) == 0;
    const iovec whole{memory_.bytes().data(), memory_.bytes().size()};
    has_buffers_ = whole.iov_len != 0 && ::io_uring_register_buffers(&ring_, &whole, 1) == 0;
    prepare_wake();
    return 0;
  }

  const char* name() const override { return "io_uring"; }
  bool is_direct() const override { return files_.is_direct(); }
  uint32_t block_bytes() const override { return files_.block_bytes(); }
  std::span<std::byte> buffers() override { return memory_.bytes(); }

  Status create(uint32_t file, const std::string& path, uint64_t size_bytes) override {
    KVM_TRY(files_.create(file, path, size_bytes));
    const int fd = files_.fd(file);
    if (has_files_ && ::io_uring_register_files_update(&ring_, file, &fd, 1) != 1) {
      files_.remove(file);
      return Status(KVM_ERR_IO, path + ": io_uring does not take the file");
    }
    return Status::ok();
  }
  Result<uint64_t> attach(uint32_t file, const std::string& path) override {
    KVM_TRY_ASSIGN(const uint64_t size_bytes, files_.attach(file, path));
    const int fd = files_.fd(file);
    if (has_files_ && ::io_uring_register_files_update(&ring_, file, &fd, 1) != 1) {
      files_.forget(file);
      return Status(KVM_ERR_IO, path + ": io_uring does not take the file");
    }
    return size_bytes;
  }
  Status sync_entry(uint32_t file) override { return files_.sync_entry(file); }
  void remove(uint32_t file) noexcept override {
    const int none = -1;
    if (has_files_) {
      (void)::io_uring_register_files_update(&ring_, file, &none, 1);
    }
    files_.remove(file);
  }

  void submit(std::span<DiskOp* const> ops) noexcept override {
    for (DiskOp* op : ops) {
      ++n_in_flight_;
      KVM_ASSERT(n_in_flight_ <= options_.queue_depth);
      op->begin();
      prepare(op);
    }
    // Entries that the kernel has no memory for just now stay in the queue; reap() tries again.
    (void)::io_uring_submit(&ring_);
  }

  size_t reap(std::span<DiskOp*> ended, uint64_t timeout_ns) noexcept override {
    const uint64_t deadline_ns = add_saturating(now_ns(), timeout_ns);
    for (;;) {
      const size_t n = take(ended);
      prepare_again();
      if (::io_uring_sq_ready(&ring_) != 0) {
        (void)::io_uring_submit(&ring_);
      }
      if (n != 0 || is_woken_ || time_left(deadline_ns) == 0) {
        is_woken_ = false;
        return n;
      }
      // What the kernel did not take just now is offered again soon, whatever else ends.
      const bool is_full = ::io_uring_sq_ready(&ring_) != 0;
      wait(std::min(time_left(deadline_ns), is_full ? kPauseNs : UINT64_MAX));
    }
  }

  void wake() noexcept override {
    const uint64_t one = 1;
    (void)!::write(wake_fd_, &one, sizeof(one));
  }

 private:
  void prepare_wake() {
    io_uring_sqe* const sqe = ::io_uring_get_sqe(&ring_);
    KVM_ASSERT(sqe != nullptr);
    ::io_uring_prep_read(sqe, wake_fd_, &n_wakes_, sizeof(n_wakes_), 0);
    ::io_uring_sqe_set_data(sqe, nullptr);
  }

  void prepare(DiskOp* op) {
    // There is one for each op in flight and for the look at wake_fd_.
    io_uring_sqe* const sqe = ::io_uring_get_sqe(&ring_);
    KVM_ASSERT(sqe != nullptr);
    const int fd = has_files_ ? static_cast<int>(op->file) : files_.fd(op->file);
    std::byte* const data = op->data + op->n_done_bytes;
    const uint32_t size = op->size_bytes - op->n_done_bytes;
    const uint64_t offset = op->offset + op->n_done_bytes;
    const std::span<std::byte> own = memory_.bytes();
    const bool is_fixed =
        has_buffers_ && op->data >= own.data() && op->data < own.data() + own.size();
    if (op->kind == DiskOp::Kind::kSync) {
      ::io_uring_prep_fsync(sqe, fd, IORING_FSYNC_DATASYNC);
    } else if (op->kind == DiskOp::Kind::kRead) {
      is_fixed ? ::io_uring_prep_read_fixed(sqe, fd, data, size, offset, 0)
               : ::io_uring_prep_read(sqe, fd, data, size, offset);
    } else {
      is_fixed ? ::io_uring_prep_write_fixed(sqe, fd, data, size, offset, 0)
               : ::io_uring_prep_write(sqe, fd, data, size, offset);
    }
    if (has_files_) {
      sqe->flags |= IOSQE_FIXED_FILE;
    }
    ::io_uring_sqe_set_data(sqe, op);
  }

  // What has ended goes to `ended`; what has to go on, to again_.
  size_t take(std::span<DiskOp*> ended) {
    size_t n = 0;
    io_uring_cqe* cqe = nullptr;
    while (n < ended.size() && ::io_uring_peek_cqe(&ring_, &cqe) == 0) {
      auto* const op = static_cast<DiskOp*>(::io_uring_cqe_get_data(cqe));
      const int64_t result = cqe->res;
      ::io_uring_cqe_seen(&ring_, cqe);
      if (op == nullptr) {
        is_woken_ = true;
        prepare_wake();
      } else if (op->take(options_.rewrite ? options_.rewrite(*op, result) : result,
                          files_.block_bytes())) {
        --n_in_flight_;
        ended[n++] = op;
      } else {
        again_.push_back(op);
      }
    }
    return n;
  }

  void prepare_again() {
    bool is_stuck = false;
    for (DiskOp* op : again_) {
      prepare(op);
      is_stuck = is_stuck || op->n_retries > kEagerRetries;
    }
    again_.clear();
    if (is_stuck) {
      ::usleep(kPauseNs / 1000);
    }
  }

  void wait(uint64_t timeout_ns) {
    io_uring_cqe* cqe = nullptr;
    if (timeout_ns == UINT64_MAX) {
      (void)::io_uring_wait_cqe(&ring_, &cqe);
      return;
    }
    __kernel_timespec timeout{.tv_sec = static_cast<int64_t>(timeout_ns / kNsPerS),
                              .tv_nsec = static_cast<long long>(timeout_ns % kNsPerS)};
    (void)::io_uring_wait_cqe_timeout(&ring_, &cqe, &timeout);
  }

  const DiskIoOptions options_;
  DiskFiles files_;
  const DiskMemory memory_;
  io_uring ring_{};
  bool is_open_ = false;
  bool has_files_ = false;    // registered
  bool has_buffers_ = false;  // likewise
  int wake_fd_ = -1;
  uint64_t n_wakes_ = 0;
  bool is_woken_ = false;
  uint32_t n_in_flight_ = 0;
  std::vector<DiskOp*> again_;  // has room for queue_depth
};

}  // namespace

Result<std::unique_ptr<DiskIo>> open_uring_disk(const DiskIoOptions& options) {
  try {
    DiskMemory memory(options.buffer_bytes);
    if (memory.bytes().size() == options.buffer_bytes) {
      auto disk = std::make_unique<UringDisk>(options, std::move(memory));
      if (const int rc = disk->init(); rc != 0) {
        return Status(KVM_ERR_UNSUPPORTED, std::string("io_uring: ") + ::strerror(-rc));
      }
      return std::unique_ptr<DiskIo>(std::move(disk));
    }
  } catch (const std::bad_alloc&) {
  }
  return Status::fixed(KVM_ERR_NO_MEMORY, "disk: there is no memory for its buffers");
}

#else

Result<std::unique_ptr<DiskIo>> open_uring_disk(const DiskIoOptions&) {
  return Status(KVM_ERR_UNSUPPORTED, "io_uring: this program was built without liburing");
}

#endif

}  // namespace kvm::tiers
