// SPDX-License-Identifier: Apache-2.0
// kvm_seq_drop and KVM_ITEM_RESTORE: tokens that an engine gives up and brings back, against a
// model that knows which are there, in double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/unit/engine/policy_testbed.h"

namespace kvm::engine::testing {
namespace {

constexpr uint32_t kDim = 32;
constexpr uint32_t kKvHeads = 2;
constexpr uint32_t kQHeads = 4;
const double kScale = 1.0 / std::sqrt(double{kDim});

Row key_of(uint64_t position, uint32_t head) { return hashed_row(1, position, head, kDim, 1.0); }
Row value_of(uint64_t position, uint32_t head) { return hashed_row(2, position, head, kDim, 1.0); }
Row query_of(uint64_t position, uint32_t head) { return hashed_row(3, position, head, kDim, 1.0); }

SpaceSpec plain_spec(uint32_t codec_k = KVM_CODEC_F32, uint32_t codec_v = KVM_CODEC_F32) {
  SpaceSpec spec = make_spec("dropping", 1, kQHeads, kKvHeads, kDim);
  spec.codecs = {{.codec_k = codec_k, .codec_v = codec_v}};
  return spec;
}

// One that looks at neighbours alone beside one that keeps all.
constexpr uint64_t kSinks = 4;
constexpr uint64_t kRecent = 100;
SpaceSpec mixed_spec() {
  SpaceSpec spec = plain_spec();
  spec.policies = {{.kv_head_mask = {2, 0},
                    .retention = KVM_RETAIN_SINKS_RECENT,
                    .n_sinks = kSinks,
                    .n_recent = kRecent}};
  return spec;
}

class World : public PolicyRig {
 public:
  explicit World(SpaceSpec spec, uint64_t capacity_bytes = 256 << 20, uint32_t n_threads = 1)
      : PolicyRig(std::move(spec), key_of, value_of, query_of, capacity_bytes, n_threads) {}

  Status drop(kvm_seq_id of, uint64_t begin, uint64_t end) {
    SeqRequest request;
    request.verb = SeqVerb::kDrop;
    request.seq = of;
    request.range = {.begin = begin, .end = end};
    return rig.run(std::move(request)).status;
  }
  // The rows are those of positions from `begin` on, or others.
  Status restore(kvm_seq_id of, uint64_t begin, uint32_t n, uint64_t row_of = UINT64_MAX) {
    Buffer k(Dtype::kF32, 1, n, kKvHeads, kDim);
    Buffer v(Dtype::kF32, 1, n, kKvHeads, kDim);
    for (uint32_t t = 0; t < n; ++t) {
      for (uint32_t h = 0; h < kKvHeads; ++h) {
        const uint64_t position = (row_of == UINT64_MAX ? begin : row_of) + t;
        for (uint32_t i = 0; i < kDim; ++i) {
          k.set(0, t, h, i, static_cast<float>(key_of(position, h)[i]));
          v.set(0, t, h, i, static_cast<float>(value_of(position, h)[i]));
        }
      }
    }
    StepRequest request;
    request.space = space;
    request.append = true;
    kvm_item item = append_item(of, n);
    item.append_position = begin;
    item.flags = KVM_ITEM_RESTORE;
    request.items = {item};
    request.k = k.view();
    request.v = v.view();
    return rig.run(std::move(request)).status;
  }
  // The output of n_query rows from `position` on, in `output`.
  Status attend(kvm_seq_id of, uint64_t position, uint32_t n_query,
                std::vector<kvm_range> shown = {}, uint32_t flags = KVM_ITEM_EXCLUDE_RANGES,
                uint32_t mode = KVM_MODE_EXACT, uint64_t budget = 0) {
    Buffer q(Dtype::kF32, 1, n_query, kQHeads, kDim);
    output = Buffer(Dtype::kF32, 1, n_query, kQHeads, kDim);
    for (uint32_t t = 0; t < n_query; ++t) {
      for (uint32_t h = 0; h < kQHeads; ++h) {
        for (uint32_t i = 0; i < kDim; ++i) {
          q.set(0, t, h, i, static_cast<float>(query_of(position + t, h)[i]));
        }
      }
    }
    StepRequest request;
    request.space = space;
    request.attend = true;
    kvm_item item = query_item(of, n_query, 0, position);
    item.flags = flags;
    item.n_ranges = static_cast<uint32_t>(shown.size());
    request.items = {item};
    request.ranges = std::move(shown);
    request.mode = mode;
    request.budget = budget;
    request.q = q.view();
    request.o = output.view();
    result = rig.run(std::move(request));
    return result.status;
  }

  Buffer output;
  RequestResult result;
};

// A sequence as it should be.
struct Twin {
  kvm_seq_id seq = 0;
  uint64_t length = 0;
  std::set<uint64_t> dropped;  // blocks

  bool lacks_any(uint64_t begin, uint64_t end) const {
    const auto at = dropped.lower_bound(begin / kPageTokens);
    return at != dropped.end() && *at * kPageTokens < end;
  }
  bool may_be_cut(uint64_t n) const {
    return n >= length || n % kPageTokens == 0 || !dropped.contains(n / kPageTokens);
  }
  void cut(uint64_t n) {
    if (n < length) {
      length = n;
      dropped.erase(dropped.lower_bound(n / kPageTokens), dropped.end());
    }
  }
  std::vector<kvm_range> gaps() const {
    std::vector<kvm_range> gaps;
    for (const uint64_t block : dropped) {
      gaps.push_back({block * kPageTokens, (block + 1) * kPageTokens});
    }
    return gaps;
  }
};

double worst_error(const World& world, const Twin& twin, uint64_t position, bool is_mixed) {
  double worst = 0;
  for (uint32_t q = 0; q < kQHeads; ++q) {
    const uint32_t h = q / (kQHeads / kKvHeads);
    std::vector<Entry> entries;
    for (uint64_t x = 0; x <= position; ++x) {
      const bool is_near = x < kSinks || x + kRecent > position;
      if (!twin.dropped.contains(x / kPageTokens) && (!is_mixed || h == 0 || is_near)) {
        entries.push_back({key_of(x, h), value_of(x, h)});
      }
    }
    Answer expected = attention_over(query_of(position, q), entries, kScale);
    expected.o.resize(kDim);
    for (uint32_t i = 0; i < kDim; ++i) {
      const double o = entries.empty() ? 0 : expected.o[i];
      worst = std::max(worst, std::fabs(double{world.output.get(0, 0, q, i)} - o));
    }
  }
  return worst;
}

TEST(Drop, WhatIsGoneIsMissedLeftOutAndBroughtBackWithItsBits) {
  for (const auto& [k, v] :
       {std::pair{"fp32", "fp32"}, std::pair{"bf16", "bf16"}, std::pair{"int8", "int8"},
        std::pair{"int8_channel", "int8_channel"}, std::pair{"int4_channel", "int4"},
        std::pair{"int2_centred", "int2"}, std::pair{"gear4_channel", "gear4"}}) {
    SCOPED_TRACE(std::string(k) + ", " + v);
    const auto codec = [](const char* name) {
      return static_cast<uint32_t>(codecs::find_codec(name)->id);
    };
    World world(plain_spec(codec(k), codec(v)));
    world.step(world.seq, 1000, 0);
    ASSERT_TRUE(world.attend(world.seq, 999, 1).is_ok());
    const std::vector<std::byte> whole = world.output.bytes();
    const kvm_seq_info before = world.info(world.seq);

    ASSERT_TRUE(world.drop(world.seq, 100, 450).is_ok());  // blocks 2 to 6
    const kvm_seq_info info = world.info(world.seq);
    EXPECT_EQ(info.n_entries_dropped, 5 * kPageTokens);
    EXPECT_EQ(info.n_pages, before.n_pages - 5);
    EXPECT_LT(info.bytes, before.bytes);
    EXPECT_EQ(info.n_tokens_max, 1000u);
    const Status missed = world.attend(world.seq, 999, 1);
    EXPECT_EQ(missed.code(), KVM_ERR_PARTIAL);
    EXPECT_NE(missed.message().find("[128, 448)"), std::string::npos) << missed.message();
    EXPECT_EQ(world.read(world.seq, 130, 1).code(), KVM_ERR_PARTIAL);
    EXPECT_TRUE(world.read(world.seq, 448, 10).is_ok());
    ASSERT_TRUE(world.attend(world.seq, 999, 1, {{128, 448}}).is_ok());

    // In any order, and what is there stays, whatever is said of it.
    ASSERT_TRUE(world.restore(world.seq, 320, 64).is_ok());
    EXPECT_EQ(world.attend(world.seq, 999, 1).code(), KVM_ERR_PARTIAL);
    EXPECT_EQ(world.info(world.seq).n_entries_dropped, 4 * kPageTokens);
    ASSERT_TRUE(world.restore(world.seq, 0, 128, 5000).is_ok());
    EXPECT_EQ(world.info(world.seq).n_entries_dropped, 4 * kPageTokens);
    ASSERT_TRUE(world.restore(world.seq, 64, 512).is_ok());
    EXPECT_EQ(world.info(world.seq).n_entries_dropped, 0u);
    EXPECT_EQ(world.info(world.seq).bytes, before.bytes);
    ASSERT_TRUE(world.attend(world.seq, 999, 1).is_ok());
    EXPECT_TRUE(world.output.bytes() == whole);
    world.step(world.seq, 30, 1);  // and it grows on
  }
}

TEST(Drop, WhatIsNotSeenIsNotMissed) {
  World world(plain_spec());
  world.step(world.seq, 640, 0);
  ASSERT_TRUE(world.drop(world.seq, 128, 256).is_ok());
  ASSERT_TRUE(world.drop(world.seq, 384, 448).is_ok());
  const auto code = [&](uint64_t position, uint32_t n, std::vector<kvm_range> ranges = {},
                        uint32_t flags = KVM_ITEM_EXCLUDE_RANGES) {
    return world.attend(world.seq, position, n, std::move(ranges), flags).code();
  };
  EXPECT_EQ(code(127, 1), KVM_OK);
  EXPECT_EQ(code(120, 8), KVM_OK);
  EXPECT_EQ(code(120, 9), KVM_ERR_PARTIAL);  // the last row sees 128
  EXPECT_EQ(code(120, 1, {}, KVM_ITEM_NOT_CAUSAL), KVM_ERR_PARTIAL);
  EXPECT_EQ(code(300, 1, {{128, 256}}), KVM_OK);
  EXPECT_EQ(code(300, 1, {{0, 200}, {200, 256}}), KVM_OK);
  EXPECT_EQ(code(300, 1, {{0, 200}, {201, 256}}), KVM_ERR_PARTIAL);
  EXPECT_EQ(code(300, 1, {{129, 256}}), KVM_ERR_PARTIAL);
  EXPECT_EQ(code(300, 1, {{128, 255}}), KVM_ERR_PARTIAL);
  EXPECT_EQ(code(600, 1, {{128, 256}}), KVM_ERR_PARTIAL);
  EXPECT_EQ(code(600, 1, {{128, 256}, {300, 300}, {384, 448}}), KVM_OK);
  EXPECT_EQ(code(600, 1, {{0, 128}, {256, 384}}, 0), KVM_OK);
  EXPECT_EQ(code(600, 1, {{5, 5}, {0, 129}}, 0), KVM_ERR_INVALID);
  EXPECT_EQ(code(600, 1, {{5, 5}, {64, 129}}, 0), KVM_ERR_PARTIAL);
  EXPECT_EQ(code(600, 1, {{5, 5}, {130, 130}}, 0), KVM_OK);  // nothing is shown
  // To compute what was dropped again, its rows come before they ask.
  ASSERT_TRUE(world.restore(world.seq, 128, 128).is_ok());
  EXPECT_EQ(code(128, 128), KVM_OK);
  EXPECT_EQ(code(383, 1), KVM_OK);
  EXPECT_EQ(code(384, 1), KVM_ERR_PARTIAL);
}

TEST(Drop, AWindowThatHasPassedMissesNothing) {
  SpaceSpec spec = plain_spec();
  kvm_layer_params layer{};
  layer.n_layers = 1;
  layer.window = 100;
  spec.layers = {layer};
  World world(std::move(spec));
  world.step(world.seq, 640, 0);
  ASSERT_TRUE(world.drop(world.seq, 0, 512).is_ok());
  EXPECT_EQ(world.attend(world.seq, 610, 1).code(), KVM_ERR_PARTIAL);  // sees 511
  EXPECT_TRUE(world.attend(world.seq, 611, 1).is_ok());
}

TEST(Drop, RefusalsSayWhatIsAllowed) {
  World world(plain_spec());
  world.step(world.seq, 300, 0);
  const auto said = [](const Status& status, kvm_status code, const char* words) {
    EXPECT_EQ(status.code(), code) << status.message();
    EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
  };
  said(world.drop(world.seq, 64, 301), KVM_ERR_INVALID, "ends at 300");
  said(world.drop(world.seq, 65, 64), KVM_ERR_INVALID, "[65, 64)");
  EXPECT_TRUE(world.drop(world.seq, 65, 127).is_ok());  // no whole page
  EXPECT_EQ(world.info(world.seq).n_entries_dropped, 0u);
  EXPECT_TRUE(world.drop(world.seq, 0, KVM_POSITION_END).is_ok());
  EXPECT_EQ(world.info(world.seq).n_entries_dropped, 256u);  // the last page is not full
  said(world.restore(world.seq, 63, 64), KVM_ERR_INVALID, "multiples of 64");
  said(world.restore(world.seq, 64, 63), KVM_ERR_INVALID, "multiples of 64");
  said(world.restore(world.seq, KVM_POSITION_END, 64), KVM_ERR_INVALID, "multiples of 64");
  said(world.restore(world.seq, 256, 64), KVM_ERR_INVALID, "has 300 tokens that are final");
  said(world.restore(world.seq, uint64_t{1} << 37, 64), KVM_ERR_INVALID, "are final");
  // With queries: they would not see it.
  StepRequest both;
  both.space = world.space;
  both.append = both.attend = true;
  kvm_item item = append_item(world.seq, 64);
  item.append_position = 0;
  item.n_query = 1;
  item.flags = KVM_ITEM_RESTORE;
  both.items = {item};
  Buffer rows(Dtype::kF32, 1, 64, kQHeads, kDim);
  both.k = both.v = both.q = both.o = rows.view();
  said(world.rig.run(std::move(both)).status, KVM_ERR_INVALID, "KVM_ITEM_RESTORE");
  // An ordinary append still means the end.
  StepRequest append;
  append.space = world.space;
  append.append = true;
  item = append_item(world.seq, 64);
  item.append_position = 0;
  append.items = {item};
  append.k = append.v = rows.view();
  said(world.rig.run(std::move(append)).status, KVM_ERR_HOLE, "append_position is 0");
  // What is not final is not given up.
  const kvm_seq_id draft = world.rig.create(world.space, KVM_SEQ_MANUAL_COMMIT);
  world.step(draft, 200, 0);
  said(world.drop(draft, 0, 64), KVM_ERR_INVALID, "ends at 0");
  EXPECT_TRUE(world.drop(draft, 0, KVM_POSITION_END).is_ok());
  EXPECT_EQ(world.info(draft).n_entries_dropped, 0u);
}

TEST(Drop, ForksKeepWhatTheyShare) {
  World world(plain_spec());
  world.step(world.seq, 640, 0);
  ASSERT_TRUE(world.attend(world.seq, 639, 1).is_ok());
  const std::vector<std::byte> whole = world.output.bytes();
  const kvm_seq_id child = world.fork(world.seq);
  const uint64_t bytes = world.bytes(world.seq);
  ASSERT_TRUE(world.drop(child, 0, 320).is_ok());
  EXPECT_EQ(world.bytes(world.seq), bytes);
  ASSERT_TRUE(world.attend(world.seq, 639, 1).is_ok());
  EXPECT_TRUE(world.output.bytes() == whole);
  // A fork of what has gaps has the same, and closes its own.
  const kvm_seq_id grandchild = world.fork(child);
  ASSERT_TRUE(world.restore(grandchild, 0, 320).is_ok());
  ASSERT_TRUE(world.attend(grandchild, 639, 1).is_ok());
  EXPECT_TRUE(world.output.bytes() == whole);
  EXPECT_EQ(world.attend(child, 639, 1).code(), KVM_ERR_PARTIAL);
  EXPECT_EQ(world.rig.verb(SeqVerb::kFork, child, 100).status.code(), KVM_ERR_PARTIAL);
  EXPECT_EQ(world.rig.verb(SeqVerb::kTruncate, child, 100).status.code(), KVM_ERR_PARTIAL);
  EXPECT_TRUE(world.rig.verb(SeqVerb::kFork, child, 128).status.is_ok());
  EXPECT_TRUE(world.rig.verb(SeqVerb::kFork, child, 321).status.is_ok());
  EXPECT_TRUE(world.rig.verb(SeqVerb::kTruncate, child, 64).status.is_ok());
  EXPECT_EQ(world.info(child).n_entries_dropped, 64u);
}

// Heads with a policy of their own go on by that.
TEST(Drop, OtherHeadsGoOnByTheirPolicies) {
  World world(mixed_spec());
  world.step(world.seq, 640, 0);
  const kvm_seq_info before = world.info(world.seq);
  ASSERT_TRUE(world.drop(world.seq, 0, 640).is_ok());
  EXPECT_EQ(world.info(world.seq).n_entries_dropped, before.n_entries_dropped + 640);
  EXPECT_EQ(world.attend(world.seq, 639, 1).code(), KVM_ERR_PARTIAL);
  ASSERT_TRUE(world.restore(world.seq, 0, 640).is_ok());
  EXPECT_EQ(world.info(world.seq).n_entries_dropped, before.n_entries_dropped);
  EXPECT_EQ(world.info(world.seq).bytes, before.bytes);
}

// Three phases of a long text under a cap of bytes, as ALISA has them: all there; then the oldest
// pages go, as many as the next ones need; then what went comes back for a while.
TEST(Drop, ALongTextUnderACap) {
  constexpr uint64_t kCapTokens = 1024;
  World world(plain_spec());
  const uint64_t token_bytes = uint64_t{kKvHeads} * kDim * 2 * sizeof(float);
  const uint64_t cap = kCapTokens * token_bytes;
  uint64_t dropped_end = 0;
  uint64_t n_dense = 0;
  uint64_t n_sparse = 0;
  for (uint64_t length = kPageTokens; length <= 4 * kCapTokens; length += kPageTokens) {
    if (world.bytes(world.seq) + kPageTokens * token_bytes > cap) {
      ASSERT_TRUE(world.drop(world.seq, dropped_end, dropped_end + kPageTokens).is_ok());
      dropped_end += kPageTokens;
    }
    world.step(world.seq, kPageTokens, 0);
    ASSERT_LE(world.bytes(world.seq), cap);
    // The trace: nothing goes before the cap is reached, and from there on a page for each page.
    EXPECT_EQ(dropped_end, length <= kCapTokens ? 0 : length - kCapTokens);
    std::vector<kvm_range> gone;
    if (dropped_end != 0) {
      gone.push_back({0, dropped_end});
      EXPECT_EQ(world.attend(world.seq, length - 1, 1).code(), KVM_ERR_PARTIAL);
    }
    ASSERT_TRUE(world.attend(world.seq, length - 1, 1, gone).is_ok());
    (dropped_end == 0 ? n_dense : n_sparse) += 1;
  }
  EXPECT_EQ(n_dense, kCapTokens / kPageTokens);
  EXPECT_EQ(n_sparse, 3 * kCapTokens / kPageTokens);
  // A part of what went is wanted: others go for it, and it has its bits.
  ASSERT_TRUE(world.drop(world.seq, 3072, 3584).is_ok());
  ASSERT_TRUE(world.restore(world.seq, 512, 512).is_ok());
  ASSERT_LE(world.bytes(world.seq), cap);
  World dense(plain_spec());
  dense.step(dense.seq, 4096, 0);
  const std::vector<kvm_range> shown = {{512, 1024}, {3584, 4096}};
  ASSERT_TRUE(world.attend(world.seq, 4095, 1, shown, 0).is_ok());
  ASSERT_TRUE(dense.attend(dense.seq, 4095, 1, shown, 0).is_ok());
  EXPECT_TRUE(world.output.bytes() == dense.output.bytes());
}

// Sketches of what is dropped stay, and serve again when it is back.
TEST(Drop, AnIndexOutlivesItsTokens) {
  SpaceSpec spec = plain_spec();
  spec.indexes = {make_index()};
  World world(std::move(spec));
  world.step(world.seq, 4096, 0);
  const auto topk = [&](std::vector<kvm_range> ranges = {}) {
    return world.attend(world.seq, 4095, 1, std::move(ranges), KVM_ITEM_EXCLUDE_RANGES,
                        KVM_MODE_TOPK, 64);
  };
  ASSERT_TRUE(topk().is_ok());
  const std::vector<std::byte> whole = world.output.bytes();
  const uint64_t n_read = world.result.keys_read;
  const uint64_t index_bytes = world.info(world.seq).bytes_index;
  ASSERT_GT(index_bytes, 0u);
  ASSERT_LT(n_read, 2048u);
  ASSERT_TRUE(world.drop(world.seq, 1024, 3072).is_ok());
  EXPECT_EQ(world.info(world.seq).bytes_index, index_bytes);
  EXPECT_EQ(topk().code(), KVM_ERR_PARTIAL);
  ASSERT_TRUE(topk({{1024, 3072}}).is_ok());
  EXPECT_LT(world.result.keys_read, 2048u);
  ASSERT_TRUE(world.restore(world.seq, 1024, 2048).is_ok());
  ASSERT_TRUE(topk().is_ok());
  EXPECT_TRUE(world.output.bytes() == whole);
  EXPECT_EQ(world.result.keys_read, n_read);
}

// Where the index comes after the gap.
TEST(Drop, AnIndexOverAGap) {
  SpaceSpec spec = plain_spec();
  spec.indexes = {make_index()};
  World world(std::move(spec));
  world.step(world.seq, 4096, 0);
  ASSERT_TRUE(world.drop(world.seq, 256, 2048).is_ok());
  for (const uint32_t mode : {KVM_MODE_TOPK, KVM_MODE_SAMPLED, KVM_MODE_VERIFIED, KVM_MODE_AUTO}) {
    SCOPED_TRACE(mode);
    const uint64_t budget = mode == KVM_MODE_TOPK ? 64 : 0;
    ASSERT_TRUE(
        world.attend(world.seq, 4095, 1, {{256, 2048}}, KVM_ITEM_EXCLUDE_RANGES, mode, budget)
            .is_ok());
  }
  ASSERT_TRUE(world.restore(world.seq, 256, 1792).is_ok());
  Twin twin{world.seq, 4096, {}};
  ASSERT_TRUE(world.attend(world.seq, 4095, 1, {}, 0, KVM_MODE_TOPK, 4096).is_ok());
  EXPECT_LT(worst_error(world, twin, 4095, false), 1e-5);
}

class Histories {
 public:
  explicit Histories(uint64_t seed) : random_(seed), world_(mixed_spec(), 256 << 20, 2) {
    twins_.push_back({world_.seq, 0, {}});
  }

  void run(uint32_t n_steps) {
    for (uint32_t i = 0; i < n_steps && !::testing::Test::HasFatalFailure(); ++i) {
      SCOPED_TRACE("step " + std::to_string(i));
      step();
    }
  }

 private:
  uint64_t below(uint64_t n) { return n == 0 ? 0 : random_() % n; }

  void step() {
    Twin& twin = twins_[below(twins_.size())];
    switch (below(8)) {
      case 0:
      case 1: {
        // A list of many segments now and then: these are 128 pages.
        const auto n = static_cast<uint32_t>(1 + below(below(10) == 0 ? 20000 : 300));
        if (twin.length < 40000) {
          world_.step(twin.seq, n, 0);
          twin.length += n;
        }
        break;
      }
      case 2:
      case 3:
        drop(&twin);
        break;
      case 4:
        restore(&twin);
        break;
      case 5:
        fork(twin);
        break;
      case 6:
        cut(&twin);
        break;
      default:
        ask(twin);
    }
    check();
  }
  void drop(Twin* twin) {
    const uint64_t begin = below(twin->length + 1);
    const uint64_t end = begin + below(twin->length - begin + 1);
    ASSERT_TRUE(world_.drop(twin->seq, begin, end).is_ok());
    for (uint64_t block = (begin + kPageTokens - 1) / kPageTokens; (block + 1) * kPageTokens <= end;
         ++block) {
      twin->dropped.insert(block);
    }
  }
  void restore(Twin* twin) {
    const uint64_t n_blocks = twin->length / kPageTokens;
    if (n_blocks == 0) {
      return;
    }
    const uint64_t begin = below(n_blocks);
    const uint64_t n = 1 + below(std::min<uint64_t>(n_blocks - begin, 200));
    ASSERT_TRUE(
        world_.restore(twin->seq, begin * kPageTokens, static_cast<uint32_t>(n * kPageTokens))
            .is_ok());
    for (uint64_t block = begin; block < begin + n; ++block) {
      twin->dropped.erase(block);
    }
  }
  void fork(const Twin& twin) {
    Twin child = twin;
    const uint64_t n = below(2) == 0 ? twin.length : below(twin.length + 1);
    // The head with a window may have dropped what is seen there.
    const RequestResult forked = world_.rig.verb(SeqVerb::kFork, twin.seq, n);
    if (!twin.may_be_cut(n)) {
      EXPECT_EQ(forked.status.code(), KVM_ERR_PARTIAL);
    }
    if (!forked.status.is_ok()) {
      EXPECT_EQ(forked.status.code(), KVM_ERR_PARTIAL);
      return;
    }
    child.cut(n);
    child.seq = forked.seq;
    if (twins_.size() < 5) {
      twins_.push_back(child);
      return;
    }
    Twin& old = twins_[below(twins_.size())];
    ASSERT_TRUE(world_.rig.verb(SeqVerb::kFree, old.seq).status.is_ok());
    old = child;
  }
  void cut(Twin* twin) {
    const uint64_t n = twin->length - below(std::min<uint64_t>(twin->length, 200) + 1);
    const Status status = world_.rig.verb(SeqVerb::kTruncate, twin->seq, n).status;
    if (!twin->may_be_cut(n)) {
      EXPECT_EQ(status.code(), KVM_ERR_PARTIAL);
    }
    if (status.is_ok()) {
      twin->cut(n);
    } else {
      EXPECT_EQ(status.code(), KVM_ERR_PARTIAL);
    }
  }
  void ask(const Twin& twin) {
    if (twin.length == 0) {
      return;
    }
    const uint64_t last = twin.length - 1;
    const kvm_status code = world_.attend(twin.seq, last, 1).code();
    EXPECT_EQ(code, twin.lacks_any(0, twin.length) ? KVM_ERR_PARTIAL : KVM_OK);
    ASSERT_TRUE(world_.attend(twin.seq, last, 1, twin.gaps()).is_ok());
    EXPECT_LT(worst_error(world_, twin, last, true), 2e-5);
  }
  void check() {
    world_.rig.engine->check_accounts();
    for (const Twin& twin : twins_) {
      const kvm_seq_info info = world_.info(twin.seq);
      EXPECT_EQ(info.n_tokens_max, twin.length);
      // Of the two classes the one with a window has dropped what it says.
      EXPECT_GE(info.n_entries_dropped, twin.dropped.size() * kPageTokens);
    }
  }

  std::mt19937_64 random_;
  World world_;
  std::vector<Twin> twins_;
};

TEST(Drop, AnyHistory) {
  const uint64_t n_seeds = is_nightly() ? 40 : 3;
  for (uint64_t seed = 1; seed <= n_seeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Histories(seed).run(120);
  }
}

}  // namespace
}  // namespace kvm::engine::testing
