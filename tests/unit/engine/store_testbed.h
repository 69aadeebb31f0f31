// SPDX-License-Identifier: Apache-2.0
// What the tests of the store share: spaces to work on, and rows whose content says which token,
// layer and head they belong to.
#ifndef KVM_TESTS_UNIT_ENGINE_STORE_TESTBED_H_
#define KVM_TESTS_UNIT_ENGINE_STORE_TESTBED_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "codecs/codec.h"
#include "codecs/convert.h"
#include "engine/retention/retention_work.h"
#include "engine/store/store.h"

namespace kvm::engine {

inline constexpr uint64_t kMiB = uint64_t{1} << 20;

inline SpaceSpec make_spec(const std::string& name, uint32_t n_layers, uint32_t n_kv_heads,
                           uint32_t head_dim = 8, uint32_t group = 1) {
  SpaceSpec spec;
  spec.name = name;
  spec.params.struct_size = sizeof spec.params;
  spec.params.n_layers = n_layers;
  spec.params.n_q_heads = n_kv_heads * group;
  spec.params.n_kv_heads = n_kv_heads;
  spec.params.head_dim_k = head_dim;
  return spec;
}

// A client with limits of its own; 0: the default.
inline ClientSpec limited(uint64_t quota_bytes, uint64_t max_sequences = 0) {
  ClientSpec spec;
  if (quota_bytes != 0) {
    spec.limits[Resource::kBytes] = quota_bytes;
  }
  if (max_sequences != 0) {
    spec.limits[Resource::kSequences] = max_sequences;
  }
  return spec;
}

// Three clients of two users, by number, and a number for whose a published sequence is.
inline constexpr std::array<uint32_t, 2> kUids = {1000, 2000};
inline constexpr std::array<size_t, 3> kClientUsers = {0, 0, 1};  // whose clients they are
inline constexpr size_t kPublished = kClientUsers.size();

inline ClientSpec client_spec(size_t client, uint64_t quota_bytes, uint64_t max_sequences) {
  ClientSpec spec = limited(quota_bytes, max_sequences);
  spec.uid = kUids[kClientUsers[client]];
  return spec;
}

inline kvm_policy_params sinks_recent(uint32_t layer, uint64_t head_mask, uint64_t n_sinks,
                                      uint64_t n_recent, uint64_t slack = 0) {
  return {.layer_begin = layer,
          .n_layers = 1,
          .kv_head_mask = {head_mask, 0},
          .retention = KVM_RETAIN_SINKS_RECENT,
          .n_sinks = n_sinks,
          .n_recent = n_recent,
          .slack = slack};
}

inline kvm_codec_params codec(uint32_t layer, uint64_t head_mask, uint32_t codec_k,
                              uint32_t codec_v) {
  return {.layer_begin = layer,
          .n_layers = 1,
          .kv_head_mask = {head_mask, 0},
          .codec_k = codec_k,
          .codec_v = codec_v};
}

// Element i of the K (plane 0) or V (plane 1) row of a token: an integer below 128, which every
// codec but fp8 holds exactly, int8 too since each row has a 127. Eight of them tell tokens apart.
inline float row_element(uint64_t token, uint32_t layer, uint32_t kv_head, uint32_t plane,
                         uint32_t i) {
  uint64_t x = token * 0x9e3779b97f4a7c15u + layer * 8191 + kv_head * 131 + plane * 17 + 1;
  x ^= x >> 29;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 32;
  return i % 8 == 6 ? 127.0f : static_cast<float>(x >> (i % 8 * 8) & 0x7f);
}

// Stores a row of fp32 in a slot of a head.
inline void write_row(const float* row, const KvPlane& plane, uint32_t dim, uint32_t head,
                      uint32_t slot) {
  codecs::TargetRows to = codecs::writable_rows(plane, dim, slot);
  const auto place = static_cast<uint16_t>(head);
  to.heads = &place;
  codecs::convert_rows({.data = row, .codec = CodecId::kF32}, to, 1, 1, dim);
}

// The same, read.
inline void read_row(const KvPlane& plane, uint32_t dim, uint32_t head, uint32_t slot, float* row) {
  codecs::SourceRows from = codecs::rows_of(plane, dim, slot);
  const auto place = static_cast<uint16_t>(head);
  from.heads = &place;
  codecs::convert_rows(from, {.data = row, .codec = CodecId::kF32}, 1, 1, dim);
}

// Writes the rows of `tokens` (numbers that identify them) where the pieces of item `item` say.
inline void write_rows(const std::vector<AppendPiece>& pieces, uint32_t item, uint32_t layer,
                       std::span<const uint64_t> tokens) {
  for (const AppendPiece& piece : pieces) {
    if (piece.item != item) {
      continue;
    }
    const tiers::SlabClass& slab_class = piece.cls->slab_class;
    std::vector<float> row(std::max(slab_class.dim_k, slab_class.dim_v));
    for (uint32_t t = 0; t < piece.n_tokens; ++t) {
      for (uint32_t h = 0; h < piece.cls->kv_heads.size(); ++h) {
        for (uint32_t plane = 0; plane < 2; ++plane) {
          const uint32_t dim = plane == 0 ? slab_class.dim_k : slab_class.dim_v;
          for (uint32_t i = 0; i < dim; ++i) {
            row[i] = row_element(tokens[piece.token + t], layer, piece.cls->kv_heads[h], plane, i);
          }
          write_row(row.data(), plane == 0 ? piece.k : piece.v, dim, h, piece.slot + t);
        }
      }
    }
  }
}

// What a request ends with: policies act.
inline void settle(Store& store, Sequence* seq) {
  RetentionWork work;
  ThreadWorkspace workspace;
  JobPlan plan;
  work.add(seq);
  RetentionWork::Next next = RetentionWork::Next::kMore;
  while (next != RetentionWork::Next::kDone) {
    next = work.next(store, 1, workspace, &plan);
    for (uint32_t i = 0; next == RetentionWork::Next::kTasks && i < plan.n_tasks; ++i) {
      work.run(i, workspace);
    }
  }
}

// Appends tokens to one layer: reserve, write, publish.
inline Status append(Store& store, Sequence* seq, uint32_t layer,
                     std::span<const uint64_t> tokens) {
  std::vector<AppendPiece> pieces;
  const AppendItem item = {
      .seq = seq, .layer = layer, .n_tokens = static_cast<uint32_t>(tokens.size())};
  KVM_TRY(store.reserve_append({&item, 1}, &pieces));
  write_rows(pieces, 0, layer, tokens);
  store.publish({.seq = seq, .layer = layer});
  settle(store, seq);
  return Status::ok();
}

// The same without writing rows: for tests of accounts only.
inline Status append_unwritten(Store& store, Sequence* seq, uint32_t layer, uint32_t n_tokens) {
  std::vector<AppendPiece> pieces;
  const AppendItem item = {.seq = seq, .layer = layer, .n_tokens = n_tokens};
  KVM_TRY(store.reserve_append({&item, 1}, &pieces));
  store.publish({.seq = seq, .layer = layer});
  settle(store, seq);
  return Status::ok();
}

// Tokens first, first + 1, ...
inline std::vector<uint64_t> numbered(uint64_t first, uint64_t n) {
  std::vector<uint64_t> tokens(n);
  for (uint64_t i = 0; i < n; ++i) {
    tokens[i] = first + i;
  }
  return tokens;
}

// Appends the same tokens to every layer that stores.
inline Status append_all(Store& store, Sequence* seq, std::span<const uint64_t> tokens) {
  const Space& space = store.seq_space(seq);
  for (uint32_t layer = 0; layer < space.n_layers; ++layer) {
    if (space.layers[layer].kind == KVM_LAYER_OWN) {
      KVM_TRY(append(store, seq, layer, tokens));
    }
  }
  return Status::ok();
}

// What becomes of a row that is stored as each of `in_turn`.
inline void store_as(std::span<const CodecId> in_turn, uint32_t dim, float* row) {
  if (std::find(in_turn.begin(), in_turn.end(), CodecId::kF8) == in_turn.end()) {
    return;  // row_element
  }
  for (const CodecId codec : in_turn) {
    uint32_t stored[256];
    uint16_t scale = 0;
    const KvPlane plane = {stored, codecs::codec_of(codec).is_scaled() ? &scale : nullptr, codec};
    write_row(row, plane, dim, 0, 0);
    read_row(plane, dim, 0, 0, row);
  }
}

struct NotRecoded {
  std::vector<CodecId> operator()(uint64_t, uint32_t) const { return {}; }
};

// Checks that a head of a layer stores exactly the tokens for which `stored(position)` holds, out
// of `tokens` (by position), and that their rows are right, to the bit. `writer`: the layer that
// wrote them; `recoded(position, plane)`: the codecs they were brought to since, in turn.
template <typename Stored, typename Recoded = NotRecoded>
void expect_content(const Store& store, const Sequence* seq, uint32_t layer, uint32_t writer,
                    uint32_t kv_head, std::span<const uint64_t> tokens, Stored stored,
                    Recoded recoded = {}) {
  const Space& space = store.seq_space(seq);
  const HeadPlace place = space.place(layer, kv_head);
  const tiers::SlabClass& slab_class = space.head_class(layer, place.class_index).slab_class;
  std::vector<KvRun> runs;
  store.collect_runs(seq, layer, place.class_index, &runs);
  uint64_t position = 0;
  const auto expect_gap = [&](uint64_t end) {
    for (; position < end; ++position) {
      if (stored(position)) {
        FAIL() << "position " << position << " is missing";
      }
    }
  };
  std::vector<float> row(256);
  std::vector<float> expected(256);
  for (const KvRun& run : runs) {
    ASSERT_GE(run.position, position);
    ASSERT_GE(run.n_tokens, 1);
    ASSERT_LE(run.position % kPageTokens + run.n_tokens, kPageTokens);
    expect_gap(run.position);
    for (uint32_t t = 0; t < run.n_tokens; ++t, ++position) {
      if (position >= tokens.size() || !stored(position)) {
        FAIL() << "position " << position << " should not be there";
      }
      for (uint32_t plane = 0; plane < 2; ++plane) {
        const uint32_t dim = plane == 0 ? slab_class.dim_k : slab_class.dim_v;
        const KvPlane& of = plane == 0 ? run.k : run.v;
        ASSERT_EQ(of.params != nullptr, codecs::codec_of(of.codec).is_scaled());
        read_row(of, dim, place.head, run.slot + t, row.data());
        for (uint32_t i = 0; i < dim; ++i) {
          expected[i] = row_element(tokens[position], writer, kv_head, plane, i);
        }
        std::vector<CodecId> in_turn = recoded(position, plane);
        in_turn.insert(in_turn.begin(), plane == 0 ? slab_class.codec_k : slab_class.codec_v);
        store_as(in_turn, dim, expected.data());
        if (!std::equal(expected.begin(), expected.begin() + dim, row.begin())) {
          FAIL() << "layer " << layer << " head " << kv_head << " position " << position
                 << " has another row";
        }
      }
    }
  }
  expect_gap(tokens.size());
}

inline std::unique_ptr<Store> open_store(uint64_t capacity_bytes, uint64_t quota_bytes = 0) {
  return Store::open({.host_capacity_bytes = capacity_bytes, .default_quota_bytes = quota_bytes})
      .value();
}

inline kvm_stats stats_of(const Store& store) {
  kvm_stats stats{};
  store.add_stats(&stats);
  return stats;
}

}  // namespace kvm::engine

#endif  // KVM_TESTS_UNIT_ENGINE_STORE_TESTBED_H_
