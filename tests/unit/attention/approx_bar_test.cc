// SPDX-License-Identifier: Apache-2.0
// Bars, and how many keys they need.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "attention/sampled/estimate.h"
#include "attention/sampled/pilot.h"
#include "tests/unit/attention/approx_rig.h"

namespace kvm::attention {
namespace {

using testing::Buffer;
using testing::Head;

TEST(Sampled, TheBarCoversTheError) {
  int misses = 0;
  int misses_lse = 0;
  int trials = 0;
  double ratio = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Head head(
        {.n_tokens = 4096, .dim_v = 64, .sharpness = 1.0 + 0.2 * static_cast<double>(seed % 8)},
        seed + 100);
    head.input.params.budget = 150;
    head.build();
    head.run();
    for (uint32_t r = 0; r < head.rows(); ++r) {
      ++trials;
      const double share = head.error_o(r) / static_cast<double>(head.report.err_o[r]);
      ratio += share;
      misses += share > 1 ? 1 : 0;
      misses_lse += head.error_lse(r) > static_cast<double>(head.report.err_lse[r]) ? 1 : 0;
    }
  }
  // delta 0.01: of 240 trials (four rows share a sample) 2.4 misses are expected.
  EXPECT_LE(misses, 9);
  EXPECT_LE(misses_lse, 9);
  EXPECT_GT(ratio / trials, 0.4);  // and it is no wider than it must be
  EXPECT_LT(ratio / trials, 0.95);
}

// Of few keys one may be most of the answer, and o all but its value.
TEST(Sampled, TheBarOfASingleKeyIsNotSmall) {
  int misses = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    Head head({.n_tokens = 4096, .group = 1, .dim_v = 64, .sharpness = 0.3}, seed + 700);
    head.input.params.budget = 1;
    head.input.params.n_recent = 1;
    head.build();
    head.run();
    const auto bar = static_cast<double>(head.report.err_o[0]);
    misses += head.error_o(0) > 2 * bar ? 1 : 0;
  }
  EXPECT_LE(misses, 2);
}

TEST(Sampled, KappaFollowsDelta) {
  EXPECT_DOUBLE_EQ(kappa_of(0.5), 1.1);
  EXPECT_NEAR(kappa_of(0.1), 1.1, 1e-12);
  EXPECT_NEAR(kappa_of(0.01), 1.45, 1e-12);
  EXPECT_NEAR(kappa_of(0.003), 1.65, 1e-12);
  EXPECT_NEAR(kappa_of(std::sqrt(0.1 * 0.01)), 1.275, 1e-12);
  EXPECT_GT(kappa_of(0.001), 1.65);
  EXPECT_NEAR(gaussian_of(0.05), 1.959964, 1e-4);
  EXPECT_NEAR(Kappas(0.05).lse, 1.1 * 1.959964, 1e-4);
}

// Against tables of Student's t.
TEST(Sampled, BarsOfFewDrawsAreWider) {
  const double z10 = gaussian_of(0.1);
  const double z01 = gaussian_of(0.01);
  EXPECT_NEAR(few_draws(6, z10), 2.015 / 1.645, 0.02);
  EXPECT_NEAR(few_draws(11, z10), 1.812 / 1.645, 0.01);
  EXPECT_NEAR(few_draws(6, z01), 4.032 / 2.576, 0.02);
  EXPECT_NEAR(few_draws(11, z01), 3.169 / 2.576, 0.01);
  EXPECT_NEAR(few_draws(101, z01), 2.626 / 2.576, 0.005);
  EXPECT_NEAR(few_draws(1e6, z01), 1, 1e-4);
  EXPECT_EQ(few_draws(0.5, z01), few_draws(3, z01));
  EXPECT_EQ(few_draws(NAN, z01), few_draws(3, z01));
}

TEST(Sampled, WithoutABudgetItReadsWhatEpsNeeds) {
  constexpr float kEps[] = {0.05f, 0.1f, 0.2f};
  double bars[3] = {};
  uint64_t read[3] = {};
  constexpr int kHeads = 6;
  for (uint64_t seed = 0; seed < kHeads; ++seed) {
    Head head({.n_tokens = 12288, .group = 2}, seed);
    head.build();
    for (int i = 0; i < 3; ++i) {
      head.input.params.budget = 0;
      head.input.params.eps = kEps[i];
      head.input.params.max_read_fraction = 0.9f;
      head.run();
      ASSERT_EQ(head.report.n_exact, 0u);
      bars[i] += static_cast<double>(std::max(head.report.err_o[0], head.report.err_o[1])) / kHeads;
      read[i] += head.report.keys_read;
    }
  }
  for (int i = 0; i < 3; ++i) {
    EXPECT_GT(bars[i], 0.5 * static_cast<double>(kEps[i]));
    EXPECT_LT(bars[i], 1.6 * static_cast<double>(kEps[i]));
    EXPECT_TRUE(i == 0 || read[i] < read[i - 1]);
  }
}

TEST(Sampled, ThresholdSolvesItsEquation) {
  std::mt19937_64 random(1);
  std::lognormal_distribution<float> size(0, 3);
  Buffer memory(1024 * sizeof(float));
  auto* sizes = reinterpret_cast<float*>(memory.data());
  std::generate_n(sizes, 1024, [&] { return size(random); });
  for (const KernelTable* table : available_tables()) {
    for (const double wanted : {0.5, 3.0, 64.0, 500.0, 1000.0}) {
      const auto c = static_cast<double>(threshold(*table->sampled, sizes, 1024, wanted));
      double sum = 0;
      for (int i = 0; i < 1024; ++i) {
        sum += std::min(1.0, c * static_cast<double>(sizes[i]));
      }
      EXPECT_NEAR(sum, wanted, 1e-3 * wanted) << table->name;
    }
    // More than there are positive ones.
    std::fill_n(sizes + 512, 512, 0.0f);
    const float c = threshold(*table->sampled, sizes, 1024, 700);
    EXPECT_GE(c * *std::min_element(sizes, sizes + 512), 0.9f);
    std::generate_n(sizes, 1024, [&] { return size(random); });
  }
}

}  // namespace
}  // namespace kvm::attention
