// SPDX-License-Identifier: Apache-2.0
// Prefixes of an engine against a list of what was published: who finds what, while prefixes come
// and go, are forked, taken and forgotten, in the tables of two users.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "base/prefix_table.h"
#include "tests/sim/simulated_clock.h"
#include "tests/unit/engine/rig.h"

namespace kvm::engine::testing {
namespace {

using kvm::testing::SimulatedClock;
using Hashes = std::vector<kvm_prefix_hash>;

constexpr uint32_t kUsers[] = {1000, 2000};
constexpr uint64_t kSecond = 1'000'000'000;

class PrefixesTest : public ::testing::Test {
 protected:
  PrefixesTest() : rig_(options(&clock_)) {
    clients_ = {rig_.engine->add_client({.uid = kUsers[0]}),
                rig_.engine->add_client({.uid = kUsers[0]}),
                rig_.engine->add_client({.uid = kUsers[1]})};
    space_ = rig_.space(make_spec("prefixes", 2, 1, 1, 8));
  }
  static EngineOptions options(SimulatedClock* clock) {
    EngineOptions options = Rig::make_options(1, 64 << 20);
    options.clock = clock;
    options.prefix_pages = 300;
    return options;
  }

  static uint32_t uid_of(size_t client) { return kUsers[client / 2]; }

  // A chain whose first `common` pages are those of all of this family.
  static Hashes chain(uint64_t family, size_t common, uint64_t own, size_t n) {
    Hashes hashes(n);
    for (size_t i = 0; i < n; ++i) {
      const uint64_t seed = i < common ? family * 1000 + i
                                       : (family + 77) * 1'000'000 + (own * 20 + common) * 1000 + i;
      std::mt19937_64 random(seed);
      for (size_t word = 0; word < 4; ++word) {
        const uint64_t value = random();
        std::memcpy(hashes[i].bytes + 8 * word, &value, sizeof(value));
      }
    }
    return hashes;
  }
  RequestResult run(size_t client, SeqRequest request) {
    return rig_.run(std::move(request), clients_[client]);
  }
  kvm_seq_id sequence(size_t client, uint32_t n_tokens) {
    const kvm_seq_id seq = run(client, {.verb = SeqVerb::kCreate, .space = space_}).seq;
    if (n_tokens == 0) {
      return seq;
    }
    Buffer k(Dtype::kF32, 2, n_tokens, 1, 8);
    StepRequest step;
    step.space = space_;
    step.n_layers = 2;
    step.append = true;
    step.items = {append_item(seq, n_tokens)};
    step.k = k.view();
    Buffer v(Dtype::kF32, 2, n_tokens, 1, 8);
    step.v = v.view();
    EXPECT_TRUE(rig_.run(std::move(step), clients_[client]).status.is_ok());
    return seq;
  }
  Status publish(size_t client, kvm_seq_id seq, const Hashes& hashes, uint64_t keep_ns = 0) {
    SeqRequest request{.verb = SeqVerb::kPublish, .seq = seq, .n_tokens = keep_ns};
    request.hashes = hashes;
    return run(client, std::move(request)).status;
  }
  PrefixPage find(uint32_t uid, const Hashes& hashes) {
    const auto table = PrefixTableReader::over(rig_.engine->prefix_table(uid).value());
    return table.has_value() ? table->find(space_, hashes) : PrefixPage();
  }
  void settle() {
    for (int i = 0; i < 20; ++i) {
      rig_.engine->poll();
      while (rig_.engine->work()) {
      }
    }
    rig_.engine->check_accounts();
  }

  SimulatedClock clock_;
  Rig rig_;
  std::vector<ClientId> clients_;
  kvm_space_id space_ = 0;
};

TEST_F(PrefixesTest, AreFoundAsAListOfThemSays) {
  struct Prefix {
    size_t client;
    Hashes hashes;
    uint64_t keep_ns;
    uint64_t used_ns;
  };
  std::map<kvm_seq_id, Prefix> expected;
  std::mt19937_64 random(11);
  const auto below = [&](uint64_t n) { return random() % n; };
  const auto any_hashes = [&] { return chain(below(3), below(12), below(6), 1 + below(14)); };
  uint32_t n_found = 0;
  uint32_t n_refused = 0;
  uint32_t n_expired = 0;
  for (int step = 0; step < 600; ++step) {
    SCOPED_TRACE(step);
    const size_t client = below(3);
    const auto its = [&](const Prefix& prefix) { return uid_of(prefix.client) == uid_of(client); };
    kvm_seq_id some = 0;
    for (const auto& [seq, prefix] : expected) {
      some = its(prefix) && (some == 0 || below(3) == 0) ? seq : some;
    }
    const uint64_t what = below(10);
    if (what < 4) {
      const Hashes hashes = any_hashes();
      const auto n_tokens = static_cast<uint32_t>(hashes.size() * 64 + below(70));
      const kvm_seq_id seq = sequence(client, n_tokens);
      const bool is_there = find(uid_of(client), hashes).n_pages == hashes.size();
      const uint64_t keep_ns = below(2) * (1 + below(20)) * kSecond;
      const Status status = publish(client, seq, hashes, keep_ns);
      if (is_there) {
        EXPECT_EQ(status.code(), KVM_ERR_EXISTS);
      } else if (status.code() == KVM_ERR_LIMIT) {
        ++n_refused;
      } else {
        ASSERT_TRUE(status.is_ok()) << status.message();
        expected[seq] = {client, hashes, keep_ns, clock_.now_ns()};
        continue;
      }
      EXPECT_TRUE(run(client, {.verb = SeqVerb::kFree, .seq = seq}).status.is_ok())
          << "it is the client's";
    } else if (what == 4 && some != 0) {
      ASSERT_TRUE(run(client, {.verb = SeqVerb::kFree, .seq = some}).status.is_ok());
      expected.erase(some);
    } else if (what == 5 && some != 0) {
      EXPECT_EQ(run(client, {.verb = SeqVerb::kTake, .seq = some}).status.code(),
                KVM_ERR_UNSUPPORTED);
    } else if (what == 6 && some != 0) {
      Prefix& prefix = expected.at(some);
      const RequestResult fork = run(client, {.verb = SeqVerb::kFork, .seq = some, .n_tokens = 64});
      ASSERT_TRUE(fork.status.is_ok());
      prefix.used_ns = clock_.now_ns();
      ASSERT_TRUE(run(client, {.verb = SeqVerb::kFree, .seq = fork.seq}).status.is_ok());
    } else if (what == 7) {
      clock_.advance(below(3) * kSecond);
      for (int i = 0; i < 5; ++i) {
        settle();
      }
      n_expired += static_cast<uint32_t>(std::erase_if(expected, [&](const auto& one) {
        const Prefix& prefix = one.second;
        return prefix.keep_ns != 0 && prefix.used_ns + prefix.keep_ns <= clock_.now_ns();
      }));
    }
    settle();
    for (int look = 0; look < 10; ++look) {
      const Hashes hashes = any_hashes();
      size_t longest = 0;
      for (const auto& [seq, prefix] : expected) {
        if (!its(prefix)) {
          continue;
        }
        const size_t n = std::min(hashes.size(), prefix.hashes.size());
        size_t same = 0;
        while (same < n && std::memcmp(&hashes[same], &prefix.hashes[same], 32) == 0) {
          ++same;
        }
        longest = std::max(longest, same);
      }
      const PrefixPage found = find(uid_of(client), hashes);
      ASSERT_EQ(found.n_pages, longest);
      if (longest != 0) {
        ++n_found;
        const Prefix& prefix = expected.at(found.seq);
        EXPECT_TRUE(its(prefix));
        EXPECT_EQ(std::memcmp(hashes.data(), prefix.hashes.data(), longest * 32), 0);
      }
    }
    EXPECT_EQ(rig_.engine->prefix_stats().n_prefixes, expected.size());
  }
  EXPECT_GT(n_found, 500u);
  EXPECT_GT(n_expired, 5u);
  EXPECT_EQ(rig_.engine->prefix_stats().n_expired, n_expired);
  // What clients are gone from stays.
  for (const ClientId client : clients_) {
    rig_.engine->remove_client(client, {});
  }
  settle();
  EXPECT_EQ(rig_.engine->prefix_stats().n_prefixes, expected.size());
}

TEST_F(PrefixesTest, AreLimitedInPages) {
  const Hashes most = chain(1, 0, 1, 250);
  ASSERT_TRUE(publish(0, sequence(0, 250 * 64), most).is_ok());
  const kvm_seq_id seq = sequence(0, 60 * 64);
  EXPECT_EQ(publish(0, seq, chain(1, 0, 2, 60)).code(), KVM_ERR_LIMIT);
  EXPECT_TRUE(publish(2, sequence(2, 60 * 64), chain(1, 0, 2, 60)).is_ok())
      << "another user has a table of its own";
  // Pages that are there already count once.
  Hashes shared(most.begin(), most.begin() + 30);
  const Hashes own = chain(1, 0, 3, 60);
  shared.insert(shared.end(), own.begin() + 30, own.end());
  EXPECT_TRUE(publish(0, seq, shared).is_ok());
  settle();
  // In a space of its own, which means the same.
  const kvm_space_id first = space_;
  space_ = rig_.space(make_spec("twin", 2, 1, 1, 8));
  EXPECT_EQ(find(kUsers[0], shared).n_pages, 0u);
  ASSERT_TRUE(publish(2, sequence(2, 64), Hashes(shared.begin(), shared.begin() + 1)).is_ok());
  EXPECT_EQ(find(kUsers[1], shared).n_pages, 1u);
  space_ = first;
  EXPECT_EQ(find(kUsers[0], shared).n_pages, 60u);
  EXPECT_EQ(find(kUsers[1], shared).n_pages, 0u);
}

TEST_F(PrefixesTest, AreLimitedWhateverIsInFlightAndWhateverTheHashes) {
  uint32_t n_ok = 0;
  uint32_t n_done = 0;
  for (uint64_t own = 0; own < 3; ++own) {
    SeqRequest request{.verb = SeqVerb::kPublish, .seq = sequence(0, 200 * 64)};
    request.hashes = chain(1, 0, own, 200);
    rig_.engine->submit(clients_[0], {1, own}, std::move(request), [&](RequestResult&& result) {
      ++n_done;
      n_ok += result.status.is_ok() ? 1 : 0;
      EXPECT_TRUE(result.status.is_ok() || result.status.code() == KVM_ERR_LIMIT);
    });
  }
  ASSERT_TRUE(rig_.drive_until([&] { return n_done == 3; }));
  EXPECT_EQ(n_ok, 1u);
  // Not a chain: one that is listed in the middle makes those before it look as if they were.
  Hashes hashes = chain(2, 0, 1, 250);
  hashes[125] = hashes[187] = hashes[218] = hashes[234] = hashes[242] = hashes[246] = hashes[248] =
      chain(1, 0, 0, 1)[0];
  const Status status = publish(0, sequence(0, 250 * 64), hashes);
  EXPECT_TRUE(status.is_ok() || status.code() == KVM_ERR_LIMIT) << status.message();
  settle();
  EXPECT_LE(rig_.engine->prefix_stats().n_pages, 300u);
}

// One that is forked while it is about to be freed stays.
TEST_F(PrefixesTest, ThatAreForkedInTimeStay) {
  const Hashes hashes = chain(1, 0, 1, 290);
  const kvm_seq_id seq = sequence(0, 290 * 64);
  ASSERT_TRUE(publish(0, seq, hashes, kSecond).is_ok());
  bool is_forked = false;
  clock_.advance(2 * kSecond);
  rig_.engine->submit(clients_[1], {1, 1},
                      SeqRequest{.verb = SeqVerb::kFork, .seq = seq, .n_tokens = 64},
                      [&](RequestResult&& result) { is_forked = result.status.is_ok(); });
  settle();
  EXPECT_TRUE(is_forked);
  EXPECT_EQ(find(kUsers[0], hashes).n_pages, 290u);
  clock_.advance(2 * kSecond);
  for (int i = 0; i < 5; ++i) {
    settle();
  }
  EXPECT_EQ(find(kUsers[0], hashes).n_pages, 0u);
  EXPECT_EQ(rig_.engine->prefix_stats().n_expired, 1u);
}

TEST_F(PrefixesTest, ThatCannotBePublishedAreNotFound) {
  const Hashes hashes = chain(1, 0, 1, 3);
  EXPECT_EQ(publish(0, sequence(0, 3 * 64 - 1), hashes).code(), KVM_ERR_INVALID);
  const kvm_seq_id others = sequence(1, 3 * 64);
  EXPECT_EQ(publish(0, others, hashes).code(), KVM_ERR_PERMISSION);
  ASSERT_TRUE(publish(1, others, hashes).is_ok());
  EXPECT_EQ(publish(0, others, chain(1, 0, 2, 3)).code(), KVM_ERR_PERMISSION) << "published";
  ASSERT_TRUE(rig_.engine->evict(others).is_ok());
  settle();
  EXPECT_EQ(find(kUsers[0], hashes).n_pages, 0u);
  EXPECT_EQ(rig_.engine->prefix_stats().n_prefixes, 0u);
}

TEST_F(PrefixesTest, OfTheSameTokensAtTheSameTimeArePublishedOnce) {
  const Hashes hashes = chain(1, 0, 1, 20);
  std::vector<kvm_status> answers;
  for (const size_t client : {0, 1}) {
    SeqRequest request{.verb = SeqVerb::kPublish, .seq = sequence(client, 20 * 64)};
    request.hashes = hashes;
    rig_.engine->submit(clients_[client], {1, client}, std::move(request),
                        [&](RequestResult&& result) { answers.push_back(result.status.code()); });
  }
  ASSERT_TRUE(rig_.drive_until([&] { return answers.size() == 2; }));
  std::sort(answers.begin(), answers.end());
  EXPECT_EQ(answers, (std::vector<kvm_status>{std::min(KVM_OK, KVM_ERR_EXISTS),
                                              std::max(KVM_OK, KVM_ERR_EXISTS)}));
  settle();
}

// Longer than what is listed at a time, so that others come between its parts.
TEST_F(PrefixesTest, AreListedInPartsWithTheirFirstPagesFirst) {
  const Hashes hashes = chain(1, 0, 1, 290);
  const kvm_seq_id seq = sequence(0, 290 * 64);
  bool is_done = false;
  SeqRequest request{.verb = SeqVerb::kPublish, .seq = seq};
  request.hashes = hashes;
  rig_.engine->submit(clients_[0], {1, 1}, std::move(request),
                      [&](RequestResult&& result) { is_done = result.status.is_ok(); });
  uint32_t before = 0;
  for (int i = 0; i < 1000 && !is_done; ++i) {
    const uint32_t n_pages = find(kUsers[0], hashes).n_pages;
    EXPECT_GE(n_pages, before);
    before = n_pages;
    rig_.engine->poll();
    rig_.engine->work();
  }
  EXPECT_TRUE(is_done);
  EXPECT_EQ(find(kUsers[0], hashes).n_pages, 290u);
}

}  // namespace
}  // namespace kvm::engine::testing
