// SPDX-License-Identifier: Apache-2.0
// Tokens copied between sequences on a device and in host memory (kvm_cuda_bridge), compared with
// what kvm_append and kvm_cuda_append make of the same numbers.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/splitmix.h"
#include "tests/common/temporary_directory.h"
#include "tests/gpu/device_rig.h"

namespace kvm::device::testing {
namespace {

using kvm::testing::Daemon;
using kvm::testing::kPatienceNs;
using kvm::testing::TemporaryDirectory;

// The least that a bridge takes is two slots of 64 tokens of a layer; 256 KiB has several.
constexpr uint64_t kStaging = 256 << 10;
constexpr uint64_t kMaxTokens = 2048;

Geometry with_codec(Geometry geometry, uint32_t codec) {
  geometry.codec = codec;
  return geometry;
}

bool stores(const Geometry& geometry, uint32_t layer) {
  return layer >= geometry.layers.size() || geometry.layers[layer].kind == KVM_LAYER_OWN;
}

// A device, a client with host memory, and a bridge between a space of each.
class Sides {
 public:
  Sides(const FakeOptions& options, const Geometry& device, const Geometry& host,
        uint64_t staging_bytes = kStaging, uint64_t pool_bytes = 64 << 20,
        uint64_t host_capacity = 16 << 20, const Daemon* store = nullptr)
      : rig(options, device, pool_bytes), host_geometry(host) {
    client = store != nullptr ? kvm::testing::connect_to_daemon(*store, "bridge")
                              : rig.open_host(host_capacity);
    space = register_space(client, host);
    EXPECT_EQ(kvm_queue_create(client, nullptr, &queue), KVM_OK) << kvm_last_error();
    batch = rig.batch(rig.batch_params(1, kMaxTokens, 1, kMaxTokens));
    EXPECT_EQ(open_bridge(staging_bytes), KVM_OK) << kvm_last_error();
  }
  ~Sides() {
    kvm_cuda_bridge_destroy(bridge);
    kvm_queue_destroy(queue);
    kvm_client_close(client);
  }
  Sides(const Sides&) = delete;
  Sides& operator=(const Sides&) = delete;

  kvm_cuda_bridge_params bridge_params(uint64_t staging_bytes) const {
    kvm_cuda_bridge_params params{};
    params.struct_size = sizeof params;
    params.host = client;
    params.host_space = space;
    params.space = rig.space();
    params.max_tokens = kMaxTokens;
    params.staging_bytes = staging_bytes;
    return params;
  }
  kvm_status open_bridge(uint64_t staging_bytes) {
    const kvm_cuda_bridge_params params = bridge_params(staging_bytes);
    return kvm_cuda_bridge_create(rig.client(), &params, &bridge);
  }

  static kvm_cuda_copy_params copy(kvm_seq_id source, uint64_t begin = 0,
                                   uint64_t end = KVM_POSITION_END, kvm_seq_id onto = 0) {
    kvm_cuda_copy_params params{};
    params.struct_size = sizeof params;
    params.source = source;
    params.onto = onto;
    params.begin = begin;
    params.end = end;
    return params;
  }
  kvm_status store(const kvm_cuda_copy_params& params, kvm_seq_id* out) {
    return kvm_cuda_store(bridge, &params, rig.stream(), out);
  }
  kvm_status load(const kvm_cuda_copy_params& params, kvm_seq_id* out) {
    return kvm_cuda_load(bridge, &params, rig.stream(), out);
  }

  // K and V of [0, n) in fp32, [layer][K, V][token][kv head][channel], of layers that store some.
  using Rows = std::vector<std::vector<float>>;
  Rows host_rows(kvm_seq_id seq, uint64_t n, uint64_t first = 0) {
    Rows rows;
    for_each_tensor(n, [&](uint32_t layer, uint64_t n_k, uint64_t n_v) {
      std::vector<float> k(n_k), v(n_v);
      kvm_read_params params{};
      params.struct_size = sizeof params;
      params.seq = seq;
      params.layer = layer;
      params.position = first;
      params.n_tokens = n;
      params.k = kvm_host_tensor(k.data(), n_k * 4, KVM_DTYPE_F32);
      params.v = n_v == 0 ? kvm_tensor{} : kvm_host_tensor(v.data(), n_v * 4, KVM_DTYPE_F32);
      EXPECT_EQ(kvm_read(queue, &params), KVM_OK) << kvm_last_error();
      rows.push_back(std::move(k));
      rows.push_back(std::move(v));
    });
    return rows;
  }
  Rows device_rows(kvm_seq_id seq, uint64_t n, uint64_t first = 0) {
    kvm_cuda_item item{};
    item.seq = seq;
    EXPECT_EQ(kvm_cuda_update(batch, &item, 1, rig.stream()), KVM_OK) << kvm_last_error();
    Rows rows;
    for_each_tensor(n, [&](uint32_t layer, uint64_t n_k, uint64_t n_v) {
      auto* const k = reinterpret_cast<float*>(rig.allocate(n_k * 4));
      auto* const v = n_v == 0 ? nullptr : reinterpret_cast<float*>(rig.allocate(n_v * 4));
      kvm_cuda_read_params params{};
      params.struct_size = sizeof params;
      params.layer = layer;
      params.position = first;
      params.n_tokens = n;
      params.k = kvm_device_tensor(k, n_k * 4, KVM_DTYPE_F32);
      params.v = v == nullptr ? kvm_tensor{} : kvm_device_tensor(v, n_v * 4, KVM_DTYPE_F32);
      EXPECT_EQ(kvm_cuda_read(batch, &params, rig.stream()), KVM_OK) << kvm_last_error();
      rig.driver().settle();
      rows.emplace_back(k, k + n_k);
      rows.emplace_back(v, v + n_v);
    });
    rig.forget_memory();
    return rows;
  }
  kvm_seq_id create_there() {
    kvm_seq_id seq = 0;
    EXPECT_EQ(kvm_seq_create(client, space, nullptr, &seq), KVM_OK) << kvm_last_error();
    return seq;
  }
  // Appends rows as the two above give them.
  void append_there(kvm_seq_id seq, const Rows& rows) {
    size_t at = 0;
    for_each_tensor(0, [&](uint32_t layer, uint64_t, uint64_t) {
      const std::vector<float>&k = rows[at], &v = rows[at + 1];
      at += 2;
      kvm_item item{};
      item.seq = seq;
      item.append_position = KVM_POSITION_END;
      item.n_append = static_cast<uint32_t>(k.size() / row_size(layer));
      kvm_step_params params{};
      params.struct_size = sizeof params;
      params.space = space;
      params.layer_begin = layer;
      params.n_items = 1;
      params.items = &item;
      params.k = kvm_host_tensor(k.data(), k.size() * 4, KVM_DTYPE_F32);
      params.v = v.empty() ? kvm_tensor{} : kvm_host_tensor(v.data(), v.size() * 4, KVM_DTYPE_F32);
      EXPECT_EQ(kvm_append(queue, &params), KVM_OK) << kvm_last_error();
    });
  }
  void append_here(kvm_seq_id seq, const Rows& rows) {
    kvm_cuda_item item{};
    item.seq = seq;
    item.n_append = static_cast<uint32_t>(rows[0].size() / row_size());
    ASSERT_EQ(kvm_cuda_update(batch, &item, 1, rig.stream()), KVM_OK) << kvm_last_error();
    size_t at = 0;
    for_each_tensor(0, [&](uint32_t layer, uint64_t, uint64_t) {
      const kvm_tensor k = rig.tensor(rows[at], KVM_DTYPE_F32);
      const kvm_tensor v =
          rows[at + 1].empty() ? kvm_tensor{} : rig.tensor(rows[at + 1], KVM_DTYPE_F32);
      at += 2;
      ASSERT_EQ(kvm_cuda_append(batch, layer, &k, &v, rig.stream()), KVM_OK) << kvm_last_error();
    });
    rig.driver().settle();
    rig.forget_memory();
  }
  // What a sequence of a key is made of, before it is rounded.
  Rows numbers(uint64_t key, uint64_t n, uint64_t first = 0) const {
    Rows rows;
    const Geometry& of = rig.geometry();
    for_each_tensor(n, [&](uint32_t layer, uint64_t, uint64_t n_v) {
      for (const bool is_v : {false, true}) {
        rows.emplace_back();
        for (uint64_t i = first; (!is_v || n_v != 0) && i < first + n; ++i) {
          for (uint32_t head = 0; head < of.n_kv_heads; ++head) {
            for (uint32_t channel = 0; channel < of.dim; ++channel) {
              rows.back().push_back(stored_number(key, layer, head, i, channel, is_v));
            }
          }
        }
      }
    });
    return rows;
  }

  uint64_t n_sequences_there() {
    size_t n = 0;
    EXPECT_EQ(kvm_seq_list(client, space, 0, nullptr, 0, &n), KVM_OK) << kvm_last_error();
    return n;
  }
  uint64_t n_sequences_here() {
    size_t n = 0;
    EXPECT_EQ(kvm_seq_list(rig.client(), 0, 0, nullptr, 0, &n), KVM_OK) << kvm_last_error();
    return n;
  }
  uint64_t pages_here() {
    kvm_cuda_stats stats{};
    stats.struct_size = sizeof stats;
    EXPECT_EQ(kvm_cuda_get_stats(rig.client(), &stats), KVM_OK) << kvm_last_error();
    return stats.n_pages;
  }

  Rig rig;
  const Geometry host_geometry;
  kvm_client* client = nullptr;
  kvm_space_id space = 0;
  kvm_queue* queue = nullptr;
  kvm_cuda_batch* batch = nullptr;
  kvm_cuda_bridge* bridge = nullptr;

 private:
  // Of layer 0.
  uint64_t row_size() const { return uint64_t{rig.geometry().n_kv_heads} * rig.geometry().dim; }
  uint64_t row_size(uint32_t layer) const {
    uint64_t n_heads = rig.geometry().n_kv_heads;
    for (const kvm_layer_params& of : rig.geometry().layers) {
      n_heads = of.layer_begin == layer && of.n_kv_heads != 0 ? of.n_kv_heads : n_heads;
    }
    return n_heads * rig.geometry().dim;
  }
  template <class Visit>
  void for_each_tensor(uint64_t n, Visit visit) const {
    for (uint32_t layer = 0; layer < rig.geometry().n_layers; ++layer) {
      if (stores(rig.geometry(), layer)) {
        visit(layer, n * row_size(layer), rig.geometry().v_in_k ? 0 : n * row_size(layer));
      }
    }
  }
};

// --- What crosses -------------------------------------------------------------------------------

struct Crossing {
  const char* name;
  Geometry device;
  Geometry host;
};

std::vector<Crossing> crossings() {
  Geometry plain;
  Geometry aliased;
  aliased.n_layers = 4;
  for (uint32_t layer = 0; layer < 4; ++layer) {
    kvm_layer_params of{};
    of.layer_begin = layer;
    of.n_layers = 1;
    of.kind = layer == 1 ? KVM_LAYER_ALIAS : layer == 2 ? KVM_LAYER_ABSENT : KVM_LAYER_OWN;
    aliased.layers.push_back(of);
  }
  const Geometry latent = latent_geometry(4);
  return {
      {"bf16_bf16", plain, plain},
      {"fp16_bf16", with_codec(plain, KVM_CODEC_F16), plain},
      {"bf16_fp32", plain, with_codec(plain, KVM_CODEC_F32)},
      {"bf16_int8", plain, with_codec(plain, KVM_CODEC_I8)},
      {"bf16_gear2", plain, with_codec(plain, kvm_codec_find("gear2"))},
      {"int8_bf16", with_codec(plain, KVM_CODEC_I8), plain},
      {"fp8_fp32", with_codec(plain, KVM_CODEC_F8E4M3), with_codec(plain, KVM_CODEC_F32)},
      {"int8_int8", with_codec(plain, KVM_CODEC_I8), with_codec(plain, KVM_CODEC_I8)},
      {"int4_fp8", with_codec(plain, KVM_CODEC_I4), with_codec(plain, KVM_CODEC_F8E4M3)},
      {"aliases", aliased, aliased},
      {"latent", latent, with_codec(latent, KVM_CODEC_F16)},
  };
}

class BridgeCrossing : public ::testing::TestWithParam<Crossing> {};

// Pieces of 64 tokens, several for each slot, and a last one that is shorter.
TEST_P(BridgeCrossing, StoresWhatKvmAppendMakesOfTheRows) {
  Sides sides({}, GetParam().device, GetParam().host);
  constexpr uint32_t kTokens = 7 * 64 + 13;
  const kvm_seq_id source = sides.rig.create();
  sides.append_here(source, sides.numbers(1, kTokens));
  kvm_seq_id got = 0;
  ASSERT_EQ(sides.store(Sides::copy(source), &got), KVM_OK) << kvm_last_error();
  const kvm_seq_id expected = sides.create_there();
  sides.append_there(expected, sides.device_rows(source, kTokens));
  EXPECT_EQ(sides.host_rows(got, kTokens), sides.host_rows(expected, kTokens));
  EXPECT_EQ(sides.n_sequences_here(), 1u);
}

TEST_P(BridgeCrossing, LoadsWhatKvmCudaAppendMakesOfTheRows) {
  Sides sides({}, GetParam().device, GetParam().host);
  constexpr uint32_t kTokens = 7 * 64 + 13;
  const kvm_seq_id source = sides.create_there();
  sides.append_there(source, sides.numbers(1, kTokens));
  kvm_seq_id got = 0;
  ASSERT_EQ(sides.load(Sides::copy(source), &got), KVM_OK) << kvm_last_error();
  const kvm_seq_id expected = sides.rig.create();
  sides.append_here(expected, sides.host_rows(source, kTokens));
  EXPECT_EQ(sides.device_rows(got, kTokens), sides.device_rows(expected, kTokens));
  EXPECT_EQ(sides.n_sequences_there(), 1u);
}

INSTANTIATE_TEST_SUITE_P(All, BridgeCrossing, ::testing::ValuesIn(crossings()),
                         [](const auto& of) { return std::string(of.param.name); });

// Out, and back, and attended to.
TEST(BridgeTest, WhatComesBackIsWhatWentOut) {
  Sides sides({}, {}, {});
  Shadow shadow;
  const kvm_seq_id source = sides.rig.create();
  sides.rig.append(sides.batch, 0, source, 1, &shadow, 300);
  kvm_seq_id there = 0, back = 0;
  ASSERT_EQ(sides.store(Sides::copy(source), &there), KVM_OK) << kvm_last_error();
  ASSERT_EQ(kvm_seq_free(sides.rig.client(), source), KVM_OK);
  ASSERT_EQ(sides.load(Sides::copy(there), &back), KVM_OK) << kvm_last_error();
  kvm_cuda_stats stats{};
  stats.struct_size = sizeof stats;
  ASSERT_EQ(kvm_cuda_get_stats(sides.rig.client(), &stats), KVM_OK);
  EXPECT_EQ(stats.stored_bytes, 300u * 2 * 2 * 2 * 64 * 2);  // layers, K and V, heads, bf16
  EXPECT_EQ(stats.loaded_bytes, stats.stored_bytes);
  sides.rig.append(sides.batch, 0, back, 2, &shadow, 3, 1);
  const std::vector<uint16_t> q = sides.rig.queries(1, 1);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    const Rig::Outputs out = sides.rig.outputs(1);
    kvm_cuda_attend_params attend{};
    attend.struct_size = sizeof attend;
    attend.layer = layer;
    attend.q = sides.rig.tensor(q, KVM_DTYPE_BF16);
    attend.o = out.o_tensor;
    attend.lse = out.lse_tensor;
    ASSERT_EQ(kvm_cuda_attend(sides.batch, &attend, sides.rig.stream()), KVM_OK);
    sides.rig.driver().settle();
    Rig::Query query;
    query.position = 302;
    sides.rig.expect_row(out, 0, q, layer, shadow, query, "layer " + std::to_string(layer));
  }
}

TEST(BridgeTest, RangesComeBehindWhatIsThereAlready) {
  Sides sides({}, {}, {});
  const kvm_seq_id source = sides.rig.create();
  sides.append_here(source, sides.numbers(1, 400));
  const kvm_seq_id prefix = sides.create_there();
  sides.append_there(prefix, sides.numbers(2, 130));  // of which the first 100 count
  kvm_seq_id there = 0;
  ASSERT_EQ(sides.store(Sides::copy(source, 100, 391, prefix), &there), KVM_OK) << kvm_last_error();
  EXPECT_EQ(sides.host_rows(there, 100), sides.host_rows(prefix, 100));
  EXPECT_EQ(sides.host_rows(there, 291, 100), sides.device_rows(source, 291, 100));
  kvm_seq_info info{};
  info.struct_size = sizeof info;
  ASSERT_EQ(kvm_seq_get_info(sides.client, prefix, &info), KVM_OK);
  EXPECT_EQ(info.n_tokens_max, 130u);
  ASSERT_EQ(kvm_seq_get_info(sides.client, there, &info), KVM_OK);
  EXPECT_EQ(info.n_tokens_max, 391u);

  // Back behind half a page of another sequence, which keeps what it has.
  const kvm_seq_id onto = sides.rig.create();
  sides.append_here(onto, sides.numbers(3, 110));
  const Sides::Rows before = sides.device_rows(onto, 96);
  kvm_seq_id here = 0;
  ASSERT_EQ(sides.load(Sides::copy(there, 96, KVM_POSITION_END, onto), &here), KVM_OK)
      << kvm_last_error();
  EXPECT_EQ(sides.device_rows(here, 96), before);
  EXPECT_EQ(sides.device_rows(here, 295, 96), sides.host_rows(there, 295, 96));
  EXPECT_EQ(sides.device_rows(onto, 96), before);
  sides.append_here(onto, sides.numbers(4, 1));
  EXPECT_EQ(sides.device_rows(here, 295, 96), sides.host_rows(there, 295, 96));
}

TEST(BridgeTest, HeadsWithAWindowGetAllAndDropWhatIsNotSeen) {
  Geometry windowed;
  kvm_policy_params policy{};
  policy.kv_head_mask[0] = 1;
  policy.retention = KVM_RETAIN_SINKS_RECENT;
  policy.n_sinks = 4;
  policy.n_recent = 96;
  windowed.policies.push_back(policy);
  Sides sides({}, windowed, {});
  const kvm_seq_id source = sides.create_there();
  sides.append_there(source, sides.numbers(1, 500));
  kvm_seq_id here = 0;
  ASSERT_EQ(sides.load(Sides::copy(source), &here), KVM_OK) << kvm_last_error();
  Shadow shadow;
  shadow.keys.assign(500, 1);
  sides.rig.append(sides.batch, 0, here, 1, &shadow, 2, 1);
  const std::vector<uint16_t> q = sides.rig.queries(1, 1);
  const Rig::Outputs out = sides.rig.outputs(1);
  kvm_cuda_attend_params attend{};
  attend.struct_size = sizeof attend;
  attend.q = sides.rig.tensor(q, KVM_DTYPE_BF16);
  attend.o = out.o_tensor;
  attend.lse = out.lse_tensor;
  ASSERT_EQ(kvm_cuda_attend(sides.batch, &attend, sides.rig.stream()), KVM_OK);
  sides.rig.driver().settle();
  Rig::Query query;
  query.position = 501;
  sides.rig.expect_row(out, 0, q, 0, shadow, query, "windowed");

  // What has been dropped cannot be stored; what is there can.
  kvm_seq_id there = 0;
  EXPECT_EQ(sides.store(Sides::copy(here), &there), KVM_ERR_PARTIAL);
  EXPECT_NE(std::string(kvm_last_error()).find("a policy of kv head 0"), std::string::npos)
      << kvm_last_error();
  EXPECT_EQ(sides.n_sequences_there(), 1u);
  EXPECT_EQ(sides.n_sequences_here(), 1u);
  ASSERT_EQ(sides.store(Sides::copy(here, 448, 502), &there), KVM_OK) << kvm_last_error();
  EXPECT_EQ(sides.host_rows(there, 52), sides.host_rows(source, 52, 448));
}

// Of a store that keeps on a disk what its memory does not hold.
TEST(BridgeTest, WhatIsStoredGoesToTheDiskAndComesBack) {
  const TemporaryDirectory folder;
  Daemon store({"--host-capacity", "24MiB", "--disk-directories", folder.path(), "--disk-capacity",
                "256MiB"},
               "kvmd_on_fake");
  ASSERT_FALSE(HasFatalFailure());
  Geometry wide;
  wide.n_layers = 4;
  wide.dim = 128;
  {
    Sides sides({}, wide, wide, kStaging, 64 << 20, 0, &store);
    constexpr uint32_t kTokens = 700, kSequences = 11;  // 2.8 MiB each
    const kvm_seq_id sources[] = {sides.rig.create(), sides.rig.create()};
    sides.append_here(sources[0], sides.numbers(1, kTokens));
    sides.append_here(sources[1], sides.numbers(2, kTokens));
    std::vector<kvm_seq_id> stored(kSequences);
    for (uint32_t i = 0; i < kSequences; ++i) {
      ASSERT_EQ(sides.store(Sides::copy(sources[i % 2]), &stored[i]), KVM_OK) << kvm_last_error();
    }
    kvm_seq_info info{};
    info.struct_size = sizeof info;
    uint64_t n_away = 0;
    for (const kvm_seq_id seq : stored) {
      ASSERT_EQ(kvm_seq_get_info(sides.client, seq, &info), KVM_OK) << kvm_last_error();
      n_away += info.bytes_away;
    }
    EXPECT_GT(n_away, uint64_t{6} << 20);
    for (uint32_t i = 0; i < kSequences; i += 5) {
      // What a store goes on from is away, too.
      kvm_seq_id again = 0, here = 0;
      ASSERT_EQ(sides.store(Sides::copy(sources[i % 2], 600, KVM_POSITION_END, stored[i]), &again),
                KVM_OK)
          << kvm_last_error();
      ASSERT_EQ(sides.load(Sides::copy(again), &here), KVM_OK) << kvm_last_error();
      EXPECT_EQ(sides.device_rows(here, kTokens), sides.device_rows(sources[i % 2], kTokens)) << i;
      ASSERT_EQ(kvm_seq_free(sides.rig.client(), here), KVM_OK);
    }
  }
  std::string log;
  EXPECT_EQ(store.stop(&log), 0) << log;
}

// --- Beside an engine that goes on --------------------------------------------------------------

TEST(BridgeTest, SourcesMayBeChangedMeanwhile) {
  FakeOptions options;
  options.runs_by_itself = true;
  Sides sides(options, {}, {}, kStaging, 8 << 20, 64 << 20);
  constexpr uint32_t kTokens = 450;
  const kvm_seq_id first = sides.rig.create();
  Shadow shadow;
  sides.rig.append(sides.batch, 0, first, 1, &shadow, kTokens);
  const Sides::Rows expected = sides.device_rows(first, kTokens);
  const Sides::Rows others = sides.numbers(9, 300);
  const std::vector<kvm_tensor> tensors = [&] {
    std::vector<kvm_tensor> to;
    for (const std::vector<float>& rows : others) {
      to.push_back(sides.rig.tensor(rows, KVM_DTYPE_F32));
    }
    return to;
  }();
  // The engine cuts the source, appends other rows, drops it and begins it again, and another
  // sequence takes the pages: on its stream, which the bridge's does not wait for.
  std::atomic<bool> is_over{false};
  std::atomic<kvm_seq_id> source{first};
  std::thread engine([&] {
    kvm_cuda_batch* const batch = sides.rig.batch(sides.rig.batch_params(2, 1024, 1, kMaxTokens));
    uint64_t state = 7;
    kvm_seq_id other = sides.rig.create();
    while (!is_over) {
      state = splitmix64(state);
      kvm_cuda_item items[2] = {};
      if (state % 3 == 0) {
        EXPECT_EQ(kvm_seq_free(sides.rig.client(), other), KVM_OK) << kvm_last_error();
        other = sides.rig.create();
      }
      items[0].seq = other;
      items[0].n_append = static_cast<uint32_t>(state >> 8 & 127) + 1;
      const kvm_status status = kvm_cuda_update(batch, items, 1, sides.rig.stream());
      if (status == KVM_ERR_LIMIT || status == KVM_ERR_NO_SPACE) {
        EXPECT_EQ(kvm_seq_truncate(sides.rig.client(), other, 0), KVM_OK);
        continue;
      }
      ASSERT_EQ(status, KVM_OK) << kvm_last_error();
      for (uint32_t layer = 0; layer < 2; ++layer) {
        ASSERT_EQ(kvm_cuda_append(batch, layer, &tensors[2 * layer], &tensors[2 * layer + 1],
                                  sides.rig.stream()),
                  KVM_OK)
            << kvm_last_error();
      }
    }
    EXPECT_EQ(kvm_seq_free(sides.rig.client(), other), KVM_OK);
  });
  for (int round = 0; round < 6; ++round) {
    kvm_seq_id there = 0, here = 0;
    ASSERT_EQ(sides.store(Sides::copy(source), &there), KVM_OK) << kvm_last_error();
    ASSERT_EQ(sides.load(Sides::copy(there), &here), KVM_OK) << kvm_last_error();
    EXPECT_EQ(sides.host_rows(there, kTokens), expected) << round;
    ASSERT_EQ(kvm_seq_free(sides.rig.client(), source), KVM_OK) << kvm_last_error();
    ASSERT_EQ(kvm_seq_free(sides.client, there), KVM_OK) << kvm_last_error();
    source = here;
  }
  is_over = true;
  engine.join();
}

// --- What fails ---------------------------------------------------------------------------------

// Every call of the driver fails in turn: either all is as before, or nothing has failed.
TEST(BridgeTest, DriverFailuresLeaveNothing) {
  Sides sides({}, {}, {});
  const kvm_seq_id source = sides.rig.create();
  sides.append_here(source, sides.numbers(1, 200));
  kvm_seq_id there = 0;
  ASSERT_EQ(sides.store(Sides::copy(source), &there), KVM_OK) << kvm_last_error();
  const uint64_t n_here = sides.n_sequences_here(), n_there = sides.n_sequences_there();
  const uint64_t n_pages = sides.pages_here();
  uint32_t n_failures = 0;
  for (const bool is_store : {true, false}) {
    for (uint8_t operation = 0; operation < static_cast<uint8_t>(Operation::kCount); ++operation) {
      for (uint64_t nth = 1;; ++nth) {
        const std::string where = (is_store ? "store, operation " : "load, operation ") +
                                  std::to_string(operation) + ", call " + std::to_string(nth);
        sides.rig.driver().fail(static_cast<Operation>(operation), nth);
        kvm_seq_id got = 0;
        const kvm_status status = is_store ? sides.store(Sides::copy(source), &got)
                                           : sides.load(Sides::copy(there), &got);
        const bool has_failed = status != KVM_OK;
        sides.rig.driver().fail(static_cast<Operation>(operation), 0);
        if (has_failed) {
          ++n_failures;
          EXPECT_EQ(got, 0u) << where;
        } else if (is_store) {
          EXPECT_EQ(sides.host_rows(got, 200), sides.host_rows(there, 200)) << where;
          ASSERT_EQ(kvm_seq_free(sides.client, got), KVM_OK) << where;
        } else {
          EXPECT_EQ(sides.device_rows(got, 200), sides.device_rows(source, 200)) << where;
          ASSERT_EQ(kvm_seq_free(sides.rig.client(), got), KVM_OK) << where;
        }
        ASSERT_EQ(sides.n_sequences_here(), n_here) << where;
        ASSERT_EQ(sides.n_sequences_there(), n_there) << where;
        ASSERT_EQ(sides.pages_here(), n_pages) << where;
        if (!has_failed) {
          break;
        }
      }
    }
  }
  EXPECT_GT(n_failures, 20u);
  for (uint64_t nth = 1, n_opened = 0; n_opened < 2; ++nth) {
    kvm_cuda_bridge_destroy(sides.bridge);
    sides.bridge = nullptr;
    const Operation all[] = {Operation::kAllocate, Operation::kRegister, Operation::kStream,
                             Operation::kEvent};
    n_opened = 0;
    for (const Operation operation : all) {
      sides.rig.driver().fail(operation, nth);
      kvm_cuda_bridge_destroy(sides.bridge);
      sides.bridge = nullptr;
      n_opened += sides.open_bridge(kStaging) == KVM_OK ? 1 : 0;
      sides.rig.driver().fail(operation, 0);
    }
  }
  kvm_cuda_bridge_destroy(sides.bridge);
  ASSERT_EQ(sides.open_bridge(kStaging), KVM_OK) << kvm_last_error();
  kvm_seq_id got = 0;
  ASSERT_EQ(sides.store(Sides::copy(source), &got), KVM_OK) << kvm_last_error();
  EXPECT_EQ(sides.host_rows(got, 200), sides.host_rows(there, 200));
}

TEST(BridgeTest, RoomRunsOutOnEitherSide) {
  Geometry wide;
  wide.n_layers = 8;
  Sides sides({}, wide, wide, kStaging, 8 << 20, 4 << 20);
  const kvm_seq_id source = sides.rig.create();
  sides.append_here(source, sides.numbers(1, 1500));  // 6 MiB
  kvm_seq_id there = 0;
  const kvm_status status = sides.store(Sides::copy(source), &there);
  if (has_server()) {  // whose host memory is 16 MiB
    ASSERT_EQ(status, KVM_OK) << kvm_last_error();
    EXPECT_EQ(sides.host_rows(there, 1500), sides.device_rows(source, 1500));
    kvm_seq_id next = 0;
    while (sides.store(Sides::copy(source), &next) == KVM_OK) {
    }
  }
  EXPECT_TRUE(kvm_last_error()[0] != '\0');
  const uint64_t n_there = sides.n_sequences_there();
  kvm_seq_id got = 0;
  const kvm_status again = sides.store(Sides::copy(source), &got);
  EXPECT_TRUE(again == KVM_ERR_NO_SPACE || again == KVM_ERR_QUOTA) << kvm_status_name(again);
  EXPECT_EQ(sides.n_sequences_there(), n_there);
  ASSERT_EQ(sides.store(Sides::copy(source, 0, 100), &got), KVM_OK) << kvm_last_error();

  const uint64_t n_here = sides.n_sequences_here(), n_pages = sides.pages_here();
  std::vector<kvm_seq_id> loaded;
  kvm_seq_id here = 0;
  kvm_status loads = KVM_OK;
  while ((loads = sides.load(Sides::copy(got), &here)) == KVM_OK) {
    loaded.push_back(here);
  }
  EXPECT_EQ(loads, KVM_ERR_NO_SPACE) << kvm_last_error();
  EXPECT_EQ(sides.n_sequences_here(), n_here + loaded.size());
  for (const kvm_seq_id seq : loaded) {
    ASSERT_EQ(kvm_seq_free(sides.rig.client(), seq), KVM_OK);
  }
  EXPECT_EQ(sides.pages_here(), n_pages);
}

TEST(BridgeTest, TimeoutsEndACopy) {
  Sides sides({}, {}, {});
  const kvm_seq_id source = sides.rig.create();
  sides.append_here(source, sides.numbers(1, 300));
  kvm_seq_id there = 0, got = 0;
  ASSERT_EQ(sides.store(Sides::copy(source), &there), KVM_OK) << kvm_last_error();
  kvm_cuda_copy_params params = Sides::copy(source);
  params.timeout_ns = 1;
  EXPECT_EQ(sides.store(params, &got), KVM_ERR_TIMEOUT);
  params.source = there;
  EXPECT_EQ(sides.load(params, &got), KVM_ERR_TIMEOUT);
  EXPECT_EQ(sides.n_sequences_here(), 1u);
  EXPECT_EQ(sides.n_sequences_there(), 1u);
  params.timeout_ns = kPatienceNs;
  EXPECT_EQ(sides.load(params, &got), KVM_OK) << kvm_last_error();
}

TEST(BridgeTest, RefusesBridges) {
  Sides sides({}, {}, {});
  kvm_cuda_bridge* out = nullptr;
  const auto refuses = [&](const kvm_cuda_bridge_params& params, kvm_status expected,
                           const std::string& words) {
    expect_refused(kvm_cuda_bridge_create(sides.rig.client(), &params, &out), expected, words);
  };
  const kvm_cuda_bridge_params good = sides.bridge_params(kStaging);
  kvm_cuda_bridge_params params = good;
  params.host = nullptr;
  refuses(params, KVM_ERR_INVALID, "host is NULL");
  params.host = sides.rig.client();
  params.host_space = sides.rig.space();
  refuses(params, KVM_ERR_UNSUPPORTED, "there are no queues");
  params = good;
  params.space = 1234567;
  refuses(params, KVM_ERR_NOT_FOUND, "space");
  params = good;
  params.host_space = 1234567;
  EXPECT_NE(kvm_cuda_bridge_create(sides.rig.client(), &params, &out), KVM_OK);
  params = good;
  params.max_tokens = 0;
  refuses(params, KVM_ERR_INVALID, "max_tokens is 0");
  params = good;
  params.staging_bytes = 4096;
  refuses(params, KVM_ERR_INVALID, "staging_bytes is 4096; it must be at least 65536");
  params.staging_bytes = 65535;
  refuses(params, KVM_ERR_INVALID, "staging_bytes is 65535");
  params = good;
  params.flags = 1;
  refuses(params, KVM_ERR_INVALID, "flags");
  EXPECT_EQ(kvm_cuda_bridge_create(sides.client, &good, &out), KVM_ERR_UNSUPPORTED);
  EXPECT_EQ(out, nullptr);
  kvm_cuda_bridge_destroy(nullptr);
}

// Expects that there is no bridge between spaces of these.
void expect_no_bridge(const Geometry& here, const Geometry& there, const std::string& words) {
  Rig rig({}, here);
  kvm_client* const client = rig.open_host();
  kvm_cuda_bridge_params params{};
  params.struct_size = sizeof params;
  params.host = client;
  params.host_space = register_space(client, there);
  params.space = rig.space();
  params.max_tokens = kMaxTokens;
  kvm_cuda_bridge* bridge = nullptr;
  expect_refused(kvm_cuda_bridge_create(rig.client(), &params, &bridge), KVM_ERR_INVALID, words);
  kvm_cuda_bridge_destroy(bridge);
  kvm_client_close(client);
}

TEST(BridgeTest, RefusesSpacesThatDoNotAgree) {
  for (uint32_t differs = 0; differs < 4; ++differs) {
    Geometry there;
    there.n_layers = differs == 0 ? 3 : there.n_layers;
    there.n_kv_heads = differs == 1 ? 4 : there.n_kv_heads;
    there.dim = differs == 2 ? 128 : there.dim;
    if (differs == 3) {
      there = latent_geometry(4);
      there.n_kv_heads = 2;
    }
    expect_no_bridge(differs == 3 ? latent_geometry(4) : Geometry{}, there,
                     "the spaces do not agree");
  }
}

TEST(BridgeTest, RefusesCopies) {
  Sides sides({}, {}, {});
  const kvm_seq_id source = sides.rig.create();
  sides.append_here(source, sides.numbers(1, 100));
  const kvm_seq_id there = sides.create_there();
  sides.append_there(there, sides.numbers(1, 100));
  kvm_seq_id out = 0;
  expect_refused(sides.store(Sides::copy(source, 7, 7), &out), KVM_ERR_INVALID,
                 "begin is 7 and end 7");
  expect_refused(sides.store(Sides::copy(source, 0, 101), &out), KVM_ERR_INVALID,
                 "the source has 100 tokens");
  expect_refused(sides.load(Sides::copy(there, 100), &out), KVM_ERR_INVALID, "begin is 100");
  EXPECT_EQ(sides.store(Sides::copy(1234567), &out), KVM_ERR_NOT_FOUND);
  EXPECT_NE(sides.store(Sides::copy(source, 0, 5, source), &out), KVM_OK);
  EXPECT_EQ(sides.load(Sides::copy(there, 0, 5, 1234567), &out), KVM_ERR_NOT_FOUND);
  EXPECT_EQ(sides.store(Sides::copy(source, 50, 60, sides.create_there()), &out), KVM_ERR_INVALID);
  EXPECT_EQ(sides.load(Sides::copy(there, 50, 60, sides.rig.create()), &out), KVM_ERR_INVALID);
  kvm_cuda_copy_params params = Sides::copy(source);
  params.flags = 1;
  EXPECT_EQ(sides.store(params, &out), KVM_ERR_INVALID);

  // A space of the host that the bridge is not of.
  kvm_space_params other{};
  other.struct_size = sizeof other;
  other.name = "other";
  other.n_layers = 2;
  other.n_q_heads = 4;
  other.n_kv_heads = 2;
  other.head_dim_k = other.head_dim_v = 64;
  other.codec = KVM_CODEC_BF16;
  kvm_space_id other_space = 0;
  kvm_seq_id of_other = 0;
  ASSERT_EQ(kvm_space_register(sides.client, &other, &other_space), KVM_OK) << kvm_last_error();
  ASSERT_EQ(kvm_seq_create(sides.client, other_space, nullptr, &of_other), KVM_OK);
  EXPECT_EQ(sides.store(Sides::copy(source, 0, 5, of_other), &out), KVM_ERR_INVALID);
  EXPECT_EQ(sides.load(Sides::copy(of_other), &out), KVM_ERR_INVALID);

  const uint64_t long_ago = sides.n_sequences_here();
  sides.rig.driver().begin_capture(sides.rig.stream());
  EXPECT_EQ(sides.store(Sides::copy(source), &out), KVM_ERR_UNSUPPORTED);
  EXPECT_EQ(sides.load(Sides::copy(there), &out), KVM_ERR_UNSUPPORTED);
  (void)sides.rig.driver().end_capture(sides.rig.stream());
  EXPECT_EQ(sides.n_sequences_here(), long_ago);

  ASSERT_EQ(kvm_cuda_spill(sides.rig.client(), source, sides.rig.stream()), KVM_OK);
  EXPECT_EQ(sides.store(Sides::copy(source), &out), KVM_ERR_BUSY);
  ASSERT_EQ(kvm_cuda_fetch(sides.rig.client(), source, sides.rig.stream()), KVM_OK);
  EXPECT_EQ(sides.store(Sides::copy(source), &out), KVM_OK) << kvm_last_error();

  kvm_client_close(sides.client);
  sides.client = nullptr;
  EXPECT_EQ(sides.store(Sides::copy(source), &out), KVM_ERR_DISCONNECTED);
  kvm_cuda_bridge_destroy(sides.bridge);
  sides.bridge = nullptr;
  kvm_queue_destroy(sides.queue);
  sides.queue = nullptr;
}

// --- Shapes, and layers one by one --------------------------------------------------------------

kvm_layer_params layer_of(uint32_t layer, uint32_t kind = KVM_LAYER_OWN, uint32_t target = 0) {
  kvm_layer_params of{};
  of.layer_begin = layer;
  of.n_layers = 1;
  of.kind = kind;
  of.target = target;
  return of;
}

struct Shape {
  const char* name;
  uint32_t dim;
  uint32_t n_layers;
  bool is_narrow;  // layer 1 has one kv head
  uint64_t staging_bytes;
  uint32_t here, there;  // codecs; the host's keeps every number of the device's
};

class BridgeShapes : public ::testing::TestWithParam<Shape> {};

// In two parts each way, which begin and end inside pages.
TEST_P(BridgeShapes, ComeBackAsTheyWere) {
  const Shape& shape = GetParam();
  FakeOptions options;
  options.eagerness = 2;
  Geometry here;
  here.n_layers = shape.n_layers;
  here.dim = shape.dim;
  if (shape.is_narrow) {
    kvm_layer_params narrow = layer_of(1);
    narrow.n_kv_heads = 1;
    here.layers.push_back(narrow);
  }
  Sides sides(options, with_codec(here, shape.here), with_codec(here, shape.there),
              shape.staging_bytes);
  constexpr uint32_t kTokens = 5 * 64 + 1;
  const kvm_seq_id source = sides.rig.create();
  sides.append_here(source, sides.numbers(1, kTokens));
  const Sides::Rows expected = sides.device_rows(source, kTokens);
  kvm_seq_id head = 0, all = 0;
  ASSERT_EQ(sides.store(Sides::copy(source, 0, 127), &head), KVM_OK) << kvm_last_error();
  ASSERT_EQ(sides.store(Sides::copy(source, 127, KVM_POSITION_END, head), &all), KVM_OK)
      << kvm_last_error();
  EXPECT_EQ(sides.host_rows(all, kTokens), expected);
  ASSERT_EQ(sides.load(Sides::copy(all, 0, 65), &head), KVM_OK) << kvm_last_error();
  ASSERT_EQ(sides.load(Sides::copy(all, 65, KVM_POSITION_END, head), &all), KVM_OK)
      << kvm_last_error();
  EXPECT_EQ(sides.device_rows(all, kTokens), expected);
}

INSTANTIATE_TEST_SUITE_P(
    All, BridgeShapes,
    ::testing::Values(Shape{"of80", 80, 3, false, 81920, KVM_CODEC_BF16, KVM_CODEC_BF16},
                      Shape{"of96", 96, 2, false, 100000, KVM_CODEC_F16, KVM_CODEC_F32},
                      Shape{"of192", 192, 2, false, 0, KVM_CODEC_BF16, KVM_CODEC_BF16},
                      Shape{"of256", 256, 2, false, 777777, KVM_CODEC_BF16, KVM_CODEC_F32},
                      Shape{"narrow_of64", 64, 3, true, 65536, KVM_CODEC_BF16, KVM_CODEC_BF16},
                      Shape{"narrow_of80", 80, 4, true, 90001, KVM_CODEC_F16, KVM_CODEC_F16},
                      Shape{"int8_of80", 80, 2, false, 200001, KVM_CODEC_I8, KVM_CODEC_F32},
                      Shape{"int4_of256", 256, 2, true, 600001, KVM_CODEC_I4, KVM_CODEC_F32},
                      Shape{"fp8_of192", 192, 2, true, 600001, KVM_CODEC_F8E4M3, KVM_CODEC_F32}),
    [](const auto& of) { return std::string(of.param.name); });

// Spaces that agree as spaces, and have a layer that is something else.
TEST(BridgeTest, RefusesLayersThatDoNotAgree) {
  kvm_layer_params one_head = layer_of(2), short_rows = layer_of(2);
  one_head.n_kv_heads = 1;
  short_rows.head_dim_k = short_rows.head_dim_v = 32;
  const kvm_layer_params of_0 = layer_of(2, KVM_LAYER_ALIAS, 0);
  const kvm_layer_params of_1 = layer_of(2, KVM_LAYER_ALIAS, 1);
  const kvm_layer_params absent = layer_of(2, KVM_LAYER_ABSENT);
  const struct {
    const char* name;
    std::vector<kvm_layer_params> here, there;
  } cases[] = {
      {"kv heads, on the host", {}, {one_head}}, {"kv heads, on the device", {one_head}, {}},
      {"head dims", {}, {short_rows}},           {"an alias on the device", {of_0}, {}},
      {"an alias on the host", {}, {of_0}},      {"aliases of others", {of_0}, {of_1}},
      {"absent on the device", {absent}, {}},    {"absent on the host", {}, {absent}}};
  for (const auto& of : cases) {
    Geometry here, there;
    here.n_layers = there.n_layers = 3;
    here.layers = of.here;
    there.layers = of.there;
    SCOPED_TRACE(of.name);
    expect_no_bridge(here, there, "layers differ in what they store");
  }
}

// --- What a window has not left behind yet ------------------------------------------------------

Geometry windowed_geometry() {
  Geometry windowed;
  kvm_policy_params policy{};
  policy.retention = KVM_RETAIN_SINKS_RECENT;
  policy.n_sinks = 4;
  policy.n_recent = 96;
  windowed.policies.push_back(policy);
  return windowed;
}

// Behind the one update of a prompt all of it is there, and kvm_cuda_read gives it.
TEST(BridgeTest, StoresAPromptBeforeItsWindowLeavesItBehind) {
  Sides sides({}, windowed_geometry(), {});
  constexpr uint32_t kTokens = 500;
  const kvm_seq_id source = sides.rig.create();
  sides.append_here(source, sides.numbers(1, kTokens));
  kvm_seq_id there = 0;
  ASSERT_EQ(sides.store(Sides::copy(source), &there), KVM_OK) << kvm_last_error();
  const kvm_seq_id expected = sides.create_there();
  sides.append_there(expected, sides.numbers(1, kTokens));
  EXPECT_EQ(sides.host_rows(there, kTokens), sides.host_rows(expected, kTokens));
}

TEST(BridgeTest, StoresWhatItHasLoaded) {
  Sides sides({}, windowed_geometry(), {});
  constexpr uint32_t kTokens = 500;
  const kvm_seq_id source = sides.create_there();
  sides.append_there(source, sides.numbers(1, kTokens));
  kvm_seq_id here = 0, there = 0;
  ASSERT_EQ(sides.load(Sides::copy(source), &here), KVM_OK) << kvm_last_error();
  ASSERT_EQ(sides.store(Sides::copy(here), &there), KVM_OK) << kvm_last_error();
  EXPECT_EQ(sides.host_rows(there, kTokens), sides.host_rows(source, kTokens));
}

// --- Beside others ------------------------------------------------------------------------------

// Whoever owns a prefix frees it while it is being loaded.
TEST(BridgeTest, PrefixesMayBeFreedMeanwhile) {
  FakeOptions options;
  options.runs_by_itself = true;
  Sides sides(options, {}, {}, 64 << 10);
  constexpr uint32_t kTokens = 600;
  const kvm_seq_id source = sides.create_there();
  sides.append_there(source, sides.numbers(1, kTokens));
  const Sides::Rows expected = sides.host_rows(source, kTokens);
  for (uint32_t round = 0; round < 5; ++round) {
    kvm_seq_id prefix = 0, got = 0;
    ASSERT_EQ(kvm_seq_fork(sides.client, source, KVM_POSITION_END, &prefix), KVM_OK);
    ASSERT_EQ(kvm_seq_publish(sides.client, prefix), KVM_OK) << kvm_last_error();
    kvm_status status = KVM_OK;
    std::thread loading([&] { status = sides.load(Sides::copy(prefix), &got); });
    ::usleep(500u << round);
    EXPECT_EQ(kvm_seq_free(sides.client, prefix), KVM_OK) << kvm_last_error();
    loading.join();
    if (status == KVM_OK) {
      EXPECT_EQ(sides.device_rows(got, kTokens), expected) << round;
      EXPECT_EQ(kvm_seq_free(sides.rig.client(), got), KVM_OK);
    } else {
      EXPECT_TRUE(status == KVM_ERR_STALE || status == KVM_ERR_NOT_FOUND)
          << kvm_status_name(status);
    }
  }
  EXPECT_EQ(sides.n_sequences_here(), 0u);
  EXPECT_EQ(sides.n_sequences_there(), 1u);
}

// kvmd closes the host's connection, which clears its arenas, when all rows of a load lie in one
// and the device has not come to them.
TEST(ServedBridgeTest, AConnectionThatIsClosedFailsALoad) {
  FakeOptions options;
  options.runs_by_itself = true;
  Sides sides(options, {}, {});
  kvm_client* const other = sides.rig.open_host();
  const kvm_seq_id source = sides.create_there();
  sides.append_there(source, sides.numbers(1, 100));
  alignas(4096) static uint64_t word[512];
  word[0] = 0;
  ASSERT_TRUE(sides.rig.driver().register_host(word, sizeof word).is_ok());
  ASSERT_TRUE(sides.rig.driver().wait_word(word, 1, sides.rig.stream()).is_ok());
  kvm_status status = KVM_OK;
  kvm_seq_id got = 0;
  std::thread loading([&] { status = sides.load(Sides::copy(source), &got); });
  ::usleep(500'000);  // reads of the host are done by then, most likely
  kvm_client_info info{};
  info.struct_size = sizeof info;
  ASSERT_EQ(kvm_client_get_info(sides.client, &info), KVM_OK);
  kvm_evict_params evict{};
  evict.struct_size = sizeof evict;
  evict.flags = KVM_EVICT_DISCONNECT;
  evict.what = KVM_EVICT_CLIENT;
  evict.id = info.client_id;
  EXPECT_EQ(kvm_evict(other, &evict, nullptr), KVM_OK) << kvm_last_error();
  ::usleep(500'000);  // likewise the clearing
  // SYNC: release, which nobody needs.
  std::atomic_ref<uint64_t>(word[0]).store(1, std::memory_order_release);
  loading.join();
  EXPECT_EQ(status, KVM_ERR_DISCONNECTED) << kvm_status_name(status);
  sides.rig.driver().settle();
  sides.rig.driver().unregister_host(word);
  kvm_client_close(other);
}

}  // namespace
}  // namespace kvm::device::testing
