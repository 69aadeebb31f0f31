// SPDX-License-Identifier: Apache-2.0
// Part 11 of kvm.h over both libraries: clients, users, limits, eviction, configuration.
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <iterator>
#include <numeric>
#include <string>
#include <vector>

#include "tests/integration/abi_rig.h"

namespace kvm::testing {
namespace {

constexpr uint32_t kTokens = 100;

class AbiAdmin : public ServiceTest {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(open("abi-admin-test"));
    space_ = register_space(client_, "admin", geometry_);
  }

  kvm_status append(kvm_seq_id seq, uint32_t n) {
    const std::vector<float> values(size_t{n} * geometry_.n_kv_heads * geometry_.dim, 1.0f);
    kvm_item item{};
    item.seq = seq;
    item.append_position = KVM_POSITION_END;
    item.n_append = n;
    kvm_step_params step{};
    step.struct_size = sizeof(step);
    step.space = space_;
    step.n_items = 1;
    step.items = &item;
    step.k = tensor_of(values);
    step.v = tensor_of(values);
    return kvm_append(queue_, &step);
  }
  kvm_seq_id sequence() {
    kvm_seq_id seq = 0;
    EXPECT_EQ(kvm_seq_create(client_, space_, nullptr, &seq), KVM_OK) << kvm_last_error();
    EXPECT_EQ(append(seq, kTokens), KVM_OK) << kvm_last_error();
    return seq;
  }
  kvm_client_entry own_entry() {
    std::array<kvm_client_entry, 8> entries{};
    entries[0].struct_size = sizeof(entries[0]);
    size_t count = 0;
    EXPECT_EQ(kvm_client_list(client_, entries.data(), entries.size(), &count), KVM_OK)
        << kvm_last_error();
    EXPECT_EQ(count, 1u);
    return entries[0];
  }
  uint64_t client_id() {
    kvm_client_info info{};
    info.struct_size = sizeof(info);
    EXPECT_EQ(kvm_client_get_info(client_, &info), KVM_OK);
    return info.client_id;
  }
  kvm_evict_result evict(uint32_t what, uint64_t id) {
    kvm_evict_params params{};
    params.struct_size = sizeof(params);
    params.what = what;
    params.id = id;
    kvm_evict_result result{};
    result.struct_size = sizeof(result);
    EXPECT_EQ(kvm_evict(client_, &params, &result), KVM_OK) << kvm_last_error();
    return result;
  }

  Geometry geometry_;
  kvm_space_id space_ = 0;
};

TEST_F(AbiAdmin, ListsSayWhoHoldsWhat) {
  sequence();
  sequence();
  const kvm_client_entry entry = own_entry();
  EXPECT_EQ(entry.client_id, client_id());
  EXPECT_EQ(entry.uid, ::getuid());
  EXPECT_EQ(entry.pid, static_cast<uint32_t>(::getpid()));
  EXPECT_STREQ(entry.name, is_embedded() ? "embedded" : "abi-admin-test");
  EXPECT_EQ(entry.used.sequences, 2u);
  EXPECT_GT(entry.used.bytes, 0u);
  EXPECT_EQ(entry.n_refused, 0u);
  EXPECT_EQ(entry.n_requests, 4u) << "two sequences made, two appends";
  EXPECT_EQ(
      std::accumulate(std::begin(entry.n_by_duration), std::end(entry.n_by_duration), uint64_t{0}),
      4u)
      << "each of them once";
  EXPECT_EQ(append(999, kTokens), KVM_ERR_NOT_FOUND) << "a sequence that there is not";
  const kvm_client_entry later = own_entry();
  EXPECT_EQ(
      std::accumulate(std::begin(later.n_by_duration), std::end(later.n_by_duration), uint64_t{0}),
      5u)
      << "what is refused has taken a time, too";

  kvm_user_entry user{};
  user.struct_size = sizeof(user);
  size_t count = 0;
  ASSERT_EQ(kvm_user_list(client_, &user, 1, &count), KVM_OK) << kvm_last_error();
  EXPECT_EQ(count, 1u);
  EXPECT_EQ(user.uid, ::getuid());
  EXPECT_EQ(user.n_clients, 1u);
  EXPECT_EQ(user.used.sequences, 2u);
  EXPECT_EQ(user.used.bytes, entry.used.bytes);
}

TEST_F(AbiAdmin, LimitsAreSetAndHold) {
  const kvm_seq_id seq = sequence();
  kvm_quota_params params{};
  params.struct_size = sizeof(params);
  params.whose = KVM_QUOTA_CLIENT;
  params.id = client_id();
  params.limits.sequences = 1;
  ASSERT_EQ(kvm_quota_set(client_, &params), KVM_OK) << kvm_last_error();
  kvm_seq_id other = 0;
  EXPECT_EQ(kvm_seq_create(client_, space_, nullptr, &other), KVM_ERR_QUOTA);
  EXPECT_EQ(own_entry().limits.sequences, 1u);
  EXPECT_EQ(own_entry().n_refused, 1u);

  // Below what is held: nothing is taken away, nothing more is given.
  params.limits = {};
  params.whose = KVM_QUOTA_USER;
  params.id = ::getuid();
  params.limits.bytes = 1;
  ASSERT_EQ(kvm_quota_set(client_, &params), KVM_OK) << kvm_last_error();
  EXPECT_EQ(append(seq, 1000), KVM_ERR_QUOTA);
  kvm_seq_info info{};
  info.struct_size = sizeof(info);
  ASSERT_EQ(kvm_seq_get_info(client_, seq, &info), KVM_OK);
  EXPECT_EQ(info.n_tokens_max, kTokens);
  params.limits.bytes = KVM_NO_LIMIT;
  ASSERT_EQ(kvm_quota_set(client_, &params), KVM_OK);
  EXPECT_EQ(append(seq, 1000), KVM_OK) << kvm_last_error();
}

TEST_F(AbiAdmin, EvictedSequencesAreStale) {
  const kvm_seq_id first = sequence();
  const kvm_seq_id second = sequence();
  sequence();
  const kvm_evict_result one = evict(KVM_EVICT_SEQ, first);
  EXPECT_EQ(one.n_sequences, 1u);
  EXPECT_GT(one.bytes, 0u);
  EXPECT_EQ(append(first, 1), KVM_ERR_STALE);
  EXPECT_EQ(append(second, 1), KVM_OK) << kvm_last_error();
  EXPECT_EQ(evict(KVM_EVICT_CLIENT, client_id()).n_sequences, 2u);
  EXPECT_EQ(append(second, 1), KVM_ERR_STALE);
  sequence();
  EXPECT_EQ(evict(KVM_EVICT_SPACE, space_).n_sequences, 1u);
  EXPECT_EQ(evict(KVM_EVICT_SPACE, space_).n_sequences, 0u);
  EXPECT_EQ(own_entry().used.sequences, 0u);
  EXPECT_EQ(own_entry().used.bytes, 0u);
}

TEST_F(AbiAdmin, WhatCannotBeIsRefusedWithTheReason) {
  const auto evict_status = [&](uint32_t what, uint64_t id, uint32_t flags) {
    kvm_evict_params params{};
    params.struct_size = sizeof(params);
    params.what = what;
    params.id = id;
    params.flags = flags;
    return kvm_evict(client_, &params, nullptr);
  };
  EXPECT_EQ(evict_status(0, 1, 0), KVM_ERR_INVALID);
  EXPECT_EQ(evict_status(4, 1, 0), KVM_ERR_INVALID);
  EXPECT_EQ(evict_status(KVM_EVICT_SEQ, 1, KVM_EVICT_DISCONNECT), KVM_ERR_INVALID);
  EXPECT_EQ(evict_status(KVM_EVICT_CLIENT, client_id(), 2), KVM_ERR_INVALID);
  EXPECT_EQ(evict_status(KVM_EVICT_CLIENT, 123456, 0), KVM_ERR_NOT_FOUND);
  EXPECT_NE(std::string(kvm_last_error()).find("0x1e240"), std::string::npos);
  EXPECT_NE(evict_status(KVM_EVICT_SPACE, 123456, 0), KVM_OK);
  EXPECT_NE(evict_status(KVM_EVICT_SEQ, 123456, 0), KVM_OK);

  const auto quota_status = [&](uint32_t whose, uint64_t id, uint64_t queues) {
    kvm_quota_params params{};
    params.struct_size = sizeof(params);
    params.whose = whose;
    params.id = id;
    params.limits.queues = queues;
    return kvm_quota_set(client_, &params);
  };
  EXPECT_EQ(quota_status(3, 1, 1), KVM_ERR_INVALID);
  EXPECT_EQ(quota_status(KVM_QUOTA_CLIENT, client_id(), 0), KVM_ERR_INVALID);
  EXPECT_EQ(quota_status(KVM_QUOTA_USER, uint64_t{1} << 32, 1), KVM_ERR_INVALID);
  EXPECT_EQ(quota_status(KVM_QUOTA_CLIENT, 123456, 1), KVM_ERR_NOT_FOUND);
  EXPECT_EQ(kvm_quota_set(client_, nullptr), KVM_ERR_INVALID);
  kvm_quota_params saved{};
  saved.struct_size = sizeof(saved);
  saved.whose = KVM_QUOTA_CLIENT;
  saved.id = client_id();
  saved.limits.snapshot_bytes = 1;
  EXPECT_EQ(kvm_quota_set(client_, &saved), KVM_ERR_INVALID) << "it is of users";
}

// The daemon clears the arenas of a client that it closes; who gives pieces of them back, or has
// requests staged there, finds no more than that it is disconnected.
TEST_F(AbiAdmin, WhoIsDisconnectedGivesItsBuffersBack) {
  if (is_embedded()) {
    return;
  }
  kvm_client* evicted = connect_to_daemon(*daemon_, "evicted");
  ASSERT_NE(evicted, nullptr);
  const Geometry geometry;
  const kvm_space_id space = register_space(evicted, "evicted", geometry);
  kvm_seq_id seq = 0;
  ASSERT_EQ(kvm_seq_create(evicted, space, nullptr, &seq), KVM_OK);
  kvm_queue* queue = nullptr;
  kvm_arena* arena = nullptr;
  ASSERT_EQ(kvm_queue_create(evicted, nullptr, &queue), KVM_OK);
  ASSERT_EQ(kvm_arena_create(evicted, nullptr, &arena), KVM_OK);
  std::array<kvm_buffer, 8> buffers{};
  for (kvm_buffer& buffer : buffers) {
    ASSERT_EQ(kvm_arena_alloc(arena, 10'000, 0, &buffer), KVM_OK);
  }
  auto* last = static_cast<volatile char*>(kvm_arena_data(arena, buffers.back()));
  last[9'999] = 1;
  const std::vector<float> rows(size_t{geometry.n_kv_heads} * geometry.dim, 1.0f);
  kvm_item item{};
  item.seq = seq;
  item.append_position = KVM_POSITION_END;
  item.n_append = 1;
  kvm_step_params step{};
  step.struct_size = sizeof(step);
  step.space = space;
  step.n_items = 1;
  step.items = &item;
  step.k = step.v = tensor_of(rows);
  ASSERT_EQ(kvm_append_async(queue, &step, 1), KVM_OK) << kvm_last_error();
  kvm_client_info info{};
  info.struct_size = sizeof(info);
  ASSERT_EQ(kvm_client_get_info(evicted, &info), KVM_OK);

  kvm_evict_params params{};
  params.struct_size = sizeof(params);
  params.what = KVM_EVICT_CLIENT;
  params.id = info.client_id;
  params.flags = KVM_EVICT_DISCONNECT;
  ASSERT_EQ(kvm_evict(client_, &params, nullptr), KVM_OK) << kvm_last_error();
  for (int i = 0; i < 20'000 && last[9'999] != 0; ++i) {
    ::usleep(1000);
  }
  EXPECT_EQ(last[9'999], 0) << "the daemon has not taken the memory back";
  kvm_completion done{};
  (void)kvm_submit(queue);
  ASSERT_EQ(kvm_wait(queue, &done, 1, 1, UINT64_MAX), 1);
  EXPECT_EQ(done.status, KVM_ERR_DISCONNECTED);
  for (const kvm_buffer& buffer : buffers) {
    kvm_arena_free(arena, buffer);
  }
  kvm_queue_destroy(queue);
  kvm_arena_destroy(arena);
  kvm_client_close(evicted);
}

TEST_F(AbiAdmin, ConfigurationIsTheDaemons) {
  size_t length = 0;
  const kvm_status status = kvm_get_config_text(client_, nullptr, 0, &length);
  if (is_embedded()) {
    EXPECT_EQ(status, KVM_ERR_UNSUPPORTED);
    return;
  }
  ASSERT_EQ(status, KVM_OK) << kvm_last_error();
  std::string text(length + 1, '\0');
  ASSERT_EQ(kvm_get_config_text(client_, text.data(), text.size(), &length), KVM_OK);
  EXPECT_NE(text.find("\"name\": \"host_capacity\""), std::string::npos) << text;
  EXPECT_NE(text.find("\"origin\": \"command line\""), std::string::npos) << text;
}

}  // namespace
}  // namespace kvm::testing
