// SPDX-License-Identifier: Apache-2.0
// Geometries beyond "as many dims in K as in V, and in every layer": values inside keys, dims of a
// layer's own, groups of more q heads than are sampled together, biases by position.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/unit/engine/rig.h"

namespace kvm::engine::testing {
namespace {

// --- Values inside keys -------------------------------------------------------------------------

constexpr uint32_t kKvHeads = 2;
constexpr uint32_t kQHeads = 6;
constexpr uint32_t kDimK = 72;
constexpr uint32_t kDimV = 64;
constexpr uint32_t kTokens = 700;

// Two sequences of one content: with values inside keys, and with the same values apart.
class Twins {
 public:
  Twins(uint32_t codec, const kvm_policy_params& policy) : rig_(2) {
    std::mt19937_64 random(codec);
    fill(&k_, 1, kTokens, kKvHeads, random, 1.5f);
    for (uint32_t row = 0; row < kTokens; ++row) {
      for (uint32_t head = 0; head < kKvHeads; ++head) {
        for (uint32_t i = 0; i < kDimV; ++i) {
          v_.set(0, row, head, i, k_.get(0, row, head, i));
        }
      }
    }
    for (const bool inside : {true, false}) {
      SpaceSpec spec = make_spec(inside ? "inside" : "apart", 1, kQHeads, kKvHeads, kDimK, kDimV);
      spec.params.codec = codec;
      spec.params.flags = inside ? uint32_t{KVM_SPACE_V_IN_K} : 0;
      spec.policies = {policy};
      spaces_.push_back(rig_.space(spec));
      seqs_.push_back(rig_.create(spaces_.back()));
    }
  }

  uint64_t bytes_per_token(bool inside) {
    return rig_.engine->space_info(spaces_[inside ? 0 : 1]).value().bytes_per_token;
  }

  // Appends the next n tokens to both and attends to the last n_query; returns whether they agree
  // in every bit.
  bool step(uint32_t n, uint32_t n_query) {
    std::mt19937_64 random(n_appended_);
    fill(&q_, 1, n_query, kQHeads, random, 1.0f);
    std::vector<std::vector<std::byte>> answers;
    for (const bool inside : {true, false}) {
      Buffer o(Dtype::kF32, 1, n_query, kQHeads, kDimV);
      Buffer lse(Dtype::kF32, 1, n_query, kQHeads, 1);
      StepRequest request;
      request.append = request.attend = true;
      request.space = spaces_[inside ? 0 : 1];
      kvm_item item = append_item(seqs_[inside ? 0 : 1], n, n_appended_);
      item.n_query = n_query;
      request.items = {item};
      request.k = k_.view();
      request.v = inside ? TensorView{} : v_.view();
      request.q = q_.view();
      request.o = o.view();
      request.lse = lse.view();
      const RequestResult result = rig_.run(std::move(request));
      EXPECT_TRUE(result.status.is_ok()) << result.status.message();
      answers.push_back(o.bytes());
      answers.back().insert(answers.back().end(), lse.bytes().begin(), lse.bytes().end());
    }
    n_appended_ += n;
    return answers[0] == answers[1];
  }
  void fork_and_cut(uint64_t n_tokens) {
    for (kvm_seq_id& seq : seqs_) {
      const RequestResult child = rig_.verb(SeqVerb::kFork, seq, KVM_POSITION_END);
      ASSERT_TRUE(child.status.is_ok()) << child.status.message();
      ASSERT_TRUE(rig_.verb(SeqVerb::kFree, seq).status.is_ok());
      seq = child.seq;
      const RequestResult cut = rig_.verb(SeqVerb::kTruncate, seq, n_tokens);
      ASSERT_TRUE(cut.status.is_ok()) << cut.status.message();
    }
    n_appended_ = static_cast<uint32_t>(n_tokens);
  }
  // The last n tokens of both, K and V.
  bool read_alike(uint32_t n) {
    std::vector<std::vector<std::byte>> rows;
    for (const kvm_seq_id seq : seqs_) {
      Buffer k(Dtype::kF32, 1, n, kKvHeads, kDimK);
      Buffer v(Dtype::kF32, 1, n, kKvHeads, kDimV);
      ReadRequest request;
      request.seq = seq;
      request.position = n_appended_ - n;
      request.n_tokens = n;
      request.k = k.view();
      request.v = v.view();
      const RequestResult result = rig_.run(std::move(request));
      EXPECT_TRUE(result.status.is_ok()) << result.status.message();
      rows.push_back(k.bytes());
      rows.back().insert(rows.back().end(), v.bytes().begin(), v.bytes().end());
    }
    return rows[0] == rows[1];
  }

 private:
  Rig rig_;
  Buffer k_{Dtype::kF32, 1, kTokens, kKvHeads, kDimK};
  Buffer v_{Dtype::kF32, 1, kTokens, kKvHeads, kDimV};
  Buffer q_{Dtype::kF32, 1, 40, kQHeads, kDimK};
  std::vector<kvm_space_id> spaces_;
  std::vector<kvm_seq_id> seqs_;
  uint32_t n_appended_ = 0;
};

// Codecs under which a value means the same wherever it lies; rows with a scale of their own have
// that of the whole key.
TEST(Geometry, ValuesInsideKeysAnswerAsValuesApart) {
  for (const uint32_t codec :
       {KVM_CODEC_F32, KVM_CODEC_F16, KVM_CODEC_BF16, KVM_CODEC_I8_CHANNEL}) {
    for (uint32_t retention = KVM_RETAIN_FULL; retention <= KVM_RETAIN_HEAVY; ++retention) {
      SCOPED_TRACE("codec " + std::to_string(codec) + ", retention " + std::to_string(retention));
      kvm_policy_params policy{};
      policy.retention = retention;
      if (retention != KVM_RETAIN_FULL) {
        policy.n_sinks = 4;
        policy.n_recent = 100;
        policy.slack = 80;
        policy.n_heavy = retention == KVM_RETAIN_HEAVY ? 30 : 0;
      }
      Twins twins(codec, policy);
      EXPECT_LT(twins.bytes_per_token(true), twins.bytes_per_token(false) * 6 / 10);
      ASSERT_TRUE(twins.step(300, 2));
      ASSERT_TRUE(twins.step(40, 40)) << "the blocked path";
      for (int i = 0; i < 30; ++i) {
        ASSERT_TRUE(twins.step(1, 1)) << i;
      }
      twins.fork_and_cut(340);
      ASSERT_TRUE(twins.step(200, 3));
      ASSERT_TRUE(twins.step(100, 1));
      EXPECT_TRUE(twins.read_alike(90));
    }
  }
}

// --- Worlds of one sequence, against attention in double precision ------------------------------

struct Shape {
  uint32_t group = 1;
  uint32_t n_kv_heads = 2;
  uint32_t dim_k = 64;
  uint32_t dim_v = 64;
};

class World : public Rig {
 public:
  World(const SpaceSpec& spec, const Shape& shape, uint32_t n_threads = 2)
      : Rig(n_threads), shape_(shape), id_(space(spec)), seq_(create(id_)) {}

  void append(uint32_t layer, uint32_t n, bool v_in_k = false) {
    k_ = Buffer(Dtype::kF32, 1, n, shape_.n_kv_heads, shape_.dim_k);
    v_ = Buffer(Dtype::kF32, 1, n, shape_.n_kv_heads, shape_.dim_v);
    std::mt19937_64 random(layer + n);
    fill(&k_, 1, n, shape_.n_kv_heads, random, 1.5f);
    fill(&v_, 1, n, shape_.n_kv_heads, random);
    for (uint32_t t = 0; t < n; ++t) {  // values that do not cancel
      for (uint32_t head = 0; head < shape_.n_kv_heads; ++head) {
        v_.set(0, t, head, t % 7, v_.get(0, t, head, t % 7) + 3.0f);
      }
    }
    StepRequest request;
    request.append = true;
    request.space = id_;
    request.layer_begin = layer;
    request.items = {append_item(seq_, n)};
    request.k = k_.view();
    request.v = v_in_k ? TensorView{} : v_.view();
    const RequestResult result = run(std::move(request));
    ASSERT_TRUE(result.status.is_ok()) << result.status.message();
    // As they are stored.
    ReadRequest read;
    read.seq = seq_;
    read.layer = layer;
    read.n_tokens = n;
    read.k = k_.view();
    read.v = v_.view();
    ASSERT_TRUE(run(std::move(read)).status.is_ok());
    rows_ = {};
    for (uint32_t t = 0; t < n; ++t) {
      rows_.k.emplace_back();
      rows_.v.emplace_back();
      for (uint32_t head = 0; head < shape_.n_kv_heads; ++head) {
        const auto k = k_.get_row(0, t, head);
        const auto v = v_.get_row(0, t, head);
        rows_.k.back().insert(rows_.k.back().end(), k.begin(), k.end());
        rows_.v.back().insert(rows_.v.back().end(), v.begin(), v.end());
      }
    }
  }

  RequestResult attend(uint32_t layer, uint32_t n_query, StepRequest request = {}) {
    const uint32_t n_q_heads = shape_.group * shape_.n_kv_heads;
    q_ = Buffer(Dtype::kF32, 1, n_query, n_q_heads, shape_.dim_k);
    o_ = Buffer(Dtype::kF32, 1, n_query, n_q_heads, shape_.dim_v);
    lse_ = Buffer(Dtype::kF32, 1, n_query, n_q_heads, 1);
    err_ = Buffer(Dtype::kF32, 1, n_query, n_q_heads, 2);
    std::mt19937_64 random(n_query);
    fill(&q_, 1, n_query, n_q_heads, random);
    request.attend = true;
    request.space = id_;
    request.layer_begin = layer;
    request.flags = KVM_STEP_F32_VALUES;
    request.items = {query_item(seq_, n_query)};
    request.q = q_.view();
    request.o = o_.view();
    request.lse = lse_.view();
    request.err = err_.view();
    asked_ = request;
    const RequestResult result = run(std::move(request));
    EXPECT_TRUE(result.status.is_ok()) << result.status.message();
    return result;
  }

  // The relative error of a q head of the last attend.
  double error(uint32_t row, uint32_t q_head, float scale) const {
    const kvm_item& item = asked_.items[0];
    const Answer answer = naive_attention(
        {.group = shape_.group, .scale = scale}, asked_, item, rows_.k.size() - item.n_query, row,
        q_head, q_.get_row(0, row, q_head), rows_, shape_.dim_k, shape_.dim_v);
    double off = 0, size = 0;
    for (uint32_t i = 0; i < shape_.dim_v; ++i) {
      const double x = double{o_.get(0, row, q_head, i)};
      off += (x - answer.o[i]) * (x - answer.o[i]);
      size += answer.o[i] * answer.o[i];
    }
    return std::sqrt(off / size);
  }
  float value(uint64_t token, uint32_t kv_head, uint32_t i) const {
    return rows_.v[token][kv_head * shape_.dim_v + i];
  }
  float bar(uint32_t row, uint32_t q_head) const { return err_.get(0, row, q_head, 0); }
  const Buffer& o() const { return o_; }
  const Buffer& lse() const { return lse_; }
  kvm_seq_id seq() const { return seq_; }

 private:
  Shape shape_;
  kvm_space_id id_;
  kvm_seq_id seq_;
  Buffer k_, v_, q_, o_, lse_, err_;
  ModelLayer rows_;
  StepRequest asked_;
};

float default_scale(uint32_t dim_k) { return 1.0f / std::sqrt(static_cast<float>(dim_k)); }

TEST(Geometry, ValuesInsideScaledKeys) {
  for (const uint32_t codec : {KVM_CODEC_I8, KVM_CODEC_F8E4M3, KVM_CODEC_I8_CHANNEL}) {
    for (const uint32_t group : {16u, 64u}) {
      SCOPED_TRACE("codec " + std::to_string(codec) + ", group " + std::to_string(group));
      const Shape shape = {.group = group, .dim_k = 576, .dim_v = 512};
      SpaceSpec spec = make_spec("mla", 1, 2 * group, 2, shape.dim_k, shape.dim_v);
      spec.params.codec = codec;
      spec.params.flags = KVM_SPACE_V_IN_K;
      World world(spec, shape);
      world.append(0, 200, true);
      for (const uint32_t n_query : {1u, 3u}) {
        world.attend(0, n_query);
        for (uint32_t head = 0; head < 2 * group; head += 5) {
          EXPECT_LT(world.error(n_query - 1, head, default_scale(576)), 1e-3);
        }
      }
    }
  }
}

TEST(Geometry, LayersHaveDimsOfTheirOwn) {
  SpaceSpec spec = make_spec("dims", 4, 4, 2, 64);
  spec.layers = {
      {.layer_begin = 1, .n_layers = 1, .head_dim_k = 128, .head_dim_v = 96},
      {.layer_begin = 2, .n_layers = 1, .head_dim_v = 512},
      {.layer_begin = 3, .n_layers = 1, .kind = KVM_LAYER_ALIAS, .target = 1},
  };
  spec.params.codec = KVM_CODEC_F32;
  const Shape shapes[] = {{2, 2, 64, 64}, {2, 2, 128, 96}, {2, 2, 64, 512}};
  for (uint32_t layer = 0; layer < 3; ++layer) {
    SCOPED_TRACE(layer);
    World world(spec, shapes[layer]);
    world.append(layer, 150);
    world.attend(layer, 2);
    for (uint32_t head = 0; head < 4; ++head) {
      EXPECT_LT(world.error(1, head, default_scale(shapes[layer].dim_k)), 1e-5) << head;
    }
    if (layer == 1) {
      const std::vector<std::byte> own = world.o().bytes();
      world.attend(3, 2);
      EXPECT_EQ(world.o().bytes(), own) << "the alias";
    }
    // Queries that were seen elsewhere have the layer's dims, too.
    Buffer q(Dtype::kF32, 1, 3, 4, shapes[layer].dim_k);
    std::mt19937_64 random(1);
    fill(&q, 1, 3, 4, random);
    ObserveRequest observe;
    observe.seq = world.seq();
    observe.layer = layer;
    observe.query_position = 100;
    observe.n_rows = 3;
    observe.q = q.view();
    EXPECT_TRUE(world.run(std::move(observe)).status.is_ok());
    EXPECT_TRUE(world.verb(SeqVerb::kTruncate, world.seq(), 101).status.is_ok());
  }
}

// --- Large groups -------------------------------------------------------------------------------

SpaceSpec grouped_spec(uint32_t group, uint32_t index) {
  SpaceSpec spec = make_spec("grouped", 1, 2 * group, 2, 64);
  spec.indexes = {make_index(index)};
  return spec;
}

TEST(Geometry, LargeGroupsAreSampledInParts) {
  constexpr uint32_t kLong = 6000;
  for (const uint32_t group : {17u, 29u, 71u, 128u}) {
    SCOPED_TRACE(group);
    const uint32_t n_parts = (group + 15) / 16;
    World world(grouped_spec(group, KVM_INDEX_SKETCH), {.group = group});
    world.append(0, kLong);
    uint32_t n_missed = 0;
    uint32_t n_rows = 0;
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      StepRequest request;
      request.mode = KVM_MODE_SAMPLED;
      request.budget = 300;
      request.delta = 0.1f;
      request.seed = seed;
      const RequestResult result = world.attend(0, 1, request);
      EXPECT_EQ(result.mode, uint32_t{KVM_MODE_SAMPLED});
      EXPECT_EQ(result.n_exact, 0u);
      EXPECT_EQ(result.keys_present, uint64_t{2} * kLong * n_parts);
      EXPECT_LT(result.keys_read, result.keys_present * 9 / 10);
      for (uint32_t head = 0; head < 2 * group; ++head) {
        const float bar = world.bar(0, head);
        ASSERT_TRUE(bar > 0 && bar < 0.6f) << head << ": " << bar;
        n_missed += world.error(0, head, 0.125f) > double{bar} ? 1 : 0;
        ++n_rows;
      }
    }
    EXPECT_LE(n_missed, n_rows / 6) << "of " << n_rows;

    StepRequest verified;
    verified.mode = KVM_MODE_VERIFIED;
    verified.eps = 0.05f;
    world.attend(0, 1, verified);
    for (uint32_t head = 0; head < 2 * group; ++head) {
      EXPECT_LE(world.bar(0, head), 0.05f) << head;
      EXPECT_LE(world.error(0, head, 0.125f), 0.05) << head;
    }
  }
}

// What is answered exactly has the bits of EXACT, whatever the parts: as a whole, and where some of
// the parts of a group turn out to need all keys.
TEST(Geometry, PartsThatAreExactHaveTheBitsOfExact) {
  for (const uint32_t group : {24u, 71u}) {
    for (const uint32_t kind : {KVM_INDEX_SKETCH, KVM_INDEX_LSH}) {
      SCOPED_TRACE("group " + std::to_string(group) + ", index " + std::to_string(kind));
      World world(grouped_spec(group, kind), {.group = group});
      world.append(0, 3000);
      world.attend(0, 1);
      const Buffer exact_o = world.o();
      const Buffer exact_lse = world.lse();
      StepRequest requests[4];
      requests[0].mode = KVM_MODE_VERIFIED;
      requests[0].eps = 1e-6f;
      requests[1].mode = KVM_MODE_TOPK;
      requests[1].budget = 100'000;
      requests[2].mode = KVM_MODE_AUTO;
      requests[2].eps = 1e-6f;
      requests[3].mode = KVM_MODE_VERIFIED;
      requests[3].eps = 0.1f;
      for (const StepRequest& request : requests) {
        if (kind == KVM_INDEX_LSH && request.mode == KVM_MODE_VERIFIED) {
          continue;  // there is no bar to verify
        }
        world.attend(0, 1, request);
        for (uint32_t head = 0; head < 2 * group; ++head) {
          if (request.eps < 0.1f || world.bar(0, head) == 0) {
            ASSERT_EQ(world.o().get_row(0, 0, head), exact_o.get_row(0, 0, head)) << head;
            ASSERT_EQ(world.lse().get(0, 0, head, 0), exact_lse.get(0, 0, head, 0)) << head;
          }
        }
      }
    }
  }
}

TEST(Geometry, SeveralTokensOfLargeGroups) {
  World world(grouped_spec(20, KVM_INDEX_SKETCH), {.group = 20});
  world.append(0, 5000);
  StepRequest request;
  request.mode = KVM_MODE_SAMPLED;
  request.budget = 400;
  EXPECT_EQ(world.attend(0, 8, request).mode, uint32_t{KVM_MODE_SAMPLED});
  uint32_t n_missed = 0;
  for (uint32_t row = 0; row < 8; ++row) {
    for (uint32_t head = 0; head < 40; ++head) {
      ASSERT_GT(world.bar(row, head), 0.0f);
      n_missed += world.error(row, head, 0.125f) > double{world.bar(row, head)} ? 1 : 0;
    }
  }
  EXPECT_LE(n_missed, 8u * 40 / 20) << "delta is 0.01";
  const RequestResult many = world.attend(0, 9, request);
  EXPECT_EQ(many.mode, uint32_t{KVM_MODE_EXACT}) << "more than 8 tokens";
  EXPECT_EQ(many.n_exact, 9u * 40);
}

// --- Biases by position -------------------------------------------------------------------------

// A bias that is the same for all keys would not show: slopes so steep that only neighbours count.
TEST(Geometry, SlopesCountFromTheQuerysPosition) {
  SpaceSpec spec = make_spec("alibi", 2, 4, 2, 64);
  spec.params.codec = KVM_CODEC_F32;
  spec.alibi_slopes = {100.0f, 0.0f, -100.0f, 0.0f};
  World world(spec, {.group = 2});
  world.append(1, 300);
  world.attend(1, 3);
  for (uint32_t row = 0; row < 3; ++row) {
    const uint64_t p = 297 + row;
    for (uint32_t i = 0; i < 64; ++i) {
      // Head 0 sees itself alone, head 2 of the other kv head the first token.
      EXPECT_NEAR(world.o().get(0, row, 0, i), world.value(p, 0, i), 1e-5f);
      EXPECT_NEAR(world.o().get(0, row, 2, i), world.value(0, 1, i), 1e-5f);
    }
    EXPECT_GT(world.lse().get(0, row, 2, 0), 100.0f * 290) << "the bias is in lse";
    EXPECT_LT(world.error(row, 1, 0.125f), 1e-5) << "no slope";
    EXPECT_LT(world.error(row, 3, 0.125f), 1e-5) << "no slope";
  }
}

}  // namespace
}  // namespace kvm::engine::testing
