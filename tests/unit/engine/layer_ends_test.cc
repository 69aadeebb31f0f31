// SPDX-License-Identifier: Apache-2.0
// Tokens that end at different layers, as models have them that skip layers: lengths, the commit
// point, what policies free and what queries see, layer by layer.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
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
  explicit World(bool has_policy, uint32_t flags = 0, bool says_last = true)
      : has_policy_(has_policy), says_last_(says_last) {
    SpaceSpec spec = make_spec("ends", kLayers, kHeads, kHeads, kDim);
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
    const uint64_t position = lengths_[0];
    for (uint32_t layer = 0; layer < depth; ++layer) {
      const RequestResult result = step(layer, position, layer + 1 == depth);
      ASSERT_TRUE(result.status.is_ok()) << result.status.message();
      ++lengths_[layer];
      for (uint32_t head = 0; head < kHeads; ++head) {
        const std::vector<float> o = o_.get_row(0, 0, head);
        outputs.insert(outputs.end(), o.begin(), o.end());
        EXPECT_LE(error(layer, position, head), 1e-5) << "layer " << layer << " at " << position;
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
    item.append_position = position;
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

  Rig rig;
  kvm_seq_id seq = 0;
  std::vector<float> outputs;
  bool attends = true;  // steps

 private:
  static void put(Buffer* buffer, uint32_t head, const Row& row) {
    for (uint32_t i = 0; i < kDim; ++i) {
      buffer->set(0, 0, head, i, static_cast<float>(row[i]));
    }
  }
  // Of the last step, against the layer's own tokens.
  double error(uint32_t layer, uint64_t position, uint32_t head) const {
    std::vector<Entry> entries;
    for (uint64_t t = 0; t <= position; ++t) {
      if (!has_policy_ || t < kSinks || t + kRecent > position) {
        entries.push_back({.k = row_of(1, layer, t, head), .v = row_of(2, layer, t, head)});
      }
    }
    const Answer expected = attention_over(row_of(3, layer, position, head), entries,
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
  std::vector<uint64_t> lengths_ = std::vector<uint64_t>(kLayers);
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

}  // namespace
}  // namespace kvm::engine::testing
