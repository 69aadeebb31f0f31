// SPDX-License-Identifier: Apache-2.0
// DuoAttention: a table of retrieval and streaming heads. Physical bytes, any chunk size, needles.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "tests/unit/engine/policy_testbed.h"

namespace kvm::engine::testing {
namespace {

constexpr uint32_t kDim = 16;

SpaceSpec make_duo(uint32_t n_kv_heads, uint64_t streaming_heads, uint64_t n_sinks,
                   uint64_t n_recent, uint64_t slack = 0) {
  SpaceSpec spec = make_spec("duo", 1, 2 * n_kv_heads, n_kv_heads, kDim);
  if (streaming_heads != 0) {
    spec.policies = {{.kv_head_mask = {streaming_heads, 0},
                      .retention = KVM_RETAIN_SINKS_RECENT,
                      .n_sinks = n_sinks,
                      .n_recent = n_recent,
                      .slack = slack}};
  }
  return spec;
}

Row key(uint64_t position, uint32_t head) { return hashed_row(1, position, head, kDim, 1.5); }
Row value(uint64_t position, uint32_t head) { return hashed_row(2, position, head, kDim, 1.0); }
Row query(uint64_t position, uint32_t head) { return hashed_row(3, position, head, kDim, 1.5); }

TEST(DuoAttention, BytesAreThoseOfTheFormula) {
  constexpr uint64_t kTokens = 32768;
  constexpr uint32_t kHeads = 8;
  const auto page_bytes_of = [](uint64_t streaming_heads) {
    PolicyRig rig(make_duo(kHeads, streaming_heads, 64, 256), key, value, query);
    for (uint64_t n = 0; n < kTokens; n += 2048) {
      rig.step(rig.seq, 2048, 0);
    }
    const kvm_stats stats = rig.rig.engine->stats();
    EXPECT_EQ(stats.host_page_bytes, rig.bytes(rig.seq));
    // What is charged: these pages, begun extents, and a few that are kept for what comes.
    EXPECT_LE(stats.host_used_bytes, stats.host_page_bytes + (uint64_t{36} << 20));
    return static_cast<double>(stats.host_page_bytes);
  };
  const double full = page_bytes_of(0);
  EXPECT_EQ(full, static_cast<double>(kTokens * kHeads * 2 * kDim * sizeof(float)));
  for (const uint64_t streaming_heads : {0b11111100u, 0b01010101u, 0b00000010u}) {
    const double f = 1.0 - __builtin_popcountll(streaming_heads) / double{kHeads};
    const double expected = f + (1 - f) * (64 + 256) / double{kTokens};
    EXPECT_NEAR(page_bytes_of(streaming_heads) / full / expected, 1.0, 0.02) << "f = " << f;
  }
}

// Outputs of all rows of n_tokens tokens that come in chunks.
std::vector<std::vector<float>> outputs_of(uint32_t chunk, uint32_t n_tokens, uint32_t n_q_heads) {
  PolicyRig rig(make_duo(2, 0b10, 64, 256), key, value, query);
  std::vector<std::vector<float>> rows;
  for (uint32_t at = 0; at < n_tokens; at += chunk) {
    const uint32_t n = std::min(chunk, n_tokens - at);
    rig.step(rig.seq, n, n);
    for (uint32_t r = 0; r < n; ++r) {
      for (uint32_t h = 0; h < n_q_heads; ++h) {
        rows.push_back(rig.output(r, h));
      }
    }
  }
  return rows;
}

TEST(DuoAttention, ChunksOfAnySizeAgree) {
  const uint32_t n_tokens = kInstrumented ? 700 : 2048;
  const std::vector<std::vector<float>> whole = outputs_of(2048, n_tokens, 4);
  // Against the mask, in double precision.
  for (uint64_t p = 0; p < n_tokens; p += 37) {
    for (uint32_t h = 0; h < 4; ++h) {
      std::vector<Entry> seen;
      for (uint64_t x = 0; x <= p; ++x) {
        if (h < 2 || x < 64 || x + 256 > p) {
          seen.push_back({key(x, h / 2), value(x, h / 2)});
        }
      }
      const Answer expected = attention_over(query(p, h), seen, 1.0 / std::sqrt(double{kDim}));
      for (uint32_t i = 0; i < kDim; ++i) {
        ASSERT_NEAR(double{whole[p * 4 + h][i]}, expected.o[i], 1e-5) << p << " " << h;
      }
    }
  }
  for (const uint32_t chunk : {1u, 2u, 63u, 64u, 65u, 256u, 1000u}) {
    const std::vector<std::vector<float>> rows = outputs_of(chunk, n_tokens, 4);
    ASSERT_EQ(rows.size(), whole.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      for (uint32_t d = 0; d < kDim; ++d) {
        ASSERT_NEAR(double{rows[i][d]}, double{whole[i][d]}, 1e-5) << "chunk " << chunk << " " << i;
      }
    }
  }
}

// A key far back that queries point at: heads that retrieve find it, heads that stream do not. With
// forks, and after a truncate of committed tokens.
TEST(DuoAttention, OnlyRetrievalHeadsFindTheNeedle) {
  constexpr uint64_t kNeedle = 1000;
  const auto needle_key = [](uint64_t p, uint32_t h) {
    Row row = key(p, h);
    if (p == kNeedle) {
      row.assign(kDim, 0);
      row[0] = 30;
    }
    return row;
  };
  const auto needle_value = [](uint64_t p, uint32_t h) {
    return p == kNeedle ? Row(kDim, 5.0) : value(p, h);
  };
  const auto needle_query = [](uint64_t, uint32_t) {
    Row row(kDim, 0);
    row[0] = 8;
    return row;
  };
  PolicyRig rig(make_duo(2, 0b10, 4, 100, 32), needle_key, needle_value, needle_query);
  rig.step(rig.seq, 5000, 1);
  const kvm_seq_id child = rig.fork(rig.seq);
  ASSERT_TRUE(rig.rig.verb(SeqVerb::kTruncate, child, 4970).status.is_ok());
  EXPECT_EQ(rig.rig.verb(SeqVerb::kTruncate, rig.seq, 4000).status.code(), KVM_ERR_PARTIAL);
  for (const kvm_seq_id seq : {rig.seq, child}) {
    rig.step(seq, 2, 2);
    for (uint32_t row = 0; row < 2; ++row) {
      for (uint32_t h = 0; h < 2; ++h) {
        EXPECT_NEAR(rig.output(row, h)[3], 5.0f, 1e-3f);
        EXPECT_LT(std::fabs(rig.output(row, 2 + h)[3]), 1.0f);
      }
    }
  }
}

}  // namespace
}  // namespace kvm::engine::testing
