// SPDX-License-Identifier: Apache-2.0
// StreamingLLM: sinks and a recent window whose positions count in the cache, against keys that are
// rotated anew for each query, in double precision.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "tests/unit/engine/policy_testbed.h"

namespace kvm::engine::testing {
namespace {

constexpr uint32_t kDim = 16;
constexpr uint32_t kKvHeads = 2;
constexpr uint32_t kQHeads = 6;

struct Rope {
  uint32_t layout = KVM_ROPE_HALF;
  std::vector<float> inv_freq;

  Row turn(Row row, double position) const {
    const size_t n_pairs = inv_freq.size();
    for (size_t i = 0; i < n_pairs; ++i) {
      const bool half = layout == KVM_ROPE_HALF;
      double& x = row[half ? i : 2 * i];
      double& y = row[half ? i + n_pairs : 2 * i + 1];
      const double angle = position * double{inv_freq[i]};
      const double turned = x * std::cos(angle) - y * std::sin(angle);
      y = x * std::sin(angle) + y * std::cos(angle);
      x = turned;
    }
    return row;
  }
};

Rope make_rope(uint32_t layout, uint32_t n_pairs) {
  Rope rope = {layout, {}};
  for (uint32_t i = 0; i < n_pairs; ++i) {
    rope.inv_freq.push_back(std::pow(10000.0f, -static_cast<float>(i) / 8.0f));
  }
  return rope;
}

SpaceSpec make_streaming(const Rope& rope, uint64_t n_sinks, uint64_t n_recent, uint64_t slack) {
  SpaceSpec spec = make_spec("streaming", 1, kQHeads, kKvHeads, kDim);
  spec.params.rope_layout = rope.layout;
  spec.params.n_rope_pairs = static_cast<uint32_t>(rope.inv_freq.size());
  spec.rope_inv_freq = rope.inv_freq;
  spec.policies = {{.retention = KVM_RETAIN_SINKS_RECENT,
                    .positions = KVM_POSITIONS_IN_CACHE,
                    .n_sinks = n_sinks,
                    .n_recent = n_recent,
                    .slack = slack}};
  return spec;
}

// Keys and queries before they are rotated.
Row base_k(uint64_t position, uint32_t head) { return hashed_row(1, position, head, kDim, 1.5); }
Row base_v(uint64_t position, uint32_t head) { return hashed_row(2, position, head, kDim, 1.0); }
Row base_q(uint64_t position, uint32_t head) { return hashed_row(3, position, head, kDim, 1.5); }

struct Streaming : PolicyRig {
  Streaming(const Rope& r, uint64_t sinks, uint64_t recent, uint64_t slack)
      : PolicyRig(
            make_streaming(r, sinks, recent, slack),
            [r](uint64_t p, uint32_t h) { return r.turn(base_k(p, h), static_cast<double>(p)); },
            base_v,
            [r](uint64_t p, uint32_t h) { return r.turn(base_q(p, h), static_cast<double>(p)); }),
        rope(r),
        n_sinks(sinks),
        n_recent(recent) {}

  // What the row at p gets when every key is rotated to its index in the cache.
  Answer in_cache(uint64_t p, uint32_t q_head) const {
    std::vector<uint64_t> cache;
    const uint64_t window = p + 1 > n_recent ? p + 1 - n_recent : 0;
    for (uint64_t x = 0; x < std::min(n_sinks, p + 1); ++x) {
      cache.push_back(x);
    }
    for (uint64_t x = std::max(window, n_sinks); x <= p; ++x) {
      cache.push_back(x);
    }
    const uint32_t kv_head = q_head / (kQHeads / kKvHeads);
    std::vector<Entry> entries;
    for (size_t i = 0; i < cache.size(); ++i) {
      entries.push_back({rope.turn(base_k(cache[i], kv_head), static_cast<double>(i)),
                         base_v(cache[i], kv_head)});
    }
    const Row q = rope.turn(base_q(p, q_head), static_cast<double>(cache.size() - 1));
    return attention_over(q, entries, 1.0 / std::sqrt(double{kDim}));
  }
  void check(uint32_t n_query) const {
    for (uint32_t row = 0; row < n_query; ++row) {
      for (uint32_t h = 0; h < kQHeads; ++h) {
        ASSERT_LT(error(row, h, in_cache(first_query + row, h)), 1e-4)
            << "position " << first_query + row << " head " << h << " sinks " << n_sinks
            << " recent " << n_recent;
      }
    }
  }

  Rope rope;
  uint64_t n_sinks;
  uint64_t n_recent;
};

TEST(StreamingLlm, BothFormsOfPositionsAgree) {
  std::mt19937 random(11);
  const auto pick = [&](uint32_t low, uint32_t high) {
    return low + static_cast<uint32_t>(random() % (high - low + 1));
  };
  for (int trial = 0; trial < (kInstrumented ? 6 : 40); ++trial) {
    const Rope rope =
        make_rope(trial % 2 == 0 ? KVM_ROPE_HALF : KVM_ROPE_INTERLEAVED, pick(1, kDim / 2));
    const uint64_t n_sinks = trial % 3 == 0 ? 4 : pick(0, 150);
    Streaming s(rope, n_sinks, pick(1, 200), 40);
    std::vector<kvm_seq_id> seqs = {s.seq};
    for (int turn = 0; turn < 12; ++turn) {
      const kvm_seq_id seq = seqs[random() % seqs.size()];
      const uint32_t n = turn % 4 == 3 ? pick(100, 400) : pick(1, 40);
      s.step(seq, n, std::min(n, pick(1, 70)));
      s.check(std::min<uint32_t>(n, 1));
      s.step(seq, 3, 3);
      s.check(3);
      if (turn % 3 == 1) {
        seqs.push_back(s.fork(seq));
      }
      if (turn % 3 == 2) {  // committed long ago, and within the slack
        const uint64_t length = s.rig.length(seq);
        ASSERT_TRUE(s.rig.verb(SeqVerb::kTruncate, seq, length - pick(1, 39)).status.is_ok());
      }
    }
    if (::testing::Test::HasFatalFailure()) {
      return;
    }
  }
}

// A block of rows, of which the first see everything and the last have lost tokens.
TEST(StreamingLlm, RowsOfOneRequestHaveShiftsOfTheirOwn) {
  for (const uint32_t n : {1u, 40u, 64u, 300u}) {
    Streaming s(make_rope(KVM_ROPE_HALF, 8), 5, 30, 0);
    s.step(s.seq, 20, 20);
    s.check(20);
    s.step(s.seq, n, n);
    s.check(n);
  }
}

// The same bits however a text is cut into requests of fewer than 24 rows for a kv head, and
// however into requests of more: across the position where turning begins, and far behind it.
TEST(StreamingLlm, RowsDoNotDependOnTheirRequest) {
  constexpr uint32_t kTokens = 150;
  const auto outputs = [](const std::vector<uint32_t>& sizes) {
    Streaming s(make_rope(KVM_ROPE_HALF, 8), 5, 30, 3);
    std::vector<std::vector<float>> rows;
    for (size_t i = 0; rows.size() < kTokens * kQHeads; ++i) {
      const uint32_t n = sizes[i % sizes.size()];
      s.step(s.seq, n, n);
      for (uint32_t row = 0; row < n; ++row) {
        for (uint32_t h = 0; h < kQHeads; ++h) {
          rows.push_back(s.output(row, h));
          rows.back().push_back(s.lse(row, h));
        }
      }
    }
    return rows;
  };
  const auto alone = outputs({1});
  for (const std::vector<uint32_t>& sizes :
       std::vector<std::vector<uint32_t>>{{2}, {7, 1, 2}, {3, 6, 5, 1}}) {
    EXPECT_EQ(outputs(sizes), alone);
  }
  const auto whole = outputs({kTokens});
  for (const std::vector<uint32_t>& sizes :
       std::vector<std::vector<uint32_t>>{{10}, {20, 30}, {34, 8, 9, 99}, {40, 110}}) {
    EXPECT_EQ(outputs(sizes), whole);
  }
}

// All rows of a tree are turned as the first: what differs is only where they are in the window.
TEST(StreamingLlm, TreesTurnAsTheirFirstRow) {
  Streaming s(make_rope(KVM_ROPE_HALF, 8), 4, 50, 16);
  s.step(s.seq, 200, 1);
  s.tree_mask = {1};
  s.step(s.seq, 1, 1, KVM_ITEM_TREE);
  s.check(1);
  s.tree_mask = {0b01, 0b11};
  s.step(s.seq, 2, 2, KVM_ITEM_TREE);
  s.check(1);
}

// As long as nothing is out of sight, the very bits of a head that keeps everything.
TEST(StreamingLlm, IsDenseBeforeAnyEviction) {
  const Rope rope = make_rope(KVM_ROPE_HALF, 8);
  SpaceSpec dense = make_streaming(rope, 4, 300, 0);
  dense.policies.clear();
  Streaming s(rope, 4, 300, 0);
  PolicyRig full(
      dense,
      [&](uint64_t p, uint32_t h) { return rope.turn(base_k(p, h), static_cast<double>(p)); },
      base_v,
      [&](uint64_t p, uint32_t h) { return rope.turn(base_q(p, h), static_cast<double>(p)); });
  for (const uint32_t n : {1u, 100u, 7u, 190u, 5u, 1u}) {
    s.step(s.seq, n, n);
    full.step(full.seq, n, n);
    ASSERT_EQ(s.output_bytes(), full.output_bytes());
  }
  EXPECT_EQ(s.info(s.seq).n_entries_dropped, 0u);
  EXPECT_EQ(s.rig.length(s.seq), 304u);
  s.step(s.seq, 1, 1);
  full.step(full.seq, 1, 1);
  EXPECT_NE(s.output_bytes(), full.output_bytes()) << "position 304 has lost token 4";
}

// Positions of a million, where the angles are large, and memory that does not grow.
TEST(StreamingLlm, BytesStayTheSame) {
  constexpr uint64_t kTokens = 1'000'000;
  constexpr uint32_t kBlock = 500;
  Streaming s(make_rope(KVM_ROPE_HALF, 8), 4, 1020, 0);
  s.step(s.seq, 4096, 1);
  uint64_t least = UINT64_MAX;
  uint64_t most = 0;
  const auto look = [&] {
    const uint64_t bytes = s.bytes(s.seq);
    least = std::min(least, bytes);
    most = std::max(most, bytes);
  };
  // Until the last of them, tokens that are forgotten before anybody looks: all the same.
  Buffer zeros(Dtype::kF32, 1, kBlock, kKvHeads, kDim);
  for (uint32_t i = 0; i < kBlock * kKvHeads * kDim; ++i) {
    zeros.set(0, 0, 0, i, 0.0f);
  }
  while (s.rig.length(s.seq) + kBlock <= kTokens - 2000) {
    StepRequest request;
    request.space = s.space;
    request.append = true;
    request.items = {append_item(s.seq, kBlock)};
    request.k = zeros.view();
    request.v = zeros.view();
    ASSERT_TRUE(s.rig.run(std::move(request)).status.is_ok());
    look();
  }
  while (s.rig.length(s.seq) < kTokens) {
    s.step(s.seq, 500, 1);
    look();
  }
  s.step(s.seq, 8, 8);
  s.check(8);
  const uint64_t page_bytes = 2 * uint64_t{kPageTokens} * kKvHeads * kDim * sizeof(float);
  EXPECT_LE(most - least, page_bytes);
  EXPECT_LE(most, (1024 / kPageTokens + 2) * page_bytes);
  EXPECT_LE(s.rig.engine->stats().host_used_bytes, uint64_t{16} << 20);
}

}  // namespace
}  // namespace kvm::engine::testing
