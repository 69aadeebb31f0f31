// SPDX-License-Identifier: Apache-2.0
// Sequences of which pages are in a slow tier answer as those do that are in memory, bit for bit;
// and whatever comes between, nothing is lost and nobody else waits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/limits.h"
#include "engine/engine.h"
#include "tests/common/environment.h"
#include "tests/unit/engine/rig.h"
#include "tiers/simulated/simulated_tier.h"

namespace kvm::engine::testing {
namespace {

using tiers::SimulatedTier;
using tiers::SimulatedTierOptions;
using tiers::Transfer;

constexpr uint32_t kHeads = 2;
constexpr uint32_t kGroup = 2;
constexpr uint32_t kDim = 16;

EngineOptions with_tier(tiers::SlowTier* tier, uint32_t n_threads,
                        uint64_t capacity_bytes = 256 << 20) {
  EngineOptions options = Rig::make_options(n_threads, capacity_bytes);
  options.slow_tier = tier;
  options.default_quota_bytes = 4 * capacity_bytes;  // of pages wherever they lie
  options.movement.is_automatic = false;
  return options;
}

void send_away(Rig& rig, kvm_seq_id seq) {
  ASSERT_TRUE(rig.engine->send_away(seq).is_ok());
  EXPECT_TRUE(rig.drive_until([&] { return !rig.engine->is_sending(); }));
}

SpaceSpec plain_spec(uint32_t codec = KVM_CODEC_F32, uint32_t n_layers = 1) {
  SpaceSpec spec = make_spec("plain", n_layers, kHeads * kGroup, kHeads, kDim);
  spec.params.codec = codec;
  return spec;
}

// A request with its tensors.
struct Asked {
  StepRequest step;
  ReadRequest read;
  Buffer q, o, lse, k, v;
};

// An append of n tokens to all layers, whose rows come from a seed.
std::unique_ptr<Asked> append_of(kvm_space_id space, kvm_seq_id seq, uint32_t n, uint64_t seed,
                                 uint32_t n_layers = 1) {
  auto asked = std::make_unique<Asked>();
  std::mt19937_64 random(seed);
  asked->k = Buffer(Dtype::kF32, n_layers, n, kHeads, kDim);
  asked->v = Buffer(Dtype::kF32, n_layers, n, kHeads, kDim);
  fill(&asked->k, n_layers, n, kHeads, random);
  fill(&asked->v, n_layers, n, kHeads, random);
  asked->step.append = true;
  asked->step.space = space;
  asked->step.n_layers = n_layers;
  asked->step.items = {append_item(seq, n)};
  asked->step.k = asked->k.view();
  asked->step.v = asked->v.view();
  return asked;
}

std::unique_ptr<Asked> attend_of(kvm_space_id space, std::vector<kvm_item> items, uint64_t seed) {
  auto asked = std::make_unique<Asked>();
  uint32_t n_rows = 0;
  for (const kvm_item& item : items) {
    n_rows = std::max(n_rows, item.query_row + item.n_query);
  }
  std::mt19937_64 random(seed);
  asked->q = Buffer(Dtype::kF32, 1, n_rows, kHeads * kGroup, kDim);
  asked->o = Buffer(Dtype::kF32, 1, n_rows, kHeads * kGroup, kDim);
  asked->lse = Buffer(Dtype::kF32, 1, n_rows, kHeads * kGroup, 1);
  fill(&asked->q, 1, n_rows, kHeads * kGroup, random, 2.0f);
  asked->step.attend = true;
  asked->step.space = space;
  asked->step.items = std::move(items);
  asked->step.q = asked->q.view();
  asked->step.o = asked->o.view();
  asked->step.lse = asked->lse.view();
  return asked;
}

std::unique_ptr<Asked> read_of(kvm_seq_id seq, uint64_t position, uint64_t n) {
  auto asked = std::make_unique<Asked>();
  asked->k = Buffer(Dtype::kF32, 1, n, kHeads, kDim);
  asked->v = Buffer(Dtype::kF32, 1, n, kHeads, kDim);
  asked->read.seq = seq;
  asked->read.position = position;
  asked->read.n_tokens = n;
  asked->read.k = asked->k.view();
  asked->read.v = asked->v.view();
  return asked;
}

// Two engines that are asked the same, of which one has a slow tier.
class Twins {
 public:
  Twins(const SpaceSpec& spec, const SimulatedTierOptions& options, uint32_t n_threads)
      : tier(options),
        n_layers(spec.params.n_layers),
        here(n_threads),
        there(with_tier(&tier, n_threads)) {
    space_here = here.space(spec);
    space_there = there.space(spec);
  }

  // A sequence of both.
  struct Seq {
    kvm_seq_id here = 0;
    kvm_seq_id there = 0;
  };
  Seq create() { return {here.create(space_here), there.create(space_there)}; }
  void append(Seq seq, uint32_t n, uint64_t seed) {
    const auto a = append_of(space_here, seq.here, n, seed, n_layers);
    const auto b = append_of(space_there, seq.there, n, seed, n_layers);
    const RequestResult want = here.run(a->step);
    const RequestResult got = there.run(b->step);
    EXPECT_TRUE(got.status.is_ok()) << got.status.message();
    EXPECT_EQ(want.status.code(), got.status.code());
  }
  Seq fork(Seq seq, uint64_t n) {
    SeqRequest fork{.verb = SeqVerb::kFork, .seq = seq.here, .n_tokens = n};
    Seq child;
    child.here = here.run(fork).seq;
    fork.seq = seq.there;
    child.there = there.run(fork).seq;
    return child;
  }
  void verb(SeqVerb which, Seq seq, uint64_t n = 0) {
    EXPECT_TRUE(here.verb(which, seq.here, n).status.is_ok());
    EXPECT_TRUE(there.verb(which, seq.there, n).status.is_ok());
  }
  void away(Seq seq) { send_away(there, seq.there); }

  // change: what the items and the request are like besides.
  void attend(
      std::vector<Seq> seqs, std::vector<uint32_t> n_query, uint64_t seed,
      const std::function<void(StepRequest&)>& change = [](StepRequest&) {}) {
    std::unique_ptr<Asked> asked[2];
    RequestResult results[2];
    for (int i = 0; i < 2; ++i) {
      std::vector<kvm_item> items;
      uint32_t row = 0;
      for (size_t s = 0; s < seqs.size(); ++s) {
        items.push_back(query_item(i == 0 ? seqs[s].here : seqs[s].there, n_query[s], row));
        row += n_query[s];
      }
      asked[i] = attend_of(i == 0 ? space_here : space_there, items, seed);
      change(asked[i]->step);
      results[i] = i == 0 ? here.run(asked[i]->step) : there.run(asked[i]->step);
    }
    EXPECT_EQ(results[0].status.code(), results[1].status.code()) << results[1].status.message();
    EXPECT_EQ(results[0].keys_present, results[1].keys_present);
    EXPECT_EQ(results[0].bytes_read, results[1].bytes_read);
    EXPECT_TRUE(asked[0]->o.bytes() == asked[1]->o.bytes());
    EXPECT_TRUE(asked[0]->lse.bytes() == asked[1]->lse.bytes());
  }
  void read(Seq seq, uint64_t position, uint64_t n, uint32_t layer = 0) {
    const auto a = read_of(seq.here, position, n);
    const auto b = read_of(seq.there, position, n);
    a->read.layer = b->read.layer = layer;
    const RequestResult want = here.run(a->read);
    const RequestResult got = there.run(b->read);
    EXPECT_EQ(want.status.code(), got.status.code()) << got.status.message();
    EXPECT_TRUE(a->k.bytes() == b->k.bytes());
    EXPECT_TRUE(a->v.bytes() == b->v.bytes());
  }

  SimulatedTier tier;
  uint32_t n_layers = 1;
  Rig here;
  Rig there;
  kvm_space_id space_here = 0;
  kvm_space_id space_there = 0;
};

constexpr SimulatedTierOptions kAnyOrder = {.reorder = 64, .seed = 5};

TEST(Away, AnswersHaveTheSameBits) {
  for (const uint32_t codec : {uint32_t{KVM_CODEC_F32}, uint32_t{KVM_CODEC_BF16},
                               uint32_t{KVM_CODEC_I8}, uint32_t{KVM_CODEC_I8_CHANNEL}}) {
    for (const uint32_t n_threads : {1u, 3u}) {
      if (codec % 2 != n_threads / 2 && kvm::testing::by_day(0, 1) == 0) {
        continue;
      }
      SCOPED_TRACE(std::to_string(codec) + ", threads: " + std::to_string(n_threads));
      Twins twins(plain_spec(codec), kAnyOrder, n_threads);
      const Twins::Seq seq = twins.create();
      twins.append(seq, 20000, 1);
      twins.away(seq);
      EXPECT_EQ(twins.there.engine->n_pages_away(), 20000u / kPageTokens);
      const kvm_seq_info info = twins.there.engine->seq_info(twins.there.client, seq.there).value();
      EXPECT_EQ(info.bytes_paid, info.bytes);
      EXPECT_LT(info.bytes_away, info.bytes) << "the last page is not full";
      EXPECT_GT(info.bytes_away, info.bytes - info.bytes / 100);
      const kvm_stats stats = twins.there.engine->stats();
      EXPECT_EQ(stats.n_pages_away, 20000u / kPageTokens);
      EXPECT_EQ(stats.away_bytes, info.bytes_away);
      twins.attend({seq}, {1}, 2);
      twins.append(seq, 5000, 3);  // pages in memory behind those that are away
      twins.attend({seq}, {1}, 4);
      twins.attend({seq}, {5}, 5);
      twins.attend({seq}, {200}, 6);
      twins.read(seq, 0, 25000);
      twins.read(seq, 777, 9000);
      twins.away(seq);
      twins.attend({seq, seq}, {3, 40}, 7);
    }
  }
}

TEST(Away, EachPageIsReadOnce) {
  for (const uint32_t n_query : {1u, 300u}) {
    SpaceSpec spec = make_spec("wide", 1, 4, 4, kDim);
    SimulatedTier tier({});
    Rig rig(with_tier(&tier, 2));
    const kvm_space_id space = rig.space(spec);
    const kvm_seq_id seq = rig.create(space);
    Buffer k(Dtype::kF32, 1, 17000, 4, kDim);
    StepRequest append;
    append.append = true;
    append.space = space;
    append.items = {append_item(seq, 17000)};
    append.k = append.v = k.view();
    ASSERT_TRUE(rig.run(append).status.is_ok());
    send_away(rig, seq);
    const uint64_t n_away = rig.engine->n_pages_away();
    ASSERT_EQ(n_away, 17000u / kPageTokens);
    Buffer q(Dtype::kF32, 1, n_query, 4, kDim);
    StepRequest attend;
    attend.attend = true;
    attend.space = space;
    attend.items = {query_item(seq, n_query)};
    attend.q = q.view();
    Buffer o(Dtype::kF32, 1, n_query, 4, kDim);
    attend.o = o.view();
    const RequestResult result = rig.run(attend);
    ASSERT_TRUE(result.status.is_ok()) << result.status.message();
    EXPECT_EQ(tier.n_reads(), n_away);
  }
}

// What no row sees stays where it is.
TEST(Away, WhatNobodySeesIsNotRead) {
  Twins twins(plain_spec(), kAnyOrder, 2);
  const Twins::Seq seq = twins.create();
  twins.append(seq, 20000, 1);
  twins.away(seq);
  const auto only = [&](std::vector<kvm_range> ranges, uint32_t flags) {
    return [ranges, flags](StepRequest& step) {
      step.ranges = ranges;
      step.items[0].n_ranges = static_cast<uint32_t>(ranges.size());
      step.items[0].flags |= flags;
    };
  };
  twins.attend({seq}, {1}, 2, only({{100, 200}, {15000, 15064}}, 0));
  EXPECT_EQ(twins.tier.n_reads(), 3u + 2u);
  twins.attend({seq}, {30}, 2, only({{128, 19000}}, KVM_ITEM_EXCLUDE_RANGES));
  EXPECT_EQ(twins.tier.n_reads(), 5u + 2u + 16u);
  twins.attend({seq}, {1}, 2, [](StepRequest& step) { step.items[0].query_position = 70; });
  EXPECT_EQ(twins.tier.n_reads(), 7u + 16u + 2u);
}

TEST(Away, HeadsThatForgetAndHeadsThatTurn) {
  for (const uint32_t positions :
       {uint32_t{KVM_POSITIONS_ABSOLUTE}, uint32_t{KVM_POSITIONS_IN_CACHE}}) {
    SpaceSpec spec = plain_spec();
    for (uint32_t i = 0; i < kDim / 2; ++i) {
      spec.rope_inv_freq.push_back(1.0f / static_cast<float>(1 + i));
    }
    spec.params.rope_layout = KVM_ROPE_HALF;
    spec.params.n_rope_pairs = static_cast<uint32_t>(spec.rope_inv_freq.size());
    kvm_policy_params policy{};
    policy.n_layers = 1;
    policy.kv_head_mask[0] = 2;
    policy.retention = KVM_RETAIN_SINKS_RECENT;
    policy.n_sinks = 100;
    policy.n_recent = 6000;
    policy.positions = positions;
    spec.policies = {policy};
    spec.params.n_policies = 1;
    Twins twins(spec, kAnyOrder, 2);
    const Twins::Seq seq = twins.create();
    for (uint64_t i = 0; i < 6; ++i) {
      twins.append(seq, 3001, i);
      twins.away(seq);
      twins.attend({seq}, {1}, 50 + i);
      twins.attend({seq}, {7}, 60 + i);
      twins.attend({seq}, {300}, 70 + i);
    }
  }
}

// Random requests about random sequences, some of which are sent away now and then.
TEST(Away, AnyHistory) {
  std::mt19937_64 random(20251125);
  const auto below = [&](uint64_t n) { return random() % n; };
  for (int round = 0; round < 4; ++round) {
    SimulatedTierOptions options = kAnyOrder;
    options.seed = round;
    const uint32_t n_layers = round == 3 ? 1 : 2;
    Twins twins(plain_spec(round % 2 == 0 ? KVM_CODEC_F32 : KVM_CODEC_I8_CHANNEL, n_layers),
                options, round < 2 ? 1 : 3);
    std::vector<std::pair<Twins::Seq, uint64_t>> seqs;  // with lengths
    for (uint64_t i = 0; i < 150; ++i) {
      if (seqs.empty() || (below(8) == 0 && seqs.size() < 8)) {
        seqs.emplace_back(twins.create(), 0);
      }
      const size_t at = below(seqs.size());
      auto& [seq, length] = seqs[at];
      switch (below(9)) {
        case 0:
        case 1: {
          const auto n = static_cast<uint32_t>(1 + below(below(3) == 0 ? 5000 : 100));
          twins.append(seq, n, i);
          length += n;
          break;
        }
        case 2: {
          const uint64_t n = below(length + 1);
          if (seqs.size() < 8) {
            seqs.emplace_back(twins.fork(seq, n), n);
          }
          break;
        }
        case 3: {
          length = below(4) == 0 ? below(length + 1)
                                 : length - below(std::min<uint64_t>(length + 1, 70));
          twins.verb(SeqVerb::kTruncate, seq, length);
          break;
        }
        case 4:
        case 5:
          twins.away(seq);
          break;
        case 6:
          if (below(3) == 0) {
            twins.verb(SeqVerb::kFree, seq);
            seqs.erase(seqs.begin() + static_cast<ptrdiff_t>(at));
          }
          break;
        case 7:
          if (length != 0) {
            const uint64_t from = below(length);
            twins.read(seq, from, 1 + below(length - from), static_cast<uint32_t>(i % n_layers));
          }
          break;
        default:
          if (length != 0) {
            const auto n = static_cast<uint32_t>(1 + below(std::min<uint64_t>(length, 60)));
            const auto& [other, other_length] = seqs[below(seqs.size())];
            if (other_length != 0) {
              twins.attend({seq, other}, {n, 1}, i, [&](StepRequest& step) {
                step.layer_begin = static_cast<uint32_t>(i % n_layers);
              });
            }
          }
      }
    }
    for (const auto& [seq, length] : seqs) {
      twins.verb(SeqVerb::kFree, seq);
    }
    EXPECT_EQ(twins.tier.used_bytes(), 0u);
    EXPECT_EQ(twins.there.engine->n_pages_away(), 0u);
  }
}

// A context several times as large as the memory.
TEST(Away, MoreThanMemory) {
  SimulatedTier tier({});
  Rig rig(with_tier(&tier, 2, 24 << 20));  // of which rings take 4 MiB
  Rig large(2);
  const kvm_space_id space = rig.space(plain_spec());
  const kvm_space_id large_space = large.space(plain_spec());
  const kvm_seq_id seq = rig.create(space);
  const kvm_seq_id large_seq = large.create(large_space);
  for (uint64_t i = 0; i < 25; ++i) {  // 62.5 MiB
    const auto a = append_of(space, seq, 10000, i);
    const auto b = append_of(large_space, large_seq, 10000, i);
    const RequestResult result = rig.run(a->step);
    ASSERT_TRUE(result.status.is_ok()) << i << ": " << result.status.message();
    ASSERT_TRUE(large.run(b->step).status.is_ok());
    send_away(rig, seq);
  }
  for (const uint32_t n_query : {1u, 64u}) {
    const auto a = attend_of(space, {query_item(seq, n_query)}, 1);
    const auto b = attend_of(large_space, {query_item(large_seq, n_query)}, 1);
    const RequestResult result = rig.run(a->step);
    ASSERT_TRUE(result.status.is_ok()) << result.status.message();
    ASSERT_TRUE(large.run(b->step).status.is_ok());
    EXPECT_TRUE(a->o.bytes() == b->o.bytes());
  }
}

// --- What goes wrong ----------------------------------------------------------------------------

TEST(Away, AFailedReadFailsOneRequest) {
  for (const bool appends : {false, true}) {
    SimulatedTier tier({});
    Rig rig(with_tier(&tier, 2));
    const kvm_space_id space = rig.space(plain_spec());
    const kvm_seq_id seq = rig.create(space);
    ASSERT_TRUE(rig.run(append_of(space, seq, 20000, 1)->step).status.is_ok());
    const auto before = attend_of(space, {query_item(seq, 1)}, 7);
    ASSERT_TRUE(rig.run(before->step).status.is_ok());
    send_away(rig, seq);
    for (const uint64_t nth : {1u, 2u, 100u, 312u}) {
      tier.fail_next(Transfer::Kind::kRead, nth, {KVM_ERR_IO, "sector 7 is gone"});
      const auto asked = attend_of(space, {query_item(seq, 1)}, 7);
      const auto appended = append_of(space, seq, 10, 2);
      if (appends) {
        asked->step.append = true;
        asked->step.items[0].n_append = 10;
        asked->step.items[0].append_position = KVM_POSITION_END;
        asked->step.k = appended->k.view();
        asked->step.v = appended->v.view();
      }
      const RequestResult result = rig.run(asked->step);
      EXPECT_EQ(result.status.code(), KVM_ERR_IO) << nth;
      EXPECT_NE(result.status.message().find("sector 7 is gone"), std::string::npos);
      EXPECT_EQ(rig.length(seq), 20000u);
      tier.clear_faults();
      const auto again = attend_of(space, {query_item(seq, 1)}, 7);
      ASSERT_TRUE(rig.run(again->step).status.is_ok());
      EXPECT_TRUE(again->o.bytes() == before->o.bytes());
    }
    tier.fail_next(Transfer::Kind::kRead, 5,
                   {KVM_ERR_CORRUPT,
                    "what was read is not what was "
                    "written"});
    EXPECT_EQ(rig.run(read_of(seq, 0, 20000)->read).status.code(), KVM_ERR_CORRUPT);
  }
}

TEST(Away, ATailThatDoesNotComeBackFailsTheAppend) {
  SimulatedTier tier({});
  Rig rig(with_tier(&tier, 1));
  const kvm_space_id space = rig.space(plain_spec());
  const kvm_seq_id seq = rig.create(space);
  ASSERT_TRUE(rig.run(append_of(space, seq, 640, 1)->step).status.is_ok());
  send_away(rig, seq);
  ASSERT_TRUE(rig.verb(SeqVerb::kTruncate, seq, 600).status.is_ok());
  tier.fail_next(Transfer::Kind::kRead, 1, {KVM_ERR_IO, "sector 7 is gone"});
  EXPECT_EQ(rig.run(append_of(space, seq, 5, 2)->step).status.code(), KVM_ERR_IO);
  EXPECT_EQ(rig.length(seq), 600u);
  EXPECT_TRUE(rig.run(append_of(space, seq, 5, 2)->step).status.is_ok());
  EXPECT_EQ(rig.length(seq), 605u);
}

// Where the tier takes no more, or fails, what does not go stays.
TEST(Away, AFailedWriteLeavesThePage) {
  SimulatedTier tier({.capacity_bytes = 100 * 16384});
  Rig rig(with_tier(&tier, 1));
  const kvm_space_id space = rig.space(plain_spec());
  const kvm_seq_id seq = rig.create(space);
  ASSERT_TRUE(rig.run(append_of(space, seq, 20000, 1)->step).status.is_ok());
  const auto before = attend_of(space, {query_item(seq, 1)}, 7);
  ASSERT_TRUE(rig.run(before->step).status.is_ok());
  tier.fail_next(Transfer::Kind::kWrite, 3, {KVM_ERR_IO, "sector 7 is gone"});
  send_away(rig, seq);
  send_away(rig, seq);
  EXPECT_LE(tier.used_bytes(), 100u * 16384);
  EXPECT_GT(rig.engine->n_pages_away(), 0u);
  const auto after = attend_of(space, {query_item(seq, 1)}, 7);
  ASSERT_TRUE(rig.run(after->step).status.is_ok());
  EXPECT_TRUE(after->o.bytes() == before->o.bytes());
  ASSERT_TRUE(rig.verb(SeqVerb::kFree, seq).status.is_ok());
  EXPECT_EQ(tier.used_bytes(), 0u);
}

// ... and the next sequence goes.
TEST(Away, AFailedWriteKeepsNoOtherSequence) {
  SimulatedTier tier({});
  Rig rig(with_tier(&tier, 1));
  const kvm_space_id space = rig.space(plain_spec());
  kvm_seq_id seqs[2];
  for (kvm_seq_id& seq : seqs) {
    seq = rig.create(space);
    ASSERT_TRUE(rig.run(append_of(space, seq, 640, 1)->step).status.is_ok());
  }
  tier.fail_next(Transfer::Kind::kWrite, 3, {KVM_ERR_IO, "sector 7 is gone"});
  ASSERT_TRUE(rig.engine->send_away(seqs[0]).is_ok());
  send_away(rig, seqs[1]);
  EXPECT_EQ(rig.engine->n_pages_away(), 19u);
}

// --- Who waits, and who goes meanwhile ----------------------------------------------------------

// A tier that does nothing before the test says so, and a sequence that is there.
struct Stalled {
  explicit Stalled(uint32_t n_threads = 1, const SpaceSpec& spec = plain_spec(),
                   uint64_t capacity_bytes = 256 << 20)
      : tier({.is_manual = true}),
        rig(with_tier(&tier, n_threads, capacity_bytes)),
        space(rig.space(spec)) {
    seq = create(20000);
    away(seq);
  }
  kvm_seq_id create(uint32_t n_tokens, ClientId client = 0) {
    const kvm_seq_id created = create_some(1, client)[0];
    EXPECT_TRUE(rig.run(append_of(space, created, n_tokens, 1)->step, client).status.is_ok());
    return created;
  }
  std::vector<kvm_seq_id> create_some(int n, ClientId client) {
    std::vector<kvm_seq_id> created;
    for (int i = 0; i < n; ++i) {
      SeqRequest request;
      request.space = space;
      created.push_back(rig.run(request, client).seq);
      EXPECT_NE(created.back(), 0u);
    }
    return created;
  }
  // Requests that the driver does not do at once.
  void submit_jobs(const std::vector<kvm_seq_id>& seqs, ClientId client) {
    for (const kvm_seq_id to : seqs) {
      submit(append_of(space, to, 2000, 3), client);
    }
  }
  void away(kvm_seq_id gone) {
    EXPECT_TRUE(rig.engine->send_away(gone).is_ok());
    while (rig.engine->is_sending()) {
      turn();
      tier.finish_all();
    }
  }
  // Lets the engine do what it can.
  void turn() {
    for (int i = 0; i < 50; ++i) {
      rig.engine->poll();
      rig.engine->work();
    }
  }
  void submit(std::unique_ptr<Asked> asked, ClientId client = 0) {
    Asked* what = asked.get();
    asked_.push_back(std::move(asked));
    const size_t at = results.size();
    results.emplace_back();
    n_answers.push_back(0);
    rig.engine->submit(client == 0 ? rig.client : client, {2, at}, StepRequest(what->step),
                       [this, at](RequestResult&& result) {
                         ++n_answers[at];
                         results[at] = std::move(result);
                       });
  }
  // Begins what can begin, while nobody runs tasks.
  void start_all() {
    for (int i = 0; i < 500; ++i) {
      rig.engine->poll();
    }
  }
  // Ends transfers in a random order until the engine has nothing more to do.
  void finish_any(uint64_t seed) {
    std::mt19937_64 random(seed);
    for (int i = 0; i < 100000 && rig.engine->n_in_flight() != 0; ++i) {
      turn();
      if (tier.n_waiting() != 0) {
        tier.finish(random() % tier.n_waiting());
      }
    }
    EXPECT_EQ(rig.engine->n_in_flight(), 0u);
  }

  SimulatedTier tier;
  Rig rig;
  kvm_space_id space = 0;
  kvm_seq_id seq = 0;
  std::vector<RequestResult> results;
  std::vector<int> n_answers;
  std::vector<std::unique_ptr<Asked>> asked_;
};

TEST(Away, AnyOrderOfArrival) {
  Stalled stalled(3);
  std::vector<std::byte> first;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    stalled.submit(attend_of(stalled.space, {query_item(stalled.seq, seed < 10 ? 1 : 30)}, 7));
    stalled.finish_any(seed);
    ASSERT_TRUE(stalled.results.back().status.is_ok());
    const Asked& asked = *stalled.asked_.back();
    if (seed == 0 || seed == 10) {
      first = asked.o.bytes();
    }
    EXPECT_TRUE(first == asked.o.bytes()) << seed;
  }
}

// Many that wait for pages take nothing from those that need none.
TEST(Away, WhoWaitsHoldsNobodyUp) {
  Stalled stalled;
  const ClientId other = stalled.rig.engine->add_client({});
  std::vector<kvm_seq_id> forks;
  for (int i = 0; i < 200; ++i) {
    const RequestResult fork = stalled.rig.verb(SeqVerb::kFork, stalled.seq, 20000);
    ASSERT_TRUE(fork.status.is_ok());
    stalled.submit(attend_of(stalled.space, {query_item(fork.seq, 1)}, 7));
  }
  stalled.turn();
  SeqRequest create;
  create.space = stalled.space;
  const RequestResult created = stalled.rig.run(create, other);
  ASSERT_TRUE(created.status.is_ok());
  const auto appended = append_of(stalled.space, created.seq, 5000, 3);
  EXPECT_TRUE(stalled.rig.run(appended->step, other).status.is_ok());
  const auto asked = attend_of(stalled.space, {query_item(created.seq, 40)}, 7);
  EXPECT_TRUE(stalled.rig.run(asked->step, other).status.is_ok());
  EXPECT_EQ(std::count(stalled.n_answers.begin(), stalled.n_answers.end(), 0), 200);
  stalled.finish_any(1);
  for (size_t i = 0; i < 200; ++i) {
    ASSERT_TRUE(stalled.results[i].status.is_ok()) << stalled.results[i].status.message();
    EXPECT_TRUE(stalled.asked_[i]->o.bytes() == stalled.asked_[0]->o.bytes());
  }
}

// Those that wait for a ring, or for pages, can be cancelled, and let others pass.
TEST(Away, CancelledWhileItWaits) {
  Stalled stalled;
  std::vector<kvm_seq_id> forks;
  std::vector<uint64_t> lengths;
  for (int i = 0; i < 40; ++i) {
    const bool appends = i % 4 == 3;  // behind a tail that is away
    lengths.push_back(appends ? 700 + i : 20000 - i);
    forks.push_back(stalled.rig.verb(SeqVerb::kFork, stalled.seq, lengths.back()).seq);
    stalled.submit(appends ? append_of(stalled.space, forks.back(), 10, 3)
                           : attend_of(stalled.space, {query_item(forks.back(), 1)}, 7));
  }
  stalled.turn();
  const auto is_cancelled = [](size_t i) { return i % 3 == 0; };
  for (size_t i = 0; i < 40; ++i) {
    EXPECT_TRUE(!is_cancelled(i) || stalled.rig.engine->cancel(stalled.rig.client, {2, i}));
  }
  stalled.finish_any(5);
  for (size_t i = 0; i < 40; ++i) {
    EXPECT_EQ(stalled.results[i].status.code(), is_cancelled(i) ? KVM_ERR_CANCELLED : KVM_OK) << i;
    EXPECT_EQ(stalled.n_answers[i], 1);
    EXPECT_EQ(stalled.rig.length(forks[i]), lengths[i] + (i % 4 == 3 && !is_cancelled(i) ? 10 : 0));
  }
}

// Of two clients that may start 32 jobs each, all do while a tail comes back.
TEST(Away, ATailComesWhileTheSchedulerIsFull) {
  Stalled stalled(1, plain_spec(), 1 << 30);
  const ClientId other = stalled.rig.engine->add_client({});
  ASSERT_TRUE(stalled.rig.verb(SeqVerb::kTruncate, stalled.seq, 600).status.is_ok());
  const std::vector<kvm_seq_id> own = stalled.create_some(40, stalled.rig.client);
  const std::vector<kvm_seq_id> others = stalled.create_some(40, other);
  stalled.submit_jobs({stalled.seq}, stalled.rig.client);
  stalled.submit_jobs(own, stalled.rig.client);
  stalled.submit_jobs(others, other);
  stalled.start_all();
  stalled.tier.finish_all();
  stalled.start_all();
  stalled.finish_any(1);
  for (const RequestResult& result : stalled.results) {
    EXPECT_TRUE(result.status.is_ok()) << result.status.message();
  }
  EXPECT_EQ(stalled.rig.length(stalled.seq), 2600u);
}

// A request that has a second job when its windows are done needs the slot that it has had, though
// another waits for its ring. A client that is alone may start 48 jobs, and two 32 each.
TEST(Away, TheRingPassesOnWhileTheSchedulerIsFull) {
  SpaceSpec spec = plain_spec();
  kvm_policy_params policy{};
  policy.n_layers = 1;
  policy.kv_head_mask[0] = 1;
  policy.retention = KVM_RETAIN_HEAVY;  // what it is given is summed up by a second job
  policy.n_sinks = 4;
  policy.n_recent = 30000;
  policy.n_heavy = 64;
  spec.policies = {policy};
  spec.params.n_policies = 1;
  Stalled stalled(1, spec, 1 << 30);
  ClientId other = stalled.rig.engine->add_client({});
  const kvm_seq_id second = stalled.create(20000, other);
  stalled.away(second);
  ASSERT_TRUE(
      stalled.rig.run(SeqRequest{.verb = SeqVerb::kPublish, .seq = second}, other).status.is_ok());
  stalled.rig.engine->remove_client(other, [&] { other = 0; });
  ASSERT_TRUE(stalled.rig.drive_until([&] { return other == 0; }));
  const std::vector<kvm_seq_id> own = stalled.create_some(47, stalled.rig.client);
  stalled.submit(attend_of(stalled.space, {query_item(stalled.seq, 40)}, 7));
  stalled.turn();
  stalled.start_all();
  stalled.submit_jobs(own, stalled.rig.client);
  stalled.start_all();
  other = stalled.rig.engine->add_client({});
  const std::vector<kvm_seq_id> others = stalled.create_some(60, other);
  stalled.submit(attend_of(stalled.space, {query_item(second, 40)}, 7), other);
  stalled.submit_jobs(others, other);
  stalled.start_all();
  for (int i = 0; i < 1000; ++i) {
    stalled.tier.finish_all();
    stalled.rig.engine->poll();
    stalled.rig.engine->work();
  }
  stalled.finish_any(2);
  for (const RequestResult& result : stalled.results) {
    EXPECT_TRUE(result.status.is_ok()) << result.status.message();
  }
}

// Memory that others have left makes room for a tail.
TEST(Away, ATailFindsRoom) {
  Stalled stalled(1, plain_spec(), 24 << 20);
  ASSERT_TRUE(stalled.rig.verb(SeqVerb::kTruncate, stalled.seq, 19000).status.is_ok());
  const kvm_seq_id second = stalled.rig.create(stalled.space);
  while (stalled.rig.run(append_of(stalled.space, second, 64, 2)->step).status.is_ok()) {
  }
  EXPECT_EQ(stalled.rig.run(append_of(stalled.space, stalled.seq, 1, 2)->step).status.code(),
            KVM_ERR_NO_SPACE);
  // While this one waits, the frames of what goes are not free.
  stalled.submit(attend_of(stalled.space, {query_item(stalled.seq, 1)}, 7));
  stalled.turn();
  ASSERT_TRUE(stalled.rig.engine->send_away(second).is_ok());
  const size_t n_reads = stalled.tier.n_waiting();
  while (stalled.rig.engine->is_sending()) {
    stalled.turn();
    while (stalled.tier.n_waiting() > n_reads) {
      stalled.tier.finish(n_reads);
    }
  }
  stalled.finish_any(1);
  stalled.submit(append_of(stalled.space, stalled.seq, 1, 2));
  stalled.finish_any(1);
  EXPECT_TRUE(stalled.results.back().status.is_ok()) << stalled.results.back().status.message();
}

// Pages go while the scheduler has tasks all the time.
TEST(Away, PagesGoBesideRequests) {
  SimulatedTier tier({});
  Rig rig(with_tier(&tier, 1));
  const kvm_space_id space = rig.space(plain_spec());
  const kvm_seq_id gone = rig.create(space);
  const kvm_seq_id here = rig.create(space);
  ASSERT_TRUE(rig.run(append_of(space, gone, 40000, 1)->step).status.is_ok());
  ASSERT_TRUE(rig.run(append_of(space, here, 40000, 1)->step).status.is_ok());
  ASSERT_TRUE(rig.engine->send_away(gone).is_ok());
  std::vector<std::unique_ptr<Asked>> asked;
  int n_open = 0;
  for (int i = 0; i < 2000 && rig.engine->is_sending(); ++i) {
    for (; n_open < 4; ++n_open) {
      asked.push_back(attend_of(space, {query_item(here, 8)}, 7));
      rig.engine->submit(rig.client, {1, asked.size() + 1000}, StepRequest(asked.back()->step),
                         [&](RequestResult&&) { --n_open; });
    }
    rig.engine->poll();
    rig.engine->work();
  }
  EXPECT_FALSE(rig.engine->is_sending());
  EXPECT_TRUE(rig.drive_until([&] { return n_open == 0; }));
}

// What sees only what is in memory does not wait for the rings that others have.
TEST(Away, WhoNeedsNoRingDoesNotWaitForOne) {
  Stalled stalled;
  const ClientId other = stalled.rig.engine->add_client({});
  const kvm_seq_id theirs = stalled.create(20000, other);
  stalled.away(theirs);
  const auto more = append_of(stalled.space, theirs, 9000, 3);
  ASSERT_TRUE(stalled.rig.run(more->step, other).status.is_ok());
  for (int i = 0; i < 3; ++i) {
    const kvm_seq_id fork = stalled.rig.verb(SeqVerb::kFork, stalled.seq, 20000).seq;
    stalled.submit(attend_of(stalled.space, {query_item(fork, 30)}, 7));
  }
  stalled.start_all();
  stalled.turn();
  const size_t n_reads = stalled.tier.n_waiting();
  auto asked = attend_of(stalled.space, {query_item(theirs, 1)}, 7);
  asked->step.ranges = {{25000, 28999}};
  asked->step.items[0].n_ranges = 1;
  stalled.submit(std::move(asked), other);
  stalled.turn();
  EXPECT_EQ(stalled.n_answers[3], 1);
  EXPECT_EQ(stalled.tier.n_waiting(), n_reads);
  stalled.finish_any(1);
}

// A client with one turn that always has something short to do: its stream has a turn too, and so
// the ring passes on to another client.
TEST(Away, WhoHasPagesHasTheNextTurn) {
  Stalled stalled(1, plain_spec(), 1 << 30);
  std::vector<ClientId> others;
  for (int i = 0; i < 63; ++i) {
    others.push_back(stalled.rig.engine->add_client({}));
  }
  const kvm_seq_id theirs = stalled.create(20000, others[0]);
  stalled.away(theirs);
  const kvm_seq_id own = stalled.create(9000);
  stalled.submit(attend_of(stalled.space, {query_item(stalled.seq, 40)}, 7));
  stalled.turn();
  const auto brief = attend_of(stalled.space, {query_item(own, 40)}, 7);
  bool goes_on = true;
  uint64_t n_brief = 0;
  const std::function<void()> again = [&] {
    if (goes_on) {
      stalled.rig.engine->submit(stalled.rig.client, {3, n_brief}, StepRequest(brief->step),
                                 [&](RequestResult&&) {
                                   ++n_brief;
                                   again();
                                 });
    }
  };
  for (int i = 0; i < 4; ++i) {
    again();
  }
  stalled.submit(attend_of(stalled.space, {query_item(theirs, 40)}, 7), others[0]);
  for (int i = 0; i < 3000 && stalled.n_answers[1] == 0; ++i) {
    stalled.tier.finish_all();
    stalled.rig.engine->poll();
    stalled.rig.engine->work();
  }
  EXPECT_EQ(stalled.n_answers[0], 1);
  EXPECT_EQ(stalled.n_answers[1], 1);
  EXPECT_GE(n_brief, 1u);
  goes_on = false;
  stalled.finish_any(1);
}

TEST(Away, CancelledWhileItIsPlanned) {
  Stalled stalled;
  std::vector<kvm_item> items;
  for (uint32_t i = 0; i < 400; ++i) {
    items.push_back(query_item(stalled.seq, 1, i));
  }
  stalled.submit(attend_of(stalled.space, items, 7));
  stalled.rig.engine->poll();
  EXPECT_EQ(stalled.tier.n_waiting(), 0u);
  EXPECT_TRUE(stalled.rig.engine->cancel(stalled.rig.client, {2, 0}));
  stalled.turn();
  EXPECT_EQ(stalled.tier.n_waiting(), 0u);
  EXPECT_EQ(stalled.results[0].status.code(), KVM_ERR_CANCELLED);
  stalled.finish_any(1);
}

// A client that goes at any point of its request leaves nothing behind, and one whose sequence is
// evicted, or that cancels, is answered.
TEST(Away, DeathEvictionAndCancellingAtEveryPoint) {
  enum class Event { kDeath, kEviction, kCancel };
  const size_t each = kvm::testing::by_day(8, 20);
  for (size_t n_before = 0; n_before < 320; n_before += n_before < each ? 1 : 37) {
    for (const Event event : {Event::kDeath, Event::kEviction, Event::kCancel}) {
      const bool is_death = event == Event::kDeath;
      Stalled stalled(static_cast<uint32_t>(1 + n_before % 3));
      stalled.submit(attend_of(stalled.space, {query_item(stalled.seq, 2)}, 7));
      // It waits behind the first one.
      stalled.submit(append_of(stalled.space, stalled.seq, 100, 8));
      stalled.turn();
      for (size_t i = 0; i < n_before && stalled.tier.n_waiting() != 0; ++i) {
        stalled.tier.finish(i * 7 % stalled.tier.n_waiting());
        stalled.turn();
      }
      const bool is_answered = stalled.n_answers[0] == 1;
      bool is_gone = false;
      if (is_death) {
        stalled.rig.engine->remove_client(stalled.rig.client, [&] { is_gone = true; });
      } else if (event == Event::kEviction) {
        ASSERT_TRUE(stalled.rig.engine->evict(stalled.seq).is_ok());
      } else {
        EXPECT_EQ(stalled.rig.engine->cancel(stalled.rig.client, {2, 0}), !is_answered);
      }
      stalled.turn();
      EXPECT_FALSE(is_gone && stalled.tier.n_waiting() != 0);
      stalled.finish_any(n_before);
      stalled.turn();
      EXPECT_EQ(is_gone, is_death);
      EXPECT_EQ(stalled.n_answers[0], is_death && !is_answered ? 0 : 1);
      EXPECT_EQ(stalled.tier.n_in_flight(), 0u);
      if (event == Event::kCancel) {
        EXPECT_EQ(stalled.results[0].status.code(), is_answered ? KVM_OK : KVM_ERR_CANCELLED);
        EXPECT_TRUE(stalled.results[1].status.is_ok()) << stalled.results[1].status.message();
        EXPECT_EQ(stalled.rig.length(stalled.seq), 20100u);
        continue;
      }
      EXPECT_EQ(stalled.tier.used_bytes(), 0u);
      if (!is_death) {
        EXPECT_TRUE(stalled.results[0].status.is_ok()) << stalled.results[0].status.message();
      }
    }
  }
}

// An engine that is closed while transfers are in flight waits for them, and for nothing else.
TEST(Away, ClosingAtEveryPoint) {
  for (const uint64_t latency_ns : {0u, 300'000u, 3'000'000u}) {
    SimulatedTier tier({.latency_ns = latency_ns, .reorder = 8, .seed = 3});
    for (int i = 0; i < 10; ++i) {
      Rig rig(with_tier(&tier, 1 + i % 3));
      const kvm_space_id space = rig.space(plain_spec());
      const kvm_seq_id seq = rig.create(space);
      ASSERT_TRUE(rig.run(append_of(space, seq, 20000, 1)->step).status.is_ok());
      if (i % 2 == 0) {
        send_away(rig, seq);
      } else {
        ASSERT_TRUE(rig.engine->send_away(seq).is_ok());
      }
      const auto asked = attend_of(space, {query_item(seq, 2)}, 7);
      rig.engine->submit(rig.client, {1, 1000}, StepRequest(asked->step), [](RequestResult&&) {});
      for (int turn = 0; turn < 3 * i; ++turn) {
        rig.engine->poll();
        rig.engine->work();
      }
      rig.engine.reset();
      EXPECT_EQ(tier.n_in_flight(), 0u);
    }
  }
}

TEST(Away, WithoutATierNothingGoes) {
  Rig rig;
  const kvm_seq_id seq = rig.create(rig.space(plain_spec()));
  EXPECT_EQ(rig.engine->send_away(seq).code(), KVM_ERR_UNSUPPORTED);
}

}  // namespace
}  // namespace kvm::engine::testing
