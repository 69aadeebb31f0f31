// SPDX-License-Identifier: Apache-2.0
#include "policies/heavy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

namespace kvm::policies {
namespace {

// Against sorting all candidates, with ties, observed sums and tokens that nobody attended to.
TEST(Heavy, KeepsWhatTheRuleSays) {
  std::mt19937 random(5);
  const auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  for (int trial = 0; trial < 300; ++trial) {
    const uint64_t n_sinks = below(3) * 50;
    const uint64_t begin = (n_sinks + kPageTokens - 1) / kPageTokens * kPageTokens;
    const uint64_t first_stored = begin + below(4) * kPageTokens;
    const uint64_t length = first_stored + 10 + below(600);
    const uint16_t kv_head = 1;
    ListView list;
    list.length = length;
    list.n_sinks = n_sinks;
    list.n_recent = 1 + below(100);
    list.slack = below(30);
    list.n_heavy = 1 + below(120);
    list.n_kv_heads = 3;
    list.kv_heads = {&kv_head, 1};
    std::vector<KeptToken> kept;
    for (uint64_t x = begin; x < first_stored && kept.size() < list.n_heavy; x += 1 + below(5)) {
      kept.push_back({x, static_cast<float>(below(8))});
    }
    list.kept = kept;
    std::vector<float> masses(below(2) * (length - first_stored) / (1 + below(2)));
    for (float& mass : masses) {
      mass = static_cast<float>(below(8));
    }
    list.mass_begin = first_stored;
    list.masses = masses;
    std::vector<float> columns(below(2) * 3 * below(static_cast<uint32_t>(length)));
    for (float& sum : columns) {
      sum = static_cast<float>(below(4));
    }
    list.column_sums = columns.data();
    list.n_columns = columns.size() / 3;
    std::vector<StoredRange> stored = {{.positions = {first_stored, length}}};
    if (begin > 0) {
      stored.insert(stored.begin(), {.positions = {0, begin}});
    }
    list.stored = stored;

    const uint64_t n_committed = length - below(9);
    ActionList actions;
    heavy().decide({.n_committed = n_committed, .lists = {&list, 1}}, &actions);

    const uint64_t n_last = list.n_recent + list.slack;
    const uint64_t aged =
        n_committed > n_last ? (n_committed - n_last) / kPageTokens * kPageTokens : 0;
    EXPECT_EQ(actions.next_commit, std::max(begin, aged) + kPageTokens + n_last);
    if (aged <= first_stored) {
      EXPECT_EQ(actions.n_actions, 0u);
      continue;
    }
    std::vector<std::tuple<float, uint64_t>> ranked;  // (-mass, position)
    const auto rank = [&](uint64_t x, float own) {
      const float seen = x < list.n_columns ? columns[x * 3 + kv_head] : 0.0f;
      ranked.emplace_back(-(own + seen), x);
    };
    for (const KeptToken& token : kept) {
      rank(token.position, token.mass);
    }
    for (uint64_t x = first_stored; x < aged; ++x) {
      rank(x, x - first_stored < masses.size() ? masses[x - first_stored] : 0.0f);
    }
    std::sort(ranked.begin(), ranked.end());
    ranked.resize(std::min<size_t>(ranked.size(), list.n_heavy));
    std::vector<uint64_t> expected;
    for (const auto& [mass, position] : ranked) {
      expected.push_back(position);
    }
    std::sort(expected.begin(), expected.end());
    ASSERT_EQ(actions.n_actions, 1u);
    const Action& action = actions.actions[0];
    EXPECT_EQ(action.kind, ActionKind::kKeep);
    EXPECT_EQ(action.range.begin, first_stored);
    EXPECT_EQ(action.range.end, aged);
    EXPECT_EQ(action.first_kept, 0u);
    EXPECT_EQ(action.n_kept, expected.size());
    EXPECT_EQ(actions.kept, expected);
  }
}

// A part at a time, and what comes of it is the variance of all.
TEST(Heavy, LongListsAreMeasuredInTurn) {
  std::mt19937 random(11);
  for (const uint64_t length : {100u, 16'500u, 98'304u}) {
    std::vector<float> masses(length);
    std::vector<float> columns(length * 2);
    double mean = 0;
    for (uint64_t x = 0; x < length; ++x) {
      masses[x] = static_cast<float>(random() % 1000);
      columns[2 * x + 1] = static_cast<float>(random() % 100);
      mean += x < 64 ? 0 : (masses[x] + columns[2 * x + 1]) / static_cast<double>(length - 64);
    }
    double variance = 0;
    for (uint64_t x = 64; x < length; ++x) {
      variance +=
          std::pow(masses[x] + columns[2 * x + 1] - mean, 2) / static_cast<double>(length - 64);
    }
    const uint16_t kv_head = 1;
    ListView list;
    list.length = length;
    list.n_sinks = 4;
    list.awaits_share = true;
    list.masses = masses;
    list.column_sums = columns.data();
    list.n_columns = length;
    list.n_kv_heads = 2;
    list.kv_heads = {&kv_head, 1};
    Moments moments;
    uint64_t n_rounds = 0;
    for (bool more = true; more && n_rounds < 100; ++n_rounds) {
      ActionList actions;
      heavy().decide({.event = Event::kPromptEnd, .n_committed = length, .lists = {&list, 1}},
                     &actions);
      ASSERT_EQ(actions.n_actions, 1u);
      const Action& action = actions.actions[0];
      EXPECT_EQ(action.kind, ActionKind::kMeasure);
      EXPECT_EQ(action.range.begin, std::max<uint64_t>(64, list.measured_end));
      EXPECT_LE(action.range.end - action.range.begin, 16384u);
      moments.add(action.moments);
      list.measured_end = action.range.end;
      more = actions.more;
    }
    EXPECT_EQ(list.measured_end, length);
    EXPECT_EQ(n_rounds, (length - 64 + 16383) / 16384);
    EXPECT_EQ(moments.n, static_cast<double>(length - 64));
    EXPECT_NEAR(moments.variance(), variance, 1e-9 * variance);
  }
}

// Of more tokens than one choice looks at, the same stay as if it had looked at all of them.
TEST(Heavy, LongListsAreChosenFromInTurn) {
  constexpr uint64_t kLength = 70'000;
  constexpr size_t kHeavy = 500;
  std::mt19937 random(9);
  std::vector<float> masses(kLength);
  std::vector<std::pair<float, uint64_t>> ranked;  // (-mass, position)
  for (uint64_t x = 0; x < kLength; ++x) {
    masses[x] = static_cast<float>(random() % 1000);
    ranked.emplace_back(-masses[x], x);
  }
  const uint16_t kv_head = 0;
  uint64_t begin = 0;
  std::vector<uint64_t> positions;
  uint32_t n_rounds = 0;
  for (bool more = true; more && n_rounds < 100; ++n_rounds) {
    std::vector<KeptToken> kept;
    for (const uint64_t x : positions) {
      kept.push_back({x, masses[x]});
    }
    const StoredRange stored = {.positions = {begin, kLength}};
    ListView list;
    list.length = kLength;
    list.n_recent = 100;
    list.n_heavy = kHeavy;
    list.kept = kept;
    list.mass_begin = begin;
    list.masses = std::span<const float>(masses).subspan(begin);
    list.n_kv_heads = 1;
    list.kv_heads = {&kv_head, 1};
    list.stored = {&stored, 1};
    ActionList actions;
    heavy().decide({.n_committed = kLength, .lists = {&list, 1}}, &actions);
    ASSERT_EQ(actions.n_actions, 1u);
    EXPECT_EQ(actions.actions[0].range.begin, begin);
    EXPECT_LE(actions.actions[0].range.end - begin, 8192u);
    begin = actions.actions[0].range.end;
    positions = actions.kept;
    more = actions.more;
  }
  EXPECT_EQ(n_rounds, 9u);
  EXPECT_EQ(begin, (kLength - 100) / kPageTokens * kPageTokens);
  ranked.resize(begin);
  std::sort(ranked.begin(), ranked.end());
  std::vector<uint64_t> expected;
  for (size_t i = 0; i < kHeavy; ++i) {
    expected.push_back(ranked[i].second);
  }
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(positions, expected);
}

TEST(Heavy, MoreListsThanActionsAreAskedForAgain) {
  const uint16_t kv_head = 0;
  const StoredRange stored = {.positions = {0, 500}};
  ListView list;
  list.length = 500;
  list.n_recent = 10;
  list.n_heavy = 7;
  list.n_kv_heads = 1;
  list.kv_heads = {&kv_head, 1};
  list.stored = {&stored, 1};
  std::vector<ListView> lists(kMaxActions + 1, list);
  ActionList actions;
  heavy().decide({.n_committed = 500, .lists = lists}, &actions);
  EXPECT_EQ(actions.n_actions, kMaxActions);
  EXPECT_TRUE(actions.more);
  EXPECT_EQ(actions.kept.size(), kMaxActions * 7);
}

// D2O: shares of L layers add up to L budgets, whatever the rounding, and lie within a factor of e.
TEST(Heavy, SharesAddUp) {
  std::mt19937_64 random(3);
  for (int trial = 0; trial < 200; ++trial) {
    const auto n_layers = static_cast<uint32_t>(1 + random() % 80);
    const auto n_heads = static_cast<uint32_t>(1 + random() % 8);
    const Budget budget = {100 + random() % 5000, 100 + random() % 5000};
    std::vector<Measured> lists;
    for (uint32_t layer = 0; layer < n_layers; ++layer) {
      for (uint32_t head = 0; head < n_heads; ++head) {
        const double measure = std::exponential_distribution<double>(1e-3)(random);
        lists.push_back({layer, true, trial % 5 == 0 ? 7.0 : measure, budget});
      }
      lists.push_back({layer, false, 1e9, {3, 0}});
    }
    heavy().share_out(lists);
    Budget sum;
    uint64_t least = UINT64_MAX, most = 0;
    for (const Measured& list : lists) {
      if (!list.shares_budget) {
        EXPECT_EQ(list.budget, (Budget{3, 0}));
        continue;
      }
      sum.n_recent += list.budget.n_recent;
      sum.n_heavy += list.budget.n_heavy;
      least = std::min(least, list.budget.n_heavy);
      most = std::max(most, list.budget.n_heavy);
    }
    const uint64_t n = uint64_t{n_layers} * n_heads;
    EXPECT_EQ(sum, (Budget{n * budget.n_recent, n * budget.n_heavy}));
    EXPECT_LE(static_cast<double>(most - 1), std::exp(1.0) * static_cast<double>(least + 1));
    if (n_heads == 1 || trial % 5 == 0) {
      EXPECT_LE(most - least, 1u) << "no layer is less even than another";
    }
  }
}

// Attention that is spread out gets more room: one head of two that looks everywhere alike, against
// two of which both look at few tokens.
TEST(Heavy, SharesFollowTheRule) {
  std::vector<Measured> lists = {{0, true, 0.0, {1000, 100}}, {0, true, 4.0, {1000, 100}},
                                 {0, true, 0.0, {1000, 100}}, {3, true, 9.0, {1000, 100}},
                                 {3, true, 9.0, {1000, 100}}, {3, true, 1.0, {1000, 100}}};
  heavy().share_out(lists);
  const double first = std::exp(-1.0 / 3), second = std::exp(-2.0 / 3);  // F: 1/3 and 2/3
  EXPECT_EQ(lists[0].budget.n_recent,
            static_cast<uint64_t>(std::llround(2000 * first / (first + second))));
  EXPECT_EQ(lists[3].budget.n_recent, 2000 - lists[0].budget.n_recent);
  EXPECT_EQ(lists[1].budget, lists[2].budget);
}

}  // namespace
}  // namespace kvm::policies
