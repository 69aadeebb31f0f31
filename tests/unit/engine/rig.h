// SPDX-License-Identifier: Apache-2.0
// An engine under test, and a naive model of it in double precision.
#ifndef KVM_TESTS_UNIT_ENGINE_RIG_H_
#define KVM_TESTS_UNIT_ENGINE_RIG_H_

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "codecs/codec.h"
#include "codecs/convert.h"
#include "engine/engine.h"
#include "tests/common/items.h"

namespace kvm::engine::testing {

inline float round_to(CodecId codec, float value) {
  switch (codec) {
    case CodecId::kF16:
      return f16_to_f32(f32_to_f16(value));
    case CodecId::kBf16:
      return bf16_to_f32(f32_to_bf16(value));
    default:
      return value;
  }
}

// A row as it is stored.
inline std::vector<float> round_row(CodecId codec, std::vector<float> row) {
  if (codecs::codec_of(codec).is_scaled()) {
    const auto n = static_cast<uint32_t>(row.size());
    std::vector<uint8_t> stored(n);
    const uint16_t scale = codecs::encode_row(row.data(), n, codec, stored.data());
    codecs::decode_row(stored.data(), codec, &scale, 0, n, row.data());
    return row;
  }
  for (float& x : row) {
    x = round_to(codec, x);
  }
  return row;
}

// A tensor in memory of its own, packed or with gaps between rows and heads.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Dtype dtype, uint64_t n_layers, uint64_t n_rows, uint64_t n_heads, uint64_t dim,
         uint64_t gap = 0)
      : dtype_(dtype), dim_(dim) {
    stride_head_ = dim + gap;
    stride_row_ = n_heads * stride_head_ + gap;
    stride_layer_ = n_rows * stride_row_ + gap;
    bytes_.assign(n_layers * stride_layer_ * dtype_size_bytes(dtype) + 1, std::byte{0x7f});
    packed_ = gap == 0;
  }
  TensorView view() {
    TensorView v;
    v.data = bytes_.data();
    v.size_bytes = bytes_.size() - 1;
    v.dtype = static_cast<uint32_t>(dtype_);
    if (!packed_) {
      v.stride_layer = stride_layer_;
      v.stride_row = stride_row_;
      v.stride_head = stride_head_;
    }
    return v;
  }
  Dtype dtype() const { return dtype_; }
  uint64_t dim() const { return dim_; }
  uint64_t index(uint64_t layer, uint64_t row, uint64_t head, uint64_t i) const {
    return layer * stride_layer_ + row * stride_row_ + head * stride_head_ + i;
  }
  float get(uint64_t layer, uint64_t row, uint64_t head, uint64_t i) const {
    const uint64_t at = index(layer, row, head, i);
    if (dtype_ == Dtype::kF32) {
      return reinterpret_cast<const float*>(bytes_.data())[at];
    }
    const uint16_t bits = reinterpret_cast<const uint16_t*>(bytes_.data())[at];
    return dtype_ == Dtype::kF16 ? f16_to_f32(bits) : bf16_to_f32(bits);
  }
  void set(uint64_t layer, uint64_t row, uint64_t head, uint64_t i, float value) {
    const uint64_t at = index(layer, row, head, i);
    if (dtype_ == Dtype::kF32) {
      reinterpret_cast<float*>(bytes_.data())[at] = value;
    } else {
      reinterpret_cast<uint16_t*>(bytes_.data())[at] =
          dtype_ == Dtype::kF16 ? f32_to_f16(value) : f32_to_bf16(value);
    }
  }
  std::vector<float> get_row(uint64_t layer, uint64_t row, uint64_t head) const {
    std::vector<float> out(dim_);
    for (uint64_t i = 0; i < dim_; ++i) {
      out[i] = get(layer, row, head, i);
    }
    return out;
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  Dtype dtype_ = Dtype::kF32;
  uint64_t dim_ = 0;
  uint64_t stride_layer_ = 0;
  uint64_t stride_row_ = 0;
  uint64_t stride_head_ = 0;
  bool packed_ = true;
  std::vector<std::byte> bytes_;
};

inline void fill(Buffer* buffer, uint64_t n_layers, uint64_t n_rows, uint64_t n_heads,
                 std::mt19937_64& random, float scale = 1.0f) {
  std::normal_distribution<float> normal(0.0f, scale);
  for (uint64_t l = 0; l < n_layers; ++l) {
    for (uint64_t r = 0; r < n_rows; ++r) {
      for (uint64_t h = 0; h < n_heads; ++h) {
        for (uint64_t i = 0; i < buffer->dim(); ++i) {
          buffer->set(l, r, h, i, normal(random));
        }
      }
    }
  }
}

inline SpaceSpec make_spec(const std::string& name, uint32_t n_layers, uint32_t n_q_heads,
                           uint32_t n_kv_heads, uint32_t dim_k, uint32_t dim_v = 0) {
  SpaceSpec spec;
  spec.name = name;
  spec.params.struct_size = sizeof(kvm_space_params);
  spec.params.n_layers = n_layers;
  spec.params.n_q_heads = n_q_heads;
  spec.params.n_kv_heads = n_kv_heads;
  spec.params.head_dim_k = dim_k;
  spec.params.head_dim_v = dim_v;
  return spec;
}

// An index for sequences of a test's length, few tables where it has any.
inline kvm_index_params make_index(uint32_t kind = KVM_INDEX_SKETCH) {
  kvm_index_params params{};
  params.kind = kind;
  params.min_tokens = 512;
  params.lsh_bits = kind == KVM_INDEX_LSH ? 5 : 0;
  params.lsh_tables = kind == KVM_INDEX_LSH ? 40 : 0;
  return params;
}

inline kvm_item append_item(kvm_seq_id seq, uint32_t n, uint32_t row = 0) {
  kvm_item item = kvm::testing::item_of(seq, n, 0);
  item.append_row = row;
  return item;
}

inline kvm_item query_item(kvm_seq_id seq, uint32_t n, uint32_t row = 0,
                           uint64_t position = KVM_POSITION_END) {
  kvm_item item = kvm::testing::item_of(seq, 0, n);
  item.query_row = row;
  item.query_position = position;
  return item;
}

// An engine with one client.
struct Rig {
  explicit Rig(uint32_t n_threads = 1, uint64_t capacity_bytes = 256 << 20,
               uint64_t worker_spin_ns = 50000)
      : Rig(make_options(n_threads, capacity_bytes, worker_spin_ns)) {}
  explicit Rig(const EngineOptions& options) {
    auto opened = Engine::open(options);
    EXPECT_TRUE(opened.is_ok()) << opened.status().message();
    engine = std::move(opened).value();
    client = engine->add_client({});
  }

  static EngineOptions make_options(uint32_t n_threads, uint64_t capacity_bytes = 256 << 20,
                                    uint64_t worker_spin_ns = 50000) {
    EngineOptions options;
    options.n_threads = n_threads;
    options.host_capacity_bytes = capacity_bytes;
    options.worker_spin_ns = worker_spin_ns;
    return options;
  }

  // Drives the engine until `done`, or gives up.
  void drive(const bool& done) {
    EXPECT_TRUE(drive_until([&] { return done; })) << "the request never finished";
  }
  // Returns whether it came to that.
  template <typename IsDone>
  bool drive_until(IsDone is_done) {
    for (int i = 0; i < 100000 && !is_done(); ++i) {
      if (engine->poll() == 0 && !engine->work()) {
        engine->wait(1'000'000);
      }
    }
    return is_done();
  }
  template <typename What>
  RequestResult run(What what, ClientId as = 0) {
    bool done = false;
    RequestResult result;
    engine->submit(as == 0 ? client : as, {1, ++n_submitted}, std::move(what),
                   [&](RequestResult&& r) {
                     EXPECT_FALSE(done) << "called twice";
                     result = std::move(r);
                     done = true;
                   });
    drive(done);
    return result;
  }
  kvm_space_id space(const SpaceSpec& spec) {
    auto id = engine->register_space(spec);
    EXPECT_TRUE(id.is_ok()) << id.status().message();
    return id.is_ok() ? id.value() : 0;
  }
  kvm_seq_id create(kvm_space_id space_id, uint32_t flags = 0) {
    SeqRequest request;
    request.space = space_id;
    request.flags = flags;
    RequestResult result = run(request);
    EXPECT_TRUE(result.status.is_ok()) << result.status.message();
    return result.seq;
  }
  RequestResult verb(SeqVerb which, kvm_seq_id seq, uint64_t n_tokens = 0) {
    SeqRequest request;
    request.verb = which;
    request.seq = seq;
    request.n_tokens = n_tokens;
    return run(request);
  }
  uint64_t length(kvm_seq_id seq) {
    auto info = engine->seq_info(client, seq);
    return info.is_ok() ? info.value().n_tokens_max : UINT64_MAX;
  }

  std::unique_ptr<Engine> engine;
  ClientId client = 0;
  uint64_t n_submitted = 0;
};

// One layer of one sequence as the model remembers it: rows [token][kv head][dim] after rounding.
struct ModelLayer {
  std::vector<std::vector<float>> k;
  std::vector<std::vector<float>> v;
};

// What the naive attention needs to know of a layer and a request.
struct Rule {
  uint32_t group = 1;
  uint64_t window = 0;
  float scale = 1;
  float softcap = 0;
  bool sinks_recent = false;
  uint64_t n_sinks = 0;
  uint64_t n_recent = 0;
  const float* sink_logit = nullptr;
};

inline bool rule_sees(const Rule& rule, const StepRequest& step, const kvm_item& item,
                      uint64_t first, uint32_t row, uint64_t x) {
  const uint64_t p = first + row;
  if ((item.flags & KVM_ITEM_TREE) != 0) {
    if (x >= first + item.n_query ||
        (x >= first && (step.tree_mask[item.tree_begin + row] >> (x - first) & 1) == 0)) {
      return false;
    }
  } else if ((item.flags & KVM_ITEM_NOT_CAUSAL) == 0 && x > p) {
    return false;
  }
  if (rule.window != 0 && x + rule.window <= p) {
    return false;
  }
  if (rule.sinks_recent && x >= rule.n_sinks && x + rule.n_recent <= p) {
    return false;
  }
  if (item.n_ranges != 0) {
    bool inside = false;
    for (uint32_t i = 0; i < item.n_ranges; ++i) {
      const kvm_range& r = step.ranges[item.range_begin + i];
      inside |= r.begin <= x && x < r.end;
    }
    if (inside == ((item.flags & KVM_ITEM_EXCLUDE_RANGES) != 0)) {
      return false;
    }
  }
  return true;
}

struct Answer {
  std::vector<double> o;
  double lse = -std::numeric_limits<double>::infinity();
};

// Attention of one row and q head in double precision.
inline Answer naive_attention(const Rule& rule, const StepRequest& step, const kvm_item& item,
                              uint64_t first, uint32_t row, uint32_t q_head,
                              const std::vector<float>& q, const ModelLayer& layer, uint32_t dim_k,
                              uint32_t dim_v) {
  const uint32_t kv_head = q_head / rule.group;
  std::vector<std::pair<uint64_t, double>> logits;
  double most = -std::numeric_limits<double>::infinity();
  for (uint64_t x = 0; x < layer.k.size(); ++x) {
    if (!rule_sees(rule, step, item, first, row, x)) {
      continue;
    }
    double logit = 0;
    for (uint32_t i = 0; i < dim_k; ++i) {
      logit += double{q[i]} * double{layer.k[x][kv_head * dim_k + i]};
    }
    logit *= double{rule.scale};
    if (rule.softcap != 0) {
      logit = double{rule.softcap} * std::tanh(logit / double{rule.softcap});
    }
    logits.emplace_back(x, logit);
    most = std::max(most, logit);
  }
  if (rule.sink_logit != nullptr) {
    most = std::max(most, double{*rule.sink_logit});
  }
  Answer answer;
  answer.o.assign(dim_v, 0.0);
  if (std::isinf(most)) {
    return answer;
  }
  double sum = rule.sink_logit != nullptr ? std::exp(double{*rule.sink_logit} - most) : 0.0;
  for (const auto& [x, logit] : logits) {
    const double weight = std::exp(logit - most);
    sum += weight;
    for (uint32_t i = 0; i < dim_v; ++i) {
      answer.o[i] += weight * double{layer.v[x][kv_head * dim_v + i]};
    }
  }
  for (double& value : answer.o) {
    value /= sum;
  }
  answer.lse = most + std::log(sum);
  return answer;
}

}  // namespace kvm::engine::testing

#endif  // KVM_TESTS_UNIT_ENGINE_RIG_H_
