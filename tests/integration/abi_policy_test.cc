// SPDX-License-Identifier: Apache-2.0
// Retention policies as configuration through kvm.h, over both libraries: a policy for each head.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/integration/abi_rig.h"

namespace kvm::testing {
namespace {

constexpr uint32_t kHeads = 4;
constexpr uint32_t kDim = 16;
constexpr uint32_t kTokens = 2000;

class AbiPolicy : public ServiceTest {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(open("abi-policy-test"));
    params_.struct_size = sizeof(params_);
    params_.name = "policies";
    params_.n_layers = 1;
    params_.n_q_heads = kHeads;
    params_.head_dim_k = kDim;
    params_.codec = KVM_CODEC_F32;
    params_.rope_layout = KVM_ROPE_HALF;
    params_.n_rope_pairs = 1;
    params_.rope_inv_freq = &no_turn_;
    for (uint32_t h = 0; h < kHeads; ++h) {
      policies_[h] = {};
      policies_[h].kv_head_mask[0] = uint64_t{1} << h;
      policies_[h].retention = KVM_RETAIN_SINKS_RECENT;
      policies_[h].n_sinks = 4;
      policies_[h].n_recent = 100;
    }
    policies_[0].positions = KVM_POSITIONS_IN_CACHE;
    policies_[2].retention = KVM_RETAIN_SINKS_RECENT_FOLD;
    policies_[3].retention = KVM_RETAIN_HEAVY;
    policies_[3].n_sinks = 0;
    policies_[3].n_heavy = 32;
    params_.policies = policies_;
    params_.n_policies = kHeads;
  }

  float no_turn_ = 0;
  kvm_policy_params policies_[kHeads];
  kvm_space_params params_{};
};

// All keys are alike, so lse says how many tokens each head sees.
TEST_F(AbiPolicy, EachHeadSeesWhatItsPolicyShows) {
  kvm_space_id space = 0;
  kvm_seq_id seq = 0;
  ASSERT_EQ(kvm_space_register(client_, &params_, &space), KVM_OK) << kvm_last_error();
  ASSERT_EQ(kvm_seq_create(client_, space, nullptr, &seq), KVM_OK) << kvm_last_error();
  const std::vector<float> k(500 * kHeads * kDim, 0.5f);
  const std::vector<float> v(500 * kHeads * kDim, 3.0f);
  const std::vector<float> q(kHeads * kDim, 0.25f);
  std::vector<float> o(kHeads * kDim);
  std::vector<float> lse(kHeads);
  for (uint32_t at = 0; at < kTokens;) {
    const uint32_t n = at == 1500 ? 499 : at == 1999 ? 1 : 500;
    kvm_item item{};
    item.seq = seq;
    item.append_position = KVM_POSITION_END;
    item.n_append = n;
    item.n_query = 1;
    item.query_position = KVM_POSITION_END;
    kvm_step_params step{};
    step.struct_size = sizeof(step);
    step.space = space;
    step.n_items = 1;
    step.items = &item;
    step.k = tensor_of(k);
    step.v = tensor_of(v);
    step.q = tensor_of(q);
    step.o = tensor_of(o);
    step.lse = tensor_of(lse);
    ASSERT_EQ(kvm_step(queue_, &step, nullptr), KVM_OK) << kvm_last_error();
    at += n;
  }
  const float logit = 0.125f * kDim / std::sqrt(static_cast<float>(kDim));
  // 1,999 tokens were committed: pages before 1856 have left the window of 100.
  const float expected[kHeads] = {4 + 100, 4 + 100, kTokens, 32 + kTokens - 1856};
  for (uint32_t h = 0; h < kHeads; ++h) {
    EXPECT_NEAR(std::exp(lse[h] - logit), expected[h], 1e-3f * expected[h]) << "head " << h;
    EXPECT_NEAR(o[h * kDim], 3.0f, 1e-4f);
  }
  kvm_seq_info info{};
  info.struct_size = sizeof(info);
  ASSERT_EQ(kvm_seq_get_info(client_, seq, &info), KVM_OK);
  EXPECT_LT(info.bytes, uint64_t{kTokens} * kHeads * kDim * 2 * sizeof(float) / 5);
  EXPECT_EQ(kvm_seq_truncate(client_, seq, 1000), KVM_ERR_PARTIAL);
  kvm_seq_id child = 0;
  EXPECT_EQ(kvm_seq_fork(client_, seq, 1000, &child), KVM_ERR_PARTIAL);
  EXPECT_EQ(kvm_seq_fork(client_, seq, KVM_POSITION_END, &child), KVM_OK) << kvm_last_error();
}

// D2O: nothing goes before an item says that the prompt is there; what goes then is the average's
// where layers are alike.
TEST_F(AbiPolicy, BudgetsAreSharedOutWhenThePromptEnds) {
  policies_[3].budgets = KVM_BUDGETS_BY_DENSITY;
  kvm_space_id space = 0;
  kvm_seq_id seq = 0;
  ASSERT_EQ(kvm_space_register(client_, &params_, &space), KVM_OK) << kvm_last_error();
  ASSERT_EQ(kvm_seq_create(client_, space, nullptr, &seq), KVM_OK) << kvm_last_error();
  const std::vector<float> kv(1000 * kHeads * kDim);
  const std::vector<float> q(kHeads * kDim);
  std::vector<float> o(kHeads * kDim);
  std::vector<float> lse(kHeads);
  const auto seen_after = [&](uint32_t n_append, uint32_t flags) {
    kvm_item item{};
    item.seq = seq;
    item.append_position = KVM_POSITION_END;
    item.n_append = n_append;
    item.flags = flags;
    kvm_step_params step{};
    step.struct_size = sizeof(step);
    step.space = space;
    step.n_items = 1;
    step.items = &item;
    step.k = step.v = tensor_of(kv);
    EXPECT_EQ(kvm_append(queue_, &step), KVM_OK) << kvm_last_error();
    item.n_append = 0;
    item.flags = 0;
    item.n_query = 1;
    item.query_position = KVM_POSITION_END;
    step.k = step.v = {};
    step.q = tensor_of(q);
    step.o = tensor_of(o);
    step.lse = tensor_of(lse);
    EXPECT_EQ(kvm_attend(queue_, &step, nullptr), KVM_OK) << kvm_last_error();
    return std::lround(std::exp(lse[3]));
  };
  EXPECT_EQ(seen_after(1000, 0), 1000);
  EXPECT_EQ(seen_after(900, 0), 1900);
  EXPECT_EQ(seen_after(100, KVM_ITEM_PROMPT_END), 32 + 2000 - 1856);
}

// Unified Layer Skipping: layers 1 and 2 of 4 are freed when the prompt ends.
TEST_F(AbiPolicy, ThePromptOfSkippedLayersGoes) {
  kvm_policy_params skipped{};
  skipped.layer_begin = 1;
  skipped.n_layers = 2;
  skipped.retention = KVM_RETAIN_PROMPT;
  params_.n_layers = 4;
  params_.policies = &skipped;
  params_.n_policies = 1;
  kvm_space_id space = 0;
  kvm_seq_id seq = 0;
  ASSERT_EQ(kvm_space_register(client_, &params_, &space), KVM_OK) << kvm_last_error();
  ASSERT_EQ(kvm_seq_create(client_, space, nullptr, &seq), KVM_OK) << kvm_last_error();
  const std::vector<float> kv(512 * kHeads * kDim);
  const auto append = [&](uint32_t layer, uint64_t position, uint32_t n, uint32_t flags) {
    kvm_item item{};
    item.seq = seq;
    item.append_position = position;
    item.n_append = n;
    item.flags = flags;
    kvm_step_params step{};
    step.struct_size = sizeof(step);
    step.space = space;
    step.layer_begin = layer;
    step.n_items = 1;
    step.items = &item;
    step.k = step.v = tensor_of(kv);
    return kvm_append(queue_, &step);
  };
  const auto bytes = [&] {
    kvm_seq_info info{};
    info.struct_size = sizeof(info);
    EXPECT_EQ(kvm_seq_get_info(client_, seq, &info), KVM_OK);
    return info.bytes;
  };
  for (uint32_t layer = 0; layer < 3; ++layer) {
    ASSERT_EQ(append(layer, 0, 512, 0), KVM_OK) << kvm_last_error();
  }
  const uint64_t of_layer = bytes() / 3;
  ASSERT_EQ(append(3, 0, 512, KVM_ITEM_PROMPT_END), KVM_OK) << kvm_last_error();
  EXPECT_EQ(bytes(), 2 * of_layer);
  ASSERT_EQ(append(0, 512, 1, 0), KVM_OK) << kvm_last_error();
  ASSERT_EQ(append(3, 512, 1, KVM_ITEM_LAST_LAYER), KVM_OK) << kvm_last_error();
  EXPECT_EQ(append(1, 513, 1, 0), KVM_ERR_HOLE);
  EXPECT_EQ(kvm_seq_truncate(client_, seq, 511), KVM_ERR_PARTIAL);
  EXPECT_NE(std::string(kvm_last_error()).find("when the prompt ended, at 512"), std::string::npos)
      << kvm_last_error();
  EXPECT_EQ(kvm_seq_truncate(client_, seq, 512), KVM_OK) << kvm_last_error();
}

// Each preset is a space that the service takes.
TEST_F(AbiPolicy, PresetsRegister) {
  params_.n_layers = 16;
  params_.head_dim_k = 64;
  std::vector<uint64_t> masks;
  for (uint32_t layer = 0; layer < 16; ++layer) {
    masks.insert(masks.end(), {6, 0});
  }
  uint32_t n = 0;
  for (; kvm_preset_name(n) != nullptr; ++n) {
    const std::string name = kvm_preset_name(n);
    SCOPED_TRACE(name);
    kvm_preset_params system{};
    system.struct_size = sizeof(system);
    system.name = name.c_str();
    system.n_layers = 16;
    if (name == "duo_attention" || name == "razor_attention") {
      system.kv_head_masks = masks.data();
    }
    std::vector<kvm_layer_params> layers(16);
    std::vector<kvm_policy_params> policies(16);
    std::vector<kvm_codec_params> codecs(16);
    std::vector<kvm_index_params> indexes(16);
    kvm_preset preset{};
    preset.struct_size = sizeof(preset);
    preset.n_layer_params = preset.n_policies = preset.n_codecs = preset.n_indexes = 16;
    preset.layers = layers.data();
    preset.policies = policies.data();
    preset.codecs = codecs.data();
    preset.indexes = indexes.data();
    ASSERT_EQ(kvm_policy_preset(&system, &preset), KVM_OK) << kvm_last_error();
    EXPECT_GT(std::string(preset.text).size(), 0u);
    params_.name = name.c_str();
    params_.layers = preset.layers;
    params_.n_layer_params = preset.n_layer_params;
    params_.policies = preset.policies;
    params_.n_policies = preset.n_policies;
    params_.codecs = preset.codecs;
    params_.n_codecs = preset.n_codecs;
    params_.indexes = preset.indexes;
    params_.n_indexes = preset.n_indexes;
    params_.default_mode = preset.default_mode;
    params_.default_budget = preset.default_budget;
    kvm_space_id space = 0;
    EXPECT_EQ(kvm_space_register(client_, &params_, &space), KVM_OK) << kvm_last_error();
  }
  EXPECT_GT(n, 8u);
}

TEST_F(AbiPolicy, PresetsThatCannotBeSayWhy) {
  kvm_preset_params system{};
  system.struct_size = sizeof(system);
  system.name = "h20";
  system.n_layers = 16;
  kvm_policy_params policy{};
  kvm_preset preset{};
  preset.struct_size = sizeof(preset);
  preset.policies = &policy;
  preset.n_policies = 1;
  EXPECT_EQ(kvm_policy_preset(&system, &preset), KVM_ERR_NOT_FOUND);
  EXPECT_NE(std::string(kvm_last_error()).find("the nearest is h2o; there are full, "),
            std::string::npos)
      << kvm_last_error();
  system.name = "h2o";
  EXPECT_EQ(kvm_policy_preset(&system, nullptr), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_policy_preset(nullptr, &preset), KVM_ERR_INVALID);
  preset.n_policies = 0;
  EXPECT_EQ(kvm_policy_preset(&system, &preset), KVM_ERR_LIMIT);
  preset.n_policies = 1;
  EXPECT_EQ(policy.n_heavy, 0u);
  ASSERT_EQ(kvm_policy_preset(&system, &preset), KVM_OK) << kvm_last_error();
  EXPECT_EQ(policy.n_heavy, 410u);
  EXPECT_EQ(preset.n_policies, 1u);
  system.flags = 1;
  EXPECT_EQ(kvm_policy_preset(&system, &preset), KVM_ERR_INVALID);
  // Of programs that know no indexes of presets.
  system.flags = 0;
  preset.struct_size = offsetof(kvm_preset, n_indexes);
  EXPECT_EQ(kvm_policy_preset(&system, &preset), KVM_OK) << kvm_last_error();
  system.name = "alisa";
  kvm_codec_params codec{};
  preset.codecs = &codec;
  preset.n_codecs = 1;
  EXPECT_EQ(kvm_policy_preset(&system, &preset), KVM_ERR_UNSUPPORTED);
  preset.struct_size = sizeof(preset);
  EXPECT_EQ(kvm_policy_preset(&system, &preset), KVM_ERR_LIMIT) << kvm_last_error();
}

TEST_F(AbiPolicy, ImpossibleCombinationsSayWhy) {
  kvm_space_id space = 0;
  const auto refused = [&](const char* reason) {
    EXPECT_EQ(kvm_space_register(client_, &params_, &space), KVM_ERR_INVALID);
    EXPECT_NE(std::string(kvm_last_error()).find(reason), std::string::npos) << kvm_last_error();
  };
  policies_[3].n_heavy = 0;
  refused("policies[3].n_heavy is 0");
  policies_[3].n_heavy = 32;
  policies_[2].positions = KVM_POSITIONS_IN_CACHE;
  refused("policies[2].positions is KVM_POSITIONS_IN_CACHE with KVM_RETAIN_SINKS_RECENT_FOLD (2)");
  policies_[2].positions = KVM_POSITIONS_ABSOLUTE;
  kvm_layer_params layer{};
  layer.n_layers = 1;
  layer.window = 50;
  params_.layers = &layer;
  params_.n_layer_params = 1;
  refused("the layer has a window of 50");
  params_.n_layer_params = 0;
  params_.rope_layout = KVM_ROPE_NONE;
  params_.n_rope_pairs = 0;
  refused("the space has no rope_layout");
}

TEST_F(AbiPolicy, ProbeScoresHeads) {
  // 3 copies of 2 tokens; a query that asks for its own token, in one head.
  const std::vector<float> rows = {9, 0, 0, 9, 9, 0, 0, 9, 9, 0, 0, 9};
  kvm_probe_params probe{};
  probe.struct_size = sizeof(probe);
  probe.n_tokens = 6;
  probe.period = 2;
  probe.n_q_heads = 1;
  probe.head_dim = 2;
  probe.q = tensor_of(rows);
  probe.k = tensor_of(rows);
  float echo = 0;
  float induction = 1;
  ASSERT_EQ(kvm_probe_heads(&probe, &echo, &induction), KVM_OK) << kvm_last_error();
  EXPECT_NEAR(echo, (0.5f + 0.5f + 2.0f / 3 + 2.0f / 3) / 4, 1e-5f);
  EXPECT_NEAR(induction, 0.0f, 1e-5f);
  EXPECT_EQ(kvm_probe_heads(nullptr, &echo, &induction), KVM_ERR_INVALID);
}

}  // namespace
}  // namespace kvm::testing
