// SPDX-License-Identifier: Apache-2.0
// Rows read back, states merged, and both together: a device that has sinks and the newest tokens
// beside an engine for CPUs that has the middle, against fp64 arithmetic over all tokens.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "attention/cuda/params.h"
#include "base/codec_id.h"
#include "base/dtype.h"
#include "codecs/codec.h"
#include "tests/gpu/device_rig.h"

namespace kvm::device::testing {
namespace {

constexpr uint8_t kUntouched = 0xa5;

float widened(const uint8_t* at, uint32_t dtype) {
  if (dtype == KVM_DTYPE_F32) {
    float value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return dtype == KVM_DTYPE_BF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

float rounded(float value, uint32_t dtype) {
  return dtype == KVM_DTYPE_F32    ? value
         : dtype == KVM_DTYPE_BF16 ? bf16_to_f32(f32_to_bf16(value))
                                   : f16_to_f32(f32_to_f16(value));
}

uint32_t bytes_of(uint32_t dtype) { return dtype == KVM_DTYPE_F32 ? 4 : 2; }

// Page-locked memory of the host that kernels can address.
class LockedMemory {
 public:
  LockedMemory(Rig* rig, uint64_t size_bytes)
      : driver_(&rig->driver()),
        size_bytes_((size_bytes + 4095) / 4096 * 4096),
        data_(static_cast<uint8_t*>(std::aligned_alloc(4096, size_bytes_))) {
    std::fill_n(data_, size_bytes_, kUntouched);
    EXPECT_TRUE(driver_->register_host(data_, size_bytes_).is_ok());
  }
  ~LockedMemory() {
    driver_->settle();
    driver_->unregister_host(data_);
    std::free(data_);
  }
  LockedMemory(const LockedMemory&) = delete;
  LockedMemory& operator=(const LockedMemory&) = delete;

  uint8_t* data() const { return data_; }
  uint64_t size() const { return size_bytes_; }

 private:
  FakeDriver* const driver_;
  const uint64_t size_bytes_;
  uint8_t* const data_;
};

kvm_cuda_read_params read_params(uint32_t item, uint32_t layer, uint64_t position,
                                 uint64_t n_tokens) {
  kvm_cuda_read_params params{};
  params.struct_size = sizeof params;
  params.item = item;
  params.layer = layer;
  params.position = position;
  params.n_tokens = n_tokens;
  return params;
}

// K or V of [position, position + n) in the memory at `data`, with these strides in elements.
void expect_rows(const Rig& rig, const uint8_t* data, uint32_t dtype, uint64_t stride_row,
                 uint64_t stride_head, uint32_t layer, const Shadow& shadow, uint64_t position,
                 uint64_t n, bool is_v) {
  const Geometry& geometry = rig.geometry();
  const uint32_t dim = is_v ? geometry.dim_v() : geometry.dim;
  for (uint64_t t = 0; t < n; ++t) {
    for (uint32_t head = 0; head < geometry.n_kv_heads; ++head) {
      const std::vector<float> row =
          rig.stored_row(shadow.keys[position + t], layer, head, position + t, is_v);
      for (uint32_t i = 0; i < dim; ++i) {
        const uint64_t at = t * stride_row + head * stride_head + i;
        ASSERT_EQ(widened(data + at * bytes_of(dtype), dtype), rounded(row[i], dtype))
            << "token " << position + t << " head " << head << " channel " << i;
      }
    }
  }
}

kvm_policy_params sinks_recent(uint64_t n_sinks, uint64_t n_recent, uint64_t slack) {
  kvm_policy_params policy{};
  policy.retention = KVM_RETAIN_SINKS_RECENT;
  policy.n_sinks = n_sinks;
  policy.n_recent = n_recent;
  policy.slack = slack;
  return policy;
}

FakeOptions plain() {
  FakeOptions options;
  options.emulate = false;
  return options;
}

// --- Reads --------------------------------------------------------------------------------------

struct Rows {
  uint32_t codec, dim;
};

class DeviceReads : public ::testing::TestWithParam<Rows> {};

TEST_P(DeviceReads, GiveWhatWasAppended) {
  Geometry geometry;
  geometry.codec = GetParam().codec;
  geometry.dim = GetParam().dim;
  Rig rig(plain(), geometry);
  kvm_cuda_batch* const batch = rig.batch(rig.batch_params(2, 200, 1));
  const kvm_seq_id seq = rig.create();
  Shadow shadow;
  rig.append(batch, 1, seq, 1, &shadow, 130);
  rig.append(batch, 1, seq, 1, &shadow, 20);
  for (const uint32_t dtype : {KVM_DTYPE_F32, KVM_DTYPE_F16, KVM_DTYPE_BF16}) {
    for (const auto& [position, n] : {std::pair{0, 150}, {63, 2}, {70, 61}, {149, 1}}) {
      // K packed into device memory, V by heads into memory of the host.
      const uint64_t row = geometry.n_kv_heads * geometry.dim;
      const uint64_t size = n * row * bytes_of(dtype);
      kvm_cuda_read_params params = read_params(1, 1, position, n);
      uint8_t* const k = rig.allocate(size);
      LockedMemory v(&rig, size);
      params.k = kvm_device_tensor(k, size, dtype);
      params.v = kvm_device_tensor(v.data(), v.size(), dtype);
      params.v.stride_row = geometry.dim;
      params.v.stride_head = n * geometry.dim;
      ASSERT_EQ(kvm_cuda_read(batch, &params, rig.stream()), KVM_OK) << kvm_last_error();
      rig.driver().settle();
      expect_rows(rig, k, dtype, row, geometry.dim, 1, shadow, position, n, false);
      expect_rows(rig, v.data(), dtype, geometry.dim, n * geometry.dim, 1, shadow, position, n,
                  true);
      EXPECT_TRUE(std::all_of(v.data() + size, v.data() + v.size(),
                              [](uint8_t byte) { return byte == kUntouched; }));
    }
  }
}

std::vector<Rows> all_rows() {
  std::vector<Rows> all;
  for (const uint32_t codec :
       {KVM_CODEC_BF16, KVM_CODEC_F16, KVM_CODEC_I8, KVM_CODEC_F8E4M3, KVM_CODEC_I4}) {
    for (const uint32_t dim : attention::gpu::kHeadDims) {
      if (attention::gpu::is_head_dim_on_devices(static_cast<CodecId>(codec), dim)) {
        all.push_back({codec, dim});
      }
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(
    Codecs, DeviceReads, ::testing::ValuesIn(all_rows()), [](const auto& shape) {
      return std::string(codecs::codec_of(static_cast<CodecId>(shape.param.codec)).name) + "_" +
             std::to_string(shape.param.dim);
    });

TEST(DeviceRowsTest, LatentRowsGiveTheirValuesToo) {
  Rig rig(plain(), latent_geometry(16));
  kvm_cuda_batch* const batch = rig.batch(rig.batch_params(1, 100, 1));
  const kvm_seq_id seq = rig.create();
  Shadow shadow;
  rig.append(batch, 0, seq, 1, &shadow, 70);
  kvm_cuda_read_params params = read_params(0, 1, 3, 66);
  uint8_t* const k = rig.allocate(66 * 576 * 4);
  uint8_t* const v = rig.allocate(66 * 512 * 2);
  params.k = kvm_device_tensor(k, 66 * 576 * 4, KVM_DTYPE_F32);
  ASSERT_EQ(kvm_cuda_read(batch, &params, rig.stream()), KVM_OK) << kvm_last_error();
  params.k = {};
  params.v = kvm_device_tensor(v, 66 * 512 * 2, KVM_DTYPE_BF16);
  ASSERT_EQ(kvm_cuda_read(batch, &params, rig.stream()), KVM_OK) << kvm_last_error();
  rig.driver().settle();
  expect_rows(rig, k, KVM_DTYPE_F32, 576, 576, 1, shadow, 3, 66, false);
  expect_rows(rig, v, KVM_DTYPE_BF16, 512, 512, 1, shadow, 3, 66, true);
}

TEST(DeviceRowsTest, ForksReadWhatTheyShareAndWhatTheyHave) {
  Rig rig(plain(), {});
  kvm_cuda_batch* const batch = rig.batch(rig.batch_params(1, 200, 1));
  const kvm_seq_id parent = rig.create();
  Shadow shadow;
  rig.append(batch, 0, parent, 1, &shadow, 100);
  kvm_seq_id child = 0;
  ASSERT_EQ(kvm_seq_fork(rig.client(), parent, 90, &child), KVM_OK) << kvm_last_error();
  Shadow of_child{{shadow.keys.begin(), shadow.keys.begin() + 90}};
  rig.append(batch, 0, child, 2, &of_child, 50);
  const uint64_t size = 140 * 2 * 64 * 4;
  uint8_t* const k = rig.allocate(size);
  kvm_cuda_read_params params = read_params(0, 0, 0, 140);
  params.k = kvm_device_tensor(k, size, KVM_DTYPE_F32);
  ASSERT_EQ(kvm_cuda_read(batch, &params, rig.stream()), KVM_OK) << kvm_last_error();
  rig.driver().settle();
  expect_rows(rig, k, KVM_DTYPE_F32, 128, 64, 0, of_child, 0, 140, false);
}

TEST(DeviceRowsTest, AliasesReadTheRowsOfTheirTarget) {
  Geometry geometry;
  geometry.layers.resize(2);
  geometry.layers[0].n_layers = geometry.layers[1].n_layers = 1;
  geometry.layers[1].layer_begin = 1;
  geometry.layers[1].kind = KVM_LAYER_ALIAS;
  Rig rig(plain(), geometry);
  kvm_cuda_batch* const batch = rig.batch(rig.batch_params(1, 200, 1));
  const kvm_seq_id seq = rig.create();
  Shadow shadow;
  rig.append(batch, 0, seq, 1, &shadow, 5);
  const uint64_t size = 5 * 2 * 64 * 4;
  uint8_t* const v = rig.allocate(size);
  kvm_cuda_read_params params = read_params(0, 1, 0, 5);
  params.v = kvm_device_tensor(v, size, KVM_DTYPE_F32);
  ASSERT_EQ(kvm_cuda_read(batch, &params, rig.stream()), KVM_OK) << kvm_last_error();
  rig.driver().settle();
  expect_rows(rig, v, KVM_DTYPE_F32, 128, 64, 0, shadow, 0, 5, true);
}

// What crosses a window with an update can be read behind it, and what is dropped is PARTIAL.
TEST(DeviceRowsTest, WhatLeavesAWindowIsThereUntilTheNextUpdate) {
  constexpr uint64_t kSinks = 20, kRecent = 70;
  for (const uint32_t n_append : {1u, 5u}) {
    for (const uint32_t n_query : {1u, n_append}) {
      Geometry geometry;
      geometry.policies = {sinks_recent(kSinks, kRecent, n_append)};
      geometry.policies[0].kv_head_mask[0] = 2;  // the other head keeps all
      Rig rig(plain(), geometry);
      kvm_cuda_batch* const batch = rig.batch(rig.batch_params(1, 300, 8));
      const kvm_seq_id seq = rig.create();
      Shadow shadow;
      LockedMemory k(&rig, 300 * 128 * 4);
      const auto read = [&](uint64_t begin, uint64_t end) {
        kvm_cuda_read_params params = read_params(0, 0, begin, end - begin);
        params.k = kvm_device_tensor(k.data(), k.size(), KVM_DTYPE_F32);
        return kvm_cuda_read(batch, &params, rig.stream());
      };
      rig.append(batch, 0, seq, 1, &shadow, 300, 1);
      ASSERT_EQ(read(0, 300), KVM_OK) << kvm_last_error();
      rig.driver().settle();
      expect_rows(rig, k.data(), KVM_DTYPE_F32, 128, 64, 0, shadow, 0, 300, false);
      for (uint64_t n = 300; n < 460;) {
        rig.append(batch, 0, seq, 1, &shadow, n_append, n_query);
        n += n_append;
        const uint64_t begin = n - n_append - kRecent;
        ASSERT_EQ(read(begin, n - kRecent), KVM_OK) << kvm_last_error();
        rig.driver().settle();
        expect_rows(rig, k.data(), KVM_DTYPE_F32, 128, 64, 0, shadow, begin, n_append, false);
        ASSERT_EQ(read(n - kRecent, n), KVM_OK) << kvm_last_error();
      }
      EXPECT_EQ(read(0, 64), KVM_OK) << kvm_last_error();
      EXPECT_EQ(read(63, 65), KVM_ERR_PARTIAL);
      EXPECT_NE(std::string(kvm_last_error()).find("kv head 1"), std::string::npos);
      EXPECT_EQ(read(300, 330), KVM_ERR_PARTIAL);
      rig.driver().settle();
    }
  }
}

// Of a sequence that is cut by more than the slack, the last token may see one that is gone. The
// next one does not.
TEST(DeviceRowsTest, BehindACutTheSlackIsThere) {
  constexpr uint64_t kRecent = 64;
  for (const uint64_t slack : {0u, 1u}) {
    Geometry geometry;
    geometry.policies = {sinks_recent(0, kRecent, slack)};
    Rig rig(plain(), geometry);
    kvm_cuda_batch* const batch = rig.batch(rig.batch_params(1, 300, 1));
    const kvm_seq_id seq = rig.create();
    Shadow shadow;
    rig.append(batch, 0, seq, 1, &shadow, 255, 1);
    rig.append(batch, 0, seq, 1, &shadow, 1, 1);
    ASSERT_EQ(kvm_seq_truncate(rig.client(), seq, 255), KVM_OK) << kvm_last_error();
    shadow.keys.pop_back();
    rig.append(batch, 0, seq, 1, &shadow, 0);
    kvm_cuda_read_params params = read_params(0, 0, 255 - kRecent, kRecent);
    EXPECT_EQ(kvm_cuda_read(batch, &params, rig.stream()), slack == 0 ? KVM_ERR_PARTIAL : KVM_OK);
    rig.append(batch, 0, seq, 1, &shadow, 1, 1);
    rig.driver().settle();
  }
}

TEST(DeviceRowsTest, ReadsSayWhatIsWrong) {
  Geometry geometry;
  geometry.layers.resize(2);
  geometry.layers[0].n_layers = geometry.layers[1].n_layers = 1;
  geometry.layers[1].layer_begin = 1;
  geometry.layers[1].kind = KVM_LAYER_ABSENT;
  Rig rig(plain(), geometry);
  kvm_cuda_batch* const batch = rig.batch(rig.batch_params(2, 200, 1));
  const kvm_seq_id seq = rig.create();
  const uint64_t size = 10 * 2 * 64 * 4;
  kvm_cuda_read_params good = read_params(0, 0, 20, 10);
  good.k = kvm_device_tensor(rig.allocate(size), size, KVM_DTYPE_F32);
  good.v = kvm_device_tensor(rig.allocate(size), size, KVM_DTYPE_F32);
  const auto says = [&](const kvm_cuda_read_params& params, const std::string& words) {
    expect_refused(kvm_cuda_read(batch, &params, rig.stream()), KVM_ERR_INVALID, words);
  };
  says(good, "no update");
  Shadow shadow;
  rig.append(batch, 0, seq, 1, &shadow, 30);
  EXPECT_EQ(kvm_cuda_read(batch, &good, rig.stream()), KVM_OK) << kvm_last_error();
  kvm_cuda_read_params bad = good;
  bad.item = 2;
  says(bad, "item is 2");
  bad.item = 1;
  says(bad, "item 1 has 0");
  bad = good;
  bad.layer = 1;
  says(bad, "layer 1");
  bad.layer = 2;
  says(bad, "layer 2");
  bad = good;
  bad.position = 21;
  says(bad, "10 tokens from 21");
  bad.position = UINT64_MAX;
  says(bad, "tokens from");
  bad = good;
  bad.n_tokens = UINT64_MAX;
  says(bad, "tokens from");
  bad = good;
  bad.k.buffer.size -= 1;
  says(bad, "k: 10 rows reach");
  bad = good;
  bad.v.buffer.where += 8;
  says(bad, "v: its address");
  bad = good;
  bad.v.stride_row = 130;
  says(bad, "v: its address");
  bad = good;
  bad.k.stride_head = 32;
  says(bad, "k: elements overlap; strides are row 64 and head 32, a row has 2 heads of 64");
  bad.k.stride_head = 0;
  bad.k.stride_row = 64;
  says(bad, "k: elements overlap");
  bad = good;
  bad.k.buffer.kind = KVM_BUFFER_HOST;
  says(bad, "k is no device memory");
  bad.k.buffer.kind = KVM_BUFFER_DEVICE;
  bad.k.buffer.region = 7;
  says(bad, "of region 7");
  bad.k.buffer.region = 0;
  bad.k.buffer.where = 0;
  says(bad, "k is at address 0");
  bad = good;
  bad.v.dtype = 9;
  says(bad, "v: dtype is 9");
  bad = good;
  bad.flags = 1;
  says(bad, "flags");
  bad = good;
  bad.n_tokens = 0;
  EXPECT_EQ(kvm_cuda_read(batch, &bad, rig.stream()), KVM_OK) << kvm_last_error();
  bad.k = bad.v = {};
  bad.n_tokens = 10;
  EXPECT_EQ(kvm_cuda_read(batch, &bad, rig.stream()), KVM_OK) << kvm_last_error();
  rig.driver().begin_capture(rig.stream());
  EXPECT_EQ(kvm_cuda_read(batch, &good, rig.stream()), KVM_ERR_UNSUPPORTED);
  rig.driver().end_capture(rig.stream());
  rig.driver().fail(Operation::kLaunch, 1);
  EXPECT_EQ(kvm_cuda_read(batch, &good, rig.stream()), KVM_ERR_DEVICE);
  ASSERT_EQ(kvm_seq_truncate(rig.client(), seq, 29), KVM_OK);
  says(good, "has changed");
  rig.append(batch, 0, seq, 1, &shadow, 1);
  ASSERT_EQ(kvm_cuda_spill(rig.client(), seq, rig.stream()), KVM_OK) << kvm_last_error();
  says(good, "has changed");
}

// --- Merges -------------------------------------------------------------------------------------

kvm_merge_params merge_params(const std::vector<kvm_tensor>& o, const std::vector<kvm_tensor>& lse,
                              uint32_t n_rows, uint32_t n_heads, uint32_t dim) {
  kvm_merge_params params{};
  params.struct_size = sizeof params;
  params.n_states = static_cast<uint32_t>(o.size());
  params.n_rows = n_rows;
  params.n_heads = n_heads;
  params.dim = dim;
  params.o = o.data();
  params.lse = lse.data();
  params.out_o = o[0];
  params.out_lse = lse[0];
  return params;
}

kvm_status attend(Rig* rig, kvm_cuda_batch* batch, uint32_t layer, const std::vector<uint16_t>& q,
                  const Rig::Outputs& to) {
  kvm_cuda_attend_params params{};
  params.struct_size = sizeof params;
  params.layer = layer;
  params.q = rig->tensor(q, rig->geometry().query_dtype());
  params.o = to.o_tensor;
  params.lse = to.lse_tensor;
  return kvm_cuda_attend(batch, &params, rig->stream());
}

// Two halves of a sequence in two sequences, each attended on its own, and something empty of the
// host, in the place of the first; by a graph.
TEST(DeviceRowsTest, StatesOfTheHalvesAreThatOfTheWhole) {
  Rig rig(plain(), {});
  const Geometry& geometry = rig.geometry();
  kvm_cuda_batch* const first = rig.batch(rig.batch_params(1, 100, 1));
  kvm_cuda_batch* const second = rig.batch(rig.batch_params(1, 100, 1));
  const kvm_seq_id a = rig.create(), b = rig.create();
  Shadow all, rest;
  const Rig::Outputs o_a = rig.outputs(1), o_b = rig.outputs(1);
  // Nobody has written an o there but NaNs.
  LockedMemory nobody(&rig, 4 * 64 * 4 + 4096);
  std::fill_n(nobody.data(), nobody.size(), uint8_t{0xff});
  auto* const nobodys_lse = reinterpret_cast<float*>(nobody.data() + 4096);
  std::fill_n(nobodys_lse, 4, -std::numeric_limits<float>::infinity());
  const std::vector<kvm_tensor> o = {
      o_a.o_tensor, kvm_device_tensor(nobody.data(), 4096, KVM_DTYPE_F32), o_b.o_tensor};
  const std::vector<kvm_tensor> lse = {
      o_a.lse_tensor, kvm_device_tensor(nobodys_lse, 16, KVM_DTYPE_F32), o_b.lse_tensor};
  const kvm_merge_params params = merge_params(o, lse, 1, geometry.n_q_heads, geometry.dim);
  rig.driver().begin_capture(rig.stream());
  ASSERT_EQ(kvm_cuda_merge(rig.client(), &params, rig.stream()), KVM_OK) << kvm_last_error();
  const FakeDriver::Graph graph = rig.driver().end_capture(rig.stream());
  for (uint32_t step = 0; step < 3; ++step) {
    const std::vector<uint16_t> q = rig.queries(step, 1);
    rig.append(first, 0, a, 1, &all, 40, 1);
    ASSERT_EQ(attend(&rig, first, 0, q, o_a), KVM_OK) << kvm_last_error();
    // The other one's tokens stand behind all of the first.
    rig.append(second, 0, b, 1, &rest, 30, 1, 1000);
    ASSERT_EQ(attend(&rig, second, 0, q, o_b), KVM_OK) << kvm_last_error();
    rig.driver().replay(graph, rig.stream());
    rig.driver().settle();
    // In fp64: positions 1000 and on, too, with nothing seen in between.
    const uint32_t group = geometry.n_q_heads / geometry.n_kv_heads;
    for (uint32_t h = 0; h < geometry.n_q_heads; ++h) {
      std::vector<double> logits, sum(geometry.dim);
      std::vector<uint64_t> positions;
      double top = -INFINITY, total = 0;
      for (uint64_t t = 0; t < all.keys.size() + rest.keys.size(); ++t) {
        positions.push_back(t < all.keys.size() ? t : 1000 + t - all.keys.size());
        const std::vector<float> k = rig.stored_row(1, 0, h / group, positions.back(), false);
        double logit = 0;
        for (uint32_t i = 0; i < geometry.dim; ++i) {
          logit += static_cast<double>(bf16_to_f32(q[h * geometry.dim + i])) * k[i] / 8.0;
        }
        logits.push_back(logit);
        top = std::max(top, logit);
      }
      for (size_t t = 0; t < logits.size(); ++t) {
        const std::vector<float> v = rig.stored_row(1, 0, h / group, positions[t], true);
        total += std::exp(logits[t] - top);
        for (uint32_t i = 0; i < geometry.dim; ++i) {
          sum[i] += std::exp(logits[t] - top) * v[i];
        }
      }
      EXPECT_NEAR(o_a.lse[h], top + std::log(total), 1e-5);
      for (uint32_t i = 0; i < geometry.dim; ++i) {
        EXPECT_NEAR(o_a.o[h * geometry.dim + i], sum[i] / total, 1e-5);
      }
    }
  }
}

TEST(DeviceRowsTest, MergesSayWhatIsWrong) {
  Rig rig(plain(), {});
  const uint64_t size = 2 * 3 * 64 * 4;
  const std::vector<kvm_tensor> o(9, kvm_device_tensor(rig.allocate(size), size, KVM_DTYPE_F32));
  const std::vector<kvm_tensor> lse(9, kvm_device_tensor(rig.allocate(24), 24, KVM_DTYPE_F32));
  kvm_merge_params good = merge_params({o[0], o[0]}, {lse[0], lse[0]}, 2, 3, 64);
  good.o = o.data();
  good.lse = lse.data();
  const auto says = [&](const kvm_merge_params& params, const std::string& words) {
    expect_refused(kvm_cuda_merge(rig.client(), &params, rig.stream()), KVM_ERR_INVALID, words);
  };
  EXPECT_EQ(kvm_cuda_merge(rig.client(), &good, rig.stream()), KVM_OK) << kvm_last_error();
  kvm_merge_params bad = good;
  bad.n_states = 9;
  says(bad, "n_states is 9; allowed are 1 to 8");
  bad.n_states = 0;
  says(bad, "n_states is 0");
  bad = good;
  bad.dim = 60;
  says(bad, "dim is 60");
  bad = good;
  bad.n_rows = 0;
  says(bad, "n_rows is 0");
  bad.n_rows = 3;
  says(bad, "o[0]: 3 rows reach");
  bad = good;
  bad.n_heads = 1025;
  says(bad, "n_heads is 1025");
  bad = good;
  bad.o = nullptr;
  says(bad, "o and lse");
  bad = good;
  bad.out_o.stride_head = 32;
  says(bad, "out_o: elements overlap");
  bad = good;
  bad.out_o.dtype = KVM_DTYPE_F16;
  says(bad, "out_o is in the place of o[0], with another dtype");
  bad = good;
  bad.out_lse.stride_row = 1;
  bad.out_lse.stride_head = 2;
  says(bad, "out_lse is in the place of lse[0], with another dtype or other strides");
  std::vector<kvm_tensor> tensors = o;
  tensors[1].buffer.where += 4;
  bad = good;
  bad.o = tensors.data();
  says(bad, "o[1]: its address");
  tensors = lse;
  tensors[1].dtype = KVM_DTYPE_BF16;
  bad = good;
  bad.lse = tensors.data();
  says(bad, "lse[1] is not F32");
  tensors[1] = {};
  says(bad, "lse[1] is no device memory");
  bad = good;
  bad.out_o.buffer.kind = KVM_BUFFER_HOST;
  says(bad, "out_o is no device memory");
  bad = good;
  bad.out_lse.buffer.size = 20;
  says(bad, "out_lse: 2 rows reach");
  bad = good;
  bad.out_lse = {};
  EXPECT_EQ(kvm_cuda_merge(rig.client(), &bad, rig.stream()), KVM_OK) << kvm_last_error();
  rig.driver().fail(Operation::kLaunch, 1);
  EXPECT_EQ(kvm_cuda_merge(rig.client(), &good, rig.stream()), KVM_ERR_DEVICE);
  rig.driver().settle();
}

// --- Both together ------------------------------------------------------------------------------

// An engine for CPUs with the middle of the sequence.
class Middle {
 public:
  explicit Middle(const Geometry& geometry) {
    kvm_embedded_params embedded{};
    embedded.struct_size = sizeof embedded;
    embedded.n_threads = 1;
    embedded.host_capacity_bytes = 64 << 20;
    EXPECT_EQ(kvm_open_embedded(&embedded, &client_), KVM_OK) << kvm_last_error();
    EXPECT_EQ(kvm_queue_create(client_, nullptr, &queue_), KVM_OK) << kvm_last_error();
    kvm_space_params space{};
    space.struct_size = sizeof space;
    space.name = "middle";
    space.n_layers = geometry.n_layers;
    space.n_q_heads = geometry.n_q_heads;
    space.n_kv_heads = geometry.n_kv_heads;
    space.head_dim_k = geometry.dim;
    space.codec = geometry.codec;
    EXPECT_EQ(kvm_space_register(client_, &space, &step_.space), KVM_OK) << kvm_last_error();
    EXPECT_EQ(kvm_seq_create(client_, step_.space, nullptr, &seq_), KVM_OK) << kvm_last_error();
    step_.struct_size = sizeof step_;
  }
  ~Middle() {
    kvm_queue_destroy(queue_);
    kvm_client_close(client_);
  }
  Middle(const Middle&) = delete;
  Middle& operator=(const Middle&) = delete;

  // Appends n tokens of a layer, and answers for its last n_query.
  void step(uint32_t layer, const uint8_t* k, const uint8_t* v, uint32_t n,
            const std::vector<uint16_t>& q, uint32_t n_query, const LockedMemory& o,
            const LockedMemory& lse) {
    kvm_item item{};
    item.seq = seq_;
    item.append_position = KVM_POSITION_END;
    item.n_append = n;
    item.n_query = n_query;
    item.query_position = KVM_POSITION_END;
    kvm_step_params step = step_;
    step.layer_begin = layer;
    step.n_items = 1;
    step.items = &item;
    if (n != 0) {
      step.k = kvm_host_tensor(const_cast<uint8_t*>(k), uint64_t{n} * 2 * 64 * 4, KVM_DTYPE_F32);
      step.v = kvm_host_tensor(const_cast<uint8_t*>(v), uint64_t{n} * 2 * 64 * 4, KVM_DTYPE_F32);
    }
    step.q = kvm_host_tensor(const_cast<uint16_t*>(q.data()), q.size() * 2, KVM_DTYPE_BF16);
    step.o = kvm_host_tensor(o.data(), o.size(), KVM_DTYPE_F32);
    step.lse = kvm_host_tensor(lse.data(), lse.size(), KVM_DTYPE_F32);
    ASSERT_EQ(kvm_step(queue_, &step, nullptr), KVM_OK) << kvm_last_error();
  }

  void truncate(uint64_t n_tokens) {
    ASSERT_EQ(kvm_seq_truncate(client_, seq_, n_tokens), KVM_OK) << kvm_last_error();
  }

 private:
  kvm_client* client_ = nullptr;
  kvm_queue* queue_ = nullptr;
  kvm_seq_id seq_ = 0;
  kvm_step_params step_{};
};

// Each token is counted once, at whatever length, with one query row and with several, and where
// drafts are taken back, on both sides.
TEST(DeviceRowsTest, SinksAndWindowAndTheMiddleAreTheWhole) {
  constexpr uint64_t kSinks = 20, kRecent = 70, kMost = 4;
  Geometry geometry;
  geometry.n_layers = 1;
  const Rig full(plain(), geometry);  // what the whole is: for its fp64 arithmetic
  geometry.policies = {sinks_recent(kSinks, kRecent, kMost)};
  Rig rig(plain(), geometry);
  Middle middle(geometry);
  kvm_cuda_batch* const batch = rig.batch(rig.batch_params(1, 200, kMost));
  const kvm_seq_id seq = rig.create();
  Shadow shadow;
  uint64_t held = kSinks;  // tokens that are the device's sinks, or on the other side
  LockedMemory k(&rig, 200 * 128 * 4), v(&rig, 200 * 128 * 4);
  LockedMemory o(&rig, kMost * 4 * 64 * 4), lse(&rig, kMost * 4 * 4);
  for (uint64_t step = 0; step < 60; ++step) {
    // A prompt, then tokens one by one and drafts of up to four.
    const auto n_append = static_cast<uint32_t>(step == 0 ? 117 : step % kMost + 1);
    const uint32_t n_query = step == 0 ? 1 : n_append;
    const std::vector<uint16_t> q = rig.queries(step, n_query);
    rig.append(batch, 0, seq, step + 1, &shadow, n_append, n_query);
    const uint64_t end = shadow.keys.size() - kRecent;
    kvm_cuda_read_params read = read_params(0, 0, held, end - held);
    read.k = kvm_device_tensor(k.data(), k.size(), KVM_DTYPE_F32);
    read.v = kvm_device_tensor(v.data(), v.size(), KVM_DTYPE_F32);
    ASSERT_EQ(kvm_cuda_read(batch, &read, rig.stream()), KVM_OK) << kvm_last_error();
    const Rig::Outputs out = rig.outputs(n_query);
    ASSERT_EQ(attend(&rig, batch, 0, q, out), KVM_OK) << kvm_last_error();
    rig.driver().settle();
    middle.step(0, k.data(), v.data(), static_cast<uint32_t>(end - held), q, n_query, o, lse);
    held = end;
    const std::vector<kvm_tensor> states_o = {out.o_tensor,
                                              kvm_device_tensor(o.data(), o.size(), KVM_DTYPE_F32)};
    const std::vector<kvm_tensor> states_lse = {
        out.lse_tensor, kvm_device_tensor(lse.data(), lse.size(), KVM_DTYPE_F32)};
    const kvm_merge_params merge = merge_params(states_o, states_lse, n_query, 4, 64);
    ASSERT_EQ(kvm_cuda_merge(rig.client(), &merge, rig.stream()), KVM_OK) << kvm_last_error();
    rig.driver().settle();
    for (uint32_t row = 0; row < n_query; ++row) {
      full.expect_row(out, row, q, 0, shadow, {shadow.keys.size() - n_query + row},
                      "step " + std::to_string(step));
    }
    if (const uint64_t rejected = step % 3 == 0 ? 0 : step / 3 % n_append; rejected != 0) {
      shadow.keys.resize(shadow.keys.size() - rejected);
      held -= rejected;
      ASSERT_EQ(kvm_seq_truncate(rig.client(), seq, shadow.keys.size()), KVM_OK)
          << kvm_last_error();
      middle.truncate(held - kSinks);
    }
  }
}

}  // namespace
}  // namespace kvm::device::testing
