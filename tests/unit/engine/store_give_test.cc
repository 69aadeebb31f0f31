// SPDX-License-Identifier: Apache-2.0
// Sequences that change hands: who may do what with them, and who pays.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "tests/unit/engine/store_testbed.h"

namespace kvm::engine {
namespace {

constexpr uint32_t kUser = 1000;
constexpr uint32_t kOther = 2000;

ClientSpec of_user(uint32_t uid, uint64_t quota_bytes = 0, uint64_t max_sequences = 0) {
  ClientSpec spec = limited(quota_bytes, max_sequences);
  spec.uid = uid;
  return spec;
}

class StoreGiveTest : public testing::Test {
 protected:
  void SetUp() override {
    space_ = store_->register_space(make_spec("given", 2, 2)).value();
    maker_ = store_->add_client(of_user(kUser));
  }
  void TearDown() override { store_->check_accounts(); }

  kvm_seq_id create(ClientId client) { return store_->create_seq(client, space_, 0).value(); }
  Sequence* use(ClientId client, kvm_seq_id id) {
    return store_->find_seq(client, id, Access::kUse).value();
  }
  kvm_seq_id prompt(ClientId client, uint64_t first, uint64_t n_tokens) {
    const kvm_seq_id id = create(client);
    EXPECT_TRUE(append_all(*store_, use(client, id), numbered(first, n_tokens)).is_ok());
    return id;
  }
  void publish(ClientId client, kvm_seq_id id, uint64_t max_pages = UINT64_MAX) {
    Sequence* seq = store_->find_seq(client, id).value();
    Result<bool> part = store_->publish_part(seq, max_pages);
    while (part.is_ok() && !part.value()) {
      store_->check_accounts();
      part = store_->publish_part(seq, max_pages);
    }
    ASSERT_TRUE(part.is_ok()) << part.status().message();
    store_->check_accounts();
  }
  Status take(ClientId client, kvm_seq_id id, uint64_t max_pages = UINT64_MAX) {
    KVM_TRY_ASSIGN(Sequence * seq, store_->find_seq(client, id, Access::kUse));
    Result<bool> part = store_->take_part(seq, client, max_pages);
    while (part.is_ok() && !part.value()) {
      store_->check_accounts();
      part = store_->take_part(seq, client, max_pages);
    }
    store_->check_accounts();
    return part.status();
  }
  uint64_t user_bytes(uint32_t uid) {
    for (const TenantUsage& usage : store_->quotas().tenants()) {
      if (usage.uid == uid) {
        return usage.used[Resource::kBytes];
      }
    }
    return 0;
  }
  void expect_tokens(ClientId client, kvm_seq_id id, std::span<const uint64_t> tokens) {
    for (uint32_t layer = 0; layer < 2; ++layer) {
      for (uint32_t head = 0; head < 2; ++head) {
        expect_content(*store_, use(client, id), layer, layer, head, tokens,
                       [](uint64_t) { return true; });
      }
    }
  }

  std::unique_ptr<Store> store_ = open_store(256 * kMiB);
  kvm_space_id space_ = 0;
  ClientId maker_ = 0;
};

TEST_F(StoreGiveTest, APublishedSequenceOutlivesItsMaker) {
  const std::vector<uint64_t> tokens = numbered(1, 1000);
  const kvm_seq_id id = prompt(maker_, 1, 1000);
  const uint64_t made_bytes = store_->client_bytes(maker_);
  ASSERT_GT(made_bytes, 0u);
  publish(maker_, id);
  EXPECT_EQ(store_->client_bytes(maker_), 0u);
  EXPECT_EQ(user_bytes(kUser), made_bytes);
  EXPECT_NE(store_->seq_info(use(maker_, id)).client_id, maker_);
  EXPECT_TRUE(store_->seq_info(use(maker_, id)).flags & KVM_SEQ_PUBLISHED);
  store_->remove_client(maker_);
  store_->check_accounts();
  EXPECT_EQ(user_bytes(kUser), made_bytes);

  const ClientId reader = store_->add_client(of_user(kUser));
  expect_tokens(reader, id, tokens);
  const kvm_seq_id chat = store_->fork_seq(use(reader, id), KVM_POSITION_END, reader).value();
  EXPECT_EQ(store_->client_bytes(reader), 0u) << "a fork pays for no page of its parent";
  std::vector<uint64_t> longer = tokens;
  longer.push_back(77);
  ASSERT_TRUE(append_all(*store_, use(reader, chat), {&longer.back(), 1}).is_ok());
  EXPECT_GT(store_->client_bytes(reader), 0u);
  expect_tokens(reader, chat, longer);
  expect_tokens(reader, id, tokens);

  store_->free_seq(use(reader, id));
  store_->check_accounts();
  EXPECT_EQ(store_->find_seq(reader, id).status().code(), KVM_ERR_STALE);
  expect_tokens(reader, chat, longer);
  store_->free_seq(use(reader, chat));
  EXPECT_EQ(user_bytes(kUser), 0u);
}

TEST_F(StoreGiveTest, OnlyTheUserMayUseItAndNobodyMayChangeIt) {
  const kvm_seq_id id = prompt(maker_, 1, 100);
  const ClientId same = store_->add_client(of_user(kUser));
  const ClientId other = store_->add_client(of_user(kOther));
  EXPECT_EQ(store_->find_seq(same, id, Access::kUse).status().code(), KVM_ERR_PERMISSION);
  publish(maker_, id);
  for (const ClientId client : {maker_, same}) {
    EXPECT_TRUE(store_->find_seq(client, id, Access::kUse).is_ok());
    const Status refused = store_->find_seq(client, id).status();
    EXPECT_EQ(refused.code(), KVM_ERR_PERMISSION);
    EXPECT_NE(refused.message().find("published"), std::string::npos) << refused.message();
    EXPECT_EQ(store_->list_seqs(client, 0, false, 0, 10).infos.size(), 1u);
  }
  EXPECT_EQ(store_->find_seq(other, id, Access::kUse).status().code(), KVM_ERR_PERMISSION);
  EXPECT_EQ(take(other, id).code(), KVM_ERR_PERMISSION);
  EXPECT_TRUE(store_->list_seqs(other, 0, false, 0, 10).infos.empty());
}

TEST_F(StoreGiveTest, WhoTakesPaysAsFarAsItsLimitsGo) {
  const kvm_seq_id id = prompt(maker_, 1, 1000);
  const uint64_t made_bytes = store_->client_bytes(maker_);
  publish(maker_, id, 3);
  const ClientId poor = store_->add_client(of_user(kUser, made_bytes - 1));
  const ClientId rich = store_->add_client(of_user(kUser, made_bytes));
  const ClientId full = store_->add_client(of_user(kUser, 0, 1));
  create(full);
  for (const ClientId refused : {poor, full}) {
    const Status status = take(refused, id, 3);
    EXPECT_EQ(status.code(), KVM_ERR_QUOTA) << status.message();
    EXPECT_EQ(store_->client_bytes(refused), 0u);
    EXPECT_TRUE(store_->seq_info(use(maker_, id)).flags & KVM_SEQ_PUBLISHED);
  }
  ASSERT_TRUE(take(rich, id, 3).is_ok());
  EXPECT_EQ(store_->client_bytes(rich), made_bytes);
  EXPECT_EQ(user_bytes(kUser), made_bytes);
  EXPECT_EQ(store_->find_seq(maker_, id, Access::kUse).status().code(), KVM_ERR_PERMISSION);
  EXPECT_TRUE(take(rich, id).is_ok()) << "of its own";
  EXPECT_TRUE(store_->truncate_seq(use(rich, id), 10).is_ok());
  store_->remove_client(rich);
  EXPECT_EQ(user_bytes(kUser), 0u);
}

// While a sequence is on its way, room for it is held: what the taker appends meanwhile cannot use
// it up.
TEST_F(StoreGiveTest, RoomIsHeldForWhatIsOnItsWay) {
  const kvm_seq_id id = prompt(maker_, 1, 640);
  const uint64_t made_bytes = store_->client_bytes(maker_);
  publish(maker_, id);
  const ClientId taker = store_->add_client(of_user(kUser, made_bytes));
  Sequence* seq = use(taker, id);
  const kvm_seq_id own = create(taker);
  bool is_held = false;
  Result<bool> part = store_->take_part(seq, taker, 2);
  while (part.is_ok() && !part.value()) {
    const bool is_taken = store_->seq_info(seq).client_id == taker;
    if (is_taken) {
      is_held = true;
      EXPECT_EQ(append_all(*store_, use(taker, own), numbered(9000, 64)).code(), KVM_ERR_QUOTA);
    }
    store_->check_accounts();
    part = store_->take_part(seq, taker, 2);
  }
  ASSERT_TRUE(part.is_ok()) << part.status().message();
  EXPECT_TRUE(is_held);
  EXPECT_EQ(store_->client_bytes(taker), made_bytes);
}

// Two forks that share pages are given at once, to different accounts and back: each page has one
// payer at any time, and no account is charged beyond its limit.
TEST_F(StoreGiveTest, SharedPagesGoWithOneOfThem) {
  const kvm_seq_id parent = prompt(maker_, 1, 1280);
  const kvm_seq_id child = store_->fork_seq(use(maker_, parent), KVM_POSITION_END).value();
  ASSERT_TRUE(append_all(*store_, use(maker_, child), numbered(5000, 640)).is_ok());
  const uint64_t all_bytes = store_->client_bytes(maker_);
  Sequence* first = use(maker_, parent);
  Sequence* second = use(maker_, child);
  bool is_first_done = false;
  bool is_second_done = false;
  while (!is_first_done || !is_second_done) {
    is_first_done = is_first_done || store_->publish_part(first, 5).value();
    store_->check_accounts();
    is_second_done = is_second_done || store_->publish_part(second, 3).value();
    store_->check_accounts();
  }
  EXPECT_EQ(store_->client_bytes(maker_), 0u);
  EXPECT_EQ(user_bytes(kUser), all_bytes);

  // The first to be taken brings the pages that both have; they stay with its taker.
  const ClientId taker = store_->add_client(of_user(kUser));
  ASSERT_TRUE(take(taker, child, 7).is_ok());
  EXPECT_EQ(store_->client_bytes(taker), all_bytes);
  store_->remove_client(taker);
  store_->check_accounts();
  EXPECT_GT(user_bytes(kUser), 0u) << "the library's sequence still has them";
  expect_tokens(maker_, parent, numbered(1, 1280));
  ASSERT_TRUE(take(maker_, parent).is_ok());
  EXPECT_EQ(store_->client_bytes(maker_), 0u) << "who is gone pays on, as part of the user's sum";
  store_->free_seq(use(maker_, parent));
  store_->housekeep();
  EXPECT_EQ(user_bytes(kUser), 0u);
}

TEST_F(StoreGiveTest, ObservationsGoAlongAndAreCopiedBeforeTheyChange) {
  const kvm_seq_id id = prompt(maker_, 1, 100);
  const std::vector<float> sums(2 * 100, 0.5f);
  const ObserveInput input = {.layer = 0, .n_columns = 100, .column_sums = sums.data()};
  ASSERT_TRUE(store_->observe(use(maker_, id), input).is_ok());
  publish(maker_, id);
  const ClientId other = store_->add_client(of_user(kUser));
  const kvm_seq_id fork = store_->fork_seq(use(other, id), KVM_POSITION_END, other).value();
  store_->free_seq(use(maker_, id));
  store_->check_accounts();
  // The library paid for it, and is not charged for what another adds.
  ASSERT_TRUE(store_->observe(use(other, fork), input).is_ok());
  store_->check_accounts();
  EXPECT_EQ(store_->observed(use(other, fork), 0).column_sums[0], 1.0f);
  ASSERT_TRUE(store_->truncate_seq(use(other, fork), 50).is_ok());
}

// Things of no bytes name their payer, too.
TEST_F(StoreGiveTest, WhatIsEmptyKeepsItsAccount) {
  const kvm_seq_id id = prompt(maker_, 1, 1);
  const std::vector<float> q(2 * 8, 1.0f);
  const ObserveInput input = {.layer = 0, .query_position = 0, .n_rows = 1, .q = q.data()};
  ASSERT_TRUE(store_->observe(use(maker_, id), input).is_ok());
  ASSERT_TRUE(store_->truncate_seq(use(maker_, id), 0).is_ok());
  publish(maker_, id);
  const ClientId other = store_->add_client(of_user(kUser));
  const kvm_seq_id fork = store_->fork_seq(use(other, id), KVM_POSITION_END, other).value();
  store_->free_seq(use(other, id));
  store_->remove_client(maker_);
  store_->housekeep();
  store_->check_accounts();
  ASSERT_TRUE(append_all(*store_, use(other, fork), numbered(1, 10)).is_ok());
  ASSERT_TRUE(store_->observe(use(other, fork), input).is_ok());
  store_->free_seq(use(other, fork));
  store_->housekeep();
  EXPECT_EQ(user_bytes(kUser), 0u);
}

// Lowering a limit below what is held takes nothing away, and a take beyond it drops no index.
TEST_F(StoreGiveTest, ALimitBelowWhatIsHeldRefuses) {
  const kvm_seq_id id = prompt(maker_, 1, 100);
  const uint64_t made_bytes = store_->client_bytes(maker_);
  publish(maker_, id);
  const ClientId taker = store_->add_client(of_user(kUser));
  const kvm_seq_id own = prompt(taker, 7, 100);
  LimitChanges lower;
  lower[Resource::kBytes] = 1;
  ASSERT_TRUE(store_->quotas().set_client_limits(taker, lower).is_ok());
  const Status status = take(taker, id);
  EXPECT_EQ(status.code(), KVM_ERR_QUOTA);
  EXPECT_NE(status.message().find(std::to_string(made_bytes)), std::string::npos)
      << status.message();
  expect_tokens(taker, own, numbered(7, 100));
}

TEST_F(StoreGiveTest, TheLibraryHasItsOwnLimitOfSequences) {
  StoreOptions options;
  options.host_capacity_bytes = 64 * kMiB;
  options.max_sequences_per_client = 2;
  const std::unique_ptr<Store> store = Store::open(options).value();
  const kvm_space_id space = store->register_space(make_spec("small", 1, 1)).value();
  const ClientId client = store->add_client(of_user(kUser));
  for (int i = 0; i < 3; ++i) {
    const kvm_seq_id id = store->create_seq(client, space, 0).value();
    const Status status =
        store->publish_part(store->find_seq(client, id).value(), UINT64_MAX).status();
    EXPECT_EQ(status.code(), i < 2 ? KVM_OK : KVM_ERR_QUOTA) << status.message();
    store->check_accounts();
  }
}

}  // namespace
}  // namespace kvm::engine
