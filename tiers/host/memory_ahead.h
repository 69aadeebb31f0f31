// SPDX-License-Identifier: Apache-2.0
// MemoryAhead is a PageMemory whose extents are touched before they are written, on a thread of its
// own. The system clears memory when it is first used: 0.1 s a GiB, many times that where a host
// takes memory of its guests back, and whoever reads pages from a disk would wait for it.
//
// Threads: as PageMemory.  Memory: what is expected is charged to whoever opened it.
#ifndef KVM_TIERS_HOST_MEMORY_AHEAD_H_
#define KVM_TIERS_HOST_MEMORY_AHEAD_H_

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>

#include "tiers/host/page_memory.h"

namespace kvm::tiers {

class MemoryAhead final : public PageMemory {
 public:
  // `memory` must outlive it.
  explicit MemoryAhead(PageMemory* memory) : memory_(memory) {}
  ~MemoryAhead() override;
  MemoryAhead(const MemoryAhead&) = delete;
  MemoryAhead& operator=(const MemoryAhead&) = delete;

  std::byte* reserve(uint64_t size_bytes) override { return memory_->reserve(size_bytes); }
  bool open(std::byte* data, uint64_t size_bytes) override {
    return memory_->open(data, size_bytes);
  }
  void touch(std::byte* data, uint64_t size_bytes) override { memory_->touch(data, size_bytes); }
  // The first call starts the thread, if the system has one. What finds kMaxWaiting before it, or
  // no thread, stays as it is.
  void expect(std::byte* extent) override;
  // These wait until nothing of the part is being touched: for kPieceBytes at most, or a huge page.
  void discard(std::byte* data, uint64_t size_bytes) override;
  void release(std::byte* data, uint64_t size_bytes) override;

  // LIMIT: extents that wait to be touched.
  static constexpr size_t kMaxWaiting = 128;
  // LIMIT: touched at a time. Whoever changes a mapping of the process waits as long.
  static constexpr uint64_t kPieceBytes = uint64_t{128} << 10;

 private:
  void run();
  // Touches touched_ piece by piece, until it is forgotten.
  void touch_pieces(std::unique_lock<std::mutex>* lock);
  // Afterwards nothing of the part is touched, or will be.
  void forget(const std::byte* data, uint64_t size_bytes);

  PageMemory* const memory_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::array<std::byte*, kMaxWaiting> waiting_{};  // from first_ on, round; null: forgotten
  size_t first_ = 0;
  size_t n_waiting_ = 0;
  std::byte* touched_ = nullptr;  // the one that is being touched
  bool is_forgotten_ = false;     // which is to end
  bool has_thread_ = true;        // the system has not refused one
  bool is_stopping_ = false;
  std::thread thread_;
};

}  // namespace kvm::tiers

#endif  // KVM_TIERS_HOST_MEMORY_AHEAD_H_
