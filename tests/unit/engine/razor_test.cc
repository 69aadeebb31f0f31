// SPDX-License-Identifier: Apache-2.0
// RazorAttention: sinks, a recent window, and one entry for the tokens between, against the same in
// double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "tests/unit/engine/policy_testbed.h"
#include "tests/unit/engine/store_testbed.h"

namespace kvm::engine::testing {
namespace {

constexpr uint32_t kDim = 16;
constexpr uint32_t kKvHeads = 2;
constexpr uint32_t kQHeads = 4;
const double kScale = 1.0 / std::sqrt(double{kDim});

SpaceSpec make_razor(uint32_t retention, uint64_t n_sinks, uint64_t n_recent, uint64_t slack) {
  SpaceSpec spec = testing::make_spec("razor", 1, kQHeads, kKvHeads, kDim);
  if (retention != KVM_RETAIN_FULL) {
    spec.policies = {
        {.retention = retention, .n_sinks = n_sinks, .n_recent = n_recent, .slack = slack}};
  }
  return spec;
}

Row key(uint64_t position, uint32_t head) { return hashed_row(1, position, head, kDim, 2.0); }
Row value(uint64_t position, uint32_t head) { return hashed_row(2, position, head, kDim, 1.0); }
Row query(uint64_t position, uint32_t head) { return hashed_row(3, position, head, kDim, 2.0); }

// Where the rule puts the first token that is neither a sink nor folded.
uint64_t folded_end(uint64_t n_committed, uint64_t n_sinks, uint64_t n_recent, uint64_t slack) {
  const uint64_t begin = (n_sinks + kPageTokens - 1) / kPageTokens * kPageTokens;
  const uint64_t kept = n_recent + slack;
  const uint64_t limit = n_committed > kept ? n_committed - kept : 0;
  return std::max(begin, limit / kPageTokens * kPageTokens);
}

// What a row at p sees of a head that has folded the tokens from the sinks' pages to `end`.
std::vector<Entry> entries_of(uint64_t p, uint32_t kv_head, uint64_t n_sinks, uint64_t end) {
  const uint64_t begin = (n_sinks + kPageTokens - 1) / kPageTokens * kPageTokens;
  std::vector<Entry> entries;
  Entry mean = {Row(kDim), Row(kDim), 0};
  for (uint64_t x = 0; x <= p; ++x) {
    if (x < begin || x >= end) {
      entries.push_back({key(x, kv_head), value(x, kv_head)});
      continue;
    }
    for (uint32_t i = 0; i < kDim; ++i) {
      mean.k[i] += key(x, kv_head)[i] / static_cast<double>(end - begin);
      mean.v[i] += value(x, kv_head)[i] / static_cast<double>(end - begin);
    }
  }
  if (end > begin) {
    mean.log_weight = std::log(static_cast<double>(end - begin));
    entries.push_back(mean);
  }
  return entries;
}

TEST(RazorAttention, IsTheFormulaThroughForksAndTruncates) {
  std::mt19937 random(7);
  const auto pick = [&](uint32_t low, uint32_t high) {
    return low + static_cast<uint32_t>(random() % (high - low + 1));
  };
  for (int trial = 0; trial < (kInstrumented ? 4 : 20); ++trial) {
    const uint64_t n_sinks = trial % 3 == 0 ? 0 : pick(1, 130);
    const uint64_t n_recent = pick(1, 150);
    const uint64_t slack = 40;
    PolicyRig rig(make_razor(KVM_RETAIN_SINKS_RECENT_FOLD, n_sinks, n_recent, slack), key, value,
                  query);
    std::map<kvm_seq_id, uint64_t> ends = {{rig.seq, folded_end(0, n_sinks, n_recent, slack)}};
    for (int turn = 0; turn < 12; ++turn) {
      const auto at = std::next(ends.begin(), pick(0, static_cast<uint32_t>(ends.size()) - 1));
      const kvm_seq_id seq = at->first;
      const uint32_t n = turn % 4 == 3 ? pick(100, 300) : pick(1, 70);
      rig.step(seq, n, std::min(n, 4u));
      for (uint32_t row = 0; row < std::min(n, 4u); ++row) {
        const uint64_t p = rig.first_query + row;
        for (uint32_t h = 0; h < kQHeads; ++h) {
          const auto entries = entries_of(p, h / 2, n_sinks, at->second);
          ASSERT_LT(rig.error(row, h, attention_over(query(p, h), entries, kScale)), 1e-4)
              << "position " << p << " head " << h << " folded to " << at->second;
        }
      }
      const uint64_t length = rig.rig.length(seq);
      at->second = std::max(at->second, folded_end(length, n_sinks, n_recent, slack));
      if (turn % 3 == 1) {
        ends[rig.fork(seq)] = at->second;
      }
      if (turn % 3 == 2) {
        const uint64_t less = std::min<uint64_t>(pick(1, 39), length);
        if (at->second != folded_end(0, n_sinks, n_recent, slack) &&
            length - less < at->second + n_recent) {
          continue;  // truncates of several turns may add up to more than the slack
        }
        ASSERT_TRUE(rig.rig.verb(SeqVerb::kTruncate, seq, length - less).status.is_ok());
      }
    }
  }
}

// A mean in the exponent is never more than the mean of exponentials, so what was folded is never
// over-counted.
TEST(RazorAttention, JensenBoundHolds) {
  PolicyRig folded(make_razor(KVM_RETAIN_SINKS_RECENT_FOLD, 4, 64, 0), key, value, query);
  PolicyRig full(make_razor(KVM_RETAIN_FULL, 0, 0, 0), key, value, query);
  PolicyRig dropped(make_razor(KVM_RETAIN_SINKS_RECENT, 4, 64, 0), key, value, query);
  uint64_t n_trials = 0;
  for (int turn = 0; turn < 30; ++turn) {
    folded.step(folded.seq, 50, 20);
    full.step(full.seq, 50, 20);
    dropped.step(dropped.seq, 50, 20);
    for (uint32_t row = 0; row < 20; ++row) {
      for (uint32_t h = 0; h < kQHeads; ++h, ++n_trials) {
        ASSERT_LE(folded.lse(row, h), full.lse(row, h) + 1e-5f);
        ASSERT_GE(folded.lse(row, h), dropped.lse(row, h) - 1e-5f) << "the entry adds something";
      }
    }
  }
  EXPECT_EQ(n_trials, 2400u);
}

TEST(RazorAttention, EqualKeysFoldExactly) {
  const auto same_key = [](uint64_t, uint32_t head) { return key(0, head); };
  PolicyRig folded(make_razor(KVM_RETAIN_SINKS_RECENT_FOLD, 4, 64, 0), same_key, value, query);
  PolicyRig full(make_razor(KVM_RETAIN_FULL, 0, 0, 0), same_key, value, query);
  for (int turn = 0; turn < 10; ++turn) {
    folded.step(folded.seq, 130, 3);
    full.step(full.seq, 130, 3);
    for (uint32_t row = 0; row < 3; ++row) {
      for (uint32_t h = 0; h < kQHeads; ++h) {
        ASSERT_NEAR(folded.lse(row, h), full.lse(row, h), 1e-5f);
        for (uint32_t i = 0; i < kDim; ++i) {
          ASSERT_NEAR(folded.output(row, h)[i], full.output(row, h)[i], 1e-5f);
        }
      }
    }
  }
  EXPECT_GT(folded.info(folded.seq).n_entries_dropped, 1000u);
}

// Far context that is alike, as these heads have it: what dropping loses is nearly all kept.
TEST(RazorAttention, ErrorIsATenthOfThatOfDropping) {
  const auto alike_key = [](uint64_t p, uint32_t head) {
    Row row = hashed_row(1, p, head, kDim, 0.3);
    const Row common = hashed_row(9, 0, head, kDim, 1.0);
    for (uint32_t i = 0; i < kDim; ++i) {
      row[i] += common[i];
    }
    return row;
  };
  const auto alike_value = [](uint64_t p, uint32_t head) {
    Row row = hashed_row(2, p, head, kDim, 0.3);
    const double common = p % 4096 < 3800 ? 1.0 : -1.0;  // the recent ones differ
    for (uint32_t i = 0; i < kDim; ++i) {
      row[i] += common;
    }
    return row;
  };
  std::vector<std::vector<float>> outputs[3];
  const uint32_t kinds[] = {KVM_RETAIN_FULL, KVM_RETAIN_SINKS_RECENT, KVM_RETAIN_SINKS_RECENT_FOLD};
  for (int i = 0; i < 3; ++i) {
    PolicyRig rig(make_razor(kinds[i], kinds[i] == 0 ? 0 : 4, kinds[i] == 0 ? 0 : 256, 0),
                  alike_key, alike_value, query);
    rig.step(rig.seq, 4064, 0);
    rig.step(rig.seq, 32, 32);
    for (uint32_t row = 0; row < 32; ++row) {
      for (uint32_t h = 0; h < kQHeads; ++h) {
        outputs[i].push_back(rig.output(row, h));
      }
    }
  }
  double errors[3] = {};
  for (int i = 1; i < 3; ++i) {
    for (size_t row = 0; row < outputs[0].size(); ++row) {
      for (uint32_t d = 0; d < kDim; ++d) {
        errors[i] += std::pow(double{outputs[i][row][d]} - double{outputs[0][row][d]}, 2);
      }
    }
  }
  RecordProperty("ratio", std::to_string(std::sqrt(errors[2] / errors[1])));
  EXPECT_LE(std::sqrt(errors[2]), 0.1 * std::sqrt(errors[1])) << std::sqrt(errors[2] / errors[1]);
}

TEST(RazorAttention, CutsThatNeedAPartOfTheEntryAreRefused) {
  for (const uint64_t n_recent : {uint64_t{1}, uint64_t{100}}) {
    PolicyRig rig(make_razor(KVM_RETAIN_SINKS_RECENT_FOLD, 4, n_recent, 0), key, value, query);
    rig.step(rig.seq, 1000, 1);
    const uint64_t end = folded_end(1000, 4, n_recent, 0);
    for (const uint64_t n : {uint64_t{65}, end - 64, end - 1}) {
      EXPECT_EQ(rig.rig.verb(SeqVerb::kTruncate, rig.seq, n).status.code(), KVM_ERR_PARTIAL) << n;
      EXPECT_EQ(rig.rig.verb(SeqVerb::kFork, rig.seq, n).status.code(), KVM_ERR_PARTIAL) << n;
    }
    // Before all that was folded nothing is missing, and nothing of it remains.
    const kvm_seq_id child = rig.fork(rig.seq, 60);
    EXPECT_LT(rig.bytes(child), rig.bytes(rig.seq));
    for (const kvm_seq_id seq : {child, rig.seq}) {
      if (seq == rig.seq) {
        ASSERT_TRUE(rig.rig.verb(SeqVerb::kTruncate, seq, 60).status.is_ok());
      }
      rig.step(seq, 2, 2);
      for (uint32_t h = 0; h < kQHeads; ++h) {
        const auto entries = entries_of(61, h / 2, 4, 0);
        EXPECT_LT(rig.error(1, h, attention_over(query(61, h), entries, kScale)), 1e-4);
      }
    }
  }
}

// Bytes of the entry are charged and given back; every encoding folds; no quota, no fold.
TEST(RazorAttention, AccountsHold) {
  for (const uint32_t codec : {KVM_CODEC_F32, KVM_CODEC_F16, KVM_CODEC_BF16, KVM_CODEC_I8,
                               KVM_CODEC_F8E4M3, KVM_CODEC_I8_CHANNEL}) {
    auto store = Store::open({.host_capacity_bytes = 64 << 20}).value();
    SpaceSpec spec = engine::make_spec("razor", 2, 3);
    spec.params.codec = codec;
    spec.policies = {{.retention = KVM_RETAIN_SINKS_RECENT_FOLD, .n_sinks = 4, .n_recent = 100}};
    const kvm_space_id space = store->register_space(spec).value();
    const ClientId client = store->add_client({});
    Sequence* seq = store->find_seq(client, store->create_seq(client, space, 0).value()).value();
    std::vector<uint64_t> tokens(700);
    for (uint64_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = i;
    }
    ASSERT_TRUE(append_all(*store, seq, tokens).is_ok());
    store->check_accounts();
    EXPECT_EQ(store->seq_info(seq).n_entries_dropped, 6 * (576 - 64u));
    std::vector<KvRun> runs;
    store->collect_runs(seq, 1, 2, &runs);
    ASSERT_EQ(runs[1].position, 575u);
    ASSERT_EQ(runs[1].n_tokens, 1u);
    EXPECT_FLOAT_EQ(*runs[1].log_weight, std::log(512.0f));
    double mean = 0;
    for (uint64_t t = 64; t < 576; ++t) {
      mean += double{row_element(t, 1, 2, 0, 0)} / 512;
    }
    // The rows of these tests are what codecs of whole rows but fp8 hold exactly.
    EXPECT_NEAR(double{*static_cast<const float*>(runs[1].k.rows)}, mean,
                codec >= KVM_CODEC_F8E4M3 ? 0.5 : 1e-4);
    Sequence* child =
        store->find_seq(client, store->fork_seq(seq, KVM_POSITION_END).value()).value();
    ASSERT_TRUE(append_all(*store, child, tokens).is_ok());
    store->check_accounts();
    store->free_seq(seq);
    store->check_accounts();
    ASSERT_TRUE(store->truncate_seq(child, 10).is_ok());
    store->check_accounts();
    store->free_seq(child);
    EXPECT_EQ(store->client_bytes(client), 0u);
  }
}

}  // namespace
}  // namespace kvm::engine::testing
