// SPDX-License-Identifier: Apache-2.0
// kvm_cuda.h over a device of plain memory, against fp64 arithmetic.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/codec_id.h"
#include "base/dtype.h"
#include "base/limits.h"
#include "base/splitmix.h"
#include "codecs/codec.h"
#include "codecs/convert.h"
#include "codecs/low_bits.h"
#include "device/store_wire.h"
#include "tests/gpu/device_rig.h"
#include "tests/unit/daemon/raw_client.h"

namespace kvm::device::testing {
namespace {

// A sequence of a test: what it holds, by its own account.
struct Seq {
  kvm_seq_id id = 0;
  Shadow shadow;
  uint64_t key = 0;  // of what it appends
  uint64_t size() const { return shadow.keys.size(); }
};

struct Share {
  Seq* seq = nullptr;
  uint32_t n_append = 0;
  uint32_t n_query = 0;
  std::vector<uint64_t> tree;  // [n_query], or empty

  Rig::Query query(uint64_t n_tokens, uint32_t row) const {
    const uint64_t begin = n_tokens - n_query;
    return tree.empty() ? Rig::Query{begin + row} : Rig::Query{begin + row, true, begin, tree[row]};
  }
};

// Words of a tree of n rows, of which some see nothing of it.
std::vector<uint64_t> random_tree(uint32_t n, uint64_t seed) {
  std::vector<uint64_t> words;
  for (uint32_t row = 0; row < n; ++row) {
    const uint64_t bits = splitmix64(seed * 64 + row);
    words.push_back(bits % 5 == 0 ? 0 : bits >> (64 - n));
  }
  return words;
}

// One step of all layers, and what it should have given.
class Step {
 public:
  Step(Rig* rig, kvm_cuda_batch* batch, std::vector<Share> shares, uint64_t seed)
      : rig_(rig), batch_(batch), shares_(std::move(shares)), seed_(seed) {}

  // Updates; the sequences are longer then, also in the test's account.
  kvm_status update() {
    uint32_t row = 0;
    for (const Share& share : shares_) {
      kvm_cuda_item item{};
      item.seq = share.seq == nullptr ? 0 : share.seq->id;
      item.n_append = share.n_append;
      item.append_row = static_cast<uint32_t>(rows_.size());
      item.n_query = share.n_query;
      item.query_row = row;
      item.tree_mask = share.tree.empty() ? nullptr : share.tree.data();
      items_.push_back(item);
      row += share.n_query;
      for (uint32_t t = 0; t < share.n_append; ++t) {
        rows_.push_back({share.seq->key, share.seq->size() + t});
      }
    }
    const kvm_status status = kvm_cuda_update(batch_, items_.data(),
                                              static_cast<uint32_t>(items_.size()), rig_->stream());
    if (status == KVM_OK) {
      for (const Share& share : shares_) {
        if (share.seq != nullptr) {
          share.seq->shadow.keys.insert(share.seq->shadow.keys.end(), share.n_append,
                                        share.seq->key);
          after_.push_back(share.seq->shadow);
        } else {
          after_.push_back({});
        }
      }
      n_rows_ = row;
    }
    return status;
  }

  bool stores(uint32_t layer) const {
    for (const kvm_layer_params& of : rig_->geometry().layers) {
      if (layer >= of.layer_begin && layer < of.layer_begin + of.n_layers) {
        return of.kind == KVM_LAYER_OWN;
      }
    }
    return true;
  }

  // May be called again after a failure: the same rows go to the same places.
  kvm_status launch(bool appends = true) {
    q_.clear();
    outputs_.clear();
    for (uint32_t layer = 0; layer < rig_->geometry().n_layers; ++layer) {
      if (appends && !rows_.empty() && stores(layer)) {
        const kvm_tensor k = rig_->keys(rows_, layer, false), v = rig_->keys(rows_, layer, true);
        if (const kvm_status status = kvm_cuda_append(batch_, layer, &k, &v, rig_->stream());
            status != KVM_OK) {
          return status;
        }
      }
      if (n_rows_ == 0) {
        continue;
      }
      q_.push_back(rig_->queries(seed_ * 100 + layer, n_rows_));
      outputs_.push_back(rig_->outputs(n_rows_));
      kvm_cuda_attend_params attend{};
      attend.struct_size = sizeof attend;
      attend.layer = layer;
      attend.q = rig_->tensor(q_.back(), rig_->geometry().query_dtype());
      attend.o = outputs_.back().o_tensor;
      attend.lse = outputs_.back().lse_tensor;
      if (const kvm_status status = kvm_cuda_attend(batch_, &attend, rig_->stream());
          status != KVM_OK) {
        return status;
      }
    }
    return KVM_OK;
  }

  void run() {
    ASSERT_EQ(update(), KVM_OK) << kvm_last_error();
    ASSERT_EQ(launch(), KVM_OK) << kvm_last_error();
  }

  // REQUIRES: the device has come to it.
  void check(const std::string& where) const {
    for (uint32_t layer = 0; layer < outputs_.size(); ++layer) {
      uint32_t row = 0;
      for (size_t i = 0; i < shares_.size(); ++i) {
        for (uint32_t j = 0; j < shares_[i].n_query; ++j, ++row) {
          rig_->expect_row(
              outputs_[layer], row, q_[layer], layer, after_[i],
              shares_[i].query(after_[i].keys.size(), j),
              where + " item " + std::to_string(i) + " layer " + std::to_string(layer));
        }
      }
    }
  }
  const Rig::Outputs& outputs(uint32_t layer) const { return outputs_[layer]; }

 private:
  Rig* rig_;
  kvm_cuda_batch* batch_;
  std::vector<Share> shares_;
  uint64_t seed_;
  std::vector<kvm_cuda_item> items_;
  std::vector<Rig::Row> rows_;
  uint32_t n_rows_ = 0;
  std::vector<Shadow> after_;
  std::vector<std::vector<uint16_t>> q_;
  std::vector<Rig::Outputs> outputs_;
};

Seq make(Rig* rig, uint64_t key) { return {rig->create(), {}, key}; }

Seq fork_of(Rig* rig, const Seq& parent, uint64_t n_tokens, uint64_t key) {
  Seq child;
  child.key = key;
  EXPECT_EQ(kvm_seq_fork(rig->client(), parent.id, n_tokens, &child.id), KVM_OK)
      << kvm_last_error();
  child.shadow = parent.shadow;
  child.shadow.keys.resize(std::min<uint64_t>(n_tokens, parent.size()));
  return child;
}

void truncate(Rig* rig, Seq* seq, uint64_t n_tokens) {
  ASSERT_EQ(kvm_seq_truncate(rig->client(), seq->id, n_tokens), KVM_OK) << kvm_last_error();
  seq->shadow.keys.resize(n_tokens);
}

kvm_cuda_stats stats_of(const Rig& rig) {
  kvm_cuda_stats stats{};
  stats.struct_size = sizeof stats;
  EXPECT_EQ(kvm_cuda_get_stats(rig.client(), &stats), KVM_OK) << kvm_last_error();
  return stats;
}

// Runs steps that nothing waits for, and looks at all of them at the end.
void run_all(Rig* rig, std::vector<Step>* steps) {
  for (Step& step : *steps) {
    step.run();
  }
  rig->driver().settle();
  for (size_t i = 0; i < steps->size(); ++i) {
    (*steps)[i].check("step " + std::to_string(i));
  }
}

// --- Steps --------------------------------------------------------------------------------------

struct Shape {
  const char* name;
  uint32_t codec, dim, n_q_heads, n_kv_heads, max_query;
};

class DeviceShapes : public ::testing::TestWithParam<Shape> {};

TEST_P(DeviceShapes, PrefillsAndDecodes) {
  const Shape& shape = GetParam();
  Geometry geometry;
  geometry.codec = shape.codec;
  geometry.dim = shape.dim;
  geometry.v_in_k = shape.dim == 576;
  geometry.n_q_heads = shape.n_q_heads;
  geometry.n_kv_heads = shape.n_kv_heads;
  Rig rig({}, geometry);
  kvm_cuda_batch* const batch = rig.batch(rig.batch_params(3, 256, shape.max_query));
  Seq a = make(&rig, 1), b = make(&rig, 2);
  // Lengths around the ends of pages; more steps than the ring has places.
  std::vector<Step> steps;
  steps.push_back({&rig, batch, {{&a, 150, 1}}, 1});
  steps.push_back({&rig, batch, {{&a, 1, 1}, {&b, 63, shape.max_query}}, 2});
  for (uint64_t i = 3; i < 9; ++i) {
    steps.push_back({&rig, batch, {{&a, 1, 1}, {nullptr, 0, 0}, {&b, 1, shape.max_query}}, i});
  }
  run_all(&rig, &steps);
  const kvm_cuda_stats stats = stats_of(rig);
  EXPECT_EQ(stats.n_pages, 3u + 2);  // of all layers
  kvm_seq_info info{};
  info.struct_size = sizeof info;
  ASSERT_EQ(kvm_seq_get_info(rig.client(), a.id, &info), KVM_OK);
  EXPECT_EQ(info.n_tokens_min, a.size());
  EXPECT_EQ(info.n_pages, 3u);
}

INSTANTIATE_TEST_SUITE_P(
    All, DeviceShapes,
    ::testing::Values(Shape{"bf16_d64", KVM_CODEC_BF16, 64, 4, 2, 2},
                      Shape{"fp16_d128_group8", KVM_CODEC_F16, 128, 8, 1, 4},
                      Shape{"bf16_d80_group5", KVM_CODEC_BF16, 80, 10, 2, 4},
                      Shape{"fp16_d80", KVM_CODEC_F16, 80, 2, 2, 1},
                      Shape{"bf16_d96_group8", KVM_CODEC_BF16, 96, 8, 1, 4},
                      Shape{"fp16_d96", KVM_CODEC_F16, 96, 3, 3, 2},
                      Shape{"bf16_d192_group8", KVM_CODEC_BF16, 192, 8, 1, 4},
                      Shape{"fp16_d192", KVM_CODEC_F16, 192, 6, 2, 1},
                      Shape{"bf16_d256", KVM_CODEC_BF16, 256, 2, 2, 1},
                      Shape{"int8_d64", KVM_CODEC_I8, 64, 4, 2, 8},
                      Shape{"fp8_d128_group8", KVM_CODEC_F8E4M3, 128, 8, 1, 4},
                      Shape{"int8_d256", KVM_CODEC_I8, 256, 2, 2, 1},
                      Shape{"int8_d80_group5", KVM_CODEC_I8, 80, 10, 2, 4},
                      Shape{"fp8_d96_group8", KVM_CODEC_F8E4M3, 96, 8, 1, 4},
                      Shape{"int8_d192", KVM_CODEC_I8, 192, 6, 2, 1},
                      Shape{"int4_d64", KVM_CODEC_I4, 64, 4, 2, 8},
                      Shape{"int4_d128_group8", KVM_CODEC_I4, 128, 8, 1, 4},
                      Shape{"int4_d256", KVM_CODEC_I4, 256, 2, 2, 1},
                      Shape{"bf16_mla_group16", KVM_CODEC_BF16, 576, 16, 1, 1},
                      Shape{"fp16_mla_group32", KVM_CODEC_F16, 576, 32, 1, 1},
                      Shape{"bf16_mla_group128", KVM_CODEC_BF16, 576, 128, 1, 1},
                      Shape{"fp16_mla_two_heads", KVM_CODEC_F16, 576, 32, 2, 4}),
    [](const auto& param) { return param.param.name; });

// Chunks of prompts behind each other and behind decode steps, in a batch of the prefill kernel.
class DevicePrefills : public ::testing::TestWithParam<Shape> {};

TEST_P(DevicePrefills, TakeChunksOfAnyLength) {
  const Shape& shape = GetParam();
  Geometry geometry;
  geometry.n_layers = 1;
  geometry.codec = shape.codec;
  geometry.dim = shape.dim;
  geometry.n_q_heads = shape.n_q_heads;
  geometry.n_kv_heads = shape.n_kv_heads;
  Rig rig({}, geometry);
  kvm_cuda_batch* const batch = rig.batch(rig.batch_params(3, 256, shape.max_query));
  Seq a = make(&rig, 1), b = make(&rig, 2);
  std::vector<Step> steps;
  steps.push_back({&rig, batch, {{&a, 67, 67}}, 1});
  steps.push_back({&rig, batch, {{&a, 1, 1}, {nullptr, 0, 0}, {&b, 40, 7}}, 2});
  steps.push_back({&rig, batch, {{&b, 33, 33}, {&a, 64, 65}}, 3});
  steps.push_back({&rig, batch, {{&a, 0, 2}}, 4});
  run_all(&rig, &steps);
}

INSTANTIATE_TEST_SUITE_P(All, DevicePrefills,
                         ::testing::Values(Shape{"bf16_d128_group4", KVM_CODEC_BF16, 128, 4, 1, 67},
                                           Shape{"fp16_d80", KVM_CODEC_F16, 80, 2, 2, 200},
                                           Shape{"bf16_d192_group3", KVM_CODEC_BF16, 192, 3, 1, 67},
                                           Shape{"int8_d64_group16", KVM_CODEC_I8, 64, 16, 1, 256},
                                           Shape{"fp8_d96", KVM_CODEC_F8E4M3, 96, 2, 1, 100},
                                           Shape{"int8_d192_group2", KVM_CODEC_I8, 192, 2, 1, 100},
                                           Shape{"fp8_d256", KVM_CODEC_F8E4M3, 256, 2, 1, 65536},
                                           Shape{"int8_d80_group3", KVM_CODEC_I8, 80, 3, 1, 100},
                                           Shape{"int4_d64_group16", KVM_CODEC_I4, 64, 16, 1, 256},
                                           Shape{"int4_d128_group4", KVM_CODEC_I4, 128, 4, 1, 67},
                                           Shape{"int4_d256", KVM_CODEC_I4, 256, 2, 1, 65536}),
                         [](const auto& param) { return param.param.name; });

TEST(DeviceTest, PromptsOfLatentRowsAreRefused) {
  FakeOptions options;
  options.emulate = false;
  Rig rig(options, latent_geometry(16));
  kvm_cuda_batch_params params = rig.batch_params(1, 100, 65);
  kvm_cuda_batch* batch = nullptr;
  EXPECT_EQ(kvm_cuda_batch_create(rig.client(), &params, &batch), KVM_ERR_UNSUPPORTED);
  EXPECT_NE(std::string(kvm_last_error()).find("it is at most 64"), std::string::npos)
      << kvm_last_error();
  params.max_query = 64;
  rig.batch(params);
}

// Layer 0 and 1 have a head with sinks and a window, 1 a window of its own, 3 reads the keys of 0.
Geometry mixed_geometry() {
  Geometry geometry;
  geometry.n_layers = 4;
  kvm_policy_params window{};
  window.layer_begin = 0;
  window.n_layers = 2;
  window.kv_head_mask[0] = 2;  // head 1
  window.retention = KVM_RETAIN_SINKS_RECENT;
  window.n_sinks = 5;
  window.n_recent = 70;
  window.slack = 10;
  geometry.policies = {window};
  kvm_layer_params layers[2] = {};
  layers[0].layer_begin = 1;
  layers[0].n_layers = 1;
  layers[0].window = 40;
  layers[1].layer_begin = 3;
  layers[1].n_layers = 1;
  layers[1].kind = KVM_LAYER_ALIAS;
  layers[1].target = 0;
  geometry.layers = {layers[0], layers[1]};
  return geometry;
}

TEST(DeviceTest, HeadsKeepWhatTheirPoliciesSay) {
  const Geometry geometry = mixed_geometry();
  FakeOptions options;
  options.emulate = false;
  Rig rig(options, geometry);
  kvm_cuda_batch* const batch = rig.batch(rig.batch_params(2, 300, 3));
  Seq a = make(&rig, 1), b = make(&rig, 2);
  std::vector<Step> steps;
  steps.push_back({&rig, batch, {{&a, 290, 3}, {&b, 4, 3}}, 1});
  for (uint64_t i = 2; i < 60; ++i) {
    const auto n = static_cast<uint32_t>(1 + i % 7);
    steps.push_back({&rig, batch, {{&a, n, 1 + n % 3}, {&b, 2, 2}}, i});
  }
  run_all(&rig, &steps);
  kvm_seq_info info{};
  info.struct_size = sizeof info;
  ASSERT_EQ(kvm_seq_get_info(rig.client(), a.id, &info), KVM_OK);
  // Layers 0 and 1 share pages of head 0 and pages of head 1; of the latter at most (5 + 70 + 10) /
  // 64 + 3 are there.
  const uint64_t whole = (a.size() + 63) / 64;
  EXPECT_LE(info.n_pages, 2 * whole + 4);
  EXPECT_GT(info.n_entries_dropped, 0u);
  // Rolling back within the slack goes, beyond it does not.
  const uint64_t before = a.size();
  truncate(&rig, &a, before - 10);
  Step again(&rig, batch, {{&a, 3, 3}, {nullptr, 0, 0}}, 99);
  again.run();
  rig.driver().settle();
  again.check("after truncate");
  EXPECT_EQ(kvm_seq_truncate(rig.client(), a.id, 100), KVM_ERR_PARTIAL);
  kvm_seq_id child = 0;
  EXPECT_EQ(kvm_seq_fork(rig.client(), a.id, 100, &child), KVM_ERR_PARTIAL);
}

// Continuous batching, as docs/gpu.md has it: both updates, then the launches of both.
TEST(DeviceTest, PromptsAndDecodesAreTwoBatchesOfOneStep) {
  Rig rig({}, {});
  kvm_cuda_batch* const prompts = rig.batch(rig.batch_params(2, 200, 100));
  kvm_cuda_batch* const decodes = rig.batch(rig.batch_params(2, 4, 1));
  Seq a = make(&rig, 1), b = make(&rig, 2);
  std::vector<Step> steps;
  steps.push_back({&rig, prompts, {{&a, 100, 100}}, 1});
  steps.push_back({&rig, prompts, {{&b, 90, 90}}, 2});
  steps.push_back({&rig, decodes, {{&a, 1, 1}}, 3});
  // b's prompt has ended.
  steps.push_back({&rig, decodes, {{&a, 1, 1}, {&b, 1, 1}}, 4});
  steps.push_back({&rig, prompts, {}, 5});
  const auto begin = [](Step* step) { ASSERT_EQ(step->update(), KVM_OK) << kvm_last_error(); };
  steps[0].run();
  begin(&steps[1]);
  begin(&steps[2]);
  steps[1].launch();
  steps[2].launch();
  begin(&steps[4]);
  begin(&steps[3]);
  steps[3].launch();
  rig.driver().settle();
  for (const Step& step : steps) {
    step.check("a step");
  }
}

// Windows move with each row of a chunk, and an update drops no page that one of its rows sees.
TEST(DeviceTest, ChunksSeeWhatPoliciesAndWindowsSay) {
  Geometry geometry = mixed_geometry();
  geometry.softcap = 3.0f;
  geometry.sink_logits = {1, -INFINITY, 2, 0, 1, 1, 3, -1, 0, 2, 1, 1, 1, 2, -INFINITY, 0};
  Rig rig({}, geometry);
  kvm_cuda_batch* const chunks = rig.batch(rig.batch_params(2, 300, 200));
  kvm_cuda_batch* const decodes = rig.batch(rig.batch_params(2, 4, 1));
  Seq a = make(&rig, 1), b = make(&rig, 2);
  std::vector<Step> steps;
  steps.push_back({&rig, chunks, {{&a, 180, 180}, {&b, 70, 70}}, 1});
  steps.push_back({&rig, decodes, {{&a, 1, 1}, {&b, 1, 1}}, 2});
  steps.push_back({&rig, chunks, {{&b, 20, 20}, {&a, 130, 130}}, 3});
  // Of tokens that were appended before, too.
  steps.push_back({&rig, chunks, {{&a, 2, 70}}, 4});
  run_all(&rig, &steps);
  // What a decode step has dropped a chunk's first rows do not see.
  Step decode(&rig, decodes, {{&a, 1, 1}}, 5);
  decode.run();
  Step late(&rig, chunks, {{&a, 1, 200}}, 6);
  EXPECT_EQ(late.update(), KVM_ERR_PARTIAL) << kvm_last_error();
  rig.driver().settle();
  decode.check("decode");
}

TEST(DeviceTest, BatchesOfChunksHaveNoTrees) {
  Rig rig({}, {});
  kvm_cuda_batch* const batch = rig.batch(rig.batch_params(1, 100, 65));
  const Seq a = make(&rig, 1);
  const uint64_t words[2] = {1, 3};
  kvm_cuda_item item{};
  item.seq = a.id;
  item.n_append = 2;
  item.n_query = 2;
  item.tree_mask = words;
  EXPECT_EQ(kvm_cuda_update(batch, &item, 1, rig.stream()), KVM_ERR_UNSUPPORTED);
  EXPECT_NE(std::string(kvm_last_error()).find("max_query is 65"), std::string::npos)
      << kvm_last_error();
  item.tree_mask = nullptr;
  EXPECT_EQ(kvm_cuda_update(batch, &item, 1, rig.stream()), KVM_OK) << kvm_last_error();
}

// Rows of a tree, as a draft model proposes them: steps that append a tree and ask all of it, and
// cut off what was not accepted.
void speculate(Rig* rig, uint32_t n_steps, uint64_t n_before) {
  kvm_cuda_batch* const batch = rig->batch(rig->batch_params(3, 300, 9));
  Seq a = make(rig, 1), b = make(rig, 2), c = make(rig, 3);
  std::vector<Step> steps;
  steps.push_back({rig, batch, {{&a, static_cast<uint32_t>(n_before), 1}, {&b, 3, 3}}, 1});
  steps.back().run();
  for (uint64_t i = 2; i < 2 + n_steps; ++i) {
    const auto n = static_cast<uint32_t>(1 + i % 9), m = static_cast<uint32_t>(1 + i % 4);
    // A sequence that is all tree, one that grows by trees, and one without.
    steps.push_back({rig,
                     batch,
                     {{&a, n, n, random_tree(n, i)}, {&c, m, m, random_tree(m, ~i)}, {&b, 2, 2}},
                     i});
    steps.back().run();
    truncate(rig, &a, a.size() - std::min<uint64_t>(n / 2, 4));
    truncate(rig, &c, 0);
  }
  rig->driver().settle();
  for (size_t i = 0; i < steps.size(); ++i) {
    steps[i].check("step " + std::to_string(i));
  }
}

TEST(DeviceTest, RowsOfATreeSeeWhatTheirWordsSay) {
  Rig rig({}, {});
  speculate(&rig, 6, 60);
}

// A window or a policy makes each row a request, whose stretches may begin or end within the tree.
TEST(DeviceTest, TreesMeetWindowsAndPolicies) {
  FakeOptions options;
  options.emulate = false;
  Rig rig(options, mixed_geometry());
  speculate(&rig, 40, 20);
  Geometry narrow;
  narrow.layers.resize(1);
  narrow.layers[0].layer_begin = 1;
  narrow.layers[0].n_layers = 1;
  narrow.layers[0].window = 3;
  kvm_policy_params policy{};
  policy.layer_begin = 0;
  policy.n_layers = 1;
  policy.retention = KVM_RETAIN_SINKS_RECENT;
  policy.n_sinks = 5;
  policy.n_recent = 4;
  policy.slack = 9;
  narrow.policies = {policy};
  Rig small(options, narrow);
  speculate(&small, 40, 4);
  options.emulate = true;
  Rig emulated(options, narrow);
  speculate(&emulated, 12, 4);
}

TEST(DeviceTest, BitsBeyondATreeAreRefused) {
  Rig rig({}, {});
  kvm_cuda_batch* const batch = rig.batch(rig.batch_params(1, 100, 64));
  const Seq a = make(&rig, 1);
  std::vector<uint64_t> words(64, ~uint64_t{0});
  kvm_cuda_item item{};
  item.seq = a.id;
  item.n_append = 80;
  item.n_query = 63;
  item.tree_mask = words.data();
  EXPECT_EQ(kvm_cuda_update(batch, &item, 1, rig.stream()), KVM_ERR_INVALID);
  EXPECT_NE(std::string(kvm_last_error()).find("word 0 of tree_mask"), std::string::npos)
      << kvm_last_error();
  EXPECT_EQ(stats_of(rig).n_pages, 0u);
  item.n_query = 64;
  EXPECT_EQ(kvm_cuda_update(batch, &item, 1, rig.stream()), KVM_OK) << kvm_last_error();
}

TEST(DeviceTest, LogitsAreCapped) {
  for (const float softcap : {0.5f, 30.0f}) {
    Geometry geometry;
    geometry.softcap = softcap;
    Rig rig({}, geometry);
    speculate(&rig, 3, 70);
  }
}

// Layers have sinks of their own, also one that reads the keys of another.
TEST(DeviceTest, SinkLogitsCountOnce) {
  for (const bool emulate : {false, true}) {
    SCOPED_TRACE(emulate ? "kernels" : "plain");
    FakeOptions options;
    options.emulate = emulate;
    Geometry geometry = mixed_geometry();
    for (uint32_t n = 0; n < geometry.n_layers * geometry.n_q_heads; ++n) {
      geometry.sink_logits.push_back(n % 5 == 4 ? -INFINITY : 0.5f * static_cast<float>(n) - 1.0f);
    }
    Rig rig(options, geometry);
    kvm_cuda_batch* const batch = rig.batch(rig.batch_params(2, 700, 2));
    Seq a = make(&rig, 1), b = make(&rig, 2);
    std::vector<Step> steps;
    steps.push_back({&rig, batch, {{&a, 30, 1}, {&b, 1, 1}}, 1});
    steps.push_back({&rig, batch, {{&a, 1, 2}}, 2});
    // In pieces: they merge.
    steps.push_back({&rig, batch, {{&a, 650, 2}}, 3});
    steps.push_back({&rig, batch, {{&a, 1, 1}, {&b, 1, 2}}, 4});
    run_all(&rig, &steps);
  }
}

// Logits that are infinite in units of log 2 are the whole sum all the same.
TEST(DeviceTest, HugeSinkLogitsAreTheWholeSum) {
  Geometry geometry;
  geometry.n_layers = 1;
  geometry.sink_logits.assign(geometry.n_q_heads, 3e38f);
  FakeOptions options;
  options.emulate = true;
  Rig rig(options, geometry);
  kvm_cuda_batch* const batch = rig.batch(rig.batch_params(1, 20, 1));
  Seq a = make(&rig, 1);
  Step step(&rig, batch, {{&a, 20, 1}}, 1);
  step.run();
  rig.driver().settle();
  for (uint32_t head = 0; head < geometry.n_q_heads; ++head) {
    EXPECT_EQ(step.outputs(0).o[head * geometry.dim], 0.0f);
    EXPECT_GT(step.outputs(0).lse[head], 1e38f);
    EXPECT_LT(step.outputs(0).lse[head], INFINITY);
  }
}

TEST(DeviceTest, LogWeightsAreAdded) {
  Geometry geometry;
  geometry.n_layers = 1;
  Rig rig({}, geometry);
  kvm_cuda_batch_params params = rig.batch_params(2, 100, 1, 128);
  params.log_weight_stride_head = 128;
  params.log_weight_stride_item = 2 * 128;
  kvm_cuda_batch* const batch = rig.batch(params);
  Seq a = make(&rig, 1);
  kvm_cuda_item items[2] = {};
  items[1].seq = a.id;
  items[1].n_append = 90;
  items[1].n_query = 1;
  ASSERT_EQ(kvm_cuda_update(batch, items, 2, rig.stream()), KVM_OK) << kvm_last_error();
  a.shadow.keys.assign(90, 1);
  std::vector<Rig::Row> rows;
  for (uint64_t p = 0; p < 90; ++p) {
    rows.push_back({1, p});
  }
  const kvm_tensor k = rig.keys(rows, 0, false), v = rig.keys(rows, 0, true);
  ASSERT_EQ(kvm_cuda_append(batch, 0, &k, &v, rig.stream()), KVM_OK) << kvm_last_error();
  std::vector<float> weights(2 * 2 * 128);
  for (size_t i = 0; i < weights.size(); ++i) {
    weights[i] = static_cast<float>(splitmix64(i) % 1000) * 0.004f - 2.0f;
  }
  const std::vector<uint16_t> q = rig.queries(7, 1);
  const Rig::Outputs out = rig.outputs(1);
  kvm_cuda_attend_params attend{};
  attend.struct_size = sizeof attend;
  attend.q = rig.tensor(q, geometry.query_dtype());
  attend.o = out.o_tensor;
  attend.lse = out.lse_tensor;
  EXPECT_EQ(kvm_cuda_attend(batch, &attend, rig.stream()), KVM_ERR_INVALID);
  attend.log_weights = rig.tensor(weights, KVM_DTYPE_F32).buffer;
  ASSERT_EQ(kvm_cuda_attend(batch, &attend, rig.stream()), KVM_OK) << kvm_last_error();
  rig.driver().settle();
  rig.expect_row(out, 0, q, 0, a.shadow, {89}, "weighted", weights.data() + 2 * 128, 128);
}

// --- Forks, graphs, reproducibility -------------------------------------------------------------

TEST(DeviceTest, RangesBehindEverythingMoveNothing) {
  Rig rig({}, Geometry{});
  kvm_cuda_batch* const batch = rig.batch(rig.batch_params(1, 200, 1));
  Seq a = make(&rig, 1);
  Step first(&rig, batch, {{&a, 150, 1}}, 1);
  first.run();
  for (const uint64_t begin : {uint64_t{150}, uint64_t{200}, UINT64_MAX - 10}) {
    ASSERT_EQ(kvm_cuda_spill_range(rig.client(), a.id, begin, UINT64_MAX, rig.stream()), KVM_OK);
    kvm_cuda_seq_info info{};
    info.struct_size = sizeof info;
    ASSERT_EQ(kvm_cuda_get_seq_info(rig.client(), a.id, &info), KVM_OK);
    EXPECT_EQ(info.n_pages, 3u) << begin;
    EXPECT_EQ(info.state, static_cast<uint32_t>(KVM_CUDA_SEQ_HERE)) << begin;
  }
  Step second(&rig, batch, {{&a, 1, 1}}, 2);
  second.run();
  rig.driver().settle();
  second.check("after nothing has moved");
}

// As many kinds of pages as a device has at once, in turns.
TEST(DeviceTest, SlabsOfDroppedSpacesCanBeHadAgain) {
  Rig rig({}, Geometry{});
  for (uint32_t n = 3; n < 140; ++n) {
    const std::string name = "s" + std::to_string(n);
    kvm_space_params space{};
    space.struct_size = sizeof space;
    space.name = name.c_str();
    space.n_layers = n;
    space.n_q_heads = space.n_kv_heads = 1;
    space.head_dim_k = 64;
    space.codec = KVM_CODEC_BF16;
    kvm_space_id id = 0;
    ASSERT_EQ(kvm_space_register(rig.client(), &space, &id), KVM_OK) << n << kvm_last_error();
    // Every second one has had pages; some of them stay for ever.
    if (n % 2 == 0) {
      kvm_cuda_batch_params params = rig.batch_params(1, 64, 1);
      params.space = id;
      kvm_cuda_batch* batch = nullptr;
      ASSERT_EQ(kvm_cuda_batch_create(rig.client(), &params, &batch), KVM_OK) << kvm_last_error();
      kvm_cuda_item item{};
      ASSERT_EQ(kvm_seq_create(rig.client(), id, nullptr, &item.seq), KVM_OK);
      item.n_append = 10;
      ASSERT_EQ(kvm_cuda_update(batch, &item, 1, rig.stream()), KVM_OK) << kvm_last_error();
      ASSERT_EQ(kvm_seq_free(rig.client(), item.seq), KVM_OK);
      kvm_cuda_batch_destroy(batch);
    }
    if (n % 40 != 0) {
      ASSERT_EQ(kvm_space_drop(rig.client(), id), KVM_OK);
    }
  }
}

TEST(DeviceTest, BusyDoesNotWaitForASpill) {
  FakeOptions options;
  options.moves_in_a_thread = false;
  options.emulate = false;
  Rig rig(options, Geometry{}, 256 << 20, 64 << 20);
  kvm_cuda_batch* const batch = rig.batch(rig.batch_params(1, 30000, 1, 30000));
  kvm_cuda_item item{};
  item.seq = rig.create();
  item.n_append = 30000;
  ASSERT_EQ(kvm_cuda_update(batch, &item, 1, rig.stream()), KVM_OK);
  rig.driver().settle();
  ASSERT_EQ(kvm_cuda_spill(rig.client(), item.seq, rig.stream()), KVM_OK);
  const uint64_t n_waits = rig.driver().counts(Operation::kSynchronize);
  item.n_append = 0;
  EXPECT_EQ(kvm_cuda_update(batch, &item, 1, rig.stream()), KVM_ERR_BUSY);
  EXPECT_EQ(kvm_seq_truncate(rig.client(), item.seq, 5), KVM_ERR_BUSY);
  kvm_seq_id child = 0;
  EXPECT_EQ(kvm_seq_fork(rig.client(), item.seq, 5, &child), KVM_ERR_BUSY);
  EXPECT_EQ(rig.driver().counts(Operation::kSynchronize), n_waits);
  EXPECT_EQ(kvm_seq_free(rig.client(), item.seq), KVM_OK);
}

// Entries of page tables go to the device once, and more of them than a message holds in several.
TEST(DeviceTest, PageTablesAreSentOnce) {
  constexpr uint32_t kForks = 64, kBlocks = 300, kTokens = kBlocks * 64;
  constexpr uint64_t kPageBytes = 64 * 64 * 2 * 2;
  constexpr uint64_t kTable = kForks * kBlocks * sizeof(uint32_t);
  static_assert(kForks * kBlocks > 16384);
  FakeOptions options;
  options.emulate = false;
  Geometry geometry;
  geometry.n_layers = geometry.n_q_heads = geometry.n_kv_heads = 1;
  Rig rig(options, geometry, 256 << 20);
  kvm_cuda_batch* const batch = rig.batch(rig.batch_params(kForks, kTokens, 1, kTokens + 900));
  Seq parent = make(&rig, 1);
  Step prompt(&rig, batch, {{&parent, kTokens, 1}}, 1);
  prompt.run();
  std::vector<Seq> forks;
  for (uint32_t i = 0; i < kForks; ++i) {
    forks.push_back(fork_of(&rig, parent, KVM_POSITION_END, 10 + i));
  }
  // Attention of the last fork alone: it takes time.
  const auto step = [&](uint64_t seed, uint32_t n_append, uint64_t* copied) {
    std::vector<Share> shares;
    for (uint32_t i = 0; i < kForks; ++i) {
      shares.push_back({&forks[i], n_append, i + 1 == kForks ? 1u : 0u});
    }
    // Without pages that are copied, and without the 16 bytes that say where a new row goes.
    const auto tables = [&] {
      return rig.driver().copied_bytes() - stats_of(rig).n_pages_copied * kPageBytes;
    };
    const uint64_t before = tables();
    Step one(&rig, batch, shares, seed);
    one.run();
    rig.driver().settle();
    *copied = tables() - before - kForks * n_append * 16;
    one.check("step " + std::to_string(seed));
  };
  uint64_t first = 0, second = 0, third = 0, drafts = 0, swapped = 0;
  step(2, 1, &first);
  EXPECT_GT(first, kTable);
  step(3, 1, &second);
  step(4, 1, &third);
  EXPECT_LT(second, kTable / 2);
  EXPECT_EQ(third, second);
  // What is taken back and appended again is no new entry, unless it begins a page.
  for (Seq& fork : forks) {
    truncate(&rig, &fork, kTokens + 1);
  }
  step(5, 2, &drafts);
  EXPECT_LT(drafts, second + kForks * 64);
  for (Seq& fork : forks) {
    truncate(&rig, &fork, kTokens - 50);
  }
  step(6, 64, &drafts);
  EXPECT_LT(drafts, kTable / 2);
  step(7, 64, &drafts);
  EXPECT_LT(drafts, kTable / 2);
  step(8, 64, &second);
  // Those that change places are written anew.
  std::swap(forks[0], forks[kForks - 1]);
  step(9, 64, &swapped);
  EXPECT_GE(swapped, second + 2 * kBlocks * sizeof(uint32_t));
  EXPECT_LT(swapped, second + 4 * kBlocks * sizeof(uint32_t));
  // As are those that another batch has had in between.
  kvm_cuda_batch* const other = rig.batch(rig.batch_params(1, 1, 1, kTokens + 900));
  Step elsewhere(&rig, other, {{&forks[kForks - 1], 1, 1}}, 10);
  elsewhere.run();
  rig.driver().settle();
  elsewhere.check("elsewhere");
  step(11, 64, &swapped);
  EXPECT_GT(swapped, second + kBlocks * sizeof(uint32_t));
}

TEST(DeviceTest, ForksShareAndCopyOnWrite) {
  FakeOptions options;
  options.emulate = false;
  Rig rig(options, {});
  kvm_cuda_batch* const batch = rig.batch(rig.batch_params(3, 200, 1));
  Seq a = make(&rig, 1);
  std::vector<Step> steps;
  steps.push_back({&rig, batch, {{&a, 100, 1}}, 1});
  steps[0].run();
  Seq b = fork_of(&rig, a, KVM_POSITION_END, 2);
  Seq c = fork_of(&rig, a, 64, 3);
  EXPECT_EQ(stats_of(rig).n_pages, 2u);
  kvm_seq_info info{};
  info.struct_size = sizeof info;
  ASSERT_EQ(kvm_seq_get_info(rig.client(), b.id, &info), KVM_OK);
  EXPECT_EQ(info.bytes_shared, info.bytes);
  Step second(&rig, batch, {{&a, 1, 1}, {&b, 1, 1}, {&c, 30, 1}}, 2);
  second.run();
  // Of the page that a and b end in, whoever is first has a copy. c begins pages of its own.
  EXPECT_EQ(stats_of(rig).n_pages_copied, 1u);
  EXPECT_EQ(stats_of(rig).n_pages, 2u + 1 + 1);
  Step third(&rig, batch, {{&b, 3, 1}, {&a, 2, 1}}, 3);
  third.run();
  rig.driver().settle();
  steps[0].check("before");
  second.check("after the fork");
  third.check("later");
  ASSERT_EQ(kvm_seq_free(rig.client(), a.id), KVM_OK);
  truncate(&rig, &b, 70);
  Step fourth(&rig, batch, {{&b, 1, 1}, {&c, 1, 1}}, 4);
  fourth.run();
  rig.driver().settle();
  fourth.check("after free and truncate");
  ASSERT_EQ(kvm_seq_free(rig.client(), b.id), KVM_OK);
  ASSERT_EQ(kvm_seq_free(rig.client(), c.id), KVM_OK);
  EXPECT_EQ(stats_of(rig).n_pages, 0u);
}

// One capture of all layers serves steps of other sequences, lengths and numbers of rows.
// In a batch of the decode kernel, or of the prefill kernel, which knows no trees.
void serve_every_step(bool prefill) {
  Geometry geometry;
  Rig rig({}, geometry);
  constexpr uint32_t kItems = 3, kRows = 6;
  // A batch that takes prompts too: the graph is for steps of at most kRows rows.
  kvm_cuda_batch* const batch = rig.batch(rig.batch_params(kItems, 200, prefill ? 150 : 2));
  Seq seqs[kItems] = {make(&rig, 1), make(&rig, 2), make(&rig, 3)};

  const uint64_t row_bytes = geometry.n_kv_heads * geometry.dim * 4;
  std::vector<uint8_t*> k, v, q;
  std::vector<Rig::Outputs> out;
  const uint64_t q_bytes = kRows * geometry.n_q_heads * geometry.dim * 2;
  for (uint32_t layer = 0; layer < geometry.n_layers; ++layer) {
    k.push_back(rig.allocate(kRows * row_bytes));
    v.push_back(rig.allocate(kRows * row_bytes));
    q.push_back(rig.allocate(q_bytes));
    out.push_back(rig.outputs(kRows));
  }
  ASSERT_EQ(kvm_cuda_update(batch, nullptr, 0, rig.stream()), KVM_OK) << kvm_last_error();
  rig.driver().begin_capture(rig.stream());
  EXPECT_EQ(kvm_cuda_update(batch, nullptr, 0, rig.stream()), KVM_ERR_UNSUPPORTED);
  EXPECT_EQ(kvm_cuda_spill(rig.client(), seqs[0].id, rig.stream()), KVM_ERR_UNSUPPORTED);
  for (uint32_t layer = 0; layer < geometry.n_layers; ++layer) {
    const kvm_tensor kt = kvm_device_tensor(k[layer], kRows * row_bytes, KVM_DTYPE_F32);
    const kvm_tensor vt = kvm_device_tensor(v[layer], kRows * row_bytes, KVM_DTYPE_F32);
    ASSERT_EQ(kvm_cuda_append(batch, layer, &kt, &vt, rig.stream()), KVM_OK) << kvm_last_error();
    kvm_cuda_attend_params attend{};
    attend.struct_size = sizeof attend;
    attend.layer = layer;
    attend.q = kvm_device_tensor(q[layer], q_bytes, geometry.query_dtype());
    attend.o = out[layer].o_tensor;
    attend.lse = out[layer].lse_tensor;
    ASSERT_EQ(kvm_cuda_attend(batch, &attend, rig.stream()), KVM_OK) << kvm_last_error();
  }
  const FakeDriver::Graph graph = rig.driver().end_capture(rig.stream());

  for (uint64_t step = 1; step <= 70; ++step) {
    if (step % 20 == 0) {
      Seq other = make(&rig, 100 + step);
      Step prompt(&rig, batch, {{&other, 150, prefill ? 90u : 2u}}, step);
      prompt.run();
      rig.driver().settle();
      prompt.check("a prompt between replays");
      ASSERT_EQ(kvm_seq_free(rig.client(), other.id), KVM_OK);
    }
    std::vector<kvm_cuda_item> items;
    std::vector<Rig::Row> rows;
    std::vector<uint64_t> trees[kItems];
    for (uint32_t i = 0; i < kItems; ++i) {
      kvm_cuda_item item{};
      const uint64_t chance = splitmix64(step * 10 + i);
      if (chance % 4 != 0 || seqs[i].size() == 0) {
        item.seq = seqs[i].id;
        item.n_append = 1 + static_cast<uint32_t>(chance >> 8) % 2;
        item.append_row = static_cast<uint32_t>(rows.size());
        item.n_query = static_cast<uint32_t>(chance >> 16) % (item.n_append + 1);
        item.query_row = i * 2;
        if (item.n_query != 0 && chance >> 60 < 8 && !prefill) {
          trees[i] = random_tree(item.n_query, chance);
          item.tree_mask = trees[i].data();
        }
        for (uint32_t t = 0; t < item.n_append; ++t) {
          rows.push_back({seqs[i].key, seqs[i].size()});
          seqs[i].shadow.keys.push_back(seqs[i].key);
        }
      }
      items.push_back(item);
    }
    ASSERT_EQ(kvm_cuda_update(batch, items.data(), kItems, rig.stream()), KVM_OK)
        << kvm_last_error();
    std::vector<std::vector<uint16_t>> values;
    for (uint32_t layer = 0; layer < geometry.n_layers; ++layer) {
      values.push_back(rig.queries(step * 100 + layer, kRows));
      std::memcpy(q[layer], values[layer].data(), q_bytes);
      for (size_t r = 0; r < rows.size(); ++r) {
        for (uint32_t n = 0; n < geometry.n_kv_heads * geometry.dim; ++n) {
          const uint32_t head = n / geometry.dim, i = n % geometry.dim;
          reinterpret_cast<float*>(k[layer] + r * row_bytes)[n] =
              stored_number(rows[r].key, layer, head, rows[r].position, i, false);
          reinterpret_cast<float*>(v[layer] + r * row_bytes)[n] =
              stored_number(rows[r].key, layer, head, rows[r].position, i, true);
        }
      }
    }
    rig.driver().replay(graph, rig.stream());
    rig.driver().settle();
    for (uint32_t layer = 0; step % 6 == 0 && layer < geometry.n_layers; ++layer) {
      for (uint32_t i = 0; i < kItems; ++i) {
        for (uint32_t j = 0; j < items[i].n_query; ++j) {
          rig.expect_row(out[layer], items[i].query_row + j, values[layer], layer, seqs[i].shadow,
                         Share{&seqs[i], 0, items[i].n_query, trees[i]}.query(seqs[i].size(), j),
                         "replay " + std::to_string(step));
        }
      }
    }
  }
}

TEST(DeviceTest, ACapturedGraphServesEveryStep) { serve_every_step(false); }
TEST(DeviceTest, ACapturedGraphServesEveryChunk) { serve_every_step(true); }

TEST(DeviceTest, ReproducibleChunksGiveTheSameBits) {
  FakeOptions options;
  Geometry geometry;
  geometry.n_layers = 1;
  geometry.n_q_heads = 2;
  geometry.n_kv_heads = 1;
  std::vector<float> results[2];
  for (uint32_t n = 0; n < 2; ++n) {
    options.blocks = n == 0 ? 2 : 7;
    Rig rig(options, geometry);
    kvm_cuda_batch_params params = rig.batch_params(3, 6000, 100, 8000);
    params.flags = KVM_CUDA_REPRODUCIBLE;
    kvm_cuda_batch* const batch = rig.batch(params);
    Seq a = make(&rig, 1), b = make(&rig, 2);
    // One block of rows, which is cut at token 4,096.
    std::vector<Share> shares = {{&a, 4500, 2}};
    if (n == 1) {
      shares.push_back({&b, 80, 80});
    }
    Step step(&rig, batch, shares, 5);
    step.run();
    rig.driver().settle();
    step.check("reproducible");
    const uint32_t n_rows = 2 * geometry.n_q_heads;
    results[n].assign(step.outputs(0).o, step.outputs(0).o + n_rows * geometry.dim);
    results[n].insert(results[n].end(), step.outputs(0).lse, step.outputs(0).lse + n_rows);
  }
  EXPECT_EQ(std::memcmp(results[0].data(), results[1].data(), results[0].size() * 4), 0);
}

TEST(DeviceTest, ReproducibleBatchesGiveTheSameBits) {
  FakeOptions options;
  options.emulate = true;
  Geometry geometry;
  geometry.n_layers = 1;
  geometry.n_q_heads = 2;
  geometry.n_kv_heads = 1;
  std::vector<float> results[2];
  for (uint32_t n = 0; n < 2; ++n) {
    options.blocks = n == 0 ? 2 : 7;
    Rig rig(options, geometry);
    kvm_cuda_batch_params params = rig.batch_params(3, 400, 4);
    params.flags = KVM_CUDA_REPRODUCIBLE;
    kvm_cuda_batch* const batch = rig.batch(params);
    Seq a = make(&rig, 1), b = make(&rig, 2);
    std::vector<Share> shares = {{&a, 300, 4, random_tree(4, 1)}};
    if (n == 1) {
      shares.push_back({&b, 80, 1});
    }
    Step step(&rig, batch, shares, 5);
    step.run();
    rig.driver().settle();
    step.check("reproducible");
    const uint32_t n_rows = 4 * geometry.n_q_heads;
    results[n].assign(step.outputs(0).o, step.outputs(0).o + n_rows * geometry.dim);
    results[n].insert(results[n].end(), step.outputs(0).lse, step.outputs(0).lse + n_rows);
  }
  // Of the first sequence's rows: the second one's queries differ.
  EXPECT_EQ(std::memcmp(results[0].data(), results[1].data(), results[0].size() * 4), 0);
}

// --- Tails of long launches ----------------------------------------------------------------------

Geometry long_geometry(uint32_t n_layers) {
  Geometry geometry;
  geometry.n_layers = n_layers;
  geometry.n_q_heads = 2;
  geometry.n_kv_heads = 2;
  return geometry;
}

// So that two blocks have a tail, and seven have not.
constexpr uint32_t kLongTokens = 17000;

// Attends of all layers of a batch, captured: to the same queries and results in each replay.
struct CapturedAttends {
  std::vector<std::vector<uint16_t>> q;
  std::vector<Rig::Outputs> out;
  FakeDriver::Graph graph;

  CapturedAttends(Rig* rig, kvm_cuda_batch* batch, uint64_t seed) {
    rig->driver().begin_capture(rig->stream());
    for (uint32_t layer = 0; layer < rig->geometry().n_layers; ++layer) {
      q.push_back(rig->queries(seed + layer, 1));
      out.push_back(rig->outputs(1));
      kvm_cuda_attend_params attend{};
      attend.struct_size = sizeof attend;
      attend.layer = layer;
      attend.q = rig->tensor(q.back(), rig->geometry().query_dtype());
      attend.o = out.back().o_tensor;
      attend.lse = out.back().lse_tensor;
      EXPECT_EQ(kvm_cuda_attend(batch, &attend, rig->stream()), KVM_OK) << kvm_last_error();
    }
    graph = rig->driver().end_capture(rig->stream());
  }

  // Replays it for the last token of a sequence, which nobody has appended to since.
  void attend_to(Rig* rig, kvm_cuda_batch* batch, const Seq& seq, const std::string& where) {
    kvm_cuda_item item{};
    item.seq = seq.id;
    item.n_query = 1;
    ASSERT_EQ(kvm_cuda_update(batch, &item, 1, rig->stream()), KVM_OK) << kvm_last_error();
    replay(rig, seq, where);
  }
  void replay(Rig* rig, const Seq& seq, const std::string& where) {
    const size_t n = rig->geometry().n_q_heads * rig->geometry().dim;
    for (const Rig::Outputs& of_layer : out) {
      std::fill(of_layer.o, of_layer.o + n, NAN);
    }
    rig->driver().replay(graph, rig->stream());
    rig->driver().settle();
    for (uint32_t layer = 0; layer < out.size(); ++layer) {
      rig->expect_row(out[layer], 0, q[layer], layer, seq.shadow, {seq.size() - 1}, where);
    }
  }
};

// Layers of one plan, launches of one graph, graphs of two batches and steps without a tail all
// find the count that they begin with.
void take_tails(bool emulate) {
  FakeOptions options;
  options.emulate = emulate;
  options.blocks = 2;
  Rig rig(options, long_geometry(emulate ? 1 : 2));
  const kvm_cuda_batch_params params = rig.batch_params(1, kLongTokens, 1, kLongTokens + 100);
  kvm_cuda_batch* const batches[2] = {rig.batch(params), rig.batch(params)};
  Seq a = make(&rig, 1), b = make(&rig, 2);
  // Not captured.
  Step prompt(&rig, batches[0], {{&a, kLongTokens, 1}}, 1),
      beside(&rig, batches[1], {{&b, 90, 1}}, 2);
  prompt.run();
  beside.run();
  rig.driver().settle();
  prompt.check("prompt");
  beside.check("without a tail");
  uint64_t n_pieces = rig.driver().n_tail_pieces();
  EXPECT_GT(n_pieces, rig.geometry().n_layers);
  CapturedAttends first(&rig, batches[0], 10), second(&rig, batches[1], 20);
  first.attend_to(&rig, batches[0], a, "first batch");
  EXPECT_GT(rig.driver().n_tail_pieces(), n_pieces);
  if (emulate) {
    first.replay(&rig, a, "first batch again");
    return;
  }
  for (uint32_t turn = 0; turn < 2; ++turn) {
    second.attend_to(&rig, batches[1], a, "second batch");
    first.replay(&rig, a, "first batch again");
    n_pieces = rig.driver().n_tail_pieces();
    first.attend_to(&rig, batches[0], b, "a short step in the same graph");
    EXPECT_EQ(rig.driver().n_tail_pieces(), n_pieces);
    first.attend_to(&rig, batches[0], a, "a long one behind it");
    EXPECT_GT(rig.driver().n_tail_pieces(), n_pieces);
  }
}

TEST(DeviceTest, LaunchesTakeTheirTails) { take_tails(true); }
TEST(DeviceTest, GraphsAndBatchesTakeTheirTails) { take_tails(false); }

TEST(DeviceTest, ReproducibleBitsAreTheSameWithATail) {
  FakeOptions options;
  options.emulate = true;
  std::vector<float> results[2];
  for (uint32_t n = 0; n < 2; ++n) {
    options.blocks = n == 0 ? 2 : 7;
    Rig rig(options, long_geometry(1));
    kvm_cuda_batch_params params = rig.batch_params(1, kLongTokens, 1, kLongTokens);
    params.flags = KVM_CUDA_REPRODUCIBLE;
    kvm_cuda_batch* const batch = rig.batch(params);
    Seq a = make(&rig, 1);
    Step step(&rig, batch, {{&a, kLongTokens, 1}}, 5);
    step.run();
    rig.driver().settle();
    EXPECT_EQ(rig.driver().n_tail_pieces() != 0, n == 0);
    const Rig::Outputs& out = step.outputs(0);
    const uint32_t n_heads = rig.geometry().n_q_heads;
    results[n].assign(out.o, out.o + n_heads * rig.geometry().dim);
    results[n].insert(results[n].end(), out.lse, out.lse + n_heads);
  }
  EXPECT_EQ(std::memcmp(results[0].data(), results[1].data(), results[0].size() * 4), 0);
}

// --- Pages, for kernels of the engine ------------------------------------------------------------

kvm_cuda_pages pages_of(kvm_cuda_batch* batch, uint32_t layer, uint32_t head_class) {
  kvm_cuda_pages pages{};
  pages.struct_size = sizeof pages;
  EXPECT_EQ(kvm_cuda_batch_get_pages(batch, layer, head_class, &pages), KVM_OK) << kvm_last_error();
  return pages;
}

std::vector<int32_t> indices_of(kvm_cuda_batch* batch, uint32_t layer, uint32_t head_class,
                                uint32_t item, uint64_t* n_tokens) {
  std::vector<int32_t> indices(64);
  EXPECT_EQ(kvm_cuda_batch_get_indices(batch, layer, head_class, item, indices.data(),
                                       indices.size(), n_tokens),
            KVM_OK)
      << kvm_last_error();
  indices.resize((*n_tokens + 63) / 64);
  return indices;
}

std::vector<uint32_t> heads_of(const kvm_cuda_pages& pages) {
  std::vector<uint32_t> heads;
  for (uint32_t head = 0; head < 128; ++head) {
    if ((pages.kv_head_mask[head / 64] >> head % 64 & 1) != 0) {
      heads.push_back(head);
    }
  }
  return heads;
}

// FlashInfer's include/flashinfer/page.cuh: a page table in CSR form, and strides in elements.
struct FlashInferCache {
  std::vector<int32_t> indices, indptr{0}, last_page_len;
  uint32_t page_size = 0, stride_page = 0, stride_n = 0, stride_h = 0;
  const uint16_t* k_data = nullptr;
  const uint16_t* v_data = nullptr;

  // REQUIRES: the token is there.
  const uint16_t* row(bool is_v, uint32_t item, uint32_t token, uint32_t head) const {
    const auto page = static_cast<uint32_t>(indptr[item]) + token / page_size;
    EXPECT_LT(page, static_cast<uint32_t>(indptr[item + 1]));
    EXPECT_TRUE(page + 1 < static_cast<uint32_t>(indptr[item + 1]) ||
                token % page_size < static_cast<uint32_t>(last_page_len[item]));
    return (is_v ? v_data : k_data) + static_cast<size_t>(indices[page]) * stride_page +
           size_t{head} * stride_h + size_t{token % page_size} * stride_n;
  }
};

TEST(DeviceTest, PagesAreWhatFlashInferReads) {
  for (const uint32_t codec : {KVM_CODEC_BF16, KVM_CODEC_F16}) {
    FakeOptions options;
    options.emulate = false;
    Geometry geometry;
    geometry.codec = codec;
    geometry.n_kv_heads = 4;
    Rig rig(options, geometry);
    kvm_cuda_batch* const batch = rig.batch(rig.batch_params(3, 300, 1));
    Seq a = make(&rig, 1), b = make(&rig, 2);
    Step first(&rig, batch, {{&a, 130, 1}, {nullptr, 0, 0}, {&b, 64, 1}}, 1);
    first.run();
    Step second(&rig, batch, {{&a, 60, 1}, {nullptr, 0, 0}, {&b, 1, 1}}, 2);
    second.run();
    rig.driver().settle();
    for (uint32_t layer = 0; layer < geometry.n_layers; ++layer) {
      const kvm_cuda_pages pages = pages_of(batch, layer, 0);
      EXPECT_EQ(pages.n_classes, 1u);
      EXPECT_EQ(pages.n_heads, 4u);
      EXPECT_EQ(pages.head_dim, geometry.dim);
      EXPECT_EQ(pages.codec, codec);
      EXPECT_EQ(pages.k_scales, 0u);
      FlashInferCache cache;
      cache.page_size = pages.page_tokens;
      cache.stride_page = static_cast<uint32_t>(pages.page_stride / 2);
      cache.stride_h = static_cast<uint32_t>(pages.head_stride / 2);
      cache.stride_n = static_cast<uint32_t>(pages.token_stride / 2);
      cache.k_data = reinterpret_cast<const uint16_t*>(static_cast<uintptr_t>(pages.k));
      cache.v_data = reinterpret_cast<const uint16_t*>(static_cast<uintptr_t>(pages.v));
      // vLLM: a row of the block table for each item; the device's own, without the high bits.
      const auto* const table =
          reinterpret_cast<const uint8_t*>(static_cast<uintptr_t>(pages.table));
      for (uint32_t item = 0; item < 3; ++item) {
        uint64_t n_tokens = 0;
        const std::vector<int32_t> indices = indices_of(batch, layer, 0, item, &n_tokens);
        EXPECT_EQ(n_tokens, item == 0 ? 190u : item == 1 ? 0u : 65u);
        for (size_t page = 0; page < indices.size(); ++page) {
          EXPECT_LT(static_cast<uint64_t>(indices[page]), pages.n_pages);
          uint32_t entry = 0;
          std::memcpy(&entry, table + item * pages.table_stride + page * 4, 4);
          EXPECT_EQ(entry & KVM_CUDA_INDEX_MASK, static_cast<uint32_t>(indices[page]));
        }
        cache.indices.insert(cache.indices.end(), indices.begin(), indices.end());
        cache.indptr.push_back(static_cast<int32_t>(cache.indices.size()));
        cache.last_page_len.push_back(
            n_tokens == 0 ? 0 : static_cast<int32_t>((n_tokens - 1) % 64 + 1));
      }
      for (const auto& [item, seq] : {std::pair{0u, &a}, std::pair{2u, &b}}) {
        for (uint32_t token = 0; token < seq->size(); ++token) {
          for (uint32_t head = 0; head < 4; ++head) {
            for (const bool is_v : {false, true}) {
              const uint16_t* const row = cache.row(is_v, item, token, head);
              for (uint32_t i = 0; i < geometry.dim; ++i) {
                const float x = stored_number(seq->key, layer, head, token, i, is_v);
                ASSERT_EQ(row[i], codec == KVM_CODEC_BF16 ? f32_to_bf16(x) : f32_to_f16(x));
              }
            }
          }
        }
      }
    }
    second.check("attended");
  }
}

// [n_pages, 64, 576] and nothing else: values are the first channels.
TEST(DeviceTest, LatentPagesAreWhatMlaKernelsRead) {
  FakeOptions options;
  options.emulate = false;
  Rig rig(options, latent_geometry(16));
  kvm_cuda_batch* const batch = rig.batch(rig.batch_params(1, 300, 1));
  Seq a = make(&rig, 1);
  Step step(&rig, batch, {{&a, 130, 1}}, 1);
  step.run();
  rig.driver().settle();
  for (uint32_t layer = 0; layer < 2; ++layer) {
    const kvm_cuda_pages pages = pages_of(batch, layer, 0);
    EXPECT_EQ(pages.v, pages.k);
    EXPECT_EQ(pages.head_dim, 576u);
    EXPECT_EQ(pages.head_dim_v, 512u);
    EXPECT_EQ(pages.token_stride, 576u * 2);
    EXPECT_EQ(pages.page_stride, 2u * 64 * 576 * 2);  // of both layers
    uint64_t n_tokens = 0;
    const std::vector<int32_t> indices = indices_of(batch, layer, 0, 0, &n_tokens);
    ASSERT_EQ(n_tokens, 130u);
    for (uint32_t token = 0; token < n_tokens; ++token) {
      const auto* const row = reinterpret_cast<const uint16_t*>(static_cast<uintptr_t>(
          pages.k + static_cast<uint64_t>(indices[token / 64]) * pages.page_stride +
          token % 64 * pages.token_stride));
      for (uint32_t i = 0; i < 576; ++i) {
        ASSERT_EQ(row[i], f32_to_bf16(stored_number(1, layer, 0, token, i, false)));
      }
    }
  }
  step.check("attended");
}

TEST(DeviceTest, LatentRowsAreAppendedWithoutValues) {
  FakeOptions options;
  options.emulate = false;
  Rig rig(options, latent_geometry(64));
  kvm_cuda_batch* const batch = rig.batch(rig.batch_params(1, 4, 1));
  Seq a = make(&rig, 1);
  Step step(&rig, batch, {{&a, 4, 1}}, 1);
  ASSERT_EQ(step.update(), KVM_OK) << kvm_last_error();
  const kvm_tensor k = rig.keys({{1, 0}, {1, 1}, {1, 2}, {1, 3}}, 0, false);
  EXPECT_EQ(kvm_cuda_append(batch, 0, &k, &k, rig.stream()), KVM_ERR_INVALID);
  EXPECT_NE(std::string(kvm_last_error()).find("KVM_SPACE_V_IN_K"), std::string::npos);
  EXPECT_EQ(kvm_cuda_append(batch, 0, &k, nullptr, rig.stream()), KVM_OK) << kvm_last_error();
  ASSERT_EQ(step.launch(), KVM_OK) << kvm_last_error();
  rig.driver().settle();
  step.check("attended");

  Rig plain(options, {});
  kvm_cuda_batch* const other = plain.batch(plain.batch_params(1, 1, 1));
  Seq b = make(&plain, 1);
  Step one(&plain, other, {{&b, 1, 1}}, 1);
  ASSERT_EQ(one.update(), KVM_OK) << kvm_last_error();
  const kvm_tensor row = plain.keys({{1, 0}}, 0, false);
  EXPECT_EQ(kvm_cuda_append(other, 0, &row, nullptr, plain.stream()), KVM_ERR_INVALID);
  plain.driver().settle();
}

// Drafts of trees, forks, policies, reproducible cuts: what latent rows share with others.
TEST(DeviceTest, LatentRowsTakeDraftsForksAndWindows) {
  for (const bool emulate : {false, true}) {
    FakeOptions options;
    options.emulate = emulate;
    Geometry geometry = latent_geometry(16);
    geometry.n_layers = 3;
    geometry.softcap = 20;
    kvm_policy_params window{};
    window.layer_begin = 1;
    window.n_layers = 1;
    window.retention = KVM_RETAIN_SINKS_RECENT;
    window.n_sinks = 4;
    window.n_recent = 70;
    geometry.policies = {window};
    Rig rig(options, geometry);
    kvm_cuda_batch_params params = rig.batch_params(2, 200, 6);
    params.flags = emulate ? uint32_t{KVM_CUDA_REPRODUCIBLE} : 0;
    kvm_cuda_batch* const batch = rig.batch(params);
    Seq a = make(&rig, 1);
    std::vector<Step> steps;
    steps.push_back({&rig, batch, {{&a, 150, 1}}, 1});
    steps[0].run();
    Seq b = fork_of(&rig, a, 140, 2);
    steps.push_back({&rig, batch, {{&a, 5, 5, random_tree(5, 3)}, {&b, 2, 2}}, 2});
    steps[1].run();
    rig.driver().settle();
    steps[0].check("prompt");
    steps[1].check("draft");
    truncate(&rig, &a, 152);
    Step last(&rig, batch, {{&a, 1, 1}, {&b, 6, 6, random_tree(6, 4)}}, 3);
    last.run();
    rig.driver().settle();
    last.check("next");
  }
}

// Encodes a row of int4: the first one of a page, for pages are what there is an encoder of.
void write_int4_row(const std::vector<float>& x, uint8_t* row, void* params) {
  const codecs::Codec& codec = codecs::codec_of(codecs::kI4);
  const auto dim = static_cast<uint32_t>(x.size());
  std::vector<float> page(kPageTokens * x.size());
  std::copy(x.begin(), x.end(), page.begin());
  std::vector<uint8_t> codes(codec.head_rows_bytes(dim));
  std::vector<uint16_t> all(codec.n_scales(dim));
  ASSERT_TRUE(codecs::encode_low_bits(codec, page.data(), dim, nullptr, codes.data(), all.data()));
  std::memcpy(row, codes.data(), codec.row_bytes(dim));
  std::memcpy(params, all.data(), dim / 16);
}

// An engine that writes and reads rows by itself: with scales, and of classes of heads of which one
// drops pages.
TEST(DeviceTest, PagesMayBeWrittenByTheEngine) {
  for (const uint32_t codec : {KVM_CODEC_BF16, KVM_CODEC_I8, KVM_CODEC_I4}) {
    FakeOptions options;
    options.emulate = false;
    Geometry geometry = mixed_geometry();
    geometry.codec = codec;
    Rig rig(options, geometry);
    kvm_cuda_batch* const batch = rig.batch(rig.batch_params(1, 400, 1));
    Seq a = make(&rig, 1);
    Step first(&rig, batch, {{&a, 300, 1}}, 1);
    first.run();
    // Pages that the policy has dropped go when the next step begins.
    Step second(&rig, batch, {{&a, 20, 1}}, 2);
    ASSERT_EQ(second.update(), KVM_OK) << kvm_last_error();
    rig.driver().settle();
    uint32_t n_dropped = 0, n_rows = 0;
    for (const uint32_t layer : {0u, 1u, 2u}) {
      const uint32_t n_classes = pages_of(batch, layer, 0).n_classes;
      EXPECT_EQ(n_classes, layer == 2 ? 1u : 2u);
      for (uint32_t head_class = 0; head_class < n_classes; ++head_class) {
        const kvm_cuda_pages pages = pages_of(batch, layer, head_class);
        uint64_t n_tokens = 0;
        const std::vector<int32_t> indices = indices_of(batch, layer, head_class, 0, &n_tokens);
        n_dropped += static_cast<uint32_t>(std::count(indices.begin(), indices.end(), -1));
        const std::vector<uint32_t> heads = heads_of(pages);
        ASSERT_EQ(heads.size(), pages.n_heads);
        for (uint64_t token = n_tokens - 20; token < n_tokens; ++token) {
          const int32_t page = indices[token / 64];
          ASSERT_GE(page, 0);
          for (size_t h = 0; h < heads.size(); ++h) {
            for (const bool is_v : {false, true}) {
              const uint64_t in_page = static_cast<uint64_t>(page) * pages.page_stride;
              auto* const row = reinterpret_cast<uint8_t*>(
                  static_cast<uintptr_t>((is_v ? pages.v : pages.k) + in_page +
                                         h * pages.head_stride + token % 64 * pages.token_stride));
              std::vector<float> x(geometry.dim);
              for (uint32_t i = 0; i < geometry.dim; ++i) {
                x[i] = stored_number(1, layer, heads[h], token, i, is_v);
              }
              const uint64_t params_at =
                  (is_v ? pages.v_scales : pages.k_scales) + in_page + h * pages.scale_head_stride;
              if (codec == KVM_CODEC_I8) {
                const uint16_t scale =
                    codecs::encode_row(x.data(), geometry.dim, CodecId::kI8, row);
                std::memcpy(
                    reinterpret_cast<void*>(static_cast<uintptr_t>(params_at + token % 64 * 2)),
                    &scale, 2);
              } else if (codec == KVM_CODEC_I4) {
                write_int4_row(x, row,
                               reinterpret_cast<void*>(static_cast<uintptr_t>(
                                   params_at + token % 64 * geometry.dim / 16)));
              } else {
                for (uint32_t i = 0; i < geometry.dim; ++i) {
                  reinterpret_cast<uint16_t*>(row)[i] = f32_to_bf16(x[i]);
                }
              }
              ++n_rows;
            }
          }
        }
      }
    }
    EXPECT_GT(n_dropped, 0u);
    EXPECT_EQ(n_rows, 3u * 2 * 20 * 2);
    ASSERT_EQ(second.launch(false), KVM_OK) << kvm_last_error();
    rig.driver().settle();
    second.check("own rows");

    kvm_cuda_pages pages{};
    EXPECT_EQ(kvm_cuda_batch_get_pages(batch, 0, 0, &pages), KVM_ERR_INVALID);  // struct_size
    pages.struct_size = sizeof pages;
    EXPECT_EQ(kvm_cuda_batch_get_pages(batch, 0, 2, &pages), KVM_ERR_INVALID);
    EXPECT_EQ(kvm_cuda_batch_get_pages(batch, 4, 0, &pages), KVM_ERR_INVALID);
    std::vector<int32_t> few(4);
    uint64_t n_tokens = 0;
    EXPECT_EQ(kvm_cuda_batch_get_indices(batch, 0, 0, 0, few.data(), 4, &n_tokens),
              KVM_ERR_INVALID);
    EXPECT_EQ(kvm_cuda_batch_get_indices(batch, 0, 0, 1, few.data(), 4, &n_tokens),
              KVM_ERR_INVALID);
    truncate(&rig, &a, 319);
    few.resize(8);
    EXPECT_EQ(kvm_cuda_batch_get_indices(batch, 0, 0, 0, few.data(), 8, &n_tokens),
              KVM_ERR_INVALID);
  }
}

// --- Between device and host --------------------------------------------------------------------

TEST(DeviceTest, SpilledSequencesComeBack) {
  for (const uint32_t n_kv_heads : {1u, 4u}) {  // pages of 16 KiB, gathered, and of 64 KiB
    FakeOptions options;
    options.emulate = false;
    options.eagerness = n_kv_heads == 1 ? 0 : 3;
    Geometry geometry;
    geometry.n_kv_heads = n_kv_heads;
    Rig rig(options, geometry);
    kvm_cuda_batch* const batch = rig.batch(rig.batch_params(3, 600, 1));
    Seq a = make(&rig, 1), b = make(&rig, 2);
    // In turns, so that pages of one do not lie side by side.
    std::vector<Step> steps;
    for (uint64_t i = 0; i < 12; ++i) {
      steps.push_back({&rig, batch, {{&a, 50, 1}, {&b, 40, 1}}, i + 1});
    }
    run_all(&rig, &steps);
    const uint64_t n_pages = stats_of(rig).n_pages;
    ASSERT_EQ(kvm_cuda_spill(rig.client(), a.id, rig.stream()), KVM_OK) << kvm_last_error();
    ASSERT_EQ(kvm_cuda_spill(rig.client(), a.id, rig.stream()), KVM_OK) << kvm_last_error();
    EXPECT_EQ(stats_of(rig).n_spilled, 1u);
    kvm_cuda_item item{};
    item.seq = a.id;
    item.n_query = 1;
    EXPECT_EQ(kvm_cuda_update(batch, &item, 1, rig.stream()), KVM_ERR_BUSY);
    EXPECT_EQ(kvm_seq_truncate(rig.client(), a.id, 1), KVM_ERR_BUSY);
    kvm_seq_id child = 0;
    EXPECT_EQ(kvm_seq_fork(rig.client(), a.id, 1, &child), KVM_ERR_BUSY);
    // Others go on meanwhile, in pages that were a's as soon as these are needed.
    Seq c = make(&rig, 3);
    Step meanwhile(&rig, batch, {{&b, 1, 1}, {&c, 500, 1}}, 50);
    meanwhile.run();
    ASSERT_EQ(kvm_cuda_fetch(rig.client(), a.id, rig.stream()), KVM_OK) << kvm_last_error();
    ASSERT_EQ(kvm_cuda_fetch(rig.client(), a.id, rig.stream()), KVM_OK) << kvm_last_error();
    Step after(&rig, batch, {{&a, 1, 1}, {&c, 1, 1}}, 51);
    after.run();
    rig.driver().settle();
    meanwhile.check("meanwhile");
    after.check("fetched");
    const kvm_cuda_stats stats = stats_of(rig);
    EXPECT_EQ(stats.spilled_bytes, stats.fetched_bytes);
    EXPECT_EQ(stats.spilled_bytes, 2 * 10 * n_kv_heads * 64 * geometry.dim * 4);
    EXPECT_GE(n_pages, 10u);
    // 10 pages of two layers each way. Small ones in one piece; the table of a batch is smaller,
    // and no matter.
    EXPECT_LE(stats.n_copies, n_kv_heads == 1 && !has_server() ? 2u : 40u);
    for (const kvm_seq_id id : {a.id, b.id, c.id}) {
      ASSERT_EQ(kvm_seq_free(rig.client(), id), KVM_OK);
    }
  }
}

kvm_cuda_seq_info whereabouts(const Rig& rig, const Seq& seq) {
  kvm_cuda_seq_info info{};
  info.struct_size = sizeof info;
  EXPECT_EQ(kvm_cuda_get_seq_info(rig.client(), seq.id, &info), KVM_OK) << kvm_last_error();
  return info;
}

TEST(DeviceTest, PagesOfARangeLeaveAndComeBack) {
  for (const bool in_a_thread : {false, true}) {
    if (has_server() && !in_a_thread) {
      continue;  // a server's moves have their thread
    }
    FakeOptions options;
    options.emulate = false;
    options.moves_in_a_thread = in_a_thread;
    Rig rig(options, {});
    kvm_cuda_batch* const batch = rig.batch(rig.batch_params(2, 600, 1));
    Seq a = make(&rig, 1), b = make(&rig, 2);
    Step first(&rig, batch, {{&a, 300, 1}, {&b, 10, 1}}, 1);
    first.run();
    // Five pages. Whole ones of [70, 200): the third.
    ASSERT_EQ(kvm_cuda_spill_range(rig.client(), a.id, 70, 200, rig.stream()), KVM_OK);
    kvm_cuda_seq_info info = whereabouts(rig, a);
    EXPECT_EQ(info.n_pages, 4u);
    EXPECT_EQ(info.n_host_pages, 1u);
    EXPECT_EQ(info.failure, 0u);
    if (!in_a_thread) {
      EXPECT_EQ(info.state, static_cast<uint32_t>(KVM_CUDA_SEQ_LEAVING));
      EXPECT_EQ(info.n_waiting_pages, 1u);
    }
    kvm_cuda_item item{};
    item.seq = a.id;
    item.n_query = 1;
    EXPECT_EQ(kvm_cuda_update(batch, &item, 1, rig.stream()), KVM_ERR_BUSY);
    if (!in_a_thread) {
      // Nobody waits to hear that it leaves.
      EXPECT_EQ(whereabouts(rig, a).state, static_cast<uint32_t>(KVM_CUDA_SEQ_LEAVING));
    }
    // To the end: the last page has 44 tokens. What is away stays so.
    ASSERT_EQ(kvm_cuda_spill_range(rig.client(), a.id, 128, KVM_POSITION_END, rig.stream()),
              KVM_OK);
    EXPECT_EQ(whereabouts(rig, a).n_host_pages, 3u);
    // Nothing in between: a page is not torn.
    ASSERT_EQ(kvm_cuda_spill_range(rig.client(), a.id, 1, 64, rig.stream()), KVM_OK);
    EXPECT_EQ(whereabouts(rig, a).n_host_pages, 3u);
    EXPECT_EQ(stats_of(rig).n_spilled, 1u);
    // Back in two parts, the first by one token.
    ASSERT_EQ(kvm_cuda_fetch_range(rig.client(), a.id, 255, 257, rig.stream()), KVM_OK);
    EXPECT_EQ(whereabouts(rig, a).n_host_pages, 1u);
    EXPECT_EQ(kvm_cuda_update(batch, &item, 1, rig.stream()), KVM_ERR_BUSY);
    ASSERT_EQ(kvm_cuda_fetch_range(rig.client(), a.id, 0, KVM_POSITION_END, rig.stream()), KVM_OK);
    info = whereabouts(rig, a);
    EXPECT_EQ(info.n_host_pages, 0u);
    EXPECT_EQ(info.n_pages, 5u);
    if (!in_a_thread) {
      EXPECT_EQ(info.state, static_cast<uint32_t>(KVM_CUDA_SEQ_COMING));
    }
    Step second(&rig, batch, {{&b, 1, 1}, {&a, 1, 1}}, 2);
    second.run();
    EXPECT_EQ(whereabouts(rig, a).state, static_cast<uint32_t>(KVM_CUDA_SEQ_HERE));
    EXPECT_EQ(stats_of(rig).n_spilled, 0u);
    rig.driver().settle();
    EXPECT_EQ(whereabouts(rig, a).n_host_pages, 0u);
    EXPECT_EQ(stats_of(rig).host_used_bytes, 0u);
    first.check("first");
    second.check("second");
    EXPECT_EQ(kvm_cuda_spill_range(rig.client(), a.id, 5, 5, rig.stream()), KVM_ERR_INVALID);
    EXPECT_EQ(kvm_cuda_fetch_range(rig.client(), a.id, 6, 5, rig.stream()), KVM_ERR_INVALID);
    info.struct_size = 0;
    EXPECT_EQ(kvm_cuda_get_seq_info(rig.client(), a.id, &info), KVM_ERR_INVALID);
    info.struct_size = sizeof info;
    EXPECT_EQ(kvm_cuda_get_seq_info(rig.client(), 4711, &info), KVM_ERR_NOT_FOUND);
  }
}

// One sequence makes room for another in a full pool: the calls book, and nothing is enqueued by
// them but the events that say behind what the copies come. Streams of the mover stay short.
TEST(DeviceTest, MovesAreEnqueuedApartAFewAtATime) {
  for (const bool in_a_thread : {false, true}) {
    if (has_server() && !in_a_thread) {
      continue;  // a server's moves have their thread
    }
    FakeOptions options;
    options.emulate = false;
    options.moves_in_a_thread = in_a_thread;
    Geometry geometry;
    geometry.dim = 256;
    geometry.n_q_heads = geometry.n_kv_heads = 8;  // pages of 1 MiB, two to a chunk
    constexpr uint64_t kPages = 32, kPage = 1 << 20;
    Rig rig(options, geometry, (kPages + 2) * kPage, 2 * kPages * kPage);
    kvm_cuda_batch* const batch = rig.batch(rig.batch_params(1, 2048, 1, 4096));
    Seq a = make(&rig, 1), b = make(&rig, 2);
    Step first(&rig, batch, {{&a, 32 * 64, 0}}, 1);
    first.run();
    rig.driver().settle();
    uint64_t calls = FakeDriver::calls_of_this_thread();
    ASSERT_EQ(kvm_cuda_spill(rig.client(), a.id, rig.stream()), KVM_OK) << kvm_last_error();
    EXPECT_LE(FakeDriver::calls_of_this_thread() - calls, 4u);
    // All of its pages again: this one waits, for what it lacks. Nobody looks at what is in them.
    Step second(&rig, batch, {{&b, 32 * 64, 0}}, 2);
    ASSERT_EQ(second.update(), KVM_OK) << kvm_last_error();
    ASSERT_EQ(kvm_cuda_spill(rig.client(), b.id, rig.stream()), KVM_OK) << kvm_last_error();
    calls = FakeDriver::calls_of_this_thread();
    ASSERT_EQ(kvm_cuda_fetch(rig.client(), a.id, rig.stream()), KVM_OK) << kvm_last_error();
    EXPECT_LE(FakeDriver::calls_of_this_thread() - calls, 40u);  // asking, and two of the pool's
    if (!in_a_thread) {
      EXPECT_EQ(whereabouts(rig, a).n_waiting_pages, kPages);
      EXPECT_EQ(whereabouts(rig, b).n_waiting_pages, kPages);
    }
    Step third(&rig, batch, {{&a, 1, 1}}, 3);
    third.run();
    rig.driver().settle();
    third.check("swapped");
    // Four pieces of a stream, each with waits, a gather, a copy and a record.
    EXPECT_LE(rig.driver().deepest_but(rig.stream()), 4u * 8);
    EXPECT_GE(stats_of(rig).n_copies, 3 * kPages / 2);
    EXPECT_LE(stats_of(rig).n_copies, 3 * kPages / 2 * 2);
    ASSERT_EQ(kvm_seq_free(rig.client(), b.id), KVM_OK);
  }
}

// What the driver refuses when nobody listens is said later, once, and nothing is lost.
// Own: a server's moves are driven by another process.
TEST(OwnDeviceTest, MovesThatFailAreTakenBackAndSaid) {
  ASSERT_FALSE(has_server());
  FakeOptions options;
  options.emulate = false;
  options.moves_in_a_thread = false;
  Rig rig(options, {}, 64 << 20, 16 << 20);
  kvm_cuda_batch* const batch = rig.batch(rig.batch_params(2, 600, 1));
  Seq a = make(&rig, 1), b = make(&rig, 2);
  Step first(&rig, batch, {{&a, 300, 1}, {&b, 100, 1}}, 1);
  first.run();
  const auto fail_copies = [&] { rig.driver().fail(Operation::kCopy, 1); };
  // A spill: both sequences stay, for the second one was behind the first.
  ASSERT_EQ(kvm_cuda_spill(rig.client(), a.id, rig.stream()), KVM_OK);
  ASSERT_EQ(kvm_cuda_spill(rig.client(), b.id, rig.stream()), KVM_OK);
  fail_copies();
  EXPECT_EQ(kvm_cuda_fetch(rig.client(), a.id, rig.stream()), KVM_ERR_DEVICE);
  EXPECT_EQ(stats_of(rig).n_spilled, 0u);
  EXPECT_EQ(stats_of(rig).spilled_bytes, 0u);
  EXPECT_EQ(whereabouts(rig, b).failure, static_cast<uint32_t>(KVM_ERR_DEVICE));
  Step second(&rig, batch, {{&a, 1, 1}, {&b, 1, 1}}, 2);
  EXPECT_EQ(second.update(), KVM_ERR_DEVICE);
  EXPECT_NE(std::string(kvm_last_error()).find("copy"), std::string::npos) << kvm_last_error();
  Step third(&rig, batch, {{&a, 1, 1}, {&b, 1, 1}}, 3);
  third.run();
  // A fetch: it is on the host as before.
  ASSERT_EQ(kvm_cuda_spill(rig.client(), a.id, rig.stream()), KVM_OK);
  kvm_cuda_item item{};
  item.seq = a.id;
  item.n_query = 1;
  EXPECT_EQ(kvm_cuda_update(batch, &item, 1, rig.stream()), KVM_ERR_BUSY);
  ASSERT_EQ(kvm_cuda_fetch(rig.client(), a.id, rig.stream()), KVM_OK);
  fail_copies();
  EXPECT_EQ(kvm_cuda_update(batch, &item, 1, rig.stream()), KVM_ERR_DEVICE);
  EXPECT_EQ(kvm_cuda_update(batch, &item, 1, rig.stream()), KVM_ERR_BUSY);
  EXPECT_EQ(whereabouts(rig, a).state, static_cast<uint32_t>(KVM_CUDA_SEQ_AWAY));
  EXPECT_EQ(stats_of(rig).fetched_bytes, 0u);
  ASSERT_EQ(kvm_cuda_fetch(rig.client(), a.id, rig.stream()), KVM_OK);
  Step fourth(&rig, batch, {{&b, 1, 1}, {&a, 1, 1}}, 4);
  fourth.run();
  rig.driver().settle();
  first.check("first");
  third.check("third");
  fourth.check("fourth");
  // One that nobody asks about any more.
  ASSERT_EQ(kvm_cuda_spill(rig.client(), a.id, rig.stream()), KVM_OK);
  fail_copies();
  ASSERT_EQ(kvm_seq_free(rig.client(), a.id), KVM_OK);
  ASSERT_EQ(kvm_cuda_spill(rig.client(), b.id, rig.stream()), KVM_OK);
}

TEST(DeviceTest, WhatForksShareStaysOnTheDevice) {
  FakeOptions options;
  options.emulate = false;
  Rig rig(options, {});
  kvm_cuda_batch* const batch = rig.batch(rig.batch_params(2, 300, 1));
  Seq a = make(&rig, 1);
  Step first(&rig, batch, {{&a, 128, 1}}, 1);
  first.run();
  Seq b = fork_of(&rig, a, KVM_POSITION_END, 2);
  Step second(&rig, batch, {{&a, 100, 1}, {&b, 70, 1}}, 2);
  second.run();
  ASSERT_EQ(kvm_cuda_spill(rig.client(), a.id, rig.stream()), KVM_OK) << kvm_last_error();
  Step third(&rig, batch, {{&b, 1, 1}}, 3);
  third.run();
  // Freed while it is on its way; then the other one as well.
  ASSERT_EQ(kvm_cuda_fetch(rig.client(), a.id, rig.stream()), KVM_OK) << kvm_last_error();
  Seq c = fork_of(&rig, a, 200, 4);
  ASSERT_EQ(kvm_seq_free(rig.client(), a.id), KVM_OK);
  Seq d = make(&rig, 5);
  Step fourth(&rig, batch, {{&c, 1, 1}, {&d, 120, 1}}, 4);
  fourth.run();
  rig.driver().settle();
  first.check("first");
  second.check("second");
  third.check("third");
  fourth.check("fourth");
  ASSERT_EQ(kvm_cuda_spill(rig.client(), d.id, rig.stream()), KVM_OK) << kvm_last_error();
  ASSERT_EQ(kvm_seq_free(rig.client(), d.id), KVM_OK);  // on the host
}

TEST(DeviceTest, PagesLongerThanChunksAreSpilled) {
  for (const uint32_t n_layers : {1u, 3u}) {
    FakeOptions options;
    options.emulate = false;
    Geometry geometry;
    geometry.n_layers = n_layers;
    geometry.dim = 256;
    // 64 KiB a head and layer; 40 heads are two classes.
    geometry.n_q_heads = geometry.n_kv_heads = 40;
    // 7.5 MiB, and three times as many, in chunks that are not quite full.
    const uint64_t host_bytes = uint64_t{n_layers == 1 ? 10u : 24u} << 20;
    Rig rig(options, geometry, 128 << 20, host_bytes);
    kvm_cuda_batch* const batch = rig.batch(rig.batch_params(1, 130, 1));
    Seq a = make(&rig, 1);
    Step first(&rig, batch, {{&a, 130, 1}}, 1);
    first.run();
    ASSERT_EQ(kvm_cuda_spill(rig.client(), a.id, rig.stream()), KVM_OK) << kvm_last_error();
    EXPECT_EQ(stats_of(rig).host_used_bytes, host_bytes);
    ASSERT_EQ(kvm_cuda_fetch_range(rig.client(), a.id, 70, 80, rig.stream()), KVM_OK);
    ASSERT_EQ(kvm_cuda_fetch(rig.client(), a.id, rig.stream()), KVM_OK) << kvm_last_error();
    Step second(&rig, batch, {{&a, 1, 1}}, 2);
    second.run();
    rig.driver().settle();
    first.check("first");
    second.check("second");
    EXPECT_EQ(whereabouts(rig, a).n_host_pages, 0u);
    EXPECT_EQ(stats_of(rig).host_used_bytes, 0u);
  }
}

TEST(DeviceTest, FullPoolsRefuseAndChangeNothing) {
  FakeOptions options;
  options.emulate = false;
  // Pages of 64 KiB, one for each 64 tokens of both layers: 8 in all.
  Rig rig(options, {}, 16 * 32768, uint64_t{4} << 20);
  kvm_cuda_batch* const batch = rig.batch(rig.batch_params(2, 700, 1));
  Seq a = make(&rig, 1), b = make(&rig, 2);
  Step first(&rig, batch, {{&a, 300, 1}}, 1);
  first.run();
  Step second(&rig, batch, {{&a, 30, 1}, {&b, 200, 1}}, 2);
  EXPECT_EQ(second.update(), KVM_ERR_NO_SPACE);
  EXPECT_EQ(stats_of(rig).n_pages, 5u);
  kvm_seq_info info{};
  info.struct_size = sizeof info;
  ASSERT_EQ(kvm_seq_get_info(rig.client(), a.id, &info), KVM_OK);
  EXPECT_EQ(info.n_tokens_max, 300u);
  // With the first one out of the way the second one fits, and then the first one does not.
  ASSERT_EQ(kvm_cuda_spill(rig.client(), a.id, rig.stream()), KVM_OK) << kvm_last_error();
  Step third(&rig, batch, {{&b, 500, 1}}, 3);
  third.run();
  EXPECT_EQ(kvm_cuda_fetch(rig.client(), a.id, rig.stream()), KVM_ERR_NO_SPACE);
  EXPECT_EQ(kvm_cuda_spill(rig.client(), b.id, rig.stream()), KVM_OK) << kvm_last_error();
  ASSERT_EQ(kvm_cuda_fetch(rig.client(), a.id, rig.stream()), KVM_OK) << kvm_last_error();
  Step fourth(&rig, batch, {{&a, 1, 1}}, 4);
  fourth.run();
  rig.driver().settle();
  first.check("first");
  third.check("third");
  fourth.check("fourth");
}

// --- What is refused ----------------------------------------------------------------------------

TEST(DeviceTest, SpacesThatADeviceCannotHoldAreRefused) {
  Rig rig({}, {});
  const auto refused = [&](const std::function<void(kvm_space_params*)>& change) {
    kvm_space_params space{};
    space.struct_size = sizeof space;
    space.name = "other";
    space.n_layers = 2;
    space.n_q_heads = 4;
    space.n_kv_heads = 2;
    space.head_dim_k = 64;
    change(&space);
    kvm_space_id id = 0;
    const kvm_status status = kvm_space_register(rig.client(), &space, &id);
    EXPECT_NE(std::string(kvm_last_error()).find("device memory"), std::string::npos);
    return status;
  };
  EXPECT_EQ(refused([](auto* s) { s->codec = KVM_CODEC_F32; }), KVM_ERR_UNSUPPORTED);
  EXPECT_EQ(refused([](auto* s) { s->head_dim_k = 112; }), KVM_ERR_UNSUPPORTED);
  for (const uint32_t dim : {80u, 96u, 192u}) {
    EXPECT_EQ(refused([=](auto* s) {
                s->head_dim_k = s->head_dim_v = dim;
                s->codec = KVM_CODEC_I4;
              }),
              KVM_ERR_UNSUPPORTED);
    EXPECT_NE(std::string(kvm_last_error()).find("but in pages of int4, 80, 96 or 192"),
              std::string::npos);
  }
  EXPECT_EQ(refused([](auto* s) { s->head_dim_v = 128; }), KVM_ERR_UNSUPPORTED);
  // Values in keys: of other dims, in rows of bytes, of more q heads than there may be.
  const auto latent = [](auto* s, uint32_t n_q_heads) {
    s->flags = KVM_SPACE_V_IN_K;
    s->head_dim_k = 576;
    s->head_dim_v = 512;
    s->n_q_heads = n_q_heads;
    s->n_kv_heads = 1;
  };
  EXPECT_EQ(refused([&](auto* s) { latent(s, 128); }), KVM_OK) << kvm_last_error();
  EXPECT_EQ(refused([&](auto* s) { latent(s, 16), s->head_dim_v = 576; }), KVM_ERR_UNSUPPORTED);
  EXPECT_EQ(refused([&](auto* s) { latent(s, 16), s->codec = KVM_CODEC_I8; }), KVM_ERR_UNSUPPORTED);
  EXPECT_EQ(refused([](auto* s) { s->flags = KVM_SPACE_V_IN_K; }), KVM_ERR_UNSUPPORTED);
  EXPECT_EQ(refused([](auto* s) { s->n_q_heads = 32, s->n_kv_heads = 1; }), KVM_ERR_UNSUPPORTED);
  kvm_index_params index{};
  index.kind = KVM_INDEX_SKETCH;
  EXPECT_EQ(refused([&](auto* s) { s->indexes = &index, s->n_indexes = 1; }), KVM_ERR_UNSUPPORTED);
  EXPECT_EQ(refused([](auto* s) { s->default_mode = KVM_MODE_SAMPLED; }), KVM_ERR_UNSUPPORTED);
  kvm_policy_params policy{};
  policy.retention = KVM_RETAIN_HEAVY;
  policy.n_recent = 64;
  policy.n_heavy = 64;
  EXPECT_EQ(refused([&](auto* s) { s->policies = &policy, s->n_policies = 1; }),
            KVM_ERR_UNSUPPORTED);
  policy.retention = KVM_RETAIN_SINKS_RECENT_FOLD;
  policy.n_heavy = 0;
  EXPECT_EQ(refused([&](auto* s) { s->policies = &policy, s->n_policies = 1; }),
            KVM_ERR_UNSUPPORTED);
  kvm_codec_params codec{};
  codec.codec_k = KVM_CODEC_I8;
  EXPECT_EQ(refused([&](auto* s) { s->codecs = &codec, s->n_codecs = 1; }), KVM_ERR_UNSUPPORTED);

  kvm_queue* queue = nullptr;
  EXPECT_EQ(kvm_queue_create(rig.client(), nullptr, &queue), KVM_ERR_UNSUPPORTED);
  kvm_arena* arena = nullptr;
  EXPECT_EQ(kvm_arena_create(rig.client(), nullptr, &arena), KVM_ERR_UNSUPPORTED);
  kvm_seq_params manual{};
  manual.struct_size = sizeof manual;
  manual.flags = KVM_SEQ_MANUAL_COMMIT;
  kvm_seq_id seq = 0;
  EXPECT_EQ(kvm_seq_create(rig.client(), rig.space(), &manual, &seq), KVM_ERR_UNSUPPORTED);
  kvm_cuda_params params{};
  params.struct_size = sizeof params;
  params.device = 1;
  kvm_client* other = nullptr;
  EXPECT_EQ(kvm_cuda_open(&params, &other), KVM_ERR_DEVICE);
  char text[4096];
  size_t length = 0;
  ASSERT_EQ(kvm_get_stats_text(rig.client(), text, sizeof text, &length), KVM_OK);
  EXPECT_NE(std::string(text).find("kvm_device_pool_bytes"), std::string::npos);
}

TEST(DeviceTest, CallsSayWhatIsWrong) {
  FakeOptions options;
  options.emulate = false;
  Rig rig(options, {});
  kvm_cuda_batch_params params = rig.batch_params(2, 10, 2, 100);
  kvm_cuda_batch* const batch = rig.batch(params);
  Seq a = make(&rig, 1);
  const auto update = [&](std::vector<kvm_cuda_item> items) {
    return kvm_cuda_update(batch, items.data(), static_cast<uint32_t>(items.size()), rig.stream());
  };
  const std::vector<float> floats(10 * 2 * 64);
  const kvm_tensor rows = rig.tensor(floats, KVM_DTYPE_F32);
  EXPECT_EQ(kvm_cuda_append(batch, 0, &rows, &rows, rig.stream()), KVM_ERR_INVALID);  // no update
  EXPECT_EQ(update({{a.id, 11, 0, 0, 0, 0}}), KVM_ERR_INVALID);
  EXPECT_EQ(update({{a.id, 5, 6, 0, 0, 0}}), KVM_ERR_INVALID);
  EXPECT_EQ(update({{a.id, 5, 0, 3, 0, 0}}), KVM_ERR_INVALID);
  EXPECT_EQ(update({{a.id, 5, 0, 2, 3, 0}}), KVM_ERR_INVALID);
  EXPECT_EQ(update({{a.id, 0, 0, 1, 0, 0}}), KVM_ERR_INVALID);  // it has no tokens
  EXPECT_EQ(update({{a.id, 1, 0, 1, 0, 0}, {a.id, 1, 1, 1, 1, 0}}), KVM_ERR_INVALID);
  EXPECT_EQ(update({{0, 1, 0, 0, 0, 0}}), KVM_ERR_INVALID);
  EXPECT_EQ(update({{12345, 1, 0, 0, 0, 0}}), KVM_ERR_NOT_FOUND);
  EXPECT_EQ(update({{}, {}, {}}), KVM_ERR_INVALID);
  const kvm_cuda_item none{};
  EXPECT_EQ(kvm_cuda_update(batch, &none, UINT32_MAX, rig.stream()), KVM_ERR_INVALID);
  for (uint32_t i = 0; i < 9; ++i) {
    ASSERT_EQ(update({{a.id, 10, 0, 1, 0, 0}}), KVM_OK) << kvm_last_error();
  }
  ASSERT_EQ(update({{a.id, 9, 0, 1, 0, 0}}), KVM_OK) << kvm_last_error();
  EXPECT_EQ(update({{a.id, 2, 0, 1, 0, 0}}), KVM_ERR_LIMIT);

  kvm_tensor bad = rows;
  bad.buffer.size = 9 * 2 * 64 * 4 - 1;
  EXPECT_EQ(kvm_cuda_append(batch, 0, &bad, &rows, rig.stream()), KVM_ERR_INVALID);
  bad = rows;
  bad.buffer.where += 4;
  EXPECT_EQ(kvm_cuda_append(batch, 0, &bad, &rows, rig.stream()), KVM_ERR_INVALID);
  bad = rows;
  bad.buffer.kind = KVM_BUFFER_HOST;
  EXPECT_EQ(kvm_cuda_append(batch, 0, &bad, &rows, rig.stream()), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_cuda_append(batch, 2, &rows, &rows, rig.stream()), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_cuda_append(batch, 1, &rows, &rows, rig.stream()), KVM_OK) << kvm_last_error();
  // Something has happened to the sequence since.
  ASSERT_EQ(kvm_seq_truncate(rig.client(), a.id, 98), KVM_OK);
  EXPECT_EQ(kvm_cuda_append(batch, 0, &rows, &rows, rig.stream()), KVM_ERR_INVALID);

  kvm_cuda_batch* other = nullptr;
  params.max_items = 0;
  EXPECT_EQ(kvm_cuda_batch_create(rig.client(), &params, &other), KVM_ERR_INVALID);
  params.max_items = 1024;
  params.max_tokens = 0x7fffffff;
  EXPECT_EQ(kvm_cuda_batch_create(rig.client(), &params, &other), KVM_ERR_UNSUPPORTED);
  // A page table of 2^32 entries, and one of fewer.
  params.max_tokens = uint64_t{1} << 28;
  EXPECT_EQ(kvm_cuda_batch_create(rig.client(), &params, &other), KVM_ERR_UNSUPPORTED);
  params.max_tokens = uint64_t{1} << 27;
  EXPECT_EQ(kvm_cuda_batch_create(rig.client(), &params, &other), KVM_ERR_NO_SPACE);
  kvm_client* host = nullptr;
  kvm_embedded_params embedded{};
  embedded.struct_size = sizeof embedded;
  embedded.n_threads = 1;
  embedded.host_capacity_bytes = 16 << 20;
  ASSERT_EQ(kvm_open_embedded(&embedded, &host), KVM_OK) << kvm_last_error();
  EXPECT_EQ(kvm_cuda_spill(host, a.id, rig.stream()), KVM_ERR_UNSUPPORTED);
  kvm_client_close(host);
}

TEST(DeviceTest, BatchesOutliveTheirClient) {
  next_options = {};
  next_options.at_end = [](const FakeDriver& driver) { EXPECT_EQ(driver.leftovers(), ""); };
  kvm_client* client = nullptr;
  kvm_cuda_params params{};
  params.struct_size = sizeof params;
  params.pool_bytes = 16 << 20;
  ASSERT_EQ(kvm_cuda_open(&params, &client), KVM_OK) << kvm_last_error();
  kvm_space_params space{};
  space.struct_size = sizeof space;
  space.name = "model";
  space.n_layers = 1;
  space.n_q_heads = 2;
  space.head_dim_k = 64;
  kvm_cuda_batch_params batch_params{};
  batch_params.struct_size = sizeof batch_params;
  batch_params.max_items = 1;
  batch_params.max_tokens = 64;
  ASSERT_EQ(kvm_space_register(client, &space, &batch_params.space), KVM_OK) << kvm_last_error();
  kvm_cuda_batch* batch = nullptr;
  ASSERT_EQ(kvm_cuda_batch_create(client, &batch_params, &batch), KVM_OK) << kvm_last_error();
  kvm_client_close(client);
  EXPECT_EQ(kvm_cuda_update(batch, nullptr, 0, nullptr), KVM_ERR_DISCONNECTED);
  kvm_cuda_batch_destroy(batch);
}

// --- Faults -------------------------------------------------------------------------------------

// A life: what it does must either be right or fail with a status; whatever fails, everything else
// goes on, and in the end nothing is left.
void live(Rig* rig) {
  kvm_cuda_batch_params params = rig->batch_params(2, 200, 1);
  kvm_cuda_batch* batch = nullptr;
  for (uint32_t tries = 0; batch == nullptr && tries < 3; ++tries) {
    if (kvm_cuda_batch_create(rig->client(), &params, &batch) != KVM_OK) {
      EXPECT_STRNE(kvm_last_error(), "");
    }
  }
  ASSERT_NE(batch, nullptr);
  Seq a = make(rig, 1), b;
  std::vector<Step> done;
  const auto step = [&](std::vector<Share> shares, uint64_t seed) {
    for (uint32_t tries = 0; tries < 3; ++tries) {
      Step one(rig, batch, shares, seed);
      if (one.update() != KVM_OK) {
        // As it was: try again. Whose fetch has failed is on the host.
        for (const Share& share : shares) {
          for (uint32_t n = 0;
               kvm_cuda_fetch(rig->client(), share.seq->id, rig->stream()) != KVM_OK; ++n) {
            ASSERT_LT(n, 2u) << kvm_last_error();
          }
        }
        continue;
      }
      while (one.launch() != KVM_OK) {
        ASSERT_LT(++tries, 4u);
      }
      done.push_back(one);
      return;
    }
    FAIL() << "three times";
  };
  const auto insist = [&](const std::function<kvm_status()>& call) {
    for (uint32_t tries = 0; tries < 3; ++tries) {
      if (call() == KVM_OK) {
        return;
      }
    }
    FAIL() << "three times: " << kvm_last_error();
  };
  step({{&a, 100, 1}}, 1);
  b = fork_of(rig, a, KVM_POSITION_END, 2);
  step({{&a, 1, 1}, {&b, 90, 1}}, 2);
  insist([&] { return kvm_cuda_spill(rig->client(), a.id, rig->stream()); });
  step({{&b, 60, 1}}, 3);
  insist([&] { return kvm_cuda_fetch(rig->client(), a.id, rig->stream()); });
  step({{&b, 1, 1}, {&a, 40, 1}}, 4);
  ASSERT_EQ(kvm_seq_free(rig->client(), a.id), KVM_OK);
  step({{&b, 1, 1}}, 5);
  rig->driver().settle();
  for (size_t i = 0; i < done.size(); ++i) {
    done[i].check("step " + std::to_string(i));
  }
  ASSERT_EQ(kvm_seq_free(rig->client(), b.id), KVM_OK);
  kvm_cuda_batch_destroy(batch);
  EXPECT_EQ(stats_of(*rig).n_spilled, 0u);
}

// Lives in which one call of the driver fails, any of them in turn. Where copies are enqueued by a
// thread, which call that is changes from run to run.
void survive_all(bool in_a_thread) {
  // How often each operation is called in a life without faults.
  std::vector<uint64_t> counts(static_cast<size_t>(Operation::kCount));
  FakeOptions options;
  options.emulate = false;
  options.moves_in_a_thread = in_a_thread;
  {
    Rig rig(options, {});
    const auto count = [&](size_t i) { return rig.driver().counts(static_cast<Operation>(i)); };
    std::vector<uint64_t> before;
    for (size_t i = 0; i < counts.size(); ++i) {
      before.push_back(count(i));
    }
    live(&rig);
    for (size_t i = 0; i < counts.size(); ++i) {
      counts[i] = count(i) - before[i];
    }
  }
  uint32_t n_lives = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    const auto operation = static_cast<Operation>(i);
    if (operation == Operation::kAllocate) {
      counts[i] = 1;  // the others are the test's own
    }
    // All of the rare ones, and some of the frequent ones.
    const uint64_t stride = counts[i] / 8 + 1;
    for (uint64_t nth = 1; nth <= counts[i]; nth += stride) {
      SCOPED_TRACE("operation " + std::to_string(i) + " fails at call " + std::to_string(nth));
      Rig rig(options, {});
      rig.driver().fail(operation, nth);
      live(&rig);
      ++n_lives;
    }
  }
  EXPECT_GT(n_lives, has_server() ? 20u : 30u);
}

TEST(DeviceFaultTest, EveryFailureIsSurvived) { survive_all(true); }

// A server's copies have their thread.
TEST(OwnDeviceFaultTest, EveryFailureIsSurvivedWhereCopiesWaitForWhoNeedsThem) {
  ASSERT_FALSE(has_server());
  survive_all(false);
}

TEST(ServedDeviceFaultTest, EveryFailureOfTheServersDeviceIsSurvived) {
  ASSERT_TRUE(has_server());
  for (const char* const operation : {"map", "event", "record", "wait", "copy", "word", "query"}) {
    for (uint32_t nth = 1; nth <= 4; ++nth) {
      const std::string fails = std::string(operation) + "=" + std::to_string(nth);
      SCOPED_TRACE(fails);
      ::setenv("KVM_FAKE_FAIL", fails.c_str(), 1);
      FakeOptions options;
      options.emulate = false;
      Rig rig(options, {});
      ::unsetenv("KVM_FAKE_FAIL");
      live(&rig);
    }
  }
}

// Processes may see different devices, and then number them differently.
TEST(ServedDeviceTest, DevicesAreFoundByTheirUuids) {
  kvm::testing::Daemon daemon({"--device-pool", "64MiB", "--device-numbers", "0,1"},
                              "kvmd_on_fake");
  kvm_connect_params server{};
  server.struct_size = sizeof server;
  server.socket_path = daemon.socket_path().c_str();
  server.timeout_ns = uint64_t{60} * 1000 * 1000 * 1000;
  kvm_cuda_params params{};
  params.struct_size = sizeof params;
  params.server = &server;
  kvm_client* operating = kvm::testing::connect_to_daemon(daemon, "operator");
  kvm_client_info info{};
  info.struct_size = sizeof info;
  ASSERT_EQ(kvm_client_get_info(operating, &info), KVM_OK);
  EXPECT_NE(info.features & KVM_FEATURE_DEVICE, 0u);
  const auto n_clients_of = [operating](const char* device) {
    std::string text(1 << 20, '\0');
    size_t length = 0;
    EXPECT_EQ(kvm_get_stats_text(operating, text.data(), text.size(), &length), KVM_OK);
    const std::string name = std::string("kvm_device_clients{device=\"") + device + "\"} ";
    const size_t at = text.find(name);
    return at == std::string::npos ? std::string() : text.substr(at + name.size(), 1);
  };
  for (const uint8_t number : {uint8_t{0}, uint8_t{1}}) {
    next_options = {};
    next_options.runs_by_itself = true;
    next_options.number = number;
    kvm_client* client = nullptr;
    ASSERT_EQ(kvm_cuda_open(&params, &client), KVM_OK) << kvm_last_error();
    EXPECT_EQ(n_clients_of("0"), number == 0 ? "1" : "0");
    EXPECT_EQ(n_clients_of("1"), number == 1 ? "1" : "0");
    kvm_client_close(client);
    for (int i = 0; i < 2000 && n_clients_of("0") + n_clients_of("1") != "00"; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  next_options.number = 7;
  kvm_client* client = nullptr;
  EXPECT_EQ(kvm_cuda_open(&params, &client), KVM_ERR_NOT_FOUND);
  EXPECT_STREQ(kvm_last_error(),
               "device 0 of the client is GPU-00000000-0000-0000-0000-000000000007; kvmd owns "
               "memory of GPU-00000000-0000-0000-0000-000000000000 (device 0), "
               "GPU-00000000-0000-0000-0000-000000000001 (device 1), by its device.numbers");
  // What libkvm never sends.
  kvm::testing::RawClient raw(daemon.socket_path());
  ASSERT_TRUE(raw.hello().is_ok());
  for (const size_t size : {0u, 15u, 17u}) {
    const auto reply = raw.call([size](ipc::ControlWriter* writer, uint64_t id) {
      const std::vector<uint8_t> uuid(size);
      const auto bytes = writer->fbb().CreateVector(uuid);
      return writer->finish(id, ipc::wire::CreateDeviceOpen(writer->fbb(), 0, 1 << 20, 0,
                                                            wire::kStoreVersion, bytes));
    });
    EXPECT_EQ(reply.status().code(), KVM_ERR_INVALID) << size;
  }
  EXPECT_EQ(n_clients_of("0") + n_clients_of("1"), "00");
  kvm_client_close(operating);
  std::string log;
  EXPECT_EQ(daemon.stop(&log), 0) << log;
}

TEST(DeviceFaultTest, OpeningFails) {
  const Operation operations[] = {Operation::kRegister, Operation::kStream, Operation::kAllocate};
  for (const Operation operation : operations) {
    for (uint64_t nth = 1; nth <= 2; ++nth) {
      next_options = {};
      next_options.fail_first = {{operation, nth}};
      next_options.at_end = [](const FakeDriver& driver) {
        EXPECT_EQ(driver.leftovers(), "");
        EXPECT_EQ(driver.complaints(), "");
      };
      kvm_cuda_params params{};
      params.struct_size = sizeof params;
      params.pool_bytes = 16 << 20;
      params.host_bytes = 4 << 20;
      kvm_client* client = nullptr;
      const kvm_status status = kvm_cuda_open(&params, &client);
      // The memory of 4 MiB is registered in one piece.
      if (operation == Operation::kRegister && nth == 2) {
        ASSERT_EQ(status, KVM_OK) << kvm_last_error();
        kvm_client_close(client);
      } else {
        EXPECT_NE(status, KVM_OK);
      }
    }
  }
}

}  // namespace
}  // namespace kvm::device::testing
