// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/pool_disk.h"

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/assert.h"
#include "tiers/disk/disk_files.h"
#include "tiers/disk/disk_memory.h"

namespace kvm::tiers {
namespace {

class PoolDisk final : public DiskIo {
 public:
  // Throws std::bad_alloc.
  PoolDisk(const DiskIoOptions& options, DiskMemory memory)
      : options_(options),
        files_(options.n_files, options.is_read_only),
        memory_(std::move(memory)) {
    KVM_ASSERT(options.queue_depth != 0 && options.n_threads != 0);
    waiting_.reserve(options.queue_depth);
    ended_.reserve(options.queue_depth);
  }
  ~PoolDisk() override {
    stop();
    KVM_ASSERT(n_in_flight_ == 0);
  }
  PoolDisk(const PoolDisk&) = delete;
  PoolDisk& operator=(const PoolDisk&) = delete;

  // Throws std::bad_alloc, and std::system_error where the system refuses threads.
  void start() {
    const size_t n = std::min(options_.n_threads, options_.queue_depth);
    threads_.reserve(n);
    while (threads_.size() < n) {
      threads_.emplace_back([this] { run(); });
    }
  }

  const char* name() const override { return "threads"; }
  bool is_direct() const override { return files_.is_direct(); }
  uint32_t block_bytes() const override { return files_.block_bytes(); }
  std::span<std::byte> buffers() override { return memory_.bytes(); }

  Status create(uint32_t file, const std::string& path, uint64_t size_bytes) override {
    const std::lock_guard lock(mutex_);
    return files_.create(file, path, size_bytes);
  }
  Result<uint64_t> attach(uint32_t file, const std::string& path) override {
    const std::lock_guard lock(mutex_);
    return files_.attach(file, path);
  }
  Status sync_entry(uint32_t file) override {
    // Files come and go on this thread alone.
    return files_.sync_entry(file);
  }
  void remove(uint32_t file) noexcept override {
    const std::lock_guard lock(mutex_);
    files_.remove(file);
  }

  void submit(std::span<DiskOp* const> ops) noexcept override {
    {
      const std::lock_guard lock(mutex_);
      for (DiskOp* op : ops) {
        ++n_in_flight_;
        KVM_ASSERT(n_in_flight_ <= options_.queue_depth);
        op->begin();
        waiting_.push_back(op);
      }
    }
    for (size_t i = 0; i < std::min(ops.size(), threads_.size()); ++i) {
      has_work_.notify_one();
    }
  }

  size_t reap(std::span<DiskOp*> ended, uint64_t timeout_ns) noexcept override {
    std::unique_lock lock(mutex_);
    const auto has_news = [&] { return is_woken_ || !ended_.empty(); };
    if (timeout_ns == UINT64_MAX) {
      has_ended_.wait(lock, has_news);
    } else if (timeout_ns != 0) {
      has_ended_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), has_news);
    }
    is_woken_ = false;
    const size_t n = std::min(ended.size(), ended_.size());
    std::copy_n(ended_.begin(), n, ended.begin());
    ended_.erase(ended_.begin(), ended_.begin() + static_cast<ptrdiff_t>(n));
    n_in_flight_ -= static_cast<uint32_t>(n);
    return n;
  }

  void wake() noexcept override {
    const std::lock_guard lock(mutex_);
    is_woken_ = true;
    has_ended_.notify_one();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      has_work_.wait(lock, [&] { return is_stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) {
        return;
      }
      // The oldest: a queue that is never empty must not keep it for ever.
      DiskOp* const op = waiting_.front();
      waiting_.erase(waiting_.begin());
      const int fd = files_.fd(op->file);
      const uint32_t block = files_.block_bytes();
      lock.unlock();
      while (!op->take(call(fd, *op), block)) {
        if (op->n_retries != 0) {
          std::this_thread::yield();
        }
      }
      lock.lock();
      ended_.push_back(op);
      has_ended_.notify_one();
    }
  }

  int64_t call(int fd, const DiskOp& op) const {
    std::byte* const data = op.data + op.n_done_bytes;
    const size_t size = op.size_bytes - op.n_done_bytes;
    const auto offset = static_cast<off_t>(op.offset + op.n_done_bytes);
    int64_t result = 0;
    switch (op.kind) {
      case DiskOp::Kind::kRead:
        result = ::pread(fd, data, size, offset);
        break;
      case DiskOp::Kind::kWrite:
        result = ::pwrite(fd, data, size, offset);
        break;
      case DiskOp::Kind::kSync:
        result = ::fdatasync(fd);
        break;
    }
    result = result < 0 ? -errno : result;
    return options_.rewrite ? options_.rewrite(op, result) : result;
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      is_stopping_ = true;
    }
    has_work_.notify_all();
    for (std::thread& thread : threads_) {
      thread.join();
    }
    threads_.clear();
  }

  const DiskIoOptions options_;
  std::mutex mutex_;
  std::condition_variable has_work_;
  std::condition_variable has_ended_;
  DiskFiles files_;
  const DiskMemory memory_;
  std::vector<DiskOp*> waiting_;  // both have room for queue_depth
  std::vector<DiskOp*> ended_;
  uint32_t n_in_flight_ = 0;
  bool is_woken_ = false;
  bool is_stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

Result<std::unique_ptr<DiskIo>> open_pool_disk(const DiskIoOptions& options) {
  try {
    DiskMemory memory(options.buffer_bytes);
    if (memory.bytes().size() == options.buffer_bytes) {
      auto pool = std::make_unique<PoolDisk>(options, std::move(memory));
      pool->start();
      return std::unique_ptr<DiskIo>(std::move(pool));
    }
  } catch (const std::system_error&) {
    return Status::fixed(KVM_ERR_LIMIT, "disk: the system refuses threads");
  } catch (const std::bad_alloc&) {
  }
  return Status::fixed(KVM_ERR_NO_MEMORY, "disk: there is no memory for its buffers");
}

}  // namespace kvm::tiers
