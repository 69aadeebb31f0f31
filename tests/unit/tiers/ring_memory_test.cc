// SPDX-License-Identifier: Apache-2.0
#include "tiers/host/ring_memory.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "tests/sim/simulated_page_memory.h"
#include "tiers/slab_class.h"

namespace kvm::tiers {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

// Stretches of any size, taken and given back in any order, never overlap; what is free is one
// stretch again in the end.
TEST(RingMemory, StretchesAreApart) {
  MemoryBudget budget(64 * kMiB);
  RingMemory rings(&budget);
  ASSERT_TRUE(rings.grow_to(8 * kMiB).is_ok());
  struct Taken {
    std::byte* data;
    uint64_t size_bytes;
    uint8_t mark;
  };
  std::vector<Taken> taken;
  std::mt19937 generator(3);
  for (int step = 0; step < 20000; ++step) {
    if (step == 10000) {
      ASSERT_TRUE(rings.grow_to(11 * kMiB).is_ok());
    }
    if (generator() % 2 == 0) {
      const uint64_t size_bytes = 1 + generator() % (2 * kMiB);
      std::byte* data = rings.take(size_bytes);
      if (data != nullptr) {
        ASSERT_EQ(reinterpret_cast<uintptr_t>(data) % RingMemory::kAlign, 0u);
        const auto mark = static_cast<uint8_t>(generator());
        std::memset(data, mark, 1);
        std::memset(data + size_bytes - 1, mark, 1);
        taken.push_back({data, size_bytes, mark});
      } else {
        ASSERT_FALSE(taken.empty());
      }
    } else if (!taken.empty()) {
      const size_t at = generator() % taken.size();
      ASSERT_EQ(static_cast<uint8_t>(taken[at].data[0]), taken[at].mark);
      ASSERT_EQ(static_cast<uint8_t>(taken[at].data[taken[at].size_bytes - 1]), taken[at].mark);
      rings.give_back(taken[at].data, taken[at].size_bytes);
      taken[at] = taken.back();
      taken.pop_back();
    }
  }
  for (const Taken& each : taken) {
    rings.give_back(each.data, each.size_bytes);
  }
  // Rounded up to whole extents.
  EXPECT_EQ(rings.size_bytes(), 12 * kMiB);
  EXPECT_EQ(rings.free_bytes(), 12 * kMiB);
  std::byte* all = rings.take(12 * kMiB);
  ASSERT_NE(all, nullptr);
  EXPECT_EQ(rings.take(1), nullptr);
  rings.give_back(all, 12 * kMiB);
}

TEST(RingMemory, IsChargedOnceAndRefusedCleanly) {
  MemoryBudget budget(10 * kMiB);
  testing::SimulatedPageMemory memory;
  {
    RingMemory rings(&budget, &memory);
    EXPECT_EQ(rings.grow_to(12 * kMiB).code(), KVM_ERR_NO_SPACE);
    EXPECT_EQ(rings.grow_to(budget.capacity_bytes()).code(), KVM_ERR_NO_SPACE);  // nothing is left
    EXPECT_EQ(rings.grow_to(RingMemory::kMaxBytes + 1).code(), KVM_ERR_LIMIT);
    for (const uint64_t nth : {1u, 2u}) {
      memory.refuse(nth);
      EXPECT_EQ(rings.grow_to(4 * kMiB).code(), KVM_ERR_NO_MEMORY) << nth;
      EXPECT_EQ(budget.used_bytes(), 0u);
      EXPECT_EQ(rings.take(1), nullptr);
    }
    EXPECT_TRUE(rings.grow_to(4 * kMiB).is_ok());
    EXPECT_TRUE(rings.grow_to(2 * kMiB).is_ok());
    EXPECT_EQ(budget.used_bytes(), 4 * kMiB);
    memory.refuse(1);
    EXPECT_EQ(rings.grow_to(6 * kMiB).code(), KVM_ERR_NO_MEMORY);
    EXPECT_EQ(rings.free_bytes(), 4 * kMiB);
  }
  EXPECT_EQ(budget.used_bytes(), 0u);
}

}  // namespace
}  // namespace kvm::tiers
