// SPDX-License-Identifier: Apache-2.0
#include "attention/sampled/approx.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "codecs/codec.h"
#include "tests/unit/attention/approx_reference.h"

namespace kvm::attention {
namespace {

using testing::drawn_by;
using testing::expect_reference;
using testing::Head;
using testing::sample_of;
using testing::scan_all;

TEST(Sampled, AgreesWithTheReference) {
  for (const KernelTable* table : available_tables()) {
    for (const CodecId codec :
         {CodecId::kBf16, CodecId::kF32, CodecId::kF16, CodecId::kI8, CodecId::kF8}) {
      for (const uint32_t group : {1u, 3u, 4u, 8u}) {
        SCOPED_TRACE(std::string(table->name) + " " + codecs::codec_of(codec).name + " " +
                     std::to_string(group));
        Head head({.n_tokens = 2500,
                   .n_query = group == 8 ? 2u : 1u,
                   .group = group,
                   .dim_k = group == 3 ? 40u : 64u,
                   .dim_v = group == 3 ? 24u : 48u,
                   .codec = codec},
                  group);
        head.problem.fp32_weights = true;
        head.input.table = table;
        head.input.params.budget = 150;
        head.build();
        head.run();
        ASSERT_FALSE(head.plan.exact);
        expect_reference(head, 2e-4);
      }
    }
  }
}

// Scales and weights meet values as one bf16 number, and D holds what N holds: also of keys without
// a value, whose scale is 0, and of values so small that the product is lost.
TEST(Sampled, ScaledValuesMeetWeightsThatHoldTheirScales) {
  for (const KernelTable* table : available_tables()) {
    for (const CodecId codec : {CodecId::kI8, CodecId::kF8}) {
      SCOPED_TRACE(std::string(table->name) + " " + codecs::codec_of(codec).name);
      Head head({.n_tokens = 2500, .codec = codec}, 12);
      for (uint64_t t = 100; t < 2400; t += 3) {
        std::fill(head.v[t].begin(), head.v[t].end(), 0.0f);
      }
      for (uint64_t t = 101; t < 2400; t += 30) {
        std::fill(head.v[t].begin(), head.v[t].end(), 1e-35f);
      }
      head.input.table = table;
      head.input.params.budget = 300;
      head.build();
      head.run();
      ASSERT_FALSE(head.plan.exact);
      expect_reference(head, 2e-3);
    }
  }
}

// D and N of the sample alone, by the sums of a shard.
void sample_sums(const Head& head, uint32_t row, double reference, double* d,
                 std::vector<double>* n) {
  const SampleState s = sample_of(head, 0);
  const double w = std::exp(static_cast<double>(s.sums.m[row]) - reference);
  *d = 0;
  n->assign(head.shape.dim_v, 0.0);
  for (uint32_t i = 0; i < kGatherKeys; ++i) {
    for (const GatherSum which : {kSumClosed, kSumOpen}) {
      *d += w * static_cast<double>(s.sums.sums[(row * kGatherSums + which) * kGatherKeys + i]);
    }
  }
  const uint32_t stride = acc_stride(head.problem);
  for (const GatherVector which : {kVecClosed, kVecOpen}) {
    const float* acc = s.sums.acc + (which * padded_rows(head.rows()) + row) * stride;
    for (uint32_t x = 0; x < head.shape.dim_v; ++x) {
      (*n)[x] += w * static_cast<double>(acc[x]);
    }
  }
}

TEST(Sampled, DenominatorAndNumeratorAreUnbiased) {
  Head head({.n_tokens = 1024, .group = 2, .dim_k = 32, .dim_v = 8}, 11);
  head.input.params.budget = 60;
  head.build();
  constexpr int kSeeds = 10000;
  const uint32_t n_channels = head.shape.dim_v + 1;
  std::vector<double> sum(2 * n_channels), square(2 * n_channels), want(2 * n_channels);
  std::vector<double> top(2);
  for (int seed = 0; seed < kSeeds; ++seed) {
    head.input.params.seed = static_cast<uint64_t>(seed) * 7919;
    head.run();
    if (seed == 0) {
      for (uint32_t r = 0; r < 2; ++r) {
        for (const auto& [t, unused] : scan_all(head)) {
          top[r] = std::max(top[r], head.logit(r, t));
        }
        for (const auto& [t, unused] : scan_all(head)) {
          const double w = std::exp(head.logit(r, t) - top[r]);
          want[r * n_channels] += w;
          for (uint32_t d = 0; d < head.shape.dim_v; ++d) {
            want[r * n_channels + 1 + d] += w * static_cast<double>(head.v[t][d]);
          }
        }
      }
    }
    for (uint32_t r = 0; r < 2; ++r) {
      double mass = 0;
      std::vector<double> n;
      sample_sums(head, r, top[r], &mass, &n);
      n.insert(n.begin(), mass);
      for (uint32_t i = 0; i < n_channels; ++i) {
        sum[r * n_channels + i] += n[i];
        square[r * n_channels + i] += n[i] * n[i];
      }
    }
  }
  for (uint32_t i = 0; i < 2 * n_channels; ++i) {
    const double mean = sum[i] / kSeeds;
    const double variance = square[i] / kSeeds - mean * mean;
    EXPECT_LT(std::abs(mean - want[i]), 4 * std::sqrt(variance / kSeeds)) << i << " " << want[i];
  }
}

TEST(Sampled, SamplesOfGrowingBudgetsAreNested) {
  Head head({.n_tokens = 8192}, 3);
  head.build();
  std::set<uint64_t> smaller;
  for (const uint64_t budget : {40, 100, 400, 900}) {
    head.input.params.budget = budget;
    head.run();
    const std::set<uint64_t> drawn = drawn_by(head);
    EXPECT_TRUE(std::includes(drawn.begin(), drawn.end(), smaller.begin(), smaller.end()));
    EXPECT_GT(drawn.size(), smaller.size());
    // Between one row's budget and that of all rows.
    EXPECT_GT(drawn.size(), budget * 7 / 10);
    EXPECT_LT(drawn.size(), budget * 4 * 13 / 10);
    smaller = drawn;
  }
}

TEST(Sampled, ManyShardsAreOneSampleAndAnyOrderGivesTheSameBits) {
  Head head({.n_tokens = 70000, .group = 2, .dim_k = 16, .dim_v = 8}, 17);
  head.input.params.budget = 2000;
  head.build();
  head.run();
  ASSERT_EQ(head.plan.n_shards, 3u);
  const std::vector<float> first = head.o;
  const std::vector<float> first_lse = head.lse;
  for (uint32_t r = 0; r < 2; ++r) {
    EXPECT_LT(head.error_o(r), 1.5 * static_cast<double>(head.report.err_o[r]));
    EXPECT_LT(head.error_lse(r), 1.5 * static_cast<double>(head.report.err_lse[r]));
  }
  // The sum over shards is that over all keys.
  double n_keys = 0;
  for (uint32_t shard = 0; shard < 3; ++shard) {
    n_keys += sample_of(head, shard).head->sums.n_keys;
  }
  EXPECT_EQ(n_keys, static_cast<double>(head.plan.n_keys_indexed));
  for (int again = 0; again < 3; ++again) {
    head.run();
    EXPECT_EQ(head.o, first);
    EXPECT_EQ(head.lse, first_lse);
  }
}

// Two heads of a layer, cut alike or not.
TEST(Plan, IsSharedByHeadsThatAreCutAlike) {
  Head first({.n_tokens = 4096, .dim_k = 128}, 3);
  Head second({.n_tokens = 4096, .dim_k = 128}, 4);
  first.build();
  second.build();
  first.input.params.budget = second.input.params.budget = 100;
  first.input.params.seed = 1;
  second.input.params.seed = 2;
  EXPECT_TRUE(same_plan(first.input, second.input));
  EXPECT_TRUE(plan_approx(first.input) == plan_approx(second.input));

  const auto differs = [&](const char* what) {
    EXPECT_FALSE(same_plan(first.input, second.input)) << what;
    EXPECT_FALSE(same_plan(second.input, first.input)) << what;
    EXPECT_FALSE(plan_approx(first.input) == plan_approx(second.input)) << what;
  };
  second.input.params.n_recent += 64;
  differs("recent tokens");
  second.input.params.n_recent = first.input.params.n_recent;
  second.input.params.budget = 200;
  differs("budget");
  second.input.params.budget = 100;

  std::vector<SketchedRun> runs(second.input.index.sketches.begin(),
                                second.input.index.sketches.end());
  second.input.index.sketches = runs;
  EXPECT_TRUE(same_plan(first.input, second.input));
  runs.back().n_blocks -= 8;
  differs("a shorter run");
  runs.back().position += 8 * kPageTokens;
  differs("a run that begins later");
  runs.back().position -= 8 * kPageTokens;
  runs.back().n_blocks += 8;

  // The same blocks in two runs of one frame are one use; of two frames, two.
  const SketchedRun whole = runs.back();
  runs.back().n_blocks = 8;
  runs.push_back(whole);
  runs.back().position += 8 * kPageTokens;
  runs.back().n_blocks -= 8;
  second.input.index.sketches = runs;
  EXPECT_FALSE(same_plan(first.input, second.input));
  std::vector<SketchedRun> others = runs;
  first.input.index.sketches = others;
  EXPECT_TRUE(same_plan(first.input, second.input));
  others.back().frame = first.sketches.back().frame;
  differs("frames");
}

TEST(Sampled, ASampleOfEverythingIsExact) {
  Head head({.n_tokens = 2048}, 9);
  head.build();
  head.input.params.budget = 100000;
  head.run();
  EXPECT_TRUE(head.plan.exact);
  // One key short of all: the plan cannot know, the scan does.
  head.input.params.budget = 1;
  const uint64_t n = (head.run(), head.plan.n_keys_indexed);
  head.input.params.budget = n - 1;
  head.run();
  ASSERT_FALSE(head.plan.exact);
  const std::vector<float> o = head.o;
  if (head.report.n_exact > 0) {
    head.run_exact();
    EXPECT_EQ(head.o, o);
  } else {
    for (uint32_t r = 0; r < head.rows(); ++r) {
      EXPECT_LT(head.error_o(r), 6e-3);
    }
  }
}

}  // namespace
}  // namespace kvm::attention
