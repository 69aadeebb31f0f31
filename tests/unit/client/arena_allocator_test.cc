// SPDX-License-Identifier: Apache-2.0
#include "client/arena_allocator.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <iterator>
#include <map>
#include <random>
#include <vector>

namespace kvm::client {
namespace {

constexpr uint64_t kBytes = 256 << 10;

TEST(ArenaAllocator, AllOfItInOnePiece) {
  ArenaAllocator arena(kBytes);
  EXPECT_EQ(arena.allocate(kBytes, 4096), 0u);
  EXPECT_EQ(arena.allocate(1, 64), ArenaAllocator::kNone);
  arena.free(0);
  EXPECT_TRUE(arena.is_empty());
  EXPECT_EQ(arena.allocate(kBytes + 1, 64), ArenaAllocator::kNone);
  EXPECT_EQ(arena.allocate(UINT64_MAX, 64), ArenaAllocator::kNone);
  EXPECT_EQ(arena.allocate(0, 64), ArenaAllocator::kNone);
}

TEST(ArenaAllocator, WhatWasNotGivenOutIsNotTakenBack) {
  ArenaAllocator arena(kBytes);
  const uint64_t piece = arena.allocate(1000, 64);
  arena.free(piece + 64);
  arena.free(UINT64_MAX);
  EXPECT_FALSE(arena.is_empty());
  arena.free(piece);
  arena.free(piece);
  EXPECT_EQ(arena.allocate(kBytes, 64), 0u);
}

// Against a map of the units of 64 bytes: no two pieces overlap, nothing is lost, and where one is
// refused there is no room.
TEST(ArenaAllocator, RandomUseAgainstAMapOfTheArena) {
  for (uint32_t seed = 1; seed <= 6; ++seed) {
    std::mt19937 random(seed);
    ArenaAllocator arena(kBytes);
    std::vector<bool> taken(kBytes / 64);
    std::map<uint64_t, uint64_t> pieces;
    const auto mark = [&](uint64_t offset, uint64_t size, bool to) {
      for (uint64_t unit = offset / 64; unit * 64 < offset + size; ++unit) {
        ASSERT_NE(taken.at(unit), to);
        taken[unit] = to;
      }
    };
    const auto fits_at = [&](uint64_t offset, uint64_t size) {
      for (uint64_t unit = offset / 64; unit * 64 < offset + size; ++unit) {
        if (unit >= taken.size() || taken[unit]) {
          return false;
        }
      }
      return true;
    };
    for (int i = 0; i < 3000; ++i) {
      if (random() % 2 == 0 || pieces.empty()) {
        const uint64_t size = 1 + random() % (random() % 8 == 0 ? 60'000 : 3000);
        const uint64_t alignment = random() % 4 == 0 ? uint64_t{1} << (random() % 13) : 0;
        const uint64_t unit = std::max<uint64_t>(alignment, 64);
        const uint64_t offset = arena.allocate(size, alignment);
        if (offset == ArenaAllocator::kNone) {
          for (uint64_t at = 0; at < kBytes; at += unit) {
            ASSERT_FALSE(fits_at(at, size)) << size << " bytes at " << at;
          }
          continue;
        }
        ASSERT_EQ(offset % unit, 0u);
        mark(offset, size, true);
        pieces[offset] = size;
      } else {
        auto piece = std::next(pieces.begin(), static_cast<long>(random() % pieces.size()));
        arena.free(piece->first);
        mark(piece->first, piece->second, false);
        pieces.erase(piece);
      }
    }
    for (const auto& [offset, size] : pieces) {
      arena.free(offset);
    }
    EXPECT_TRUE(arena.is_empty());
    EXPECT_EQ(arena.allocate(kBytes, 64), 0u);
  }
}

}  // namespace
}  // namespace kvm::client
