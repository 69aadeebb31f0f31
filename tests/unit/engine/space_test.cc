// SPDX-License-Identifier: Apache-2.0
#include "engine/space/space.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "engine/space/digest.h"
#include "tests/unit/engine/store_testbed.h"

namespace kvm::engine {
namespace {

struct BadSpec {
  const char* what;  // must occur in the sentence
  std::function<void(SpaceSpec*)> spoil;
  kvm_status code = KVM_ERR_INVALID;
};

kvm_policy_params in_cache(uint32_t positions) {
  kvm_policy_params policy = sinks_recent(1, 0, 4, 100);
  policy.positions = positions;
  return policy;
}

kvm_policy_params demoting() {
  return {.retention = KVM_RETAIN_HEAVY, .n_recent = 1, .n_heavy = 1, .merge = KVM_MERGE_DEMOTED};
}

kvm_codec_params demoted_to(uint32_t codec, uint32_t demoted) {
  return {.codec_k = codec, .codec_v = codec, .demoted_k = demoted, .demoted_v = demoted};
}

kvm_layer_params pair_at(uint32_t layer, float t = 0, float gamma = 0) {
  return {.layer_begin = layer,
          .n_layers = 1,
          .kind = KVM_LAYER_PAIR,
          .pair_t = t,
          .pair_gamma = gamma};
}

const std::vector<BadSpec>& bad_specs() {
  static const std::vector<BadSpec> specs = {
      {"name has 0", [](SpaceSpec* s) { s->name = ""; }},
      {"name has 64", [](SpaceSpec* s) { s->name = std::string(64, 'a'); }},
      {"byte 32 at 1", [](SpaceSpec* s) { s->name = "a b"; }},
      {"flags is 4; it must be 0 or KVM_SPACE_V_IN_K (1)",
       [](SpaceSpec* s) { s->params.flags = 4; }},
      {"reserved[2] is 9", [](SpaceSpec* s) { s->params.reserved[2] = 9; }},
      {"n_layers is 0", [](SpaceSpec* s) { s->params.n_layers = 0; }},
      {"n_layers is 513; it must be 1 to 512", [](SpaceSpec* s) { s->params.n_layers = 513; }},
      {"n_q_heads is 0", [](SpaceSpec* s) { s->params.n_q_heads = 0; }},
      {"n_q_heads is 1025", [](SpaceSpec* s) { s->params.n_q_heads = 1025; }},
      {"n_kv_heads is 129", [](SpaceSpec* s) { s->params.n_kv_heads = 129; }},
      {"n_q_heads is 4 with n_kv_heads 3", [](SpaceSpec* s) { s->params.n_kv_heads = 3; }},
      {"groups of 1 to 128", [](SpaceSpec* s) { s->params.n_q_heads = 129 * 4; }},
      {"head_dim_k is 0", [](SpaceSpec* s) { s->params.head_dim_k = 0; }},
      {"head_dim_k is 12", [](SpaceSpec* s) { s->params.head_dim_k = 12; }},
      {"head_dim_k is 584; it must be a multiple of 8 from 8 to 576",
       [](SpaceSpec* s) { s->params.head_dim_k = 584; }},
      {"head_dim_v is 24 with head_dim_k 16; with KVM_SPACE_V_IN_K it must be at most that",
       [](SpaceSpec* s) {
         s->params.flags = KVM_SPACE_V_IN_K;
         s->params.head_dim_k = 16;
         s->params.head_dim_v = 24;
       }},
      {"layer 1: head_dim_v is 16 with head_dim_k 8; with KVM_SPACE_V_IN_K",
       [](SpaceSpec* s) {
         s->params.flags = KVM_SPACE_V_IN_K;
         s->layers = {{.layer_begin = 1, .n_layers = 1, .head_dim_v = 16}};
       }},
      {"layers[0].head_dim_k is 12",
       [](SpaceSpec* s) { s->layers = {{.n_layers = 1, .head_dim_k = 12}}; }},
      {"layer 2 is an alias of layer 0 with head dims 16/8; the target has 8/8",
       [](SpaceSpec* s) {
         s->layers = {{.layer_begin = 2, .n_layers = 1, .kind = KVM_LAYER_ALIAS, .head_dim_k = 16}};
       }},
      {"codecs[0].codec_v is 4 with codec_k 3; with KVM_SPACE_V_IN_K they must agree",
       [](SpaceSpec* s) {
         s->params.flags = KVM_SPACE_V_IN_K;
         s->codecs = {codec(0, 0, 0, KVM_CODEC_I8)};
       }},
      {"alibi_slopes has 3 numbers; it must have 4",
       [](SpaceSpec* s) { s->alibi_slopes.assign(3, 0); }},
      {"alibi_slopes[1] is nan; it must be -10000",
       [](SpaceSpec* s) {
         s->alibi_slopes = {1, std::nanf(""), 0, 0};
       }},
      {"alibi_slopes[3] is 20000",
       [](SpaceSpec* s) {
         s->alibi_slopes = {1, 0, 0, 2e4f};
       }},
      {"layer 1 has 8 q heads; with alibi_slopes it may have at most the space's 4",
       [](SpaceSpec* s) {
         s->alibi_slopes.assign(4, 0);
         s->layers = {{.layer_begin = 1, .n_layers = 1, .n_q_heads = 8}};
       }},
      {"kv head 0 of layer 1 has KVM_POSITIONS_IN_CACHE, and the space has alibi_slopes",
       [](SpaceSpec* s) {
         s->params.rope_layout = KVM_ROPE_HALF;
         s->rope_inv_freq = {1.0f};
         s->policies = {in_cache(KVM_POSITIONS_IN_CACHE)};
         s->alibi_slopes.assign(4, 0);
       }},
      {"kv head 2 of layer 1 has KVM_RETAIN_SINKS_RECENT_FOLD (2), and the space has alibi_slopes",
       [](SpaceSpec* s) {
         s->policies = {sinks_recent(1, 0b100, 4, 100)};
         s->policies[0].retention = KVM_RETAIN_SINKS_RECENT_FOLD;
         s->alibi_slopes.assign(4, 0);
       }},
      {"KVM_POSITIONS_IN_CACHE and head_dim_k 8, and n_rope_pairs is 5",
       [](SpaceSpec* s) {
         s->params.head_dim_k = 16;
         s->params.rope_layout = KVM_ROPE_HALF;
         s->rope_inv_freq.assign(5, 1.0f);
         s->policies = {in_cache(KVM_POSITIONS_IN_CACHE)};
         s->layers = {{.layer_begin = 1, .n_layers = 1, .head_dim_k = 8}};
       }},
      {"head dims 264/264; an index takes up to 256",
       [](SpaceSpec* s) {
         s->params.head_dim_k = 264;
         s->indexes = {{.kind = KVM_INDEX_SKETCH}};
       },
       KVM_ERR_UNSUPPORTED},
      {"has index 1 and KVM_SPACE_V_IN_K",
       [](SpaceSpec* s) {
         s->params.flags = KVM_SPACE_V_IN_K;
         s->indexes = {{.kind = KVM_INDEX_SKETCH}};
       },
       KVM_ERR_UNSUPPORTED},
      {"has index 5 and alibi_slopes",
       [](SpaceSpec* s) {
         s->alibi_slopes.assign(4, 0);
         s->indexes = {{.kind = KVM_INDEX_LSH}};
       },
       KVM_ERR_UNSUPPORTED},
      {"kv head 0 of layer 1 has index 5 and head_dim_k 16, and an earlier one has 8",
       [](SpaceSpec* s) {
         s->layers = {{.layer_begin = 1, .n_layers = 1, .head_dim_k = 16}};
         s->indexes = {{.kind = KVM_INDEX_LSH}};
       },
       KVM_ERR_UNSUPPORTED},
      {"head_dim_v is 4", [](SpaceSpec* s) { s->params.head_dim_v = 4; }},
      {"codec is 25; it must be the id of a codec: 1 (fp32), 2 (fp16), 3 (bf16), 4 (int8), 5 "
       "(fp8), "
       "6 (int8_channel), 7 (int4), 8 (int4_channel), 9 (int4_centred), 10 (int2), "
       "11 (int2_channel), 12 (int2_centred), 13 (gear4_channel), 14 (gear4), 15 (gear2_channel), "
       "16 (gear2), 17 (int4_balanced), 18 (int2_balanced), 19 (int3), 20 (int3_channel), "
       "21 (int3_centred), 22 (int3_balanced), 23 (gear3_channel), 24 (gear3)",
       [](SpaceSpec* s) { s->params.codec = 25; }},
      {"softmax_scale", [](SpaceSpec* s) { s->params.softmax_scale = std::nanf(""); }},
      {"softmax_scale is -1", [](SpaceSpec* s) { s->params.softmax_scale = -1; }},
      {"logit_softcap is inf", [](SpaceSpec* s) { s->params.logit_softcap = INFINITY; }},
      {"logit_softcap is nan", [](SpaceSpec* s) { s->params.logit_softcap = std::nanf(""); }},
      {"logit_softcap is 0.00", [](SpaceSpec* s) { s->params.logit_softcap = 1e-39f; }},
      {"logit_softcap is 1000000", [](SpaceSpec* s) { s->params.logit_softcap = 1e6f; }},
      {"shard_index is 2", [](SpaceSpec* s) { s->params.shard_index = s->params.n_shards = 2; }},
      {"default_mode is 6; the largest known is 5",
       [](SpaceSpec* s) { s->params.default_mode = 6; }},
      {"default_proposal is 4", [](SpaceSpec* s) { s->params.default_proposal = 4; }},
      {"default_proposal GRAPH",
       [](SpaceSpec* s) {
         s->params.default_mode = KVM_MODE_SAMPLED;
         s->params.default_proposal = KVM_PROPOSAL_GRAPH;
       },
       KVM_ERR_UNSUPPORTED},
      {"default_eps is 1",
       [](SpaceSpec* s) {
         s->params.default_mode = KVM_MODE_VERIFIED;
         s->params.default_eps = 1;
       }},
      {"default_delta is nan",
       [](SpaceSpec* s) {
         s->params.default_mode = KVM_MODE_VERIFIED;
         s->params.default_delta = std::nanf("");
       }},
      {"default_budget is 0 with default_mode TOPK",
       [](SpaceSpec* s) { s->params.default_mode = KVM_MODE_TOPK; }},
      {"default_proposal is LSH with default_mode VERIFIED",
       [](SpaceSpec* s) {
         s->params.default_mode = KVM_MODE_VERIFIED;
         s->params.default_proposal = KVM_PROPOSAL_LSH;
       }},
      {"default_mode is 0 (EXACT) with default_proposal 0, default_eps 0.25",
       [](SpaceSpec* s) { s->params.default_eps = 0.25f; }},
      {"default_mode is 1 (EXACT) with default_proposal 0, default_eps 0.000000, default_delta "
       "0.000000 and default_budget 9",
       [](SpaceSpec* s) {
         s->params.default_mode = KVM_MODE_EXACT;
         s->params.default_budget = 9;
       }},
      {"rope_layout is 3", [](SpaceSpec* s) { s->params.rope_layout = 3; }},
      {"n_rope_pairs is 5", [](SpaceSpec* s) { s->rope_inv_freq.assign(5, 1); }},
      {"rope_layout is 0 with n_rope_pairs 2", [](SpaceSpec* s) { s->rope_inv_freq.assign(2, 1); }},
      {"rope_inv_freq[1] is not finite",
       [](SpaceSpec* s) {
         s->params.rope_layout = KVM_ROPE_HALF;
         s->rope_inv_freq = {1, INFINITY};
       }},
      {"sink_logits has 3", [](SpaceSpec* s) { s->sink_logits.assign(3, 0); }},
      {"sink_logits[5]",
       [](SpaceSpec* s) {
         s->sink_logits.assign(12, -INFINITY);
         s->sink_logits[5] = std::nanf("");
       }},
      {"layers[0].layer_begin is 3",
       [](SpaceSpec* s) { s->layers = {{.layer_begin = 3, .n_layers = 1}}; }},
      {"layers[0].n_layers is 0", [](SpaceSpec* s) { s->layers = {{.layer_begin = 1}}; }},
      {"layers[0].n_layers is 4",
       [](SpaceSpec* s) { s->layers = {{.layer_begin = 0, .n_layers = 4}}; }},
      {"layers[0].n_layers is 4294967295",
       [](SpaceSpec* s) { s->layers = {{.layer_begin = 1, .n_layers = UINT32_MAX}}; }},
      {"layers[0].kind is 9", [](SpaceSpec* s) { s->layers = {{.n_layers = 1, .kind = 9}}; }},
      {"layer 0 is KVM_LAYER_PAIR, and there is no layer below it",
       [](SpaceSpec* s) { s->layers = {pair_at(0)}; }},
      {"layer 2 is KVM_LAYER_PAIR, and the layer below it is the deeper one of a pair itself",
       [](SpaceSpec* s) {
         s->layers = {pair_at(1), pair_at(2)};
       }},
      {"layer 2 is KVM_LAYER_PAIR, and the layer below it is an alias",
       [](SpaceSpec* s) {
         s->layers = {{.layer_begin = 1, .n_layers = 1, .kind = KVM_LAYER_ALIAS}, pair_at(2)};
       }},
      {"layers[0].n_layers is 2; with KVM_LAYER_PAIR it must be 1",
       [](SpaceSpec* s) {
         s->layers = {pair_at(1)};
         s->layers[0].n_layers = 2;
       }},
      {"layers[0].target is 1; with KVM_LAYER_PAIR it must be 0",
       [](SpaceSpec* s) {
         s->layers = {pair_at(2)};
         s->layers[0].target = 1;
       }},
      {"layers[0].pair_t is 1.5", [](SpaceSpec* s) { s->layers = {pair_at(1, 1.5f)}; }},
      {"layers[0].pair_t is nan", [](SpaceSpec* s) { s->layers = {pair_at(1, std::nanf(""))}; }},
      {"layers[0].pair_gamma is -0.1", [](SpaceSpec* s) { s->layers = {pair_at(1, 0, -0.1f)}; }},
      {"layers[0] has pair_t 0.5",
       [](SpaceSpec* s) {
         s->layers = {pair_at(1, 0.5f)};
         s->layers[0].kind = KVM_LAYER_OWN;
       }},
      {"layer 1 is KVM_LAYER_PAIR with 2 kv heads, and its partner has 4",
       [](SpaceSpec* s) {
         s->layers = {pair_at(1)};
         s->layers[0].n_kv_heads = 2;
       }},
      {"layers 0 and 1 are a pair with head dims 8/8 and 16/8",
       [](SpaceSpec* s) {
         s->layers = {pair_at(1)};
         s->layers[0].head_dim_k = 16;
       }},
      {"layers 0 and 1 are a pair, and kv head 2 has another policy or codec",
       [](SpaceSpec* s) {
         s->layers = {pair_at(1)};
         s->policies = {sinks_recent(1, 0b100, 0, 1)};
       }},
      {"layers 0 and 1 are a pair, and kv head 0 has KVM_RETAIN_HEAVY (3)",
       [](SpaceSpec* s) {
         s->layers = {pair_at(1)};
         s->policies = {{.retention = KVM_RETAIN_HEAVY, .n_recent = 1, .n_heavy = 1}};
       },
       KVM_ERR_UNSUPPORTED},
      {"layers 0 and 1 are a pair, and kv head 0 has codec int8",
       [](SpaceSpec* s) {
         s->layers = {pair_at(1)};
         s->params.codec = KVM_CODEC_I8;
       },
       KVM_ERR_UNSUPPORTED},
      {"kv head 0 of layer 1 has index 1 and its layer is one of a pair",
       [](SpaceSpec* s) {
         s->layers = {pair_at(2)};
         s->indexes = {{.layer_begin = 1, .kind = KVM_INDEX_SKETCH}};
       },
       KVM_ERR_UNSUPPORTED},
      {"layers[0].target is 3",
       [](SpaceSpec* s) { s->layers = {{.n_layers = 1, .kind = KVM_LAYER_ALIAS, .target = 3}}; }},
      {"layer 0 is an alias of layer 0",
       [](SpaceSpec* s) { s->layers = {{.n_layers = 1, .kind = KVM_LAYER_ALIAS}}; }},
      {"layer 1 is an alias of layer 0 with 2/2",
       [](SpaceSpec* s) {
         s->layers = {{.layer_begin = 1,
                       .n_layers = 1,
                       .kind = KVM_LAYER_ALIAS,
                       .n_q_heads = 2,
                       .n_kv_heads = 2}};
       }},
      {"no layer is KVM_LAYER_OWN",
       [](SpaceSpec* s) { s->layers = {{.n_layers = 3, .kind = KVM_LAYER_ABSENT}}; }},
      {"policies[0].retention is 9", [](SpaceSpec* s) { s->policies = {{.retention = 9}}; }},
      {"policies[0].n_recent is 0",
       [](SpaceSpec* s) { s->policies = {{.retention = KVM_RETAIN_SINKS_RECENT}}; }},
      {"policies[0].slack",
       [](SpaceSpec* s) { s->policies = {sinks_recent(0, 0, 0, 1, UINT64_MAX)}; }},
      {"KVM_RETAIN_FULL", [](SpaceSpec* s) { s->policies = {{.n_recent = 3}}; }},
      {"policies[0].kv_head_mask names kv head 4",
       [](SpaceSpec* s) { s->policies = {sinks_recent(0, 0b10001, 0, 1)}; }},
      {"policies[0].layer_begin is 7",
       [](SpaceSpec* s) { s->policies = {sinks_recent(7, 0, 0, 1)}; }},
      {"policies[0].budgets is 2; it must be KVM_BUDGETS_EQUAL (0) or",
       [](SpaceSpec* s) {
         s->policies = {sinks_recent(0, 0, 0, 1)};
         s->policies[0].budgets = 2;
       }},
      {"policies[0].budgets is 1; it must be 0 without KVM_RETAIN_HEAVY",
       [](SpaceSpec* s) {
         s->policies = {sinks_recent(0, 0, 0, 1)};
         s->policies[0].budgets = KVM_BUDGETS_BY_DENSITY;
       }},
      {"policies[0].merge is 1; it must be 0 without KVM_RETAIN_HEAVY",
       [](SpaceSpec* s) {
         s->policies = {sinks_recent(0, 0, 0, 1)};
         s->policies[0].merge = KVM_MERGE_WEIGHTED;
       }},
      {"policies[0].merge is 4; it must be KVM_MERGE_NONE (0), KVM_MERGE_WEIGHTED (1), ",
       [](SpaceSpec* s) {
         s->policies = {sinks_recent(0, 0, 0, 1)};
         s->policies[0].retention = KVM_RETAIN_HEAVY;
         s->policies[0].n_heavy = 1;
         s->policies[0].merge = 4;
       }},
      {"kv head 0 of layer 0 has KVM_MERGE_DEMOTED and no demoted_k, demoted_v",
       [](SpaceSpec* s) { s->policies = {demoting()}; }},
      {"kv head 0 of layer 0 has demoted_k and demoted_v without KVM_MERGE_DEMOTED",
       [](SpaceSpec* s) { s->codecs = {demoted_to(KVM_CODEC_BF16, KVM_CODEC_I2)}; }},
      {"codecs[0] has demoted_k 10 and demoted_v 0; both must name a codec",
       [](SpaceSpec* s) {
         s->policies = {demoting()};
         s->codecs = {demoted_to(KVM_CODEC_BF16, KVM_CODEC_I2)};
         s->codecs[0].demoted_v = 0;
       }},
      {"codecs[0].demoted_k is 99; it must be the id of a codec",
       [](SpaceSpec* s) {
         s->policies = {demoting()};
         s->codecs = {demoted_to(KVM_CODEC_BF16, 99)};
       }},
      {"kv head 0 of layer 0 has KVM_MERGE_DEMOTED and codec int4_channel, whose rows cannot "
       "change places; codecs with such rows are fp32, fp16, bf16, int8, fp8, int4, int2, int3",
       [](SpaceSpec* s) {
         s->policies = {demoting()};
         s->codecs = {demoted_to(KVM_CODEC_I4_CHANNEL, KVM_CODEC_I2)};
       }},
      {"kv head 0 of layer 0 would demote int4 to int8, which takes more",
       [](SpaceSpec* s) {
         s->policies = {demoting()};
         s->codecs = {demoted_to(KVM_CODEC_I4, KVM_CODEC_I8)};
       }},
      {"kv head 0 of layer 0 has KVM_MERGE_DEMOTED, and the space has alibi_slopes",
       [](SpaceSpec* s) {
         s->policies = {demoting()};
         s->codecs = {demoted_to(KVM_CODEC_BF16, KVM_CODEC_I2)};
         s->alibi_slopes.assign(s->params.n_q_heads, 0.5f);
       }},
      {"policies[0].positions is 2", [](SpaceSpec* s) { s->policies = {in_cache(2)}; }},
      {"IN_CACHE with KVM_RETAIN_FULL (0)",
       [](SpaceSpec* s) { s->policies = {{.positions = KVM_POSITIONS_IN_CACHE}}; }},
      {"kv head 0 of layer 1 has KVM_POSITIONS_IN_CACHE, and the space has no rope_layout",
       [](SpaceSpec* s) { s->policies = {in_cache(KVM_POSITIONS_IN_CACHE)}; }},
      {"kv head 0 of layer 2 has KVM_POSITIONS_IN_CACHE, and the layer has a window of 9",
       [](SpaceSpec* s) {
         s->params.rope_layout = KVM_ROPE_HALF;
         s->rope_inv_freq = {1.0f};
         s->policies = {in_cache(KVM_POSITIONS_IN_CACHE)};
         s->layers = {
             {.layer_begin = 2, .n_layers = 1, .kind = KVM_LAYER_ALIAS, .target = 1, .window = 9}};
       }},
      {"policies[0].n_heavy is 3; it must be 0",
       [](SpaceSpec* s) {
         s->policies = {sinks_recent(1, 0, 4, 100)};
         s->policies[0].n_heavy = 3;
       }},
      {"policies[0].n_heavy is 0; it must be 1",
       [](SpaceSpec* s) {
         s->policies = {sinks_recent(1, 0, 4, 100)};
         s->policies[0].retention = KVM_RETAIN_HEAVY;
       }},
      {"kv head 2 of layer 1 has KVM_RETAIN_SINKS_RECENT_FOLD (2), and the layer has a window of 9",
       [](SpaceSpec* s) {
         s->policies = {sinks_recent(1, 0b100, 4, 100)};
         s->policies[0].retention = KVM_RETAIN_SINKS_RECENT_FOLD;
         s->layers = {{.layer_begin = 1, .n_layers = 1, .window = 9}};
       }},
      {"codecs[1].codec_v is 77",
       [](SpaceSpec* s) {
         s->codecs = {codec(0, 0, 0, 0), codec(0, 0, 0, 77)};
       }},
      {"n_policies is 1025", [](SpaceSpec* s) { s->policies.resize(1025); }},
  };
  return specs;
}

TEST(Space, BadSpecificationsNameTheValue) {
  for (const BadSpec& bad : bad_specs()) {
    SpaceSpec spec = make_spec("m", 3, 4);
    bad.spoil(&spec);
    const auto space = resolve_space(spec);
    ASSERT_FALSE(space.is_ok()) << bad.what;
    EXPECT_EQ(space.status().code(), bad.code) << bad.what;
    EXPECT_NE(space.status().message().find(bad.what), std::string::npos)
        << bad.what << " / " << space.status().message();
  }
}

TEST(Space, DefaultsAreFilledIn) {
  const auto space = resolve_space(make_spec("a.B_9/-", 2, 8, 64, 4)).value();
  EXPECT_EQ(space->head_dim_v, 64u);
  EXPECT_EQ(space->codec, CodecId::kBf16);
  EXPECT_FLOAT_EQ(space->layers[0].softmax_scale, 0.125f);
  EXPECT_EQ(space->n_lists, 2u);
  EXPECT_EQ(space->bytes_per_token, 2u * 8 * 64 * 2 * 2);
  EXPECT_EQ(space->layers[1].group(), 4u);
  EXPECT_EQ(space->layers[1].first_list, 1u);
  EXPECT_EQ(space->layers[0].classes[0].kv_heads.size(), 8u);
  EXPECT_EQ(space->default_choice, ModeChoice{});
  SpaceSpec approximate = make_spec("m", 1, 1);
  approximate.params.default_mode = KVM_MODE_VERIFIED;
  const ModeChoice filled = {.mode = KVM_MODE_VERIFIED, .eps = 0.03f, .delta = 0.01f};
  EXPECT_EQ(resolve_space(approximate).value()->default_choice, filled);
}

TEST(Space, HeadsGroupByRetentionAndCodec) {
  SpaceSpec spec = make_spec("m", 3, 6);
  spec.layers = {{.layer_begin = 2, .n_layers = 1, .kind = KVM_LAYER_ALIAS, .target = 1}};
  spec.policies = {sinks_recent(1, 0b101010, 4, 16), sinks_recent(1, 0b100000, 4, 32)};
  spec.codecs = {codec(1, 0b000001, KVM_CODEC_F32, 0)};
  const auto space = resolve_space(spec).value();
  EXPECT_EQ(space->layers[0].classes.size(), 1u);
  const auto& classes = space->layers[1].classes;
  ASSERT_EQ(classes.size(), 4u);
  EXPECT_EQ(classes[0].kv_heads, std::vector<uint16_t>({0}));
  EXPECT_EQ(classes[0].slab_class.codec_k, CodecId::kF32);
  EXPECT_EQ(classes[0].slab_class.codec_v, CodecId::kBf16);
  EXPECT_EQ(classes[1].kv_heads, std::vector<uint16_t>({1, 3}));
  EXPECT_EQ(classes[2].kv_heads, std::vector<uint16_t>({2, 4}));
  EXPECT_EQ(classes[3].kv_heads, std::vector<uint16_t>({5}));
  EXPECT_EQ(classes[3].retention.n_recent, 32u);
  EXPECT_EQ(space->n_lists, 5u);
  // The alias reads the same places.
  EXPECT_EQ(&space->storage(2), &space->layers[1]);
  EXPECT_EQ(space->place(2, 3).class_index, 1u);
  EXPECT_EQ(space->place(2, 3).head, 1u);
}

TEST(Space, PagesFitExtentsAndWasteLittle) {
  for (uint32_t n_heads = 1; n_heads <= 128; ++n_heads) {
    for (const uint32_t dim : {8u, 64u, 72u, 128u, 200u, 256u}) {
      for (const uint32_t codec : {KVM_CODEC_F32, KVM_CODEC_BF16}) {
        SpaceSpec spec = make_spec("m", 1, n_heads, dim);
        spec.params.codec = codec;
        const auto space = resolve_space(spec).value();
        uint32_t next = 0;
        for (const HeadClass& head_class : space->layers[0].classes) {
          const uint64_t page_bytes = head_class.slab_class.page_bytes();
          EXPECT_LE(page_bytes, tiers::kExtentBytes);
          EXPECT_LE(tiers::kExtentBytes % page_bytes, tiers::kExtentBytes / 4)
              << n_heads << " heads of " << dim;
          EXPECT_EQ(head_class.kv_heads.size(), head_class.slab_class.n_heads);
          for (const uint16_t head : head_class.kv_heads) {
            EXPECT_EQ(head, next++);
          }
        }
        EXPECT_EQ(next, n_heads);
      }
    }
  }
}

TEST(Space, EqualSpacesAgreeAndOthersNameTheDifference) {
  const SpaceSpec base = [] {
    SpaceSpec spec = make_spec("m", 3, 4);
    spec.policies = {sinks_recent(1, 0b1, 4, 16)};
    spec.params.rope_layout = KVM_ROPE_HALF;
    spec.rope_inv_freq = {1, 0.5f};
    spec.params.default_mode = KVM_MODE_SAMPLED;
    return spec;
  }();
  const auto registered = resolve_space(base).value();
  // The same, said otherwise.
  SpaceSpec same = base;
  same.params.head_dim_v = 8;
  same.params.codec = KVM_CODEC_BF16;
  same.params.softmax_scale = 1.0f / std::sqrt(8.0f);
  same.layers = {{.n_layers = 3}};
  same.params.default_eps = 0.03f;
  same.params.default_delta = 0.01f;
  same.codecs = {codec(2, 0b11, KVM_CODEC_BF16, 0)};
  EXPECT_TRUE(compare_spaces(*registered, *resolve_space(same).value()).is_ok());

  const std::vector<std::pair<const char*, std::function<void(SpaceSpec*)>>> differences = {
      {"fingerprint", [](SpaceSpec* s) { s->params.fingerprint[31] = 1; }},
      {"n_layers is 3 there and 4 here", [](SpaceSpec* s) { s->params.n_layers = 4; }},
      {"n_q_heads", [](SpaceSpec* s) { s->params.n_q_heads = 8; }},
      {"head_dim_v", [](SpaceSpec* s) { s->params.head_dim_v = 16; }},
      {"codec", [](SpaceSpec* s) { s->params.codec = KVM_CODEC_F16; }},
      {"softmax_scale", [](SpaceSpec* s) { s->params.softmax_scale = 1; }},
      {"logit_softcap", [](SpaceSpec* s) { s->params.logit_softcap = 50; }},
      {"rope_inv_freq", [](SpaceSpec* s) { s->rope_inv_freq[1] = 0.25f; }},
      {"sink_logits", [](SpaceSpec* s) { s->sink_logits.assign(12, 0); }},
      {"alibi_slopes", [](SpaceSpec* s) { s->alibi_slopes.assign(4, 0); }},
      {"flags is 0 there and 1 here", [](SpaceSpec* s) { s->params.flags = KVM_SPACE_V_IN_K; }},
      {"layers[1].head_dim_k is 8 there and 16 here",
       [](SpaceSpec* s) { s->layers = {{.layer_begin = 1, .n_layers = 1, .head_dim_k = 16}}; }},
      {"n_shards", [](SpaceSpec* s) { s->params.n_shards = 2; }},
      {"default_mode is 3 there and 4 here",
       [](SpaceSpec* s) { s->params.default_mode = KVM_MODE_VERIFIED; }},
      {"default_proposal is 0 there and 1 here",
       [](SpaceSpec* s) { s->params.default_proposal = KVM_PROPOSAL_SKETCH; }},
      {"default_eps", [](SpaceSpec* s) { s->params.default_eps = 0.1f; }},
      {"default_delta", [](SpaceSpec* s) { s->params.default_delta = 0.1f; }},
      {"default_budget is 0 there and 64 here",
       [](SpaceSpec* s) {
         s->params.default_budget = 64;
         s->params.default_eps = 0.03f;  // of a budget none is none
       }},
      {"layers[2].window is 0 there and 9 here",
       [](SpaceSpec* s) { s->layers = {{.layer_begin = 2, .n_layers = 1, .window = 9}}; }},
      {"layers[2].kind",
       [](SpaceSpec* s) {
         s->layers = {{.layer_begin = 2, .n_layers = 1, .kind = KVM_LAYER_ABSENT}};
       }},
      {"layers[1].kv_heads[0].n_recent is 16 there and 17 here",
       [](SpaceSpec* s) { s->policies[0].n_recent = 17; }},
      {"layers[1].kv_heads[0].retention is 1 there and 3 here",
       [](SpaceSpec* s) {
         s->policies[0].retention = KVM_RETAIN_HEAVY;
         s->policies[0].n_heavy = 4;
         s->policies[0].merge = KVM_MERGE_COUNTED;
       }},
      {"layers[1].kv_heads[1].retention", [](SpaceSpec* s) { s->policies[0].kv_head_mask[0] = 3; }},
      {"layers[0].kv_heads[2].codec_k",
       [](SpaceSpec* s) { s->codecs = {codec(0, 0b100, KVM_CODEC_F32, 0)}; }},
  };
  for (const auto& [what, change] : differences) {
    SpaceSpec other = base;
    change(&other);
    const Status status = compare_spaces(*registered, *resolve_space(other).value());
    EXPECT_EQ(status.code(), KVM_ERR_EXISTS) << what;
    EXPECT_NE(status.message().find(what), std::string::npos) << what << " / " << status.message();
  }
}

// Visibility against the sentences of kvm.h, position by position.
TEST(Space, VisibilityIsTheIntersectionOfWindowAndRetention) {
  for (const uint64_t window : {0u, 1u, 5u, 10u, 20u, 40u}) {
    for (const uint64_t n_sinks : {0u, 1u, 4u, 30u}) {
      for (const uint64_t n_recent : {0u, 1u, 10u}) {  // 0: a head that keeps everything
        SpaceSpec spec = make_spec("m", 1, 1);
        spec.layers = {{.n_layers = 1, .window = window}};
        if (n_recent > 0) {
          spec.policies = {sinks_recent(0, 0, n_sinks, n_recent)};
        }
        const auto space = resolve_space(spec).value();
        for (uint64_t asked = 0; asked < 70; ++asked) {
          const HeadVisibility seen = space->visibility(0, 0, asked);
          ASSERT_GT(seen.end, asked);
          for (uint64_t p = asked; p < std::min<uint64_t>(seen.end, 80); ++p) {
            for (uint64_t x = 0; x <= p; ++x) {
              const bool want = (window == 0 || x + window > p) &&
                                (n_recent == 0 || x < n_sinks || x + n_recent > p);
              const bool got = seen.window == 0 || x + seen.window > p ||
                               (seen.first_sink <= x && x < seen.n_sinks);
              ASSERT_EQ(got, want) << "window " << window << " sinks " << n_sinks << " recent "
                                   << n_recent << " query " << p << " key " << x;
            }
          }
        }
      }
    }
  }
}

std::string hex(const Digest& digest) { return fmt::format("{:02x}", fmt::join(digest, "")); }

SpaceSpec digest_spec() {
  SpaceSpec spec = make_spec("digests", 3, 4, 64, 2);
  spec.layers = {{.layer_begin = 2, .n_layers = 1, .kind = KVM_LAYER_ALIAS, .target = 0}};
  spec.codecs = {codec(0, 0b0100, KVM_CODEC_I8_CHANNEL, KVM_CODEC_I8)};
  spec.policies = {sinks_recent(1, 0b0001, 4, 100)};
  spec.indexes = {{.layer_begin = 1, .n_layers = 1, .kind = KVM_INDEX_LSH, .seed = 7}};
  return spec;
}

// The digests are what Python's uuid.uuid5(uuid.NAMESPACE_URL, text) gives for these texts.
TEST(Space, DigestsAreOfTheSpaceAsItIsResolved) {
  const auto space = resolve_space(digest_spec()).value();
  EXPECT_EQ(layout_text(*space),
            "kvm layout 1\npage 64\nshard 0/1\ndims 64 64\nlayer 2 alias 0\n"
            "layer 0 heads 0-1 bf16 bf16\nlayer 0 heads 2-2 int8_channel int8\n"
            "layer 0 heads 3-3 bf16 bf16\nlayer 1 heads 0-3 bf16 bf16\n");
  EXPECT_EQ(policy_text(*space),
            "kvm policy 1\n"
            "layer 0 heads 0-3 retention 0 sinks 0 recent 0 slack 0 heavy 0 positions 0\n"
            "layer 1 heads 0-0 retention 1 sinks 4 recent 100 slack 0 heavy 0 positions 0\n"
            "layer 1 heads 1-3 retention 0 sinks 0 recent 0 slack 0 heavy 0 positions 0\n");
  EXPECT_EQ(index_text(*space),
            "kvm index 1\nlayer 0 heads 0-3 none\nlayer 1 heads 0-0 none\n"
            "layer 1 heads 1-3 kind 5 sinks 4 recent 64 from 4096 seed 7 bits 10 tables 150\n");
  EXPECT_EQ(geometry_text(*space),
            "kvm geometry 1\nshard 0/1\nlayer 2 alias 0\nlayer 0 heads 0-3 dims 64 64\n"
            "layer 1 heads 0-3 dims 64 64\n");
  EXPECT_EQ(hex(space->layout_digest), "ba6a20ac9a9e5bff986ae4ce4b6f06e9");
  EXPECT_EQ(hex(space->policy_digest), "a4e25748e5275ea99db793fafcfc845d");
  EXPECT_EQ(hex(space->index_digest), "820993bb2aaf554daf0068e36c7360f0");
}

TEST(Space, EachDigestTellsItsOwnDifferences) {
  const auto space = resolve_space(digest_spec()).value();
  struct Change {
    const char* what;
    int n_layout, n_policy, n_index;  // 1: another digest
    std::function<void(SpaceSpec*)> change;
  };
  const Change changes[] = {
      {"nothing that is resolved", 0, 0, 0,
       [](SpaceSpec* s) {
         s->name = "other";
         s->params.codec = KVM_CODEC_BF16;
         s->params.fingerprint[3] = 1;
         s->params.softmax_scale = 0.5f;
         s->params.logit_softcap = 30;
         s->params.n_q_heads = 16;
         s->params.default_mode = KVM_MODE_VERIFIED;
         s->indexes[0].lsh_bits = 10;
         s->indexes[0].n_sinks = 4;
         s->codecs.insert(s->codecs.begin(), codec(0, 0b0111, KVM_CODEC_F32, 0));
         s->codecs.push_back(codec(0, 0b0011, 0, 0));
       }},
      {"a codec", 1, 0, 0, [](SpaceSpec* s) { s->codecs[0].codec_v = KVM_CODEC_BF16; }},
      {"whose codec it is", 1, 0, 0, [](SpaceSpec* s) { s->codecs[0].kv_head_mask[0] = 0b1000; }},
      {"the width of values", 1, 0, 0, [](SpaceSpec* s) { s->params.head_dim_v = 72; }},
      {"the width of a layer", 1, 0, 0,
       [](SpaceSpec* s) { s->layers.push_back({.n_layers = 1, .head_dim_v = 72}); }},
      {"values in keys", 1, 0, 1,
       [](SpaceSpec* s) {
         s->params.flags = KVM_SPACE_V_IN_K;
         s->codecs[0].codec_v = 0;
         s->indexes.clear();
       }},
      {"slopes", 0, 0, 1,
       [](SpaceSpec* s) {
         s->alibi_slopes.assign(s->params.n_q_heads, 1);
         s->indexes.clear();
       }},
      {"an alias", 1, 0, 0, [](SpaceSpec* s) { s->layers[0].target = 1; }},
      {"a layer that is absent", 1, 0, 0,
       [](SpaceSpec* s) {
         s->layers[0] = {.layer_begin = 2, .n_layers = 1, .kind = KVM_LAYER_ABSENT};
       }},
      {"a shard", 1, 0, 0, [](SpaceSpec* s) { s->params.n_shards = 2; }},
      {"a budget", 0, 1, 0, [](SpaceSpec* s) { s->policies[0].n_recent = 101; }},
      {"merging", 0, 1, 0,
       [](SpaceSpec* s) {
         s->policies[0].retention = KVM_RETAIN_HEAVY;
         s->policies[0].n_heavy = 4;
         s->policies[0].merge = KVM_MERGE_COUNTED;
       }},
      {"slack", 0, 1, 0, [](SpaceSpec* s) { s->policies[0].slack = 1; }},
      {"a seed", 0, 0, 1, [](SpaceSpec* s) { s->indexes[0].seed = 8; }},
      {"tables", 0, 0, 1, [](SpaceSpec* s) { s->indexes[0].lsh_tables = 151; }},
      {"no index", 0, 0, 1, [](SpaceSpec* s) { s->indexes.clear(); }},
      {"an own layer more", 1, 1, 1, [](SpaceSpec* s) { s->layers.clear(); }},
  };
  for (const Change& change : changes) {
    SpaceSpec spec = digest_spec();
    change.change(&spec);
    const auto resolved = resolve_space(spec);
    ASSERT_TRUE(resolved.is_ok()) << change.what << ": " << resolved.status().message();
    const Space& other = *resolved.value();
    EXPECT_EQ(other.layout_digest != space->layout_digest, change.n_layout != 0) << change.what;
    const bool is_codec = std::string(change.what).find("codec") != std::string::npos;
    EXPECT_EQ(other.geometry_digest != space->geometry_digest, change.n_layout != 0 && !is_codec)
        << change.what;
    EXPECT_EQ(other.policy_digest != space->policy_digest, change.n_policy != 0) << change.what;
    EXPECT_EQ(other.index_digest != space->index_digest, change.n_index != 0) << change.what;
  }
}

}  // namespace
}  // namespace kvm::engine
