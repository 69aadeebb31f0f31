// SPDX-License-Identifier: Apache-2.0
#include "bench/decode_model.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "bench/approx/parallel.h"
#include "bench/approx/reference.h"
#include "bench/harness.h"

namespace kvm::bench {

namespace {

constexpr uint64_t kHeadBytes = DecodeModel::kDim * 2;

// The default, but where the context would be too short for it to show anything.
uint32_t index_begin(uint64_t n_tokens) {
  return static_cast<uint32_t>(std::clamp<uint64_t>(n_tokens / 4, 256, 4096));
}

DataSet make_layer(const std::string& name, uint32_t number, uint64_t n_tokens, uint32_t threads) {
  DataSpec spec;
  spec.name = name;
  spec.tokens = static_cast<uint32_t>(n_tokens);
  spec.heads = DecodeModel::kKvHeads;
  spec.first_head = number * DecodeModel::kKvHeads;
  spec.sets = DecodeModel::kSets;
  spec.dim = DecodeModel::kDim;
  DataSet data = require(make_data(spec, threads), "data");
  const HeadData& head = data.heads[0];
  if (data.heads.size() != DecodeModel::kKvHeads || head.dim != DecodeModel::kDim ||
      head.group != DecodeModel::kQHeads / DecodeModel::kKvHeads || data.n_tokens != n_tokens ||
      head.n_sets() != DecodeModel::kSets || head.dtype != Dtype::kBf16 || head.softcap != 0) {
    require(Status(KVM_ERR_UNSUPPORTED, "data '" + name + "' is not of this model's geometry"),
            "decode");
  }
  return data;
}

}  // namespace

DecodeModel::DecodeModel(kvm_client* client, kvm_queue* queue, uint64_t n_tokens, bool is_indexed)
    : client_(client), queue_(queue), n_tokens_(n_tokens) {
  constexpr uint64_t kBlockBytes = kBlock * kTokenBytes / 2;
  kvm_arena_params arena_params{};
  arena_params.struct_size = sizeof(arena_params);
  arena_params.size = 2 * kBlockBytes + (4ull << 20);
  require_ok(kvm_arena_create(client, &arena_params, &arena_), "arena");
  k_ = allocate(arena_, kBlockBytes, KVM_DTYPE_BF16);
  v_ = allocate(arena_, kBlockBytes, KVM_DTYPE_BF16);
  q_ = allocate(arena_, kRowSize * 2, KVM_DTYPE_BF16);
  o_tensor_ = allocate(arena_, kRowSize * 2, KVM_DTYPE_BF16);
  lse_ = allocate(arena_, kQHeads * 4, KVM_DTYPE_F32);
  kvm_index_params index{};
  index.kind = KVM_INDEX_SKETCH;
  index.min_tokens = index_begin(n_tokens);
  kvm_space_params space{};
  space.struct_size = sizeof(space);
  space.name = "bench-8b";
  space.n_layers = kLayers;
  space.n_q_heads = kQHeads;
  space.n_kv_heads = kKvHeads;
  space.head_dim_k = kDim;
  space.n_indexes = is_indexed ? 1 : 0;
  space.indexes = &index;
  require_ok(kvm_space_register(client, &space, &space_), "space");
  require_ok(kvm_seq_create(client, space_, nullptr, &seq_), "sequence");
  for (std::vector<float>& o : o_) {
    o.resize(kRowSize);
  }
}

DecodeModel::~DecodeModel() {
  kvm_seq_free(client_, seq_);
  kvm_arena_destroy(arena_);
}

void DecodeModel::fill(const std::string& data, uint32_t n_held, uint32_t threads) {
  n_held_ = n_held;
  const bool shows_progress = isatty(STDERR_FILENO) == 1;
  uint32_t n_filled = 0;
  for (uint32_t number = 0; number < kDataLayers; ++number) {
    const DataSet layer_data = make_layer(data, number, n_tokens_, threads);
    keep_rest(layer_data, number);
    for (uint32_t layer = number; layer < kLayers; layer += kDataLayers) {
      append_data(layer_data, layer, threads);
      if (shows_progress) {
        fmt::print(stderr, "\rfilling layer {}/{}", ++n_filled, kLayers);
      }
    }
  }
  if (shows_progress) {
    fmt::print(stderr, "\n");
  }
}

void DecodeModel::append_data(const DataSet& data, uint32_t layer, uint32_t threads) {
  const uint64_t end = n_tokens_ - n_held_;
  for (uint64_t begin = 0; begin < end; begin += kBlock) {
    const auto n = static_cast<uint32_t>(std::min<uint64_t>(kBlock, end - begin));
    parallel_for(threads, n, [&](size_t i) {
      for (uint32_t h = 0; h < kKvHeads; ++h) {
        const HeadData& head = data.heads[h];
        const size_t at = (i * kKvHeads + h) * kDim;
        std::memcpy(k_.halves() + at, head.k_row(begin + i), kHeadBytes);
        std::memcpy(v_.halves() + at, head.v_row(begin + i), kHeadBytes);
      }
    });
    kvm_item item{};
    kvm_step_params params = make_step(&item, layer);
    item.n_append = n;
    require_ok(kvm_append(queue_, &params), "append");
  }
}

void DecodeModel::keep_rest(const DataSet& data, uint32_t number) {
  for (uint64_t t = n_tokens_ - n_held_; t < n_tokens_; ++t) {
    for (const HeadData& head : data.heads) {
      held_k_[number].insert(held_k_[number].end(), head.k_row(t), head.k_row(t) + kDim);
      held_v_[number].insert(held_v_[number].end(), head.v_row(t), head.v_row(t) + kDim);
    }
  }
  for (uint32_t set = 0; set < kSets; ++set) {
    for (const HeadData& head : data.heads) {
      const uint16_t* rows = head.q_rows(set);
      queries_[number].insert(queries_[number].end(), rows, rows + size_t{head.group} * kDim);
    }
  }
}

kvm_step_params DecodeModel::make_step(kvm_item* item, uint32_t layer) {
  item->seq = seq_;
  item->append_position = KVM_POSITION_END;
  item->query_position = KVM_POSITION_END;
  kvm_step_params params{};
  params.struct_size = sizeof(params);
  params.space = space_;
  params.layer_begin = layer;
  params.n_items = 1;
  params.items = item;
  params.k = k_.tensor;
  params.v = v_.tensor;
  return params;
}

void DecodeModel::set_mode(const StepMode& mode, uint32_t layer, uint32_t set,
                           kvm_step_params* params) {
  const uint16_t* q = queries_[layer % kDataLayers].data() + set * kRowSize;
  std::memcpy(q_.data, q, kRowSize * 2);
  params->q = q_.tensor;
  params->o = o_tensor_.tensor;
  params->lse = lse_.tensor;
  params->mode = mode.mode;
  params->budget = mode.budget;
  params->eps = mode.eps;
  params->delta = mode.delta;
  params->seed = uint64_t{n_decoded_} * kLayers + layer + 1;
}

void DecodeModel::take(uint32_t layer, const kvm_step_stats& stats, TokenStats* out) {
  out->compute_s += static_cast<double>(stats.compute_ns) * 1e-9;
  out->keys_present += stats.keys_present;
  out->keys_read += stats.keys_read;
  out->bytes_read += stats.bytes_read;
  out->n_exact += stats.n_exact;
  for (size_t i = 0; i < kRowSize; ++i) {
    o_[layer][i] = bf16_to_f32(o_tensor_.halves()[i]);
  }
}

TokenStats DecodeModel::decode(const StepMode& mode) {
  KVM_ASSERT(n_decoded_ < n_held_);
  TokenStats out;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    constexpr size_t kSize = size_t{kKvHeads} * kDim;
    const uint32_t number = layer % kDataLayers;
    std::memcpy(k_.data, held_k_[number].data() + n_decoded_ * kSize, kSize * 2);
    std::memcpy(v_.data, held_v_[number].data() + n_decoded_ * kSize, kSize * 2);
    kvm_item item{};
    kvm_step_params params = make_step(&item, layer);
    set_mode(mode, layer, (layer / kDataLayers + n_decoded_) % kSets, &params);
    item.n_append = item.n_query = 1;
    kvm_step_stats stats{};
    stats.struct_size = sizeof(stats);
    const double begin = now_s();
    require_ok(kvm_step(queue_, &params, &stats), "step");
    out.seconds += now_s() - begin;
    take(layer, stats, &out);
  }
  ++n_decoded_;
  return out;
}

void DecodeModel::undo() {
  --n_decoded_;
  require_ok(kvm_seq_truncate(client_, seq_, n_tokens_ - n_held_ + n_decoded_), "truncate");
}

TokenStats DecodeModel::attend(uint32_t layer, uint32_t set, const StepMode& mode) {
  TokenStats out;
  kvm_item item{};
  kvm_step_params params = make_step(&item, layer);
  params.k = params.v = {};
  set_mode(mode, layer, set, &params);
  item.n_query = 1;
  kvm_step_stats stats{};
  stats.struct_size = sizeof(stats);
  const double begin = now_s();
  require_ok(kvm_attend(queue_, &params, &stats), "attend");
  out.seconds = now_s() - begin;
  take(layer, stats, &out);
  return out;
}

void add_errors(std::span<const float> o, std::span<const float> exact,
                std::vector<double>* errors) {
  for (size_t at = 0; at < DecodeModel::kRowSize; at += DecodeModel::kDim) {
    const std::vector<double> wanted(exact.begin() + at, exact.begin() + at + DecodeModel::kDim);
    errors->push_back(relative_error(o.data() + at, wanted.data(), DecodeModel::kDim));
  }
}

}  // namespace kvm::bench
