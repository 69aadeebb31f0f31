// SPDX-License-Identifier: Apache-2.0
// Prefixes that outlive an engine: what is found behind a restart is what was published and saved
// before it, answers to the bit as it did, and whatever fails, nothing else is found and nothing
// stays behind.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/prefix_table.h"
#include "tests/sim/simulated_clock.h"
#include "tests/unit/engine/rig.h"
#include "tiers/simulated/simulated_tier.h"

namespace kvm::engine::testing {
namespace {

using kvm::testing::SimulatedClock;
using tiers::ObjectRequest;
using tiers::SimulatedTier;
using tiers::Transfer;
using Hashes = std::vector<kvm_prefix_hash>;

constexpr uint64_t kSecond = 1'000'000'000;
constexpr uint32_t kHeads = 2;
constexpr uint32_t kDim = 16;
constexpr uint32_t kLayers = 2;
constexpr uint32_t kUid = 1000;

class KeptPrefixesTest : public ::testing::Test {
 protected:
  KeptPrefixesTest() { start(); }
  ~KeptPrefixesTest() override { rig_->engine->check_accounts(); }

  void start() {
    EngineOptions options = Rig::make_options(1, 64 << 20);
    options.clock = &clock_;
    options.slow_tier = &tier_;
    options.default_quota_bytes = 256 << 20;
    options.movement.is_automatic = false;
    options.prefix_pages = n_pages_;
    options.save_prefixes = which_;
    rig_.emplace(options);
    client_ = rig_->engine->add_client({.uid = kUid});
  }
  // Another engine over the same tier, in which nobody has a space yet.
  void restart() {
    rig_->engine->check_accounts();
    rig_.reset();
    start();
  }
  kvm_space_id space(const std::string& name, uint32_t n_recent = 0, uint32_t uid = kUid) {
    SpaceSpec spec = make_spec(name, kLayers, kHeads, kHeads, kDim);
    if (n_recent != 0) {
      spec.policies = {{.kv_head_mask = {1, 0},
                        .retention = KVM_RETAIN_SINKS_RECENT,
                        .n_sinks = 4,
                        .n_recent = n_recent}};
    }
    const Result<kvm_space_id> made = rig_->engine->register_space(spec, uid);
    EXPECT_TRUE(made.is_ok()) << made.status().message();
    return made.value();
  }
  RequestResult run(SeqRequest&& request) { return rig_->run(std::move(request), client_); }

  static Hashes chain(uint64_t family, size_t common, uint64_t own, size_t n) {
    Hashes hashes(n);
    for (size_t i = 0; i < n; ++i) {
      std::mt19937_64 random(i < common ? family * 1000 + i
                                        : (family + 77) * 1'000'000 + own * 1000 + i);
      for (size_t word = 0; word < 4; ++word) {
        const uint64_t value = random();
        std::memcpy(hashes[i].bytes + 8 * word, &value, sizeof(value));
      }
    }
    return hashes;
  }
  kvm_seq_id sequence(kvm_space_id space, uint32_t n_tokens, uint64_t seed) {
    const kvm_seq_id seq = run({.verb = SeqVerb::kCreate, .space = space}).seq;
    std::mt19937_64 random(seed);
    Buffer k(Dtype::kF32, kLayers, n_tokens, kHeads, kDim);
    Buffer v(Dtype::kF32, kLayers, n_tokens, kHeads, kDim);
    fill(&k, kLayers, n_tokens, kHeads, random);
    fill(&v, kLayers, n_tokens, kHeads, random);
    StepRequest step;
    step.space = space;
    step.n_layers = kLayers;
    step.append = true;
    step.items = {append_item(seq, n_tokens)};
    step.k = k.view();
    step.v = v.view();
    const RequestResult result = rig_->run(std::move(step), client_);
    EXPECT_TRUE(result.status.is_ok()) << result.status.message();
    return seq;
  }
  std::vector<std::byte> attend(kvm_space_id space, kvm_seq_id seq) {
    std::vector<std::byte> all;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      std::mt19937_64 random(layer + 5);
      Buffer q(Dtype::kF32, 1, 2, kHeads, kDim);
      Buffer o(Dtype::kF32, 1, 2, kHeads, kDim);
      fill(&q, 1, 2, kHeads, random, 2.0f);
      StepRequest step;
      step.attend = true;
      step.space = space;
      step.layer_begin = layer;
      step.items = {query_item(seq, 2)};
      step.q = q.view();
      step.o = o.view();
      const RequestResult result = rig_->run(std::move(step), client_);
      EXPECT_TRUE(result.status.is_ok()) << result.status.message();
      all.insert(all.end(), o.bytes().begin(), o.bytes().end());
    }
    return all;
  }
  Status publish(kvm_seq_id seq, const Hashes& hashes, uint64_t keep_ns = 0) {
    SeqRequest request{.verb = SeqVerb::kPublish, .seq = seq, .n_tokens = keep_ns};
    request.hashes = hashes;
    return run(std::move(request)).status;
  }
  PrefixPage find(kvm_space_id space, const Hashes& hashes, uint32_t uid = kUid) {
    const auto table = PrefixTableReader::over(rig_->engine->prefix_table(uid).value());
    return table.has_value() ? table->find(space, hashes) : PrefixPage();
  }
  kvm_seq_id fork(kvm_seq_id seq, uint64_t n_tokens) {
    const RequestResult forked = run({.verb = SeqVerb::kFork, .seq = seq, .n_tokens = n_tokens});
    EXPECT_TRUE(forked.status.is_ok()) << forked.status.message();
    return forked.seq;
  }
  void free(kvm_seq_id seq) {
    EXPECT_TRUE(run({.verb = SeqVerb::kFree, .seq = seq}).status.is_ok());
  }
  PrefixStats stats() { return rig_->engine->prefix_stats(); }
  bool drive_until(const std::function<bool()>& is_done) { return rig_->drive_until(is_done); }
  // Until nothing is left to be saved, loaded or removed.
  void settle() {
    uint32_t n_idle = 0;
    EXPECT_TRUE(drive_until([&] {
      const bool is_idle =
          !rig_->engine->work() && tier_.n_in_flight() == 0 && rig_->engine->n_in_flight() == 0;
      n_idle = is_idle ? n_idle + 1 : 0;
      return n_idle > 50;
    }));
    rig_->engine->check_accounts();
  }
  std::vector<SnapshotInfo> snapshots() {
    return rig_->engine->list_snapshots(kEverybody, {}, 1000);
  }

  SimulatedClock clock_;
  SimulatedTier tier_{{}};
  uint64_t n_pages_ = 1000;
  SavePrefixes which_ = SavePrefixes::kAll;
  std::optional<Rig> rig_;
  ClientId client_ = 0;
};

TEST_F(KeptPrefixesTest, AreFoundAgainOnceTheirSpaceIsThere) {
  kvm_space_id in = space("model");
  const Hashes hashes = chain(1, 5, 0, 5);
  const kvm_seq_id seq = sequence(in, 5 * kPageTokens + 10, 1);
  const std::vector<std::byte> whole = attend(in, seq);
  ASSERT_TRUE(publish(seq, hashes).is_ok());
  const std::vector<std::byte> part = attend(in, fork(seq, 3 * kPageTokens));
  settle();
  EXPECT_EQ(stats().n_saved, 1u);
  ASSERT_EQ(snapshots().size(), 1u);
  EXPECT_EQ(snapshots()[0].space_name, "model");

  restart();
  settle();
  EXPECT_EQ(stats().n_waiting, 1u);
  const kvm_space_id other = space("other");
  settle();
  EXPECT_EQ(stats().n_restored, 0u);
  (void)space("model", 0, kUid + 1);
  settle();
  EXPECT_EQ(stats().n_restored, 0u) << "of another user";
  in = space("model");
  settle();
  EXPECT_EQ(stats().n_restored, 1u);
  EXPECT_EQ(stats().n_waiting, 0u);
  EXPECT_EQ(stats().n_saved, 1u);
  EXPECT_EQ(find(other, hashes).n_pages, 0u);
  const PrefixPage found = find(in, hashes);
  ASSERT_EQ(found.n_pages, 5u);
  EXPECT_EQ(rig_->engine->n_pages_away(), 5u * kLayers) << "no full page is read before it is used";
  EXPECT_TRUE(attend(in, fork(found.seq, KVM_POSITION_END)) == whole);
  EXPECT_TRUE(attend(in, fork(found.seq, 3 * kPageTokens)) == part);
  EXPECT_EQ(publish(sequence(in, 5 * kPageTokens, 2), hashes).code(), KVM_ERR_EXISTS);

  // And once more, from what was not written again.
  const uint64_t n_writes = tier_.n_writes();
  restart();
  in = space("model");
  settle();
  EXPECT_EQ(find(in, hashes).n_pages, 5u);
  EXPECT_EQ(tier_.n_writes(), n_writes);
  // Registered again, nothing comes twice.
  (void)space("model");
  settle();
  EXPECT_EQ(stats().n_restored, 1u);

  free(find(in, hashes).seq);
  settle();
  EXPECT_TRUE(snapshots().empty());
  EXPECT_EQ(tier_.used_bytes(), 0u);
}

// Prefixes that share pages, come and go, are used, expire, and are met by faults, in engine after
// engine; a list says what there must be.
TEST_F(KeptPrefixesTest, AreThoseThatWerePublishedAndNotFreed) {
  struct Prefix {
    size_t space;
    Hashes hashes;
  };
  std::vector<kvm_space_id> in = {space("a"), space("b")};
  std::map<uint64_t, Prefix> expected;  // by how many tokens there are, which is another for each
  const auto has = [](const Prefix& prefix, const Hashes& hashes) {
    return prefix.hashes.size() >= hashes.size() &&
           std::memcmp(&prefix.hashes[hashes.size() - 1], &hashes.back(), sizeof hashes[0]) == 0;
  };
  std::mt19937_64 random(7);
  uint64_t n_found = 0;
  for (uint32_t round = 0; round < 7; ++round) {
    for (uint32_t i = 0; i < 6; ++i) {
      const size_t of = random() % 2;
      const size_t n = 1 + random() % 6;
      const Hashes hashes = chain(random() % 2, random() % (n + 1), random() % 3, n);
      uint64_t n_tokens = 0;
      do {
        n_tokens = n * kPageTokens + random() % kPageTokens;
      } while (expected.contains(n_tokens));
      const kvm_seq_id seq = sequence(in[of], static_cast<uint32_t>(n_tokens), random());
      const bool is_there = std::any_of(expected.begin(), expected.end(), [&](const auto& one) {
        return one.second.space == of && has(one.second, hashes);
      });
      const Status published = publish(seq, hashes);
      ASSERT_EQ(published.is_ok(), !is_there) << published.message();
      if (published.is_ok()) {
        expected[n_tokens] = {of, hashes};
      } else {
        free(seq);
      }
      if (random() % 2 == 0 && !expected.empty()) {
        auto gone = expected.begin();
        std::advance(gone, static_cast<ptrdiff_t>(random() % expected.size()));
        for (const kvm_seq_info& info : rig_->engine->list_seqs(client_, 0, true, 0, 1000).infos) {
          if (info.n_tokens_max == gone->first) {
            free(info.seq);
          }
        }
        expected.erase(gone);
      }
      if (random() % 3 == 0) {
        settle();
      }
    }
    settle();
    ASSERT_EQ(stats().n_saved, expected.size());
    ASSERT_EQ(snapshots().size(), expected.size());
    restart();
    in = {space("a"), space("b")};
    settle();
    ASSERT_EQ(stats().n_prefixes, expected.size());
    ASSERT_EQ(stats().n_saved, expected.size());
    for (const auto& [n_tokens, prefix] : expected) {
      const PrefixPage found = find(in[prefix.space], prefix.hashes);
      ASSERT_EQ(found.n_pages, prefix.hashes.size());
      ++n_found;
    }
  }
  EXPECT_GT(n_found, 30u);
}

// Whoever finds it forks what its hashes stand for, and what is saved is all of it.
TEST_F(KeptPrefixesTest, HaveNoGapBehindWhatTheirHashesStandForEither) {
  const kvm_space_id in = space("model");
  const Hashes hashes = chain(1, 3, 0, 3);
  const kvm_seq_id seq = sequence(in, 6 * kPageTokens, 1);
  ASSERT_TRUE(run({.verb = SeqVerb::kDrop,
                   .seq = seq,
                   .range = {.begin = 4 * kPageTokens, .end = KVM_POSITION_END}})
                  .status.is_ok());
  EXPECT_EQ(publish(seq, hashes).code(), KVM_ERR_PARTIAL);
  ASSERT_TRUE(
      run({.verb = SeqVerb::kTruncate, .seq = seq, .n_tokens = 4 * kPageTokens}).status.is_ok());
  ASSERT_TRUE(publish(seq, hashes).is_ok());
  settle();
  EXPECT_EQ(stats().n_saved, 1u);
  restart();
  (void)space("model");
  settle();
  EXPECT_EQ(stats().n_restored, 1u);
  EXPECT_EQ(stats().n_failed_loads, 0u);
}

TEST_F(KeptPrefixesTest, OfAnotherPolicyAreLeftUntilTheyExpire) {
  const kvm_space_id in = space("model");
  const Hashes hashes = chain(1, 3, 0, 3);
  ASSERT_TRUE(publish(sequence(in, 3 * kPageTokens, 1), hashes, 100 * kSecond).is_ok());
  settle();
  restart();
  const kvm_space_id changed = space("model", 64);
  settle();
  EXPECT_EQ(find(changed, hashes).n_pages, 0u);
  EXPECT_EQ(stats().n_waiting, 1u);
  EXPECT_EQ(stats().n_failed_loads, 1u);
  EXPECT_EQ(snapshots().size(), 1u);
  clock_.advance(50 * kSecond);
  restart();
  clock_.advance(99 * kSecond);
  settle();
  EXPECT_EQ(snapshots().size(), 1u) << "each service waits for it as long as it was to be kept";
  clock_.advance(2 * kSecond);
  settle();
  EXPECT_EQ(snapshots().size(), 0u);
  EXPECT_EQ(stats().n_waiting, 0u);
  EXPECT_EQ(stats().n_expired, 1u);
  EXPECT_EQ(tier_.used_bytes(), 0u);
}

TEST_F(KeptPrefixesTest, ExpireBehindARestartAsBefore) {
  const Hashes hashes = chain(1, 3, 0, 3);
  ASSERT_TRUE(publish(sequence(space("model"), 200, 1), hashes, 100 * kSecond).is_ok());
  settle();
  restart();
  const kvm_space_id in = space("model");
  settle();
  clock_.advance(60 * kSecond);
  EXPECT_EQ(find(in, hashes).n_pages, 3u);
  free(fork(find(in, hashes).seq, 64));
  clock_.advance(60 * kSecond);
  settle();
  EXPECT_EQ(find(in, hashes).n_pages, 3u) << "it was forked";
  clock_.advance(60 * kSecond);
  settle();
  EXPECT_EQ(find(in, hashes).n_pages, 0u);
  EXPECT_TRUE(snapshots().empty());
}

TEST_F(KeptPrefixesTest, AreSavedAsTheEngineWasTold) {
  which_ = SavePrefixes::kUsed;
  restart();
  kvm_space_id in = space("model");
  const Hashes used = chain(1, 3, 0, 3);
  const Hashes once = chain(2, 3, 0, 3);
  ASSERT_TRUE(publish(sequence(in, 200, 1), used).is_ok());
  ASSERT_TRUE(publish(sequence(in, 200, 2), once).is_ok());
  settle();
  EXPECT_EQ(snapshots().size(), 0u);
  for (int i = 0; i < 3; ++i) {
    free(fork(find(in, used).seq, 64));
  }
  settle();
  EXPECT_EQ(snapshots().size(), 1u);
  which_ = SavePrefixes::kNone;
  restart();
  in = space("model");
  settle();
  EXPECT_EQ(find(in, used).n_pages, 3u) << "what was saved is kept";
  EXPECT_EQ(find(in, once).n_pages, 0u);
  ASSERT_TRUE(publish(sequence(in, 200, 2), once).is_ok());
  free(fork(find(in, once).seq, 64));
  settle();
  EXPECT_EQ(snapshots().size(), 1u);
}

TEST_F(KeptPrefixesTest, ThatFailToBeSavedEndWithTheService) {
  const std::vector<std::function<void()>> faults = {
      [&] { tier_.fail_next(Transfer::Kind::kWrite, 2, Status::fixed(KVM_ERR_IO, "a fault")); },
      [&] {
        tier_.fail_object(ObjectRequest::Kind::kPut, 1, Status::fixed(KVM_ERR_NO_SPACE, "full"));
      }};
  kvm_space_id in = space("model");
  const Hashes bad = chain(1, 3, 0, 3);
  const Hashes good = chain(2, 3, 0, 3);
  for (const std::function<void()>& fault : faults) {
    fault();
    ASSERT_TRUE(publish(sequence(in, 200, 1), bad).is_ok());
    settle();
    EXPECT_EQ(stats().n_failed_saves, 1u);
    EXPECT_EQ(find(in, bad).n_pages, 3u);
    EXPECT_TRUE(snapshots().empty());
    ASSERT_TRUE(publish(sequence(in, 200, 2), good).is_ok());
    settle();
    restart();
    in = space("model");
    settle();
    EXPECT_EQ(find(in, bad).n_pages, 0u);
    EXPECT_EQ(find(in, good).n_pages, 3u);
    free(find(in, good).seq);
    settle();
    EXPECT_EQ(tier_.used_bytes(), 0u);
  }
}

TEST_F(KeptPrefixesTest, ThatCannotBeLoadedAreNotFoundAndComeLater) {
  const Hashes hashes = chain(1, 3, 0, 3);
  ASSERT_TRUE(publish(sequence(space("model"), 200, 1), hashes).is_ok());
  settle();
  restart();
  tier_.fail_object(ObjectRequest::Kind::kGet, 1, Status::fixed(KVM_ERR_IO, "a fault"));
  kvm_space_id in = space("model");
  settle();
  EXPECT_EQ(find(in, hashes).n_pages, 0u);
  EXPECT_EQ(stats().n_waiting, 1u);
  (void)space("model");
  settle();
  EXPECT_EQ(find(in, hashes).n_pages, 3u) << "with the next who registers the space";

  restart();
  tier_.fail_object(ObjectRequest::Kind::kGet, 1, Status::fixed(KVM_ERR_CORRUPT, "damaged"));
  in = space("model");
  settle();
  EXPECT_EQ(find(in, hashes).n_pages, 0u);
  EXPECT_EQ(stats().n_failed_loads, 1u);
  EXPECT_TRUE(snapshots().empty()) << "what is damaged is of no use to anybody";
}

TEST_F(KeptPrefixesTest, ThatDoNotFitAreNotKeptInMemory) {
  kvm_space_id in = space("model");
  ASSERT_TRUE(publish(sequence(in, 64 * 70, 1), chain(1, 70, 0, 70)).is_ok());
  settle();
  n_pages_ = 64;
  restart();
  in = space("model");
  settle();
  EXPECT_EQ(find(in, chain(1, 70, 0, 70)).n_pages, 0u);
  EXPECT_EQ(stats().n_waiting, 1u);
  EXPECT_EQ(rig_->engine->list_seqs(client_, 0, true, 0, 100).infos.size(), 0u);
  n_pages_ = 1000;
  restart();
  in = space("model");
  settle();
  EXPECT_EQ(find(in, chain(1, 70, 0, 70)).n_pages, 70u);
}

TEST_F(KeptPrefixesTest, PublishedAnewBeforeTheirSpaceWasThereAreOne) {
  const Hashes hashes = chain(1, 3, 0, 3);
  ASSERT_TRUE(publish(sequence(space("model"), 200, 1), hashes).is_ok());
  settle();
  restart();
  tier_.fail_object(ObjectRequest::Kind::kGet, 1, Status::fixed(KVM_ERR_IO, "a fault"));
  kvm_space_id in = space("model");
  settle();
  ASSERT_TRUE(publish(sequence(in, 200, 1), hashes).is_ok());
  settle();
  EXPECT_EQ(stats().n_failed_saves, 0u);
  EXPECT_EQ(stats().n_saved, 1u);
  EXPECT_EQ(snapshots().size(), 1u);
  (void)space("model");
  settle();
  EXPECT_EQ(stats().n_waiting, 0u);
  EXPECT_EQ(stats().n_restored, 0u);
  EXPECT_EQ(rig_->engine->list_seqs(client_, 0, true, 0, 100).infos.size(), 1u);
  free(find(in, hashes).seq);
  settle();
  EXPECT_EQ(tier_.used_bytes(), 0u);
}

TEST_F(KeptPrefixesTest, AreFreedAndPublishedWhileTheyAreSaved) {
  const kvm_space_id in = space("model");
  const Hashes hashes = chain(1, 6, 0, 6);
  std::mt19937_64 random(3);
  for (uint32_t i = 0; i < 60; ++i) {
    const kvm_seq_id seq = sequence(in, 400, i);
    ASSERT_TRUE(publish(seq, hashes).is_ok());
    for (uint64_t n = random() % 40; n != 0; --n) {
      rig_->engine->work();
      rig_->engine->poll();
    }
    if (i % 7 == 6) {
      settle();
      EXPECT_EQ(snapshots().size(), 1u);
    }
    free(seq);
  }
  settle();
  EXPECT_EQ(stats().n_saved, 0u);
  EXPECT_TRUE(snapshots().empty());
  EXPECT_EQ(tier_.used_bytes(), 0u);
}

TEST_F(KeptPrefixesTest, HaveNamesOfTheServiceAlone) {
  const kvm_space_id in = space("model");
  const kvm_seq_id seq = sequence(in, 100, 1);
  const RequestResult refused = rig_->run(
      SnapshotRequest{.verb = SnapshotVerb::kSave, .seq = seq, .name = ".prefix/mine"}, client_);
  EXPECT_EQ(refused.status.code(), KVM_ERR_INVALID);
  EXPECT_NE(std::string(refused.status.message()).find(".prefix/"), std::string::npos);
  // Its owner may look at one, and remove it: it is still found, and ends with the service.
  const Hashes hashes = chain(1, 1, 0, 1);
  ASSERT_TRUE(publish(seq, hashes).is_ok());
  settle();
  ASSERT_EQ(snapshots().size(), 1u);
  const std::string name = snapshots()[0].name.name;
  EXPECT_TRUE(
      rig_->run(SnapshotRequest{.verb = SnapshotVerb::kLoad, .space = in, .name = name}, client_)
          .status.is_ok());
  EXPECT_TRUE(rig_->run(SnapshotRequest{.verb = SnapshotVerb::kRemove, .name = name}, client_)
                  .status.is_ok());
  EXPECT_EQ(find(in, hashes).n_pages, 1u);
  free(seq);
  settle();
  EXPECT_TRUE(snapshots().empty());
}

TEST_F(KeptPrefixesTest, AreWeighedByWhatIsAway) {
  kvm_space_id in = space("model");
  const Hashes hashes = chain(1, 10, 0, 10);
  ASSERT_TRUE(publish(sequence(in, 10 * kPageTokens, 1), hashes).is_ok());
  PrefixPage found = find(in, hashes);
  const auto weigh = [&](double rate) {
    return rig_->engine->weigh_prefix(client_, found.seq, found.n_pages * kPageTokens, rate)
        .value();
  };
  EXPECT_TRUE(weigh(1e12).is_faster) << "all of it is in memory";
  EXPECT_EQ(weigh(1e12).read_ns, 0u);
  settle();
  restart();
  in = space("model");
  settle();
  found = find(in, hashes);
  // K and V of 640 tokens in bf16, at 2 GB/s, which is taken where nothing has been measured.
  EXPECT_EQ(weigh(1).read_ns, 640u * kLayers * 2 * kHeads * kDim * 2 / 2);
  EXPECT_TRUE(weigh(1e5).is_faster);
  EXPECT_FALSE(weigh(1e7).is_faster);
  EXPECT_EQ(stats().n_faster, 2u);
  EXPECT_EQ(stats().n_slower, 1u);
  EXPECT_EQ(rig_->engine->weigh_prefix(client_, 12345, 64, 1).status().code(), KVM_ERR_NOT_FOUND);
}

}  // namespace
}  // namespace kvm::engine::testing
