// SPDX-License-Identifier: Apache-2.0
// docs/models.md: the geometries of published models, with as many layers and heads as they have,
// each with a step compared with attention in double precision; and what an engine does to have
// models that the service does not know.

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kvm.h"
#include "tests/common/items.h"
#include "tests/integration/abi_rig.h"
#include "tests/integration/abi_steps.h"

namespace kvm::testing {
namespace {

// fp32 throughout (KVM_STEP_F32_VALUES): sums of up to 4,300 terms in blocks, and expf.
constexpr double kF32 = 1e-5;

struct Model {
  const char* name;
  uint32_t n_layers;
  uint32_t n_q_heads;
  uint32_t n_kv_heads;
  uint32_t dim_k;
  uint32_t dim_v = 0;  // 0: dim_k
  float scale = 0;     // 0: 1 / sqrt(dim_k)
  float softcap = 0;
  uint64_t window = 0;
  uint32_t full_every = 0;  // each such layer has no window, counted from 1; 0: none is without
  bool has_sinks = false;
  uint32_t n_tokens = 70;
  bool v_in_k = false;
  bool has_slopes = false;     // ALiBi
  uint32_t full_dim = 0;       // of the layers without a window; 0: dim_k
  uint32_t full_kv_heads = 0;  // likewise

  bool is_full(uint32_t layer) const { return full_every != 0 && (layer + 1) % full_every == 0; }
  uint32_t k_dim(uint32_t layer) const {
    return full_dim != 0 && is_full(layer) ? full_dim : dim_k;
  }
  uint32_t kv_heads(uint32_t layer) const {
    return full_kv_heads != 0 && is_full(layer) ? full_kv_heads : n_kv_heads;
  }
  uint32_t v_dim(uint32_t layer) const { return dim_v == 0 ? k_dim(layer) : dim_v; }
  uint64_t window_of(uint32_t layer) const { return is_full(layer) ? 0 : window; }
};

const Model kModels[] = {
    {"llama-3.1-8b", 32, 32, 8, 128},
    {"llama-3.1-405b", 126, 128, 8, 128},
    {"qwen2.5-7b", 28, 28, 4, 128},
    {"mistral-7b-v0.1", 32, 32, 8, 128, 0, 0, 0, 4096, 0, false, 4200},
    {"gemma-2-2b", 26, 8, 4, 256, 0, 0.0625f, 50, 4096, 2, false, 4200},
    {"gemma-3-1b", 26, 4, 1, 256, 0, 0.0625f, 0, 512, 6, false, 600},
    {"phi-3-mini", 32, 32, 32, 96, 0, 0, 0, 2047},
    {"gpt-oss-20b", 24, 64, 8, 64, 0, 0, 0, 128, 2, true, 200},
    {"falcon-40b", 60, 128, 8, 64},
    {"gpt-j-6b", 28, 16, 16, 256},
    {"gpt-neox-20b", 44, 64, 64, 96},
    {"stablelm-2-12b", 40, 32, 8, 160},
    {"nemotron-4-340b", 96, 96, 8, 192},
    {"granite-3-8b", 40, 32, 8, 128, 0, 0.0078125f},
    {"grok-1", 64, 48, 8, 128, 0, 0.08838834764831845f, 30},
    {"deepseek-v2-lite", 27, 16, 16, 192, 128},
    {"deepseek-v3", 61, 128, 128, 192, 128},
    {.name = "deepseek-v2-lite-latent",
     .n_layers = 27,
     .n_q_heads = 16,
     .n_kv_heads = 1,
     .dim_k = 576,
     .dim_v = 512,
     .scale = 0.1147213867929261f,
     .v_in_k = true},
    {.name = "deepseek-v3-latent",
     .n_layers = 61,
     .n_q_heads = 128,
     .n_kv_heads = 1,
     .dim_k = 576,
     .dim_v = 512,
     .scale = 0.1352337788608801f,
     .v_in_k = true},
    {"falcon-7b", 32, 71, 1, 64},
    {"falcon-180b", 80, 232, 8, 64},
    {"starcoder", 40, 48, 1, 128},
    {.name = "gemma-4-26b",
     .n_layers = 30,
     .n_q_heads = 16,
     .n_kv_heads = 8,
     .dim_k = 256,
     .scale = 1,
     .window = 1024,
     .full_every = 6,
     .n_tokens = 1100,
     .full_dim = 512,
     .full_kv_heads = 2},
    {.name = "bloom-176b",
     .n_layers = 70,
     .n_q_heads = 112,
     .n_kv_heads = 112,
     .dim_k = 128,
     .n_tokens = 300,
     .has_slopes = true},
    {.name = "mpt-7b",
     .n_layers = 32,
     .n_q_heads = 32,
     .n_kv_heads = 32,
     .dim_k = 128,
     .n_tokens = 2000,
     .has_slopes = true},
};

// Press, Smith and Lewis 2022: a geometric sequence; of a number of heads that is no power of two,
// those of the next smaller one and then every second of those of the next larger one.
std::vector<float> alibi_slopes(uint32_t n_heads) {
  const uint32_t whole = std::bit_floor(n_heads);
  std::vector<float> slopes;
  for (uint32_t i = 0; i < whole; ++i) {
    slopes.push_back(static_cast<float>(std::exp2(-8.0 * (i + 1) / whole)));
  }
  for (uint32_t i = 0; slopes.size() < n_heads; ++i) {
    slopes.push_back(static_cast<float>(std::exp2(-8.0 * (2 * i + 1) / (2 * whole))));
  }
  return slopes;
}

class AbiModels : public StepTest {
 protected:
  void SetUp() override { open("models"); }

  static kvm_space_params params_of(const Model& model) {
    kvm_space_params params{};
    params.struct_size = sizeof(params);
    params.name = model.name;
    params.n_layers = model.n_layers;
    params.n_q_heads = model.n_q_heads;
    params.n_kv_heads = model.n_kv_heads;
    params.head_dim_k = model.dim_k;
    params.head_dim_v = model.dim_v;
    params.codec = KVM_CODEC_F32;
    params.softmax_scale = model.scale;
    params.logit_softcap = model.softcap;
    params.flags = model.v_in_k ? uint32_t{KVM_SPACE_V_IN_K} : 0;
    return params;
  }

  // A step of one item. What is empty is left out.
  void step(kvm_space_id space, uint32_t layer, const kvm_item& item, const std::vector<float>& k,
            const std::vector<float>& v, const std::vector<float>& q, std::vector<float>* o,
            std::vector<float>* lse, const std::vector<kvm_range>& ranges = {}) {
    kvm_step_params params{};
    params.struct_size = sizeof(params);
    params.flags = KVM_STEP_F32_VALUES;
    params.space = space;
    params.layer_begin = layer;
    params.n_items = 1;
    params.items = &item;
    params.ranges = ranges.data();
    params.n_ranges = static_cast<uint32_t>(ranges.size());
    if (item.n_append != 0) {
      params.k = tensor_of(k);
      params.v = v.empty() ? kvm_tensor{} : tensor_of(v);
    }
    if (item.n_query != 0) {
      params.q = tensor_of(q);
      params.o = tensor_of(*o);
      params.lse = tensor_of(*lse);
    }
    ASSERT_EQ(kvm_step(queue_, &params, nullptr), KVM_OK) << kvm_last_error();
  }

  std::mt19937 random_{17};
};

// Attention of one row of one q head, in double precision. bias: of the key at a position, added to
// the logit. k and v: rows of tokens lie k_row and v_row floats apart.
struct Oracle {
  uint32_t n_tokens, k_row, v_row, dim_k, dim_v;
  double scale;
  double softcap = 0;
  uint64_t window = 0;
  double sink = -std::numeric_limits<double>::infinity();
  std::function<double(uint32_t)> bias = [](uint32_t) { return 0.0; };

  // Returns o and, behind it, lse.
  std::vector<double> attend(const float* q, const float* k, const float* v) const {
    std::vector<double> out(dim_v + 1);
    double sum = std::exp(sink);
    for (uint32_t t = 0; t < n_tokens; ++t) {
      if (window != 0 && t + window < n_tokens) {
        continue;  // the row is at n_tokens - 1
      }
      double dot = 0;
      for (uint32_t i = 0; i < dim_k; ++i) {
        dot += static_cast<double>(q[i]) * static_cast<double>(k[size_t{t} * k_row + i]);
      }
      double logit = scale * dot;
      logit = (softcap == 0 ? logit : softcap * std::tanh(logit / softcap)) + bias(t);
      const double weight = std::exp(logit);
      sum += weight;
      for (uint32_t i = 0; i < dim_v; ++i) {
        out[i] += weight * static_cast<double>(v[size_t{t} * v_row + i]);
      }
    }
    for (uint32_t i = 0; i < dim_v; ++i) {
      out[i] /= sum;
    }
    out[dim_v] = std::log(sum);
    return out;
  }
};

// Compares o [n_heads][dim_v] and lse [n_heads] of one row.
void expect_near(const std::vector<float>& o, const std::vector<float>& lse, uint32_t head,
                 const std::vector<double>& expected, double bound) {
  const size_t dim_v = expected.size() - 1;
  const std::vector<double> expected_o(expected.begin(), expected.end() - 1);
  EXPECT_LE(difference(&o[head * dim_v], expected_o), bound) << "head " << head;
  EXPECT_LE(difference(&lse[head], {expected.back()}), bound) << "head " << head;
}

TEST_F(AbiModels, ThoseThatFitAnswerRight) {
  for (const Model& model : kModels) {
    SCOPED_TRACE(model.name);
    kvm_space_params params = params_of(model);
    std::vector<kvm_layer_params> layers;
    for (uint32_t layer = 0; layer < model.n_layers && model.window != 0; ++layer) {
      kvm_layer_params entry{};
      entry.layer_begin = layer;
      entry.n_layers = 1;
      entry.window = model.window_of(layer);
      entry.head_dim_k = entry.head_dim_v = model.is_full(layer) ? model.full_dim : 0;
      entry.n_kv_heads = model.is_full(layer) ? model.full_kv_heads : 0;
      layers.push_back(entry);
    }
    params.layers = layers.data();
    params.n_layer_params = static_cast<uint32_t>(layers.size());
    std::vector<float> sinks;
    if (model.has_sinks) {
      sinks = random_floats(&random_, size_t{model.n_layers} * model.n_q_heads);
      params.sink_logits = sinks.data();
    }
    const std::vector<float> slopes =
        model.has_slopes ? alibi_slopes(model.n_q_heads) : std::vector<float>();
    params.alibi_slopes = model.has_slopes ? slopes.data() : nullptr;
    const kvm_space_id space = add_space(params);
    const kvm_seq_id seq = add_seq(space);
    // A layer with a window, where there are any, and one without.
    std::vector<uint32_t> probed = {0};
    if (model.full_every != 0) {
      probed.push_back(model.full_every - 1);
    }
    for (const uint32_t layer : probed) {
      SCOPED_TRACE(layer);
      const uint32_t n = model.n_tokens;
      const uint32_t dim_k = model.k_dim(layer);
      const uint32_t n_kv_heads = model.kv_heads(layer);
      const uint32_t dim_v = model.v_dim(layer);
      const auto k = random_floats(&random_, size_t{n} * n_kv_heads * dim_k);
      const auto v = random_floats(&random_, size_t{n} * n_kv_heads * dim_v);
      const auto q = random_floats(&random_, size_t{model.n_q_heads} * dim_k);
      std::vector<float> o(size_t{model.n_q_heads} * dim_v, -1);
      std::vector<float> lse(model.n_q_heads, -1);
      step(space, layer, item_of(seq, n, 1), k, model.v_in_k ? std::vector<float>() : v, q, &o,
           &lse);
      Oracle oracle{.n_tokens = n,
                    .k_row = n_kv_heads * dim_k,
                    .v_row = n_kv_heads * (model.v_in_k ? dim_k : dim_v),
                    .dim_k = dim_k,
                    .dim_v = dim_v,
                    .scale = model.scale != 0 ? static_cast<double>(model.scale)
                                              : 1 / std::sqrt(static_cast<double>(dim_k)),
                    .softcap = static_cast<double>(model.softcap),
                    .window = model.window_of(layer)};
      for (uint32_t head = 0; head < model.n_q_heads; head += 3) {
        const uint32_t kv = head / (model.n_q_heads / n_kv_heads);
        if (model.has_sinks) {
          oracle.sink = static_cast<double>(sinks[layer * model.n_q_heads + head]);
        }
        if (model.has_slopes) {
          const auto slope = static_cast<double>(slopes[head]);
          oracle.bias = [=](uint32_t t) { return -slope * (n - 1.0 - t); };
        }
        const float* value = model.v_in_k ? &k[size_t{kv} * dim_k] : &v[size_t{kv} * dim_v];
        expect_near(o, lse, head,
                    oracle.attend(&q[size_t{head} * dim_k], &k[size_t{kv} * dim_k], value), kF32);
      }
    }
    ASSERT_EQ(kvm_seq_free(client_, seq), KVM_OK) << kvm_last_error();
  }
}

TEST_F(AbiModels, ThoseThatDoNotFitAreToldWhy) {
  const std::pair<Model, const char*> refused[] = {
      {{"256-heads-over-one", 2, 256, 1, 64},
       "n_q_heads is 256 with n_kv_heads 1; n_kv_heads must divide it into groups of 1 to 128"},
      {{"heads-of-640", 2, 8, 8, 640},
       "head_dim_k is 640; it must be a multiple of 8 from 8 to 576"},
  };
  for (const auto& [model, sentence] : refused) {
    SCOPED_TRACE(model.name);
    const kvm_space_params params = params_of(model);
    kvm_space_id space = 0;
    EXPECT_EQ(kvm_space_register(client_, &params, &space), KVM_ERR_INVALID);
    EXPECT_STREQ(kvm_last_error(), sentence);
    EXPECT_EQ(kvm_space_find(client_, model.name, &space), KVM_ERR_NOT_FOUND);
  }
}

// Gemma 3n: the last 15 of 35 layers read what the last layer of their kind before them stored.
// Jamba: one layer in eight attends. Whisper: rows of the decoder see all of what was encoded.
TEST_F(AbiModels, LayersThatShareOrStoreNothing) {
  kvm_space_params shared = params_of({"gemma-3n-e4b", 35, 8, 2, 256});
  std::vector<kvm_layer_params> layers;
  for (uint32_t layer = 0; layer < 35; ++layer) {
    const bool is_full = (layer + 1) % 5 == 0;
    kvm_layer_params entry{};
    entry.layer_begin = layer;
    entry.n_layers = 1;
    entry.window = is_full ? 0 : 512;
    entry.kind = layer < 20 ? KVM_LAYER_OWN : KVM_LAYER_ALIAS;
    entry.target = layer < 20 ? 0 : is_full ? 19 : 18;
    layers.push_back(entry);
  }
  shared.layers = layers.data();
  shared.n_layer_params = 35;
  const kvm_space_id space = add_space(shared);
  const kvm_seq_id seq = add_seq(space);
  const auto k = random_floats(&random_, size_t{600} * 2 * 256);
  const auto v = random_floats(&random_, k.size());
  const auto q = random_floats(&random_, size_t{8} * 256);
  std::vector<float> own(q.size()), alias(q.size()), lse(8);
  for (const uint32_t stored : {18u, 19u}) {
    step(space, stored, item_of(seq, 600, 1), k, v, q, &own, &lse);
    step(space, stored + 5, item_of(seq, 0, 1), {}, {}, q, &alias, &lse);
    EXPECT_EQ(own, alias) << stored;
  }
  kvm_seq_info info{};
  info.struct_size = sizeof(info);
  ASSERT_EQ(kvm_seq_get_info(client_, seq, &info), KVM_OK);
  EXPECT_EQ(info.n_tokens_max, 600u);

  kvm_space_params hybrid = params_of({"jamba", 32, 32, 8, 128});
  const kvm_layer_params sparse[] = {
      {0, 32, KVM_LAYER_ABSENT, 0, 0, 0, 0, 0, 0, 0, 0},
      {4, 1, KVM_LAYER_OWN, 0, 0, 0, 0, 0, 0, 0, 0},
      {12, 1, KVM_LAYER_OWN, 0, 0, 0, 0, 0, 0, 0, 0},
      {20, 1, KVM_LAYER_OWN, 0, 0, 0, 0, 0, 0, 0, 0},
      {28, 1, KVM_LAYER_OWN, 0, 0, 0, 0, 0, 0, 0, 0},
  };
  hybrid.layers = sparse;
  hybrid.n_layer_params = 5;
  kvm_space_info facts{};
  facts.struct_size = sizeof(facts);
  ASSERT_EQ(kvm_space_get_info(client_, add_space(hybrid), &facts), KVM_OK) << kvm_last_error();
  EXPECT_EQ(facts.bytes_per_token, uint64_t{4} * 8 * 2 * 128 * 4) << "of four layers";

  const kvm_space_id cross = add_space(params_of({"whisper-large-cross", 32, 20, 20, 64}));
  const kvm_seq_id encoded = add_seq(cross);
  const auto frames_k = random_floats(&random_, size_t{1500} * 20 * 64);
  const auto frames_v = random_floats(&random_, frames_k.size());
  const auto rows = random_floats(&random_, size_t{3} * 20 * 64);
  std::vector<float> o(rows.size()), row_lse(3 * 20);
  step(cross, 31, item_of(encoded, 1500, 0), frames_k, frames_v, {}, nullptr, nullptr);
  kvm_item item = item_of(encoded, 0, 3);
  item.flags = KVM_ITEM_NOT_CAUSAL;
  step(cross, 31, item, {}, {}, rows, &o, &row_lse);
  const Oracle oracle{.n_tokens = 1500,
                      .k_row = 20 * 64,
                      .v_row = 20 * 64,
                      .dim_k = 64,
                      .dim_v = 64,
                      .scale = 0.125};
  for (uint32_t head = 0; head < 3 * 20; head += 7) {  // of all rows
    expect_near(o, row_lse, head,
                oracle.attend(&rows[size_t{head} * 64], &frames_k[size_t{head % 20} * 64],
                              &frames_v[size_t{head % 20} * 64]),
                kF32);
  }
}

// T5: a bias for each bucket of distances is an attend over the range of the bucket, whose lse is
// raised by the bias before the states are merged. softmax_scale is 1 there.
TEST_F(AbiModels, BiasByDistanceFromRangesAndMerge) {
  constexpr uint32_t kHeads = 12, kDim = 64, kTokens = 300;
  const kvm_space_id space = add_space(params_of({"t5-base", 12, kHeads, kHeads, kDim, 0, 1.0f}));
  const kvm_seq_id seq = add_seq(space);
  const auto k = random_floats(&random_, size_t{kTokens} * kHeads * kDim);
  const auto v = random_floats(&random_, k.size());
  auto q = random_floats(&random_, size_t{kHeads} * kDim);
  std::transform(q.begin(), q.end(), q.begin(), [](float x) { return x / 8; });
  step(space, 5, item_of(seq, kTokens, 0), k, v, {}, nullptr, nullptr);
  // Positions at which a bucket begins.
  const std::vector<uint64_t> edges = {0, 200, 250, 280, 290, 296, 298, 299, kTokens};
  const size_t n_buckets = edges.size() - 1;
  const auto bias = random_floats(&random_, n_buckets * kHeads);
  std::vector<std::vector<float>> o(n_buckets), lse(n_buckets);
  std::vector<kvm_tensor> o_tensors, lse_tensors;
  for (size_t b = 0; b < n_buckets; ++b) {
    o[b].resize(q.size());
    lse[b].resize(kHeads);
    kvm_item item = item_of(seq, 0, 1);
    item.n_ranges = 1;
    step(space, 5, item, {}, {}, q, &o[b], &lse[b], {{edges[b], edges[b + 1]}});
    for (uint32_t head = 0; head < kHeads; ++head) {
      lse[b][head] += bias[b * kHeads + head];
    }
    o_tensors.push_back(tensor_of(o[b]));
    lse_tensors.push_back(tensor_of(lse[b]));
  }
  std::vector<float> merged(q.size()), merged_lse(kHeads);
  kvm_merge_params merge{};
  merge.struct_size = sizeof(merge);
  merge.n_states = static_cast<uint32_t>(n_buckets);
  merge.n_rows = 1;
  merge.n_heads = kHeads;
  merge.dim = kDim;
  merge.o = o_tensors.data();
  merge.lse = lse_tensors.data();
  merge.out_o = tensor_of(merged);
  merge.out_lse = tensor_of(merged_lse);
  ASSERT_EQ(kvm_merge(&merge), KVM_OK) << kvm_last_error();
  for (uint32_t head = 0; head < kHeads; ++head) {
    Oracle oracle{.n_tokens = kTokens,
                  .k_row = kHeads * kDim,
                  .v_row = kHeads * kDim,
                  .dim_k = kDim,
                  .dim_v = kDim,
                  .scale = 1};
    oracle.bias = [&](uint32_t t) {
      const auto next = std::upper_bound(edges.begin(), edges.end(), t);
      const auto bucket = static_cast<size_t>(next - edges.begin() - 1);
      return static_cast<double>(bias[bucket * kHeads + head]);
    };
    expect_near(
        merged, merged_lse, head,
        oracle.attend(&q[size_t{head} * kDim], &k[size_t{head} * kDim], &v[size_t{head} * kDim]),
        kF32);
  }
}

}  // namespace
}  // namespace kvm::testing
