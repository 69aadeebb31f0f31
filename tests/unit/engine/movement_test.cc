// SPDX-License-Identifier: Apache-2.0
// Pages leave memory and come back by themselves: sequences that together are larger than memory
// answer as those do that have all of it, bit for bit; appends wait for room, and nobody else does;
// and what is in use stays.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/limits.h"
#include "base/splitmix.h"
#include "engine/engine.h"
#include "tests/sim/simulated_clock.h"
#include "tests/unit/engine/rig.h"
#include "tiers/simulated/simulated_tier.h"

namespace kvm::engine::testing {
namespace {

using kvm::testing::SimulatedClock;
using tiers::SimulatedTier;
using tiers::SimulatedTierOptions;
using tiers::Transfer;

// Pages of 16 KiB. The rings of two windows take 4 MiB of the memory.
constexpr uint32_t kHeads = 2;
constexpr uint32_t kDim = 16;
constexpr uint64_t kPageBytes = uint64_t{kPageTokens} * kHeads * 2 * kDim * 4;
constexpr uint64_t kCapacity = 16 << 20;
constexpr uint64_t kRingBytes = 4 << 20;

SpaceSpec plain_spec() {
  SpaceSpec spec = make_spec("plain", 1, kHeads, kHeads, kDim);
  spec.params.codec = KVM_CODEC_F32;
  return spec;
}

// A request with its tensors.
struct Asked {
  StepRequest step;
  Buffer q, o, k, v;
};

void fill_rows(Buffer* buffer, uint64_t n_rows, uint64_t seed, float scale) {
  for (uint64_t row = 0; row < n_rows; ++row) {
    for (uint64_t head = 0; head < kHeads; ++head) {
      for (uint64_t i = 0; i < kDim; ++i) {
        seed += kSplitMixStep;
        const auto whole = static_cast<int64_t>(splitmix64(seed));
        buffer->set(0, row, head, i, static_cast<float>(whole) * 0x1p-63f * scale);
      }
    }
  }
}

// A step that appends tokens to a sequence, and attends with so many rows. The seed says what.
std::unique_ptr<Asked> step_of(kvm_space_id space, kvm_seq_id seq, uint32_t n_append,
                               uint32_t n_query, uint64_t seed) {
  auto asked = std::make_unique<Asked>();
  StepRequest& step = asked->step;
  step.space = space;
  step.items = {kvm::testing::item_of(seq, n_append, n_query)};
  if (n_append != 0) {
    asked->k = Buffer(Dtype::kF32, 1, n_append, kHeads, kDim);
    asked->v = Buffer(Dtype::kF32, 1, n_append, kHeads, kDim);
    fill_rows(&asked->k, n_append, seed, 1);
    fill_rows(&asked->v, n_append, ~seed, 1);
    step.append = true;
    step.k = asked->k.view();
    step.v = asked->v.view();
  }
  if (n_query != 0) {
    asked->q = Buffer(Dtype::kF32, 1, n_query, kHeads, kDim);
    asked->o = Buffer(Dtype::kF32, 1, n_query, kHeads, kDim);
    fill_rows(&asked->q, n_query, seed ^ 0x5555, 3);
    step.attend = true;
    step.q = asked->q.view();
    step.o = asked->o.view();
  }
  return asked;
}

// An engine with a slow tier that ends transfers as the test wants them, and with a clock that
// stands still.
struct World {
  explicit World(
      const std::function<void(EngineOptions*)>& change = [](EngineOptions*) {},
      SimulatedTierOptions tier_options = {.is_manual = true}, const SpaceSpec& spec = plain_spec())
      : tier(tier_options), rig(make_options(change)), space(rig.space(spec)) {}
  ~World() {
    if (rig.engine != nullptr) {
      settle();
      rig.engine->check_accounts();
    }
  }
  EngineOptions make_options(const std::function<void(EngineOptions*)>& change) {
    EngineOptions options = Rig::make_options(1, kCapacity);
    options.slow_tier = &tier;
    options.default_quota_bytes = 64 * kCapacity;
    options.clock = &clock;
    change(&options);
    return options;
  }

  // Lets the engine do what it can, while no transfer ends.
  void turn() {
    int n_idle = 0;
    for (int i = 0; i < 5000 && n_idle < 20; ++i) {
      const bool has_done = rig.engine->poll() != 0;
      n_idle = rig.engine->work() || has_done ? 0 : n_idle + 1;
    }
  }
  // Ends transfers in an order that the seed says until nothing is in flight.
  void settle(uint64_t seed = 1) {
    std::mt19937_64 random(seed);
    turn();
    for (int i = 0; i < 200000 && tier.n_waiting() != 0; ++i) {
      tier.finish(random() % tier.n_waiting());
      if (tier.n_waiting() % 16 == 0) {
        turn();
      }
    }
    turn();
    EXPECT_EQ(tier.n_waiting(), 0u);
  }
  size_t submit(std::unique_ptr<Asked> asked, ClientId client = 0) {
    StepRequest step = asked->step;
    asked_.push_back(std::move(asked));
    const size_t at = results.size();
    results.emplace_back();
    n_answers.push_back(0);
    rig.engine->submit(client == 0 ? rig.client : client, {2, at}, std::move(step),
                       [this, at](RequestResult&& result) {
                         ++n_answers[at];
                         results[at] = std::move(result);
                       });
    turn();
    return at;
  }
  // The same until it is answered.
  RequestResult run(std::unique_ptr<Asked> asked, ClientId client = 0) {
    const size_t at = submit(std::move(asked), client);
    for (int i = 0; i < 100 && n_answers[at] == 0; ++i) {
      settle(i);
    }
    EXPECT_EQ(n_answers[at], 1);
    return results[at];
  }
  kvm_seq_id create(ClientId client = 0) {
    SeqRequest request;
    request.space = space;
    const RequestResult result = rig.run(request, client);
    EXPECT_TRUE(result.status.is_ok()) << result.status.message();
    return result.seq;
  }
  // A sequence of so many tokens, a prompt in parts. Its seed is its number.
  kvm_seq_id prompt(uint32_t n_tokens, ClientId client = 0) {
    const kvm_seq_id seq = create(client);
    for (uint32_t n = 0; n < n_tokens; n += 512) {
      const auto part = std::min(512u, n_tokens - n);
      const RequestResult result = run(step_of(space, seq, part, 0, seed(seq, n)), client);
      EXPECT_TRUE(result.status.is_ok()) << result.status.message();
    }
    settle();
    return seq;
  }
  // Decodes n tokens, one after the other.
  void decode(kvm_seq_id seq, int n, uint64_t from = 1000) {
    for (int i = 0; i < n; ++i) {
      const RequestResult result = run(step_of(space, seq, 1, 1, seed(seq, from + i)));
      EXPECT_TRUE(result.status.is_ok()) << result.status.message();
    }
  }
  // Fills memory, until an append finds none while the tier ends no write. Returns its number; it
  // is of the last sequence made, and of 512 tokens.
  size_t fill_up(ClientId client = 0) {
    for (int i = 0; i < 200; ++i) {
      seqs.push_back(create(client));
      for (uint32_t n = 0; n < 2048; n += 512) {
        const size_t at = submit(step_of(space, seqs.back(), 512, 0, seed(seqs.back(), n)), client);
        if (n_answers[at] == 0) {
          length_before = n;
          return at;
        }
        EXPECT_TRUE(results[at].status.is_ok()) << results[at].status.message();
      }
    }
    ADD_FAILURE() << "memory is never full";
    return 0;
  }
  kvm_status set_priority(kvm_seq_id seq, const PriorityRange& range) {
    return rig.run(SeqRequest{.verb = SeqVerb::kSetPriority, .seq = seq, .range = range})
        .status.code();
  }
  // Of a whole sequence.
  kvm_status set_priority(kvm_seq_id seq, uint32_t priority) {
    return set_priority(seq, {.priority = priority, .end = KVM_POSITION_END});
  }
  static uint64_t seed(kvm_seq_id seq, uint64_t n) {
    return splitmix64((seq & 0xffffff) * 100'000 + n);
  }
  kvm_seq_info info(kvm_seq_id seq) { return rig.engine->seq_info(rig.client, seq).value(); }
  uint64_t in_memory() const { return rig.engine->stats().host_page_bytes + kRingBytes; }
  MovementStats moved() const { return rig.engine->movement_stats(); }

  SimulatedClock clock;
  SimulatedTier tier;
  Rig rig;
  kvm_space_id space = 0;
  std::vector<kvm_seq_id> seqs;
  uint32_t length_before = 0;
  std::vector<RequestResult> results;
  std::vector<int> n_answers;
  std::vector<std::unique_ptr<Asked>> asked_;
};

bool is_nightly() { return std::getenv("KVM_NIGHTLY") != nullptr; }

uint64_t high_bytes() { return static_cast<uint64_t>(0.9 * kCapacity); }
uint64_t low_bytes() { return static_cast<uint64_t>(0.8 * kCapacity); }

void with_lru(EngineOptions* options) { options->movement.rule = LeavingRule::kLru; }

// --- What is larger than memory -----------------------------------------------------------------

TEST(Movement, AWorkingSetOfThreeTimesTheMemory) {
  constexpr uint32_t kSeqs = 24;
  constexpr uint32_t kTokens = 8192;  // 2 MiB each
  for (const uint32_t n_threads : {1u, 3u}) {
    SCOPED_TRACE(n_threads);
    SimulatedTier tier({.reorder = 64, .seed = 5});
    EngineOptions options = Rig::make_options(n_threads, kCapacity);
    options.slow_tier = &tier;
    options.default_quota_bytes = 16 * kCapacity;
    options.movement.rule = n_threads == 1 ? LeavingRule::kS3Fifo : LeavingRule::kLru;
    Rig small(options);
    Rig large(n_threads, 128 << 20);
    const kvm_space_id small_space = small.space(plain_spec());
    const kvm_space_id large_space = large.space(plain_spec());
    std::vector<kvm_seq_id> smalls;
    std::vector<kvm_seq_id> larges;
    const auto both = [&](size_t i, uint32_t n_append, uint64_t seed) {
      const auto a = step_of(small_space, smalls[i], n_append, 1, seed);
      const auto b = step_of(large_space, larges[i], n_append, 1, seed);
      const RequestResult got = small.run(a->step);
      ASSERT_TRUE(got.status.is_ok()) << got.status.message();
      ASSERT_TRUE(large.run(b->step).status.is_ok());
      EXPECT_TRUE(a->o.bytes() == b->o.bytes()) << i << ", " << seed;
    };
    for (uint32_t i = 0; i < kSeqs; ++i) {
      smalls.push_back(small.create(small_space));
      larges.push_back(large.create(large_space));
      for (uint32_t n = 0; n < kTokens; n += 2048) {
        both(i, 2048, World::seed(i, n));
      }
    }
    for (uint32_t round = 0; round < 2; ++round) {
      for (uint32_t i = 0; i < kSeqs; ++i) {
        both(i, 1, World::seed(i, kTokens + round));
      }
    }
    EXPECT_TRUE(small.drive_until([&] { return !small.engine->is_sending(); }));
    EXPECT_GT(small.engine->stats().away_bytes, 2 * kCapacity);
    small.engine->check_accounts();
    for (const kvm_seq_id seq : smalls) {
      EXPECT_TRUE(small.verb(SeqVerb::kFree, seq).status.is_ok());
    }
    EXPECT_EQ(tier.used_bytes(), 0u);
  }
}

// Of random histories; below(n) is a random number below n.
template <typename Below>
Status move_somewhere(World* world, kvm_seq_id seq, const Below& below) {
  return below(2) == 0 ? world->rig.engine->prefetch(seq) : world->rig.engine->send_away(seq);
}
template <typename Below>
PriorityRange some_range(const Below& below) {
  const uint64_t begin = below(4000);
  return {.priority = static_cast<uint32_t>(below(101)),
          .begin = begin,
          .end = begin + 1 + below(2000),
          .keep_ns = below(3) == 0 ? 1 + below(1000) : 0};
}

// Random requests about random sequences beside an engine with all of it in memory; pages go and
// come in any order, some writes fail, and callers send, fetch and set priorities besides.
TEST(Movement, AnyHistory) {
  for (uint64_t seed = 0; seed < 4; ++seed) {
    SCOPED_TRACE(seed);
    World world([&](EngineOptions* options) {
      options->movement.rule = seed % 2 == 0 ? LeavingRule::kS3Fifo : LeavingRule::kLru;
      options->movement.low = seed < 2 ? 0.8 : 0.4;
    });
    Rig large(1, 256 << 20);
    const kvm_space_id large_space = large.space(plain_spec());
    struct Seq {
      kvm_seq_id small;
      kvm_seq_id large;
      uint64_t length;
    };
    std::vector<Seq> seqs;
    std::mt19937_64 random(seed);
    const auto below = [&](uint64_t n) { return random() % n; };
    world.tier.fail_every(Transfer::Kind::kWrite, 37, {KVM_ERR_IO, "sector 7 is gone"});
    for (uint64_t i = 0; i < 250; ++i) {
      for (uint64_t n = below(100); n > 0 && world.tier.n_waiting() != 0; --n) {
        world.tier.finish(below(world.tier.n_waiting()));
      }
      const uint64_t dice = seqs.size() < 6 ? 0 : below(12);
      const size_t at = seqs.empty() ? 0 : below(seqs.size());
      if (dice == 0) {
        seqs.push_back({world.create(), large.create(large_space), 0});
        continue;
      }
      Seq& seq = seqs[at];
      if (dice <= 6) {
        const auto n_append = static_cast<uint32_t>(dice <= 3 ? 1 + below(4000) : below(3));
        if (seq.length + n_append == 0) {
          continue;
        }
        const RequestResult got = world.run(step_of(world.space, seq.small, n_append, 1, i));
        const auto want = step_of(large_space, seq.large, n_append, 1, i);
        ASSERT_TRUE(got.status.is_ok()) << got.status.message();
        ASSERT_TRUE(large.run(want->step).status.is_ok());
        EXPECT_TRUE(world.asked_.back()->o.bytes() == want->o.bytes());
        seq.length += n_append;
      } else if (dice == 7) {
        const uint64_t n = below(2) == 0 ? seq.length : below(seq.length + 1);
        seqs.push_back({world.rig.verb(SeqVerb::kFork, seq.small, n).seq,
                        large.verb(SeqVerb::kFork, seq.large, n).seq, n});
      } else if (dice == 8) {
        seq.length = below(seq.length + 1);
        EXPECT_TRUE(world.rig.verb(SeqVerb::kTruncate, seq.small, seq.length).status.is_ok());
        EXPECT_TRUE(large.verb(SeqVerb::kTruncate, seq.large, seq.length).status.is_ok());
      } else if (dice == 9 && seqs.size() > 12) {
        EXPECT_TRUE(world.rig.verb(SeqVerb::kFree, seq.small).status.is_ok());
        EXPECT_TRUE(large.verb(SeqVerb::kFree, seq.large).status.is_ok());
        seqs.erase(seqs.begin() + static_cast<ptrdiff_t>(at));
      } else if (dice == 10) {
        EXPECT_TRUE(move_somewhere(&world, seq.small, below).is_ok());
      } else if (dice == 11) {
        const kvm_status status = world.set_priority(seq.small, some_range(below));
        EXPECT_TRUE(status == KVM_OK || status == KVM_ERR_LIMIT);
        world.clock.advance(below(500));
      }
      world.turn();
    }
    world.settle(seed);
    world.rig.engine->check_accounts();
    EXPECT_GT(world.moved().n_pages_sent, 500u);
    EXPECT_GT(world.moved().n_pages_back, 0u);
    for (const Seq& seq : seqs) {
      EXPECT_TRUE(world.rig.verb(SeqVerb::kFree, seq.small).status.is_ok());
    }
    world.settle(seed);
    EXPECT_EQ(world.tier.used_bytes(), 0u);
    EXPECT_EQ(world.rig.engine->n_pages_away(), 0u);
  }
}

// A sequence beside its twin in an engine that has room for all, and which of its blocks were
// dropped.
struct Dropping {
  kvm_seq_id small = 0;
  kvm_seq_id large = 0;
  uint64_t length = 0;
  std::vector<bool> gone;

  std::vector<kvm_range> gaps() const {
    std::vector<kvm_range> gaps;
    for (uint64_t block = 0; block < gone.size(); ++block) {
      if (gone[block]) {
        gaps.push_back({block * kPageTokens, (block + 1) * kPageTokens});
      }
    }
    return gaps;
  }
  void cut(uint64_t n) {
    length = n;
    gone.resize(n / kPageTokens);
  }
};

// Drops, restores, forks and cuts while memory is short, writes fail and pages come and go: answers
// and refusals are those of an engine that has all in memory, and every append is answered.
TEST(Movement, DroppedTokensInAnyHistory) {
  const uint64_t n_seeds = is_nightly() ? 60 : 3;
  for (uint64_t seed = 0; seed < n_seeds; ++seed) {
    SCOPED_TRACE(seed);
    SpaceSpec spec = plain_spec();
    if (seed % 4 >= 2) {
      spec.indexes = {make_index()};
    }
    World world(
        [&](EngineOptions* options) {
          options->movement.rule = seed % 2 == 0 ? LeavingRule::kS3Fifo : LeavingRule::kLru;
          options->movement.low = seed % 3 == 0 ? 0.8 : 0.4;
        },
        {.is_manual = true}, spec);
    Rig large(1, 256 << 20);
    const kvm_space_id large_space = large.space(spec);
    std::vector<Dropping> seqs;
    std::mt19937_64 random(seed);
    const auto below = [&](uint64_t n) { return random() % n; };
    world.tier.fail_every(Transfer::Kind::kWrite, 37, {KVM_ERR_IO, "sector 7 is gone"});
    // The same of both, which answer alike. Returns whether they did it.
    const auto run_both = [&](const auto& make) {
      const RequestResult got = world.run(make(world.space, true));
      const auto want = make(large_space, false);
      const RequestResult expected = large.run(want->step);
      EXPECT_EQ(got.status.code(), expected.status.code()) << got.status.message();
      EXPECT_TRUE(got.status.is_ok() || got.status.code() == KVM_ERR_PARTIAL)
          << got.status.message();
      EXPECT_TRUE(world.asked_.back()->o.bytes() == want->o.bytes());
      return got.status.is_ok();
    };
    const auto verb_both = [&](const Dropping& seq, SeqRequest what, RequestResult* of_small,
                               RequestResult* of_large) {
      what.seq = seq.small;
      *of_small = world.rig.run(SeqRequest(what));
      what.seq = seq.large;
      *of_large = large.run(SeqRequest(what));
      EXPECT_EQ(of_small->status.code(), of_large->status.code());
      return of_small->status.is_ok();
    };
    for (uint64_t i = 0; i < 400 && !::testing::Test::HasFailure(); ++i) {
      for (uint64_t n = below(100); n > 0 && world.tier.n_waiting() != 0; --n) {
        world.tier.finish(below(world.tier.n_waiting()));
      }
      const uint64_t dice = seqs.size() < 6 ? 0 : below(16);
      if (dice == 0) {
        seqs.push_back({world.create(), large.create(large_space), 0, {}});
        continue;
      }
      const size_t at = below(seqs.size());
      Dropping& seq = seqs[at];
      RequestResult of_small;
      RequestResult of_large;
      if (dice <= 6) {
        const auto n_append = static_cast<uint32_t>(dice <= 3 ? 1 + below(6000) : below(3));
        const std::vector<kvm_range> gaps = below(3) != 0 ? seq.gaps() : std::vector<kvm_range>();
        const bool is_done =
            seq.length + n_append == 0 || run_both([&](kvm_space_id space, bool is_small) {
              auto asked = step_of(space, is_small ? seq.small : seq.large, n_append, 1, i);
              asked->step.mode = KVM_MODE_EXACT;
              asked->step.items[0].flags = KVM_ITEM_EXCLUDE_RANGES;
              asked->step.items[0].n_ranges = static_cast<uint32_t>(gaps.size());
              asked->step.ranges = gaps;
              return asked;
            });
        seq.length += is_done ? n_append : 0;
        seq.gone.resize(seq.length / kPageTokens);
      } else if (dice == 7) {
        const uint64_t n = below(2) == 0 ? seq.length : below(seq.length + 1);
        if (verb_both(seq, {.verb = SeqVerb::kFork, .n_tokens = n}, &of_small, &of_large)) {
          Dropping child = seq;
          child.small = of_small.seq;
          child.large = of_large.seq;
          child.cut(n);
          seqs.push_back(child);
        }
      } else if (dice == 8) {
        const uint64_t n = below(seq.length + 1);
        if (verb_both(seq, {.verb = SeqVerb::kTruncate, .n_tokens = n}, &of_small, &of_large)) {
          seq.cut(n);
        }
      } else if (dice == 9 && seqs.size() > 12) {
        verb_both(seq, {.verb = SeqVerb::kFree}, &of_small, &of_large);
        seqs.erase(seqs.begin() + static_cast<ptrdiff_t>(at));
        continue;
      } else if (dice == 10) {
        EXPECT_TRUE(move_somewhere(&world, seq.small, below).is_ok());
      } else if (dice == 11) {
        world.set_priority(seq.small, some_range(below));  // or it has too many
        world.clock.advance(below(500));
      } else if (dice <= 13) {
        const uint64_t begin = below(seq.length + 1);
        const uint64_t end = begin + below(seq.length - begin + 1);
        EXPECT_TRUE(verb_both(seq, {.verb = SeqVerb::kDrop, .range = {.begin = begin, .end = end}},
                              &of_small, &of_large));
        for (uint64_t b = (begin + kPageTokens - 1) / kPageTokens; b < end / kPageTokens; ++b) {
          seq.gone[b] = true;
        }
      } else if (seq.length >= kPageTokens) {
        const uint64_t n_blocks = seq.length / kPageTokens;
        const uint64_t begin = below(n_blocks);
        const uint64_t n = 1 + below(std::min<uint64_t>(n_blocks - begin, 130));
        EXPECT_TRUE(run_both([&](kvm_space_id space, bool is_small) {
          auto asked = step_of(space, is_small ? seq.small : seq.large,
                               static_cast<uint32_t>(n * kPageTokens), 0, i);
          asked->step.items[0].append_position = begin * kPageTokens;
          asked->step.items[0].flags = KVM_ITEM_RESTORE;
          return asked;
        }));
        std::fill_n(seq.gone.begin() + static_cast<ptrdiff_t>(begin), n, false);
      }
      world.turn();
      EXPECT_EQ(world.info(seqs[at].small).n_entries_dropped,
                kPageTokens * static_cast<uint64_t>(
                                  std::count(seqs[at].gone.begin(), seqs[at].gone.end(), true)));
    }
    world.settle(seed);
    world.rig.engine->check_accounts();
    for (const Dropping& seq : seqs) {
      EXPECT_TRUE(world.rig.verb(SeqVerb::kFree, seq.small).status.is_ok());
    }
    world.settle(seed);
    EXPECT_EQ(world.tier.used_bytes(), 0u);
    EXPECT_EQ(world.rig.engine->n_pages_away(), 0u);
  }
}

// Its own full pages go while it grows.
TEST(Movement, OneSequenceLargerThanMemory) {
  World world;
  const kvm_seq_id seq = world.create();
  Rig large(1, 128 << 20);
  const kvm_space_id large_space = large.space(plain_spec());
  const kvm_seq_id large_seq = large.create(large_space);
  for (uint64_t n = 0; n < 70; ++n) {  // 35 MiB
    const RequestResult result = world.run(step_of(world.space, seq, 2048, 0, n));
    ASSERT_TRUE(result.status.is_ok()) << n << ": " << result.status.message();
    ASSERT_TRUE(large.run(step_of(large_space, large_seq, 2048, 0, n)->step).status.is_ok());
  }
  ASSERT_TRUE(world.run(step_of(world.space, seq, 1, 2, 1000)).status.is_ok());
  const auto want = step_of(large_space, large_seq, 1, 2, 1000);
  ASSERT_TRUE(large.run(want->step).status.is_ok());
  EXPECT_TRUE(world.asked_.back()->o.bytes() == want->o.bytes());
}

// ALISA's phases, under two caps: all in memory; then the oldest in the tier; then, when that is
// full as well, the oldest go for good, and come back where the engine computes them again.
TEST(Movement, APhaseForEachTierAndOneBeyond) {
  constexpr uint32_t kChunk = 2048;  // tokens; 512 KiB
  constexpr uint64_t kTierBytes = 8 << 20;
  World world([](EngineOptions*) {}, {.capacity_bytes = kTierBytes, .is_manual = true});
  Rig large(1, 128 << 20);
  const kvm_space_id large_space = large.space(plain_spec());
  const kvm_seq_id large_seq = large.create(large_space);
  const kvm_seq_id seq = world.create();
  const auto drop = [&](uint64_t begin, uint64_t end) {
    return world.rig
        .run(SeqRequest{.verb = SeqVerb::kDrop, .seq = seq, .range = {.begin = begin, .end = end}})
        .status;
  };
  const auto show = [](Asked* asked, std::vector<kvm_range> ranges) {
    asked->step.items[0].n_ranges = static_cast<uint32_t>(ranges.size());
    asked->step.ranges = std::move(ranges);
  };
  const auto has_same_bits = [&](const std::vector<kvm_range>& shown, uint64_t seed) {
    auto got = step_of(world.space, seq, 0, 2, seed);
    show(got.get(), shown);
    const Status status = world.run(std::move(got)).status;
    EXPECT_TRUE(status.is_ok()) << status.message();
    const auto want = step_of(large_space, large_seq, 0, 2, seed);
    show(want.get(), shown);
    EXPECT_TRUE(large.run(want->step).status.is_ok());
    return world.asked_.back()->o.bytes() == want->o.bytes();
  };
  uint64_t dropped_end = 0;
  std::string trace;
  for (uint64_t n = 0; n < 100; ++n) {  // 50 MiB
    Status status;
    for (;;) {
      status = world.run(step_of(world.space, seq, kChunk, 0, n)).status;
      if (status.code() != KVM_ERR_NO_SPACE) {
        break;
      }
      ASSERT_LT(dropped_end, n * kChunk);
      ASSERT_TRUE(drop(dropped_end, dropped_end + kChunk).is_ok());
      dropped_end += kChunk;
    }
    ASSERT_TRUE(status.is_ok()) << n << ": " << status.message();
    ASSERT_TRUE(large.run(step_of(large_space, large_seq, kChunk, 0, n)->step).status.is_ok());
    ASSERT_LE(world.in_memory(), kCapacity);
    ASSERT_LE(world.tier.used_bytes(), kTierBytes);
    const char phase = dropped_end != 0 ? '3' : world.info(seq).bytes_away != 0 ? '2' : '1';
    if (trace.empty() || trace.back() != phase) {
      trace += phase;
    }
    if (n % 9 == 0) {
      EXPECT_TRUE(has_same_bits({{dropped_end, (n + 1) * kChunk}}, n)) << n;
    }
  }
  EXPECT_EQ(trace, "123");
  const uint64_t end = 100 * kChunk;
  // What is kept is about what both tiers hold.
  EXPECT_GT((end - dropped_end) / kPageTokens * kPageBytes, kTierBytes + kCapacity / 2);
  EXPECT_EQ(world.info(seq).n_entries_dropped, dropped_end);
  // Tokens of the beginning are wanted; of others, in memory or in the tier, as many go.
  ASSERT_TRUE(drop(dropped_end, dropped_end + 4 * kChunk).is_ok());
  ASSERT_TRUE(drop(end - 4 * kChunk, end - 2 * kChunk).is_ok());
  for (const uint64_t n : {3u, 0u}) {
    auto back = step_of(world.space, seq, kChunk, 0, n);
    back->step.items[0].append_position = n * kChunk;
    back->step.items[0].flags = KVM_ITEM_RESTORE;
    const Status status = world.run(std::move(back)).status;
    ASSERT_TRUE(status.is_ok()) << status.message();
  }
  EXPECT_TRUE(has_same_bits(
      {{0, kChunk}, {3 * kChunk, 4 * kChunk}, {end - 10 * kChunk, end - 4 * kChunk}}, 77));
  ASSERT_TRUE(drop(0, end).is_ok());
  EXPECT_EQ(world.info(seq).bytes, 0u);
  world.settle();
  EXPECT_EQ(world.tier.used_bytes(), 0u);
}

// Between the marks nothing moves, and above the high one pages go down to the low one.
TEST(Movement, PagesGoFromTheHighMarkToTheLowOne) {
  World world;
  while (world.in_memory() + 32 * kPageBytes < high_bytes()) {
    world.prompt(1024);
  }
  EXPECT_EQ(world.moved().n_pages_sent, 0u);
  world.prompt(3072);
  world.settle();
  EXPECT_GT(world.moved().n_pages_sent, 0u);
  EXPECT_LE(world.in_memory(), low_bytes());
  EXPECT_GT(world.in_memory(), low_bytes() - 256 * kPageBytes);
}

// --- Appends that wait --------------------------------------------------------------------------

TEST(Movement, AnAppendWaitsAndGoesOn) {
  World world;
  const size_t waiting = world.fill_up();
  EXPECT_EQ(world.moved().n_appends_waited, 1u);
  // Others go on: those that read, and those that need no page.
  const kvm_seq_id other = world.seqs[0];
  const size_t read = world.submit(step_of(world.space, other, 0, 1, 7));
  EXPECT_EQ(world.n_answers[read], 1);
  EXPECT_TRUE(world.results[read].status.is_ok());
  // One that needs some stands behind it.
  const size_t second = world.submit(step_of(world.space, other, 512, 0, 7));
  EXPECT_EQ(world.n_answers[second], 0);
  EXPECT_EQ(world.n_answers[waiting], 0);
  world.settle();
  for (const size_t at : {waiting, second}) {
    EXPECT_EQ(world.n_answers[at], 1);
    EXPECT_TRUE(world.results[at].status.is_ok()) << world.results[at].status.message();
  }
  EXPECT_EQ(world.rig.length(world.seqs.back()), world.length_before + 512);
}

// A client that needs much keeps those waiting that are behind it in its own line, and nobody else.
TEST(Movement, OneClientsLargeAppendStopsNobodyElse) {
  World world;
  const ClientId large_client = world.rig.engine->add_client({});
  const ClientId small_client = world.rig.engine->add_client({});
  const kvm_seq_id large_seq = world.create(large_client);
  const kvm_seq_id other_seq = world.create(large_client);
  const kvm_seq_id small_seq = world.create(small_client);
  const size_t first = world.fill_up();
  const size_t large = world.submit(step_of(world.space, large_seq, 40000, 0, 7), large_client);
  const size_t behind = world.submit(step_of(world.space, other_seq, 64, 0, 7), large_client);
  size_t n_passed = 0;
  for (uint64_t i = 0; i < 100 && world.n_answers[large] == 0; ++i) {
    const size_t small = world.submit(step_of(world.space, small_seq, 64, 1, i), small_client);
    for (size_t n = world.tier.n_waiting(); n != 0; --n) {
      world.tier.finish(0);
    }
    world.turn();
    if (world.n_answers[large] != 0) {
      break;
    }
    EXPECT_EQ(world.n_answers[behind], 0);
    EXPECT_EQ(world.n_answers[small], 1);
    EXPECT_TRUE(world.results[small].status.is_ok()) << world.results[small].status.message();
    ++n_passed;
  }
  EXPECT_GE(n_passed, 2u);
  world.settle();
  for (const size_t at : {first, large, behind}) {
    EXPECT_EQ(world.n_answers[at], 1);
    EXPECT_TRUE(world.results[at].status.is_ok()) << world.results[at].status.message();
  }
}

TEST(Movement, AnAppendWaitsUntilItsDeadline) {
  World world;
  world.fill_up();
  auto late = step_of(world.space, world.seqs[0], 512, 0, 7);
  late->step.deadline_ns = world.clock.now_ns() + 1000;
  auto later = step_of(world.space, world.seqs[1], 512, 0, 7);
  later->step.deadline_ns = world.clock.now_ns() + 1'000'000;
  const size_t first = world.submit(std::move(late));
  const size_t second = world.submit(std::move(later));
  world.clock.advance(999);
  world.turn();
  EXPECT_EQ(world.n_answers[first], 0);
  world.clock.advance(1);
  world.turn();
  EXPECT_EQ(world.results[first].status.code(), KVM_ERR_DEADLINE);
  EXPECT_EQ(world.n_answers[second], 0);
  EXPECT_EQ(world.rig.length(world.seqs[0]), 2048u);
  world.settle();
  EXPECT_TRUE(world.results[second].status.is_ok()) << world.results[second].status.message();
}

// What is larger than memory is refused at once.
TEST(Movement, WhatNeverFitsIsRefused) {
  World world;
  const kvm_seq_id seq = world.create();
  const RequestResult result = world.run(step_of(world.space, seq, 60000, 0, 1));
  EXPECT_EQ(result.status.code(), KVM_ERR_NO_SPACE);
  EXPECT_EQ(world.rig.length(seq), 0u);
  EXPECT_EQ(world.moved().n_appends_waited, 0u);
}

// Pages that a request still writes cannot go; those who wait for them are not refused before it
// has ended.
TEST(Movement, WhatIsWrittenMayGoSoon) {
  World world;
  std::vector<kvm_seq_id> seqs = {world.create(), world.create()};
  std::vector<std::unique_ptr<Asked>> asked;
  std::vector<RequestResult> results(2);
  int n_done = 0;
  for (size_t i = 0; i < 2; ++i) {
    asked.push_back(step_of(world.space, seqs[i], 30000, 0, i));  // 7.3 of 12 MiB
    world.rig.engine->submit(world.rig.client, {3, i}, StepRequest(asked[i]->step),
                             [&, i](RequestResult&& result) {
                               results[i] = std::move(result);
                               ++n_done;
                             });
  }
  // Nobody runs tasks.
  for (int i = 0; i < 1000; ++i) {
    world.rig.engine->poll();
  }
  EXPECT_EQ(world.moved().n_appends_waited, 1u);
  EXPECT_EQ(n_done, 0);
  world.settle();
  EXPECT_EQ(n_done, 2);
  for (const RequestResult& result : results) {
    EXPECT_TRUE(result.status.is_ok()) << result.status.message();
  }
}

SpaceSpec heavy_spec() {
  SpaceSpec spec = plain_spec();
  kvm_policy_params policy{};
  policy.n_layers = 1;
  policy.kv_head_mask[0] = 3;
  policy.retention = KVM_RETAIN_HEAVY;
  policy.n_sinks = 4;
  policy.n_recent = 1 << 20;
  policy.n_heavy = 64;
  spec.policies = {policy};
  spec.params.n_policies = 1;
  return spec;
}

// Heads of which a policy reads what it gives up keep their pages: an append that only they could
// make room for is refused.
TEST(Movement, NothingThatMayGo) {
  World world([](EngineOptions*) {}, {.is_manual = true}, heavy_spec());
  Status status;
  const kvm_seq_id seq = world.create();
  for (int i = 0; i < 100 && status.is_ok(); ++i) {
    status = world.run(step_of(world.space, seq, 2048, 0, i)).status;
  }
  EXPECT_EQ(status.code(), KVM_ERR_NO_SPACE) << status.message();
  EXPECT_EQ(world.moved().n_pages_sent, 0u);
  EXPECT_EQ(world.moved().n_appends_waited, 1u);
}

// A client of such heads has a limit of its own, and leaves the rest of the memory to those whose
// pages may go.
TEST(Movement, WhatStaysHasItsOwnQuota) {
  constexpr uint64_t kMemoryQuota = 4 << 20;
  World world([](EngineOptions* options) { options->memory_quota_bytes = kMemoryQuota; });
  SpaceSpec spec = heavy_spec();
  spec.name = "heavy";
  const kvm_space_id heavy = world.rig.space(spec);
  const ClientId greedy = world.rig.engine->add_client({});
  SeqRequest create;
  create.space = heavy;
  const kvm_seq_id seq = world.rig.run(create, greedy).seq;
  Status status;
  for (int i = 0; i < 100 && status.is_ok(); ++i) {
    status = world.run(step_of(heavy, seq, 512, 0, i), greedy).status;
  }
  EXPECT_EQ(status.code(), KVM_ERR_QUOTA) << status.message();
  EXPECT_NE(status.message().find("that cannot leave memory"), std::string::npos)
      << status.message();
  const QuotaAccount* account = world.rig.engine->quotas().find(greedy);
  EXPECT_LE(account->used(Resource::kMemoryBytes), kMemoryQuota);
  EXPECT_GT(account->used(Resource::kMemoryBytes), kMemoryQuota - 16 * kPageBytes);
  EXPECT_EQ(account->used(Resource::kBytes), account->used(Resource::kMemoryBytes));
  // Others hold more than all of memory, and so may it where its pages may go.
  for (const ClientId client : {world.rig.client, greedy}) {
    world.prompt(100'000, client);
  }
  EXPECT_GT(account->used(Resource::kBytes), kCapacity);
  EXPECT_LE(account->used(Resource::kMemoryBytes), kMemoryQuota);
  SeqRequest free;
  free.verb = SeqVerb::kFree;
  free.seq = seq;
  EXPECT_TRUE(world.rig.run(free, greedy).status.is_ok());
  EXPECT_EQ(account->used(Resource::kMemoryBytes), 0u);
}

// Of what stays, indexes go before anything is refused.
TEST(Movement, IndexesMakeWayForWhatStays) {
  SpaceSpec spec = plain_spec();
  spec.indexes = {make_index()};
  World world([](EngineOptions* options) { options->memory_quota_bytes = 2 << 20; },
              {.is_manual = true}, spec);
  const kvm_seq_id indexed = world.prompt(4096);
  auto approximate = step_of(world.space, indexed, 0, 1, 5);
  approximate->step.mode = KVM_MODE_SAMPLED;
  approximate->step.budget = 64;
  ASSERT_TRUE(world.run(std::move(approximate)).status.is_ok());
  EXPECT_GT(world.rig.engine->stats().index_bytes, 0u);
  SpaceSpec heavy = heavy_spec();
  heavy.name = "heavy";
  SeqRequest create;
  create.space = world.rig.space(heavy);
  const kvm_seq_id seq = world.rig.run(create).seq;
  Status status;
  for (int i = 0; i < 100 && status.is_ok(); ++i) {
    status = world.run(step_of(create.space, seq, 512, 0, i)).status;
  }
  EXPECT_EQ(status.code(), KVM_ERR_QUOTA) << status.message();
  EXPECT_EQ(world.rig.engine->stats().index_bytes, 0u);
  const QuotaAccount* account = world.rig.engine->quotas().find(world.rig.client);
  EXPECT_GT(account->used(Resource::kMemoryBytes), (2u << 20) - 16 * kPageBytes);
}

// A driver that sleeps wakes for the deadline of an append that waits.
TEST(Movement, TheDriverWakesForADeadline) {
  World world([](EngineOptions* options) { options->clock = system_clock(); });
  world.fill_up();
  EXPECT_EQ(world.rig.engine->housekeep(), UINT64_MAX);
  constexpr uint64_t kLater = 3'600'000'000'000;
  auto asked = step_of(world.space, world.seqs[0], 512, 0, 7);
  asked->step.deadline_ns = now_ns() + kLater;
  const size_t at = world.submit(std::move(asked));
  EXPECT_LE(world.rig.engine->housekeep(), kLater);
  EXPECT_EQ(world.n_answers[at], 0);
  world.settle();
}

// A quota is no room that others could make.
TEST(Movement, QuotasAreAsTheyWere) {
  World world([](EngineOptions* options) { options->default_quota_bytes = 1 << 20; });
  const kvm_seq_id seq = world.prompt(4096);
  EXPECT_EQ(world.run(step_of(world.space, seq, 64, 0, 1)).status.code(), KVM_ERR_QUOTA);
  EXPECT_EQ(world.moved().n_appends_waited, 0u);
}

// Where the tier takes no more, an append is refused and says why, and nothing is lost; once
// somebody goes there is room again.
TEST(Movement, ATierThatIsFull) {
  World world([](EngineOptions*) {}, {.capacity_bytes = 2 << 20, .is_manual = true});
  std::vector<kvm_seq_id> seqs;
  Status status;
  for (int i = 0; i < 100 && status.is_ok(); ++i) {
    seqs.push_back(world.create());
    for (uint32_t n = 0; n < 2048 && status.is_ok(); n += 512) {
      status = world.run(step_of(world.space, seqs.back(), 512, 0, n)).status;
    }
  }
  EXPECT_EQ(status.code(), KVM_ERR_NO_SPACE);
  EXPECT_NE(status.message().find("the disk took no more"), std::string::npos) << status.message();
  EXPECT_EQ(world.tier.used_bytes(), 2u << 20);
  EXPECT_EQ(world.rig.length(seqs.back()) % 512, 0u);
  const kvm_seq_id refused = seqs.back();
  const uint64_t length = world.rig.length(refused);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(world.run(step_of(world.space, refused, 512, 0, 1)).status.code(), KVM_ERR_NO_SPACE);
  }
  EXPECT_EQ(world.rig.length(refused), length);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(world.rig.verb(SeqVerb::kFree, seqs[i]).status.is_ok());
  }
  EXPECT_TRUE(world.run(step_of(world.space, refused, 512, 0, 1)).status.is_ok());
}

// Writes that fail leave the pages; an append is refused where all do, and else goes on.
TEST(Movement, WritesThatFail) {
  for (const uint64_t every : {1u, 2u}) {
    World world;
    const size_t waiting = world.fill_up();
    // Those in flight end well.
    world.tier.fail_every(Transfer::Kind::kWrite, every, {KVM_ERR_IO, "sector 7 is gone"});
    world.settle();
    EXPECT_TRUE(world.results[waiting].status.is_ok());
    Status status;
    for (int i = 0; i < 40 && status.is_ok(); ++i) {
      status = world.run(step_of(world.space, world.seqs.back(), 512, 0, i)).status;
    }
    if (every == 1) {
      EXPECT_EQ(status.code(), KVM_ERR_NO_SPACE);
      EXPECT_NE(status.message().find("sector 7 is gone"), std::string::npos) << status.message();
    } else {
      EXPECT_TRUE(status.is_ok()) << status.message();
    }
    world.tier.clear_faults();
    EXPECT_TRUE(world.run(step_of(world.space, world.seqs.back(), 512, 0, 99)).status.is_ok());
  }
}

// Cancelling, death and eviction at every point of an append that waits, and of what it waits for.
TEST(Movement, CancellingDeathAndEvictionAtEveryPoint) {
  enum class Event { kCancel, kDeath, kEvictionOfIts, kEvictionOfAll };
  for (const Event event :
       {Event::kCancel, Event::kDeath, Event::kEvictionOfIts, Event::kEvictionOfAll}) {
    for (const size_t n_before : {0u, 1u, 100u, 255u, 256u, 300u}) {
      SCOPED_TRACE(std::to_string(static_cast<int>(event)) + ", " + std::to_string(n_before));
      World world;
      const ClientId client = world.rig.engine->add_client({});
      const kvm_seq_id others = world.prompt(1024);
      const size_t waiting = world.fill_up(client);
      const kvm_seq_id seq = world.seqs.back();
      std::mt19937_64 random(n_before);
      for (size_t i = 0; i < n_before && world.tier.n_waiting() != 0; ++i) {
        world.tier.finish(random() % world.tier.n_waiting());
        if (world.tier.n_waiting() == 0) {
          world.turn();
        }
      }
      const bool is_answered = world.n_answers[waiting] != 0;
      bool is_gone = false;
      switch (event) {
        case Event::kCancel:
          EXPECT_EQ(world.rig.engine->cancel(client, {2, waiting}), !is_answered);
          break;
        case Event::kDeath:
          world.rig.engine->remove_client(client, [&] { is_gone = true; });
          break;
        case Event::kEvictionOfIts:
          EXPECT_TRUE(world.rig.engine->evict(seq).is_ok());
          break;
        case Event::kEvictionOfAll:
          for (const kvm_seq_id each : world.seqs) {
            EXPECT_TRUE(world.rig.engine->evict(each).is_ok());
          }
          break;
      }
      world.turn();
      world.settle(n_before);
      EXPECT_EQ(world.n_answers[waiting], event == Event::kDeath && !is_answered ? 0 : 1);
      EXPECT_EQ(world.rig.engine->n_in_flight(), 0u);
      if (event == Event::kCancel) {
        EXPECT_EQ(world.results[waiting].status.code(), is_answered ? KVM_OK : KVM_ERR_CANCELLED);
        EXPECT_EQ(world.rig.engine->seq_info(client, seq).value().n_tokens_max,
                  world.length_before + (is_answered ? 512 : 0));
      } else if (event == Event::kDeath) {
        EXPECT_TRUE(is_gone);
        EXPECT_EQ(world.rig.engine->stats().n_sequences, 1u);
      } else {
        // It was there before: what was asked before is done before.
        EXPECT_TRUE(world.results[waiting].status.is_ok());
        EXPECT_EQ(world.rig.engine->seq_info(client, seq).status().code(), KVM_ERR_STALE);
      }
      world.decode(others, 2);
    }
  }
}

// An engine that is closed while an append waits, and pages go and come.
TEST(Movement, ClosingWhileAnAppendWaits) {
  World world([](EngineOptions*) {}, {.latency_ns = 2'000'000, .reorder = 8, .seed = 3});
  for (int i = 0; i < 16; ++i) {
    world.seqs.push_back(world.create());
    auto asked = step_of(world.space, world.seqs.back(), 4096, 0, i);
    world.rig.engine->submit(world.rig.client, {3, static_cast<uint64_t>(i)},
                             StepRequest(asked->step), [](RequestResult&&) {});
    world.asked_.push_back(std::move(asked));
  }
  for (int i = 0; i < 40; ++i) {
    world.rig.engine->poll();
    world.rig.engine->work();
  }
  EXPECT_NE(world.rig.engine->n_in_flight(), 0u);
  world.rig.engine.reset();
  EXPECT_EQ(world.tier.n_in_flight(), 0u);
}

// Indexes leave memory when nothing else can.
TEST(Movement, IndexesLeaveLast) {
  SpaceSpec spec = plain_spec();
  spec.indexes = {make_index()};
  World world([](EngineOptions*) {}, {.is_manual = true}, spec);
  const kvm_seq_id indexed = world.prompt(4096);
  auto approximate = step_of(world.space, indexed, 0, 1, 5);
  approximate->step.mode = KVM_MODE_SAMPLED;
  approximate->step.budget = 64;
  ASSERT_TRUE(world.run(std::move(approximate)).status.is_ok());
  const uint64_t index_bytes = world.rig.engine->stats().index_bytes;
  EXPECT_GT(index_bytes, 0u);
  const size_t waiting = world.fill_up();
  world.settle();
  EXPECT_TRUE(world.results[waiting].status.is_ok());
  EXPECT_EQ(world.rig.engine->stats().index_bytes, index_bytes);
  EXPECT_EQ(world.rig.engine->stats().n_index_dropped, 0u);
}

// --- Who leaves ---------------------------------------------------------------------------------

// Reads that decoding takes of sequences in use, after a prompt has passed that nobody uses.
uint64_t reads_after_a_scan(const std::function<void(EngineOptions*)>& change) {
  World world(change);
  std::vector<kvm_seq_id> hot;
  for (int i = 0; i < 5; ++i) {
    hot.push_back(world.prompt(4096));  // 5 MiB in all
    world.decode(hot.back(), 4);
  }
  world.prompt(100000);  // 24 MiB
  EXPECT_GT(world.moved().bytes_sent, kCapacity / 2);
  const uint64_t n_before = world.tier.n_reads();
  for (const kvm_seq_id seq : hot) {
    world.decode(seq, 1, 2000);
  }
  return world.tier.n_reads() - n_before;
}

TEST(Movement, APromptOfOneUseDoesNotPushOutWhatIsUsed) {
  EXPECT_EQ(reads_after_a_scan([](EngineOptions*) {}), 0u);
  EXPECT_GE(reads_after_a_scan(with_lru), 5u * 4096 / kPageTokens);
}

// --- Priorities ---------------------------------------------------------------------------------

uint64_t n_away(World* world, kvm_seq_id seq) { return world->info(seq).bytes_away / kPageBytes; }

// A prompt larger than memory that is worth a little more than what nobody said anything of: what
// is shared would go after the prompt's own pages otherwise.
void press(World* world) {
  const kvm_seq_id seq = world->create();
  EXPECT_EQ(world->set_priority(seq, 60), KVM_OK);
  for (uint64_t n = 0; n < 160; ++n) {
    ASSERT_TRUE(world->run(step_of(world->space, seq, 512, 0, n)).status.is_ok());
  }
}

TEST(Movement, WhatHasAHighPriorityStays) {
  for (const auto& rule : {+[](EngineOptions*) {}, +with_lru}) {
    World world(rule);
    const kvm_seq_id dear = world.prompt(4096);
    EXPECT_EQ(world.set_priority(dear, 100), KVM_OK);
    const kvm_seq_id child = world.rig.verb(SeqVerb::kFork, dear, 3000).seq;
    press(&world);
    EXPECT_GT(world.moved().n_pages_sent, 0u);
    EXPECT_EQ(n_away(&world, dear), 0u);
    EXPECT_EQ(n_away(&world, child), 0u);
    EXPECT_TRUE(world.rig.verb(SeqVerb::kFree, child).status.is_ok());
    world.prompt(30000);
    EXPECT_EQ(n_away(&world, dear), 0u);
    EXPECT_EQ(world.set_priority(dear, KVM_PRIORITY_DEFAULT), KVM_OK);
    world.prompt(60000);
    EXPECT_EQ(n_away(&world, dear), 64u);
  }
}

// What was used last goes before what was not, where it is worth less; and of all, all goes.
TEST(Movement, TheLowestPriorityGoesFirst) {
  World world(with_lru);
  const kvm_seq_id plain = world.prompt(4096);
  const kvm_seq_id higher = world.prompt(4096);
  const kvm_seq_id lowest = world.prompt(4096);
  const kvm_seq_id lower = world.prompt(4096);
  EXPECT_EQ(world.set_priority(higher, 51), KVM_OK);
  EXPECT_EQ(world.set_priority(lowest, 0), KVM_OK);
  EXPECT_EQ(world.set_priority(lower, 49), KVM_OK);
  const std::vector<kvm_seq_id> order = {lowest, lower, plain, higher};
  const kvm_seq_id growing = world.create();
  EXPECT_EQ(world.set_priority(growing, 100), KVM_OK);
  for (uint64_t n = 0; n < 100 && n_away(&world, higher) != 64; ++n) {
    ASSERT_TRUE(world.run(step_of(world.space, growing, 512, 0, n)).status.is_ok());
    for (size_t i = 1; i < order.size(); ++i) {
      if (n_away(&world, order[i]) != 0) {
        EXPECT_EQ(n_away(&world, order[i - 1]), 64u) << i;
      }
    }
  }
  EXPECT_EQ(n_away(&world, higher), 64u);
}

// Memory full of what is worth most is no reason to refuse an append.
TEST(Movement, WhereEverythingHasTheHighestPrioritySomethingGoes) {
  World world;
  std::vector<kvm_seq_id> seqs;
  for (int i = 0; i < 6; ++i) {
    seqs.push_back(world.create());
    EXPECT_EQ(world.set_priority(seqs.back(), 100), KVM_OK);
    for (uint64_t n = 0; n < 32; ++n) {
      ASSERT_TRUE(world.run(step_of(world.space, seqs.back(), 512, 0, n)).status.is_ok());
    }
  }
  EXPECT_GT(world.moved().n_pages_sent, 300u);
}

TEST(Movement, APriorityIsOfARangeOfTokens) {
  for (const bool is_shared : {false, true}) {
    World world(with_lru);
    const kvm_seq_id seq = world.prompt(4096);
    // Pages 1 to 16: whole ones, those that the range touches.
    EXPECT_EQ(world.set_priority(seq, {.priority = 80, .begin = 127, .end = 1025}), KVM_OK);
    const kvm_seq_id child =
        is_shared ? world.rig.verb(SeqVerb::kFork, seq, KVM_POSITION_END).seq : seq;
    press(&world);
    EXPECT_EQ(n_away(&world, seq), 64u - 16u);
    // It grows beyond what it has shared, and that is worth no more than anything else.
    for (uint64_t n = 0; n < 8; ++n) {
      ASSERT_TRUE(world.run(step_of(world.space, child, 512, 0, n)).status.is_ok());
    }
    press(&world);
    EXPECT_EQ(n_away(&world, child), 64u - 16u + 64u);
    const RequestResult read = world.run(step_of(world.space, child, 0, 1, 5));
    EXPECT_TRUE(read.status.is_ok());
  }
}

TEST(Movement, APriorityEndsWithItsTime) {
  World world(with_lru);
  const kvm_seq_id seq = world.prompt(4096);
  EXPECT_EQ(world.set_priority(seq, {.priority = 90, .end = KVM_POSITION_END, .keep_ns = 1000}),
            KVM_OK);
  const kvm_seq_id child = world.rig.verb(SeqVerb::kFork, seq, KVM_POSITION_END).seq;
  world.clock.advance(999);
  press(&world);
  EXPECT_EQ(n_away(&world, seq), 0u);
  world.clock.advance(1);
  press(&world);
  EXPECT_EQ(n_away(&world, seq), 64u);
  EXPECT_EQ(n_away(&world, child), 64u);
}

// Another's priorities are no turn of those that are used: S3-FIFO remembers what it did.
TEST(Movement, PrioritiesOfOthersTakeNoTurns) {
  const auto n_reads = [](bool has_priorities) {
    World world;
    std::vector<kvm_seq_id> hot;
    for (int i = 0; i < 5; ++i) {
      hot.push_back(world.prompt(4096));
    }
    for (const kvm_seq_id seq : hot) {
      world.decode(seq, 4);
    }
    const kvm_seq_id other = world.prompt(512);
    for (uint32_t i = 0; has_priorities && i < 16; ++i) {
      // Of tokens that it does not have.
      EXPECT_EQ(
          world.set_priority(
              other, {.priority = 3 * i, .begin = 128 * (100 + i), .end = 128 * (100 + i) + 64}),
          KVM_OK);
    }
    for (int i = 0; i < 6; ++i) {
      world.prompt(10000);
    }
    const uint64_t n_before = world.tier.n_reads();
    for (const kvm_seq_id seq : hot) {
      world.decode(seq, 1, 2000);
    }
    return world.tier.n_reads() - n_before;
  };
  EXPECT_EQ(n_reads(true), n_reads(false));
}

// Nothing that is worth more goes in place of what is only just in use, unless an append waits; and
// even then it goes later.
TEST(Movement, WhatIsInUseGoesBeforeWhatIsWorthMore) {
  World world;
  const kvm_seq_id dear = world.prompt(4096);
  EXPECT_EQ(world.set_priority(dear, 100), KVM_OK);
  const kvm_seq_id used = world.create();
  for (uint64_t n = 0; n < 120; ++n) {  // 15 MiB
    ASSERT_TRUE(world.run(step_of(world.space, used, 512, 1, n)).status.is_ok());
    EXPECT_EQ(n_away(&world, dear), 0u) << n;
  }
  EXPECT_GT(n_away(&world, used), 0u);
}

TEST(Movement, AServiceMayHaveAnUpperLimit) {
  World world([](EngineOptions* options) {
    with_lru(options);
    options->movement.max_priority = 50;
  });
  const kvm_seq_id seq = world.prompt(4096);
  EXPECT_EQ(world.set_priority(seq, 100), KVM_OK);
  world.prompt(80000);
  EXPECT_EQ(n_away(&world, seq), 64u);
}

TEST(Movement, PrioritiesThatCannotBe) {
  World world;
  const kvm_seq_id seq = world.prompt(512);
  const auto set = [&](const PriorityRange& range) { return world.set_priority(seq, range); };
  EXPECT_EQ(set({.priority = 101, .end = 1}), KVM_ERR_INVALID);
  EXPECT_EQ(set({.priority = 1, .begin = 5, .end = 5}), KVM_ERR_INVALID);
  EXPECT_EQ(set({.priority = 1, .end = 1, .keep_ns = (uint64_t{1} << 62) + 1}), KVM_ERR_INVALID);
  for (uint32_t i = 0; i < 16; ++i) {
    EXPECT_EQ(set({.priority = i, .begin = 64 * i, .end = 64 * i + 64}), KVM_OK);
  }
  EXPECT_EQ(set({.priority = 60, .begin = 64 * 20, .end = 64 * 20 + 1}), KVM_ERR_LIMIT);
  EXPECT_EQ(set({.priority = 60, .end = 128}), KVM_OK);
  EXPECT_TRUE(world.rig.verb(SeqVerb::kFree, seq).status.is_ok());
  EXPECT_EQ(world.set_priority(seq, 60), KVM_ERR_STALE);
}

// What forks share goes after what they do not.
TEST(Movement, SharedPagesGoLater) {
  World world(with_lru);
  const kvm_seq_id parent = world.prompt(4096);
  const kvm_seq_id child = world.rig.verb(SeqVerb::kFork, parent, 4096).seq;
  world.prompt(45000);
  EXPECT_GT(world.moved().n_pages_sent, 0u);
  EXPECT_EQ(world.info(parent).bytes_away, 0u);
  EXPECT_TRUE(world.rig.verb(SeqVerb::kFree, child).status.is_ok());
  world.prompt(45000);
  EXPECT_GT(world.info(parent).bytes_away, 0u);
}

// --- Coming back --------------------------------------------------------------------------------

TEST(Movement, WhatIsUsedAgainComesBack) {
  World world;
  const kvm_seq_id seq = world.prompt(4096);
  const kvm_seq_id once = world.prompt(4096);
  EXPECT_TRUE(world.rig.engine->send_away(seq).is_ok());
  EXPECT_TRUE(world.rig.engine->send_away(once).is_ok());
  world.settle();
  EXPECT_EQ(world.rig.engine->n_pages_away(), 128u);
  const uint64_t n_writes = world.tier.n_writes();
  world.decode(once, 1);
  world.decode(seq, 1);
  world.settle();
  EXPECT_EQ(world.moved().n_pages_back, 0u) << "it was used once";
  world.decode(seq, 1, 2000);
  world.settle();
  EXPECT_EQ(world.moved().n_pages_back, 64u);
  EXPECT_EQ(world.info(seq).bytes_away, 0u);
  EXPECT_GT(world.info(once).bytes_away, 0u);
  EXPECT_FALSE(world.rig.engine->is_fetching());
  const uint64_t n_reads = world.tier.n_reads();
  world.decode(seq, 3, 3000);
  EXPECT_EQ(world.tier.n_reads(), n_reads) << "it is in memory";
  // The tier has kept what it had.
  EXPECT_TRUE(world.rig.engine->send_away(seq).is_ok());
  world.settle();
  EXPECT_EQ(world.info(seq).bytes_away, 64 * kPageBytes);
  EXPECT_EQ(world.tier.n_writes(), n_writes);
}

// As far as the low mark; a prefetch as far as the high one.
TEST(Movement, WhatComesBackStopsAtTheMarks) {
  World world;
  std::vector<kvm_seq_id> seqs;
  for (int i = 0; i < 8; ++i) {
    seqs.push_back(world.prompt(8192));
    EXPECT_TRUE(world.rig.engine->send_away(seqs.back()).is_ok());
    world.settle();
  }
  const kvm_seq_id other = world.prompt(36000);  // memory is between the marks
  for (const kvm_seq_id seq : seqs) {
    world.decode(seq, 2);
  }
  world.settle();
  EXPECT_GT(world.in_memory(), low_bytes());
  EXPECT_EQ(world.moved().n_pages_back, 0u);
  EXPECT_TRUE(world.rig.verb(SeqVerb::kFree, other).status.is_ok());
  world.settle();
  EXPECT_LE(world.in_memory(), low_bytes());
  EXPECT_GT(world.in_memory(), low_bytes() - 2 * kPageBytes);
  EXPECT_EQ(world.info(seqs.back()).bytes_away, 0u) << "the last one used comes first";
  EXPECT_EQ(world.moved().n_pages_sent, 8u * 128);
  const uint64_t n_back = world.moved().n_pages_back;
  EXPECT_TRUE(world.rig.engine->prefetch(seqs.front()).is_ok());
  EXPECT_TRUE(world.rig.engine->is_fetching());
  world.settle();
  EXPECT_FALSE(world.rig.engine->is_fetching());
  EXPECT_GT(world.moved().n_pages_back, n_back);
  EXPECT_LE(world.in_memory(), high_bytes());
  EXPECT_GT(world.in_memory(), low_bytes());
}

// Reads that fail leave the pages where they are.
TEST(Movement, ReadsThatFail) {
  World world;
  const kvm_seq_id seq = world.prompt(4096);
  EXPECT_TRUE(world.rig.engine->send_away(seq).is_ok());
  world.settle();
  world.tier.fail_next(Transfer::Kind::kRead, 3, {KVM_ERR_IO, "sector 7 is gone"});
  EXPECT_TRUE(world.rig.engine->prefetch(seq).is_ok());
  world.settle();
  EXPECT_EQ(world.info(seq).bytes_away, kPageBytes);
  EXPECT_EQ(world.moved().n_failed, 1u);
  EXPECT_TRUE(world.rig.engine->prefetch(seq).is_ok());
  world.settle();
  EXPECT_EQ(world.info(seq).bytes_away, 0u);
}

// While one batch ends the tier has the next. 36,032 tokens are two batches of 256 pages, and one
// of 51.
TEST(Movement, BatchesComeBackOneBehindAnother) {
  World world;
  const kvm_seq_id seq = world.prompt(36032);
  EXPECT_TRUE(world.rig.engine->send_away(seq).is_ok());
  world.settle();
  const uint64_t n_pages = world.info(seq).bytes_away / kPageBytes;
  EXPECT_EQ(n_pages, 563u);
  EXPECT_TRUE(world.rig.engine->prefetch(seq).is_ok());
  world.turn();
  EXPECT_EQ(world.tier.n_waiting(), 512u);
  // The second is over before the first.
  for (int i = 0; i < 256; ++i) {
    world.tier.finish(256);
  }
  world.turn();
  EXPECT_EQ(world.tier.n_waiting(), 256u);
  EXPECT_EQ(world.moved().n_pages_back, 0u);
  for (int i = 0; i < 256; ++i) {
    world.tier.finish(0);
  }
  world.turn();
  EXPECT_EQ(world.moved().n_pages_back, 512u);
  EXPECT_EQ(world.tier.n_waiting(), 51u);
  EXPECT_TRUE(world.rig.engine->is_fetching());
  world.settle();
  EXPECT_FALSE(world.rig.engine->is_fetching());
  EXPECT_EQ(world.info(seq).bytes_away, 0u);
}

// A read of the first batch fails, or the second: the other one ends as it would, and no third
// begins until it is asked for.
TEST(Movement, AFailureEndsTheBatchesBehindIt) {
  for (const uint64_t n_failing : {uint64_t{3}, uint64_t{300}}) {
    World world;
    const kvm_seq_id seq = world.prompt(36032);
    EXPECT_TRUE(world.rig.engine->send_away(seq).is_ok());
    world.settle();
    world.tier.fail_next(Transfer::Kind::kRead, n_failing, {KVM_ERR_IO, "sector 7 is gone"});
    EXPECT_TRUE(world.rig.engine->prefetch(seq).is_ok());
    world.turn();
    for (int i = 0; i < 256; ++i) {
      world.tier.finish(0);
    }
    world.turn();
    EXPECT_TRUE(world.rig.engine->is_fetching());
    const bool is_first = n_failing < 256;
    EXPECT_EQ(world.tier.n_waiting(), is_first ? 256u : 307u);
    // Asked for meanwhile: behind what is on its way.
    if (is_first) {
      EXPECT_TRUE(world.rig.engine->prefetch(seq).is_ok());
      world.turn();
      EXPECT_EQ(world.tier.n_waiting(), 256u);
      world.settle();
      EXPECT_EQ(world.info(seq).bytes_away, 0u);
      continue;
    }
    world.settle();
    EXPECT_FALSE(world.rig.engine->is_fetching());
    EXPECT_EQ(world.info(seq).bytes_away, kPageBytes);
    EXPECT_TRUE(world.rig.engine->prefetch(seq).is_ok());
    world.settle();
    EXPECT_EQ(world.info(seq).bytes_away, 0u);
  }
}

// The same where the second batch is the last one: what was asked for after the failure is not
// over with it.
TEST(Movement, WhatIsAskedForAfterAFailureBeginsAnew) {
  World world;
  const kvm_seq_id seq = world.prompt(20000);
  EXPECT_TRUE(world.rig.engine->send_away(seq).is_ok());
  world.settle();
  world.tier.fail_next(Transfer::Kind::kRead, 3, {KVM_ERR_IO, "sector 7 is gone"});
  EXPECT_TRUE(world.rig.engine->prefetch(seq).is_ok());
  world.turn();
  for (int i = 0; i < 256; ++i) {
    world.tier.finish(0);
  }
  world.turn();
  EXPECT_TRUE(world.rig.engine->prefetch(seq).is_ok());
  world.turn();
  world.settle();
  EXPECT_FALSE(world.rig.engine->is_fetching());
  EXPECT_EQ(world.info(seq).bytes_away, 0u);
}

// One that found no room for some of its pages, and of which others leave then.
TEST(Movement, WhatFoundNoRoomBeginsAnew) {
  for (const bool is_automatic : {false, true}) {
    World world([&](EngineOptions* options) { options->movement.is_automatic = is_automatic; });
    const kvm_seq_id seq = world.prompt(20000);
    EXPECT_TRUE(world.rig.engine->send_away(seq).is_ok());
    world.settle();
    const kvm_seq_id other = world.prompt(is_automatic ? 24000 : 26000);
    if (is_automatic) {
      world.decode(seq, 4);
    } else {
      EXPECT_TRUE(world.rig.engine->prefetch(seq).is_ok());
    }
    world.settle();
    const uint64_t n_away = world.info(seq).bytes_away / kPageBytes;
    EXPECT_GT(n_away, 0u);
    EXPECT_LT(n_away, 312u);
    EXPECT_TRUE(world.rig.engine->send_away(seq).is_ok());
    world.settle();
    EXPECT_TRUE(world.rig.verb(SeqVerb::kFree, other).status.is_ok());
    world.settle();
    if (is_automatic) {
      world.decode(seq, 4);
    } else {
      EXPECT_TRUE(world.rig.engine->prefetch(seq).is_ok());
    }
    world.settle();
    EXPECT_EQ(world.info(seq).bytes_away, 0u) << is_automatic;
  }
}

// Pages that are sent while others of the sequence come back, or for another sequence that has
// them, come back as well when they are used.
TEST(Movement, WhatIsSentWhileItComesBackReturns) {
  World world;
  const kvm_seq_id seq = world.prompt(30000);
  EXPECT_TRUE(world.rig.engine->send_away(seq).is_ok());
  world.settle();
  EXPECT_TRUE(world.rig.engine->prefetch(seq).is_ok());
  world.turn();
  for (int i = 0; i < 256; ++i) {
    world.tier.finish(0);
  }
  world.turn();
  EXPECT_TRUE(world.rig.engine->send_away(seq).is_ok());
  world.settle();
  EXPECT_GT(world.info(seq).bytes_away, 0u);
  world.decode(seq, 4);
  world.settle();
  EXPECT_EQ(world.info(seq).bytes_away, 0u);
  const kvm_seq_id fork = world.rig.verb(SeqVerb::kFork, seq, 30000).seq;
  EXPECT_TRUE(world.rig.engine->send_away(fork).is_ok());
  world.settle();
  EXPECT_GT(world.info(seq).bytes_away, 0u);
  world.decode(seq, 4);
  world.settle();
  EXPECT_EQ(world.info(seq).bytes_away, 0u);
}

// One that is asked for while another comes back by itself, two batches of it on their way.
TEST(Movement, WhatIsAskedForComesBeforeTheRest) {
  World world;
  const kvm_seq_id asked = world.prompt(1024);
  const kvm_seq_id used = world.prompt(33000);
  EXPECT_TRUE(world.rig.engine->send_away(asked).is_ok());
  EXPECT_TRUE(world.rig.engine->send_away(used).is_ok());
  world.settle();
  // The answers come of the ring; then two batches come back.
  std::vector<size_t> answers;
  for (int i = 0; i < 2; ++i) {
    answers.push_back(world.submit(step_of(world.space, used, 1, 1, 7 + i)));
    for (int n = 0; n < 1000 && world.n_answers[answers.back()] == 0; ++n) {
      world.tier.finish(0);
      world.turn();
    }
    ASSERT_EQ(world.n_answers[answers.back()], 1);
  }
  world.turn();
  const uint64_t n_begun = world.tier.n_waiting();
  EXPECT_EQ(n_begun, 512u - world.moved().n_pages_back);
  EXPECT_TRUE(world.rig.engine->prefetch(asked).is_ok());
  world.turn();
  EXPECT_EQ(world.tier.n_waiting(), n_begun) << "a sequence at a time";
  for (uint64_t i = 0; i < n_begun; ++i) {
    world.tier.finish(0);
  }
  world.turn();
  EXPECT_EQ(world.tier.n_waiting(), 16u) << "those of the one that was asked for";
  world.tier.finish_all();
  world.settle();
  EXPECT_EQ(world.info(asked).bytes_away, 0u);
  EXPECT_EQ(world.info(used).bytes_away, 0u);
}

// Sequences that are freed, cut and appended to while their pages come back.
TEST(Movement, WhatGoesWhileItComesBack) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    World world;
    const kvm_seq_id seq = world.prompt(4096 + 32);
    EXPECT_TRUE(world.rig.engine->send_away(seq).is_ok());
    world.settle();
    EXPECT_TRUE(world.rig.engine->prefetch(seq).is_ok());
    world.turn();
    EXPECT_EQ(world.tier.n_waiting(), 64u);
    std::mt19937_64 random(seed);
    for (uint64_t i = 0; i < 5 * seed; ++i) {
      world.tier.finish(random() % world.tier.n_waiting());
    }
    if (seed % 3 == 0) {
      EXPECT_TRUE(world.rig.verb(SeqVerb::kFree, seq).status.is_ok());
    } else {
      if (seed % 3 == 1) {
        EXPECT_TRUE(world.rig.verb(SeqVerb::kTruncate, seq, 1000).status.is_ok());
      }
      const size_t at = world.submit(step_of(world.space, seq, 100, 1, 7));
      world.settle(seed);
      EXPECT_TRUE(world.results[at].status.is_ok()) << world.results[at].status.message();
    }
    world.settle(seed);
    EXPECT_TRUE(seed % 3 != 0 || world.tier.used_bytes() == 0);
  }
}

// --- The cap, and what is refused ---------------------------------------------------------------

// A second of the clock moves what the cap says and not more, in either direction.
TEST(Movement, TheCapHolds) {
  constexpr uint64_t kCap = 64 * kPageBytes;
  World world([](EngineOptions* options) { options->movement.bytes_per_s = kCap; });
  const kvm_seq_id seq = world.prompt(20000);
  EXPECT_TRUE(world.rig.engine->send_away(seq).is_ok());
  const auto elapse = [&](int n_ms) {
    for (int i = 0; i < n_ms; ++i) {
      world.settle();
      world.clock.advance(1'000'000);
    }
    world.settle();
  };
  elapse(1000);
  EXPECT_GE(world.moved().bytes_sent, kCap / 2);
  EXPECT_LE(world.moved().bytes_sent, kCap + kCap / 10);
  elapse(4500);
  EXPECT_FALSE(world.rig.engine->is_sending());
  EXPECT_TRUE(world.rig.engine->prefetch(seq).is_ok());
  elapse(1000);
  EXPECT_GE(world.moved().bytes_back, kCap / 2);
  EXPECT_LE(world.moved().bytes_back, kCap + kCap / 10);
}

// It is for what has time. An append that waits gets its room while the clock stands still.
TEST(Movement, TheCapDoesNotHoldUpAppends) {
  World world([](EngineOptions* options) { options->movement.bytes_per_s = 20 * kPageBytes; });
  const size_t waiting = world.fill_up();
  world.settle();
  EXPECT_EQ(world.n_answers[waiting], 1);
  EXPECT_TRUE(world.results[waiting].status.is_ok()) << world.results[waiting].status.message();
}

// A tier that refuses is asked again after a while, though nothing else happens.
TEST(Movement, ATierThatRefusedIsAskedAgain) {
  const auto fill = [](World* world) {
    world->tier.fail_every(Transfer::Kind::kWrite, 1, {KVM_ERR_IO, "sector 7 is gone"});
    while (world->in_memory() <= high_bytes()) {
      world->prompt(512);
    }
    world->settle();
    EXPECT_EQ(world->moved().n_pages_sent, 0u);
    EXPECT_GT(world->moved().n_failed, 0u);
  };
  World real([](EngineOptions* options) { options->clock = system_clock(); });
  fill(&real);
  EXPECT_LE(real.rig.engine->housekeep(), 100'000'000u) << "the driver sleeps no longer";
  World world;
  fill(&world);
  world.tier.clear_faults();
  world.settle();
  EXPECT_EQ(world.moved().n_pages_sent, 0u);
  world.clock.advance(100'000'000);
  world.settle();
  EXPECT_GT(world.moved().n_pages_sent, 0u);
  EXPECT_LE(world.in_memory(), low_bytes());
}

// A reason belongs to the search that came to nothing, and to no later one.
TEST(Movement, AnOldRefusalIsNoReason) {
  World world;
  const kvm_seq_id other = world.prompt(2048);
  world.tier.fail_every(Transfer::Kind::kWrite, 1, {KVM_ERR_IO, "sector 7 is gone"});
  EXPECT_TRUE(world.rig.engine->send_away(other).is_ok());
  world.settle();
  EXPECT_GT(world.moved().n_failed, 0u);
  world.tier.clear_faults();
  const kvm_seq_id seq = world.create();
  const RequestResult result = world.run(step_of(world.space, seq, 60000, 0, 1));
  EXPECT_EQ(result.status.code(), KVM_ERR_NO_SPACE);
  EXPECT_EQ(result.status.message().find("sector 7"), std::string::npos) << result.status.message();
}

TEST(Movement, OptionsAreChecked) {
  for (const auto& [low, high] : {std::pair{0.0, 0.5}, {0.9, 0.8}, {0.8, 0.8}, {0.5, 1.1}}) {
    EngineOptions options = Rig::make_options(1, kCapacity);
    options.movement.low = low;
    options.movement.high = high;
    EXPECT_EQ(Engine::open(options).status().code(), KVM_ERR_INVALID) << low << ", " << high;
  }
  for (const uint32_t max_priority : {49u, 101u}) {
    EngineOptions options = Rig::make_options(1, kCapacity);
    options.movement.max_priority = max_priority;
    EXPECT_EQ(Engine::open(options).status().code(), KVM_ERR_INVALID) << max_priority;
  }
}

TEST(Movement, WithoutATierNothingMoves) {
  Rig rig;
  const kvm_seq_id seq = rig.create(rig.space(plain_spec()));
  EXPECT_EQ(rig.engine->prefetch(seq).code(), KVM_ERR_UNSUPPORTED);
  const SeqRequest priority{.verb = SeqVerb::kSetPriority, .seq = seq, .range = {.end = 1}};
  EXPECT_EQ(rig.run(priority).status.code(), KVM_ERR_UNSUPPORTED);
}

}  // namespace
}  // namespace kvm::engine::testing
