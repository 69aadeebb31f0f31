// SPDX-License-Identifier: Apache-2.0
// Sequences that were saved, and loaded again, answer as a fork does that stayed, bit for bit; and
// whatever comes between, nothing is lost, nothing stays behind, and nobody else sees it.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/limits.h"
#include "engine/engine.h"
#include "tests/unit/engine/rig.h"
#include "tiers/simulated/simulated_tier.h"

namespace kvm::engine::testing {
namespace {

using tiers::ObjectRequest;
using tiers::SimulatedTier;
using tiers::SimulatedTierOptions;
using tiers::Transfer;

constexpr uint32_t kHeads = 2;
constexpr uint32_t kGroup = 2;
constexpr uint32_t kDim = 16;
constexpr uint32_t kOwnLayers = 2;

EngineOptions with_tier(tiers::SlowTier* tier, uint32_t n_threads = 1,
                        uint64_t capacity_bytes = 256 << 20) {
  EngineOptions options = Rig::make_options(n_threads, capacity_bytes);
  options.slow_tier = tier;
  options.default_quota_bytes = 4 * capacity_bytes;
  options.movement.is_automatic = false;
  return options;
}

ClientSpec of_user(uint32_t uid) {
  ClientSpec spec;
  spec.uid = uid;
  return spec;
}

// A space, and what its requests look like.
struct Kind {
  std::string name;
  SpaceSpec spec;
  uint32_t flags = 0;
  uint64_t cut = 0;  // tokens that are taken away again
  bool v_in_k = false;
};

SpaceSpec plain_spec(const std::string& name = "plain", uint32_t n_layers = kOwnLayers) {
  SpaceSpec spec = make_spec(name, n_layers, kHeads * kGroup, kHeads, kDim);
  spec.params.codec = KVM_CODEC_F32;
  return spec;
}

kvm_policy_params policy(uint32_t retention, uint64_t head_mask) {
  return {.kv_head_mask = {head_mask, 0},
          .retention = retention,
          .n_sinks = 4,
          .n_recent = 200,
          .n_heavy = retention == KVM_RETAIN_HEAVY ? 60u : 0u};
}

std::vector<Kind> kinds() {
  std::vector<Kind> all;
  all.push_back({"plain", plain_spec("plain")});
  all.push_back({"cut", plain_spec("cut"), 0, 130});
  all.push_back({"uncommitted", plain_spec("uncommitted"), KVM_SEQ_MANUAL_COMMIT});
  Kind window = {"window", plain_spec("window")};
  window.spec.policies = {policy(KVM_RETAIN_SINKS_RECENT, 1)};
  all.push_back(window);
  Kind fold = {"fold", plain_spec("fold")};
  fold.spec.policies = {policy(KVM_RETAIN_SINKS_RECENT_FOLD, 1)};
  all.push_back(fold);
  for (const uint32_t merge : {KVM_MERGE_NONE, KVM_MERGE_COUNTED}) {
    for (const uint32_t budgets : {KVM_BUDGETS_EQUAL, KVM_BUDGETS_BY_DENSITY}) {
      Kind heavy = {"heavy" + std::to_string(merge) + std::to_string(budgets), plain_spec()};
      heavy.spec.policies = {policy(KVM_RETAIN_HEAVY, 2)};
      heavy.spec.policies[0].merge = merge;
      heavy.spec.policies[0].budgets = budgets;
      all.push_back(heavy);
    }
  }
  Kind settles = {"settles", plain_spec("settles")};
  settles.spec.params.codec = KVM_CODEC_I8_CHANNEL;
  all.push_back(settles);
  settles.name = "settles_by_hand";
  settles.flags = KVM_SEQ_MANUAL_COMMIT;
  all.push_back(settles);
  Kind inside = {"inside", plain_spec("inside"), 0, 0, true};
  inside.spec.params.flags = KVM_SPACE_V_IN_K;
  inside.spec.params.head_dim_v = 8;
  all.push_back(inside);
  Kind aliased = {"aliased", plain_spec("aliased", kOwnLayers + 1)};
  aliased.spec.layers = {
      {.layer_begin = kOwnLayers, .n_layers = 1, .kind = KVM_LAYER_ALIAS, .target = 0}};
  all.push_back(aliased);
  Kind indexed = {"indexed", plain_spec("indexed")};
  indexed.spec.indexes = {make_index()};
  all.push_back(indexed);
  return all;
}

class World {
 public:
  explicit World(Kind of, const SimulatedTierOptions& options = {}, uint32_t n_threads = 1)
      : kind(std::move(of)), tier(options), rig(std::in_place, with_tier(&tier, n_threads)) {
    space = rig->space(kind.spec);
  }
  ~World() {
    if (rig) {
      rig->engine->check_accounts();
    }
  }
  // Another engine over the same tier.
  void restart(uint32_t n_threads = 1) {
    rig->engine->check_accounts();
    rig.reset();
    rig.emplace(with_tier(&tier, n_threads));
    space = rig->space(kind.spec);
  }

  RequestResult try_append(kvm_seq_id seq, uint32_t n, uint64_t seed) {
    std::mt19937_64 random(seed);
    Buffer k(Dtype::kF32, kOwnLayers, n, kHeads, kDim);
    Buffer v(Dtype::kF32, kOwnLayers, n, kHeads, kDim);
    fill(&k, kOwnLayers, n, kHeads, random);
    fill(&v, kOwnLayers, n, kHeads, random);
    StepRequest step;
    step.append = true;
    step.space = space;
    step.n_layers = kOwnLayers;
    step.items = {append_item(seq, n)};
    step.k = k.view();
    step.v = kind.v_in_k ? TensorView{} : v.view();
    return rig->run(std::move(step));
  }
  void append(kvm_seq_id seq, uint32_t n, uint64_t seed) {
    const RequestResult result = try_append(seq, n, seed);
    EXPECT_TRUE(result.status.is_ok()) << result.status.message();
  }
  // What all layers answer to queries at the end.
  std::vector<std::byte> attend(kvm_seq_id seq, uint64_t seed, uint32_t mode = KVM_MODE_EXACT,
                                uint32_t n_query = 3) {
    std::vector<std::byte> all;
    const uint32_t n_q = kHeads * kGroup;
    const uint32_t dim_v = kind.spec.params.head_dim_v != 0 ? kind.spec.params.head_dim_v : kDim;
    for (uint32_t layer = 0; layer < kind.spec.params.n_layers; ++layer) {
      std::mt19937_64 random(seed + layer);
      Buffer q(Dtype::kF32, 1, n_query, n_q, kDim);
      Buffer o(Dtype::kF32, 1, n_query, n_q, dim_v);
      Buffer lse(Dtype::kF32, 1, n_query, n_q, 1);
      fill(&q, 1, n_query, n_q, random, 2.0f);
      StepRequest step;
      step.attend = true;
      step.space = space;
      step.layer_begin = layer;
      step.items = {query_item(seq, n_query)};
      step.mode = mode;
      step.budget = mode == KVM_MODE_EXACT ? 0 : 300;
      step.seed = seed;
      step.q = q.view();
      step.o = o.view();
      step.lse = lse.view();
      const RequestResult result = run_attend(std::move(step));
      EXPECT_TRUE(result.status.is_ok()) << result.status.message();
      all.insert(all.end(), o.bytes().begin(), o.bytes().end());
      all.insert(all.end(), lse.bytes().begin(), lse.bytes().end());
    }
    return all;
  }
  // Reads end by themselves, or here.
  RequestResult run_attend(StepRequest&& step) {
    bool done = false;
    RequestResult result;
    rig->engine->submit(rig->client, {4, 4}, std::move(step), [&](RequestResult&& r) {
      result = std::move(r);
      done = true;
    });
    EXPECT_TRUE(rig->drive_until([&] {
      if (finishes_reads) {
        tier.finish_all();
      }
      return done;
    }));
    return result;
  }
  // A sequence of a few pages with a history.
  kvm_seq_id make() {
    const kvm_seq_id seq = rig->create(space, kind.flags);
    append(seq, 900, 1);
    attend(seq, 2);
    for (uint32_t i = 0; i < 4; ++i) {
      append(seq, i == 0 ? 1 : 60, 3 + i);
      attend(seq, 10 + i);
    }
    if ((kind.flags & KVM_SEQ_MANUAL_COMMIT) != 0) {
      EXPECT_TRUE(rig->verb(SeqVerb::kCommit, seq, 700).status.is_ok());
    }
    if (kind.cut != 0) {
      EXPECT_TRUE(rig->verb(SeqVerb::kTruncate, seq, rig->length(seq) - kind.cut).status.is_ok());
    }
    return seq;
  }

  SnapshotRequest saving(kvm_seq_id seq, const std::string& name, uint32_t flags = 0) const {
    return {.verb = SnapshotVerb::kSave, .flags = flags, .seq = seq, .name = name};
  }
  SnapshotRequest loading(const std::string& name) const {
    return {.verb = SnapshotVerb::kLoad, .space = space, .name = name};
  }
  RequestResult save(kvm_seq_id seq, const std::string& name, uint32_t flags = 0, ClientId as = 0) {
    return rig->run(saving(seq, name, flags), as);
  }
  RequestResult load(const std::string& name, ClientId as = 0) {
    return rig->run(loading(name), as);
  }
  kvm_seq_id loaded(const std::string& name) {
    const RequestResult result = load(name);
    EXPECT_TRUE(result.status.is_ok()) << result.status.message();
    return result.seq;
  }
  RequestResult remove(const std::string& name, ClientId as = 0) {
    return rig->run(SnapshotRequest{.verb = SnapshotVerb::kRemove, .name = name}, as);
  }
  void prefetch(kvm_seq_id seq) {
    EXPECT_TRUE(rig->engine->prefetch(seq).is_ok());
    EXPECT_TRUE(rig->drive_until([&] { return !rig->engine->is_fetching(); }));
  }
  void free(kvm_seq_id seq) { EXPECT_TRUE(rig->verb(SeqVerb::kFree, seq).status.is_ok()); }
  uint64_t snapshot_bytes(uint32_t uid = 0) {
    for (const TenantUsage& usage : rig->engine->quotas().tenants()) {
      if (usage.uid == uid) {
        return usage.used[Resource::kSnapshotBytes];
      }
    }
    return 0;
  }
  std::vector<std::string> names(uint32_t uid = 0, const SnapshotName& after = {},
                                 size_t n_max = 100) {
    std::vector<std::string> all;
    for (const SnapshotInfo& info : rig->engine->list_snapshots(uid, after, n_max)) {
      all.push_back(info.name.name);
    }
    return all;
  }

  Kind kind;
  SimulatedTier tier;
  std::optional<Rig> rig;
  kvm_space_id space = 0;
  bool finishes_reads = false;
};

using Names = std::vector<std::string>;

TEST(Snapshot, ALoadedSequenceAnswersAsAForkThatStayed) {
  for (const Kind& kind : kinds()) {
    for (const uint32_t n_threads : {1u, 3u}) {
      SCOPED_TRACE(kind.name + ", threads: " + std::to_string(n_threads));
      World world(kind, {.reorder = 16, .seed = 3}, n_threads);
      Rig& rig = *world.rig;
      const kvm_seq_id seq = world.make();
      const kvm_seq_id fork = rig.verb(SeqVerb::kFork, seq, KVM_POSITION_END).seq;
      const RequestResult saved = world.save(seq, "a/conversation");
      ASSERT_TRUE(saved.status.is_ok()) << saved.status.message();
      rig.engine->check_accounts();
      world.free(seq);
      const kvm_seq_id loaded = world.loaded("a/conversation");
      rig.engine->check_accounts();
      const kvm_seq_info a = rig.engine->seq_info(rig.client, fork).value();
      const kvm_seq_info b = rig.engine->seq_info(rig.client, loaded).value();
      EXPECT_EQ(a.n_tokens_min, b.n_tokens_min);
      EXPECT_EQ(a.n_tokens_max, b.n_tokens_max);
      EXPECT_EQ(a.n_committed, b.n_committed);
      EXPECT_EQ(a.n_entries_dropped, b.n_entries_dropped);
      EXPECT_EQ(a.bytes, b.bytes);
      EXPECT_EQ(a.flags, b.flags);
      EXPECT_TRUE(world.attend(fork, 50) == world.attend(loaded, 50)) << "while pages are away";
      world.prefetch(loaded);
      EXPECT_TRUE(world.attend(fork, 51) == world.attend(loaded, 51));
      if (!kind.spec.indexes.empty()) {
        EXPECT_TRUE(world.attend(fork, 52, KVM_MODE_TOPK) ==
                    world.attend(loaded, 52, KVM_MODE_TOPK));
        EXPECT_TRUE(world.attend(fork, 53, KVM_MODE_SAMPLED) ==
                    world.attend(loaded, 53, KVM_MODE_SAMPLED));
      }
      // Both go on.
      for (uint32_t i = 0; i < 4; ++i) {
        world.append(fork, 70, 60 + i);
        world.append(loaded, 70, 60 + i);
        EXPECT_TRUE(world.attend(fork, 70 + i) == world.attend(loaded, 70 + i)) << i;
      }
      if ((kind.flags & KVM_SEQ_MANUAL_COMMIT) != 0) {
        for (const kvm_seq_id one : {fork, loaded}) {
          EXPECT_TRUE(rig.verb(SeqVerb::kCommit, one, KVM_POSITION_END).status.is_ok());
        }
        EXPECT_TRUE(world.attend(fork, 80) == world.attend(loaded, 80));
      }
      // And a fork of what was loaded is saved again.
      const kvm_seq_id child = rig.verb(SeqVerb::kFork, loaded, KVM_POSITION_END).seq;
      EXPECT_TRUE(world.save(child, "again").status.is_ok());
      world.free(loaded);
      world.free(child);
      const kvm_seq_id again = world.loaded("again");
      EXPECT_TRUE(world.attend(fork, 81) == world.attend(again, 81));
    }
  }
}

TEST(Snapshot, AnotherServiceFindsIt) {
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    World world(kind);
    kvm_seq_id seq = world.make();
    ASSERT_TRUE(world.save(seq, "it").status.is_ok());
    const uint64_t charged = world.snapshot_bytes();
    EXPECT_GT(charged, 0u);
    const std::vector<std::byte> before = world.attend(seq, 50);
    world.restart();
    EXPECT_EQ(world.snapshot_bytes(), charged);
    EXPECT_EQ(world.names(), Names{"it"});
    seq = world.loaded("it");
    EXPECT_TRUE(world.attend(seq, 50) == before);
    EXPECT_TRUE(world.remove("it").status.is_ok());
    EXPECT_EQ(world.snapshot_bytes(), 0u);
    EXPECT_TRUE(world.attend(seq, 50, KVM_MODE_EXACT, 2).size() > 0) << "what was loaded stays";
    world.free(seq);
    EXPECT_EQ(world.tier.used_bytes(), 0u);
  }
}

// The sequence goes on while it is saved, and what is saved is what it was.
TEST(Snapshot, WhatIsSavedIsWhatWasThereWhenTheRequestBegan) {
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    World world(kind, {.is_manual = true});
    Rig& rig = *world.rig;
    const kvm_seq_id seq = world.make();
    const kvm_seq_id fork = rig.verb(SeqVerb::kFork, seq, KVM_POSITION_END).seq;
    bool is_done = false;
    Status status;
    rig.engine->submit(rig.client, {9, 9}, world.saving(seq, "it"), [&](RequestResult&& result) {
      status = result.status;
      is_done = true;
    });
    // None of the writes has ended yet.
    world.append(seq, 300, 90);
    world.attend(seq, 91);
    rig.engine->check_accounts();
    EXPECT_FALSE(is_done);
    EXPECT_TRUE(rig.verb(SeqVerb::kTruncate, seq, 1000).status.is_ok() ||
                !kind.spec.policies.empty());
    while (!is_done) {
      world.tier.finish_all();
      rig.drive_until([&] {
        return is_done || world.tier.n_waiting() != 0 || world.tier.n_objects_waiting() != 0;
      });
    }
    ASSERT_TRUE(status.is_ok()) << status.message();
    rig.engine->check_accounts();
    world.free(seq);
    bool is_loaded = false;
    kvm_seq_id loaded = 0;
    rig.engine->submit(rig.client, {9, 10}, world.loading("it"), [&](RequestResult&& result) {
      EXPECT_TRUE(result.status.is_ok()) << result.status.message();
      loaded = result.seq;
      is_loaded = true;
    });
    world.finishes_reads = true;
    EXPECT_TRUE(rig.drive_until([&] {
      world.tier.finish_all();
      return is_loaded;
    }));
    ASSERT_TRUE(rig.engine->prefetch(loaded).is_ok());
    EXPECT_TRUE(rig.drive_until([&] {
      world.tier.finish_all();
      return !rig.engine->is_fetching();
    }));
    EXPECT_TRUE(world.attend(fork, 92) == world.attend(loaded, 92));
  }
}

TEST(Snapshot, ASecondSaveWritesWhatIsNew) {
  World world(kinds()[0]);
  Rig& rig = *world.rig;
  const kvm_seq_id seq = rig.create(world.space);
  world.append(seq, 640, 1);
  ASSERT_TRUE(world.save(seq, "it").status.is_ok());
  EXPECT_EQ(world.tier.n_writes(), kOwnLayers * 10u);
  ASSERT_TRUE(world.save(seq, "the_same").status.is_ok());
  EXPECT_EQ(world.tier.n_writes(), kOwnLayers * 10u) << "all pages are there";
  world.append(seq, 100, 2);
  ASSERT_TRUE(world.save(seq, "it", kSaveReplace).status.is_ok());
  EXPECT_EQ(world.tier.n_writes(), kOwnLayers * 12u);
  // And what has left memory is not written either.
  world.append(seq, 28, 3);
  ASSERT_TRUE(rig.engine->send_away(seq).is_ok());
  EXPECT_TRUE(rig.drive_until([&] { return !rig.engine->is_sending(); }));
  EXPECT_EQ(rig.engine->n_pages_away(), kOwnLayers * 12u);
  const uint64_t n_writes = world.tier.n_writes();
  ASSERT_TRUE(world.save(seq, "away").status.is_ok());
  EXPECT_EQ(world.tier.n_writes(), n_writes);
  EXPECT_EQ(world.tier.n_reads(), 0u);
  world.free(seq);
  for (const char* name : {"it", "the_same", "away"}) {
    EXPECT_TRUE(world.remove(name).status.is_ok());
  }
  EXPECT_EQ(world.tier.used_bytes(), 0u);
}

TEST(Snapshot, ALoadReadsNoFullPages) {
  World world(kinds()[0]);
  Rig& rig = *world.rig;
  const kvm_seq_id seq = rig.create(world.space);
  world.append(seq, 20000, 1);
  ASSERT_TRUE(world.save(seq, "it").status.is_ok());
  const auto before = world.attend(seq, 5);
  world.free(seq);
  const kvm_seq_id loaded = world.loaded("it");
  EXPECT_EQ(world.tier.n_reads(), kOwnLayers * 1u) << "the last pages, which are not full";
  const kvm_seq_info info = rig.engine->seq_info(rig.client, loaded).value();
  EXPECT_EQ(rig.engine->n_pages_away(), info.n_pages - kOwnLayers);
  EXPECT_EQ(rig.engine->stats().host_page_bytes, info.bytes - info.bytes_away);
  EXPECT_TRUE(world.attend(loaded, 5) == before);
  EXPECT_EQ(rig.engine->n_pages_away(), info.n_pages - kOwnLayers) << "attention has streamed them";
  world.prefetch(loaded);
  EXPECT_EQ(rig.engine->n_pages_away(), 0u);
  EXPECT_TRUE(world.attend(loaded, 5) == before);
}

TEST(Snapshot, NamesAreAUsersOwn) {
  World world(kinds()[0]);
  Rig& rig = *world.rig;
  const ClientId other = rig.engine->add_client(of_user(7));
  const kvm_seq_id seq = world.make();
  ASSERT_TRUE(world.save(seq, "mine").status.is_ok());
  EXPECT_EQ(world.save(seq, "theirs", 0, other).status.code(), KVM_ERR_PERMISSION);
  EXPECT_EQ(world.load("mine", other).status.code(), KVM_ERR_NOT_FOUND);
  EXPECT_EQ(world.remove("mine", other).status.code(), KVM_ERR_NOT_FOUND);
  EXPECT_EQ(world.names(7), Names{});
  EXPECT_EQ(world.names(0), Names{"mine"});
  // The same name is another one's, too, and another client of the user sees it.
  const kvm_seq_id their_seq =
      rig.run(SeqRequest{.verb = SeqVerb::kCreate, .space = world.space}, other).seq;
  ASSERT_TRUE(world.save(their_seq, "mine", 0, other).status.is_ok());
  EXPECT_EQ(world.names(7), Names{"mine"});
  EXPECT_EQ(world.names(kEverybody), (Names{"mine", "mine"}));
  const ClientId second = rig.engine->add_client(of_user(0));
  EXPECT_TRUE(world.load("mine", second).status.is_ok());
  EXPECT_TRUE(world.remove("mine", second).status.is_ok());
  EXPECT_EQ(world.load("mine").status.code(), KVM_ERR_NOT_FOUND);
  EXPECT_TRUE(world.load("mine", other).status.is_ok());
}

TEST(Snapshot, ListsSayWhatWasSaved) {
  World world(kinds()[0]);
  const kvm_seq_id seq = world.make();
  for (const char* name : {"b", "a", "a/1", "c"}) {
    ASSERT_TRUE(world.save(seq, name).status.is_ok());
  }
  EXPECT_EQ(world.names(), (Names{"a", "a/1", "b", "c"}));
  EXPECT_EQ(world.names(0, {0, "a"}, 2), (Names{"a/1", "b"}));
  EXPECT_EQ(world.names(0, {0, "c"}), Names{});
  const SnapshotInfo info = world.rig->engine->list_snapshots(0, {}, 1).at(0);
  EXPECT_EQ(info.name.uid, 0u);
  EXPECT_EQ(info.space_name, "plain");
  EXPECT_EQ(info.n_tokens, world.rig->length(seq));
  EXPECT_GT(info.saved_ns, uint64_t{1'600'000'000} * 1'000'000'000);
  EXPECT_EQ(world.snapshot_bytes(), 4 * info.bytes);
}

TEST(Snapshot, ANameIsTakenUnlessItMayBeReplaced) {
  World world(kinds()[0]);
  const kvm_seq_id seq = world.make();
  ASSERT_TRUE(world.save(seq, "it").status.is_ok());
  const uint64_t charged = world.snapshot_bytes();
  EXPECT_EQ(world.save(seq, "it").status.code(), KVM_ERR_EXISTS);
  EXPECT_EQ(world.snapshot_bytes(), charged);
  EXPECT_TRUE(world.save(seq, "it", kSaveReplace).status.is_ok());
  EXPECT_EQ(world.snapshot_bytes(), charged);
  for (const char* name : {"", "a b", "\xc3\xa4", "a:b"}) {
    EXPECT_EQ(world.save(seq, name).status.code(), KVM_ERR_INVALID) << name;
  }
  EXPECT_EQ(world.save(seq, std::string(kMaxSnapshotNameBytes + 1, 'a')).status.code(),
            KVM_ERR_INVALID);
  EXPECT_TRUE(world.save(seq, std::string(kMaxSnapshotNameBytes, 'a')).status.is_ok());
  EXPECT_EQ(world.save(seq, "it", 2).status.code(), KVM_ERR_INVALID);
  EXPECT_EQ(world.load("nothing").status.code(), KVM_ERR_NOT_FOUND);
}

TEST(Snapshot, WithoutATierThatKeepsObjectsThereAreNone) {
  Rig rig;
  const kvm_space_id space = rig.space(plain_spec());
  const RequestResult result =
      rig.run(SnapshotRequest{.verb = SnapshotVerb::kSave, .seq = rig.create(space), .name = "it"});
  EXPECT_EQ(result.status.code(), KVM_ERR_UNSUPPORTED);
  EXPECT_TRUE(rig.engine->list_snapshots(kEverybody, {}, 9).empty());
}

TEST(Snapshot, QuotasHold) {
  World world(kinds()[0]);
  Rig& rig = *world.rig;
  const kvm_seq_id seq = world.make();
  ASSERT_TRUE(world.save(seq, "first").status.is_ok());
  const uint64_t one = world.snapshot_bytes();
  LimitChanges limits;
  limits[Resource::kSnapshotBytes] = one + one / 2;
  rig.engine->quotas().set_tenant_limits(0, limits);
  EXPECT_EQ(world.save(seq, "second").status.code(), KVM_ERR_QUOTA);
  EXPECT_EQ(world.snapshot_bytes(), one);
  EXPECT_EQ(world.names(), Names{"first"});
  rig.engine->check_accounts();
  EXPECT_TRUE(world.remove("first").status.is_ok());
  EXPECT_TRUE(world.save(seq, "second").status.is_ok());
  // A load is charged to the client.
  const uint64_t bytes = rig.engine->seq_info(rig.client, seq).value().bytes;
  ClientSpec small;
  small.limits[Resource::kBytes] = bytes - 1;
  const ClientId poor = rig.engine->add_client(small);
  EXPECT_EQ(world.load("second", poor).status.code(), KVM_ERR_QUOTA);
  rig.engine->check_accounts();
  ClientSpec few;
  few.limits[Resource::kSequences] = 1;
  const ClientId alone = rig.engine->add_client(few);
  const RequestResult first = world.load("second", alone);
  EXPECT_TRUE(first.status.is_ok());
  EXPECT_EQ(world.load("second", alone).status.code(), KVM_ERR_QUOTA);
  for (const ClientUsage& usage : rig.engine->quotas().clients()) {
    if (usage.client == alone) {
      EXPECT_EQ(usage.used[Resource::kBytes], bytes);
      EXPECT_EQ(usage.used[Resource::kSequences], 1u);
    }
  }
}

TEST(Snapshot, PagesOfPairsAreNotSaved) {
  Kind paired = {"paired", plain_spec("paired")};
  paired.spec.layers = {{.layer_begin = 1, .n_layers = 1, .kind = KVM_LAYER_PAIR}};
  World world(paired);
  const kvm_seq_id seq = world.make();
  const Status status = world.save(seq, "it").status;
  EXPECT_EQ(status.code(), KVM_ERR_UNSUPPORTED);
  EXPECT_NE(status.message().find("KVM_LAYER_PAIR"), std::string::npos) << status.message();
  EXPECT_EQ(world.load("it").status.code(), KVM_ERR_NOT_FOUND);
}

TEST(Snapshot, ASpaceThatDiffersIsRefused) {
  World world(kinds()[0]);
  const kvm_seq_id seq = world.make();
  ASSERT_TRUE(world.save(seq, "it").status.is_ok());
  SpaceSpec other = plain_spec("other");
  other.params.codec = KVM_CODEC_BF16;
  SnapshotRequest load = world.loading("it");
  load.space = world.rig->space(other);
  const RequestResult result = world.rig->run(load);
  EXPECT_EQ(result.status.code(), KVM_ERR_INVALID);
  EXPECT_NE(result.status.message().find("layout"), std::string::npos);
  world.rig->engine->check_accounts();
}

// --- Faults --------------------------------------------------------------------------------------

TEST(Snapshot, AFaultFailsThatSaveAlone) {
  World world(kinds()[0]);
  Rig& rig = *world.rig;
  const kvm_seq_id seq = world.make();
  for (uint64_t n = 1; n <= 34; n += 3) {
    world.tier.fail_next(Transfer::Kind::kWrite, n, {KVM_ERR_IO, "a page that cannot be written"});
    const RequestResult result = world.save(seq, "it");
    world.tier.clear_faults();
    if (result.status.is_ok()) {
      EXPECT_TRUE(world.remove("it").status.is_ok());
      continue;
    }
    EXPECT_EQ(result.status.code(), KVM_ERR_IO);
    EXPECT_EQ(result.status.message(), "a page that cannot be written");
    EXPECT_EQ(world.snapshot_bytes(), 0u);
    rig.engine->check_accounts();
  }
  world.tier.fail_object(ObjectRequest::Kind::kPut, 1, {KVM_ERR_NO_SPACE, "no room for the body"});
  EXPECT_EQ(world.save(seq, "it").status.code(), KVM_ERR_NO_SPACE);
  EXPECT_EQ(world.snapshot_bytes(), 0u);
  EXPECT_TRUE(world.save(seq, "it").status.is_ok());
  const uint64_t charged = world.snapshot_bytes();
  world.append(seq, 400, 5);
  world.tier.fail_object(ObjectRequest::Kind::kPut, 1, {KVM_ERR_NO_SPACE, "no room for the body"});
  EXPECT_EQ(world.save(seq, "it", kSaveReplace).status.code(), KVM_ERR_NO_SPACE);
  EXPECT_EQ(world.snapshot_bytes(), charged) << "the one before is there";
  world.tier.fail_object(ObjectRequest::Kind::kRemove, 1, {KVM_ERR_IO, "a fault"});
  EXPECT_EQ(world.remove("it").status.code(), KVM_ERR_IO);
  EXPECT_EQ(world.snapshot_bytes(), charged);
  world.tier.fail_object(ObjectRequest::Kind::kGet, 1, {KVM_ERR_CORRUPT, "a fault"});
  EXPECT_EQ(world.load("it").status.code(), KVM_ERR_CORRUPT);
  rig.engine->check_accounts();
  EXPECT_TRUE(world.load("it").status.is_ok());
}

// Pages that a policy reads are fetched before a load ends.
TEST(Snapshot, APageThatCannotBeFetchedFailsTheLoad) {
  for (const Kind& kind : kinds()) {
    if (kind.name != "fold") {
      continue;
    }
    World world(kind);
    const kvm_seq_id seq = world.make();
    ASSERT_TRUE(world.save(seq, "it").status.is_ok());
    for (uint64_t n = 1; n <= 3; ++n) {
      world.tier.fail_next(Transfer::Kind::kRead, n, {KVM_ERR_CORRUPT, "another page"});
      EXPECT_EQ(world.load("it").status.code(), KVM_ERR_CORRUPT);
      world.tier.clear_faults();
      world.rig->engine->check_accounts();
    }
    const kvm_seq_id loaded = world.loaded("it");
    EXPECT_TRUE(world.attend(loaded, 9) == world.attend(seq, 9));
  }
}

// --- Ends at any step ----------------------------------------------------------------------------

enum class EndBy { kCancel, kLeave, kEvict, kStop };

// Takes n steps of a request, and then ends it.
void end_after(const Kind& kind, SnapshotVerb verb, EndBy by, int n_steps, bool* is_through) {
  World world(kind, {.is_manual = true});
  Rig& rig = *world.rig;
  const ClientId client = rig.engine->add_client(of_user(3));
  const auto finish_all = [&](const bool& done) {
    EXPECT_TRUE(rig.drive_until([&] {
      world.tier.finish_all();
      return done;
    }));
  };
  const auto run = [&](auto what) {
    bool done = false;
    RequestResult result;
    rig.engine->submit(client, {2, 1}, std::move(what), [&](RequestResult&& r) {
      result = std::move(r);
      done = true;
    });
    finish_all(done);
    return result;
  };
  const kvm_seq_id seq = run(SeqRequest{.verb = SeqVerb::kCreate, .space = world.space}).seq;
  {
    std::mt19937_64 random(1);
    Buffer k(Dtype::kF32, kOwnLayers, 500, kHeads, kDim);
    fill(&k, kOwnLayers, 500, kHeads, random);
    StepRequest step;
    step.append = true;
    step.space = world.space;
    step.n_layers = kOwnLayers;
    step.items = {append_item(seq, 500)};
    step.k = step.v = k.view();
    ASSERT_TRUE(run(std::move(step)).status.is_ok());
  }
  SnapshotRequest what = world.saving(seq, "it");
  if (verb != SnapshotVerb::kSave) {
    ASSERT_TRUE(run(what).status.is_ok());
    what = verb == SnapshotVerb::kLoad
               ? world.loading("it")
               : SnapshotRequest{.verb = SnapshotVerb::kRemove, .name = "it"};
  }
  bool done = false;
  uint64_t n_to_save = kOwnLayers * 16u;  // once pages are numbered it goes down
  Status status;
  rig.engine->submit(client, {5, 5}, std::move(what), [&](RequestResult&& result) {
    status = result.status;
    done = true;
  });
  for (int i = 0; i < n_steps && !done; ++i) {
    if (rig.engine->poll() == 0 && !rig.engine->work()) {
      if (world.tier.n_waiting() != 0) {
        world.tier.finish(world.tier.n_waiting() - 1);
      } else if (world.tier.n_objects_waiting() != 0) {
        world.tier.finish_object();
      }
    }
    const SnapshotStats stats = rig.engine->snapshot_stats();
    EXPECT_LE(stats.n_saving + stats.n_loading, 1u);
    EXPECT_LE(stats.n_pages_saved, kOwnLayers * 16u);
    EXPECT_LE(stats.n_pages_to_save, n_to_save);
    n_to_save = stats.n_pages_to_save == 0 ? n_to_save : stats.n_pages_to_save;
  }
  *is_through = done;
  rig.engine->check_accounts();
  switch (by) {
    case EndBy::kCancel:
      rig.engine->cancel(client, {5, 5});
      finish_all(done);
      EXPECT_TRUE(status.is_ok() || status.code() == KVM_ERR_CANCELLED) << status.message();
      break;
    case EndBy::kLeave: {
      bool is_gone = false;
      rig.engine->remove_client(client, [&] { is_gone = true; });
      finish_all(is_gone);
      break;
    }
    case EndBy::kEvict:
      EXPECT_TRUE(rig.engine->evict(seq).is_ok());
      finish_all(done);
      EXPECT_TRUE(status.is_ok()) << status.message();
      break;
    case EndBy::kStop: {
      // It waits for what is in flight.
      std::atomic<bool> is_over{false};
      std::thread finisher([&] {
        while (!is_over) {
          world.tier.finish_all();
          std::this_thread::yield();
        }
      });
      world.rig.reset();
      is_over = true;
      finisher.join();
      break;
    }
  }
  if (world.rig) {
    rig.engine->check_accounts();
    if (by != EndBy::kLeave) {
      bool is_gone = false;
      rig.engine->remove_client(client, [&] { is_gone = true; });
      finish_all(is_gone);
    }
    rig.engine->check_accounts();
    world.rig.reset();
  }
  // What is there, is there whole; else nothing is.
  const bool is_there = !world.tier.objects()->list("", 1).empty();
  if (!is_there) {
    EXPECT_EQ(world.tier.used_bytes(), 0u);
    return;
  }
  world.rig.emplace(with_tier(&world.tier));
  world.space = world.rig->space(kind.spec);
  const ClientId next = world.rig->engine->add_client(of_user(3));
  bool is_loaded = false;
  world.rig->engine->submit(next, {1, 1}, world.loading("it"), [&](RequestResult&& result) {
    EXPECT_TRUE(result.status.is_ok()) << result.status.message();
    is_loaded = true;
  });
  EXPECT_TRUE(world.rig->drive_until([&] {
    world.tier.finish_all();
    return is_loaded;
  }));
}

TEST(Snapshot, EndsAtAnyStep) {
  std::vector<Kind> some;
  for (const Kind& kind : kinds()) {
    if (kind.name == "plain" || kind.name == "fold") {
      some.push_back(kind);
    }
  }
  for (const Kind& kind : some) {
    for (const SnapshotVerb verb :
         {SnapshotVerb::kSave, SnapshotVerb::kLoad, SnapshotVerb::kRemove}) {
      for (const EndBy by : {EndBy::kCancel, EndBy::kLeave, EndBy::kEvict, EndBy::kStop}) {
        bool is_through = false;
        for (int n_steps = 0; !is_through; ++n_steps) {
          SCOPED_TRACE(kind.name + ", verb " + std::to_string(static_cast<int>(verb)) + ", by " +
                       std::to_string(static_cast<int>(by)) + ", after " + std::to_string(n_steps));
          ASSERT_LT(n_steps, 300);
          end_after(kind, verb, by, n_steps, &is_through);
        }
      }
    }
  }
}

// Pages that are on their way out when a save comes to them are waited for; where they stay after
// all, the save writes them.
TEST(Snapshot, PagesThatMoveAreWaitedFor) {
  for (const bool has_fault : {false, true}) {
    World world(kinds()[0], {.is_manual = true});
    Rig& rig = *world.rig;
    const kvm_seq_id seq = rig.create(world.space);
    world.append(seq, 640, 1);
    if (has_fault) {
      world.tier.fail_every(Transfer::Kind::kWrite, 3, {KVM_ERR_IO, "a fault"});
    }
    ASSERT_TRUE(rig.engine->send_away(seq).is_ok());
    rig.drive_until([&] { return world.tier.n_waiting() != 0; });
    EXPECT_EQ(world.tier.n_waiting(), kOwnLayers * 10u);
    world.tier.clear_faults();
    bool is_done = false;
    Status status;
    rig.engine->submit(rig.client, {9, 9}, world.saving(seq, "it"), [&](RequestResult&& result) {
      status = result.status;
      is_done = true;
    });
    for (int i = 0; i < 200; ++i) {
      rig.engine->poll();
      rig.engine->work();
    }
    EXPECT_FALSE(is_done);
    EXPECT_EQ(world.tier.n_waiting(), kOwnLayers * 10u) << "none is written twice";
    SnapshotStats stats = rig.engine->snapshot_stats();
    EXPECT_EQ(stats.n_saving, 1u);
    EXPECT_EQ(stats.n_pages_to_save, kOwnLayers * 10u);
    EXPECT_EQ(stats.n_pages_saved, 0u);
    EXPECT_TRUE(rig.drive_until([&] {
      world.tier.finish_all();
      return is_done;
    }));
    ASSERT_TRUE(status.is_ok()) << status.message();
    stats = rig.engine->snapshot_stats();
    EXPECT_EQ(stats.n_saving + stats.n_pages_to_save + stats.n_pages_saved, 0u);
    EXPECT_EQ(world.tier.n_writes(), kOwnLayers * 10u);
    rig.engine->check_accounts();
  }
}

// What is published may be saved by any client of its user, and stays as it is.
TEST(Snapshot, APublishedSequenceIsSaved) {
  World world(kinds()[0]);
  Rig& rig = *world.rig;
  const kvm_seq_id seq = world.make();
  const auto before = world.attend(seq, 5);
  ASSERT_TRUE(rig.verb(SeqVerb::kPublish, seq).status.is_ok());
  const ClientId second = rig.engine->add_client(of_user(0));
  const ClientId other = rig.engine->add_client(of_user(7));
  EXPECT_TRUE(world.save(seq, "it", 0, second).status.is_ok());
  EXPECT_EQ(world.save(seq, "it", 0, other).status.code(), KVM_ERR_PERMISSION);
  rig.engine->check_accounts();
  EXPECT_TRUE(world.attend(world.loaded("it"), 5) == before);
}

// Where pages come back by themselves, those of a loaded sequence do.
TEST(Snapshot, PagesComeBackWhereThereIsRoom) {
  SimulatedTier tier({});
  EngineOptions options = with_tier(&tier);
  options.movement.is_automatic = true;
  Rig rig(options);
  const kvm_space_id space = rig.space(plain_spec());
  const kvm_seq_id seq = rig.create(space);
  Buffer k(Dtype::kF32, kOwnLayers, 5000, kHeads, kDim);
  StepRequest append;
  append.append = true;
  append.space = space;
  append.n_layers = kOwnLayers;
  append.items = {append_item(seq, 5000)};
  append.k = append.v = k.view();
  ASSERT_TRUE(rig.run(append).status.is_ok());
  SnapshotRequest what = {.verb = SnapshotVerb::kSave, .seq = seq, .name = "it"};
  ASSERT_TRUE(rig.run(what).status.is_ok());
  EXPECT_TRUE(rig.verb(SeqVerb::kFree, seq).status.is_ok());
  what = {.verb = SnapshotVerb::kLoad, .space = space, .name = "it"};
  ASSERT_TRUE(rig.run(what).status.is_ok());
  EXPECT_TRUE(rig.drive_until([&] { return rig.engine->n_pages_away() == 0; }));
  rig.engine->check_accounts();
}

// Many at once, of the same sequence and under the same name.
TEST(Snapshot, ManyAtOnce) {
  World world(kinds()[0], {.latency_ns = 100'000, .reorder = 8, .seed = 2}, 3);
  Rig& rig = *world.rig;
  const kvm_seq_id seq = world.make();
  uint32_t n_done = 0;
  uint32_t n_ok = 0;
  std::vector<kvm_seq_id> loaded;
  constexpr uint32_t kMany = 60;
  for (uint32_t i = 0; i < kMany; ++i) {
    SnapshotRequest what = world.saving(seq, "name" + std::to_string(i % 5), kSaveReplace);
    if (i % 4 == 2) {
      what = world.loading(what.name);
    } else if (i % 4 == 3) {
      what = {.verb = SnapshotVerb::kRemove, .name = what.name};
    }
    rig.engine->submit(rig.client, {3, i}, std::move(what), [&](RequestResult&& result) {
      ++n_done;
      n_ok += result.status.is_ok() ? 1 : 0;
      if (!result.status.is_ok()) {
        EXPECT_EQ(result.status.code(), KVM_ERR_NOT_FOUND) << result.status.message();
      }
      if (result.seq != 0) {
        loaded.push_back(result.seq);
      }
    });
  }
  EXPECT_TRUE(rig.drive_until([&] { return n_done == kMany; }));
  EXPECT_GE(n_ok, kMany / 2);
  rig.engine->check_accounts();
  const auto before = world.attend(seq, 5);
  for (const kvm_seq_id one : loaded) {
    EXPECT_TRUE(world.attend(one, 5) == before);
    world.free(one);
  }
  world.free(seq);
  for (const std::string& name : world.names()) {
    EXPECT_TRUE(world.remove(name).status.is_ok());
  }
  EXPECT_EQ(world.snapshot_bytes(), 0u);
  EXPECT_EQ(world.tier.used_bytes(), 0u);
}

}  // namespace
}  // namespace kvm::engine::testing
