// SPDX-License-Identifier: Apache-2.0
// Tokens that end at different layers, as models have them that skip layers: lengths, the commit
// point, what policies free and what queries see, layer by layer.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/unit/engine/policy_testbed.h"

namespace kvm::engine::testing {
namespace {

constexpr uint32_t kLayers = 4;
constexpr uint32_t kHeads = 2;
constexpr uint32_t kDim = 16;
constexpr uint64_t kSinks = 4;
constexpr uint64_t kRecent = 70;

Row row_of(uint64_t kind, uint32_t layer, uint64_t position, uint32_t head) {
  return hashed_row(kind * 100 + layer, position, head, kDim, 1.0);
}

// How many layers the token at a position reaches.
using Depth = std::function<uint32_t(uint64_t)>;

// 4, then 3, then 1.
uint32_t falling(uint64_t position) { return position < 100 ? 4 : position < 300 ? 3 : 1; }

class World {
 public:
  explicit World(bool has_policy, uint32_t flags = 0, bool says_last = true,
                 uint32_t n_layers = kLayers)
      : has_policy_(has_policy),
        says_last_(says_last),
        lengths_(n_layers),
        entries_(n_layers * kHeads) {
    SpaceSpec spec = make_spec("ends", n_layers, kHeads, kHeads, kDim);
    spec.params.codec = KVM_CODEC_F32;
    if (has_policy) {
      spec.policies = {
          {.retention = KVM_RETAIN_SINKS_RECENT, .n_sinks = kSinks, .n_recent = kRecent}};
    }
    space_ = rig.space(spec);
    seq = rig.create(space_, flags);
  }

  // One token through its layers; outputs of all of them follow `outputs`.
  void decode(uint32_t depth) {
    std::vector<uint32_t> layers(depth);
    std::iota(layers.begin(), layers.end(), 0u);
    decode(layers);
  }
  void decode(const std::vector<uint32_t>& layers) {
    const uint64_t position = lengths_[0];
    for (const uint32_t layer : layers) {
      const RequestResult result = step(layer, position, layer == layers.back());
      ASSERT_TRUE(result.status.is_ok()) << result.status.message();
      ++lengths_[layer];
      for (uint32_t head = 0; attends && head < kHeads; ++head) {
        const std::vector<float> o = o_.get_row(0, 0, head);
        outputs.insert(outputs.end(), o.begin(), o.end());
        if (checks) {
          EXPECT_LE(error(layer, position, head), 1e-5) << "layer " << layer << " at " << position;
        }
      }
    }
  }
  void decode_all(uint64_t n, const Depth& depth) {
    for (uint64_t i = 0; i < n && !::testing::Test::HasFailure(); ++i) {
      decode(depth(lengths_[0]));
    }
  }
  RequestResult step(uint32_t layer, uint64_t position, bool is_last) {
    Buffer k(Dtype::kF32, 1, 1, kHeads, kDim), v = k, q = k;
    o_ = k;
    for (uint32_t head = 0; head < kHeads; ++head) {
      put(&k, head, row_of(1, layer, position, head));
      put(&v, head, row_of(2, layer, position, head));
      put(&q, head, row_of(3, layer, position, head));
    }
    StepRequest request;
    request.space = space_;
    request.layer_begin = layer;
    request.append = true;
    request.attend = attends;
    kvm_item item = append_item(seq, 1);
    item.append_position = says_end ? KVM_POSITION_END : position;
    item.n_query = attends ? 1 : 0;
    item.flags = is_last && says_last_ ? uint32_t{KVM_ITEM_LAST_LAYER} : 0;
    request.items = {item};
    request.k = k.view();
    request.v = v.view();
    if (attends) {
      request.q = q.view();
      request.o = o_.view();
    }
    return rig.run(std::move(request));
  }
  kvm_seq_info info() { return rig.engine->seq_info(rig.client, seq).value(); }

  // Pages that go: full, behind the sinks' page, and too far back for queries at the commit point.
  uint64_t n_dropped(uint64_t n_committed) const {
    uint64_t n = 0;
    for (const uint64_t length : lengths_) {
      for (uint64_t page = kPageTokens; page + kPageTokens <= length; page += kPageTokens) {
        n += page + kPageTokens - 1 + kRecent < n_committed ? kPageTokens : 0;
      }
    }
    return n;
  }
  void truncate(uint64_t n) {
    ASSERT_TRUE(rig.verb(SeqVerb::kTruncate, seq, n).status.is_ok());
    for (uint64_t& length : lengths_) {
      length = std::min(length, n);
    }
  }
  const std::vector<uint64_t>& lengths() const { return lengths_; }
  // As if tokens had come to the layer that decode() has not brought there.
  void set_length(uint32_t layer, uint64_t n) { lengths_[layer] = n; }

  Rig rig;
  kvm_seq_id seq = 0;
  std::vector<float> outputs;
  bool attends = true;    // steps
  bool checks = true;     // answers, against the model
  bool says_end = false;  // instead of positions

 private:
  static void put(Buffer* buffer, uint32_t head, const Row& row) {
    for (uint32_t i = 0; i < kDim; ++i) {
      buffer->set(0, 0, head, i, static_cast<float>(row[i]));
    }
  }
  // Of the last step, against the layer's own tokens.
  double error(uint32_t layer, uint64_t position, uint32_t head) {
    std::vector<Entry>& all = entries_[layer * kHeads + head];
    all.resize(std::min<size_t>(all.size(), position + 1));
    for (uint64_t t = all.size(); t <= position; ++t) {
      all.push_back({.k = row_of(1, layer, t, head), .v = row_of(2, layer, t, head)});
    }
    std::vector<Entry> seen;
    for (uint64_t t = 0; has_policy_ && t <= position; ++t) {
      if (t < kSinks || t + kRecent > position) {
        seen.push_back(all[t]);
      }
    }
    const Answer expected =
        attention_over(row_of(3, layer, position, head), has_policy_ ? seen : all,
                       1 / std::sqrt(static_cast<double>(kDim)));
    double worst = 0;
    for (uint32_t i = 0; i < kDim; ++i) {
      worst = std::max(worst, std::fabs(double{o_.get(0, 0, head, i)} - expected.o[i]));
    }
    return worst;
  }

  bool has_policy_;
  bool says_last_;
  kvm_space_id space_ = 0;
  std::vector<uint64_t> lengths_;
  std::vector<std::vector<Entry>> entries_;  // of each (layer, head), as the model has them
  Buffer o_;
};

TEST(LayerEnds, BytesAreThoseOfTheLayersThatTokensReach) {
  World world(false);
  world.decode_all(500, falling);
  EXPECT_EQ(world.lengths(), std::vector<uint64_t>({500, 300, 300, 100}));
  const kvm_seq_info info = world.info();
  EXPECT_EQ(info.n_committed, 500u);
  EXPECT_EQ(info.n_tokens_min, 100u);
  EXPECT_EQ(info.n_tokens_max, 500u);
  uint64_t n_pages = 0;
  for (const uint64_t length : world.lengths()) {
    n_pages += (length + kPageTokens - 1) / kPageTokens;
  }
  EXPECT_EQ(info.n_pages, n_pages);
  EXPECT_EQ(info.bytes, n_pages * kPageTokens * kHeads * kDim * 2 * sizeof(float));
}

// Layers that no token reaches any more keep nothing that nobody sees.
TEST(LayerEnds, PoliciesFreeLayersThatTokensSkip) {
  World world(true);
  for (const uint64_t n : {100u, 99u, 101u, 300u}) {
    world.decode_all(n, falling);
    EXPECT_EQ(world.info().n_committed, world.lengths()[0]);
    EXPECT_EQ(world.info().n_entries_dropped, world.n_dropped(world.lengths()[0]));
  }
}

// Without the flag the shortest layer holds the commit point, as before.
TEST(LayerEnds, WithoutAWordTheShortestLayerCommits) {
  World world(true, 0, false);
  world.decode_all(400, falling);
  EXPECT_EQ(world.info().n_committed, 100u);
}

TEST(LayerEnds, TokensOfAllLayersAreAsEver) {
  const Depth all = [](uint64_t) { return kLayers; };
  World said(true);
  World silent(true, 0, false);
  said.decode_all(300, all);
  silent.decode_all(300, all);
  EXPECT_EQ(said.outputs, silent.outputs);
  EXPECT_EQ(said.info().n_committed, 300u);
  EXPECT_EQ(silent.info().n_committed, 300u);
  EXPECT_EQ(said.info().n_entries_dropped, silent.info().n_entries_dropped);
}

TEST(LayerEnds, CommitsByHandReachTheLongestLayer) {
  World world(true, KVM_SEQ_MANUAL_COMMIT);
  world.decode_all(400, falling);
  EXPECT_EQ(world.info().n_committed, 0u);
  EXPECT_EQ(world.info().n_entries_dropped, 0u);
  const RequestResult beyond = world.rig.verb(SeqVerb::kCommit, world.seq, 401);
  EXPECT_EQ(beyond.status.code(), KVM_ERR_INVALID);
  EXPECT_EQ(beyond.status.message(), "n_tokens is 401; the longest layer has 400 tokens");
  ASSERT_TRUE(world.rig.verb(SeqVerb::kCommit, world.seq, 400).status.is_ok());
  EXPECT_EQ(world.info().n_committed, 400u);
  EXPECT_EQ(world.info().n_entries_dropped, world.n_dropped(400));
}

// A draft of tokens of all depths is taken back, and others come.
TEST(LayerEnds, CutsGoThroughAllLayers) {
  World world(false);
  world.decode_all(350, falling);
  world.truncate(250);
  EXPECT_EQ(world.info().n_committed, 250u);
  EXPECT_EQ(world.lengths(), std::vector<uint64_t>({250, 250, 250, 100}));
  world.decode_all(100, falling);
  EXPECT_EQ(world.lengths(), std::vector<uint64_t>({350, 300, 300, 100}));
  world.truncate(60);
  world.decode_all(80, falling);
  EXPECT_EQ(world.lengths(), std::vector<uint64_t>({140, 140, 140, 100}));
  EXPECT_EQ(world.info().n_committed, 140u);
}

// A layer that others have left behind has given up what a query behind its end would see.
TEST(LayerEnds, ACutThatALayerCannotFollowIsRefused) {
  World world(true);
  world.decode_all(400, falling);
  for (const uint64_t n : {100u, 99u, 300u}) {
    EXPECT_EQ(world.rig.verb(SeqVerb::kTruncate, world.seq, n).status.code(), KVM_ERR_PARTIAL) << n;
    EXPECT_EQ(world.rig.verb(SeqVerb::kFork, world.seq, n).status.code(), KVM_ERR_PARTIAL) << n;
  }
  EXPECT_TRUE(world.rig.verb(SeqVerb::kFork, world.seq, KVM_POSITION_END).status.is_ok());
  world.truncate(400);
  world.decode_all(10, falling);
}

// What a layer gets behind the commit point is final: policies act on it at once.
TEST(LayerEnds, TokensThatComeLateAreFinal) {
  World world(true, KVM_SEQ_MANUAL_COMMIT);
  world.attends = false;
  for (uint64_t t = 0; t < 400; ++t) {
    ASSERT_TRUE(world.step(0, t, false).status.is_ok());
  }
  ASSERT_TRUE(world.rig.verb(SeqVerb::kCommit, world.seq, 400).status.is_ok());
  const uint64_t n_first = world.info().n_entries_dropped;
  EXPECT_GT(n_first, 0u);
  for (uint64_t t = 0; t < 400; ++t) {
    ASSERT_TRUE(world.step(1, t, false).status.is_ok());
  }
  EXPECT_EQ(world.info().n_entries_dropped, 2 * n_first);
}

// A token may not come back to a layer that one before it has skipped.
TEST(LayerEnds, AHoleIsRefusedWithItsPosition) {
  World world(false);
  world.decode_all(120, falling);
  const RequestResult result = world.step(3, 120, true);
  EXPECT_EQ(result.status.code(), KVM_ERR_HOLE);
  EXPECT_NE(result.status.message().find("append_position is 120; layer 3"), std::string::npos)
      << result.status.message();
  EXPECT_EQ(world.info().n_committed, 120u);
}

// Depths drawn at random, never rising: no hole, and the bytes of the formula.
TEST(LayerEnds, RandomSchedulesNeverMakeAHole) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    std::mt19937_64 random(seed);
    World world(seed % 2 == 0);
    uint32_t depth = kLayers;
    uint64_t n_reached = 0;
    for (int i = 0; i < 200; ++i) {
      depth -= depth > 1 && random() % 60 == 0 ? 1 : 0;
      n_reached += depth;
      world.decode(depth);
    }
    EXPECT_EQ(world.info().n_entries_dropped, seed % 2 == 0 ? world.n_dropped(200) : 0);
    uint64_t n_tokens = 0;
    for (const uint64_t length : world.lengths()) {
      n_tokens += length;
    }
    EXPECT_EQ(n_tokens, n_reached);
    EXPECT_EQ(world.info().n_committed, 200u);
  }
}

// --- SkipDecode (docs/policies/skip_decode.md) ---------------------------------------------------

// The number of layers falls from the first token to the last one; the layers between the first
// ones and the top are left out.
struct Schedule {
  uint32_t n_layers = 8;
  uint32_t n_warm = 1;
  uint32_t n_most = 8;
  uint32_t n_least = 3;
  uint64_t n_tokens = 200;

  uint32_t n_active(uint64_t t) const {
    const double fall = static_cast<double>(n_most - n_least) * static_cast<double>(t) /
                        static_cast<double>(n_tokens - 1);
    return std::clamp(static_cast<uint32_t>(std::lround(n_most - fall)), n_least, n_most);
  }
  std::vector<uint32_t> layers(uint32_t n) const {
    std::vector<uint32_t> all;
    for (uint32_t layer = 0; layer < n_layers; ++layer) {
      if (layer < n_warm || layer >= n_layers - (n - n_warm)) {
        all.push_back(layer);
      }
    }
    return all;
  }
};

uint64_t pages_of(uint64_t n_tokens) { return (n_tokens + kPageTokens - 1) / kPageTokens; }

void expect_same(const kvm_seq_info& a, const kvm_seq_info& b) {
  EXPECT_EQ(a.n_tokens_min, b.n_tokens_min);
  EXPECT_EQ(a.n_tokens_max, b.n_tokens_max);
  EXPECT_EQ(a.n_committed, b.n_committed);
  EXPECT_EQ(a.n_pages, b.n_pages);
  EXPECT_EQ(a.bytes, b.bytes);
  EXPECT_EQ(a.n_entries_dropped, b.n_entries_dropped);
}

// Of all keys and values a share of (mean n_t) / L is there, up to a page a layer, and every
// answer is that over the layer's own tokens.
TEST(SkipDecode, BytesAreTheMeanDepth) {
  struct Case {
    Schedule schedule;
    bool attends;
  };
  for (const auto& [schedule, attends] :
       {Case{{}, true},
        {{.n_warm = 2, .n_most = 7, .n_least = 4, .n_tokens = 150}, true},
        {{.n_layers = 12, .n_most = 12, .n_least = 2, .n_tokens = 640}, false}}) {
    SCOPED_TRACE(schedule.n_tokens);
    World world(false, 0, true, schedule.n_layers);
    world.attends = attends;
    uint64_t sum = 0;
    std::vector<uint64_t> lengths(schedule.n_layers);
    for (uint64_t t = 0; t < schedule.n_tokens && !HasFailure(); ++t) {
      const uint32_t n = schedule.n_active(t);
      const std::vector<uint32_t> layers = schedule.layers(n);
      ASSERT_EQ(layers.size(), n);
      for (const uint32_t layer : layers) {
        ++lengths[layer];
      }
      sum += n;
      world.decode(layers);
      ASSERT_EQ(world.info().n_committed, t + 1);
    }
    EXPECT_EQ(world.lengths(), lengths);
    EXPECT_EQ(schedule.n_active(0), schedule.n_most);
    EXPECT_EQ(schedule.n_active(schedule.n_tokens - 1), schedule.n_least);
    uint64_t n_pages = 0;
    for (const uint64_t length : lengths) {
      n_pages += pages_of(length);
    }
    const kvm_seq_info info = world.info();
    const uint64_t row_bytes = uint64_t{kHeads} * kDim * 2 * sizeof(float);
    EXPECT_EQ(info.bytes, n_pages * kPageTokens * row_bytes);
    const double full = static_cast<double>(schedule.n_layers * schedule.n_tokens * row_bytes);
    const double mean = static_cast<double>(sum) / static_cast<double>(schedule.n_tokens);
    const double share = static_cast<double>(info.bytes) / full;
    EXPECT_GE(share, mean / schedule.n_layers);
    EXPECT_LT(share, mean / schedule.n_layers +
                         static_cast<double>(kPageTokens) / static_cast<double>(schedule.n_tokens));
  }
}

// Drawn at random and never rising, depths make no hole. A token that would go deeper is refused
// in each layer that one before it has left out, by its number and as the end.
TEST(SkipDecode, WhatRisesIsAHole) {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const Schedule schedule = {.n_warm = 1 + static_cast<uint32_t>(seed % 2)};
    World world(seed > 2, 0, true, schedule.n_layers);
    uint32_t n = schedule.n_layers;
    uint32_t n_refused = 0;
    for (uint64_t t = 0; t < 150 && !HasFailure(); ++t) {
      n -= n > schedule.n_warm + 1 && random() % 20 == 0 ? 1 : 0;
      const std::vector<uint32_t> active = schedule.layers(n);
      for (uint32_t layer = 0; layer < schedule.n_layers; ++layer) {
        if (random() % 20 != 0 || world.lengths()[layer] == t) {
          continue;
        }
        const kvm_seq_info before = world.info();
        for (const bool says_end : {false, true}) {
          world.says_end = says_end;
          const RequestResult result = world.step(layer, t, layer + 1 == schedule.n_layers);
          EXPECT_EQ(result.status.code(), KVM_ERR_HOLE);
          const std::string who = "layer " + std::to_string(layer) + " of sequence";
          const std::string has = "has " + std::to_string(world.lengths()[layer]);
          EXPECT_EQ(result.status.message().find(says_end ? "append_position is the end; " + who
                                                          : "append_position is " +
                                                                std::to_string(t) + "; " + who),
                    0u)
              << result.status.message();
          EXPECT_NE(result.status.message().find(has), std::string::npos);
          expect_same(before, world.info());
          ++n_refused;
        }
        world.says_end = false;
      }
      world.says_end = t % 2 == 0;  // which is the same where there is no hole
      world.decode(active);
      world.says_end = false;
    }
    EXPECT_GT(n_refused, 20u);
  }
}

// An engine that finds out in the middle of a token takes the token back and goes on.
TEST(SkipDecode, ATokenThatMetAHoleIsTakenBack) {
  const Schedule schedule;
  World world(false, 0, true, schedule.n_layers);
  World calm(false, 0, true, schedule.n_layers);
  for (uint64_t t = 0; t < 100; ++t) {
    world.decode(schedule.layers(t < 50 ? 8 : 5));
    calm.decode(schedule.layers(t < 50 ? 8 : 5));
  }
  ASSERT_TRUE(world.step(0, 100, false).status.is_ok());
  EXPECT_EQ(world.step(1, 100, false).status.code(), KVM_ERR_HOLE);
  world.truncate(100);
  expect_same(world.info(), calm.info());
  for (int i = 0; i < 20; ++i) {
    world.decode(schedule.layers(4));
    calm.decode(schedule.layers(4));
  }
  EXPECT_EQ(world.outputs, calm.outputs);
}

TEST(SkipDecode, AllLayersAreTheOrdinaryCache) {
  const Schedule schedule = {.n_least = 8, .n_tokens = 220};
  for (const bool has_policy : {false, true}) {
    World skips(has_policy, 0, true, schedule.n_layers);
    World plain(has_policy, 0, false, schedule.n_layers);
    skips.checks = plain.checks = false;
    for (uint64_t t = 0; t < schedule.n_tokens && !HasFailure(); ++t) {
      skips.decode(schedule.layers(schedule.n_active(t)));
      plain.decode(schedule.n_layers);
    }
    EXPECT_EQ(skips.outputs, plain.outputs);
    expect_same(skips.info(), plain.info());
    EXPECT_EQ(skips.info().n_entries_dropped, has_policy ? skips.n_dropped(220) : 0);
    EXPECT_EQ(skips.n_dropped(220), schedule.n_layers * kPageTokens);
  }
}

// A second turn at full depth meets the hole. The engine computes what was left out, appends it
// where it belongs, where it is final at once, and goes on.
TEST(SkipDecode, ASecondTurnFillsWhatWasLeftOut) {
  const Schedule schedule = {.n_tokens = 220};
  for (const bool has_policy : {false, true}) {
    World world(has_policy, 0, true, schedule.n_layers);
    World deep(has_policy, 0, true, schedule.n_layers);
    world.attends = deep.attends = false;
    for (uint64_t t = 0; t < schedule.n_tokens && !HasFailure(); ++t) {
      world.decode(schedule.layers(schedule.n_active(t)));
      deep.decode(schedule.n_layers);
    }
    EXPECT_EQ(world.step(1, schedule.n_tokens, false).status.code(), KVM_ERR_HOLE);
    for (uint32_t layer = 0; layer < schedule.n_layers; ++layer) {
      for (uint64_t t = world.lengths()[layer]; t < schedule.n_tokens; ++t) {
        ASSERT_TRUE(world.step(layer, t, false).status.is_ok()) << layer << " at " << t;
      }
      world.set_length(layer, schedule.n_tokens);
    }
    expect_same(world.info(), deep.info());
    world.attends = deep.attends = true;
    for (int i = 0; i < 10; ++i) {
      world.decode(schedule.n_layers);
      deep.decode(schedule.n_layers);
    }
    EXPECT_EQ(world.outputs, deep.outputs);
    expect_same(world.info(), deep.info());
  }
}

// What is committed by hand leaves layers behind just so.
TEST(SkipDecode, TheEndIsNoPositionBehindTheCommitPoint) {
  World world(false, KVM_SEQ_MANUAL_COMMIT);
  world.attends = false;
  for (uint64_t t = 0; t < 30; ++t) {
    ASSERT_TRUE(world.step(0, t, false).status.is_ok());
  }
  world.says_end = true;
  ASSERT_TRUE(world.step(1, 0, false).status.is_ok()) << "nothing is final yet";
  ASSERT_TRUE(world.rig.verb(SeqVerb::kCommit, world.seq, 30).status.is_ok());
  EXPECT_EQ(world.step(1, 1, false).status.code(), KVM_ERR_HOLE);
  EXPECT_EQ(world.step(2, 0, false).status.code(), KVM_ERR_HOLE);
  ASSERT_TRUE(world.step(0, 30, false).status.is_ok());
  world.says_end = false;
  for (uint64_t t = 1; t < 30; ++t) {
    ASSERT_TRUE(world.step(1, t, false).status.is_ok());
  }
  world.says_end = true;
  EXPECT_TRUE(world.step(1, 30, false).status.is_ok());
}

}  // namespace
}  // namespace kvm::engine::testing
