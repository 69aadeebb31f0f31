// SPDX-License-Identifier: Apache-2.0
#include "tiers/host/host_pool.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <random>
#include <set>
#include <vector>

namespace kvm::tiers {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

SlabClass slab_class_of(uint16_t n_heads, uint16_t dim = 64, CodecId codec_k = CodecId::kBf16) {
  return {.codec_k = codec_k,
          .codec_v = CodecId::kBf16,
          .dim_k = dim,
          .dim_v = dim,
          .n_heads = n_heads};
}

bool is_resident(const std::byte* address) {
  unsigned char resident = 0;
  const uintptr_t page = reinterpret_cast<uintptr_t>(address) & ~uintptr_t{4095};
  EXPECT_EQ(mincore(reinterpret_cast<void*>(page), 4096, &resident), 0);
  return (resident & 1) != 0;
}

TEST(SlabClass, PlanesFollowEachOther) {
  const SlabClass mixed = {
      .codec_k = CodecId::kF32, .codec_v = CodecId::kBf16, .dim_k = 24, .dim_v = 8, .n_heads = 3};
  EXPECT_EQ(mixed.v_offset(), 3u * 64 * 24 * 4);
  EXPECT_EQ(mixed.page_bytes(), mixed.v_offset() + 3u * 64 * 8 * 2);
  for (uint16_t dim = 8; dim <= 256; dim = static_cast<uint16_t>(dim + 8)) {
    const SlabClass one = slab_class_of(1, dim);
    EXPECT_EQ(one.v_offset() % 64, 0u);
    EXPECT_EQ(one.page_bytes() % 64, 0u);
  }
}

// Random allocation and freeing against a map; every frame holds a number of its own.
TEST(HostPool, FramesDoNotOverlapAndAreCounted) {
  MemoryBudget budget(64 * kMiB);
  HostPool pool(&budget, 4 * kMiB);
  std::mt19937 generator(11);
  const std::vector<SlabClass> classes = {slab_class_of(8), slab_class_of(1), slab_class_of(5, 128),
                                          slab_class_of(8, 256, CodecId::kF32)};
  struct Held {
    SlabClass slab_class;
    uint8_t mark;
  };
  std::map<uint32_t, Held> held;  // by the number of the frame
  uint64_t bytes = 0;
  for (int step = 0; step < 6000; ++step) {
    const uint32_t dice = static_cast<uint32_t>(generator() % 100);
    // Grows for a while, then shrinks, so that extents fill up and empty.
    const bool grow = step / 1500 % 2 == 0;
    if (dice < (grow ? 60u : 20u) || held.empty()) {
      const SlabClass& slab_class = classes[generator() % classes.size()];
      const Result<FrameRef> frame = pool.allocate(slab_class, 0);
      if (!frame.is_ok()) {
        EXPECT_EQ(frame.status().code(), KVM_ERR_NO_SPACE);
        EXPECT_LT(budget.free_bytes(), kExtentBytes);
        continue;
      }
      ASSERT_EQ(held.count(frame.value().number), 0u);
      ASSERT_EQ(pool.slab_class(frame.value()), slab_class);
      std::byte* data = pool.data(frame.value());
      const uintptr_t address = reinterpret_cast<uintptr_t>(data);
      EXPECT_EQ(address % 64, 0u);
      EXPECT_EQ(address / kExtentBytes, (address + slab_class.page_bytes() - 1) / kExtentBytes);
      const uint8_t mark = static_cast<uint8_t>(generator());
      std::memset(data, mark, slab_class.page_bytes());
      held[frame.value().number] = {slab_class, mark};
      bytes += slab_class.page_bytes();
    } else {
      auto it = held.begin();
      std::advance(it, generator() % held.size());
      const FrameRef frame = {it->first};
      const uint64_t page_bytes = it->second.slab_class.page_bytes();
      const auto* data = reinterpret_cast<const uint8_t*>(pool.data(frame));
      ASSERT_EQ(data[0], it->second.mark);
      ASSERT_EQ(data[page_bytes - 1], it->second.mark);
      ASSERT_TRUE(pool.is_used(frame));
      pool.free(frame);
      bytes -= page_bytes;
      held.erase(it);
    }
    ASSERT_EQ(pool.n_frames(), held.size());
    ASSERT_EQ(pool.frame_bytes(), bytes);
    ASSERT_EQ(budget.used_bytes(), pool.extent_bytes());
    if (step % 16 == 0) {
      pool.check_accounts();
    }
  }
  for (const auto& [number, record] : held) {
    pool.free({number});
  }
  pool.check_accounts();
  EXPECT_EQ(pool.n_frames(), 0u);
  EXPECT_EQ(pool.extent_bytes(), pool.cached_bytes());
  EXPECT_FALSE(pool.trim(UINT64_MAX));
  EXPECT_EQ(pool.cached_bytes(), 4 * kMiB);
}

TEST(HostPool, GivesMemoryBack) {
  MemoryBudget budget(32 * kMiB);
  HostPool pool(&budget, 0);
  const SlabClass half = slab_class_of(8, 256, CodecId::kBf16);  // 512 KiB a page
  std::vector<FrameRef> frames;
  for (int i = 0; i < 8; ++i) {
    frames.push_back(pool.allocate(half, 0).value());
    std::memset(pool.data(frames.back()), 1, half.page_bytes());
  }
  EXPECT_EQ(budget.used_bytes(), 2 * kExtentBytes);
  const std::byte* first = pool.data(frames[0]);
  EXPECT_TRUE(is_resident(first));
  for (const FrameRef frame : frames) {
    pool.free(frame);
  }
  EXPECT_EQ(pool.cached_bytes(), 2 * kExtentBytes);
  EXPECT_TRUE(pool.trim(1));
  EXPECT_FALSE(pool.trim(1));
  EXPECT_EQ(budget.used_bytes(), 0u);
  EXPECT_EQ(pool.peak_extent_bytes(), 2 * kExtentBytes);
  EXPECT_FALSE(is_resident(first));
}

TEST(HostPool, CapIsHardAndFailureChangesNothing) {
  MemoryBudget budget(3 * kExtentBytes + 5);
  HostPool pool(&budget, 0);
  const SlabClass whole = {.codec_k = CodecId::kF32,
                           .codec_v = CodecId::kF32,
                           .dim_k = 256,
                           .dim_v = 256,
                           .n_heads = 16};
  ASSERT_EQ(whole.page_bytes(), kExtentBytes);
  std::vector<FrameRef> frames;
  for (int i = 0; i < 3; ++i) {
    frames.push_back(pool.allocate(whole, 0).value());
  }
  for (const SlabClass& slab_class : {whole, slab_class_of(1)}) {
    const Result<FrameRef> more = pool.allocate(slab_class, 0);
    ASSERT_FALSE(more.is_ok());
    EXPECT_EQ(more.status().code(), KVM_ERR_NO_SPACE);
    EXPECT_NE(more.status().message().find("6291461"), std::string::npos);
  }
  EXPECT_EQ(pool.n_frames(), 3u);
  EXPECT_EQ(budget.used_bytes(), 3 * kExtentBytes);
  pool.free(frames[1]);
  EXPECT_TRUE(pool.allocate(slab_class_of(1), 0).is_ok());
  pool.check_accounts();
}

TEST(HostPool, CachedExtentsGiveWay) {
  MemoryBudget budget(4 * kExtentBytes);
  HostPool pool(&budget, 4 * kExtentBytes);
  const SlabClass one = slab_class_of(8, 256, CodecId::kF32);
  std::vector<FrameRef> frames;
  while (true) {
    const Result<FrameRef> frame = pool.allocate(one, 0);
    if (!frame.is_ok()) {
      break;
    }
    frames.push_back(frame.value());
  }
  for (const FrameRef frame : frames) {
    pool.free(frame);
  }
  EXPECT_EQ(pool.cached_bytes(), 4 * kExtentBytes);
  EXPECT_EQ(budget.used_bytes(), 4 * kExtentBytes);
  // Another class takes the room over.
  EXPECT_TRUE(pool.allocate(slab_class_of(1), 0).is_ok());
  EXPECT_EQ(pool.cached_bytes(), 3 * kExtentBytes);
  EXPECT_TRUE(pool.make_room(2 * kExtentBytes));
  EXPECT_FALSE(pool.make_room(4 * kExtentBytes));
  EXPECT_EQ(pool.cached_bytes(), 0u);
  pool.check_accounts();
}

TEST(HostPool, LockedMemoryGoesBackToo) {
  MemoryBudget budget(2 * kExtentBytes);
  HostPool pool(&budget, 0);
  const FrameRef frame = pool.allocate(slab_class_of(8, 256), 0).value();
  std::byte* data = pool.data(frame);
  if (mlock(data, 4096) != 0) {
    GTEST_SKIP() << "this process may lock no memory";
  }
  data[0] = std::byte{1};
  pool.free(frame);
  EXPECT_FALSE(pool.trim(1));
  EXPECT_EQ(budget.used_bytes(), 0u);
  EXPECT_FALSE(is_resident(data));
}

TEST(HostPool, SlabNumbersAreRecycled) {
  MemoryBudget budget(8 * kExtentBytes);
  HostPool pool(&budget, 2 * kExtentBytes);
  const FrameRef kept = pool.allocate(slab_class_of(128, 8), 0).value();
  uint32_t n_classes = 0;
  for (uint16_t n_heads = 1; n_heads <= 32; ++n_heads) {
    for (uint16_t dim = 8; dim <= 256; dim = static_cast<uint16_t>(dim + 8)) {
      SlabClass slab_class = slab_class_of(n_heads, dim);
      for (const int dim_v : {8, 16}) {
        slab_class.dim_v = static_cast<uint16_t>(dim_v);
        const Result<FrameRef> frame = pool.allocate(slab_class, 0);
        ASSERT_TRUE(frame.is_ok()) << frame.status().message();
        ASSERT_EQ(pool.slab_class(frame.value()), slab_class);
        pool.free(frame.value());
        ++n_classes;
      }
    }
  }
  EXPECT_GT(n_classes, kMaxSlabs);
  EXPECT_EQ(pool.slab_class(kept), slab_class_of(128, 8));
  pool.check_accounts();
}

TEST(HostPool, TheSmallestFramesFillExtents) {
  MemoryBudget budget(kExtentBytes * 8);
  HostPool pool(&budget, 0);
  std::set<uint32_t> frames;
  const SlabClass tiny = slab_class_of(1, 8);
  ASSERT_EQ(tiny.page_bytes(), 2048u);
  for (int i = 0; i < 8 * 1024; ++i) {
    ASSERT_TRUE(frames.insert(pool.allocate(tiny, 0).value().number).second);
  }
  EXPECT_FALSE(pool.allocate(tiny, 0).is_ok());
  for (const uint32_t number : frames) {
    pool.free({number});
  }
  EXPECT_FALSE(pool.trim(8));
  EXPECT_EQ(budget.used_bytes(), 0u);
}

}  // namespace
}  // namespace kvm::tiers
