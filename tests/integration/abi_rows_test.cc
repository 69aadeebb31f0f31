// SPDX-License-Identifier: Apache-2.0
// What kvm.h says of the bits of a row ("Bits"), over both libraries: they do not depend on how an
// engine cuts its tokens into items, and a verified row that falls back has those of EXACT.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "tests/integration/abi_rig.h"

namespace kvm::testing {
namespace {

constexpr uint32_t kQHeads = 8;
constexpr uint32_t kKvHeads = 4;
constexpr uint32_t kGroup = kQHeads / kKvHeads;
constexpr uint32_t kDim = 64;
constexpr uint32_t kTokens = 330;  // items of 11 and of 2 tokens come out even
constexpr size_t kKvRow = size_t{kKvHeads} * kDim;
constexpr size_t kQRow = size_t{kQHeads} * kDim;
constexpr uint32_t kCodecs[] = {KVM_CODEC_F32, KVM_CODEC_F16, KVM_CODEC_BF16, KVM_CODEC_I8,
                                KVM_CODEC_F8E4M3};

// o and lse of some query tokens.
struct Rows {
  std::vector<float> o;
  std::vector<float> lse;

  bool operator==(const Rows& other) const {
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    return same(o, other.o) && same(lse, other.lse);
  }
};

class AbiRows : public ServiceTest {
 protected:
  void SetUp() override { ASSERT_NO_FATAL_FAILURE(open("abi-rows-test")); }

  // A kv head each that keeps everything, a window, a window whose positions count in the cache,
  // and everything again; queries with outliers, which int8 rows treat apart.
  void register_space(uint32_t codec, bool has_policies, uint32_t index) {
    kvm_space_params params{};
    params.struct_size = sizeof(params);
    const std::string name = "rows" + std::to_string(codec) + (has_policies ? "p" : "");
    params.name = name.c_str();
    params.n_layers = 1;
    params.n_q_heads = kQHeads;
    params.n_kv_heads = kKvHeads;
    params.head_dim_k = kDim;
    params.codec = codec;
    params.rope_layout = KVM_ROPE_HALF;
    params.n_rope_pairs = 2;
    const float inv_freq[] = {1.0f, 0.01f};
    params.rope_inv_freq = inv_freq;
    kvm_policy_params policies[2] = {};
    for (uint32_t i = 0; i < 2; ++i) {
      policies[i].kv_head_mask[0] = uint64_t{2} << i;
      policies[i].retention = KVM_RETAIN_SINKS_RECENT;
      policies[i].n_sinks = 5;
      policies[i].n_recent = 90;
    }
    policies[1].positions = KVM_POSITIONS_IN_CACHE;
    params.policies = policies;
    params.n_policies = has_policies ? 2 : 0;
    kvm_index_params indexes{};
    indexes.kind = index;
    indexes.min_tokens = 512;
    params.indexes = &indexes;
    params.n_indexes = index == KVM_INDEX_NONE ? 0 : 1;
    ASSERT_EQ(kvm_space_register(client_, &params, &space_), KVM_OK) << kvm_last_error();
  }
  void make_tokens(uint32_t n) {
    k_ = random_floats(&random_, n * kKvRow);
    v_ = random_floats(&random_, n * kKvRow);
    q_ = random_floats(&random_, n * kQRow);
    for (uint32_t t = 0; t < n; t += 7) {
      q_[t * kQRow + random_() % kQRow] = 3000.0f;
    }
    for (float& x : q_) {
      x *= std::fabs(x) < 1000.0f ? 0.01f : 1.0f;
    }
  }
  kvm_seq_id new_sequence() {
    kvm_seq_id seq = 0;
    EXPECT_EQ(kvm_seq_create(client_, space_, nullptr, &seq), KVM_OK) << kvm_last_error();
    return seq;
  }
  static kvm_tensor rows_of(const std::vector<float>& all, size_t row, uint32_t at, uint32_t n) {
    return kvm_host_tensor(all.data() + at * row, n * row * sizeof(float), KVM_DTYPE_F32);
  }
  // Tokens [at, at + n) appended, if they are not there, and attended with, in one request.
  void step(kvm_seq_id seq, uint32_t at, uint32_t n, bool append, Rows* rows,
            uint32_t mode = KVM_MODE_EXACT, kvm_step_stats* stats = nullptr) {
    kvm_item item{};
    item.seq = seq;
    item.append_position = KVM_POSITION_END;
    item.n_append = append ? n : 0;
    item.n_query = n;
    item.query_position = at;
    kvm_step_params params{};
    params.struct_size = sizeof(params);
    params.space = space_;
    params.n_items = 1;
    params.items = &item;
    params.mode = mode;
    params.eps = mode == KVM_MODE_VERIFIED ? 1e-6f : 0;
    if (append) {
      params.k = rows_of(k_, kKvRow, at, n);
      params.v = rows_of(v_, kKvRow, at, n);
    }
    params.q = rows_of(q_, kQRow, at, n);
    params.o = rows_of(rows->o, kQRow, at, n);
    params.lse = rows_of(rows->lse, kQHeads, at, n);
    ASSERT_EQ(append ? kvm_step(queue_, &params, stats) : kvm_attend(queue_, &params, stats),
              KVM_OK)
        << kvm_last_error();
  }
  static Rows empty_rows(uint32_t n) {
    return {std::vector<float>(n * kQRow, -7.0f), std::vector<float>(size_t{n} * kQHeads, -7.0f)};
  }
  // A text in items of so many tokens, again and again; what is left over goes with the last.
  Rows prefill(const std::vector<uint32_t>& sizes, uint32_t end = kTokens, kvm_seq_id parent = 0,
               uint32_t from = 0) {
    kvm_seq_id seq = 0;
    if (parent == 0) {
      seq = new_sequence();
    } else {
      EXPECT_EQ(kvm_seq_fork(client_, parent, KVM_POSITION_END, &seq), KVM_OK) << kvm_last_error();
    }
    Rows rows = empty_rows(kTokens);
    const uint32_t least = *std::min_element(sizes.begin(), sizes.end());
    size_t i = 0;
    for (uint32_t at = from, n = 0; at < end; at += n) {
      n = sizes[i++ % sizes.size()];
      n = at + n + least > end ? end - at : n;
      step(seq, at, n, true, &rows);
    }
    last_ = seq;
    return rows;
  }

  std::mt19937 random_{5};
  kvm_space_id space_ = 0;
  kvm_seq_id last_ = 0;  // of prefill
  std::vector<float> k_, v_, q_;
};

TEST_F(AbiRows, AreTheSameInItemsOfAnySize) {
  make_tokens(kTokens);
  for (const uint32_t codec : kCodecs) {
    SCOPED_TRACE("codec " + std::to_string(codec));
    ASSERT_NO_FATAL_FAILURE(register_space(codec, true, KVM_INDEX_NONE));
    const uint32_t few = 23 / kGroup;  // query tokens with fewer than 24 rows for a kv head
    const Rows alone = prefill({1});
    EXPECT_TRUE(prefill({2}) == alone);
    EXPECT_TRUE(prefill({few}) == alone);
    EXPECT_TRUE(prefill({3, 1, 5}) == alone);
    const Rows whole = prefill({kTokens});
    EXPECT_TRUE(prefill({few + 1}) == whole);
    EXPECT_TRUE(prefill({100, 64, 17}) == whole);
    EXPECT_TRUE(prefill({40}) == whole);
    EXPECT_FALSE(alone == whole) << "kvm.h says that these differ";
    // A fork that goes on in other items than its parent did.
    prefill({few + 5}, 77);
    const Rows forked = prefill({19, 60}, kTokens, last_, 77);
    EXPECT_EQ(std::memcmp(forked.o.data() + 77 * kQRow, whole.o.data() + 77 * kQRow,
                          (kTokens - 77) * kQRow * sizeof(float)),
              0);
  }
}

TEST_F(AbiRows, VerifiedFallsBackToTheBitsOfExact) {
  constexpr uint32_t kMany = 1500;
  make_tokens(kMany);
  for (const uint32_t codec : kCodecs) {
    SCOPED_TRACE("codec " + std::to_string(codec));
    ASSERT_NO_FATAL_FAILURE(register_space(codec, false, KVM_INDEX_SKETCH));
    const kvm_seq_id seq = new_sequence();
    Rows rows = empty_rows(kMany);
    step(seq, 0, kMany, true, &rows);
    for (const uint32_t n : {1u, 3u, 11u, 12u, 37u, 65u}) {
      Rows exact = empty_rows(kMany);
      Rows verified = empty_rows(kMany);
      kvm_step_stats stats{};
      stats.struct_size = sizeof(stats);
      step(seq, kMany - n, n, false, &exact);
      step(seq, kMany - n, n, false, &verified, KVM_MODE_VERIFIED, &stats);
      EXPECT_EQ(stats.n_exact, uint64_t{n} * kQHeads);
      EXPECT_TRUE(verified == exact) << n << " query tokens";
    }
  }
}

}  // namespace
}  // namespace kvm::testing
