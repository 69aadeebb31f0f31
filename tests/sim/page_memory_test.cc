// SPDX-License-Identifier: Apache-2.0
// What every PageMemory must hold to, over the real one and the simulated one; and slabs whose
// memory is refused.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/sim/simulated_page_memory.h"
#include "tiers/budget.h"
#include "tiers/host/host_pool.h"
#include "tiers/host/page_memory.h"

namespace kvm::testing {
namespace {

using tiers::kExtentBytes;

struct RealPages {
  tiers::PageMemory& memory = *tiers::system_page_memory();
};
struct SimulatedPages {
  SimulatedPageMemory memory;
};

template <typename Pages>
class PageMemoryConformance : public ::testing::Test {
 protected:
  Pages pages_;
};
using AllPages = ::testing::Types<RealPages, SimulatedPages>;
TYPED_TEST_SUITE(PageMemoryConformance, AllPages);

bool is_zero(const std::byte* data, uint64_t size_bytes) {
  return std::all_of(data, data + size_bytes, [](std::byte b) { return b == std::byte{0}; });
}

TYPED_TEST(PageMemoryConformance, OpenedPartsAreZeroAndKeepWhatIsWritten) {
  tiers::PageMemory& memory = this->pages_.memory;
  std::byte* const data = memory.reserve(4 * kExtentBytes);
  ASSERT_NE(data, nullptr);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 4096, 0u);
  ASSERT_TRUE(memory.open(data + kExtentBytes, kExtentBytes));
  ASSERT_TRUE(memory.open(data + 3 * kExtentBytes, kExtentBytes));
  EXPECT_TRUE(is_zero(data + kExtentBytes, kExtentBytes));
  std::fill_n(data + kExtentBytes, kExtentBytes, std::byte{7});
  EXPECT_TRUE(is_zero(data + 3 * kExtentBytes, kExtentBytes)) << "of its own";
  EXPECT_EQ(data[2 * kExtentBytes - 1], std::byte{7});
  memory.release(data, 4 * kExtentBytes);
}

TYPED_TEST(PageMemoryConformance, DiscardedPartsAreZeroAgainAndStayOpen) {
  tiers::PageMemory& memory = this->pages_.memory;
  std::byte* const data = memory.reserve(2 * kExtentBytes);
  ASSERT_NE(data, nullptr);
  for (int part = 0; part < 2; ++part) {
    ASSERT_TRUE(memory.open(data + part * kExtentBytes, kExtentBytes));
    std::fill_n(data + part * kExtentBytes, kExtentBytes, std::byte{9});
  }
  memory.discard(data, kExtentBytes);
  EXPECT_TRUE(is_zero(data, kExtentBytes));
  EXPECT_EQ(data[kExtentBytes], std::byte{9}) << "the other part is as it was";
  data[5] = std::byte{1};
  EXPECT_EQ(data[5], std::byte{1});
  memory.release(data, 2 * kExtentBytes);
}

TYPED_TEST(PageMemoryConformance, ATouchChangesNothing) {
  tiers::PageMemory& memory = this->pages_.memory;
  std::byte* const data = memory.reserve(2 * kExtentBytes);
  ASSERT_NE(data, nullptr);
  ASSERT_TRUE(memory.open(data, 2 * kExtentBytes)) << "two at once";
  data[0] = std::byte{3};
  data[kExtentBytes - 1] = std::byte{4};
  memory.touch(data, kExtentBytes);
  EXPECT_EQ(data[0], std::byte{3});
  EXPECT_EQ(data[kExtentBytes - 1], std::byte{4});
  EXPECT_TRUE(is_zero(data + 1, kExtentBytes - 2));
  memory.discard(data, kExtentBytes);
  EXPECT_TRUE(is_zero(data, 2 * kExtentBytes));
  memory.release(data, 2 * kExtentBytes);
}

TYPED_TEST(PageMemoryConformance, ReservationsDoNotOverlap) {
  tiers::PageMemory& memory = this->pages_.memory;
  std::vector<std::byte*> all;
  for (int i = 0; i < 8; ++i) {
    all.push_back(memory.reserve(2 * kExtentBytes));
    ASSERT_NE(all.back(), nullptr);
  }
  std::sort(all.begin(), all.end());
  for (size_t i = 1; i < all.size(); ++i) {
    EXPECT_GE(all[i] - all[i - 1], static_cast<ptrdiff_t>(2 * kExtentBytes));
  }
  for (std::byte* data : all) {
    memory.release(data, 2 * kExtentBytes);
  }
}

// A process that locks all it maps has no memory for what is accessible and not in use.
TEST(SystemPageMemory, WhatIsOpenedTakesNoMemoryWhereEverythingIsLocked) {
  constexpr uint64_t kBytes = 4 * kExtentBytes;
  tiers::PageMemory& memory = *tiers::system_page_memory();
  if (::mlockall(MCL_FUTURE) != 0) {
    GTEST_SKIP() << "this process may lock no memory";
  }
  std::byte* const data = memory.reserve(kBytes);
  const bool is_open = data != nullptr && memory.open(data, kBytes);
  ::munlockall();
  if (data == nullptr) {
    GTEST_SKIP() << "this process may not lock so much memory";
  }
  ASSERT_TRUE(is_open);
  std::vector<unsigned char> pages(kBytes / 4096);
  ASSERT_EQ(::mincore(data, kBytes, pages.data()), 0);
  EXPECT_TRUE(std::all_of(pages.begin(), pages.end(), [](unsigned char p) { return p == 0; }));
  memory.release(data, kBytes);
}

// Where the system refuses many extents together it may have some for one.
TEST(HostPoolMemory, WhereManyAreRefusedOneIsAskedFor) {
  SimulatedPageMemory memory;
  tiers::MemoryBudget budget(40 * kExtentBytes);
  tiers::HostPool pool(&budget, 0, &memory);
  memory.allow_open(11 * kExtentBytes);
  tiers::SlabClass page;
  page.dim_k = page.dim_v = 256;
  page.n_heads = 32;  // an extent has one page of 2 MiB
  ASSERT_EQ(page.page_bytes(), kExtentBytes);
  std::vector<tiers::FrameRef> frames;
  while (true) {
    const Result<tiers::FrameRef> frame = pool.allocate(page, 0);
    if (!frame.is_ok()) {
      EXPECT_EQ(frame.status().code(), KVM_ERR_NO_MEMORY);
      break;
    }
    frames.push_back(frame.value());
  }
  EXPECT_EQ(frames.size(), 11u);
  for (const tiers::FrameRef frame : frames) {
    pool.free(frame);
  }
}

// Pages of two classes, until memory is refused at the n-th call: nothing has changed then, and the
// next try succeeds.
TEST(HostPoolMemory, EachRefusalLeavesEverythingAsItWas) {
  tiers::SlabClass small;
  small.dim_k = small.dim_v = 64;
  small.n_heads = 1;
  tiers::SlabClass large = small;
  large.n_heads = 4;
  constexpr int kPages = 300;
  bool was_refused = true;
  uint64_t n = 1;
  for (; was_refused; ++n) {
    SimulatedPageMemory memory;
    {
      tiers::MemoryBudget budget(8 * kExtentBytes);
      tiers::HostPool pool(&budget, 0, &memory);
      was_refused = false;
      memory.refuse(n);
      std::vector<tiers::FrameRef> frames;
      for (int i = 0; i < kPages; ++i) {
        const tiers::SlabClass& slab_class = i % 2 == 0 ? small : large;
        const uint64_t used = budget.used_bytes();
        Result<tiers::FrameRef> frame = pool.allocate(slab_class, 0);
        if (!frame.is_ok()) {
          EXPECT_FALSE(was_refused) << "once";
          was_refused = true;
          EXPECT_EQ(frame.status().code(), KVM_ERR_NO_MEMORY);
          EXPECT_EQ(budget.used_bytes(), used);
          EXPECT_EQ(pool.n_frames(), frames.size());
          pool.check_accounts();
          frame = pool.allocate(slab_class, 0);
          ASSERT_TRUE(frame.is_ok()) << frame.status().message();
        }
        frames.push_back(frame.value());
      }
      for (const tiers::FrameRef frame : frames) {
        pool.free(frame);
      }
      while (pool.trim(1)) {
      }
      pool.check_accounts();
      EXPECT_EQ(budget.used_bytes(), 0u);
    }
    EXPECT_EQ(memory.reserved_bytes(), 0u);
  }
  EXPECT_GE(n, 4u) << "two reservations and an extent of each, at least";
}

}  // namespace
}  // namespace kvm::testing
