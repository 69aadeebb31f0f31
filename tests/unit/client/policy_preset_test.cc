// SPDX-License-Identifier: Apache-2.0
// Presets against the numbers of their papers, written out here; and what is refused.
#include "client/policy_preset.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

namespace kvm::client {
namespace {

kvm_preset_params params_of(const char* name, uint32_t n_layers = 32) {
  kvm_preset_params params{};
  params.struct_size = sizeof(params);
  params.name = name;
  params.n_layers = n_layers;
  return params;
}

Preset resolve(const kvm_preset_params& params) {
  Result<Preset> preset = resolve_preset(params);
  EXPECT_TRUE(preset.is_ok()) << preset.status().message();
  return preset.is_ok() ? std::move(preset).value() : Preset();
}

void expect_refused(const kvm_preset_params& params, kvm_status code, const std::string& sentence) {
  const Result<Preset> preset = resolve_preset(params);
  ASSERT_FALSE(preset.is_ok());
  EXPECT_EQ(preset.status().code(), code);
  EXPECT_EQ(preset.status().message(), sentence);
}

// The layers that a preset's entries name, in order.
template <typename Entry>
std::vector<uint32_t> layers_of(const std::vector<Entry>& entries) {
  std::vector<uint32_t> layers;
  for (const Entry& entry : entries) {
    for (uint32_t i = 0; i < entry.n_layers; ++i) {
      layers.push_back(entry.layer_begin + i);
    }
  }
  return layers;
}

void expect_numbers(const kvm_policy_params& policy, uint32_t retention, uint64_t n_sinks,
                    uint64_t n_recent, uint64_t n_heavy) {
  EXPECT_EQ(policy.retention, retention);
  EXPECT_EQ(policy.n_sinks, n_sinks);
  EXPECT_EQ(policy.n_recent, n_recent);
  EXPECT_EQ(policy.n_heavy, n_heavy);
}

// Section 4.2: 20 % of the tokens, half of them local; section 5.2: INT8.
TEST(PolicyPreset, AlisaReadsAShareOfWhatItKeeps) {
  kvm_preset_params params = params_of("alisa");
  params.n_tokens = 10000;
  Preset preset = resolve(params);
  EXPECT_TRUE(preset.layers.empty() && preset.policies.empty());
  ASSERT_EQ(preset.codecs.size(), 1u);
  EXPECT_EQ(preset.codecs[0].codec_k, uint32_t{KVM_CODEC_I8});
  EXPECT_EQ(preset.codecs[0].codec_v, uint32_t{KVM_CODEC_I8});
  ASSERT_EQ(preset.indexes.size(), 1u);
  EXPECT_EQ(preset.indexes[0].kind, uint32_t{KVM_INDEX_SKETCH});
  EXPECT_EQ(preset.indexes[0].n_recent, 1000u);
  EXPECT_EQ(preset.indexes[0].min_tokens, 2000u);
  EXPECT_EQ(preset.default_mode, uint32_t{KVM_MODE_SAMPLED});
  EXPECT_EQ(preset.default_budget, 1000u);
  params.share = 1;
  preset = resolve(params);
  EXPECT_EQ(preset.default_budget, 5000u);
  EXPECT_EQ(preset.indexes[0].min_tokens, 8192u) << "the most that there may be";
  params.n_tokens = 1000;
  params.share = 0;
  EXPECT_EQ(resolve(params).indexes[0].min_tokens, 256u) << "the fewest";
  params.n_tokens = 2'000'000;
  expect_refused(params, KVM_ERR_INVALID,
                 "share 0.2 of 2000000 tokens is 200000 recent tokens; there may be 1 to 65536");
}

TEST(PolicyPreset, FullSetsNothing) {
  const Preset preset = resolve(params_of("full"));
  EXPECT_TRUE(preset.layers.empty() && preset.policies.empty() && preset.codecs.empty());
  EXPECT_EQ(preset.text, "Every token stays.\n");
}

// Xiao et al.: 4 sinks and 1,020 tokens, in a cache of 1,024.
TEST(PolicyPreset, StreamingLlm) {
  kvm_preset_params params = params_of("streaming_llm");
  params.slack = 16;
  const Preset preset = resolve(params);
  ASSERT_EQ(preset.policies.size(), 1u);
  expect_numbers(preset.policies[0], KVM_RETAIN_SINKS_RECENT, 4, 1020, 0);
  EXPECT_EQ(preset.policies[0].positions, uint32_t{KVM_POSITIONS_IN_CACHE});
  EXPECT_EQ(preset.policies[0].n_layers, 0u);
  EXPECT_EQ(preset.policies[0].slack, 16u);
  EXPECT_NE(preset.text.find("rope_layout"), std::string::npos);
  params.share = 0.25f;
  params.n_tokens = 8192;
  expect_numbers(resolve(params).policies[0], KVM_RETAIN_SINKS_RECENT, 4, 2044, 0);
  params.n_tokens = 16;
  expect_refused(params, KVM_ERR_INVALID,
                 "share 0.25 of 16 tokens keeps 4; streaming_llm keeps at least 5");
}

// Xiao et al.: 64 sinks and 256 tokens, of heads that do not retrieve.
TEST(PolicyPreset, DuoAttentionGoesByItsTable) {
  const std::vector<uint64_t> masks = {3, 0, 3, 0, 0, 0, 5, uint64_t{1} << 63};
  kvm_preset_params params = params_of("duo_attention", 4);
  params.kv_head_masks = masks.data();
  const Preset preset = resolve(params);
  ASSERT_EQ(preset.policies.size(), 2u) << "none for a layer in which all heads retrieve";
  EXPECT_EQ(layers_of(preset.policies), std::vector<uint32_t>({0, 1, 3}));
  for (const kvm_policy_params& policy : preset.policies) {
    expect_numbers(policy, KVM_RETAIN_SINKS_RECENT, 64, 256, 0);
    EXPECT_EQ(policy.positions, uint32_t{KVM_POSITIONS_ABSOLUTE});
  }
  EXPECT_EQ(preset.policies[1].kv_head_mask[0], 5u);
  EXPECT_EQ(preset.policies[1].kv_head_mask[1], uint64_t{1} << 63);
  EXPECT_EQ(
      preset.text,
      "7 kv heads of the table keep 64 sinks and the last 256 tokens; all others keep all.\n");
  params.kv_head_masks = nullptr;
  expect_refused(params, KVM_ERR_INVALID,
                 "kv_head_masks is NULL; preset duo_attention needs to know which heads of the "
                 "model do not retrieve: published tables, or kvm_probe_heads");
}

// Tang et al.: 4 sinks, the larger of 4,000 and N / 5.
TEST(PolicyPreset, RazorAttention) {
  const std::vector<uint64_t> masks(2 * 32, 6);
  kvm_preset_params params = params_of("razor_attention");
  params.kv_head_masks = masks.data();
  ASSERT_EQ(resolve(params).policies.size(), 1u);
  EXPECT_EQ(resolve(params).policies[0].n_layers, 32u);
  expect_numbers(resolve(params).policies[0], KVM_RETAIN_SINKS_RECENT_FOLD, 4, 4000, 0);
  params.n_tokens = 100'000;
  expect_numbers(resolve(params).policies[0], KVM_RETAIN_SINKS_RECENT_FOLD, 4, 20'000, 0);
}

// Zhang et al.: a fifth of the tokens, half of it heavy and half recent.
TEST(PolicyPreset, H2o) {
  kvm_preset_params params = params_of("h2o");
  params.n_tokens = 10'000;
  const Preset preset = resolve(params);
  ASSERT_EQ(preset.policies.size(), 1u);
  expect_numbers(preset.policies[0], KVM_RETAIN_HEAVY, 0, 1000, 1000);
  EXPECT_EQ(preset.policies[0].merge, uint32_t{KVM_MERGE_NONE});
  EXPECT_EQ(preset.text,
            "Each head keeps the last 1000 tokens and the 1000 with most attention, of 10000 "
            "tokens.\n");
  params.share = 0.5f;
  expect_numbers(resolve(params).policies[0], KVM_RETAIN_HEAVY, 0, 2500, 2500);
  params.n_tokens = 0;
  EXPECT_NE(resolve(params).text.find("4096 tokens (n_tokens is 0"), std::string::npos);
  params.n_tokens = 1'000'000;
  expect_refused(params, KVM_ERR_INVALID,
                 "share 0.5 of 1000000 tokens keeps 250000 heavy tokens; a head may keep 1 to "
                 "65536");
  params.n_tokens = 2;
  params.share = 0.1f;
  EXPECT_EQ(resolve_preset(params).status().code(), KVM_ERR_INVALID);
}

// Yang et al.: H2O's tokens in full, the others in 2 bits.
TEST(PolicyPreset, MiKv) {
  kvm_preset_params params = params_of("mikv");
  params.n_tokens = 10'000;
  const Preset preset = resolve(params);
  ASSERT_EQ(preset.policies.size(), 1u);
  expect_numbers(preset.policies[0], KVM_RETAIN_HEAVY, 0, 1000, 1000);
  EXPECT_EQ(preset.policies[0].merge, uint32_t{KVM_MERGE_DEMOTED});
  ASSERT_EQ(preset.codecs.size(), 1u);
  EXPECT_EQ(preset.codecs[0].codec_k, 0u);
  EXPECT_EQ(preset.codecs[0].codec_v, 0u);
  EXPECT_EQ(preset.codecs[0].demoted_k, uint32_t{KVM_CODEC_I2_BALANCED});
  EXPECT_EQ(preset.codecs[0].demoted_v, uint32_t{KVM_CODEC_I2});
  EXPECT_EQ(preset.text,
            "Each head keeps the last 1000 tokens and the 1000 with most attention, of 10000 "
            "tokens, in the space's codec; its other keys stay as int2_balanced, its other values "
            "as int2.\nLet kvm_observe see the last queries of the prompt: keys are balanced by "
            "them.\n");
}

// The bits of what is demoted are a setting of the paper: 2, 3 or 4.
TEST(PolicyPreset, MiKvOfMoreBits) {
  const std::tuple<const char*, uint32_t, uint32_t> systems[] = {
      {"mikv3", KVM_CODEC_I3_BALANCED, KVM_CODEC_I3},
      {"mikv4", KVM_CODEC_I4_BALANCED, KVM_CODEC_I4}};
  for (const auto& [name, demoted_k, demoted_v] : systems) {
    const Preset preset = resolve(params_of(name));
    ASSERT_EQ(preset.policies.size(), 1u);
    EXPECT_EQ(preset.policies[0].merge, uint32_t{KVM_MERGE_DEMOTED});
    ASSERT_EQ(preset.codecs.size(), 1u);
    EXPECT_EQ(preset.codecs[0].demoted_k, demoted_k);
    EXPECT_EQ(preset.codecs[0].demoted_v, demoted_v);
  }
}

// Wan et al.: as H2O beside 4 sinks; layers 0, 1 and the last are whole.
TEST(PolicyPreset, D2o) {
  kvm_preset_params params = params_of("d2o");
  params.n_tokens = 10'000;
  const Preset preset = resolve(params);
  ASSERT_EQ(preset.policies.size(), 1u);
  expect_numbers(preset.policies[0], KVM_RETAIN_HEAVY, 4, 1000, 1000);
  EXPECT_EQ(preset.policies[0].merge, uint32_t{KVM_MERGE_WEIGHTED});
  EXPECT_EQ(preset.policies[0].budgets, uint32_t{KVM_BUDGETS_BY_DENSITY});
  EXPECT_EQ(preset.policies[0].layer_begin, 2u);
  EXPECT_EQ(preset.policies[0].n_layers, 29u);
  EXPECT_EQ(resolve(params_of("d2o", 4)).policies[0].n_layers, 1u);
  expect_refused(params_of("d2o", 3), KVM_ERR_INVALID,
                 "n_layers is 3; d2o keeps layers 0, 1 and the last whole: there must be at least "
                 "4");
}

// Liu et al.: keys by channel, values by token.
TEST(PolicyPreset, Kivi) {
  const Preset two = resolve(params_of("kivi"));
  ASSERT_EQ(two.codecs.size(), 1u);
  EXPECT_TRUE(two.policies.empty());
  EXPECT_EQ(two.codecs[0].codec_k, uint32_t{KVM_CODEC_I2_CHANNEL});
  EXPECT_EQ(two.codecs[0].codec_v, uint32_t{KVM_CODEC_I2});
  EXPECT_EQ(two.text,
            "Keys are stored as int2_channel, values as int2; of a page's 64 tokens until it is "
            "full, as bf16.\n");
  const Preset three = resolve(params_of("kivi3"));
  EXPECT_EQ(three.codecs[0].codec_k, uint32_t{KVM_CODEC_I3_CHANNEL});
  EXPECT_EQ(three.codecs[0].codec_v, uint32_t{KVM_CODEC_I3});
  const Preset four = resolve(params_of("kivi4"));
  EXPECT_EQ(four.codecs[0].codec_k, uint32_t{KVM_CODEC_I4_CHANNEL});
  EXPECT_EQ(four.codecs[0].codec_v, uint32_t{KVM_CODEC_I4});
}

// From the middle of the model on, unless the caller says how many.
TEST(PolicyPreset, MiniCache) {
  const Preset preset = resolve(params_of("minicache"));
  EXPECT_EQ(layers_of(preset.layers), std::vector<uint32_t>({17, 19, 21, 23, 25, 27, 29, 31}));
  for (const kvm_layer_params& layer : preset.layers) {
    EXPECT_EQ(layer.kind, uint32_t{KVM_LAYER_PAIR});
    EXPECT_EQ(layer.n_layers, 1u);
    EXPECT_EQ(layer.target, 0u);
    EXPECT_EQ(layer.pair_t, 0.6f);
    EXPECT_EQ(layer.pair_gamma, 0.05f);
  }
  EXPECT_NE(preset.text.find("Layers 16-31 share"), std::string::npos) << preset.text;
  kvm_preset_params params = params_of("minicache", 7);
  params.n_pairs = 3;
  EXPECT_EQ(layers_of(resolve(params).layers), std::vector<uint32_t>({2, 4, 6}));
  params.n_pairs = 4;
  expect_refused(params, KVM_ERR_INVALID, "n_pairs is 4 of 7 layers; it must be at most 3");
  EXPECT_EQ(layers_of(resolve(params_of("minicache", 3)).layers), std::vector<uint32_t>({2}));
  expect_refused(params_of("minicache", 1), KVM_ERR_INVALID,
                 "n_layers is 1; a pair of minicache is of two: there must be at least 2");
  params = params_of("h2o");
  params.n_pairs = 1;
  expect_refused(params, KVM_ERR_INVALID, "n_pairs is 1; preset h2o has no use for it");
}

// The published 82.8 % at 64K tokens: 3 of 4 layers have a window of 4,096 tokens, full ones share
// in pairs.
TEST(PolicyPreset, YiLightning) {
  const Preset preset = resolve(params_of("yi_lightning"));
  EXPECT_EQ(layers_of(preset.layers), std::vector<uint32_t>({7, 15, 23, 31}));
  for (const kvm_layer_params& layer : preset.layers) {
    EXPECT_EQ(layer.kind, uint32_t{KVM_LAYER_ALIAS});
    EXPECT_EQ(layer.target, layer.layer_begin - 4);
  }
  const std::vector<uint32_t> windows = layers_of(preset.policies);
  EXPECT_EQ(windows.size(), 24u);
  for (const uint32_t layer : windows) {
    EXPECT_NE(layer % 4, 3u);
  }
  expect_numbers(preset.policies[0], KVM_RETAIN_SINKS_RECENT, 0, 4096, 0);
  const double n_tokens = 65536;
  const double full = static_cast<double>(32 - windows.size() - preset.layers.size());
  const double kept = (full + static_cast<double>(windows.size()) * 4096 / n_tokens) / 32;
  EXPECT_NEAR(1 - kept, 0.8281, 5e-5);
  kvm_preset_params params = params_of("yi_lightning", 6);
  params.window = 1000;
  expect_numbers(resolve(params).policies[1], KVM_RETAIN_SINKS_RECENT, 0, 1000, 0);
  EXPECT_EQ(layers_of(resolve(params).policies), std::vector<uint32_t>({0, 1, 2, 4, 5}));
  EXPECT_TRUE(resolve(params).layers.empty());
  EXPECT_EQ(resolve_preset(params_of("yi_lightning", 3)).status().code(), KVM_ERR_INVALID);
}

TEST(PolicyPreset, SkipDecodeIsTheEngines) {
  const Preset preset = resolve(params_of("skip_decode"));
  EXPECT_TRUE(preset.layers.empty() && preset.policies.empty() && preset.codecs.empty());
  EXPECT_NE(preset.text.find("KVM_ITEM_LAST_LAYER"), std::string::npos);
}

// The layers that decode, by the published rule.
TEST(PolicyPreset, UnifiedLayerSkippingHasThePublishedLayers) {
  const auto decoding = [](uint32_t n_layers, uint32_t speed_up) {
    kvm_preset_params params = params_of("unified_layer_skipping", n_layers);
    params.speed_up = speed_up;
    const Preset preset = resolve(params);
    std::vector<bool> skips(n_layers);
    for (const uint32_t layer : layers_of(preset.policies)) {
      skips[layer] = true;
    }
    for (const kvm_policy_params& policy : preset.policies) {
      expect_numbers(policy, KVM_RETAIN_PROMPT, 0, 0, 0);
    }
    std::vector<uint32_t> layers;
    for (uint32_t layer = 0; layer < n_layers; ++layer) {
      if (!skips[layer]) {
        layers.push_back(layer);
      }
    }
    return layers;
  };
  using Layers = std::vector<uint32_t>;
  EXPECT_EQ(decoding(30, 5), Layers({0, 6, 12, 18, 24, 29}));
  EXPECT_EQ(decoding(30, 2), Layers({0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 29}));
  EXPECT_EQ(decoding(30, 0), decoding(30, 2));
  EXPECT_EQ(decoding(32, 4), Layers({0, 4, 8, 12, 16, 20, 24, 31}));
  EXPECT_EQ(decoding(32, 10), Layers({0, 16, 31}));
  EXPECT_EQ(decoding(28, 10), Layers({0, 27}));
  EXPECT_EQ(decoding(6, 1), Layers({0, 1, 2, 3, 4, 5}));
  for (uint32_t n_layers = 2; n_layers <= 64; ++n_layers) {
    for (uint32_t speed_up = 1; speed_up <= n_layers / 2; ++speed_up) {
      EXPECT_EQ(decoding(n_layers, speed_up).size(), n_layers / speed_up) << n_layers;
    }
  }
  kvm_preset_params params = params_of("unified_layer_skipping", 30);
  params.speed_up = 5;
  EXPECT_NE(resolve(params).text.find("6 of 30 layers decode: 0, 6, 12, 18, 24, 29.\n"),
            std::string::npos);
  params.speed_up = 16;
  expect_refused(params, KVM_ERR_INVALID,
                 "speed_up is 16 of 30 layers; at least the first and the last must decode: "
                 "speed_up may be at most 15");
}

TEST(PolicyPreset, NamesAreListed) {
  uint32_t n = 0;
  const std::vector<uint64_t> masks(2 * 32, 1);
  for (; preset_name(n) != nullptr; ++n) {
    kvm_preset_params params = params_of(preset_name(n));
    const std::string name = preset_name(n);
    if (name == "duo_attention" || name == "razor_attention") {
      params.kv_head_masks = masks.data();
    }
    const Preset preset = resolve(params);
    EXPECT_FALSE(preset.text.empty()) << name;
    EXPECT_EQ(preset.text.back(), '\n') << name;
    EXPECT_LT(preset.text.size(), sizeof(kvm_preset{}.text)) << name;
    EXPECT_LE(preset.policies.size(), 32u) << name;
  }
  EXPECT_EQ(n, 21u);
  EXPECT_EQ(preset_name(UINT32_MAX), nullptr);
}

// h = 256 (arXiv 2507.03285): a short-term memory has pairs t - h + 1 to t - 1.
TEST(PolicyPreset, MemoryMosaicsForgetInEverySecondLayer) {
  Preset preset = resolve(params_of("memory_mosaics"));
  EXPECT_TRUE(preset.layers.empty() && preset.codecs.empty());
  ASSERT_EQ(preset.policies.size(), 16u);
  for (uint32_t i = 0; i < 16; ++i) {
    EXPECT_EQ(preset.policies[i].layer_begin, 2 * i + 1);
    EXPECT_EQ(preset.policies[i].n_layers, 1u);
    EXPECT_EQ(preset.policies[i].retention, uint32_t{KVM_RETAIN_SINKS_RECENT});
    EXPECT_EQ(preset.policies[i].n_recent, 255u);
    EXPECT_EQ(preset.policies[i].n_sinks, 0u);
  }
  kvm_preset_params params = params_of("memory_mosaics", 2);
  params.window = 100;
  params.slack = 64;
  preset = resolve(params);
  ASSERT_EQ(preset.policies.size(), 1u);
  EXPECT_EQ(preset.policies[0].n_recent, 99u);
  EXPECT_EQ(preset.policies[0].slack, 64u);
  params.window = 1;
  EXPECT_EQ(resolve_preset(params).status().code(), KVM_ERR_INVALID);
  EXPECT_EQ(resolve_preset(params_of("memory_mosaics", 3)).status().code(), KVM_ERR_INVALID);
}

TEST(PolicyPreset, UnknownNamesHaveANearest) {
  const std::string all =
      "full, streaming_llm, duo_attention, razor_attention, h2o, mikv, mikv3, mikv4, alisa, d2o, "
      "kivi, kivi3, kivi4, gear4, gear3, gear2, yi_lightning, minicache, "
      "memory_mosaics, skip_decode, unified_layer_skipping";
  const std::pair<const char*, const char*> cases[] = {
      {"h20", "h2o"},
      {"streamingllm", "streaming_llm"},
      {"kivi8", "kivi"},
      {"unified_layer_skip", "unified_layer_skipping"}};
  for (const auto& [name, nearest] : cases) {
    expect_refused(params_of(name), KVM_ERR_NOT_FOUND,
                   std::string("no preset is called \"") + name + "\"; the nearest is " + nearest +
                       "; there are " + all);
  }
  for (const char* const far : {"", "quest"}) {
    expect_refused(params_of(far), KVM_ERR_NOT_FOUND,
                   std::string("no preset is called \"") + far + "\"; there are " + all);
  }
  EXPECT_EQ(resolve_preset(params_of("snapkv")).status().code(), KVM_ERR_UNSUPPORTED);
  EXPECT_EQ(resolve_preset(params_of(nullptr)).status().code(), KVM_ERR_INVALID);
}

TEST(PolicyPreset, NumbersThatASystemDoesNotTakeAreRefused) {
  const std::vector<uint64_t> masks(2 * 32, 1);
  kvm_preset_params params = params_of("kivi");
  params.slack = 16;
  expect_refused(params, KVM_ERR_INVALID, "slack is 16; preset kivi has no use for it");
  params = params_of("h2o");
  params.window = 100;
  expect_refused(params, KVM_ERR_INVALID, "window is 100; preset h2o has no use for it");
  params = params_of("h2o");
  params.speed_up = 2;
  expect_refused(params, KVM_ERR_INVALID, "speed_up is 2; preset h2o has no use for it");
  params = params_of("h2o");
  params.kv_head_masks = masks.data();
  expect_refused(params, KVM_ERR_INVALID,
                 "kv_head_masks is not NULL; preset h2o has no use for it");
  params = params_of("skip_decode");
  params.share = 0.5f;
  expect_refused(params, KVM_ERR_INVALID, "share is 0.5; preset skip_decode has no use for it");
  params = params_of("h2o");
  for (const float share : {-0.1f, 1.5f, __builtin_nanf("")}) {
    params.share = share;
    EXPECT_EQ(resolve_preset(params).status().code(), KVM_ERR_INVALID);
  }
  for (const uint32_t n_layers : {0u, 513u}) {
    EXPECT_EQ(resolve_preset(params_of("full", n_layers)).status().code(), KVM_ERR_INVALID);
  }
  for (uint64_t* word : {&params.reserved[0], &params.reserved[3]}) {
    params = params_of("full");
    *word = 1;
    EXPECT_EQ(resolve_preset(params).status().code(), KVM_ERR_INVALID);
  }
}

TEST(PolicyPreset, ArraysHaveRoomOrNothingIsWritten) {
  const Preset preset = resolve(params_of("yi_lightning"));
  std::vector<kvm_layer_params> layers(3);
  std::vector<kvm_policy_params> policies(32);
  kvm_preset out{};
  out.struct_size = sizeof(out);
  out.layers = layers.data();
  out.n_layer_params = 3;
  out.policies = policies.data();
  out.n_policies = 32;
  const kvm_preset before = out;
  const Status status = write_preset(preset, &out);
  EXPECT_EQ(status.code(), KVM_ERR_LIMIT);
  EXPECT_EQ(status.message(),
            "kvm_preset.layers has room for 3; the preset has 4; room for n_layers entries in each "
            "of layers, policies, codecs and indexes is always enough");
  EXPECT_EQ(std::memcmp(&out, &before, sizeof(out)), 0);
  EXPECT_EQ(policies[0].n_recent, 0u);
  layers.resize(4);
  out.layers = layers.data();
  out.n_layer_params = 4;
  ASSERT_TRUE(write_preset(preset, &out).is_ok());
  EXPECT_EQ(out.n_layer_params, 4u);
  EXPECT_EQ(out.n_policies, preset.policies.size());
  EXPECT_EQ(out.n_codecs, 0u);
  EXPECT_EQ(layers[3].target, 27u);
  EXPECT_EQ(policies[0].n_recent, 4096u);
  EXPECT_EQ(out.text, preset.text);
  out.policies = nullptr;
  EXPECT_EQ(write_preset(preset, &out).code(), KVM_ERR_INVALID);
  out.struct_size = 8;
  EXPECT_EQ(write_preset(preset, &out).code(), KVM_ERR_INVALID);
}

}  // namespace
}  // namespace kvm::client
