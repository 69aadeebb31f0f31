// SPDX-License-Identifier: Apache-2.0
// Threads that start together by spinning, and what else the attention benches share.
#ifndef KVM_BENCH_ATTENTION_WORKERS_H_
#define KVM_BENCH_ATTENTION_WORKERS_H_

#include <sys/mman.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#include "bench/timing.h"

namespace kvm::bench {

// Anonymous memory in transparent huge pages, touched.
class HugeBuffer {
 public:
  explicit HugeBuffer(size_t bytes) : bytes_((bytes + kHuge - 1) / kHuge * kHuge) {
    data_ = static_cast<std::byte*>(std::aligned_alloc(kHuge, bytes_));
    if (data_ == nullptr) {
      std::abort();
    }
    madvise(data_, bytes_, MADV_HUGEPAGE);
    for (size_t i = 0; i < bytes_; i += 4096) {
      data_[i] = std::byte{1};
    }
  }
  ~HugeBuffer() { std::free(data_); }
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;
  std::byte* data() const { return data_; }

 private:
  static constexpr size_t kHuge = size_t{2} << 20;
  size_t bytes_;
  std::byte* data_;
};

// n threads, the caller being number 0. run() calls the function once on each and returns when all
// are done.
class Workers {
 public:
  explicit Workers(uint32_t n) {
    for (uint32_t i = 1; i < n; ++i) {
      threads_.emplace_back([this, i] { loop(i); });
    }
  }
  ~Workers() {
    function_ = nullptr;
    // SYNC: release publishes function_ to the workers' acquire in loop().
    round_.fetch_add(1, std::memory_order_release);
    for (std::thread& t : threads_) {
      t.join();
    }
  }

  void run(const std::function<void(uint32_t)>& function) {
    function_ = &function;
    left_.store(threads_.size(), std::memory_order_relaxed);
    // SYNC: release publishes function_ and left_ to the workers' acquire in loop().
    round_.fetch_add(1, std::memory_order_release);
    function(0);
    // SYNC: acquire sees everything that the workers wrote before their decrement.
    while (left_.load(std::memory_order_acquire) != 0) {
    }
  }

 private:
  void loop(uint32_t index) {
    for (uint64_t seen = 0;;) {
      // SYNC: acquire pairs with run() and the destructor.
      while (round_.load(std::memory_order_acquire) == seen) {
      }
      ++seen;
      if (function_ == nullptr) {
        return;
      }
      (*function_)(index);
      // SYNC: release publishes this worker's results to run().
      left_.fetch_sub(1, std::memory_order_release);
    }
  }

  const std::function<void(uint32_t)>* function_ = nullptr;
  std::atomic<uint64_t> round_{0};
  std::atomic<size_t> left_{0};
  std::vector<std::thread> threads_;
};

}  // namespace kvm::bench

#endif  // KVM_BENCH_ATTENTION_WORKERS_H_
