// SPDX-License-Identifier: Apache-2.0
// kvm.h, function by function, against a naive reference. The same file is built twice: with
// libkvm, over a kvmd, and with libkvm_embedded.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <thread>

#include "tests/integration/abi_rig.h"

namespace kvm::testing {
namespace {

// Weights times values are bf16 products by default; F32_VALUES is exact to rounding.
constexpr double kBf16Products = 1e-2;
constexpr double kF32 = 1e-4;

class Abi : public ServiceTest {
 protected:
  void check_scaled_rows(const char* name, uint32_t codec, float relative, float largest_part);

  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(open("abi-test"));
    space_ = register_space(client_, "abi", geometry_);
  }

  kvm_seq_id make_seq(uint32_t flags = 0) {
    kvm_seq_params params{};
    params.struct_size = sizeof(params);
    params.flags = flags;
    kvm_seq_id seq = 0;
    EXPECT_EQ(kvm_seq_create(client_, space_, &params, &seq), KVM_OK) << kvm_last_error();
    return seq;
  }

  // Merges two states of n_rows rows into the first.
  void merge_two(uint32_t n_rows, std::vector<float>* o, std::vector<float>* lse) const {
    const kvm_tensor states_o[] = {tensor_of(o[0]), tensor_of(o[1])};
    const kvm_tensor states_lse[] = {tensor_of(lse[0]), tensor_of(lse[1])};
    kvm_merge_params merge{};
    merge.struct_size = sizeof(merge);
    merge.n_states = 2;
    merge.n_rows = n_rows;
    merge.n_heads = geometry_.n_q_heads;
    merge.dim = geometry_.dim;
    merge.o = states_o;
    merge.lse = states_lse;
    merge.out_o = states_o[0];
    merge.out_lse = states_lse[0];
    ASSERT_EQ(kvm_merge(&merge), KVM_OK) << kvm_last_error();
  }

  size_t kv_floats(uint64_t n) const { return n * geometry_.n_kv_heads * geometry_.dim; }
  size_t q_floats(uint64_t n) const { return n * geometry_.n_q_heads * geometry_.dim; }

  kvm_step_params step_params(const kvm_item* items, uint32_t n_items, uint32_t layer) const {
    kvm_step_params params{};
    params.struct_size = sizeof(params);
    params.flags = KVM_STEP_F32_VALUES;
    params.space = space_;
    params.layer_begin = layer;
    params.n_items = n_items;
    params.items = items;
    return params;
  }

  static kvm_item append_item(kvm_seq_id seq, uint32_t n) {
    kvm_item item{};
    item.seq = seq;
    item.append_position = KVM_POSITION_END;
    item.n_append = n;
    return item;
  }
  static kvm_item query_item(kvm_seq_id seq, uint32_t n) {
    kvm_item item{};
    item.seq = seq;
    item.n_query = n;
    item.query_position = KVM_POSITION_END;
    return item;
  }

  // Appends n random tokens to one layer, here and in the reference.
  void append(kvm_seq_id seq, uint32_t layer, uint32_t n, NaiveLayer* naive) {
    const auto k = random_floats(&random_, kv_floats(n));
    const auto v = random_floats(&random_, kv_floats(n));
    const kvm_item item = append_item(seq, n);
    kvm_step_params params = step_params(&item, 1, layer);
    params.k = tensor_of(k);
    params.v = tensor_of(v);
    ASSERT_EQ(kvm_append(queue_, &params), KVM_OK) << kvm_last_error();
    naive->append(k, v);
  }

  // Attends with n rows at the end of the layer and compares.
  void check_attend(kvm_seq_id seq, uint32_t layer, uint32_t n, const NaiveLayer& naive) {
    const auto q = random_floats(&random_, q_floats(n));
    std::vector<float> o(q_floats(n), -1);
    std::vector<float> lse(size_t{n} * geometry_.n_q_heads, -1);
    const kvm_item item = query_item(seq, n);
    kvm_step_params params = step_params(&item, 1, layer);
    params.q = tensor_of(q);
    params.o = tensor_of(o);
    params.lse = tensor_of(lse);
    kvm_step_stats stats{};
    stats.struct_size = sizeof(stats);
    ASSERT_EQ(kvm_attend(queue_, &params, &stats), KVM_OK) << kvm_last_error();
    EXPECT_EQ(stats.mode, static_cast<uint32_t>(KVM_MODE_EXACT));
    EXPECT_EQ(stats.keys_present, naive.n_tokens() * geometry_.n_kv_heads);
    compare(naive, q, n, naive.n_tokens() - n, o, lse, kF32);
  }

  void compare(const NaiveLayer& naive, const std::vector<float>& q, uint32_t n,
               uint64_t first_position, const std::vector<float>& o, const std::vector<float>& lse,
               double bound) {
    for (uint32_t row = 0; row < n; ++row) {
      std::vector<double> expected_o;
      std::vector<double> expected_lse;
      naive.attend(
          &q[q_floats(row)], [&](uint64_t t) { return t <= first_position + row; }, &expected_o,
          &expected_lse);
      EXPECT_LE(difference(&o[q_floats(row)], expected_o), bound) << "row " << row;
      if (!lse.empty()) {
        EXPECT_LE(difference(&lse[size_t{row} * geometry_.n_q_heads], expected_lse), bound);
      }
    }
  }

  kvm_seq_info info_of(kvm_seq_id seq) {
    kvm_seq_info info{};
    info.struct_size = sizeof(info);
    EXPECT_EQ(kvm_seq_get_info(client_, seq, &info), KVM_OK) << kvm_last_error();
    return info;
  }

  Geometry geometry_;
  std::mt19937 random_{11};
  kvm_space_id space_ = 0;
};

TEST_F(Abi, LibraryAndInfo) {
  EXPECT_EQ(kvm_version(), 1000u);
  EXPECT_STREQ(kvm_version_string(), "0.1.0");
  EXPECT_STREQ(kvm_status_name(KVM_ERR_HOLE), "KVM_ERR_HOLE");
  EXPECT_STREQ(kvm_status_name(-1234), "KVM_ERR_UNKNOWN");
  kvm_client_info info{};
  info.struct_size = sizeof(info);
  ASSERT_EQ(kvm_client_get_info(client_, &info), KVM_OK);
  EXPECT_EQ((info.features & KVM_FEATURE_EMBEDDED) != 0, is_embedded());
  EXPECT_GT(info.n_threads, 0u);
  EXPECT_EQ(info.max_outstanding, 256u);
  EXPECT_GT(std::strlen(info.isa), 0u);
  EXPECT_STREQ(info.server_version, "0.1.0");
  EXPECT_NE(info.epoch, 0u);
  uint64_t ns = 0;
  EXPECT_EQ(kvm_client_ping(client_, &ns), KVM_OK) << kvm_last_error();
  EXPECT_EQ(kvm_client_reconnect(client_), KVM_OK) << "nothing to do on a live connection";
}

TEST_F(Abi, AppendAndAttendMatchTheReference) {
  const kvm_seq_id seq = make_seq();
  NaiveLayer layers[2] = {NaiveLayer(geometry_), NaiveLayer(geometry_)};
  for (const uint32_t n : {1u, 63u, 1u, 70u, 128u}) {
    for (uint32_t layer = 0; layer < 2; ++layer) {
      append(seq, layer, n, &layers[layer]);
      check_attend(seq, layer, std::min(n, 9u), layers[layer]);
    }
  }
  const kvm_seq_info info = info_of(seq);
  EXPECT_EQ(info.n_tokens_min, 263u);
  EXPECT_EQ(info.n_tokens_max, 263u);
  EXPECT_EQ(info.n_committed, 263u);
  EXPECT_EQ(info.space, space_);
}

TEST_F(Abi, StepAppendsAndAttendsManySequences) {
  constexpr uint32_t kSeqs = 100;  // more than fit into a ring slot's own block
  std::vector<kvm_seq_id> seqs;
  std::vector<NaiveLayer> naive(kSeqs, NaiveLayer(geometry_));
  for (uint32_t i = 0; i < kSeqs; ++i) {
    seqs.push_back(make_seq());
    append(seqs[i], 0, 1 + i % 70, &naive[i]);
  }
  const auto k = random_floats(&random_, kv_floats(kSeqs));
  const auto v = random_floats(&random_, kv_floats(kSeqs));
  const auto q = random_floats(&random_, q_floats(kSeqs));
  std::vector<float> o(q_floats(kSeqs));
  std::vector<float> lse(size_t{kSeqs} * geometry_.n_q_heads);
  std::vector<kvm_item> items;
  for (uint32_t i = 0; i < kSeqs; ++i) {
    kvm_item item = append_item(seqs[i], 1);
    item.append_position = naive[i].n_tokens();
    item.append_row = i;
    item.n_query = 1;
    item.query_row = i;
    item.query_position = naive[i].n_tokens();
    items.push_back(item);
    naive[i].append({&k[kv_floats(i)], &k[kv_floats(i)] + kv_floats(1)},
                    {&v[kv_floats(i)], &v[kv_floats(i)] + kv_floats(1)});
  }
  kvm_step_params params = step_params(items.data(), kSeqs, 0);
  params.k = tensor_of(k);
  params.v = tensor_of(v);
  params.q = tensor_of(q);
  params.o = tensor_of(o);
  params.lse = tensor_of(lse);
  kvm_step_stats stats{};
  stats.struct_size = sizeof(stats);
  ASSERT_EQ(kvm_step(queue_, &params, &stats), KVM_OK) << kvm_last_error();
  EXPECT_GT(stats.bytes_read, 0u);
  for (uint32_t i = 0; i < kSeqs; ++i) {
    std::vector<double> expected_o;
    std::vector<double> expected_lse;
    naive[i].attend(
        &q[q_floats(i)], [](uint64_t) { return true; }, &expected_o, &expected_lse);
    EXPECT_LE(difference(&o[q_floats(i)], expected_o), kF32) << i;
    EXPECT_LE(difference(&lse[size_t{i} * geometry_.n_q_heads], expected_lse), kF32) << i;
  }
}

TEST_F(Abi, SeveralLayersInOneAppend) {
  const kvm_seq_id seq = make_seq();
  const uint32_t n = 5;
  const auto k = random_floats(&random_, 2 * kv_floats(n));
  const auto v = random_floats(&random_, 2 * kv_floats(n));
  const kvm_item item = append_item(seq, n);
  kvm_step_params params = step_params(&item, 1, 0);
  params.n_layers = 2;
  params.k = tensor_of(k);
  params.v = tensor_of(v);
  ASSERT_EQ(kvm_append(queue_, &params), KVM_OK) << kvm_last_error();
  for (uint32_t layer = 0; layer < 2; ++layer) {
    NaiveLayer naive(geometry_);
    const size_t at = layer * kv_floats(n);
    naive.append({&k[at], &k[at] + kv_floats(n)}, {&v[at], &v[at] + kv_floats(n)});
    check_attend(seq, layer, 3, naive);
  }
}

TEST_F(Abi, ArenaAndHostGiveTheSameBitsAndStridesLeaveGapsAlone) {
  const kvm_seq_id seq = make_seq();
  NaiveLayer naive(geometry_);
  append(seq, 0, 200, &naive);
  const uint32_t n = 3;
  const auto q = random_floats(&random_, q_floats(n));
  std::vector<float> o(q_floats(n));
  const kvm_item item = query_item(seq, n);
  kvm_step_params params = step_params(&item, 1, 0);
  params.flags = 0;
  params.q = tensor_of(q);
  params.o = tensor_of(o);
  ASSERT_EQ(kvm_attend(queue_, &params, nullptr), KVM_OK) << kvm_last_error();
  compare(naive, q, n, 200 - n, o, {}, kBf16Products);

  kvm_arena* arena = nullptr;
  ASSERT_EQ(kvm_arena_create(client_, nullptr, &arena), KVM_OK) << kvm_last_error();
  const uint64_t head_stride = geometry_.dim + 3;
  const uint64_t row_stride = geometry_.n_q_heads * head_stride + 5;
  for (const bool in_arena : {true, false}) {
    std::vector<float> host_q(n * row_stride, 0);
    std::vector<float> host_o(n * row_stride, -7);
    kvm_tensor tq = tensor_of(host_q);
    kvm_tensor to = tensor_of(host_o);
    float* pq = host_q.data();
    float* po = host_o.data();
    if (in_arena) {
      ASSERT_EQ(kvm_arena_alloc(arena, tq.buffer.size, 0, &tq.buffer), KVM_OK);
      ASSERT_EQ(kvm_arena_alloc(arena, to.buffer.size, 4096, &to.buffer), KVM_OK);
      pq = static_cast<float*>(kvm_arena_data(arena, tq.buffer));
      po = static_cast<float*>(kvm_arena_data(arena, to.buffer));
      std::fill(po, po + n * row_stride, -7.0f);
    }
    tq.stride_row = to.stride_row = row_stride;
    tq.stride_head = to.stride_head = head_stride;
    for (uint32_t row = 0; row < n; ++row) {
      for (uint32_t head = 0; head < geometry_.n_q_heads; ++head) {
        std::copy_n(&q[(size_t{row} * geometry_.n_q_heads + head) * geometry_.dim], geometry_.dim,
                    pq + row * row_stride + head * head_stride);
      }
    }
    params.q = tq;
    params.o = to;
    ASSERT_EQ(kvm_attend(queue_, &params, nullptr), KVM_OK) << kvm_last_error();
    for (uint64_t i = 0; i < n * row_stride; ++i) {
      const uint64_t row = i / row_stride;
      const uint64_t head = i % row_stride / head_stride;
      const uint64_t d = i % row_stride % head_stride;
      const bool used = head < geometry_.n_q_heads && d < geometry_.dim;
      const float expected =
          used ? o[(row * geometry_.n_q_heads + head) * geometry_.dim + d] : -7.0f;
      ASSERT_EQ(po[i], expected) << "element " << i << (in_arena ? " in the arena" : " in HOST");
    }
  }
  kvm_arena_destroy(arena);
}

TEST_F(Abi, AsManyQueuesAndArenasAsPromised) {
  kvm_client_info info{};
  info.struct_size = sizeof(info);
  ASSERT_EQ(kvm_client_get_info(client_, &info), KVM_OK);
  // Through a queue of the library's own, where there is one.
  ASSERT_EQ(kvm_client_ping(client_, nullptr), KVM_OK) << kvm_last_error();
  std::vector<kvm_queue*> queues;
  kvm_queue_params params{};
  params.struct_size = sizeof(params);
  params.n_entries = 1;
  for (uint32_t i = 1; i < info.max_queues; ++i) {  // beside that of the fixture
    kvm_queue* queue = nullptr;
    ASSERT_EQ(kvm_queue_create(client_, &params, &queue), KVM_OK) << i << ": " << kvm_last_error();
    queues.push_back(queue);
  }
  std::vector<kvm_arena*> arenas;
  kvm_arena_params arena_params{};
  arena_params.struct_size = sizeof(arena_params);
  arena_params.size = 4096;
  for (uint32_t i = 0; i < info.max_arenas; ++i) {
    kvm_arena* arena = nullptr;
    ASSERT_EQ(kvm_arena_create(client_, &arena_params, &arena), KVM_OK)
        << i << ": " << kvm_last_error();
    arenas.push_back(arena);
  }
  for (kvm_queue* queue : queues) {
    kvm_queue_destroy(queue);
  }
  for (kvm_arena* arena : arenas) {
    kvm_arena_destroy(arena);
  }
}

TEST_F(Abi, ArenaAllocator) {
  kvm_arena_params params{};
  params.struct_size = sizeof(params);
  params.size = 1 << 20;
  kvm_arena* arena = nullptr;
  ASSERT_EQ(kvm_arena_create(client_, &params, &arena), KVM_OK) << kvm_last_error();
  std::vector<kvm_buffer> buffers;
  kvm_buffer buffer{};
  while (kvm_arena_alloc(arena, 10'000, 0, &buffer) == KVM_OK) {
    EXPECT_EQ(buffer.where % 64, 0u);
    std::memset(kvm_arena_data(arena, buffer), 1, buffer.size);
    buffers.push_back(buffer);
  }
  EXPECT_GT(buffers.size(), 95u);
  EXPECT_EQ(kvm_arena_alloc(arena, 10'000, 0, &buffer), KVM_ERR_NO_SPACE);
  for (const kvm_buffer& b : buffers) {
    kvm_arena_free(arena, b);
    kvm_arena_free(arena, b);  // a second time is ignored
  }
  EXPECT_EQ(kvm_arena_alloc(arena, 900'000, 4096, &buffer), KVM_OK);
  EXPECT_EQ(buffer.where % 4096, 0u);
  EXPECT_EQ(kvm_arena_alloc(arena, 1, 3, &buffer), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_arena_alloc(arena, 0, 0, &buffer), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_arena_data(arena, kvm_host_buffer(&params, 8)), nullptr);
  kvm_arena_destroy(arena);
  params.size = UINT64_MAX / 2;
  EXPECT_EQ(kvm_arena_create(client_, &params, &arena), KVM_ERR_LIMIT);
}

TEST_F(Abi, ForkTruncateCommitFree) {
  const kvm_seq_id seq = make_seq(KVM_SEQ_MANUAL_COMMIT);
  NaiveLayer naive(geometry_);
  append(seq, 0, 150, &naive);
  EXPECT_EQ(info_of(seq).n_committed, 0u);
  kvm_seq_id fork = 0;
  ASSERT_EQ(kvm_seq_fork(client_, seq, 100, &fork), KVM_OK) << kvm_last_error();
  NaiveLayer forked = naive;
  forked.truncate(100);
  append(fork, 0, 20, &forked);
  append(seq, 0, 1, &naive);
  check_attend(fork, 0, 2, forked);
  check_attend(seq, 0, 2, naive);
  ASSERT_EQ(kvm_seq_truncate(client_, fork, 90), KVM_OK) << kvm_last_error();
  forked.truncate(90);
  check_attend(fork, 0, 1, forked);
  EXPECT_EQ(info_of(fork).n_tokens_max, 90u);
  EXPECT_EQ(kvm_seq_truncate(client_, fork, 1000), KVM_OK);
  EXPECT_EQ(info_of(fork).n_tokens_max, 90u);

  // Layer 1 of seq is empty, so all layers have no token yet; the longest has 151.
  EXPECT_EQ(kvm_seq_commit(client_, seq, KVM_POSITION_END), KVM_OK) << kvm_last_error();
  EXPECT_EQ(info_of(seq).n_committed, 0u);
  EXPECT_EQ(kvm_seq_commit(client_, seq, 152), KVM_ERR_INVALID);
  NaiveLayer other(geometry_);
  append(seq, 1, 151, &other);
  ASSERT_EQ(kvm_seq_commit(client_, seq, 140), KVM_OK) << kvm_last_error();
  EXPECT_EQ(info_of(seq).n_committed, 140u);

  kvm_seq_id whole = 0;
  ASSERT_EQ(kvm_seq_fork(client_, seq, KVM_POSITION_END, &whole), KVM_OK) << kvm_last_error();
  check_attend(whole, 0, 4, naive);
  ASSERT_EQ(kvm_seq_free(client_, seq), KVM_OK) << kvm_last_error();
  check_attend(whole, 1, 4, other);
  EXPECT_EQ(kvm_seq_truncate(client_, seq, 1), KVM_ERR_STALE);
  EXPECT_GT(std::strlen(kvm_last_error()), 0u);
  kvm_seq_info info{};
  info.struct_size = sizeof(info);
  EXPECT_EQ(kvm_seq_get_info(client_, seq, &info), KVM_ERR_STALE);
  EXPECT_EQ(kvm_seq_fork(client_, whole, 1'000'000, &fork), KVM_ERR_INVALID);
}

TEST_F(Abi, ReadGivesBackWhatWasAppended) {
  const kvm_seq_id seq = make_seq();
  NaiveLayer naive(geometry_);
  append(seq, 0, 130, &naive);
  std::vector<float> k(kv_floats(70));
  std::vector<float> v(kv_floats(70));
  kvm_read_params params{};
  params.struct_size = sizeof(params);
  params.seq = seq;
  params.position = 60;
  params.n_tokens = 70;
  params.k = tensor_of(k);
  params.v = tensor_of(v);
  ASSERT_EQ(kvm_read(queue_, &params), KVM_OK) << kvm_last_error();
  EXPECT_TRUE(std::equal(k.begin(), k.end(), &naive.k()[kv_floats(60)]));
  EXPECT_TRUE(std::equal(v.begin(), v.end(), &naive.v()[kv_floats(60)]));
  params.position = 61;
  EXPECT_EQ(kvm_read(queue_, &params), KVM_ERR_INVALID) << "beyond the end";
}

// What is read back is near what was appended, and attention is that over what is read back.
// relative, largest_part: what a channel may be off, of itself or of the largest of its row,
// whichever is more.
void Abi::check_scaled_rows(const char* name, uint32_t codec, float relative, float largest_part) {
  geometry_.codec = codec;
  space_ = register_space(client_, name, geometry_);
  kvm_space_info info{};
  info.struct_size = sizeof(info);
  ASSERT_EQ(kvm_space_get_info(client_, space_, &info), KVM_OK) << kvm_last_error();
  EXPECT_EQ(info.bytes_per_token,
            2ull * geometry_.n_layers * geometry_.n_kv_heads * (geometry_.dim + 2));
  const kvm_seq_id seq = make_seq();
  NaiveLayer appended(geometry_);
  append(seq, 0, 150, &appended);
  std::vector<float> k(kv_floats(150));
  std::vector<float> v(kv_floats(150));
  kvm_read_params read{};
  read.struct_size = sizeof(read);
  read.seq = seq;
  read.n_tokens = 150;
  read.k = tensor_of(k);
  read.v = tensor_of(v);
  ASSERT_EQ(kvm_read(queue_, &read), KVM_OK) << kvm_last_error();
  for (size_t row = 0; row < k.size(); row += geometry_.dim) {
    float largest = 0;
    float off = 0;
    for (size_t i = row; i < row + geometry_.dim; ++i) {
      largest = std::max(largest, std::fabs(appended.k()[i]));
      off = std::max(off, std::fabs(appended.k()[i] - k[i]));
    }
    for (size_t i = row; i < row + geometry_.dim; ++i) {
      const float x = appended.k()[i];
      EXPECT_LE(std::fabs(x - k[i]),
                std::max(std::fabs(x) * relative, largest * largest_part) * 1.02f);
    }
    EXPECT_GT(off, 0.0f);
  }
  NaiveLayer stored(geometry_);
  stored.append(k, v);
  const auto q = random_floats(&random_, q_floats(9));
  std::vector<float> o(q_floats(9), -1);
  std::vector<float> lse(size_t{9} * geometry_.n_q_heads, -1);
  const kvm_item query = query_item(seq, 9);
  kvm_step_params attend = step_params(&query, 1, 0);
  attend.q = tensor_of(q);
  attend.o = tensor_of(o);
  attend.lse = tensor_of(lse);
  ASSERT_EQ(kvm_attend(queue_, &attend, nullptr), KVM_OK) << kvm_last_error();
  compare(stored, q, 9, 141, o, lse, 5e-4);
}

TEST_F(Abi, Int8RowsAreNear) { check_scaled_rows("int8", KVM_CODEC_I8, 0.0f, 0.5f / 127); }

TEST_F(Abi, Fp8RowsAreNear) { check_scaled_rows("fp8", KVM_CODEC_F8E4M3, 0x1p-4f, 0x1p-10f / 448); }

// No tensor has rows that only stored ones have, whatever the numbers of their codecs.
TEST_F(Abi, TensorsHaveDtypes) {
  const kvm_seq_id seq = make_seq();
  NaiveLayer naive(geometry_);
  append(seq, 0, 1, &naive);
  std::vector<float> k(kv_floats(1));
  kvm_read_params read{};
  read.struct_size = sizeof(read);
  read.seq = seq;
  read.n_tokens = 1;
  read.k = tensor_of(k);
  ASSERT_EQ(kvm_read(queue_, &read), KVM_OK) << kvm_last_error();
  const kvm_item query = query_item(seq, 1);
  const auto q = random_floats(&random_, q_floats(1));
  std::vector<float> o(q_floats(1));
  kvm_step_params attend = step_params(&query, 1, 0);
  attend.q = tensor_of(q);
  attend.o = tensor_of(o);
  ASSERT_EQ(kvm_attend(queue_, &attend, nullptr), KVM_OK) << kvm_last_error();
  for (const uint32_t codec : {KVM_CODEC_I8, KVM_CODEC_F8E4M3}) {
    read.k.dtype = codec;
    EXPECT_EQ(kvm_read(queue_, &read), KVM_ERR_INVALID);
    attend.q.dtype = codec;
    EXPECT_EQ(kvm_attend(queue_, &attend, nullptr), KVM_ERR_INVALID);
  }
}

TEST_F(Abi, CodecsHaveNames) {
  const std::pair<uint32_t, const char*> known[] = {{KVM_CODEC_F32, "fp32"},
                                                    {KVM_CODEC_F16, "fp16"},
                                                    {KVM_CODEC_BF16, "bf16"},
                                                    {KVM_CODEC_I8, "int8"},
                                                    {KVM_CODEC_F8E4M3, "fp8"}};
  for (const auto& [codec, name] : known) {
    EXPECT_STREQ(kvm_codec_name(codec), name);
    EXPECT_EQ(kvm_codec_find(name), codec);
  }
  // The numbers have no gaps, and each has one name.
  uint32_t n = 0;
  while (kvm_codec_name(n + 1) != nullptr) {
    ++n;
    EXPECT_EQ(kvm_codec_find(kvm_codec_name(n)), n);
  }
  EXPECT_GE(n, std::size(known));
  for (const uint32_t none : {0u, n + 1, 256u + KVM_CODEC_I8, UINT32_MAX}) {
    EXPECT_EQ(kvm_codec_name(none), nullptr) << none;
  }
  for (const char* none : {"", "INT8", "int", "int8 ", "float8"}) {
    EXPECT_EQ(kvm_codec_find(none), 0u) << none;
  }
  EXPECT_EQ(kvm_codec_find(nullptr), 0u);
}

TEST_F(Abi, ObserveIsKept) {
  const kvm_seq_id seq = make_seq();
  NaiveLayer naive(geometry_);
  append(seq, 0, 20, &naive);
  const auto q = random_floats(&random_, q_floats(4));
  const std::vector<float> sums(20 * geometry_.n_kv_heads, 0.5f);
  kvm_observe_params params{};
  params.struct_size = sizeof(params);
  params.seq = seq;
  params.n_rows = 4;
  params.query_position = 16;
  params.n_columns = 20;
  params.q = tensor_of(q);
  params.column_sums = tensor_of(sums);
  ASSERT_EQ(kvm_observe(queue_, &params), KVM_OK) << kvm_last_error();
  const kvm_seq_info info = info_of(seq);
  EXPECT_EQ(info.n_rows_observed, 4u);
  EXPECT_GT(info.bytes_observed, 0u);
}

TEST_F(Abi, SpacesAndLists) {
  kvm_space_id same = 0;
  ASSERT_EQ(kvm_space_find(client_, "abi", &same), KVM_OK) << kvm_last_error();
  EXPECT_EQ(same, space_);
  EXPECT_EQ(register_space(client_, "abi", geometry_), space_);
  EXPECT_EQ(kvm_space_find(client_, "nobody", &same), KVM_ERR_NOT_FOUND);
  kvm_space_params other{};
  other.struct_size = sizeof(other);
  other.name = "abi";
  other.n_layers = 3;
  other.n_q_heads = 4;
  other.head_dim_k = 16;
  EXPECT_EQ(kvm_space_register(client_, &other, &same), KVM_ERR_EXISTS);
  EXPECT_GT(std::strlen(kvm_last_error()), 0u);
  kvm_space_info info{};
  info.struct_size = sizeof(info);
  ASSERT_EQ(kvm_space_get_info(client_, space_, &info), KVM_OK) << kvm_last_error();
  EXPECT_STREQ(info.name, "abi");
  EXPECT_EQ(info.head_dim_v, 16u);

  const kvm_space_id second = register_space(client_, "abi-2", geometry_);
  kvm_space_info list[4]{};
  list[0].struct_size = sizeof(kvm_space_info);
  size_t count = 0;
  ASSERT_EQ(kvm_space_list(client_, list, 4, &count), KVM_OK) << kvm_last_error();
  EXPECT_EQ(count, 2u);
  EXPECT_EQ((std::set<kvm_space_id>{list[0].space, list[1].space}),
            (std::set<kvm_space_id>{space_, second}));
  ASSERT_EQ(kvm_space_list(client_, nullptr, 0, &count), KVM_OK);
  EXPECT_EQ(count, 2u);

  const kvm_seq_id seq = make_seq();
  EXPECT_EQ(kvm_space_drop(client_, space_), KVM_ERR_BUSY);
  std::set<kvm_seq_id> made{seq};
  for (int i = 0; i < 700; ++i) {  // more than one control message holds
    made.insert(make_seq());
  }
  ASSERT_EQ(kvm_seq_list(client_, space_, 0, nullptr, 0, &count), KVM_OK) << kvm_last_error();
  EXPECT_EQ(count, made.size());
  std::vector<kvm_seq_info> seqs(count);
  seqs[0].struct_size = sizeof(kvm_seq_info);
  ASSERT_EQ(kvm_seq_list(client_, 0, 0, seqs.data(), count, &count), KVM_OK);
  std::set<kvm_seq_id> listed;
  for (const kvm_seq_info& s : seqs) {
    listed.insert(s.seq);
  }
  EXPECT_EQ(listed, made);
  EXPECT_EQ(kvm_space_drop(client_, second), KVM_OK) << kvm_last_error();
  EXPECT_EQ(kvm_space_drop(client_, second), KVM_ERR_STALE);
}

TEST_F(Abi, Statistics) {
  const kvm_seq_id seq = make_seq();
  NaiveLayer naive(geometry_);
  append(seq, 0, 100, &naive);
  check_attend(seq, 0, 2, naive);
  kvm_stats stats{};
  stats.struct_size = sizeof(stats);
  ASSERT_EQ(kvm_get_stats(client_, &stats), KVM_OK) << kvm_last_error();
  EXPECT_EQ(stats.n_clients, 1u);
  EXPECT_EQ(stats.n_spaces, 1u);
  EXPECT_EQ(stats.n_sequences, 1u);
  EXPECT_EQ(stats.n_tokens_appended, 100u);
  EXPECT_EQ(stats.n_rows_attended, 2u);
  EXPECT_GT(stats.host_used_bytes, 0u);
  size_t length = 0;
  ASSERT_EQ(kvm_get_stats_text(client_, nullptr, 0, &length), KVM_OK) << kvm_last_error();
  std::string text(length + 1, 'x');
  ASSERT_EQ(kvm_get_stats_text(client_, text.data(), 20, &length), KVM_OK);
  EXPECT_EQ(std::strlen(text.c_str()), 19u) << "cut, with a NUL";
  text.assign(length + 100, 'x');
  ASSERT_EQ(kvm_get_stats_text(client_, text.data(), text.size(), &length), KVM_OK);
  EXPECT_NE(text.find("\nkvm_appended_tokens_total 100\n"), std::string::npos);
  EXPECT_NE(text.find("# TYPE kvm_sequences gauge\n"), std::string::npos);
}

// Ranges, the rest of the positions, and the merge of both states.
TEST_F(Abi, RangesAndMerge) {
  const kvm_seq_id seq = make_seq();
  NaiveLayer naive(geometry_);
  append(seq, 0, 180, &naive);
  const auto q = random_floats(&random_, q_floats(1));
  const kvm_range ranges[] = {{3, 50}, {64, 70}, {150, 151}};
  std::vector<float> o[2];
  std::vector<float> lse[2];
  for (int side = 0; side < 2; ++side) {
    o[side].resize(q_floats(1));
    lse[side].resize(geometry_.n_q_heads);
    kvm_item item = query_item(seq, 1);
    item.n_ranges = 3;
    item.flags = side == 0 ? 0 : KVM_ITEM_EXCLUDE_RANGES;
    kvm_step_params params = step_params(&item, 1, 0);
    params.ranges = ranges;
    params.n_ranges = 3;
    params.q = tensor_of(q);
    params.o = tensor_of(o[side]);
    params.lse = tensor_of(lse[side]);
    ASSERT_EQ(kvm_attend(queue_, &params, nullptr), KVM_OK) << kvm_last_error();
    std::vector<double> expected_o;
    std::vector<double> expected_lse;
    naive.attend(
        q.data(),
        [&](uint64_t t) {
          const bool in = (t >= 3 && t < 50) || (t >= 64 && t < 70) || t == 150;
          return in == (side == 0);
        },
        &expected_o, &expected_lse);
    EXPECT_LE(difference(o[side].data(), expected_o), kF32);
    EXPECT_LE(difference(lse[side].data(), expected_lse), kF32);
  }
  ASSERT_NO_FATAL_FAILURE(merge_two(1, o, lse));
  compare(naive, q, 1, 179, o[0], lse[0], kF32);
}

TEST_F(Abi, MergeOfEmptyStates) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  std::vector<float> empty_o(8, 0);
  std::vector<float> empty_lse(1, -kInf);
  std::vector<float> full_o = random_floats(&random_, 8);
  std::vector<float> full_lse(1, 2.5f);
  std::vector<float> out_o(8);
  std::vector<float> out_lse(1);
  kvm_tensor o[] = {tensor_of(empty_o), tensor_of(full_o), tensor_of(empty_o)};
  kvm_tensor lse[] = {tensor_of(empty_lse), tensor_of(full_lse), tensor_of(empty_lse)};
  kvm_merge_params merge{};
  merge.struct_size = sizeof(merge);
  merge.n_states = 3;
  merge.n_rows = 1;
  merge.n_heads = 1;
  merge.dim = 8;
  merge.o = o;
  merge.lse = lse;
  merge.out_o = tensor_of(out_o);
  merge.out_lse = tensor_of(out_lse);
  ASSERT_EQ(kvm_merge(&merge), KVM_OK) << kvm_last_error();
  EXPECT_EQ(out_o, full_o);
  EXPECT_EQ(out_lse, full_lse);
  merge.n_states = 1;
  ASSERT_EQ(kvm_merge(&merge), KVM_OK);
  EXPECT_EQ(out_o, empty_o);
  EXPECT_EQ(out_lse, empty_lse);
  merge.n_states = 0;
  EXPECT_EQ(kvm_merge(&merge), KVM_ERR_INVALID);
  merge.n_states = 65;
  EXPECT_EQ(kvm_merge(&merge), KVM_ERR_INVALID);
  merge.n_states = 3;
  merge.n_rows = 2;
  EXPECT_EQ(kvm_merge(&merge), KVM_ERR_INVALID) << "the buffers are too small";
}

TEST_F(Abi, TreeMask) {
  const kvm_seq_id seq = make_seq();
  NaiveLayer naive(geometry_);
  append(seq, 0, 70, &naive);
  append(seq, 0, 3, &naive);
  const auto q = random_floats(&random_, q_floats(3));
  std::vector<float> o(q_floats(3));
  const uint64_t tree[] = {1, 3, 5};  // rows 1 and 2 are both children of row 0
  kvm_item item = query_item(seq, 3);
  item.flags = KVM_ITEM_TREE;
  kvm_step_params params = step_params(&item, 1, 0);
  params.tree_mask = tree;
  params.n_tree_words = 3;
  params.q = tensor_of(q);
  params.o = tensor_of(o);
  ASSERT_EQ(kvm_attend(queue_, &params, nullptr), KVM_OK) << kvm_last_error();
  for (uint32_t row = 0; row < 3; ++row) {
    std::vector<double> expected_o;
    std::vector<double> expected_lse;
    naive.attend(
        &q[q_floats(row)], [&](uint64_t t) { return t < 70 || (tree[row] >> (t - 70) & 1) != 0; },
        &expected_o, &expected_lse);
    EXPECT_LE(difference(&o[q_floats(row)], expected_o), kF32) << row;
  }
}

TEST_F(Abi, AsyncKeepsOrderOnASequence) {
  const kvm_seq_id seq = make_seq();
  NaiveLayer naive(geometry_);
  append(seq, 0, 64, &naive);
  // Append, attend, truncate in one submit: what a speculative step does.
  const auto k = random_floats(&random_, kv_floats(1));
  const auto v = random_floats(&random_, kv_floats(1));
  const auto q = random_floats(&random_, q_floats(1));
  std::vector<float> o(q_floats(1));
  kvm_item item = append_item(seq, 1);
  kvm_step_params params = step_params(&item, 1, 0);
  params.k = tensor_of(k);
  params.v = tensor_of(v);
  ASSERT_EQ(kvm_append_async(queue_, &params, 1), KVM_OK) << kvm_last_error();
  item = query_item(seq, 1);
  params.q = tensor_of(q);
  params.o = tensor_of(o);
  ASSERT_EQ(kvm_attend_async(queue_, &params, 2), KVM_OK) << kvm_last_error();
  ASSERT_EQ(kvm_seq_truncate_async(queue_, seq, 64, 3), KVM_OK) << kvm_last_error();
  ASSERT_EQ(kvm_seq_commit_async(queue_, seq, 1'000'000, 4), KVM_OK);
  EXPECT_EQ(kvm_attend(queue_, &params, nullptr), KVM_ERR_BUSY);
  ASSERT_EQ(kvm_submit(queue_), KVM_OK) << kvm_last_error();
  kvm_completion completions[8];
  ASSERT_EQ(kvm_wait(queue_, completions, 8, 8, UINT64_MAX), 4) << "no more are outstanding";
  std::sort(completions, completions + 4,
            [](const auto& a, const auto& b) { return a.user_data < b.user_data; });
  for (uint64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(completions[i].user_data, i + 1);
    EXPECT_EQ(completions[i].status, i == 3 ? KVM_ERR_INVALID : KVM_OK) << i;
  }
  EXPECT_GT(std::strlen(kvm_last_error()), 0u);
  EXPECT_EQ(completions[1].keys_present, 65u * geometry_.n_kv_heads);
  naive.append(k, v);
  compare(naive, q, 1, 64, o, {}, kF32);
  EXPECT_EQ(info_of(seq).n_tokens_max, 64u);
  EXPECT_EQ(kvm_poll(queue_, completions, 8), 0);
}

TEST_F(Abi, AsyncFullQueueAndCancel) {
  kvm_queue_params queue_params{};
  queue_params.struct_size = sizeof(queue_params);
  queue_params.n_entries = 5;  // rounded up to 8
  kvm_queue* queue = nullptr;
  ASSERT_EQ(kvm_queue_create(client_, &queue_params, &queue), KVM_OK) << kvm_last_error();
  for (uint64_t i = 0; i < 8; ++i) {
    ASSERT_EQ(kvm_nop_async(queue, 100 + i), KVM_OK) << kvm_last_error();
  }
  EXPECT_EQ(kvm_nop_async(queue, 0), KVM_ERR_AGAIN);
  kvm_completion completions[8];
  EXPECT_EQ(kvm_wait(queue, completions, 8, 1, 1000), 0) << "nothing was submitted";
  ASSERT_EQ(kvm_submit(queue), KVM_OK);
  std::set<uint64_t> seen;
  while (seen.size() < 8) {
    const int32_t n = kvm_wait(queue, completions, 3, 1, UINT64_MAX);
    ASSERT_GT(n, 0) << kvm_last_error();
    for (int32_t i = 0; i < n; ++i) {
      EXPECT_EQ(completions[i].status, KVM_OK);
      EXPECT_TRUE(seen.insert(completions[i].user_data).second) << "completed twice";
    }
  }
  EXPECT_EQ(kvm_cancel(queue, 100), KVM_ERR_NOT_FOUND);
  // Cancelled or not, each completes once.
  for (int round = 0; round < 50; ++round) {
    ASSERT_EQ(kvm_nop_async(queue, 1), KVM_OK) << kvm_last_error();
    ASSERT_EQ(kvm_nop_async(queue, 2), KVM_OK);
    ASSERT_EQ(kvm_submit(queue), KVM_OK);
    const kvm_status cancelled = kvm_cancel(queue, 1);
    EXPECT_TRUE(cancelled == KVM_OK || cancelled == KVM_ERR_NOT_FOUND);
    ASSERT_EQ(kvm_wait(queue, completions, 8, 2, UINT64_MAX), 2);
    EXPECT_EQ(completions[0].user_data + completions[1].user_data, 3u);
  }
  EXPECT_EQ(kvm_poll(queue, completions, 0), KVM_ERR_INVALID);
  kvm_queue_destroy(queue);
}

TEST_F(Abi, QueueWithRequestsInFlightCanBeDestroyed) {
  const kvm_seq_id seq = make_seq();
  NaiveLayer naive(geometry_);
  append(seq, 0, 500, &naive);
  kvm_queue* queue = nullptr;
  ASSERT_EQ(kvm_queue_create(client_, nullptr, &queue), KVM_OK);
  const auto q = random_floats(&random_, q_floats(100));
  std::vector<std::vector<float>> o(50, std::vector<float>(q_floats(100)));
  const kvm_item item = query_item(seq, 100);
  for (auto& out : o) {
    kvm_step_params params = step_params(&item, 1, 0);
    params.q = tensor_of(q);
    params.o = tensor_of(out);
    const kvm_status status = kvm_attend_async(queue, &params, 1);
    ASSERT_TRUE(status == KVM_OK || status == KVM_ERR_AGAIN) << kvm_last_error();
  }
  ASSERT_EQ(kvm_submit(queue), KVM_OK);
  ASSERT_EQ(kvm_nop_async(queue, 9), KVM_OK) << "staged and never submitted";
  kvm_queue_destroy(queue);
  check_attend(seq, 0, 1, naive);
}

struct BadInput {
  const char* what;
  kvm_status expected;
  std::function<void(kvm_step_params*, kvm_item*)> damage;
};

TEST_F(Abi, BadInputHasItsStatusAndChangesNothing) {
  const kvm_seq_id seq = make_seq();
  const kvm_seq_id freed = make_seq();
  ASSERT_EQ(kvm_seq_free(client_, freed), KVM_OK);
  NaiveLayer naive(geometry_);
  append(seq, 0, 10, &naive);
  const auto k = random_floats(&random_, kv_floats(2));
  const auto v = random_floats(&random_, kv_floats(2));
  const auto q = random_floats(&random_, q_floats(1));
  std::vector<float> o(q_floats(1), -1);
  std::vector<float> lse(geometry_.n_q_heads, -1);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const BadInput cases[] = {
      {"hole", KVM_ERR_HOLE, [](auto*, auto* i) { i->append_position = 11; }},
      {"overwrite", KVM_ERR_HOLE, [](auto*, auto* i) { i->append_position = 9; }},
      {"stale sequence", KVM_ERR_STALE, [&](auto*, auto* i) { i->seq = freed; }},
      {"no such layer", KVM_ERR_INVALID, [](auto* p, auto*) { p->layer_begin = 2; }},
      {"two layers", KVM_ERR_INVALID, [](auto* p, auto*) { p->n_layers = 2; }},
      {"unknown flags", KVM_ERR_INVALID, [](auto* p, auto*) { p->flags = 64; }},
      {"reserved", KVM_ERR_INVALID, [](auto* p, auto*) { p->reserved[7] = 1; }},
      {"item flags", KVM_ERR_INVALID, [](auto*, auto* i) { i->flags = 1u << 31; }},
      {"item reserved", KVM_ERR_INVALID, [](auto*, auto* i) { i->reserved = 8; }},
      {"no items", KVM_ERR_INVALID, [](auto* p, auto*) { p->n_items = 0; }},
      {"items NULL", KVM_ERR_INVALID, [](auto* p, auto*) { p->items = nullptr; }},
      {"NaN scale", KVM_ERR_INVALID, [&](auto* p, auto*) { p->scale = nan; }},
      {"negative scale", KVM_ERR_INVALID, [](auto* p, auto*) { p->scale = -1; }},
      {"unknown mode", KVM_ERR_INVALID, [](auto* p, auto*) { p->mode = 17; }},
      {"dtype", KVM_ERR_INVALID, [](auto* p, auto*) { p->k.dtype = 9; }},
      {"lse dtype", KVM_ERR_INVALID, [](auto* p, auto*) { p->lse.dtype = KVM_DTYPE_F16; }},
      {"no k", KVM_ERR_INVALID, [](auto* p, auto*) { p->k = kvm_tensor{}; }},
      {"no q", KVM_ERR_INVALID, [](auto* p, auto*) { p->q = kvm_tensor{}; }},
      {"no o", KVM_ERR_INVALID, [](auto* p, auto*) { p->o = kvm_tensor{}; }},
      {"short k", KVM_ERR_INVALID, [](auto* p, auto*) { p->k.buffer.size -= 4; }},
      {"short o", KVM_ERR_INVALID, [](auto* p, auto*) { p->o.buffer.size -= 4; }},
      {"row beyond k", KVM_ERR_INVALID, [](auto*, auto* i) { i->append_row = 1; }},
      {"row beyond o", KVM_ERR_INVALID, [](auto*, auto* i) { i->query_row = 1; }},
      {"stride wraps", KVM_ERR_INVALID,
       [](auto* p, auto* i) {
         p->k.stride_row = UINT64_MAX / 2;
         i->append_row = 4;
       }},
      {"overlapping stride", KVM_ERR_INVALID, [](auto* p, auto*) { p->o.stride_head = 1; }},
      {"odd address", KVM_ERR_INVALID, [](auto* p, auto*) { p->q.buffer.where += 1; }},
      {"o over q", KVM_ERR_INVALID, [](auto* p, auto*) { p->o = p->q; }},
      {"device buffer", KVM_ERR_UNSUPPORTED,
       [](auto* p, auto*) { p->q.buffer.kind = KVM_BUFFER_DEVICE; }},
      {"unknown arena", KVM_ERR_INVALID,
       [](auto* p, auto*) {
         p->q.buffer = {KVM_BUFFER_ARENA, 4321, 0, p->q.buffer.size};
       }},
      {"ranges out of bounds", KVM_ERR_INVALID, [](auto*, auto* i) { i->n_ranges = 1; }},
      {"tree out of bounds", KVM_ERR_INVALID, [](auto*, auto* i) { i->flags = KVM_ITEM_TREE; }},
      {"struct_size 0", KVM_ERR_INVALID, [](auto* p, auto*) { p->struct_size = 0; }},
      {"deadline over", KVM_ERR_DEADLINE, [](auto* p, auto*) { p->deadline_ns = 1; }},
  };
  for (const BadInput& bad : cases) {
    SCOPED_TRACE(bad.what);
    kvm_item item = append_item(seq, 2);
    item.append_position = 10;
    item.n_query = 1;
    item.query_position = KVM_POSITION_END;
    kvm_step_params params = step_params(&item, 1, 0);
    params.k = tensor_of(k);
    params.v = tensor_of(v);
    params.q = tensor_of(q);
    params.o = tensor_of(o);
    params.lse = tensor_of(lse);
    bad.damage(&params, &item);
    const kvm_status status = kvm_step(queue_, &params, nullptr);
    EXPECT_EQ(status, bad.expected)
        << kvm_status_name(status) << ": " << (status != KVM_OK ? kvm_last_error() : "");
    EXPECT_GT(std::strlen(kvm_last_error()), 10u);
    EXPECT_EQ(info_of(seq).n_tokens_max, 10u);
    EXPECT_TRUE(std::all_of(o.begin(), o.end(), [](float x) { return x == -1; }));
  }
  check_attend(seq, 0, 1, naive);
}

TEST_F(Abi, NullAndZeroArguments) {
  kvm_client* client = nullptr;
  EXPECT_EQ(kvm_connect(nullptr, nullptr), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_client_get_info(nullptr, nullptr), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_client_get_info(client_, nullptr), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_queue_create(client_, nullptr, nullptr), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_space_register(client_, nullptr, &space_), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_step(queue_, nullptr, nullptr), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_step(nullptr, nullptr, nullptr), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_merge(nullptr), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_seq_truncate(client_, 0, 0), KVM_ERR_NOT_FOUND);
  EXPECT_EQ(kvm_seq_create(client_, 12345, nullptr, nullptr), KVM_ERR_INVALID);
  kvm_client_close(client);
  kvm_queue_destroy(nullptr);
  kvm_arena_destroy(nullptr);
  EXPECT_EQ(kvm_queue_fd(nullptr), -1);
  EXPECT_EQ(kvm_poll(nullptr, nullptr, 1), KVM_ERR_INVALID);
}

// Programs built against an older or a newer header.
TEST_F(Abi, StructSizes) {
  struct {
    kvm_seq_params known;
    uint64_t later[2];
  } newer{};
  newer.known.struct_size = sizeof(newer);
  kvm_seq_id seq = 0;
  EXPECT_EQ(kvm_seq_create(client_, space_, &newer.known, &seq), KVM_OK) << kvm_last_error();
  newer.later[1] = 1;
  EXPECT_EQ(kvm_seq_create(client_, space_, &newer.known, &seq), KVM_ERR_INVALID);
  kvm_seq_params older{};
  older.struct_size = 8;
  older.reserve = 77;
  older.reserved[0] = 1;  // beyond the older structure's end: not looked at
  EXPECT_EQ(kvm_seq_create(client_, space_, &older, &seq), KVM_OK) << kvm_last_error();

  // A step of a caller whose header ended before the reserved words.
  NaiveLayer naive(geometry_);
  const auto k = random_floats(&random_, kv_floats(1));
  const kvm_item item = append_item(seq, 1);
  kvm_step_params params = step_params(&item, 1, 0);
  params.struct_size = offsetof(kvm_step_params, scale);
  params.scale = std::numeric_limits<float>::quiet_NaN();
  params.k = tensor_of(k);
  params.v = tensor_of(k);
  EXPECT_EQ(kvm_append(queue_, &params), KVM_OK) << kvm_last_error();

  uint8_t bytes[sizeof(kvm_client_info) + 64];
  for (const uint32_t size : {16u, static_cast<uint32_t>(sizeof(bytes))}) {
    std::memset(bytes, 0xee, sizeof(bytes));
    std::memcpy(bytes, &size, sizeof(size));
    auto* info = reinterpret_cast<kvm_client_info*>(bytes);
    ASSERT_EQ(kvm_client_get_info(client_, info), KVM_OK) << kvm_last_error();
    EXPECT_EQ(info->struct_size, size);
    EXPECT_EQ(info->protocol_major, 1u);
    if (size == 16) {
      EXPECT_EQ(bytes[16], 0xee) << "written beyond the caller's structure";
    } else {
      EXPECT_EQ(bytes[sizeof(bytes) - 1], 0) << "unknown fields of the caller are zero";
    }
  }
}

TEST_F(Abi, HandlesMayBeDestroyedAfterTheirClient) {
  kvm_arena* arena = nullptr;
  ASSERT_EQ(kvm_arena_create(client_, nullptr, &arena), KVM_OK) << kvm_last_error();
  kvm_buffer buffer{};
  ASSERT_EQ(kvm_arena_alloc(arena, 100, 0, &buffer), KVM_OK);
  ASSERT_EQ(kvm_nop_async(queue_, 5), KVM_OK);
  kvm_client_close(client_);
  client_ = nullptr;
  std::memset(kvm_arena_data(arena, buffer), 1, 100);
  EXPECT_EQ(kvm_arena_alloc(arena, 100, 0, &buffer), KVM_ERR_DISCONNECTED);
  EXPECT_EQ(kvm_submit(queue_), KVM_ERR_DISCONNECTED);
  kvm_completion completion{};
  ASSERT_EQ(kvm_poll(queue_, &completion, 1), 1);
  EXPECT_EQ(completion.user_data, 5u);
  EXPECT_EQ(completion.status, KVM_ERR_DISCONNECTED);
  EXPECT_EQ(kvm_poll(queue_, &completion, 1), KVM_ERR_DISCONNECTED);
  EXPECT_EQ(kvm_nop_async(queue_, 6), KVM_ERR_DISCONNECTED);
  kvm_queue_destroy(queue_);
  queue_ = nullptr;
  kvm_arena_destroy(arena);
}

// An engine that has the newest tokens itself asks for the others at the true position of its
// queries, which lies beyond what is stored, and merges.
TEST_F(Abi, QueriesBeyondTheLengthSeeWhatIsStored) {
  constexpr uint32_t kStored = 100;
  constexpr uint32_t kOwn = 40;
  constexpr uint32_t kRows = 3;
  const kvm_seq_id seq = make_seq();
  NaiveLayer whole(geometry_);
  append(seq, 0, kStored, &whole);
  NaiveLayer own(geometry_);
  const auto own_k = random_floats(&random_, kv_floats(kOwn));
  const auto own_v = random_floats(&random_, kv_floats(kOwn));
  own.append(own_k, own_v);
  whole.append(own_k, own_v);
  const auto q = random_floats(&random_, q_floats(kRows));
  std::vector<float> o[2] = {std::vector<float>(q_floats(kRows)), std::vector<float>()};
  std::vector<float> lse[2] = {std::vector<float>(size_t{kRows} * geometry_.n_q_heads), {}};
  kvm_item item = query_item(seq, kRows);
  item.query_position = kStored + kOwn - kRows;
  kvm_step_params params = step_params(&item, 1, 0);
  params.q = tensor_of(q);
  params.o = tensor_of(o[0]);
  params.lse = tensor_of(lse[0]);
  kvm_step_stats stats{};
  stats.struct_size = sizeof(stats);
  ASSERT_EQ(kvm_attend(queue_, &params, &stats), KVM_OK) << kvm_last_error();
  EXPECT_EQ(stats.keys_present, uint64_t{kStored} * geometry_.n_kv_heads);
  for (uint32_t row = 0; row < kRows; ++row) {
    std::vector<double> row_o;
    std::vector<double> row_lse;
    own.attend(
        &q[q_floats(row)], [&](uint64_t t) { return t <= kOwn - kRows + row; }, &row_o, &row_lse);
    o[1].insert(o[1].end(), row_o.begin(), row_o.end());
    lse[1].insert(lse[1].end(), row_lse.begin(), row_lse.end());
  }
  ASSERT_NO_FATAL_FAILURE(merge_two(kRows, o, lse));
  compare(whole, q, kRows, kStored + kOwn - kRows, o[0], lse[0], kF32);

  // Where positions end is the end of that.
  item.query_position = (uint64_t{1} << 38) - kRows;
  EXPECT_EQ(kvm_attend(queue_, &params, nullptr), KVM_OK) << kvm_last_error();
  item.query_position += 1;
  EXPECT_EQ(kvm_attend(queue_, &params, nullptr), KVM_ERR_INVALID);
  EXPECT_NE(std::strstr(kvm_last_error(), "query_position of item 0 is 274877906942"), nullptr)
      << kvm_last_error();
}

// A window counts from the row's own position, whatever is stored.
TEST_F(Abi, WindowsOfQueriesBeyondTheLength) {
  constexpr uint32_t kWindow = 50;
  kvm_layer_params layer{};
  layer.n_layers = 1;
  layer.window = kWindow;
  kvm_space_params geometry{};
  geometry.struct_size = sizeof(geometry);
  geometry.name = "windows";
  geometry.n_layers = 1;
  geometry.n_q_heads = geometry_.n_q_heads;
  geometry.n_kv_heads = geometry_.n_kv_heads;
  geometry.head_dim_k = geometry_.dim;
  geometry.codec = geometry_.codec;
  geometry.layers = &layer;
  geometry.n_layer_params = 1;
  ASSERT_EQ(kvm_space_register(client_, &geometry, &space_), KVM_OK) << kvm_last_error();
  const kvm_seq_id seq = make_seq();
  NaiveLayer naive(geometry_);
  append(seq, 0, 100, &naive);
  const auto q = random_floats(&random_, q_floats(1));
  std::vector<float> o(q_floats(1));
  std::vector<float> lse(geometry_.n_q_heads);
  for (const uint64_t position : {100u, 130u, 148u, 149u, 1000u}) {
    kvm_item item = query_item(seq, 1);
    item.query_position = position;
    kvm_step_params params = step_params(&item, 1, 0);
    params.q = tensor_of(q);
    params.o = tensor_of(o);
    params.lse = tensor_of(lse);
    ASSERT_EQ(kvm_attend(queue_, &params, nullptr), KVM_OK) << kvm_last_error();
    if (position >= 149) {
      EXPECT_EQ(o, std::vector<float>(q_floats(1), 0.0f));
      EXPECT_EQ(lse, std::vector<float>(geometry_.n_q_heads, -INFINITY));
      continue;
    }
    std::vector<double> expected_o;
    std::vector<double> expected_lse;
    naive.attend(
        q.data(), [&](uint64_t t) { return t > position - kWindow; }, &expected_o, &expected_lse);
    EXPECT_LE(difference(o.data(), expected_o), kF32) << position;
    EXPECT_LE(difference(lse.data(), expected_lse), kF32) << position;
  }
}

TEST_F(Abi, AsManyRangesAsPromised) {
  constexpr uint32_t kMost = 65536;
  const kvm_seq_id seq = make_seq();
  NaiveLayer naive(geometry_);
  append(seq, 0, 300, &naive);
  // Every second position, most of them beyond what is stored.
  std::vector<kvm_range> ranges;
  for (uint64_t i = 0; i <= kMost; ++i) {
    ranges.push_back({2 * i, 2 * i + 1});
  }
  const auto q = random_floats(&random_, q_floats(2));
  std::vector<float> o(q_floats(2));
  kvm_item items[2] = {query_item(seq, 1), query_item(seq, 1)};
  items[1].query_row = 1;
  items[0].n_ranges = kMost;
  kvm_step_params params = step_params(items, 1, 0);
  params.ranges = ranges.data();
  params.n_ranges = kMost;
  params.q = tensor_of(q);
  params.o = tensor_of(o);
  ASSERT_EQ(kvm_attend(queue_, &params, nullptr), KVM_OK) << kvm_last_error();
  std::vector<double> expected_o;
  std::vector<double> expected_lse;
  naive.attend(
      q.data(), [](uint64_t t) { return t % 2 == 0; }, &expected_o, &expected_lse);
  EXPECT_LE(difference(o.data(), expected_o), kF32);
  params.n_ranges = kMost + 1;
  EXPECT_EQ(kvm_attend(queue_, &params, nullptr), KVM_ERR_INVALID);
  EXPECT_NE(std::strstr(kvm_last_error(), "65536"), nullptr) << kvm_last_error();
  // Items that share them have them together.
  params.n_ranges = kMost;
  params.n_items = 2;
  items[1].n_ranges = 1;
  EXPECT_EQ(kvm_attend(queue_, &params, nullptr), KVM_ERR_INVALID);
  EXPECT_NE(std::strstr(kvm_last_error(), "65537"), nullptr) << kvm_last_error();
}

TEST_F(Abi, ReserveArrivesAndIsAHint) {
  kvm_seq_params params{};
  params.struct_size = sizeof(params);
  params.reserve = uint64_t{1} << 38;
  kvm_seq_id seq = 0;
  ASSERT_EQ(kvm_seq_create(client_, space_, &params, &seq), KVM_OK) << kvm_last_error();
  EXPECT_EQ(info_of(seq).bytes, 0u);
  NaiveLayer naive(geometry_);
  append(seq, 0, 100, &naive);
  check_attend(seq, 0, 2, naive);
  params.reserve = 50;
  ASSERT_EQ(kvm_seq_create(client_, space_, &params, &seq), KVM_OK) << kvm_last_error();
  NaiveLayer longer(geometry_);
  append(seq, 0, 100, &longer);
  check_attend(seq, 0, 2, longer);
  params.reserve = (uint64_t{1} << 38) + 1;
  kvm_seq_id untouched = 7;
  EXPECT_EQ(kvm_seq_create(client_, space_, &params, &untouched), KVM_ERR_INVALID);
  EXPECT_NE(std::strstr(kvm_last_error(), "reserve is 274877906945"), nullptr) << kvm_last_error();
  EXPECT_EQ(untouched, 7u);
}

// What is outstanding does not hide that the service is gone.
TEST_F(Abi, CallsAfterCloseAreDisconnectedWhateverIsOutstanding) {
  const kvm_seq_id seq = make_seq();
  NaiveLayer naive(geometry_);
  append(seq, 0, 10, &naive);
  const auto k = random_floats(&random_, kv_floats(1));
  const auto q = random_floats(&random_, q_floats(1));
  std::vector<float> o(q_floats(1));
  std::vector<float> rows(kv_floats(1));
  ASSERT_EQ(kvm_nop_async(queue_, 1), KVM_OK);
  ASSERT_EQ(kvm_submit(queue_), KVM_OK);
  ASSERT_EQ(kvm_nop_async(queue_, 2), KVM_OK) << "staged only";
  kvm_client_close(client_);
  client_ = nullptr;

  kvm_item item = append_item(seq, 1);
  kvm_step_params step = step_params(&item, 1, 0);
  step.k = tensor_of(k);
  step.v = tensor_of(k);
  step.q = tensor_of(q);
  step.o = tensor_of(o);
  kvm_read_params read{};
  read.struct_size = sizeof(read);
  read.seq = seq;
  read.n_tokens = 1;
  read.k = tensor_of(rows);
  kvm_observe_params observe{};
  observe.struct_size = sizeof(observe);
  observe.seq = seq;
  const auto all_calls = [&](const char* when) {
    EXPECT_EQ(kvm_append(queue_, &step), KVM_ERR_DISCONNECTED) << when << kvm_last_error();
    EXPECT_EQ(kvm_step(queue_, &step, nullptr), KVM_ERR_DISCONNECTED) << when << kvm_last_error();
    EXPECT_EQ(kvm_read(queue_, &read), KVM_ERR_DISCONNECTED) << when << kvm_last_error();
    EXPECT_EQ(kvm_observe(queue_, &observe), KVM_ERR_DISCONNECTED) << when << kvm_last_error();
    EXPECT_EQ(kvm_append_async(queue_, &step, 3), KVM_ERR_DISCONNECTED) << when;
    EXPECT_EQ(kvm_nop_async(queue_, 4), KVM_ERR_DISCONNECTED) << when;
    EXPECT_EQ(kvm_submit(queue_), KVM_ERR_DISCONNECTED) << when;
    EXPECT_EQ(kvm_cancel(queue_, 1), KVM_ERR_DISCONNECTED) << when << kvm_last_error();
    EXPECT_EQ(kvm_cancel(queue_, 99), KVM_ERR_DISCONNECTED) << when << kvm_last_error();
  };
  all_calls("outstanding: ");
  kvm_completion completions[4];
  std::set<uint64_t> answered;
  int32_t n = 0;
  while ((n = kvm_wait(queue_, completions, 4, 1, UINT64_MAX)) > 0) {
    for (int32_t i = 0; i < n; ++i) {
      EXPECT_TRUE(answered.insert(completions[i].user_data).second);
    }
  }
  EXPECT_EQ(n, KVM_ERR_DISCONNECTED);
  EXPECT_EQ(answered, (std::set<uint64_t>{1, 2}));
  all_calls("taken: ");
}

TEST_F(Abi, ChildOfAForkIsRecognised) {
  const pid_t child = ::fork();
  if (child == 0) {
    const bool ok = kvm_client_ping(client_, nullptr) == KVM_ERR_FORKED &&
                    kvm_submit(queue_) == KVM_ERR_FORKED && std::strlen(kvm_last_error()) > 0;
    ::_exit(ok ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(kvm_client_ping(client_, nullptr), KVM_OK) << kvm_last_error();
}

// Embedded, whoever waits works for all: the answer may come by another thread at any moment.
TEST_F(Abi, AnswersThatOtherThreadsBringAreTaken) {
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([this] {
      kvm_queue* queue = nullptr;
      ASSERT_EQ(kvm_queue_create(client_, nullptr, &queue), KVM_OK) << kvm_last_error();
      kvm_seq_id seq = 0;
      ASSERT_EQ(kvm_seq_create(client_, space_, nullptr, &seq), KVM_OK) << kvm_last_error();
      const std::vector<float> q(q_floats(1), 1.0f);
      std::vector<float> o(q_floats(1));
      kvm_item item{};
      item.seq = seq;
      item.n_query = 1;
      kvm_step_params params = step_params(&item, 1, 1);
      params.q = tensor_of(q);
      params.o = tensor_of(o);
      for (int round = 0; round < 20000; ++round) {
        ASSERT_EQ(kvm_attend(queue, &params, nullptr), KVM_OK) << round << kvm_last_error();
      }
      kvm_queue_destroy(queue);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST_F(Abi, ThreadsWithQueuesOfTheirOwn) {
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      kvm_queue* queue = nullptr;
      ASSERT_EQ(kvm_queue_create(client_, nullptr, &queue), KVM_OK) << kvm_last_error();
      std::mt19937 random(t);
      for (int round = 0; round < 20; ++round) {
        kvm_seq_id seq = 0;
        ASSERT_EQ(kvm_seq_create(client_, space_, nullptr, &seq), KVM_OK) << kvm_last_error();
        const auto k = random_floats(&random, kv_floats(10));
        const auto q = random_floats(&random, q_floats(1));
        std::vector<float> o(q_floats(1));
        kvm_item item = append_item(seq, 10);
        item.n_query = 1;
        item.query_position = KVM_POSITION_END;
        kvm_step_params params = step_params(&item, 1, 1);
        params.k = tensor_of(k);
        params.v = tensor_of(k);
        params.q = tensor_of(q);
        params.o = tensor_of(o);
        ASSERT_EQ(kvm_step(queue, &params, nullptr), KVM_OK) << kvm_last_error();
        NaiveLayer naive(geometry_);
        naive.append(k, k);
        std::vector<double> expected_o;
        std::vector<double> expected_lse;
        naive.attend(
            q.data(), [](uint64_t) { return true; }, &expected_o, &expected_lse);
        EXPECT_LE(difference(o.data(), expected_o), kF32);
        ASSERT_EQ(kvm_seq_free(client_, seq), KVM_OK) << kvm_last_error();
      }
      kvm_queue_destroy(queue);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST_F(Abi, OpenEmbeddedIsInTheEmbeddedLibraryOnly) {
  kvm_embedded_params params{};
  params.struct_size = sizeof(params);
  params.host_capacity_bytes = 64 << 20;
  kvm_client* client = nullptr;
  EXPECT_EQ(kvm_open_embedded(&params, &client), is_embedded() ? KVM_OK : KVM_ERR_UNSUPPORTED);
  if (is_embedded()) {
    kvm_client_close(client);  // a second engine beside the first
  } else {
    EXPECT_GT(std::strlen(kvm_last_error()), 0u);
  }
}

}  // namespace
}  // namespace kvm::testing
