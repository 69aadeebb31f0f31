// SPDX-License-Identifier: Apache-2.0
// Snapshots through kvm.h, over a kvmd that is killed: what was answered is there afterwards, to
// the bit, whatever was under way.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kvm.h"
#include "tests/common/another_user.h"
#include "tests/common/environment.h"
#include "tests/common/items.h"
#include "tests/common/temporary_directory.h"
#include "tests/integration/abi_rig.h"

namespace kvm::testing {
namespace {

constexpr uint32_t kTokens = 300;
const Geometry kGeometry{.n_layers = 3};

std::vector<std::string> disk_in(const TemporaryDirectory& folder) {
  return {"--disk-directories", folder.path(), "--disk-capacity", "256MiB"};
}

// A client with a queue and a space.
struct User {
  User(const std::string& socket_path, const char* space_name, const Geometry& of = kGeometry)
      : geometry(of) {
    kvm_connect_params params{};
    params.struct_size = sizeof(params);
    params.socket_path = socket_path.c_str();
    check(kvm_connect(&params, &client));
    check(kvm_queue_create(client, nullptr, &queue));
    space = register_space(client, space_name, geometry);
  }
  ~User() {
    kvm_queue_destroy(queue);
    kvm_client_close(client);
  }
  User(const User&) = delete;
  User& operator=(const User&) = delete;

  static void check(kvm_status status) { ASSERT_EQ(status, KVM_OK) << kvm_last_error(); }

  size_t row() const { return size_t{geometry.n_kv_heads} * geometry.dim; }

  kvm_status append(kvm_seq_id seq, const std::vector<float>& k, uint32_t n_tokens) {
    const kvm_item item = item_of(seq, n_tokens, 0);
    for (uint32_t layer = 0; layer < geometry.n_layers; ++layer) {
      kvm_step_params step{};
      step.struct_size = sizeof(step);
      step.space = space;
      step.layer_begin = layer;
      step.n_items = 1;
      step.items = &item;
      step.k = tensor_of(k);
      step.v = tensor_of(k);
      if (const kvm_status status = kvm_append(queue, &step); status != KVM_OK) {
        return status;
      }
    }
    return KVM_OK;
  }
  // A sequence of random rows.
  kvm_seq_id make(uint32_t seed, uint32_t n_tokens = kTokens) {
    kvm_seq_id seq = 0;
    check(kvm_seq_create(client, space, nullptr, &seq));
    std::mt19937 random(seed);
    check(append(seq, random_floats(&random, n_tokens * row()), n_tokens));
    return seq;
  }
  // What a query finds in every layer.
  std::vector<float> attend(kvm_seq_id seq) {
    std::mt19937 random(99);
    const std::vector<float> q = random_floats(&random, size_t{geometry.n_q_heads} * geometry.dim);
    std::vector<float> all;
    for (uint32_t layer = 0; layer < geometry.n_layers; ++layer) {
      std::vector<float> o(q.size());
      const kvm_item item = item_of(seq, 0, 1);
      kvm_step_params step{};
      step.struct_size = sizeof(step);
      step.space = space;
      step.layer_begin = layer;
      step.n_items = 1;
      step.items = &item;
      step.q = tensor_of(q);
      step.o = tensor_of(o);
      check(kvm_attend(queue, &step, nullptr));
      all.insert(all.end(), o.begin(), o.end());
    }
    return all;
  }
  kvm_seq_id load(const char* name) {
    kvm_seq_id seq = 0;
    check(kvm_seq_load(client, space, name, &seq));
    return seq;
  }
  std::vector<kvm_snapshot_info> snapshots() {
    std::vector<kvm_snapshot_info> list(200);
    for (kvm_snapshot_info& info : list) {
      info.struct_size = sizeof(info);
    }
    size_t n = 0;
    check(kvm_snapshot_list(client, 0, list.data(), list.size(), &n));
    list.resize(n);
    return list;
  }

  Geometry geometry;
  kvm_client* client = nullptr;
  kvm_queue* queue = nullptr;
  kvm_space_id space = 0;
};

TEST(Snapshots, AreThereAfterKvmdWasKilled) {
  const TemporaryDirectory folder;
  Daemon daemon(disk_in(folder));
  ASSERT_FALSE(HasFatalFailure());
  std::vector<float> expected;
  std::vector<float> grown;
  {
    User user(daemon.socket_path(), "model");
    const kvm_seq_id seq = user.make(1);
    expected = user.attend(seq);
    ASSERT_EQ(kvm_seq_save(user.client, seq, "chat/1", 0), KVM_OK) << kvm_last_error();
    std::mt19937 random(2);
    ASSERT_EQ(user.append(seq, random_floats(&random, 100 * user.row()), 100), KVM_OK);
    grown = user.attend(seq);
    EXPECT_EQ(kvm_seq_save(user.client, seq, "chat/1", 0), KVM_ERR_EXISTS);
    ASSERT_EQ(kvm_seq_save(user.client, seq, "chat/2", KVM_SAVE_REPLACE), KVM_OK);
    ASSERT_EQ(kvm_seq_save(user.client, seq, "gone", 0), KVM_OK);
    ASSERT_EQ(kvm_snapshot_delete(user.client, "gone"), KVM_OK) << kvm_last_error();
    // Asynchronously, with others behind it on the same sequence.
    ASSERT_EQ(kvm_seq_save_async(user.queue, seq, "chat/3", 0, 7), KVM_OK) << kvm_last_error();
    ASSERT_EQ(kvm_seq_truncate_async(user.queue, seq, 10, 8), KVM_OK);
    ASSERT_EQ(kvm_submit(user.queue), KVM_OK);
    kvm_completion done[2];
    ASSERT_EQ(kvm_wait(user.queue, done, 2, 2, UINT64_MAX), 2);
    EXPECT_EQ(done[0].status, KVM_OK) << done[0].message;
    EXPECT_EQ(done[1].status, KVM_OK) << done[1].message;
  }
  for (int i = 0; i < 3; ++i) {
    daemon.kill_hard();
    daemon.start();
    ASSERT_FALSE(HasFatalFailure());
    User user(daemon.socket_path(), "by.another.name");
    const std::vector<kvm_snapshot_info> list = user.snapshots();
    ASSERT_EQ(list.size(), 3u);
    EXPECT_STREQ(list[0].name, "chat/1");
    EXPECT_STREQ(list[0].space_name, "model");
    EXPECT_EQ(list[0].n_tokens, kTokens);
    EXPECT_EQ(list[0].flags, 0u);
    EXPECT_EQ(list[0].uid, ::getuid());
    EXPECT_GT(list[0].saved_ns, uint64_t{1'700'000'000} * 1'000'000'000);
    EXPECT_EQ(list[1].n_tokens, kTokens + 100);
    EXPECT_EQ(user.attend(user.load("chat/1")), expected);
    EXPECT_EQ(user.attend(user.load("chat/2")), grown);
    const kvm_seq_id seq = user.load("chat/3");
    EXPECT_EQ(user.attend(seq), grown);
    EXPECT_EQ(kvm_seq_prefetch(user.client, seq), KVM_OK) << kvm_last_error();
    // It goes on where it was, and is saved again.
    std::mt19937 random(2);
    const kvm_seq_id first = user.load("chat/1");
    ASSERT_EQ(user.append(first, random_floats(&random, 100 * user.row()), 100), KVM_OK)
        << kvm_last_error();
    EXPECT_EQ(user.attend(first), grown);
    ASSERT_EQ(kvm_seq_save(user.client, first, "chat/3", KVM_SAVE_REPLACE), KVM_OK);
    kvm_seq_id none = 0;
    EXPECT_EQ(kvm_seq_load(user.client, user.space, "gone", &none), KVM_ERR_NOT_FOUND);
    EXPECT_EQ(kvm_last_error(), "user " + std::to_string(::getuid()) + " has no snapshot \"gone\"");
  }
}

TEST(Snapshots, AreRefusedWithAReason) {
  const TemporaryDirectory folder;
  const Daemon daemon(disk_in(folder));
  ASSERT_FALSE(HasFatalFailure());
  User user(daemon.socket_path(), "model");
  const kvm_seq_id seq = user.make(1);
  ASSERT_EQ(kvm_seq_save(user.client, seq, "one", 0), KVM_OK) << kvm_last_error();
  for (const std::string& name :
       {std::string(), std::string("a b"), std::string("a\n"), std::string(128, 'n')}) {
    EXPECT_EQ(kvm_seq_save(user.client, seq, name.c_str(), 0), KVM_ERR_INVALID) << name;
    EXPECT_STRNE(kvm_last_error(), "");
  }
  EXPECT_EQ(kvm_seq_save(user.client, seq, std::string(127, 'n').c_str(), 0), KVM_OK)
      << kvm_last_error();
  EXPECT_EQ(kvm_seq_save(user.client, seq, nullptr, 0), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_seq_save(user.client, seq, "two", 2), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_snapshot_delete(user.client, "two"), KVM_ERR_NOT_FOUND);
  kvm_seq_id made = 0;
  EXPECT_EQ(kvm_seq_load(user.client, user.space + (uint64_t{1} << 40), "one", &made),
            KVM_ERR_NOT_FOUND);
  Geometry other = kGeometry;
  other.n_layers = 2;
  User stranger(daemon.socket_path(), "other", other);
  EXPECT_EQ(kvm_seq_load(stranger.client, stranger.space, "one", &made), KVM_ERR_INVALID);
  EXPECT_NE(std::string(kvm_last_error()).find("layout"), std::string::npos) << kvm_last_error();
  EXPECT_EQ(kvm_seq_save(stranger.client, seq, "mine", 0), KVM_ERR_PERMISSION);
  EXPECT_EQ(user.snapshots().size(), 2u);
}

// The value of a series of the statistics.
uint64_t series(kvm_client* client, const std::string& name) {
  std::string text(1 << 16, '\0');
  size_t n_bytes = 0;
  EXPECT_EQ(kvm_get_stats_text(client, text.data(), text.size(), &n_bytes), KVM_OK);
  const size_t at = text.find("\n" + name + " ");
  EXPECT_NE(at, std::string::npos) << name;
  return at == std::string::npos ? 0 : std::strtoull(&text[at + name.size() + 2], nullptr, 10);
}

TEST(Snapshots, AreChargedToTheirUserAndCounted) {
  const TemporaryDirectory folder;
  Daemon daemon(disk_in(folder));
  ASSERT_FALSE(HasFatalFailure());
  uint64_t size_bytes = 0;
  {
    User user(daemon.socket_path(), "model");
    EXPECT_EQ(series(user.client, "kvm_saves_total{result=\"ok\"}"), 0u);
    const kvm_seq_id seq = user.make(1);
    ASSERT_EQ(kvm_seq_save(user.client, seq, "one", 0), KVM_OK) << kvm_last_error();
    size_bytes = user.snapshots().at(0).bytes;
    EXPECT_GT(series(user.client, "kvm_saved_bytes_total"), 0u);
    const uint64_t written_bytes = series(user.client, "kvm_saved_bytes_total");
    ASSERT_EQ(kvm_seq_save(user.client, seq, "two", 0), KVM_OK) << kvm_last_error();
    EXPECT_EQ(series(user.client, "kvm_saved_bytes_total"), written_bytes)
        << "pages that are there already are not written again";
    EXPECT_EQ(series(user.client, "kvm_snapshots"), 2u);
    EXPECT_EQ(series(user.client, "kvm_snapshot_bytes"), 2 * size_bytes);

    kvm_quota_params quota{};
    quota.struct_size = sizeof(quota);
    quota.whose = KVM_QUOTA_USER;
    quota.id = ::getuid();
    quota.limits.snapshot_bytes = 3 * size_bytes - 1;
    ASSERT_EQ(kvm_quota_set(user.client, &quota), KVM_OK) << kvm_last_error();
    EXPECT_EQ(kvm_seq_save(user.client, seq, "three", 0), KVM_ERR_QUOTA);
    EXPECT_NE(std::string(kvm_last_error()).find("bytes of snapshots"), std::string::npos)
        << kvm_last_error();
    ASSERT_EQ(kvm_snapshot_delete(user.client, "two"), KVM_OK) << kvm_last_error();
    EXPECT_EQ(kvm_seq_save(user.client, seq, "three", 0), KVM_OK) << kvm_last_error();
    EXPECT_EQ(series(user.client, "kvm_saves_total{result=\"ok\"}"), 3u);
    EXPECT_EQ(series(user.client, "kvm_saves_total{result=\"quota\"}"), 1u);
    EXPECT_EQ(series(user.client, "kvm_loads_total{result=\"ok\"}"), 0u);
    user.load("three");
    EXPECT_EQ(series(user.client, "kvm_loads_total{result=\"ok\"}"), 1u);
  }
  daemon.kill_hard();
  daemon.start();
  ASSERT_FALSE(HasFatalFailure());
  User user(daemon.socket_path(), "model");
  kvm_user_entry entry{};
  entry.struct_size = sizeof(entry);
  size_t count = 0;
  ASSERT_EQ(kvm_user_list(user.client, &entry, 1, &count), KVM_OK) << kvm_last_error();
  EXPECT_EQ(entry.used.snapshot_bytes, 2 * size_bytes);
  EXPECT_EQ(series(user.client, "kvm_snapshots"), 2u);
  EXPECT_EQ(series(user.client, "kvm_snapshot_bytes"), 2 * size_bytes);
  EXPECT_EQ(series(user.client, "kvm_snapshots_lost_total"), 0u);
}

kvm_prefix find_prefix(const User& user, const std::vector<kvm_prefix_hash>& hashes,
                       double prefill_rate = 0) {
  kvm_prefix_find_params params{};
  params.struct_size = sizeof(params);
  params.space = user.space;
  params.hashes = hashes.data();
  params.n_hashes = hashes.size();
  params.prefill_rate = prefill_rate;
  kvm_prefix found{};
  found.struct_size = sizeof(found);
  EXPECT_EQ(kvm_prefix_find(user.client, &params, &found), KVM_OK) << kvm_last_error();
  return found;
}

bool becomes(kvm_client* client, const std::string& name, uint64_t value) {
  for (int i = 0; i < 3000; ++i) {
    if (series(client, name) == value) {
      return true;
    }
    ::usleep(10'000);
  }
  return false;
}

TEST(Snapshots, OfPrefixesBringThemBack) {
  const TemporaryDirectory folder;
  Daemon daemon(disk_in(folder));
  ASSERT_FALSE(HasFatalFailure());
  std::vector<uint32_t> tokens(kTokens);
  for (uint32_t i = 0; i < kTokens; ++i) {
    tokens[i] = 7 * i;
  }
  std::vector<kvm_prefix_hash> hashes(kTokens / KVM_PREFIX_TOKENS);
  std::vector<float> expected;
  {
    User user(daemon.socket_path(), "model");
    kvm_prefix_hash seed{};
    ASSERT_EQ(kvm_prefix_seed(user.client, user.space, nullptr, 0, &seed), KVM_OK);
    ASSERT_EQ(kvm_prefix_hashes(&seed, tokens.data(), tokens.size(), hashes.data()), KVM_OK);
    const kvm_seq_id seq = user.make(1);
    expected = user.attend(seq);
    ASSERT_EQ(kvm_prefix_publish(user.client, seq, hashes.data(),
                                 static_cast<uint32_t>(hashes.size()), 0),
              KVM_OK)
        << kvm_last_error();
    EXPECT_EQ(find_prefix(user, hashes, 1e12).n_tokens, hashes.size() * KVM_PREFIX_TOKENS)
        << "it is in memory";
    EXPECT_EQ(kvm_seq_save(user.client, seq, ".prefix/mine", 0), KVM_ERR_INVALID);
    ASSERT_TRUE(becomes(user.client, "kvm_prefixes_saved", 1));
  }
  for (int i = 0; i < 2; ++i) {
    daemon.kill_hard();
    daemon.start();
    ASSERT_FALSE(HasFatalFailure());
    User user(daemon.socket_path(), "model");
    ASSERT_TRUE(becomes(user.client, "kvm_prefixes_restored_total", 1));
    const kvm_prefix fast = find_prefix(user, hashes, 1e12);
    EXPECT_EQ(fast.n_tokens, 0u);
    EXPECT_EQ(fast.seq, 0u);
    EXPECT_EQ(fast.n_tokens_slower, hashes.size() * KVM_PREFIX_TOKENS);
    EXPECT_GT(fast.read_ns, 0u);
    const kvm_prefix slow = find_prefix(user, hashes, 1);
    EXPECT_EQ(slow.n_tokens, hashes.size() * KVM_PREFIX_TOKENS);
    EXPECT_EQ(slow.n_tokens_slower, 0u);
    EXPECT_GT(slow.read_ns, 0u);
    EXPECT_EQ(series(user.client, "kvm_prefix_weighed_total{sooner=\"read\"}"), 1u);
    EXPECT_EQ(series(user.client, "kvm_prefix_weighed_total{sooner=\"computed\"}"), 1u);
    const kvm_prefix found = find_prefix(user, hashes);
    kvm_seq_id fork = 0;
    ASSERT_EQ(kvm_seq_fork(user.client, found.seq, KVM_POSITION_END, &fork), KVM_OK)
        << kvm_last_error();
    EXPECT_EQ(user.attend(fork), expected);
    EXPECT_EQ(user.snapshots().size(), 1u);
    if (i == 1) {
      ASSERT_EQ(kvm_seq_free(user.client, found.seq), KVM_OK) << kvm_last_error();
      EXPECT_TRUE(becomes(user.client, "kvm_snapshots", 0));
    }
  }
}

// A list that takes several messages.
TEST(Snapshots, AreListedHoweverManyThereAre) {
  const TemporaryDirectory folder;
  const Daemon daemon(disk_in(folder));
  ASSERT_FALSE(HasFatalFailure());
  User user(daemon.socket_path(), "model");
  const kvm_seq_id seq = user.make(1, 10);
  constexpr int kSnapshots = 700;
  std::vector<std::string> names;
  for (int i = 0; i < kSnapshots; ++i) {
    names.push_back(std::to_string(i));
    ASSERT_EQ(kvm_seq_save_async(user.queue, seq, names.back().c_str(), 0, 1), KVM_OK);
    ASSERT_EQ(kvm_submit(user.queue), KVM_OK);
    kvm_completion done{};
    ASSERT_EQ(kvm_wait(user.queue, &done, 1, 1, UINT64_MAX), 1);
    ASSERT_EQ(done.status, KVM_OK) << done.message;
  }
  std::sort(names.begin(), names.end());
  size_t n = 0;
  ASSERT_EQ(kvm_snapshot_list(user.client, 0, nullptr, 0, &n), KVM_OK) << kvm_last_error();
  ASSERT_EQ(n, names.size());
  std::vector<kvm_snapshot_info> list(n);
  list[0].struct_size = sizeof(list[0]);
  ASSERT_EQ(kvm_snapshot_list(user.client, KVM_LIST_ALL_CLIENTS, list.data(), n, &n), KVM_OK)
      << kvm_last_error();
  for (int i = 0; i < kSnapshots; ++i) {
    EXPECT_EQ(list[i].name, names[i]);
  }
}

TEST(Snapshots, OfAnotherUserDoNotExist) {
  if (!AnotherUser::is_possible()) {
    GTEST_SKIP() << "needs a second user";
  }
  const TemporaryDirectory folder;
  const Daemon daemon(disk_in(folder));
  ASSERT_FALSE(HasFatalFailure());
  AnotherUser::admit_to(daemon.socket_path());
  User root(daemon.socket_path(), "model");
  const kvm_seq_id seq = root.make(1);
  ASSERT_EQ(kvm_seq_save(root.client, seq, "one", 0), KVM_OK) << kvm_last_error();
  std::unique_ptr<User> other;
  {
    const AnotherUser nobody;
    other = std::make_unique<User>(daemon.socket_path(), "model");
  }
  kvm_seq_id made = 0;
  EXPECT_EQ(kvm_seq_load(other->client, other->space, "one", &made), KVM_ERR_NOT_FOUND);
  EXPECT_EQ(kvm_snapshot_delete(other->client, "one"), KVM_ERR_NOT_FOUND);
  EXPECT_EQ(other->snapshots().size(), 0u);
  size_t n = 0;
  EXPECT_EQ(kvm_snapshot_list(other->client, KVM_LIST_ALL_CLIENTS, nullptr, 0, &n),
            KVM_ERR_PERMISSION);
  // A name is each user's own.
  const kvm_seq_id theirs = other->make(2, 20);
  ASSERT_EQ(kvm_seq_save(other->client, theirs, "one", 0), KVM_OK) << kvm_last_error();
  EXPECT_EQ(root.attend(root.load("one")), root.attend(seq));
  EXPECT_EQ(other->attend(other->load("one")), other->attend(theirs));
  ASSERT_EQ(kvm_snapshot_list(root.client, KVM_LIST_ALL_CLIENTS, nullptr, 0, &n), KVM_OK);
  EXPECT_EQ(n, 2u);
  EXPECT_EQ(root.snapshots().size(), 1u);
  ASSERT_EQ(kvm_snapshot_delete(root.client, "one"), KVM_OK) << kvm_last_error();
  EXPECT_EQ(other->snapshots().size(), 1u);
}

// What the numbers do is movement_test's; here they arrive.
TEST(Priorities, AreSetByClientsOfTheUser) {
  const TemporaryDirectory folder;
  const Daemon daemon(disk_in(folder));
  ASSERT_FALSE(HasFatalFailure());
  User user(daemon.socket_path(), "model");
  User other(daemon.socket_path(), "model");
  const kvm_seq_id seq = user.make(1);
  kvm_priority_params params{};
  params.struct_size = sizeof params;
  params.seq = seq;
  const auto set = [&](kvm_client* client, uint32_t priority, uint64_t begin, uint64_t end,
                       uint64_t keep_ns = 0) {
    params.priority = priority;
    params.begin = begin;
    params.end = end;
    params.keep_ns = keep_ns;
    return kvm_seq_set_priority(client, &params);
  };
  EXPECT_EQ(set(user.client, 101, 0, 64), KVM_ERR_INVALID);
  EXPECT_NE(std::string(kvm_last_error()).find("101"), std::string::npos) << kvm_last_error();
  EXPECT_EQ(set(user.client, 1, 64, 64), KVM_ERR_INVALID);
  EXPECT_EQ(set(user.client, 1, 0, 64, (uint64_t{1} << 62) + 1), KVM_ERR_INVALID);
  params.reserved[0] = 1;
  EXPECT_EQ(set(user.client, 1, 0, 64), KVM_ERR_INVALID);
  params.reserved[0] = 0;
  EXPECT_EQ(set(other.client, 1, 0, 64), KVM_ERR_PERMISSION) << "it is not the other client's";
  // As many parts as there may be; those whose time has passed are none.
  for (uint32_t round = 0; round < 2; ++round) {
    EXPECT_EQ(set(user.client, 50, 0, KVM_POSITION_END), KVM_OK) << kvm_last_error();
    for (uint32_t i = 0; i < 16; ++i) {
      EXPECT_EQ(set(user.client, 51 + i, 128 * i, 128 * i + 64, round), KVM_OK) << kvm_last_error();
    }
    EXPECT_EQ(set(user.client, 90, 128 * 20, 128 * 20 + 1), round == 0 ? KVM_ERR_LIMIT : KVM_OK);
  }
  params.end = KVM_POSITION_END;
  ASSERT_EQ(kvm_seq_set_priority_async(user.queue, &params, 7), KVM_OK) << kvm_last_error();
  ASSERT_EQ(kvm_submit(user.queue), KVM_OK);
  kvm_completion done;
  ASSERT_EQ(kvm_wait(user.queue, &done, 1, 1, UINT64_MAX), 1);
  EXPECT_EQ(done.status, KVM_OK) << done.message;
  // What is published is for all clients of the user to use, and to keep in memory.
  ASSERT_EQ(kvm_seq_publish(user.client, seq), KVM_OK) << kvm_last_error();
  EXPECT_EQ(set(other.client, 100, 0, KVM_POSITION_END), KVM_OK) << kvm_last_error();
  EXPECT_EQ(kvm_seq_prefetch(other.client, seq), KVM_OK) << kvm_last_error();
  EXPECT_EQ(kvm_seq_free(other.client, seq), KVM_OK) << kvm_last_error();
  EXPECT_EQ(set(user.client, 1, 0, 64), KVM_ERR_STALE);
}

TEST(Snapshots, WithoutADiskAreUnsupported) {
  const Daemon daemon;
  ASSERT_FALSE(HasFatalFailure());
  User user(daemon.socket_path(), "model");
  const kvm_seq_id seq = user.make(1, 10);
  EXPECT_EQ(kvm_seq_save(user.client, seq, "one", 0), KVM_ERR_UNSUPPORTED);
  const std::string reason = kvm_last_error();
  EXPECT_NE(reason.find("disk.directories"), std::string::npos) << reason;
  // In the same words, whatever it is that needs one.
  EXPECT_EQ(kvm_seq_prefetch(user.client, seq), KVM_ERR_UNSUPPORTED);
  EXPECT_EQ(kvm_last_error(), reason);
  const kvm_priority_params dear = {
      .struct_size = sizeof(dear), .priority = 90, .seq = seq, .end = 64};
  EXPECT_EQ(kvm_seq_set_priority(user.client, &dear), KVM_ERR_UNSUPPORTED);
  EXPECT_EQ(kvm_last_error(), reason);
  size_t n = 0;
  EXPECT_EQ(kvm_snapshot_list(user.client, 0, nullptr, 0, &n), KVM_ERR_UNSUPPORTED);
  EXPECT_EQ(kvm_last_error(), reason);
}

// Rows of a version are all its number; a child saves one version after the other, and says before
// and after each which.
struct Said {
  uint32_t version;
  bool is_saved;
};

[[noreturn]] void save_versions(const std::string& socket_path, uint32_t from, int to) {
  User user(socket_path, "model");
  for (uint32_t version = from;; ++version) {
    Said said{version, false};
    if (::write(to, &said, sizeof(said)) != sizeof(said)) {
      ::_exit(1);
    }
    kvm_seq_id seq = 0;
    const std::vector<float> k(70 * user.row(), static_cast<float>(version));
    if (kvm_seq_create(user.client, user.space, nullptr, &seq) != KVM_OK ||
        user.append(seq, k, 70) != KVM_OK ||
        kvm_seq_save(user.client, seq, "v", KVM_SAVE_REPLACE) != KVM_OK ||
        kvm_seq_free(user.client, seq) != KVM_OK) {
      ::_exit(0);
    }
    said.is_saved = true;
    (void)!::write(to, &said, sizeof(said));
  }
}

// The version that is there is the last one that was answered, or one that was begun after it.
// KVM_CRASHES=n kills kvmd so many times.
TEST(Snapshots, AreNeverHalfThere) {
  const TemporaryDirectory folder;
  uint32_t begun = 0;
  uint32_t saved = 0;
  std::mt19937 random(5);
  constexpr const char* kPoints[] = {"disk/file_begun",      "disk/object_written",
                                     "disk/objects_synced",  "disk/manifest_written",
                                     "disk/manifest_synced", ""};
  const uint64_t n_rounds = number_from_environment("KVM_CRASHES", 10);
  uint64_t round = 0;
  for (; round < n_rounds && !HasFailure(); ++round) {
    const std::string point = kPoints[round % std::size(kPoints)];
    SCOPED_TRACE(std::to_string(round) + " " + point);
    ::setenv("KVM_KILL_POINT", point.c_str(), 1);
    Daemon daemon(disk_in(folder));
    ::unsetenv("KVM_KILL_POINT");
    ASSERT_FALSE(HasFatalFailure());
    int pipe[2];
    ASSERT_EQ(::pipe(pipe), 0);
    std::fflush(stdout);
    const pid_t child = ::fork();
    if (child == 0) {
      ::close(pipe[0]);
      save_versions(daemon.socket_path(), begun + 1, pipe[1]);
    }
    ::close(pipe[1]);
    if (point.empty()) {
      ::usleep(50'000 + static_cast<useconds_t>(random() % 150'000));
      daemon.kill_hard();
    }
    for (Said said{}; ::read(pipe[0], &said, sizeof(said)) == sizeof(said);) {
      (said.is_saved ? saved : begun) = said.version;
    }
    ::close(pipe[0]);
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    daemon.kill_hard();
    daemon.start();
    ASSERT_FALSE(HasFatalFailure());
    User user(daemon.socket_path(), "model");
    if (user.snapshots().empty()) {
      EXPECT_EQ(saved, 0u);
      continue;
    }
    const std::vector<float> o = user.attend(user.load("v"));
    EXPECT_TRUE(std::all_of(o.begin(), o.end(), [&](float x) { return x == o[0]; }));
    const auto found = static_cast<uint32_t>(std::lround(o[0]));  // the mean of equal rows
    EXPECT_GE(found, saved);
    EXPECT_LE(found, begun);
    std::printf("%s: %u answered, %u begun, %u found\n", point.c_str(), saved, begun, found);
  }
  std::printf("%llu rounds of a kvmd that is killed: %u versions answered\n",
              static_cast<unsigned long long>(round), saved);
  EXPECT_TRUE(saved > 2 || n_rounds < 10);
}

}  // namespace
}  // namespace kvm::testing
