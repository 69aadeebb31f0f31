// SPDX-License-Identifier: Apache-2.0
// What bindings and event loops stand on: sequences made and freed by asynchronous requests, a
// sentence for each completion, descriptors, waits that can be interrupted, tensors whose tokens
// lie behind those of other sequences, attends that leave no trace. Built like abi_test.cc.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <map>
#include <thread>

#include "tests/integration/abi_rig.h"

namespace kvm::testing {
namespace {

constexpr uint64_t kLongNs = 60'000'000'000;

bool is_readable(int fd, int timeout_ms) {
  pollfd watched{.fd = fd, .events = POLLIN, .revents = 0};
  return ::poll(&watched, 1, timeout_ms) == 1;
}

class AbiAsync : public ServiceTest {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(open("async-test"));
    space_ = register_space(client_, "async", geometry_);
  }

  // Everything outstanding, by user_data. Messages are copied.
  struct Taken {
    kvm_completion completion;
    std::string message;
  };
  std::map<uint64_t, Taken> take_all(kvm_queue* queue) {
    std::map<uint64_t, Taken> taken;
    EXPECT_EQ(kvm_submit(queue), KVM_OK) << kvm_last_error();
    std::array<kvm_completion, 16> completions;
    for (;;) {
      const int32_t n = kvm_wait(queue, completions.data(), completions.size(), 1, kLongNs);
      EXPECT_GE(n, 0) << kvm_last_error();
      if (n <= 0) {
        return taken;
      }
      for (int32_t i = 0; i < n; ++i) {
        taken[completions[i].user_data] = {completions[i], completions[i].message};
      }
    }
  }

  kvm_step_params step_params(const kvm_item* items, uint32_t n_items) const {
    kvm_step_params params{};
    params.struct_size = sizeof(params);
    params.space = space_;
    params.n_items = n_items;
    params.items = items;
    return params;
  }

  kvm_seq_id make_seq() {
    kvm_seq_id seq = 0;
    EXPECT_EQ(kvm_seq_create(client_, space_, nullptr, &seq), KVM_OK) << kvm_last_error();
    return seq;
  }

  // Appends n random tokens to layer 0.
  void append(kvm_seq_id seq, uint32_t n) {
    const auto k = random_floats(&random_, size_t{n} * geometry_.n_kv_heads * geometry_.dim);
    kvm_item item{};
    item.seq = seq;
    item.append_position = KVM_POSITION_END;
    item.n_append = n;
    kvm_step_params params = step_params(&item, 1);
    params.k = tensor_of(k);
    params.v = tensor_of(k);
    ASSERT_EQ(kvm_append(queue_, &params), KVM_OK) << kvm_last_error();
  }

  size_t count_seqs() {
    size_t n = 0;
    EXPECT_EQ(kvm_seq_list(client_, space_, 0, nullptr, 0, &n), KVM_OK) << kvm_last_error();
    return n;
  }

  kvm_status status_of(kvm_seq_id seq) {
    kvm_seq_info info{};
    info.struct_size = sizeof(info);
    return kvm_seq_get_info(client_, seq, &info);
  }

  Geometry geometry_{.n_layers = 1};
  std::mt19937 random_{5};
  kvm_space_id space_ = 0;
};

TEST_F(AbiAsync, SequencesAreMadeForkedObservedAndFreed) {
  kvm_seq_params params{};
  params.struct_size = sizeof(params);
  params.reserve = 1000;
  ASSERT_EQ(kvm_seq_create_async(queue_, space_, &params, 1), KVM_OK) << kvm_last_error();
  ASSERT_EQ(kvm_seq_create_async(queue_, space_, nullptr, 2), KVM_OK) << kvm_last_error();
  auto taken = take_all(queue_);
  ASSERT_EQ(taken.size(), 2u);
  const kvm_seq_id first = taken[1].completion.seq;
  const kvm_seq_id second = taken[2].completion.seq;
  EXPECT_EQ(taken[1].completion.status, KVM_OK);
  EXPECT_NE(first, 0u);
  EXPECT_NE(second, 0u);
  EXPECT_NE(first, second);
  EXPECT_EQ(taken[1].message, "");

  append(first, 70);
  const auto q = random_floats(&random_, size_t{3} * geometry_.n_q_heads * geometry_.dim);
  kvm_observe_params observe{};
  observe.struct_size = sizeof(observe);
  observe.seq = first;
  observe.n_rows = 3;
  observe.query_position = 60;
  observe.q = tensor_of(q);
  ASSERT_EQ(kvm_observe_async(queue_, &observe, 3), KVM_OK) << kvm_last_error();
  ASSERT_EQ(kvm_seq_fork_async(queue_, first, 65, 4), KVM_OK);
  ASSERT_EQ(kvm_seq_free_async(queue_, second, 5), KVM_OK);
  taken = take_all(queue_);
  ASSERT_EQ(taken.size(), 3u);
  for (const auto& [number, one] : taken) {
    EXPECT_EQ(one.completion.status, KVM_OK) << number << ": " << one.message;
    EXPECT_EQ(one.completion.seq != 0, number == 4);
    for (const uint64_t word : one.completion.reserved) {
      EXPECT_EQ(word, 0u);
    }
  }
  kvm_seq_info info{};
  info.struct_size = sizeof(info);
  ASSERT_EQ(kvm_seq_get_info(client_, taken[4].completion.seq, &info), KVM_OK);
  EXPECT_EQ(info.n_tokens_max, 65u);
  EXPECT_EQ(info.n_rows_observed, 3u) << "what came before the fork on the queue is in it";
  EXPECT_EQ(status_of(second), KVM_ERR_STALE);
  EXPECT_EQ(status_of(first), KVM_OK);
}

TEST_F(AbiAsync, PublishAndTake) {
  const kvm_seq_id seq = make_seq();
  append(seq, 100);
  ASSERT_EQ(kvm_seq_publish_async(queue_, seq, 1), KVM_OK) << kvm_last_error();
  ASSERT_EQ(kvm_seq_truncate_async(queue_, seq, 1, 2), KVM_OK);
  ASSERT_EQ(kvm_seq_take_async(queue_, seq, 3), KVM_OK) << kvm_last_error();
  ASSERT_EQ(kvm_seq_truncate_async(queue_, seq, 50, 4), KVM_OK);
  ASSERT_EQ(kvm_submit(queue_), KVM_OK);
  std::array<kvm_completion, 4> completions;
  ASSERT_EQ(kvm_wait(queue_, completions.data(), 4, 4, kLongNs), 4) << kvm_last_error();
  for (const kvm_completion& completion : completions) {
    EXPECT_EQ(completion.status, completion.user_data == 2 ? KVM_ERR_PERMISSION : KVM_OK)
        << completion.user_data;
  }
  kvm_seq_info info{};
  info.struct_size = sizeof(info);
  ASSERT_EQ(kvm_seq_get_info(client_, seq, &info), KVM_OK) << kvm_last_error();
  EXPECT_EQ(info.flags & KVM_SEQ_PUBLISHED, 0u);
  EXPECT_EQ(info.n_tokens_max, 50u);
  EXPECT_EQ(kvm_seq_free(client_, seq), KVM_OK);
}

// What is dropped is missed until the engine appends it again, and is what it was then.
TEST_F(AbiAsync, TokensAreDroppedAndRestored) {
  constexpr uint32_t kTokens = 320;
  const size_t row = size_t{geometry_.n_kv_heads} * geometry_.dim;
  const kvm_seq_id seq = make_seq();
  const auto k = random_floats(&random_, kTokens * row);
  const auto v = random_floats(&random_, kTokens * row);
  const auto write = [&](uint64_t position, uint32_t first, uint32_t n, uint32_t flags) {
    kvm_item item{};
    item.seq = seq;
    item.append_position = position;
    item.n_append = n;
    item.append_row = first;
    item.flags = flags;
    kvm_step_params params = step_params(&item, 1);
    params.k = tensor_of(k);
    params.v = tensor_of(v);
    return kvm_append(queue_, &params);
  };
  const auto q = random_floats(&random_, size_t{geometry_.n_q_heads} * geometry_.dim);
  std::vector<float> o(q.size());
  const auto attend = [&](std::vector<kvm_range> hidden) {
    kvm_item item{};
    item.seq = seq;
    item.n_query = 1;
    item.query_position = KVM_POSITION_END;
    item.flags = KVM_ITEM_EXCLUDE_RANGES;
    item.n_ranges = static_cast<uint32_t>(hidden.size());
    kvm_step_params params = step_params(&item, 1);
    params.ranges = hidden.data();
    params.n_ranges = item.n_ranges;
    params.q = tensor_of(q);
    params.o = tensor_of(o);
    return kvm_attend(queue_, &params, nullptr);
  };
  ASSERT_EQ(write(KVM_POSITION_END, 0, kTokens, 0), KVM_OK) << kvm_last_error();
  ASSERT_EQ(attend({}), KVM_OK) << kvm_last_error();
  const std::vector<float> whole = o;
  ASSERT_EQ(kvm_seq_drop(client_, seq, 64, 192), KVM_OK) << kvm_last_error();
  EXPECT_EQ(attend({}), KVM_ERR_PARTIAL);
  EXPECT_STREQ(kvm_last_error(),
               "a query at position 319 of layer 0 sees tokens [64, 192), which kvm_seq_drop has "
               "dropped: restore them (KVM_ITEM_RESTORE), or leave them out "
               "(KVM_ITEM_EXCLUDE_RANGES)");
  EXPECT_EQ(attend({{64, 192}}), KVM_OK) << kvm_last_error();
  EXPECT_NE(o, whole);
  EXPECT_EQ(kvm_seq_drop(client_, seq, 0, kTokens + 1), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_seq_drop(client_, seq + 1000, 0, 64), KVM_ERR_NOT_FOUND);
  ASSERT_EQ(kvm_seq_drop_async(queue_, seq, 192, KVM_POSITION_END, 1), KVM_OK);
  ASSERT_EQ(kvm_seq_drop_async(queue_, seq, 5, 4, 2), KVM_OK);
  auto taken = take_all(queue_);
  EXPECT_EQ(taken[1].completion.status, KVM_OK);
  EXPECT_EQ(taken[2].completion.status, KVM_ERR_INVALID);
  EXPECT_EQ(write(100, 100, 64, KVM_ITEM_RESTORE), KVM_ERR_INVALID);
  ASSERT_EQ(write(256, 256, 64, KVM_ITEM_RESTORE), KVM_OK) << kvm_last_error();
  ASSERT_EQ(write(64, 64, 192, KVM_ITEM_RESTORE), KVM_OK) << kvm_last_error();
  ASSERT_EQ(attend({}), KVM_OK) << kvm_last_error();
  EXPECT_EQ(o, whole);
  // Whose prompt others find, or fork, has no gaps that they do not know of.
  ASSERT_EQ(kvm_seq_drop(client_, seq, 0, 64), KVM_OK);
  kvm_prefix_hash hash{};
  hash.bytes[0] = 1;
  EXPECT_EQ(kvm_prefix_publish(client_, seq, &hash, 1, 0), KVM_ERR_PARTIAL) << kvm_last_error();
  ASSERT_EQ(write(0, 0, 64, KVM_ITEM_RESTORE), KVM_OK) << kvm_last_error();
  ASSERT_EQ(kvm_seq_publish(client_, seq), KVM_OK) << kvm_last_error();
  EXPECT_EQ(kvm_seq_drop(client_, seq, 0, 64), KVM_ERR_PERMISSION);
  EXPECT_EQ(kvm_seq_free(client_, seq), KVM_OK);
}

// Neither an engine in this process nor a kvmd without a disk keeps anything.
TEST_F(AbiAsync, WithoutADiskNothingIsSavedOrPrefetched) {
  const kvm_seq_id seq = make_seq();
  append(seq, 10);
  kvm_seq_id made = 0;
  size_t count = 0;
  EXPECT_EQ(kvm_seq_save(client_, seq, "one", KVM_SAVE_REPLACE), KVM_ERR_UNSUPPORTED);
  EXPECT_STRNE(kvm_last_error(), "");
  EXPECT_EQ(kvm_seq_load(client_, space_, "one", &made), KVM_ERR_UNSUPPORTED);
  EXPECT_EQ(kvm_snapshot_delete(client_, "one"), KVM_ERR_UNSUPPORTED);
  EXPECT_EQ(kvm_snapshot_list(client_, 0, nullptr, 0, &count), KVM_ERR_UNSUPPORTED);
  EXPECT_EQ(kvm_seq_prefetch(client_, seq), KVM_ERR_UNSUPPORTED);
  kvm_priority_params priority{};
  priority.struct_size = sizeof priority;
  priority.seq = seq;
  priority.end = KVM_POSITION_END;
  EXPECT_EQ(kvm_seq_set_priority(client_, &priority), KVM_ERR_UNSUPPORTED);
  EXPECT_EQ(kvm_seq_set_priority(client_, nullptr), KVM_ERR_INVALID);
  // What is wrong by itself is told first.
  EXPECT_EQ(kvm_seq_save(client_, seq, "", 0), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_seq_save(client_, seq, "one", 2), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_seq_load(client_, space_, nullptr, &made), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_seq_load(client_, space_, "one", nullptr), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_snapshot_delete(client_, std::string(128, 'n').c_str()), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_snapshot_list(client_, 2, nullptr, 0, &count), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_snapshot_list(client_, 0, nullptr, 0, nullptr), KVM_ERR_INVALID);

  ASSERT_EQ(kvm_seq_save_async(queue_, seq, "one", 0, 1), KVM_OK) << kvm_last_error();
  ASSERT_EQ(kvm_seq_load_async(queue_, space_, "one", 2), KVM_OK);
  ASSERT_EQ(kvm_snapshot_delete_async(queue_, "one", 3), KVM_OK);
  ASSERT_EQ(kvm_seq_prefetch_async(queue_, seq, 4), KVM_OK);
  ASSERT_EQ(kvm_seq_set_priority_async(queue_, &priority, 5), KVM_OK);
  priority.end = 0;
  EXPECT_EQ(kvm_seq_set_priority_async(queue_, &priority, 6), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_seq_save_async(queue_, seq, nullptr, 0, 5), KVM_ERR_INVALID);
  ASSERT_EQ(kvm_submit(queue_), KVM_OK);
  std::array<kvm_completion, 5> completions;
  ASSERT_EQ(kvm_wait(queue_, completions.data(), 5, 5, kLongNs), 5) << kvm_last_error();
  for (const kvm_completion& completion : completions) {
    EXPECT_EQ(completion.status, KVM_ERR_UNSUPPORTED) << completion.user_data;
    EXPECT_STRNE(completion.message, "");
    EXPECT_EQ(completion.seq, 0u);
  }
  EXPECT_EQ(kvm_seq_free(client_, seq), KVM_OK) << "and nothing has happened to it";
}

TEST_F(AbiAsync, EachCompletionHasItsSentence) {
  const kvm_seq_id seq = make_seq();
  append(seq, 10);
  kvm_item item{};
  item.seq = seq;
  item.append_position = 7;
  item.n_append = 1;
  const std::vector<float> k(size_t{geometry_.n_kv_heads} * geometry_.dim, 1.0f);
  kvm_step_params hole = step_params(&item, 1);
  hole.k = hole.v = tensor_of(k);
  ASSERT_EQ(kvm_append_async(queue_, &hole, 1), KVM_OK) << kvm_last_error();
  ASSERT_EQ(kvm_nop_async(queue_, 2), KVM_OK);
  ASSERT_EQ(kvm_seq_commit_async(queue_, seq, 4711, 3), KVM_OK);
  ASSERT_EQ(kvm_seq_free_async(queue_, 0x123456789, 4), KVM_OK);
  kvm_seq_params params{};
  params.struct_size = sizeof(params);
  params.reserve = uint64_t{1} << 39;
  ASSERT_EQ(kvm_seq_create_async(queue_, space_, &params, 5), KVM_OK) << kvm_last_error();
  ASSERT_EQ(kvm_submit(queue_), KVM_OK);
  std::array<kvm_completion, 5> completions;
  ASSERT_EQ(kvm_wait(queue_, completions.data(), 5, 5, kLongNs), 5) << kvm_last_error();
  const std::string last = kvm_last_error();
  std::string of_last_failed;
  std::map<uint64_t, std::string> messages;
  for (const kvm_completion& completion : completions) {
    messages[completion.user_data] = completion.message;
    EXPECT_EQ(completion.seq, 0u);
    EXPECT_EQ(completion.status == KVM_OK, completion.user_data == 2);
    if (completion.status != KVM_OK) {
      of_last_failed = completion.message;
    }
  }
  EXPECT_NE(messages[1].find('7'), std::string::npos) << messages[1];
  EXPECT_EQ(messages[2], "");
  EXPECT_NE(messages[3].find("4711"), std::string::npos) << messages[3];
  EXPECT_NE(messages[4].find("0x123456789"), std::string::npos) << messages[4];
  EXPECT_NE(messages[5].find("549755813888"), std::string::npos) << messages[5];
  EXPECT_EQ(last, of_last_failed);
  // They are the queue's until it takes completions again, whatever is staged meanwhile.
  ASSERT_EQ(kvm_nop_async(queue_, 6), KVM_OK);
  ASSERT_EQ(kvm_submit(queue_), KVM_OK);
  for (const kvm_completion& completion : completions) {
    EXPECT_EQ(messages[completion.user_data], completion.message);
  }
  take_all(queue_);
}

TEST_F(AbiAsync, RowsThatAreNotFiniteAreCounted) {
  const kvm_seq_id seq = make_seq();
  append(seq, 10);
  std::vector<float> q(size_t{2} * geometry_.n_q_heads * geometry_.dim, 1.0f);
  q[0] = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> o(q.size());
  kvm_item item{};
  item.seq = seq;
  item.n_query = 2;
  item.query_position = KVM_POSITION_END;
  kvm_step_params params = step_params(&item, 1);
  params.q = tensor_of(q);
  params.o = tensor_of(o);
  ASSERT_EQ(kvm_attend_async(queue_, &params, 1), KVM_OK) << kvm_last_error();
  const auto taken = take_all(queue_);
  EXPECT_EQ(taken.at(1).completion.n_not_finite, 1u);
}

TEST_F(AbiAsync, WhatNobodyTakesGoesWithTheQueue) {
  const kvm_seq_id kept = make_seq();
  kvm_queue* queue = nullptr;
  ASSERT_EQ(kvm_queue_create(client_, nullptr, &queue), KVM_OK) << kvm_last_error();
  for (uint64_t i = 0; i < 3; ++i) {
    ASSERT_EQ(kvm_seq_create_async(queue, space_, nullptr, i), KVM_OK);
    ASSERT_EQ(kvm_seq_fork_async(queue, kept, 0, 10 + i), KVM_OK);
  }
  ASSERT_EQ(kvm_submit(queue), KVM_OK);
  kvm_completion taken;
  ASSERT_EQ(kvm_wait(queue, &taken, 1, 1, kLongNs), 1);
  EXPECT_EQ(taken.status, KVM_OK);
  kvm_queue_destroy(queue);
  // The answers to frees may come after the queue is gone.
  for (int i = 0; i < 1000 && count_seqs() > 2; ++i) {
    ::usleep(1000);
  }
  EXPECT_EQ(count_seqs(), 2u) << "one that was there, and one that was taken";
  EXPECT_EQ(status_of(kept), KVM_OK);
  EXPECT_EQ(status_of(taken.seq), KVM_OK);
}

// Cancel requests keep slots of the queue in use, which freeing the sequences takes.
TEST_F(AbiAsync, AFullQueueOfSequencesGoesWithTheQueue) {
  const kvm_seq_id kept = make_seq();
  const auto n_sequences = [&] {
    kvm_space_info info{};
    info.struct_size = sizeof(info);
    EXPECT_EQ(kvm_space_get_info(client_, space_, &info), KVM_OK) << kvm_last_error();
    return info.n_sequences;
  };
  for (const uint32_t n : {1u, 2u, 8u, 64u, 256u}) {
    kvm_queue_params params{};
    params.struct_size = sizeof(params);
    params.n_entries = n;
    for (int round = 0; round < 20; ++round) {
      kvm_queue* queue = nullptr;
      ASSERT_EQ(kvm_queue_create(client_, &params, &queue), KVM_OK) << kvm_last_error();
      for (uint32_t i = 0; i < n; ++i) {
        ASSERT_EQ(i % 2 == 0 ? kvm_seq_create_async(queue, space_, nullptr, i)
                             : kvm_seq_fork_async(queue, kept, 0, i),
                  KVM_OK)
            << kvm_last_error();
      }
      ASSERT_EQ(kvm_submit(queue), KVM_OK) << kvm_last_error();
      if (round % 2 != 0) {
        ::usleep(1000);  // so that some are made before they are cancelled
      }
      kvm_queue_destroy(queue);
    }
    for (int i = 0; i < 1000 && n_sequences() > 1; ++i) {
      ::usleep(1000);
    }
    EXPECT_EQ(n_sequences(), 1u) << "queues of " << n;
  }
  EXPECT_EQ(status_of(kept), KVM_OK);
}

// Rows [row][lane][head][dim]: requests in flight have a lane each, the caller has the last.
TEST_F(AbiAsync, OutputsThatInterleaveLeaveTheirGapsAlone) {
  constexpr uint32_t kRows = 100;
  constexpr uint32_t kRequests = 2;
  constexpr uint32_t kLanes = kRequests + 1;
  const uint32_t heads = geometry_.n_q_heads;
  const uint32_t width = heads * geometry_.dim;
  const kvm_seq_id seq = make_seq();
  append(seq, 64);
  kvm_item item{};
  item.seq = seq;
  item.n_query = kRows;
  item.flags = KVM_ITEM_NOT_CAUSAL;
  std::array<std::vector<float>, kRequests> q;
  std::array<std::vector<float>, kRequests> o;
  std::array<std::vector<float>, kRequests> lse;
  for (uint32_t lane = 0; lane < kRequests; ++lane) {
    q[lane] = random_floats(&random_, size_t{kRows} * width);
    o[lane].resize(q[lane].size());
    lse[lane].resize(size_t{kRows} * heads);
    kvm_step_params params = step_params(&item, 1);
    params.q = tensor_of(q[lane]);
    params.o = tensor_of(o[lane]);
    params.lse = tensor_of(lse[lane]);
    ASSERT_EQ(kvm_attend(queue_, &params, nullptr), KVM_OK) << kvm_last_error();
  }
  // A lane of a tensor; its buffer goes on to the end of the rows.
  const auto lane_of = [](const std::vector<float>& rows, uint32_t lane, uint64_t n, uint64_t dim) {
    const size_t at = size_t{lane} * n;
    kvm_tensor tensor =
        kvm_host_tensor(rows.data() + at, (rows.size() - at) * sizeof(float), KVM_DTYPE_F32);
    tensor.stride_row = kLanes * n;
    tensor.stride_head = dim;
    return tensor;
  };
  std::vector<float> all_o(size_t{kRows} * kLanes * width, -7.0f);
  std::vector<float> all_lse(size_t{kRows} * kLanes * heads, -7.0f);
  for (uint32_t lane = 0; lane < kRequests; ++lane) {
    kvm_step_params params = step_params(&item, 1);
    params.q = tensor_of(q[lane]);
    params.o = lane_of(all_o, lane, width, geometry_.dim);
    params.lse = lane_of(all_lse, lane, heads, 1);
    ASSERT_EQ(kvm_attend_async(queue_, &params, lane), KVM_OK) << kvm_last_error();
  }
  const auto fill_last_lane = [](std::vector<float>* rows, size_t n) {
    for (size_t row = 0; row < kRows; ++row) {
      std::fill_n(rows->begin() + static_cast<ptrdiff_t>((row * kLanes + kRequests) * n), n, 5.0f);
    }
  };
  fill_last_lane(&all_o, width);
  fill_last_lane(&all_lse, heads);
  for (const auto& [number, one] : take_all(queue_)) {
    EXPECT_EQ(one.completion.status, KVM_OK) << number << ": " << one.message;
  }
  const auto expect_lanes = [](const std::vector<float>& rows, size_t n,
                               const std::array<std::vector<float>, kRequests>& expected) {
    for (size_t i = 0; i < rows.size(); ++i) {
      const size_t lane = i / n % kLanes;
      const size_t at = i / n / kLanes * n + i % n;
      ASSERT_EQ(rows[i], lane < kRequests ? expected[lane][at] : 5.0f)
          << "row " << i / n / kLanes << ", lane " << lane;
    }
  };
  expect_lanes(all_o, width, o);
  expect_lanes(all_lse, heads, lse);
}

// One buffer for the rows of all, given to each of several requests, and rows for nobody.
TEST_F(AbiAsync, RequestsInFlightShareTheBufferOfAPackedOutput) {
  constexpr uint32_t kRequests = 4;
  constexpr uint32_t kRows = 3;
  const size_t width = size_t{geometry_.n_q_heads} * geometry_.dim;
  const kvm_seq_id seq = make_seq();
  append(seq, 64);
  const auto q = random_floats(&random_, (kRequests + 1) * kRows * width);
  std::vector<kvm_item> items(kRequests + 1);
  for (uint32_t i = 0; i <= kRequests; ++i) {
    items[i] = {};
    items[i].seq = seq;
    items[i].n_query = kRows;
    items[i].query_row = i * kRows;
    items[i].flags = KVM_ITEM_NOT_CAUSAL;
  }
  std::vector<float> expected(q.size());
  kvm_step_params params = step_params(items.data(), kRequests);
  params.q = tensor_of(q);
  params.o = tensor_of(expected);
  ASSERT_EQ(kvm_attend(queue_, &params, nullptr), KVM_OK) << kvm_last_error();
  std::fill(expected.begin() + static_cast<ptrdiff_t>(kRequests * kRows * width), expected.end(),
            5.0f);

  std::vector<float> o(q.size(), -7.0f);
  params.o = tensor_of(o);
  params.n_items = 1;
  for (uint32_t i = 0; i < kRequests; ++i) {
    params.items = &items[i];
    ASSERT_EQ(kvm_attend_async(queue_, &params, i), KVM_OK) << kvm_last_error();
  }
  std::fill(o.begin() + static_cast<ptrdiff_t>(kRequests * kRows * width), o.end(), 5.0f);
  for (const auto& [number, one] : take_all(queue_)) {
    EXPECT_EQ(one.completion.status, KVM_OK) << number << ": " << one.message;
  }
  EXPECT_EQ(o, expected);
}

// K and V of a token side by side, in fp16, whose elements are often what was there before.
TEST_F(AbiAsync, ReadsThatInterleaveLeaveTheirGapsAlone) {
  constexpr uint32_t kTokens = 50;
  const size_t width = size_t{geometry_.n_kv_heads} * geometry_.dim;
  const kvm_seq_id seq = make_seq();
  append(seq, kTokens);
  kvm_read_params params{};
  params.struct_size = sizeof(params);
  params.seq = seq;
  params.n_tokens = kTokens;
  const auto tensor = [](const std::vector<uint16_t>& values, size_t at) {
    return kvm_host_tensor(values.data() + at, (values.size() - at) * sizeof(uint16_t),
                           KVM_DTYPE_F16);
  };
  std::vector<uint16_t> k(kTokens * width);
  params.k = tensor(k, 0);
  ASSERT_EQ(kvm_read(queue_, &params), KVM_OK) << kvm_last_error();

  std::vector<uint16_t> both(2 * kTokens * width, k[0]);
  for (const uint32_t lane : {0u, 1u}) {
    params.k = kvm_tensor{};
    params.v = kvm_tensor{};
    kvm_tensor& to = lane == 0 ? params.k : params.v;
    to = tensor(both, lane * width);
    to.stride_row = 2 * width;
    ASSERT_EQ(kvm_read_async(queue_, &params, lane), KVM_OK) << kvm_last_error();
  }
  for (const auto& [number, one] : take_all(queue_)) {
    EXPECT_EQ(one.completion.status, KVM_OK) << number << ": " << one.message;
  }
  for (size_t i = 0; i < both.size(); ++i) {
    ASSERT_EQ(both[i], k[i / width / 2 * width + i % width]) << i;  // append: V is K
  }
}

TEST_F(AbiAsync, ADescriptorTellsOfARequestThatWasCancelledBeforeItWasSubmitted) {
  kvm_client_info info{};
  info.struct_size = sizeof(info);
  ASSERT_EQ(kvm_client_get_info(client_, &info), KVM_OK);
  if ((info.features & KVM_FEATURE_EVENTFD) == 0) {
    GTEST_SKIP() << "kvmd has no io_uring here";
  }
  const int fd = kvm_queue_fd(queue_);
  ASSERT_GE(fd, 0);
  kvm_completion done{};
  EXPECT_EQ(kvm_poll(queue_, &done, 1), 0);
  EXPECT_FALSE(is_readable(fd, 0));
  ASSERT_EQ(kvm_nop_async(queue_, 7), KVM_OK) << kvm_last_error();
  ASSERT_EQ(kvm_cancel(queue_, 7), KVM_OK) << kvm_last_error();
  int32_t n = 0;
  while (n == 0) {
    ASSERT_TRUE(is_readable(fd, 10'000));
    n = kvm_poll(queue_, &done, 1);
  }
  EXPECT_EQ(n, 1);
  EXPECT_EQ(done.user_data, 7u);
}

TEST_F(AbiAsync, ADescriptorTellsOfCompletionsThatNobodyWaitsFor) {
  kvm_client_info info{};
  info.struct_size = sizeof(info);
  ASSERT_EQ(kvm_client_get_info(client_, &info), KVM_OK);
  if ((info.features & KVM_FEATURE_EVENTFD) == 0) {
    GTEST_SKIP() << "kvmd has no io_uring here";
  }
  const kvm_seq_id seq = make_seq();
  append(seq, 2000);
  const int fd = kvm_queue_fd(queue_);
  ASSERT_GE(fd, 0);
  EXPECT_EQ(kvm_queue_fd(queue_), fd);
  const auto q = random_floats(&random_, size_t{64} * geometry_.n_q_heads * geometry_.dim);
  std::vector<float> expected(q.size());
  kvm_item item{};
  item.seq = seq;
  item.n_query = 64;
  item.query_position = KVM_POSITION_END;
  kvm_step_params params = step_params(&item, 1);
  params.q = tensor_of(q);
  params.o = tensor_of(expected);
  ASSERT_EQ(kvm_attend(queue_, &params, nullptr), KVM_OK) << kvm_last_error();
  for (int round = 0; round < 20; ++round) {
    kvm_completion none;
    EXPECT_EQ(kvm_poll(queue_, &none, 1), 0);
    EXPECT_FALSE(is_readable(fd, 0)) << "nothing is outstanding, and the queue was looked at";
    std::vector<float> o(q.size());
    params.o = tensor_of(o);
    ASSERT_EQ(kvm_attend_async(queue_, &params, 1), KVM_OK);
    ASSERT_EQ(kvm_nop_async(queue_, 2), KVM_OK);
    ASSERT_EQ(kvm_submit(queue_), KVM_OK);
    std::array<kvm_completion, 1> one;
    for (int32_t n = 0; n < 2;) {
      ASSERT_TRUE(is_readable(fd, 60'000)) << "round " << round << ", completion " << n;
      n += kvm_poll(queue_, one.data(), 1);
    }
    EXPECT_EQ(o, expected);
  }
  kvm_client_close(client_);
  client_ = nullptr;
  EXPECT_TRUE(is_readable(fd, 60'000)) << "the end of the service is worth a look as well";
  kvm_completion none;
  EXPECT_EQ(kvm_poll(queue_, &none, 1), KVM_ERR_DISCONNECTED);
}

TEST_F(AbiAsync, QueuesWithAndWithoutADescriptorWorkAtOnce) {
  const kvm_seq_id seq = make_seq();
  append(seq, 500);
  const auto work = [&](bool by_descriptor) {
    kvm_queue* queue = nullptr;
    ASSERT_EQ(kvm_queue_create(client_, nullptr, &queue), KVM_OK) << kvm_last_error();
    const int fd = by_descriptor ? kvm_queue_fd(queue) : -1;
    std::vector<float> q(size_t{4} * geometry_.n_q_heads * geometry_.dim, 0.5f);
    std::vector<float> o(q.size());
    kvm_item item{};
    item.seq = seq;
    item.n_query = 4;
    item.query_position = KVM_POSITION_END;
    kvm_step_params params = step_params(&item, 1);
    params.q = tensor_of(q);
    params.o = tensor_of(o);
    for (int i = 0; i < 200; ++i) {
      ASSERT_EQ(kvm_attend_async(queue, &params, 7), KVM_OK) << kvm_last_error();
      ASSERT_EQ(kvm_submit(queue), KVM_OK);
      kvm_completion done{};
      int32_t n = 0;
      if (fd >= 0) {
        ASSERT_TRUE(is_readable(fd, 60'000));
        while ((n = kvm_poll(queue, &done, 1)) == 0) {
        }
      } else {
        n = kvm_wait(queue, &done, 1, 1, kLongNs);
      }
      ASSERT_EQ(n, 1);
      ASSERT_EQ(done.status, KVM_OK) << done.message;
    }
    kvm_queue_destroy(queue);
  };
  std::thread first(work, true);
  std::thread second(work, true);
  work(false);
  first.join();
  second.join();
}

std::atomic<int> g_n_asked{0};
std::atomic<bool> g_interrupt{false};

int is_interrupted(void* user) {
  EXPECT_EQ(user, &g_interrupt);
  ++g_n_asked;
  return g_interrupt ? 1 : 0;
}

void interrupt(int) { g_interrupt = true; }

// A prefill that takes a good part of a second, so that a wait has something to wait for.
TEST_F(AbiAsync, AWaitEndsWhenItIsInterruptedAndTheRequestGoesOn) {
  // It takes longer than the 15 ms below; with AddressSanitizer a sixteenth of the work does.
#ifdef __SANITIZE_ADDRESS__
  constexpr uint32_t kRows = 2048;
#else
  constexpr uint32_t kRows = 8192;
#endif
  const kvm_seq_id seq = make_seq();
  append(seq, kRows);
  kvm_queue_params params{};
  params.struct_size = sizeof(params);
  params.is_interrupted = is_interrupted;
  params.interrupt_user = &g_interrupt;
  kvm_queue* queue = nullptr;
  ASSERT_EQ(kvm_queue_create(client_, &params, &queue), KVM_OK) << kvm_last_error();
  const auto q = random_floats(&random_, size_t{kRows} * geometry_.n_q_heads * geometry_.dim);
  std::vector<float> o(q.size());
  kvm_item item{};
  item.seq = seq;
  item.n_query = kRows;
  item.query_position = KVM_POSITION_END;
  kvm_step_params step = step_params(&item, 1);
  step.flags = KVM_STEP_F32_VALUES;
  step.q = tensor_of(q);
  step.o = tensor_of(o);
  ASSERT_EQ(kvm_step(queue, &step, nullptr), KVM_OK) << kvm_last_error();
  EXPECT_EQ(g_n_asked, 0) << "calls that are made and waited for at once ask nothing";
  const std::vector<float> expected = o;
  std::fill(o.begin(), o.end(), 0.0f);

  g_interrupt = true;
  ASSERT_EQ(kvm_step_async(queue, &step, 5), KVM_OK);
  ASSERT_EQ(kvm_submit(queue), KVM_OK);
  kvm_completion done{};
  ASSERT_EQ(kvm_wait(queue, &done, 1, 1, kLongNs), KVM_ERR_INTERRUPTED);
  EXPECT_STRNE(kvm_last_error(), "");
  EXPECT_EQ(g_n_asked, 1);
  EXPECT_GE(kvm_poll(queue, &done, 1), 0) << "who does not wait is not interrupted";

  // By a signal, whose handler says so.
  g_interrupt = false;
  struct sigaction action {};
  struct sigaction before {};
  action.sa_handler = interrupt;
  ASSERT_EQ(::sigaction(SIGALRM, &action, &before), 0);
  const itimerval in_15_ms{.it_interval = {}, .it_value = {.tv_sec = 0, .tv_usec = 15'000}};
  ASSERT_EQ(::setitimer(ITIMER_REAL, &in_15_ms, nullptr), 0);
  ASSERT_EQ(kvm_wait(queue, &done, 1, 1, kLongNs), KVM_ERR_INTERRUPTED) << done.user_data;
  ASSERT_EQ(::sigaction(SIGALRM, &before, nullptr), 0);

  g_interrupt = false;
  g_n_asked = 0;
  ASSERT_EQ(kvm_wait(queue, &done, 1, 1, kLongNs), 1) << kvm_last_error();
  EXPECT_EQ(done.status, KVM_OK) << done.message;
  EXPECT_EQ(done.user_data, 5u);
  EXPECT_EQ(o, expected);
  kvm_queue_destroy(queue);
}

// Three sequences, a prompt of 40 tokens each, as [batch][head][token][dim] and packed.
TEST_F(AbiAsync, TokensMayLieBehindThoseOfOtherSequences) {
  constexpr uint32_t kBatch = 3;
  constexpr uint32_t kTokens = 40;
  const uint32_t dim = geometry_.dim;
  const auto run = [&](bool by_head, std::vector<float>* o, std::vector<float>* lse) {
    std::mt19937 random(17);
    std::vector<kvm_item> items(kBatch);
    const uint32_t kv = geometry_.n_kv_heads;
    const uint32_t heads = geometry_.n_q_heads;
    const auto fill = [&](uint32_t n_heads) {
      const auto packed = random_floats(&random, size_t{kBatch} * kTokens * n_heads * dim);
      if (!by_head) {
        return packed;
      }
      std::vector<float> out(packed.size());
      for (size_t i = 0; i < packed.size(); ++i) {
        const size_t d = i % dim;
        const size_t h = i / dim % n_heads;
        const size_t t = i / dim / n_heads % kTokens;
        const size_t b = i / dim / n_heads / kTokens;
        out[((b * n_heads + h) * kTokens + t) * dim + d] = packed[i];
      }
      return out;
    };
    const auto shape = [&](kvm_tensor tensor, uint32_t n) {
      tensor.stride_row = by_head ? n : 0;
      tensor.stride_head = by_head ? uint64_t{kTokens} * n : 0;
      return tensor;
    };
    const auto k = fill(kv);
    const auto v = fill(kv);
    const auto q = fill(heads);
    o->assign(q.size(), -1.0f);
    lse->assign(size_t{kBatch} * kTokens * heads, -1.0f);
    for (uint32_t b = 0; b < kBatch; ++b) {
      items[b] = {};
      items[b].seq = make_seq();
      items[b].n_append = items[b].n_query = kTokens;
      items[b].query_position = KVM_POSITION_END;
      items[b].append_row = b * kTokens * (by_head ? kv : 1);
      items[b].query_row = b * kTokens * (by_head ? heads : 1);
    }
    kvm_step_params params = step_params(items.data(), kBatch);
    params.k = shape(tensor_of(k), dim);
    params.v = shape(tensor_of(v), dim);
    params.q = shape(tensor_of(q), dim);
    params.o = shape(tensor_of(*o), dim);
    params.lse = shape(tensor_of(*lse), 1);
    ASSERT_EQ(kvm_step(queue_, &params, nullptr), KVM_OK) << kvm_last_error();
    if (by_head) {
      // Two items that would write the same rows.
      items[1].query_row = items[0].query_row + kTokens;
      EXPECT_EQ(kvm_attend(queue_, &params, nullptr), KVM_ERR_INVALID);
      for (kvm_item& item : items) {
        item.n_append = 0;
      }
      EXPECT_EQ(kvm_attend(queue_, &params, nullptr), KVM_ERR_INVALID);
      EXPECT_NE(std::strstr(kvm_last_error(), "different items"), nullptr) << kvm_last_error();
    }
  };
  std::vector<float> o_packed, lse_packed, o_by_head, lse_by_head;
  run(false, &o_packed, &lse_packed);
  run(true, &o_by_head, &lse_by_head);
  const uint32_t heads = geometry_.n_q_heads;
  for (size_t row = 0; row < size_t{kBatch} * kTokens; ++row) {
    const size_t b = row / kTokens;
    const size_t t = row % kTokens;
    for (uint32_t h = 0; h < heads; ++h) {
      const size_t at = (b * heads + h) * kTokens + t;
      ASSERT_EQ(lse_packed[row * heads + h], lse_by_head[at]) << "row " << row;
      ASSERT_EQ(std::memcmp(&o_packed[(row * heads + h) * dim], &o_by_head[at * dim],
                            dim * sizeof(float)),
                0)
          << "row " << row << ", head " << h;
    }
  }
}

TEST_F(AbiAsync, ArenasAreNotInTheMemoryOfChildren) {
  kvm_arena* arena = nullptr;
  ASSERT_EQ(kvm_arena_create(client_, nullptr, &arena), KVM_OK) << kvm_last_error();
  kvm_buffer buffer{};
  ASSERT_EQ(kvm_arena_alloc(arena, 4096, 4096, &buffer), KVM_OK);
  void* data = kvm_arena_data(arena, buffer);
  unsigned char is_resident = 0;
  ASSERT_EQ(::mincore(data, 4096, &is_resident), 0) << "mapped here";
  const pid_t child = ::fork();
  if (child == 0) {
    const bool is_gone = ::mincore(data, 4096, &is_resident) != 0 && errno == ENOMEM;
    ::_exit(is_gone ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  kvm_arena_destroy(arena);
}

// A head that keeps its heaviest tokens is led by what it was asked, but not where it is told not
// to be.
TEST_F(AbiAsync, AttendsMayLeaveNoTraceWithPolicies) {
  kvm_policy_params policy{};
  policy.retention = KVM_RETAIN_HEAVY;
  policy.n_recent = 64;
  policy.n_heavy = 16;
  kvm_space_params params{};
  params.struct_size = sizeof(params);
  params.name = "heavy";
  params.n_layers = 1;
  params.n_q_heads = params.n_kv_heads = 1;
  params.head_dim_k = geometry_.dim;
  params.codec = KVM_CODEC_F32;
  params.policies = &policy;
  params.n_policies = 1;
  ASSERT_EQ(kvm_space_register(client_, &params, &space_), KVM_OK) << kvm_last_error();
  const auto k = random_floats(&random_, size_t{1024} * geometry_.dim);
  const auto q = random_floats(&random_, geometry_.dim);
  const auto other_q = random_floats(&random_, geometry_.dim);
  // What a last query sees of 1,024 tokens, of which 512 were there when `flags` attended.
  const auto answer = [&](bool asks, uint32_t flags) {
    kvm_seq_id seq = make_seq();
    for (const uint32_t begin : {0u, 512u}) {
      kvm_item item{};
      item.seq = seq;
      item.append_position = begin;
      item.n_append = 512;
      item.append_row = begin;
      kvm_step_params append = step_params(&item, 1);
      append.k = append.v = tensor_of(k);
      EXPECT_EQ(kvm_append(queue_, &append), KVM_OK) << kvm_last_error();
      if (begin == 0 && !asks) {
        continue;
      }
      std::vector<float> o(geometry_.dim);
      item = {};
      item.seq = seq;
      item.n_query = 1;
      item.query_position = KVM_POSITION_END;
      kvm_step_params attend = step_params(&item, 1);
      attend.flags = begin == 0 ? flags : 0;
      attend.q = tensor_of(begin == 0 ? other_q : q);
      attend.o = tensor_of(o);
      EXPECT_EQ(kvm_attend(queue_, &attend, nullptr), KVM_OK) << kvm_last_error();
      if (begin != 0) {
        return o;
      }
    }
    return std::vector<float>();
  };
  const auto unasked = answer(false, 0);
  EXPECT_EQ(answer(true, KVM_STEP_NO_STATISTICS), unasked);
  EXPECT_NE(answer(true, 0), unasked) << "or the test shows nothing";
}

}  // namespace
}  // namespace kvm::testing
