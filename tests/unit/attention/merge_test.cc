// SPDX-License-Identifier: Apache-2.0
#include "attention/merge.h"

#include <gtest/gtest.h>

#include <cstring>

#include "tests/unit/attention/testbed.h"

namespace kvm::attention::testing {
namespace {

constexpr float kInf = -kEmptyLse;

StateRows rows_of(std::vector<float>& o, std::vector<float>& lse, uint32_t dim) {
  return {.o = o.data(), .dtype_o = Dtype::kF32, .o_stride = dim, .lse = lse.data()};
}

TEST(Merge, EmptySidesChangeNoBit) {
  std::vector<float> o_a = {1.25f, -3.5f, 0.1f};
  std::vector<float> lse_a = {12.75f};
  std::vector<float> o_e = {0, 0, 0};
  std::vector<float> lse_e = {-kInf};
  std::vector<float> o(3, 9.0f);
  std::vector<float> lse(1, 9.0f);
  const StateRows a = rows_of(o_a, lse_a, 3);
  const StateRows e = rows_of(o_e, lse_e, 3);
  const StateRows out = rows_of(o, lse, 3);
  merge_states(a, e, out, 1, 3);
  EXPECT_EQ(o, o_a);
  EXPECT_EQ(lse, lse_a);
  merge_states(e, a, out, 1, 3);
  EXPECT_EQ(o, o_a);
  EXPECT_EQ(lse, lse_a);
  merge_states(e, e, out, 1, 3);
  EXPECT_EQ(o, o_e);
  EXPECT_EQ(lse[0], -kInf);
}

TEST(Merge, ExtremeDifferencesStayFinite) {
  std::vector<float> o_a = {2.0f};
  std::vector<float> lse_a = {1e38f};
  std::vector<float> o_b = {5.0f};
  std::vector<float> lse_b = {-1e38f};
  merge_states(rows_of(o_a, lse_a, 1), rows_of(o_b, lse_b, 1), rows_of(o_a, lse_a, 1), 1, 1);
  EXPECT_EQ(o_a[0], 2.0f);
  EXPECT_EQ(lse_a[0], 1e38f);
}

TEST(Merge, Formula) {
  std::vector<float> o_a = {1.0f, 2.0f};
  std::vector<float> lse_a = {0.5f};
  std::vector<float> o_b = {-3.0f, 4.0f};
  std::vector<float> lse_b = {1.5f};
  merge_states(rows_of(o_a, lse_a, 2), rows_of(o_b, lse_b, 2), rows_of(o_a, lse_a, 2), 1, 2);
  const double a = std::exp(0.5);
  const double b = std::exp(1.5);
  EXPECT_NEAR(o_a[0], (a * 1 + b * -3) / (a + b), 1e-6);
  EXPECT_NEAR(o_a[1], (a * 2 + b * 4) / (a + b), 1e-6);
  EXPECT_NEAR(lse_a[0], std::log(a + b), 1e-6);
}

TEST(Merge, HalfDtypes) {
  for (Dtype dtype : {Dtype::kF16, Dtype::kBf16}) {
    uint16_t o_a = 0;
    uint16_t o_b = 0;
    put(&o_a, dtype, 0, 1.0f);
    put(&o_b, dtype, 0, 3.0f);
    float lse_a = 2.0f;
    float lse_b = 2.0f;
    merge_states({&o_a, dtype, 1, &lse_a}, {&o_b, dtype, 1, &lse_b}, {&o_b, dtype, 1, &lse_b}, 1,
                 1);
    EXPECT_EQ(get(&o_b, dtype, 0), 2.0f);
    EXPECT_NEAR(lse_b, 2.0f + std::log(2.0f), 1e-6f);
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
      merge_states(rows_of(c.o, c.lse, 64), rows_of(o, lse, 64), rows_of(o, lse, 64), lse.size(),
                   64);
    }
    c.o = o;
    c.lse = lse;
    EXPECT_LE(c.error_o(), 1e-5);
    EXPECT_LE(c.error_lse(), 1e-5);
  }
}

}  // namespace
}  // namespace kvm::attention::testing
