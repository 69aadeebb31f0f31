// SPDX-License-Identifier: Apache-2.0
#include "base/merge.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
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
      kind = {Dtype::kF32, Dtype::kF32, 0};
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

}  // namespace
}  // namespace kvm::attention::testing
