// SPDX-License-Identifier: Apache-2.0
// D2O's budgets: heads keep everything until the prompt ends, and then their layer's share
// (kvm.h: KVM_BUDGETS_BY_DENSITY), against the rule written out here.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/round.h"
#include "tests/unit/engine/policy_testbed.h"

namespace kvm::engine::testing {
namespace {

constexpr uint32_t kLayers = 5;
constexpr uint32_t kWhole = 2;  // this layer keeps everything
constexpr uint32_t kKvHeads = 3;
constexpr uint32_t kDim = 8;
constexpr uint64_t kSinks = 4;
constexpr uint64_t kRecent = 150;
constexpr uint64_t kHeavy = 90;

using Masses = std::vector<std::vector<std::vector<float>>>;  // [layer][head][token]

// As many tokens as are seen: keys are zeros, so each counts 1 in the sum of the softmax.
using Counts = std::vector<std::vector<uint64_t>>;  // [layer][head]

class World {
 public:
  // n_window: layer kWhole keeps only so many tokens; 0: all.
  explicit World(uint32_t n_threads = 1, uint32_t merge = KVM_MERGE_NONE, uint64_t n_window = 0)
      : rig(n_threads) {
    SpaceSpec spec = make_spec("budgets", kLayers, kKvHeads, kKvHeads, kDim);
    kvm_policy_params policy = {.retention = KVM_RETAIN_HEAVY,
                                .n_sinks = kSinks,
                                .n_recent = kRecent,
                                .n_heavy = kHeavy,
                                .merge = merge,
                                .budgets = KVM_BUDGETS_BY_DENSITY};
    spec.policies = {policy,
                     {.layer_begin = kWhole,
                      .n_layers = 1,
                      .retention = n_window == 0 ? KVM_RETAIN_FULL : KVM_RETAIN_SINKS_RECENT,
                      .n_recent = n_window}};
    space = rig.space(spec);
    seq = rig.create(space);
  }

  void append(kvm_seq_id to, uint32_t n, uint32_t flags = 0) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      append_to(to, layer, n, flags);
    }
  }
  void append_to(kvm_seq_id to, uint32_t layer, uint32_t n, uint32_t flags = 0) {
    Buffer k(Dtype::kF32, 1, n, kKvHeads, kDim);
    for (uint32_t t = 0; t < n; ++t) {
      for (uint32_t h = 0; h < kKvHeads; ++h) {
        for (uint32_t i = 0; i < kDim; ++i) {
          k.set(0, t, h, i, 0.0f);
        }
      }
    }
    StepRequest step;
    step.space = space;
    step.layer_begin = layer;
    step.append = true;
    step.items = {append_item(to, n)};
    step.items[0].flags = flags;
    step.k = k.view();
    step.v = k.view();
    ASSERT_TRUE(rig.run(step).status.is_ok());
  }
  // Says what masses the first tokens have.
  void observe(kvm_seq_id of, const Masses& masses) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const auto n = static_cast<uint32_t>(masses[layer][0].size());
      Buffer sums(Dtype::kF32, 1, n, kKvHeads, 1);
      for (uint32_t t = 0; t < n; ++t) {
        for (uint32_t h = 0; h < kKvHeads; ++h) {
          sums.set(0, t, h, 0, masses[layer][h][t]);
        }
      }
      ObserveRequest observe;
      observe.seq = of;
      observe.layer = layer;
      observe.n_columns = n;
      observe.column_sums = sums.view();
      ASSERT_TRUE(rig.run(observe).status.is_ok());
    }
  }
  kvm_seq_id fork(kvm_seq_id of) {
    const RequestResult result = rig.verb(SeqVerb::kFork, of, KVM_POSITION_END);
    EXPECT_TRUE(result.status.is_ok()) << result.status.message();
    return result.seq;
  }
  Status truncate(kvm_seq_id to, uint64_t n_tokens) {
    return rig.verb(SeqVerb::kTruncate, to, n_tokens).status;
  }
  Counts counts(kvm_seq_id of) {
    Counts all(kLayers);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      Buffer q(Dtype::kF32, 1, 1, kKvHeads, kDim), o = q, lse(Dtype::kF32, 1, 1, kKvHeads, 1);
      std::mt19937_64 random(1);
      fill(&q, 1, 1, kKvHeads, random);
      StepRequest step;
      step.space = space;
      step.layer_begin = layer;
      step.attend = true;
      step.flags = KVM_STEP_NO_STATISTICS;
      step.items = {query_item(of, 1)};
      step.q = q.view();
      step.o = o.view();
      step.lse = lse.view();
      EXPECT_TRUE(rig.run(step).status.is_ok());
      for (uint32_t h = 0; h < kKvHeads; ++h) {
        all[layer].push_back(
            static_cast<uint64_t>(std::llround(std::exp(double{lse.get(0, 0, h, 0)}))));
      }
    }
    return all;
  }

  Rig rig;
  kvm_space_id space = 0;
  kvm_seq_id seq = 0;
};

Masses random_masses(uint64_t seed, uint64_t n) {
  std::mt19937_64 random(seed);
  Masses masses(kLayers);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    for (uint32_t h = 0; h < kKvHeads; ++h) {
      std::exponential_distribution<float> mass(
          1.0f / static_cast<float>(1 + random() % 9));  // some heads are more uneven than others
      std::vector<float> of(n);
      std::generate(of.begin(), of.end(), [&] { return mass(random); });
      masses[layer].push_back(std::move(of));
    }
  }
  return masses;
}

// Shares of layers, 0 where a layer has none; of n_tokens, of which the masses' have some.
std::vector<double> shares(const Masses& masses, uint64_t n_tokens) {
  std::vector<double> all(kLayers);
  double sum = 0;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    if (layer == kWhole) {
      continue;
    }
    std::vector<double> variances;
    for (const std::vector<float>& of : masses[layer]) {
      double mean = 0, squares = 0;
      const auto n = static_cast<double>(n_tokens - kPageTokens);
      for (uint64_t x = kPageTokens; x < n_tokens; ++x) {
        mean += (x < of.size() ? double{of[x]} : 0.0) / n;
      }
      for (uint64_t x = kPageTokens; x < n_tokens; ++x) {
        squares += std::pow((x < of.size() ? double{of[x]} : 0.0) - mean, 2);
      }
      variances.push_back(squares / n);
    }
    const auto [lowest, highest] = std::minmax_element(variances.begin(), variances.end());
    double f = 0;
    for (const double variance : variances) {
      f += *highest > *lowest ? (variance - *lowest) / (*highest - *lowest) / kKvHeads : 0.0;
    }
    all[layer] = std::exp(-f);
    sum += all[layer];
  }
  for (double& share : all) {
    share *= (kLayers - 1) / sum;
  }
  return all;
}

// What heads with these shares see of n_tokens; a token more or less, for shares are rounded.
void expect_counts(const Counts& counts, const std::vector<double>& of, uint64_t n_tokens) {
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    SCOPED_TRACE("layer " + std::to_string(layer) + ", share " + std::to_string(of[layer]));
    for (const uint64_t count : counts[layer]) {
      if (layer == kWhole) {
        EXPECT_EQ(count, n_tokens);
        continue;
      }
      bool is_one_of = false;
      for (int off = -1; off <= 1; ++off) {
        const auto n_recent = static_cast<uint64_t>(std::llround(of[layer] * kRecent) + off);
        const uint64_t end = (n_tokens - n_recent) / kPageTokens * kPageTokens;
        const double rest = static_cast<double>(n_tokens - end + kPageTokens);
        is_one_of =
            is_one_of || std::abs(static_cast<double>(count) - rest - of[layer] * kHeavy) < 1.01;
      }
      EXPECT_TRUE(is_one_of) << count << " of " << n_tokens;
    }
  }
}

Counts all_of(uint64_t n_tokens) {
  return Counts(kLayers, std::vector<uint64_t>(kKvHeads, n_tokens));
}

TEST(Budgets, LayersKeepTheirSharesOnceThePromptEnds) {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    World world(1 + seed % 2);
    const Masses masses = random_masses(seed, 1500);
    for (const uint32_t n : {700u, 500u, 300u}) {
      world.append(world.seq, n);
    }
    world.observe(world.seq, masses);
    EXPECT_EQ(world.counts(world.seq), all_of(1500)) << "the prompt may go on";
    world.append(world.seq, 100, KVM_ITEM_PROMPT_END);
    const std::vector<double> of = shares(masses, 1600);
    EXPECT_LE(*std::max_element(of.begin(), of.end()),
              std::exp(1.0) * *std::min_element(of.begin(), of.begin() + kWhole));
    expect_counts(world.counts(world.seq), of, 1600);
    const kvm_seq_id fork = world.fork(world.seq);
    // A second prompt changes no budgets.
    world.append(world.seq, 333, KVM_ITEM_PROMPT_END);
    expect_counts(world.counts(world.seq), of, 1933);
    world.append(fork, 90);
    expect_counts(world.counts(fork), of, 1690);
  }
}

// Lists that are measured in parts have the shares that they would have by the whole.
TEST(Budgets, LongPrompts) {
  constexpr uint64_t kTokens = 40'000;
  World world(2);
  const Masses masses = random_masses(7, kTokens - 100);
  world.append(world.seq, kTokens - 100);
  world.observe(world.seq, masses);
  world.append(world.seq, 100, KVM_ITEM_PROMPT_END);
  expect_counts(world.counts(world.seq), shares(masses, kTokens), kTokens);
}

TEST(Budgets, AFirstTokenByItselfEndsThePrompt) {
  World world;
  const Masses masses = random_masses(9, 1000);
  world.append(world.seq, 1000);
  world.observe(world.seq, masses);
  EXPECT_EQ(world.counts(world.seq), all_of(1000));
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    EXPECT_EQ(world.counts(world.seq)[layer], all_of(1000)[layer]);
    world.append_to(world.seq, layer, 1);
  }
  expect_counts(world.counts(world.seq), shares(masses, 1001), 1001);
}

// Whichever layer's append says so, and once all layers have the tokens.
TEST(Budgets, AllLayersHaveThePromptFirst) {
  World world;
  const Masses masses = random_masses(10, 900);
  world.append(world.seq, 900);
  world.observe(world.seq, masses);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    Counts so_far = all_of(900);
    std::fill_n(so_far.begin(), layer, std::vector<uint64_t>(kKvHeads, 950));
    EXPECT_EQ(world.counts(world.seq), so_far);
    world.append_to(world.seq, layer, 50, layer == 1 ? KVM_ITEM_PROMPT_END : 0);
  }
  expect_counts(world.counts(world.seq), shares(masses, 950), 950);
}

TEST(Budgets, ACutPromptEndsAgain) {
  World world;
  const Masses masses = random_masses(11, 200);
  world.append(world.seq, 200, KVM_ITEM_PROMPT_END);  // nothing to give up yet: equal shares
  ASSERT_TRUE(world.truncate(world.seq, 150).is_ok());
  world.append(world.seq, 50);
  world.observe(world.seq, masses);
  const kvm_seq_id fork = world.fork(world.seq);
  world.append(fork, 800);
  EXPECT_EQ(world.counts(fork), all_of(1000)) << "another prompt is on its way";
  world.append(fork, 2, KVM_ITEM_PROMPT_END);
  expect_counts(world.counts(fork), shares(masses, 1002), 1002);
  // Where something has gone, its budgets stay.
  ASSERT_TRUE(world.truncate(fork, 1001).is_ok());
  world.append(fork, 400);
  expect_counts(world.counts(fork), shares(masses, 1002), 1401);
}

// What heads without a share have given up does not matter.
TEST(Budgets, ACutPromptEndsAgainBesideWindows) {
  World world(1, KVM_MERGE_NONE, 32);
  const Masses masses = random_masses(12, 200);
  world.append(world.seq, 200, KVM_ITEM_PROMPT_END);
  ASSERT_TRUE(world.truncate(world.seq, 190).is_ok());
  world.append(world.seq, 10);
  world.observe(world.seq, masses);
  world.append(world.seq, 800);
  EXPECT_EQ(world.counts(world.seq)[0], all_of(1000)[0]) << "another prompt is on its way";
  world.append(world.seq, 2, KVM_ITEM_PROMPT_END);
  Counts counts = world.counts(world.seq);
  EXPECT_EQ(counts[kWhole][0], 32u);
  counts[kWhole].assign(kKvHeads, 1002);
  expect_counts(counts, shares(masses, 1002), 1002);
}

// Without masses no layer is like another less than any.
TEST(Budgets, SharesAreEqualWhereNothingIsKnown) {
  World world(1, KVM_MERGE_COUNTED);
  world.append(world.seq, 1200, KVM_ITEM_PROMPT_END);
  const uint64_t end = (1200 - kRecent) / kPageTokens * kPageTokens;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    // Keys that are 0 join nobody.
    EXPECT_EQ(world.counts(world.seq)[layer][0],
              layer == kWhole ? 1200 : 1200 - end + kPageTokens + kHeavy);
  }
}

}  // namespace
}  // namespace kvm::engine::testing
