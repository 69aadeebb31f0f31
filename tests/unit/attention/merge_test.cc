// SPDX-License-Identifier: Apache-2.0
#include "base/merge.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "tests/unit/attention/testbed.h"

namespace kvm::attention::testing {
namespace {

constexpr float kInf = -kEmptyLse;

// Public states of some rows, o [row][dim] and lse [row]: a := a merged with b.
void merge_rows(std::vector<float>* o_a, std::vector<float>* lse_a, const std::vector<float>& o_b,
                const std::vector<float>& lse_b) {
  const auto dim = static_cast<uint32_t>(o_b.size() / lse_b.size());
  for (size_t row = 0; row < lse_b.size(); ++row) {
    float* o = o_a->data() + row * dim;
    float* m = lse_a->data() + row;
    float l = *m == kEmptyLse ? 0.0f : 1.0f;
    merge_row(o, m, &l, o_b.data() + row * dim, lse_b[row], lse_b[row] == kEmptyLse ? 0.0f : 1.0f,
              dim);
    for (uint32_t d = 0; l > 0.0f && d < dim; ++d) {
      o[d] /= l;
    }
    *m = state_lse(*m, l);
  }
}

TEST(Merge, EmptySidesChangeNoBit) {
  const std::vector<float> o_a = {1.25f, -3.5f, 0.1f};
  const std::vector<float> lse_a = {12.75f};
  const std::vector<float> o_e = {0, 0, 0};
  const std::vector<float> lse_e = {-kInf};
  std::vector<float> o = o_a;
  std::vector<float> lse = lse_a;
  merge_rows(&o, &lse, o_e, lse_e);
  EXPECT_EQ(o, o_a);
  EXPECT_EQ(lse, lse_a);
  o = o_e;
  lse = lse_e;
  merge_rows(&o, &lse, o_e, lse_e);
  EXPECT_EQ(o, o_e);
  EXPECT_EQ(lse, lse_e);
  merge_rows(&o, &lse, o_a, lse_a);
  EXPECT_EQ(o, o_a);
  EXPECT_EQ(lse, lse_a);
}

TEST(Merge, ExtremeDifferencesStayFinite) {
  std::vector<float> o = {2.0f};
  std::vector<float> lse = {1e38f};
  merge_rows(&o, &lse, {5.0f}, {-1e38f});
  EXPECT_EQ(o[0], 2.0f);
  EXPECT_EQ(lse[0], 1e38f);
}

TEST(Merge, Formula) {
  std::vector<float> o = {1.0f, 2.0f};
  std::vector<float> lse = {0.5f};
  merge_rows(&o, &lse, {-3.0f, 4.0f}, {1.5f});
  const double a = std::exp(0.5);
  const double b = std::exp(1.5);
  EXPECT_NEAR(o[0], (a * 1 + b * -3) / (a + b), 1e-6);
  EXPECT_NEAR(o[1], (a * 2 + b * 4) / (a + b), 1e-6);
  EXPECT_NEAR(lse[0], std::log(a + b), 1e-6);
}

TEST(Merge, NanIsNotLost) {
  for (const bool first : {true, false}) {
    std::vector<float> o = {first ? NAN : 1.0f};
    std::vector<float> lse = {1.0f};
    merge_rows(&o, &lse, {first ? 1.0f : NAN}, {2.0f});
    EXPECT_TRUE(std::isnan(o[0]));
  }
}

// Attention over a partition of the keys, merged, is attention over all of them.
TEST(Merge, AnyPartitionGivesTheWhole) {
  std::mt19937_64 random(17);
  for (int round = 0; round < 30; ++round) {
    const uint64_t seed = random();
    SCOPED_TRACE("seed " + std::to_string(seed));
    Case c(Shape{.n_query = 1 + static_cast<uint32_t>(seed % 3),
                 .dim_k = 64,
                 .dim_v = 64,
                 .n_tokens = 1 + seed % 3000},
           seed);
    for (TokenKind& kind : c.kinds) {
      kind = {CodecId::kF32, CodecId::kF32, 0};
    }
    c.store(0);
    c.run_reference();
    std::vector<float> o;
    std::vector<float> lse;
    uint64_t begin = 0;
    while (begin < c.end_position()) {
      const PositionRange part{begin, begin + 1 + random() % 1500};
      begin = part.end;
      c.problem().visible.include = {&part, 1};
      c.run(nullptr, 2);
      if (o.empty()) {
        o = c.o;
        lse = c.lse;
        continue;
      }
      merge_rows(&o, &lse, c.o, c.lse);
    }
    c.o = o;
    c.lse = lse;
    EXPECT_LE(c.error_o(), 1e-5);
    EXPECT_LE(c.error_lse(), 1e-5);
  }
}

// The merges below the node of absolute chunks [begin, begin + size), by the definition of the
// tree. Returns the state of the node, or nothing where none of its chunks has one.
std::optional<uint32_t> merges_below(const std::map<uint64_t, uint32_t>& state_of, uint64_t begin,
                                     uint64_t size, std::set<std::pair<uint32_t, uint32_t>>* out) {
  if (size == 1) {
    const auto found = state_of.find(begin);
    return found == state_of.end() ? std::nullopt : std::optional(found->second);
  }
  const auto left = merges_below(state_of, begin, size / 2, out);
  const auto right = merges_below(state_of, begin + size / 2, size / 2, out);
  if (left && right) {
    out->insert({*left, *right});
  }
  return left ? left : right;
}

// Chunks that come in any order, each merging what it makes complete, make the merges of the tree:
// every one once, and none before what it needs.
TEST(MergeTree, AnyOrderMakesTheSameMerges) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 2000; ++round) {
    Plan plan;
    plan.first_chunk = random() % 40;
    plan.n_chunks = 1 + static_cast<uint32_t>(random() % 40);
    if (random() % 2 == 0) {
      plan.gap_at = plan.first_chunk + random() % (plan.n_chunks + 1);
      plan.gap_chunks = random() % 50;
    }
    SCOPED_TRACE(::testing::Message()
                 << "round " << round << ": " << plan.n_chunks << " chunks from "
                 << plan.first_chunk << ", gap of " << plan.gap_chunks << " at " << plan.gap_at);
    std::map<uint64_t, uint32_t> state_of;
    std::vector<uint32_t> order(plan.n_chunks);
    for (uint32_t i = 0; i < plan.n_chunks; ++i) {
      state_of[plan.absolute(plan.first_chunk + i)] = i;
      order[i] = i;
    }
    std::set<std::pair<uint32_t, uint32_t>> expected;
    merges_below(state_of, 0, 256, &expected);

    std::shuffle(order.begin(), order.end(), random);
    const MergeTree tree(plan);
    std::vector<uint32_t> arrivals(plan.n_chunks);
    std::set<std::pair<uint32_t, uint32_t>> made;
    uint32_t n_whole = 0;
    for (const uint32_t chunk : order) {
      MergeTree::Node node = tree.leaf(chunk);
      auto merge = tree.next(&node);
      for (; merge && arrivals[merge->from]++ == 1; merge = tree.next(&node)) {
        EXPECT_TRUE(made.insert({merge->into, merge->from}).second);
      }
      n_whole += merge ? 0 : 1;
    }
    EXPECT_EQ(made, expected);
    EXPECT_EQ(n_whole, 1u);
  }
}

}  // namespace
}  // namespace kvm::attention::testing
