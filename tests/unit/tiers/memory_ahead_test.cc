// SPDX-License-Identifier: Apache-2.0
#include "tiers/host/memory_ahead.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "tiers/slab_class.h"

namespace kvm::tiers {
namespace {

constexpr uint64_t kPieces = kExtentBytes / MemoryAhead::kPieceBytes;

// Touches nothing, and says which extents it was asked for; a piece goes on until it is let go.
class HeldMemory final : public PageMemory {
 public:
  std::byte* reserve(uint64_t size_bytes) override {
    std::byte* const data = system_page_memory()->reserve(size_bytes);
    const std::lock_guard lock(mutex_);
    begins_.push_back(data);
    return data;
  }
  bool open(std::byte* data, uint64_t size_bytes) override {
    return system_page_memory()->open(data, size_bytes);
  }
  void discard(std::byte* data, uint64_t /*size_bytes*/) override {
    const std::lock_guard lock(mutex_);
    ASSERT_NE(data, now_) << "it is being touched";
    discarded_.push_back(data);
  }
  void touch(std::byte* data, uint64_t size_bytes) override {
    std::unique_lock lock(mutex_);
    EXPECT_EQ(size_bytes, MemoryAhead::kPieceBytes);
    // The reservation that begins next before it.
    std::byte* begin = nullptr;
    for (std::byte* each : begins_) {
      begin = each <= data && each > begin ? each : begin;
    }
    now_ = begin + (data - begin) / kExtentBytes * kExtentBytes;
    if (touched_.empty() || touched_.back() != now_) {
      touched_.push_back(now_);
    }
    ++n_pieces_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return n_allowed_ != 0; });
    --n_allowed_;
    now_ = nullptr;
  }
  void release(std::byte* data, uint64_t size_bytes) override {
    system_page_memory()->release(data, size_bytes);
  }

  void allow(uint64_t n_pieces) {
    const std::lock_guard lock(mutex_);
    n_allowed_ += n_pieces;
    changed_.notify_all();
  }
  void wait_for_touch(const std::byte* extent) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return now_ == extent; });
  }
  bool is_discarded(std::byte* data) {
    const std::lock_guard lock(mutex_);
    return std::find(discarded_.begin(), discarded_.end(), data) != discarded_.end();
  }
  std::vector<std::byte*> touched() {
    const std::lock_guard lock(mutex_);
    return touched_;
  }
  uint64_t n_pieces() {
    const std::lock_guard lock(mutex_);
    return n_pieces_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::byte*> begins_;
  std::vector<std::byte*> touched_;
  std::vector<std::byte*> discarded_;
  std::byte* now_ = nullptr;
  uint64_t n_pieces_ = 0;
  uint64_t n_allowed_ = 0;
};

class MemoryAheadTest : public ::testing::Test {
 protected:
  ~MemoryAheadTest() override { held_.release(data_, kExtents * kExtentBytes); }
  std::byte* extent(uint64_t i) { return data_ + i * kExtentBytes; }

  static constexpr uint64_t kExtents = MemoryAhead::kMaxWaiting + 8;
  HeldMemory held_;
  std::byte* const data_ = held_.reserve(kExtents * kExtentBytes);
};

// It waits for the piece that is being touched, and for no other.
TEST_F(MemoryAheadTest, WhatIsTouchedIsNotDiscardedBefore) {
  MemoryAhead memory(&held_);
  memory.expect(extent(0));
  held_.wait_for_touch(extent(0));
  std::atomic<bool> has_returned = false;
  std::thread other([&] {
    memory.discard(extent(0), kExtentBytes);
    has_returned = true;
  });
  memory.discard(extent(1), kExtentBytes);
  EXPECT_TRUE(held_.is_discarded(extent(1))) << "what nobody touches waits for nothing";
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(has_returned);
  EXPECT_FALSE(held_.is_discarded(extent(0)));
  held_.allow(1);
  other.join();
  EXPECT_TRUE(held_.is_discarded(extent(0)));
  EXPECT_EQ(held_.n_pieces(), 1u);
}

TEST_F(MemoryAheadTest, WhatIsDiscardedIsNotTouchedAfterwards) {
  MemoryAhead memory(&held_);
  for (const uint64_t i : {0, 1, 2, 3}) {
    memory.expect(extent(i));
  }
  held_.wait_for_touch(extent(0));
  memory.discard(extent(1), 2 * kExtentBytes);
  held_.allow(kPieces);
  held_.wait_for_touch(extent(3));
  EXPECT_EQ(held_.n_pieces(), kPieces + 1) << "all of an extent";
  held_.allow(kPieces);
  EXPECT_EQ(held_.touched(), (std::vector<std::byte*>{extent(0), extent(3)}));
  // What is expected again is touched again.
  memory.expect(extent(1));
  held_.wait_for_touch(extent(1));
  held_.allow(kPieces);
}

TEST_F(MemoryAheadTest, MoreThanTheLineHoldsStaysAsItIs) {
  constexpr uint64_t kLast = MemoryAhead::kMaxWaiting;
  MemoryAhead memory(&held_);
  memory.expect(extent(0));
  held_.wait_for_touch(extent(0));
  for (uint64_t i = 1; i <= kLast + 3; ++i) {
    memory.expect(extent(i));
  }
  held_.allow(kLast * kPieces);
  held_.wait_for_touch(extent(kLast));
  held_.allow(kPieces - 1);
  // One more, which comes behind what is left of these.
  memory.expect(extent(0));
  held_.allow(1);
  held_.wait_for_touch(extent(0));
  held_.allow(kPieces);
  const std::vector<std::byte*> touched = held_.touched();
  ASSERT_EQ(touched.size(), kLast + 2);
  for (uint64_t i = 0; i <= kLast; ++i) {
    EXPECT_EQ(touched[i], extent(i));
  }
}

TEST_F(MemoryAheadTest, ReleaseForgetsWhatWaits) {
  MemoryAhead memory(&held_);
  std::byte* const other = held_.reserve(4 * kExtentBytes);
  memory.expect(extent(0));
  held_.wait_for_touch(extent(0));
  memory.expect(other);
  memory.expect(extent(1));
  memory.release(other, 4 * kExtentBytes);
  held_.allow(kPieces);
  held_.wait_for_touch(extent(1));
  held_.allow(kPieces);
  EXPECT_EQ(held_.touched(), (std::vector<std::byte*>{extent(0), extent(1)}));
}

// It waits for the piece that is being touched, and for nothing that waits.
TEST_F(MemoryAheadTest, TheEndForgetsWhatWaits) {
  std::thread late;
  {
    MemoryAhead memory(&held_);
    memory.expect(extent(0));
    held_.wait_for_touch(extent(0));
    memory.expect(extent(1));
    late = std::thread([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      held_.allow(2 * kPieces);  // it ends, too, where it does not forget
    });
  }
  late.join();
  EXPECT_EQ(held_.touched(), (std::vector<std::byte*>{extent(0)}));
}

// Beside a thread that touches, what is written stays, and what is discarded has no memory.
TEST(MemoryAheadOfSystem, WritersAndTheThreadMeet) {
  constexpr uint64_t kExtents = 24;
  MemoryAhead memory(system_page_memory());
  std::byte* const data = memory.reserve(kExtents * kExtentBytes);
  ASSERT_NE(data, nullptr);
  ASSERT_TRUE(memory.open(data, kExtents * kExtentBytes));
  std::vector<uint8_t> marks(kExtents);
  std::mt19937 generator(5);
  for (int step = 0; step < 2000; ++step) {
    const uint64_t i = generator() % kExtents;
    std::byte* const extent = data + i * kExtentBytes;
    const auto at = static_cast<ptrdiff_t>(generator() % kExtentBytes);
    if (generator() % 3 != 0) {
      memory.expect(extent);
      marks[i] = static_cast<uint8_t>(step);
      extent[at] = static_cast<std::byte>(marks[i]);
      extent[0] = static_cast<std::byte>(marks[i]);
    } else {
      memory.discard(extent, kExtentBytes);
      marks[i] = 0;
      std::vector<unsigned char> pages(kExtentBytes / 4096);
      ASSERT_EQ(::mincore(extent, kExtentBytes, pages.data()), 0);
      ASSERT_TRUE(std::all_of(pages.begin(), pages.end(), [](unsigned char p) { return p == 0; }))
          << "memory was made behind a discard";
    }
    ASSERT_EQ(static_cast<uint8_t>(extent[0]), marks[i]) << "step " << step;
  }
  memory.release(data, kExtents * kExtentBytes);
}

TEST(MemoryAheadOfSystem, WhatIsExpectedIsThereWhenItIsWritten) {
  MemoryAhead memory(system_page_memory());
  std::byte* const data = memory.reserve(2 * kExtentBytes);
  ASSERT_NE(data, nullptr);
  ASSERT_TRUE(memory.open(data, 2 * kExtentBytes));
  // A kernel before 5.14 has no word for it.
  memory.touch(data, kExtentBytes);
  unsigned char page = 0;
  ASSERT_EQ(::mincore(data, 4096, &page), 0);
  if ((page & 1) == 0) {
    memory.release(data, 2 * kExtentBytes);
    GTEST_SKIP() << "the kernel makes no memory ahead";
  }
  memory.expect(data + kExtentBytes);
  page = 0;
  for (int i = 0; i < 10000 && (page & 1) == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ASSERT_EQ(::mincore(data + 2 * kExtentBytes - 4096, 4096, &page), 0);
  }
  EXPECT_EQ(page & 1, 1);
  memory.release(data, 2 * kExtentBytes);
}

}  // namespace
}  // namespace kvm::tiers
