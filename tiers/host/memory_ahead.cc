// SPDX-License-Identifier: Apache-2.0
#include "tiers/host/memory_ahead.h"

#include <pthread.h>

#include <new>
#include <system_error>
#include <utility>

#include "tiers/slab_class.h"

namespace kvm::tiers {

MemoryAhead::~MemoryAhead() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void MemoryAhead::expect(std::byte* extent) {
  {
    const std::lock_guard lock(mutex_);
    if (n_waiting_ == kMaxWaiting || !has_thread_) {
      return;
    }
    if (!thread_.joinable()) {
      has_thread_ = false;
      try {
        thread_ = std::thread([this] { run(); });
      } catch (const std::system_error&) {
        return;
      } catch (const std::bad_alloc&) {
        return;
      }
      has_thread_ = true;
      pthread_setname_np(thread_.native_handle(), "kvm-memory");
    }
    waiting_[(first_ + n_waiting_++) % kMaxWaiting] = extent;
  }
  changed_.notify_all();
}

void MemoryAhead::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return is_stopping_ || n_waiting_ != 0; });
    if (is_stopping_) {
      return;
    }
    touched_ = std::exchange(waiting_[first_], nullptr);
    first_ = (first_ + 1) % kMaxWaiting;
    --n_waiting_;
    if (touched_ == nullptr) {
      continue;
    }
    touch_pieces(&lock);
    touched_ = nullptr;
    is_forgotten_ = false;
    changed_.notify_all();
  }
}

void MemoryAhead::touch_pieces(std::unique_lock<std::mutex>* lock) {
  for (uint64_t at = 0; at < kExtentBytes && !is_forgotten_ && !is_stopping_; at += kPieceBytes) {
    lock->unlock();
    memory_->touch(touched_ + at, kPieceBytes);
    // Where a thread that computes waits for this core, it has waited long enough.
    std::this_thread::yield();
    lock->lock();
  }
}

void MemoryAhead::forget(const std::byte* data, uint64_t size_bytes) {
  const auto is_inside = [&](const std::byte* extent) {
    return extent >= data && extent < data + size_bytes;
  };
  std::unique_lock lock(mutex_);
  for (size_t i = 0; i < n_waiting_; ++i) {
    std::byte*& extent = waiting_[(first_ + i) % kMaxWaiting];
    extent = is_inside(extent) ? nullptr : extent;
  }
  is_forgotten_ |= is_inside(touched_);
  changed_.wait(lock, [&] { return !is_inside(touched_); });
}

void MemoryAhead::discard(std::byte* data, uint64_t size_bytes) {
  forget(data, size_bytes);
  memory_->discard(data, size_bytes);
}

void MemoryAhead::release(std::byte* data, uint64_t size_bytes) {
  forget(data, size_bytes);
  memory_->release(data, size_bytes);
}

}  // namespace kvm::tiers
