// SPDX-License-Identifier: Apache-2.0
// Samples of sequences of which pages are in a slow tier: they have the bits that they have in
// memory, and read the pages that hold a key which they draw, once, and no others. Where that is
// not to be had, the answer is the exact one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "tests/unit/engine/rig.h"
#include "tiers/simulated/simulated_tier.h"

namespace kvm::engine::testing {
namespace {

using tiers::SimulatedTier;
using tiers::SimulatedTierOptions;
using tiers::Transfer;

constexpr uint32_t kHeads = 2;
constexpr uint32_t kGroup = 2;
constexpr uint32_t kQHeads = kHeads * kGroup;
constexpr uint32_t kDim = 16;
constexpr uint32_t kTokens = 70000;  // three shards
constexpr uint64_t kPages = kTokens / kPageTokens;
constexpr SimulatedTierOptions kAnyOrder = {.reorder = 64, .seed = 5};
constexpr const char* kModel =
    "exact_bf16=13.5,exact_int8=6,scan=1.5,gather=20,start=5000,threads=2";

SpaceSpec drawn_spec(uint32_t codec = KVM_CODEC_F32) {
  SpaceSpec spec = make_spec("drawn", 1, kQHeads, kHeads, kDim);
  spec.params.codec = codec;
  spec.indexes = {make_index()};
  return spec;
}

EngineOptions options_of(tiers::SlowTier* tier, uint32_t n_threads) {
  EngineOptions options = Rig::make_options(n_threads);
  options.slow_tier = tier;
  options.default_quota_bytes = uint64_t{1} << 30;
  options.movement.is_automatic = false;
  options.cost_model = kModel;
  return options;
}

void send_away(Rig& rig, kvm_seq_id seq) {
  ASSERT_TRUE(rig.engine->send_away(seq).is_ok());
  EXPECT_TRUE(rig.drive_until([&] { return !rig.engine->is_sending(); }));
}

// A request with its tensors.
struct Asked {
  StepRequest step;
  Buffer q, o, lse, err, k, v;
};

// nan_every: so many-th values are no numbers.
std::unique_ptr<Asked> append_of(kvm_space_id space, kvm_seq_id seq, uint32_t n, uint64_t seed,
                                 uint32_t nan_every = 0) {
  auto asked = std::make_unique<Asked>();
  std::mt19937_64 random(seed);
  asked->k = Buffer(Dtype::kF32, 1, n, kHeads, kDim);
  asked->v = Buffer(Dtype::kF32, 1, n, kHeads, kDim);
  fill(&asked->k, 1, n, kHeads, random);
  fill(&asked->v, 1, n, kHeads, random);
  for (uint32_t t = 0; nan_every != 0 && t < n; t += nan_every) {
    asked->v.set(0, t, 0, 1, std::numeric_limits<float>::quiet_NaN());
  }
  asked->step.append = true;
  asked->step.space = space;
  asked->step.items = {append_item(seq, n)};
  asked->step.k = asked->k.view();
  asked->step.v = asked->v.view();
  return asked;
}

std::unique_ptr<Asked> sample_of(kvm_space_id space, std::vector<kvm_item> items, uint64_t seed,
                                 uint64_t budget = 10) {
  auto asked = std::make_unique<Asked>();
  uint32_t n_rows = 0;
  for (const kvm_item& item : items) {
    n_rows = std::max(n_rows, item.query_row + item.n_query);
  }
  std::mt19937_64 random(seed);
  asked->q = Buffer(Dtype::kF32, 1, n_rows, kQHeads, kDim);
  asked->o = Buffer(Dtype::kF32, 1, n_rows, kQHeads, kDim);
  asked->lse = Buffer(Dtype::kF32, 1, n_rows, kQHeads, 1);
  asked->err = Buffer(Dtype::kF32, 1, n_rows, kQHeads, 2);
  fill(&asked->q, 1, n_rows, kQHeads, random);
  StepRequest& step = asked->step;
  step.attend = true;
  step.space = space;
  step.items = std::move(items);
  step.mode = KVM_MODE_SAMPLED;
  step.budget = budget;
  step.seed = seed;
  step.q = asked->q.view();
  step.o = asked->o.view();
  step.lse = asked->lse.view();
  step.err = asked->err.view();
  return asked;
}

// Two engines that are asked the same, of which one has a slow tier.
struct Twins {
  Twins(const SpaceSpec& spec, const SimulatedTierOptions& options, uint32_t n_threads)
      : tier(options), here(options_of(nullptr, n_threads)), there(options_of(&tier, n_threads)) {
    space_here = here.space(spec);
    space_there = there.space(spec);
  }
  struct Seq {
    kvm_seq_id here = 0;
    kvm_seq_id there = 0;
  };
  using Change = std::function<void(StepRequest&)>;
  struct Got {
    RequestResult here;
    RequestResult there;
    std::unique_ptr<Asked> asked;  // there
    uint64_t n_reads = 0;          // of the tier
  };

  Seq create() { return {here.create(space_here), there.create(space_there)}; }
  void append(Seq seq, uint32_t n, uint64_t seed, uint32_t nan_every = 0) {
    EXPECT_TRUE(here.run(append_of(space_here, seq.here, n, seed, nan_every)->step).status.is_ok());
    EXPECT_TRUE(
        there.run(append_of(space_there, seq.there, n, seed, nan_every)->step).status.is_ok());
  }
  void away(Seq seq) { send_away(there, seq.there); }
  // One with an index, of which all full pages are away.
  Seq make(uint32_t n, uint64_t seed, uint32_t nan_every = 0) {
    const Seq seq = create();
    append(seq, n, seed, nan_every);
    attend({seq}, {1}, 1);
    away(seq);
    return seq;
  }
  // Asks both, and compares all that they answer.
  Got attend(
      const std::vector<Seq>& seqs, const std::vector<uint32_t>& n_query, uint64_t seed,
      const Change& change = [](StepRequest&) {}) {
    Got got;
    std::unique_ptr<Asked> asked[2];
    for (int i = 0; i < 2; ++i) {
      std::vector<kvm_item> items;
      uint32_t row = 0;
      for (size_t s = 0; s < seqs.size(); ++s) {
        items.push_back(query_item(i == 0 ? seqs[s].here : seqs[s].there, n_query[s], row));
        row += n_query[s];
      }
      asked[i] = sample_of(i == 0 ? space_here : space_there, items, seed);
      change(asked[i]->step);
    }
    const uint64_t n_before = tier.n_reads();
    got.here = here.run(asked[0]->step);
    got.there = there.run(asked[1]->step);
    got.n_reads = tier.n_reads() - n_before;
    EXPECT_TRUE(got.there.status.is_ok()) << got.there.status.message();
    EXPECT_EQ(got.here.keys_present, got.there.keys_present);
    EXPECT_TRUE(asked[0]->o.bytes() == asked[1]->o.bytes());
    EXPECT_TRUE(asked[0]->lse.bytes() == asked[1]->lse.bytes());
    EXPECT_TRUE(asked[0]->err.bytes() == asked[1]->err.bytes());
    EXPECT_EQ(got.here.mode, got.there.mode);
    EXPECT_EQ(got.here.n_exact, got.there.n_exact);
    EXPECT_EQ(got.here.keys_read, got.there.keys_read);
    EXPECT_EQ(got.here.bytes_read, got.there.bytes_read);
    EXPECT_EQ(got.here.n_not_finite, got.there.n_not_finite);
    EXPECT_EQ(std::memcmp(&got.here.err_max, &got.there.err_max, sizeof(float)), 0);
    got.asked = std::move(asked[1]);
    return got;
  }

  SimulatedTier tier;
  Rig here;
  Rig there;
  kvm_space_id space_here = 0;
  kvm_space_id space_there = 0;
};

TEST(Drawn, SamplesHaveTheBitsThatTheyHaveInMemory) {
  for (const uint32_t codec : {uint32_t{KVM_CODEC_F32}, uint32_t{KVM_CODEC_BF16},
                               uint32_t{KVM_CODEC_I8}, uint32_t{KVM_CODEC_F8E4M3}}) {
    for (const uint32_t n_threads : {1u, 3u}) {
      SCOPED_TRACE(std::to_string(codec) + ", threads: " + std::to_string(n_threads));
      Twins twins(drawn_spec(codec), kAnyOrder, n_threads);
      const Twins::Seq seq = twins.make(kTokens, 1);
      for (uint64_t seed = 2; seed < 6; ++seed) {
        const Twins::Got got = twins.attend({seq}, {1}, seed);
        EXPECT_EQ(got.there.mode, uint32_t{KVM_MODE_SAMPLED});
        EXPECT_EQ(got.there.n_exact, 0u);
        EXPECT_GT(got.there.err_max, 0.0f);
        // Ten keys of each of four rows, the sinks' page, and the last ones.
        EXPECT_GE(got.n_reads, 10u);
        EXPECT_LE(got.n_reads, 100u);
      }
      EXPECT_GT(twins.attend({seq}, {1}, 2, [](StepRequest& s) { s.budget = 60; }).n_reads, 100u);
      twins.attend({seq}, {3}, 7);
      twins.append(seq, 10, 3);
      twins.attend({seq}, {1}, 8);
    }
  }
}

// Some pages have not gone.
TEST(Drawn, WherePagesAreInMemoryAsWell) {
  SimulatedTierOptions options = kAnyOrder;
  constexpr uint64_t kAway = 500;
  options.capacity_bytes = kAway * 16384;
  Twins twins(drawn_spec(), options, 3);
  const Twins::Seq seq = twins.create();
  twins.append(seq, kTokens, 1);
  twins.attend({seq}, {1}, 1);
  twins.away(seq);
  EXPECT_EQ(twins.there.engine->n_pages_away(), kAway);
  for (uint64_t seed = 2; seed < 12; ++seed) {
    EXPECT_LT(twins.attend({seq}, {1}, seed).n_reads, 60u);
  }
  // The index grows with what is new, as long as that is in memory.
  twins.append(seq, 5000, 3);
  EXPECT_LT(twins.attend({seq}, {1}, 12).n_reads, 60u);
}

// The draws and their errors are those of a sample: against the exact answer.
TEST(Drawn, BarsHold) {
  Twins twins(drawn_spec(), kAnyOrder, 2);
  const Twins::Seq seq = twins.make(kTokens, 1);
  int n_exceeded = 0;
  constexpr int kSeeds = 60;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const auto exact = sample_of(twins.space_there, {query_item(seq.there, 1)}, 7);
    exact->step.mode = KVM_MODE_EXACT;
    const auto sampled = sample_of(twins.space_there, {query_item(seq.there, 1)}, 7, 40);
    sampled->step.seed = seed;
    sampled->step.delta = 0.05f;
    if (seed == 0) {
      ASSERT_TRUE(twins.there.run(exact->step).status.is_ok());
    }
    ASSERT_TRUE(twins.there.run(sampled->step).status.is_ok());
    static std::vector<float> want;
    if (seed == 0) {
      want.clear();
      for (uint32_t h = 0; h < kQHeads; ++h) {
        const std::vector<float> row = exact->o.get_row(0, 0, h);
        want.insert(want.end(), row.begin(), row.end());
      }
    }
    for (uint32_t h = 0; h < kQHeads; ++h) {
      double difference = 0;
      double norm = 0;
      for (uint32_t i = 0; i < kDim; ++i) {
        const auto o = static_cast<double>(want[h * kDim + i]);
        difference += std::pow(static_cast<double>(sampled->o.get(0, 0, h, i)) - o, 2);
        norm += o * o;
      }
      const auto bar = static_cast<double>(sampled->err.get(0, 0, h, 0));
      EXPECT_GT(difference, 0);
      double sampled_norm = 0;
      for (uint32_t i = 0; i < kDim; ++i) {
        sampled_norm += std::pow(static_cast<double>(sampled->o.get(0, 0, h, i)), 2);
      }
      n_exceeded += std::sqrt(difference) > bar * std::sqrt(sampled_norm) ? 1 : 0;
    }
  }
  EXPECT_LE(n_exceeded, kSeeds * int{kQHeads} / 10);
}

TEST(Drawn, ManyRowsItemsRangesAndWindows) {
  Twins twins(drawn_spec(), kAnyOrder, 2);
  const Twins::Seq seq = twins.make(kTokens, 1);
  const Twins::Seq other = twins.make(40000, 2);
  // 20 rows are three problems of a head: eight rows, twice their group, each.
  const Twins::Got rows = twins.attend({seq}, {20}, 3, [](StepRequest& s) { s.budget = 2; });
  EXPECT_EQ(rows.there.n_exact, 0u);
  EXPECT_LT(rows.n_reads, kPages / 2);
  twins.attend({seq, other, seq}, {1, 2, 1}, 4);
  const auto only = [](std::vector<kvm_range> ranges, uint32_t flags) {
    return [ranges, flags](StepRequest& step) {
      step.budget = 5;
      step.ranges = ranges;
      step.items[0].n_ranges = static_cast<uint32_t>(ranges.size());
      step.items[0].flags |= flags;
    };
  };
  // Two ends of a range within a page are read with it, for these are not of the sample.
  const Twins::Got ranges = twins.attend({seq}, {1}, 5, only({{1000, 20000}, {33000, 60000}}, 0));
  EXPECT_LT(ranges.n_reads, 60u);
  twins.attend({seq}, {2}, 6, only({{128, 65000}}, KVM_ITEM_EXCLUDE_RANGES));
  twins.attend({seq}, {1}, 7, [](StepRequest& s) { s.items[0].query_position = 50000; });

  SpaceSpec windowed = drawn_spec();
  kvm_layer_params layer{};
  layer.n_layers = 1;
  layer.window = 50000;
  windowed.layers = {layer};
  windowed.params.n_layer_params = 1;
  Twins window(windowed, kAnyOrder, 2);
  const Twins::Seq seen = window.make(kTokens, 1);
  EXPECT_LT(window.attend({seen}, {1}, 8).n_reads, 100u);
}

TEST(Drawn, HeadsThatForgetAndTurn) {
  SpaceSpec spec = drawn_spec();
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
  policy.n_recent = 36000;
  policy.positions = KVM_POSITIONS_IN_CACHE;
  spec.policies = {policy};
  spec.params.n_policies = 1;
  Twins twins(spec, kAnyOrder, 3);
  const Twins::Seq seq = twins.create();
  twins.append(seq, 60005, 1);
  twins.attend({seq}, {1}, 2);
  twins.away(seq);
  for (uint64_t i = 0; i < 4; ++i) {
    twins.append(seq, 1, i);
    twins.attend({seq}, {1}, 20 + i);
    twins.attend({seq}, {4}, 30 + i);
  }
}

// --- What is answered exactly -------------------------------------------------------------------

// Returns how many pages were read.
uint64_t expect_exact(Twins& twins, Twins::Seq seq, uint32_t n_query, uint32_t mode,
                      const Twins::Change& change) {
  const auto asked = sample_of(twins.space_there, {query_item(seq.there, n_query)}, 3);
  change(asked->step);
  const uint64_t n_before = twins.tier.n_reads();
  const RequestResult result = twins.there.run(asked->step);
  const uint64_t n_reads = twins.tier.n_reads() - n_before;
  EXPECT_TRUE(result.status.is_ok()) << result.status.message();
  EXPECT_EQ(result.mode, mode);
  EXPECT_EQ(result.n_exact, n_query * kQHeads);
  EXPECT_EQ(result.keys_read, result.keys_present);
  EXPECT_GE(result.bytes_read, result.keys_present * 2 * kDim * sizeof(float));
  EXPECT_EQ(result.err_max, 0.0f);
  const auto exact = sample_of(twins.space_there, {query_item(seq.there, n_query)}, 3);
  exact->step.mode = KVM_MODE_EXACT;
  exact->step.budget = 0;
  EXPECT_TRUE(twins.there.run(exact->step).status.is_ok());
  EXPECT_TRUE(asked->o.bytes() == exact->o.bytes());
  EXPECT_TRUE(asked->lse.bytes() == exact->lse.bytes());
  for (uint32_t h = 0; h < kQHeads; ++h) {
    EXPECT_EQ(asked->err.get(0, 0, h, 0), 0.0f);
  }
  return n_reads;
}

TEST(Drawn, WhatDrawsFromMostPagesIsStreamed) {
  Twins twins(drawn_spec(), kAnyOrder, 2);
  const Twins::Seq seq = twins.make(kTokens, 1);
  for (const uint32_t n_query : {1u, 3u}) {
    EXPECT_EQ(expect_exact(twins, seq, n_query, KVM_MODE_SAMPLED,
                           [](StepRequest& s) { s.budget = 2000; }),
              kPages);
  }
}

TEST(Drawn, WhereSinglePagesCostTooMuchAllAreStreamed) {
  SimulatedTierOptions options = kAnyOrder;
  options.rates = {.bytes_per_s = 1e9, .alone_ns = 1e6};  // 40 pages take as long as all of them
  Twins twins(drawn_spec(), options, 2);
  const Twins::Seq seq = twins.make(kTokens, 1);
  EXPECT_EQ(expect_exact(twins, seq, 1, KVM_MODE_SAMPLED, [](StepRequest& s) { s.budget = 30; }),
            kPages);
  EXPECT_LT(twins.attend({seq}, {1}, 4, [](StepRequest& s) { s.budget = 1; }).n_reads, 17u);
}

TEST(Drawn, ModesThatLookAtRowsBeforeTheyKnow) {
  Twins twins(drawn_spec(), kAnyOrder, 2);
  const Twins::Seq seq = twins.make(kTokens, 1);
  const auto ask = [](uint32_t mode, uint64_t budget, float eps) {
    return [=](StepRequest& s) {
      s.mode = mode;
      s.budget = budget;
      s.eps = eps;
    };
  };
  for (const auto& change :
       {ask(KVM_MODE_SAMPLED, 0, 0.3f), ask(KVM_MODE_SAMPLED, 20, 0.3f),
        ask(KVM_MODE_VERIFIED, 20, 0.3f), ask(KVM_MODE_TOPK, 20, 0), ask(KVM_MODE_AUTO, 0, 0.3f)}) {
    EXPECT_EQ(expect_exact(twins, seq, 1, KVM_MODE_EXACT, change), kPages);
  }
}

TEST(Drawn, WithoutAnIndexThereIsNothingToDrawBy) {
  Twins twins(drawn_spec(), kAnyOrder, 2);
  const Twins::Seq seq = twins.create();
  twins.append(seq, kTokens, 1);
  twins.away(seq);
  EXPECT_EQ(expect_exact(twins, seq, 1, KVM_MODE_EXACT, [](StepRequest&) {}), kPages);
}

// Of half of what is away there is an index: the other half would be read whole.
TEST(Drawn, WhereTheIndexCoversAPart) {
  Twins twins(drawn_spec(), kAnyOrder, 2);
  const Twins::Seq seq = twins.make(20000, 1);
  twins.append(seq, 50000, 2);
  twins.away(seq);
  EXPECT_EQ(expect_exact(twins, seq, 1, KVM_MODE_SAMPLED, [](StepRequest&) {}), kPages);
}

// What is drawn is no number: found out when it has been read, and then all is, once more.
TEST(Drawn, WhatIsNotFiniteIsStreamedAfterwards) {
  Twins twins(drawn_spec(), kAnyOrder, 3);
  const Twins::Seq seq = twins.make(kTokens, 1, 3);
  for (const uint32_t n_query : {1u, 4u, 20u}) {
    const Twins::Got got = twins.attend({seq}, {n_query}, 3, [](StepRequest& s) { s.budget = 3; });
    EXPECT_GT(got.there.n_not_finite, 0u);
    EXPECT_GT(got.n_reads, kPages);
  }
}

// --- AUTO ---------------------------------------------------------------------------------------

TEST(Drawn, AutoTakesTheFaster) {
  const auto ask = [](uint64_t time_ns) {
    return [=](StepRequest& s) {
      s.mode = KVM_MODE_AUTO;
      s.budget = time_ns;
    };
  };
  // 18 MB in order: 18 ms.
  {
    SimulatedTierOptions options = kAnyOrder;
    options.rates = {.bytes_per_s = 1e9, .alone_ns = 5000};
    Twins twins(drawn_spec(), options, 2);
    const Twins::Seq seq = twins.make(kTokens, 1);
    const auto run = [&](uint64_t time_ns, RequestResult* result) {
      const auto asked = sample_of(twins.space_there, {query_item(seq.there, 1)}, 3);
      ask(time_ns)(asked->step);
      const uint64_t n_before = twins.tier.n_reads();
      *result = twins.there.run(asked->step);
      EXPECT_TRUE(result->status.is_ok()) << result->status.message();
      return twins.tier.n_reads() - n_before;
    };
    RequestResult result;
    EXPECT_EQ(run(100'000'000, &result), kPages);  // there is time for all of it
    EXPECT_EQ(result.mode, uint32_t{KVM_MODE_EXACT});
    const uint64_t n_few = run(1'000'000, &result);
    EXPECT_EQ(result.mode, uint32_t{KVM_MODE_SAMPLED});
    const uint64_t n_more = run(5'000'000, &result);
    EXPECT_EQ(result.mode, uint32_t{KVM_MODE_SAMPLED});
    EXPECT_LT(n_few, 80u);
    EXPECT_GT(n_more, n_few + 50);
    EXPECT_LT(n_more, kPages / 2);
  }
  // Where single pages are dear, nothing is faster than all.
  {
    SimulatedTierOptions options = kAnyOrder;
    options.rates = {.bytes_per_s = 1e9, .alone_ns = 1e6};
    Twins twins(drawn_spec(), options, 2);
    const Twins::Seq seq = twins.make(kTokens, 1);
    EXPECT_EQ(expect_exact(twins, seq, 1, KVM_MODE_EXACT, ask(1'000'000)), kPages);
  }
}

// --- What goes wrong ----------------------------------------------------------------------------

TEST(Drawn, AFailedReadFailsOneRequest) {
  SimulatedTier tier({});
  Rig rig(options_of(&tier, 2));
  const kvm_space_id space = rig.space(drawn_spec());
  const kvm_seq_id seq = rig.create(space);
  ASSERT_TRUE(rig.run(append_of(space, seq, kTokens, 1)->step).status.is_ok());
  const auto before = sample_of(space, {query_item(seq, 1)}, 7);
  ASSERT_TRUE(rig.run(before->step).status.is_ok());
  send_away(rig, seq);
  for (const uint64_t nth : {1u, 2u, 10u}) {
    for (const bool appends : {false, true}) {
      tier.fail_next(Transfer::Kind::kRead, nth, {KVM_ERR_IO, "sector 7 is gone"});
      const auto asked = sample_of(space, {query_item(seq, 1)}, 7);
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
      EXPECT_EQ(rig.length(seq), kTokens);
      tier.clear_faults();
      const auto again = sample_of(space, {query_item(seq, 1)}, 7);
      ASSERT_TRUE(rig.run(again->step).status.is_ok());
      EXPECT_TRUE(again->o.bytes() == before->o.bytes());
    }
  }
}

// A tier that does nothing before the test says so, and a sequence that is there.
struct Stalled {
  static constexpr uint32_t kLength = 20000;

  explicit Stalled(uint32_t n_threads = 1)
      : tier({.is_manual = true}),
        rig(options_of(&tier, n_threads)),
        space(rig.space(drawn_spec())) {
    seq = rig.create(space);
    EXPECT_TRUE(rig.run(append_of(space, seq, kLength, 1)->step).status.is_ok());
    EXPECT_TRUE(rig.run(sample_of(space, {query_item(seq, 2)}, 7)->step).status.is_ok());
    EXPECT_TRUE(rig.engine->send_away(seq).is_ok());
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
  void submit(std::unique_ptr<Asked> asked) {
    Asked* what = asked.get();
    asked_.push_back(std::move(asked));
    const size_t at = results.size();
    results.emplace_back();
    n_answers.push_back(0);
    rig.engine->submit(rig.client, {2, at}, StepRequest(what->step),
                       [this, at](RequestResult&& result) {
                         ++n_answers[at];
                         results[at] = std::move(result);
                       });
  }
  // Until its reads are on their way, which is after a job of its own.
  void start_reading() {
    for (int i = 0; i < 100000 && tier.n_waiting() == 0; ++i) {
      turn();
    }
    EXPECT_GT(tier.n_waiting(), 0u);
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

TEST(Drawn, AnyOrderOfArrival) {
  Stalled stalled(3);
  for (uint64_t seed = 0; seed < 10; ++seed) {
    stalled.submit(sample_of(stalled.space, {query_item(stalled.seq, 1)}, 7));
    stalled.finish_any(seed);
    ASSERT_TRUE(stalled.results.back().status.is_ok());
    EXPECT_EQ(stalled.results.back().n_exact, 0u);
    EXPECT_TRUE(stalled.asked_[0]->o.bytes() == stalled.asked_.back()->o.bytes()) << seed;
  }
}

// Many that wait for what they have drawn take nothing from those that need no pages.
TEST(Drawn, WhoWaitsHoldsNobodyUp) {
  Stalled stalled;
  for (int i = 0; i < 100; ++i) {
    const RequestResult fork = stalled.rig.verb(SeqVerb::kFork, stalled.seq, Stalled::kLength);
    ASSERT_TRUE(fork.status.is_ok());
    stalled.submit(sample_of(stalled.space, {query_item(fork.seq, 1)}, 7));
  }
  stalled.start_reading();
  for (int i = 0; i < 20; ++i) {
    stalled.turn();
  }
  const kvm_seq_id created = stalled.rig.create(stalled.space);
  EXPECT_TRUE(stalled.rig.run(append_of(stalled.space, created, 5000, 3)->step).status.is_ok());
  EXPECT_TRUE(
      stalled.rig.run(sample_of(stalled.space, {query_item(created, 1)}, 7)->step).status.is_ok());
  EXPECT_EQ(std::count(stalled.n_answers.begin(), stalled.n_answers.end(), 0), 100);
  stalled.finish_any(1);
  for (size_t i = 0; i < 100; ++i) {
    ASSERT_TRUE(stalled.results[i].status.is_ok()) << stalled.results[i].status.message();
    EXPECT_TRUE(stalled.asked_[i]->o.bytes() == stalled.asked_[0]->o.bytes());
  }
}

// A client that goes at any point of its request leaves nothing behind, and one whose sequence is
// evicted, or that cancels, is answered.
TEST(Drawn, DeathEvictionAndCancellingAtEveryPoint) {
  enum class Event { kDeath, kEviction, kCancel };
  for (int n_before = -3; n_before < 40; n_before += n_before < 4 ? 1 : 7) {
    for (const Event event : {Event::kDeath, Event::kEviction, Event::kCancel}) {
      const bool is_death = event == Event::kDeath;
      Stalled stalled(static_cast<uint32_t>(1 + (n_before + 3) % 3));
      stalled.submit(sample_of(stalled.space, {query_item(stalled.seq, 2)}, 7));
      // It waits behind the first one.
      stalled.submit(append_of(stalled.space, stalled.seq, 100, 8));
      if (n_before < 0) {
        // While it looks for what it will read, or stands in line for it.
        for (int i = 0; i < 3 + n_before; ++i) {
          stalled.rig.engine->poll();
          stalled.rig.engine->work();
        }
      } else {
        stalled.start_reading();
      }
      for (int i = 0; i < n_before && stalled.tier.n_waiting() != 0; ++i) {
        stalled.tier.finish(static_cast<size_t>(i) * 7 % stalled.tier.n_waiting());
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
      stalled.finish_any(static_cast<uint64_t>(n_before + 3));
      stalled.turn();
      EXPECT_EQ(is_gone, is_death);
      EXPECT_EQ(stalled.n_answers[0], is_death && !is_answered ? 0 : 1);
      EXPECT_EQ(stalled.tier.n_in_flight(), 0u);
      if (event == Event::kCancel) {
        EXPECT_EQ(stalled.results[0].status.code(), is_answered ? KVM_OK : KVM_ERR_CANCELLED);
        EXPECT_TRUE(stalled.results[1].status.is_ok()) << stalled.results[1].status.message();
        EXPECT_EQ(stalled.rig.length(stalled.seq), Stalled::kLength + 100u);
        continue;
      }
      EXPECT_EQ(stalled.tier.used_bytes(), 0u);
      if (!is_death) {
        EXPECT_TRUE(stalled.results[0].status.is_ok()) << stalled.results[0].status.message();
      }
    }
  }
}

}  // namespace
}  // namespace kvm::engine::testing
