// SPDX-License-Identifier: Apache-2.0
// Unified Layer Skipping: layers that decoding skips give the prompt's memory back once the prompt
// is over, and nothing else changes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/round.h"
#include "tests/unit/engine/policy_testbed.h"

namespace kvm::engine::testing {
namespace {

constexpr uint32_t kLayers = 8;
constexpr uint32_t kHeads = 2;
constexpr uint32_t kDim = 8;
constexpr uint64_t kPageBytes = kPageTokens * kHeads * kDim * 2 * sizeof(float);

const std::vector<uint32_t> kDecode = {0, 3, 6, 7};
const std::vector<uint32_t> kAll = {0, 1, 2, 3, 4, 5, 6, 7};

bool decodes(uint32_t layer) {
  return std::find(kDecode.begin(), kDecode.end(), layer) != kDecode.end();
}

SpaceSpec skipping_spec(bool frees = true) {
  SpaceSpec spec = make_spec("skipping", kLayers, kHeads, kHeads, kDim);
  spec.params.codec = KVM_CODEC_F32;
  for (uint32_t layer = 0; layer < kLayers && frees; ++layer) {
    if (!decodes(layer)) {
      spec.policies.push_back(
          {.layer_begin = layer, .n_layers = 1, .retention = KVM_RETAIN_PROMPT});
    }
  }
  return spec;
}

class World {
 public:
  explicit World(SpaceSpec spec = skipping_spec()) {
    space_ = rig.space(std::move(spec));
    seq = rig.create(space_);
  }

  // n tokens from `position` on to each of `layers`, with a query by the last of them; outputs of
  // all layers follow `outputs`.
  Status append(kvm_seq_id to, const std::vector<uint32_t>& layers, uint64_t position, uint32_t n,
                uint32_t last_flags = 0) {
    for (const uint32_t layer : layers) {
      const bool is_last = layer == layers.back();
      KVM_TRY(step(to, layer, position, n, is_last ? last_flags : 0, true).status);
    }
    return Status::ok();
  }
  Status decode(kvm_seq_id to, uint64_t position) {
    return append(to, kDecode, position, 1, KVM_ITEM_LAST_LAYER);
  }
  RequestResult step(kvm_seq_id to, uint32_t layer, uint64_t position, uint32_t n, uint32_t flags,
                     bool attends) {
    Buffer k(Dtype::kF32, 1, std::max(n, 1u), kHeads, kDim), v = k;
    Buffer q(Dtype::kF32, 1, 1, kHeads, kDim), o = q;
    for (uint32_t head = 0; head < kHeads; ++head) {
      for (uint32_t t = 0; t < n; ++t) {
        put(&k, t, head, hashed_row(100 + layer, position + t, head, kDim, 1.0));
        put(&v, t, head, hashed_row(200 + layer, position + t, head, kDim, 1.0));
      }
      put(&q, 0, head, hashed_row(300 + layer, position + n, head, kDim, 2.0));
    }
    StepRequest request;
    request.space = space_;
    request.layer_begin = layer;
    request.append = n != 0;
    request.attend = attends;
    kvm_item item = append_item(to, n);
    item.append_position = position;
    item.n_query = attends ? 1 : 0;
    item.flags = flags;
    request.items = {item};
    if (n != 0) {
      request.k = k.view();
      request.v = v.view();
    }
    if (attends) {
      request.q = q.view();
      request.o = o.view();
    }
    RequestResult result = rig.run(std::move(request));
    for (uint32_t head = 0; head < kHeads && attends && result.status.is_ok(); ++head) {
      const std::vector<float> row = o.get_row(0, 0, head);
      outputs.insert(outputs.end(), row.begin(), row.end());
    }
    return result;
  }
  kvm_seq_info info(kvm_seq_id of) { return rig.engine->seq_info(rig.client, of).value(); }
  uint64_t bytes(kvm_seq_id of) { return info(of).bytes; }
  RequestResult fork(kvm_seq_id of, uint64_t n_tokens) {
    return rig.verb(SeqVerb::kFork, of, n_tokens);
  }

  Rig rig;
  kvm_seq_id seq = 0;
  std::vector<float> outputs;

 private:
  static void put(Buffer* buffer, uint32_t row, uint32_t head, const Row& from) {
    for (uint32_t i = 0; i < kDim; ++i) {
      buffer->set(0, row, head, i, static_cast<float>(from[i]));
    }
  }

  kvm_space_id space_ = 0;
};

// Of R layers out of L, R / L of the bytes are left, up to the page that a layer ends in.
TEST(SkipLayers, ThePromptOfSkippedLayersGoesWhenItEnds) {
  for (const uint32_t n_prompt : {256u, 300u, 40u}) {
    SCOPED_TRACE(n_prompt);
    World world;
    ASSERT_TRUE(world.append(world.seq, kAll, 0, n_prompt, KVM_ITEM_PROMPT_END).is_ok());
    const uint64_t n_full = n_prompt / kPageTokens;
    const uint64_t n_pages = div_up(n_prompt, kPageTokens);
    EXPECT_EQ(world.info(world.seq).n_entries_dropped, 4 * n_full * kPageTokens);
    EXPECT_EQ(world.bytes(world.seq), (8 * n_pages - 4 * n_full) * kPageBytes);
    if (n_prompt == 256) {
      EXPECT_EQ(world.bytes(world.seq) * kLayers, kDecode.size() * kLayers * n_pages * kPageBytes);
    }
    ASSERT_TRUE(world.decode(world.seq, n_prompt).is_ok());
    EXPECT_EQ(world.info(world.seq).n_committed, n_prompt + 1);
  }
}

// An engine that says nothing: the first token that is committed by itself ends the prompt.
TEST(SkipLayers, AFirstTokenByItselfEndsThePrompt) {
  World world;
  ASSERT_TRUE(world.append(world.seq, kAll, 0, 200).is_ok());
  ASSERT_TRUE(world.append(world.seq, kAll, 200, 56).is_ok());
  EXPECT_EQ(world.info(world.seq).n_entries_dropped, 0u);
  ASSERT_TRUE(world.decode(world.seq, 256).is_ok());
  EXPECT_EQ(world.info(world.seq).n_entries_dropped, 4 * 256u);
}

// What the other layers answer is what they answer where nothing is freed, to the bit.
TEST(SkipLayers, LayersThatDecodeAnswerAsEver) {
  World frees;
  World keeps(skipping_spec(false));
  for (World* world : {&frees, &keeps}) {
    ASSERT_TRUE(world->append(world->seq, kAll, 0, 300, KVM_ITEM_PROMPT_END).is_ok());
    for (uint64_t t = 300; t < 500; ++t) {
      ASSERT_TRUE(world->decode(world->seq, t).is_ok());
    }
  }
  EXPECT_EQ(frees.outputs, keeps.outputs);
  EXPECT_EQ(keeps.bytes(keeps.seq) - frees.bytes(frees.seq), 4 * 4 * kPageBytes);
}

TEST(SkipLayers, WhatIsGoneIsNotAnswered) {
  World world;
  ASSERT_TRUE(world.append(world.seq, kAll, 0, 256, KVM_ITEM_PROMPT_END).is_ok());
  RequestResult result = world.step(world.seq, 5, 256, 0, 0, true);
  EXPECT_EQ(result.status.code(), KVM_ERR_PARTIAL);
  EXPECT_EQ(result.status.message(),
            "layer 5 has dropped its tokens when the prompt ended, at 256");
  ASSERT_TRUE(world.decode(world.seq, 256).is_ok());
  const kvm_seq_info before = world.info(world.seq);
  result = world.step(world.seq, 5, 257, 1, 0, false);
  EXPECT_EQ(result.status.code(), KVM_ERR_HOLE);
  EXPECT_NE(result.status.message().find("append_position is 257; layer 5"), std::string::npos)
      << result.status.message();
  EXPECT_EQ(world.info(world.seq).bytes, before.bytes);
  EXPECT_EQ(world.info(world.seq).n_committed, before.n_committed);
}

// Forks and cuts behind the prompt are as ever; within it the skipped layers cannot follow.
TEST(SkipLayers, ForksAndCuts) {
  World world;
  ASSERT_TRUE(world.append(world.seq, kAll, 0, 256, KVM_ITEM_PROMPT_END).is_ok());
  for (uint64_t t = 256; t < 300; ++t) {
    ASSERT_TRUE(world.decode(world.seq, t).is_ok());
  }
  for (const uint64_t n : {255u, 100u, 1u}) {
    for (const SeqVerb verb : {SeqVerb::kFork, SeqVerb::kTruncate}) {
      const RequestResult result = world.rig.verb(verb, world.seq, n);
      EXPECT_EQ(result.status.code(), KVM_ERR_PARTIAL) << n;
      EXPECT_NE(result.status.message().find("when the prompt ended, at 256"), std::string::npos);
    }
  }
  for (const uint64_t n : {uint64_t{256}, uint64_t{280}, uint64_t{KVM_POSITION_END}}) {
    const RequestResult child = world.fork(world.seq, n);
    ASSERT_TRUE(child.status.is_ok()) << child.status.message();
    EXPECT_TRUE(world.decode(child.seq, std::min<uint64_t>(n, 300)).is_ok());
  }
  ASSERT_TRUE(world.rig.verb(SeqVerb::kTruncate, world.seq, 270).status.is_ok());
  ASSERT_TRUE(world.decode(world.seq, 270).is_ok());
  // Nothing is needed of a sequence without tokens, and it gets another prompt.
  ASSERT_TRUE(world.rig.verb(SeqVerb::kTruncate, world.seq, 0).status.is_ok());
  ASSERT_TRUE(world.append(world.seq, kAll, 0, 128).is_ok());
  EXPECT_EQ(world.info(world.seq).n_entries_dropped, 0u);
  ASSERT_TRUE(world.append(world.seq, kAll, 128, 64, KVM_ITEM_PROMPT_END).is_ok());
  EXPECT_EQ(world.info(world.seq).n_entries_dropped, 4 * 192u);
}

// A fork from within the prompt has a prompt of its own, whatever becomes of its parent.
TEST(SkipLayers, AForkEndsItsOwnPrompt) {
  World world;
  ASSERT_TRUE(world.append(world.seq, kAll, 0, 256).is_ok());
  const kvm_seq_id child = world.fork(world.seq, KVM_POSITION_END).seq;
  ASSERT_TRUE(world.decode(world.seq, 256).is_ok());
  EXPECT_EQ(world.info(world.seq).n_entries_dropped, 4 * 256u);
  EXPECT_EQ(world.info(child).n_entries_dropped, 0u);
  ASSERT_TRUE(world.append(child, kAll, 256, 64, KVM_ITEM_PROMPT_END).is_ok());
  EXPECT_EQ(world.info(child).n_entries_dropped, 4 * 320u);
  ASSERT_TRUE(world.decode(child, 320).is_ok());
}

// What a skipped layer gets behind the prompt goes as well, once its pages are full.
TEST(SkipLayers, WhatComesLaterGoesToo) {
  World world;
  ASSERT_TRUE(world.append(world.seq, kAll, 0, 100, KVM_ITEM_PROMPT_END).is_ok());
  for (uint64_t t = 100; t < 400; ++t) {
    for (const uint32_t layer : kAll) {
      const uint32_t flags = layer + 1 == kLayers ? uint32_t{KVM_ITEM_LAST_LAYER} : 0;
      ASSERT_TRUE(world.step(world.seq, layer, t, 1, flags, false).status.is_ok());
    }
  }
  EXPECT_EQ(world.info(world.seq).n_entries_dropped, 4 * 384u);
}

// Other layers share out their budgets when the same prompt ends.
TEST(SkipLayers, BesideBudgets) {
  SpaceSpec spec = skipping_spec();
  spec.policies.push_back({.layer_begin = 3,
                           .n_layers = 1,
                           .retention = KVM_RETAIN_HEAVY,
                           .n_recent = 64,
                           .n_heavy = 10,
                           .budgets = KVM_BUDGETS_BY_DENSITY});
  World world(std::move(spec));
  ASSERT_TRUE(world.append(world.seq, kAll, 0, 320).is_ok());
  EXPECT_EQ(world.info(world.seq).n_entries_dropped, 0u);
  ASSERT_TRUE(world.append(world.seq, kAll, 320, 64, KVM_ITEM_PROMPT_END).is_ok());
  // Of layer 3 each of two heads keeps 10 tokens of those that left its window.
  EXPECT_EQ(world.info(world.seq).n_entries_dropped, 4 * 384u + 2 * (320u - 10));
  ASSERT_TRUE(world.decode(world.seq, 384).is_ok());
}

TEST(SkipLayers, SettingsThatCannotBe) {
  Rig rig;
  SpaceSpec spec = skipping_spec();
  spec.policies[1].kv_head_mask[0] = 2;
  Result<kvm_space_id> made = rig.engine->register_space(spec);
  ASSERT_FALSE(made.is_ok());
  EXPECT_EQ(made.status().code(), KVM_ERR_INVALID);
  EXPECT_EQ(made.status().message(),
            "1 of the 2 kv heads of layer 2 have KVM_RETAIN_PROMPT; all must have it, or none: a "
            "query asks them all");
  for (uint64_t kvm_policy_params::*field :
       {&kvm_policy_params::n_sinks, &kvm_policy_params::n_recent, &kvm_policy_params::slack,
        &kvm_policy_params::n_heavy}) {
    spec = skipping_spec();
    spec.policies[0].*field = 8;
    EXPECT_EQ(rig.engine->register_space(spec).status().code(), KVM_ERR_INVALID);
  }
  spec = skipping_spec();
  spec.policies[0].retention = KVM_RETAIN_PROMPT + 1;
  EXPECT_EQ(rig.engine->register_space(spec).status().code(), KVM_ERR_INVALID);
}

}  // namespace
}  // namespace kvm::engine::testing
