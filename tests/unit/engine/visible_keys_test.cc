// SPDX-License-Identifier: Apache-2.0
#include "engine/attend/visible_keys.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

namespace kvm::engine {
namespace {

bool sees(const attention::Visibility& v, uint32_t n_query, uint32_t i, uint64_t x) {
  const uint64_t p = v.query_position + i;
  if (v.tree != nullptr) {
    if (x >= v.query_position + n_query ||
        (x >= v.query_position && (v.tree[i] >> (x - v.query_position) & 1) == 0)) {
      return false;
    }
  } else if (v.causal && x > p) {
    return false;
  }
  if (v.window != 0 && x <= p && p - x >= v.window && x >= v.sinks) {
    return false;
  }
  const auto inside = [x](std::span<const PositionRange> ranges) {
    for (const PositionRange& r : ranges) {
      if (r.begin <= x && x < r.end) {
        return true;
      }
    }
    return false;
  };
  return (v.include.empty() || inside(v.include)) && !inside(v.exclude);
}

std::vector<PositionRange> random_ranges(std::mt19937& random, uint32_t most) {
  std::vector<PositionRange> ranges;
  uint64_t at = 0;
  for (uint32_t n = random() % (most + 1) & 0xff; n != 0; --n) {
    const uint64_t begin = at + random() % 60;
    at = begin + 1 + random() % 60;
    ranges.push_back({begin, at});
  }
  return ranges;
}

TEST(VisibleKeys, CountsLikeALoopOverEveryPair) {
  VisibleKeys keys;
  for (uint32_t seed = 0; seed < 3000; ++seed) {
    std::mt19937 random(seed);
    const auto pick = [&random](uint32_t n) { return static_cast<uint32_t>(random() % n); };
    std::vector<KvRun> runs;
    std::vector<uint64_t> stored;
    for (uint64_t page = 0; page < 5; ++page) {
      if (pick(4) == 0) {
        continue;
      }
      KvRun run;
      const uint32_t skip = pick(3) == 0 ? pick(60) : 0;
      run.position = page * kPageTokens + skip;
      run.n_tokens = static_cast<uint16_t>(1 + pick(kPageTokens - skip));
      runs.push_back(run);
      for (uint32_t i = 0; i < run.n_tokens; ++i) {
        stored.push_back(run.position + i);
      }
    }
    const uint32_t n_query = 1 + pick(6);
    std::vector<uint64_t> tree(n_query);
    for (uint32_t i = 0; i < n_query; ++i) {
      tree[i] = random() & ((uint64_t{1} << n_query) - 1);
    }
    const std::vector<PositionRange> include = random_ranges(random, 3);
    const std::vector<PositionRange> exclude = random_ranges(random, 3);
    attention::Visibility v;
    v.query_position = pick(400);
    v.window = pick(2) == 0 ? 0 : 1 + pick(300);
    v.window = pick(9) == 0 ? UINT64_MAX - pick(3) : v.window;
    v.sinks = pick(2) == 0 ? 0 : pick(200);
    v.causal = pick(4) != 0;
    v.tree = pick(3) == 0 ? tree.data() : nullptr;
    v.tree_stride_words = 1;
    v.include = include;
    v.exclude = exclude;
    uint64_t expected = 0;
    for (uint64_t x : stored) {
      bool any = false;
      for (uint32_t i = 0; i < n_query; ++i) {
        any |= sees(v, n_query, i, x);
      }
      expected += any ? 1 : 0;
    }
    keys.clear();
    keys.add(v, n_query);
    ASSERT_EQ(keys.count(runs), expected) << "seed " << seed;
    // The same rows once more, and then rows that see everything.
    keys.add(v, n_query);
    ASSERT_EQ(keys.count(runs), expected) << "seed " << seed;
    keys.add({.query_position = 1000}, 1);
    ASSERT_EQ(keys.count(runs), stored.size()) << "seed " << seed;
  }
}

TEST(VisibleKeys, NothingToSee) {
  VisibleKeys keys;
  const KvRun run{.position = 0, .n_tokens = 5};
  EXPECT_EQ(keys.count(KvRuns(&run, 1)), 0u);
  keys.add({}, 0);
  EXPECT_EQ(keys.count(KvRuns(&run, 1)), 0u);
  keys.add({}, 1);
  EXPECT_EQ(keys.count({}), 0u);
  EXPECT_EQ(keys.count(KvRuns(&run, 1)), 1u);
}

}  // namespace
}  // namespace kvm::engine
