// SPDX-License-Identifier: Apache-2.0
// Priorities of parts of a sequence, against a list of what each page has.
#include "engine/store/priorities.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

namespace kvm::engine {
namespace {

constexpr uint64_t kPages = 64;

struct Said {
  uint32_t priority = KVM_PRIORITY_DEFAULT;
  uint64_t until_ns = UINT64_MAX;
  uint32_t at(uint64_t now) const { return now < until_ns ? priority : 50; }
};

void expect_same(const Priorities& priorities, const std::vector<Said>& pages, uint64_t now) {
  for (uint64_t page = 0; page < pages.size(); ++page) {
    const Priorities::Stretch stretch = priorities.at(page, now);
    ASSERT_EQ(stretch.priority, pages[page].at(now)) << page;
    ASSERT_GT(stretch.end, page);
    for (uint64_t other = page; other < std::min<uint64_t>(stretch.end, pages.size()); ++other) {
      ASSERT_EQ(pages[other].at(now), stretch.priority) << page << ", " << other;
    }
  }
}

TEST(Priorities, AreThoseThatWereSetLast) {
  uint64_t n_refused = 0;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    std::mt19937_64 random(seed);
    Priorities priorities;
    std::vector<Said> pages(kPages);
    uint64_t now = 100;
    for (int i = 0; i < 200; ++i) {
      PriorityRange range;
      range.priority = static_cast<uint32_t>(random() % 3 == 0 ? 50 : random() % 101);
      range.begin = random() % (kPages * kPageTokens);
      range.end = range.begin + 1 + random() % (random() % 16 == 0 ? kPages * kPageTokens : 100);
      range.keep_ns = random() % 3 == 0 ? 1 + random() % 50 : 0;
      if (random() % 40 == 0) {
        range.end = KVM_POSITION_END;
      }
      const Status status = priorities.set(range, now);
      if (status.is_ok()) {
        for (uint64_t page = range.begin / kPageTokens;
             page < kPages && page * kPageTokens < range.end; ++page) {
          pages[page] = {range.priority, range.keep_ns == 0 ? UINT64_MAX : now + range.keep_ns};
        }
      } else {
        EXPECT_EQ(status.code(), KVM_ERR_LIMIT);
        ++n_refused;
      }
      ASSERT_LE(priorities.parts().size(), kMaxPriorityRanges);
      expect_same(priorities, pages, now);
      const uint64_t n_first = random() % (kPages * kPageTokens + 1);
      std::vector<Said> first = pages;
      for (uint64_t page = 0; page < kPages; ++page) {
        first[page] = page * kPageTokens < n_first ? pages[page] : Said{};
      }
      expect_same(priorities.first(n_first, now), first, now);
      now += random() % 20;
      expect_same(priorities, pages, now);
      if (random() % 5 == 0) {
        priorities.expire(now);
        expect_same(priorities, pages, now);
      }
    }
  }
  EXPECT_GT(n_refused, 0u);
}

TEST(Priorities, ThereAreOnlySoMany) {
  Priorities priorities;
  for (uint64_t i = 0; i < kMaxPriorityRanges; ++i) {
    EXPECT_TRUE(priorities.set({.priority = 1, .begin = 128 * i, .end = 128 * i + 1}, 0).is_ok());
  }
  EXPECT_EQ(priorities.set({.priority = 1, .begin = 64 * 99, .end = 64 * 100}, 0).code(),
            KVM_ERR_LIMIT);
  EXPECT_EQ(priorities.at(99, 0).priority, 50u);
  // What joins others makes them fewer, and so does the default.
  EXPECT_TRUE(priorities.set({.priority = 1, .begin = 64, .end = 128}, 0).is_ok());
  EXPECT_EQ(priorities.parts().size(), kMaxPriorityRanges - 1);
  EXPECT_TRUE(priorities.set({.priority = 50, .end = KVM_POSITION_END}, 0).is_ok());
  EXPECT_TRUE(priorities.is_empty());
}

}  // namespace
}  // namespace kvm::engine
