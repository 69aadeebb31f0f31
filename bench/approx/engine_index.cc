// SPDX-License-Identifier: Apache-2.0
#include "bench/approx/engine_index.h"

#include <algorithm>
#include <cstring>

#include "codecs/codec.h"

namespace kvm::bench {
namespace {

constexpr uint64_t kAppendTokens = 4096;
constexpr uint64_t kSlackBytes = uint64_t{64} << 20;
constexpr uint64_t kIndexBytes = 48;  // of a key, at most

TensorView tensor(std::vector<uint16_t>* values, Dtype dtype) {
  return {values->data(), values->size() * sizeof(uint16_t), static_cast<uint32_t>(dtype), 0, 0, 0};
}

}  // namespace

EngineIndex::EngineIndex(const DataSet& data, uint32_t kind, uint32_t threads) : data_(data) {
  const HeadData& head = data.heads[0];
  const size_t n_heads = data.heads.size();
  engine::EngineOptions options;
  options.n_threads = threads;
  options.host_capacity_bytes =
      n_heads * data.n_tokens * (head.row_bytes() + kIndexBytes) + kSlackBytes;
  engine_ = require(engine::Engine::open(options), "engine");
  client_ = engine_->add_client({});
  SpaceSpec spec;
  spec.name = "index";
  spec.params.struct_size = sizeof(kvm_space_params);
  spec.params.n_layers = 1;
  spec.params.n_kv_heads = static_cast<uint32_t>(n_heads);
  spec.params.n_q_heads = static_cast<uint32_t>(n_heads * head.group);
  spec.params.head_dim_k = head.dim;
  spec.params.codec = static_cast<uint32_t>(codecs::codec_of_tensor(head.dtype));
  kvm_index_params index{};
  index.kind = kind;
  index.min_tokens = static_cast<uint32_t>(std::min<uint64_t>(data.n_tokens / 4, 4096));
  spec.indexes.push_back(index);
  space_ = require(engine_->register_space(spec), "space");
  k_.resize(kAppendTokens * n_heads * head.dim);
  v_.resize(k_.size());
  for (const HeadData& h : data.heads) {
    q_.insert(q_.end(), h.q_rows(0), h.q_rows(0) + size_t{h.group} * h.dim);
  }
  o_.resize(q_.size());
}

double EngineIndex::n_keys() const {
  return static_cast<double>(data_.n_tokens) * static_cast<double>(data_.heads.size());
}

kvm_seq_id EngineIndex::seq_verb(SeqRequest&& request) {
  kvm::RequestResult result = run(*engine_, client_, std::move(request));
  require(result.status, "sequence");
  return result.seq;
}

void EngineIndex::append(kvm_seq_id seq) {
  const size_t n_heads = data_.heads.size();
  const uint32_t dim = data_.heads[0].dim;
  for (uint64_t begin = 0; begin < data_.n_tokens; begin += kAppendTokens) {
    const uint64_t n = std::min(kAppendTokens, data_.n_tokens - begin);
    for (uint64_t i = 0; i < n; ++i) {
      for (size_t h = 0; h < n_heads; ++h) {
        const size_t at = (i * n_heads + h) * dim;
        std::memcpy(k_.data() + at, data_.heads[h].k_row(begin + i), size_t{dim} * 2);
        std::memcpy(v_.data() + at, data_.heads[h].v_row(begin + i), size_t{dim} * 2);
      }
    }
    StepRequest step;
    step.append = true;
    step.space = space_;
    kvm_item item{};
    item.seq = seq;
    item.append_position = KVM_POSITION_END;
    item.n_append = static_cast<uint32_t>(n);
    step.items.push_back(item);
    step.k = tensor(&k_, data_.heads[0].dtype);
    step.v = tensor(&v_, data_.heads[0].dtype);
    require(run(*engine_, client_, std::move(step)).status, "append");
  }
}

double EngineIndex::attend_seconds(kvm_seq_id seq) {
  StepRequest step;
  step.attend = true;
  step.space = space_;
  kvm_item item{};
  item.seq = seq;
  item.n_query = 1;
  item.query_position = KVM_POSITION_END;
  step.items.push_back(item);
  step.mode = KVM_MODE_SAMPLED;
  step.budget = 1;
  step.q = tensor(&q_, data_.heads[0].dtype);
  step.o = tensor(&o_, data_.heads[0].dtype);
  const double begin = now_s();
  require(run(*engine_, client_, std::move(step)).status, "attend");
  return now_s() - begin;
}

double EngineIndex::build_seconds() {
  SeqRequest create;
  create.verb = SeqVerb::kCreate;
  create.space = space_;
  const kvm_seq_id seq = seq_verb(std::move(create));
  append(seq);
  const double first = attend_seconds(seq);
  const double again = attend_seconds(seq);
  bytes_per_key_ = static_cast<double>(engine_->stats().index_bytes) / n_keys();
  SeqRequest free;
  free.verb = SeqVerb::kFree;
  free.seq = seq;
  seq_verb(std::move(free));
  return first - again;
}

}  // namespace kvm::bench
