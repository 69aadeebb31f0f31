// SPDX-License-Identifier: Apache-2.0
// An engine with a client and sequences of random rows, for the benches of the engine alone.
#ifndef KVM_BENCH_ENGINE_RIG_H_
#define KVM_BENCH_ENGINE_RIG_H_

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/codec_id.h"
#include "bench/harness.h"
#include "codecs/codec.h"
#include "engine/engine.h"

namespace kvm::bench {

struct Shape {
  uint32_t n_q_heads = 32;
  uint32_t n_kv_heads = 8;
  uint32_t head_dim = 128;
  CodecId codec = CodecId::kBf16;

  std::string name() const {
    const std::string suffix =
        codec == CodecId::kBf16 ? "" : std::string("_") + codecs::codec_of(codec).name;
    return fmt::format("{}{}_{}_d{}{}", n_q_heads == n_kv_heads ? "mha" : "gqa", n_q_heads,
                       n_kv_heads, head_dim, suffix);
  }
  uint64_t token_bytes() const {
    return n_kv_heads * codecs::codec_of(codec).token_bytes(head_dim) * 2;
  }
};

// Anonymous memory on huge pages, as a caller's arena would be.
class Memory {
 public:
  explicit Memory(uint64_t size_bytes) : size_bytes_(size_bytes) {
    data_ = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) {
      require(Status(KVM_ERR_NO_MEMORY, fmt::format("{} bytes refused", size_bytes)), "mmap");
    }
    madvise(data_, size_bytes, MADV_HUGEPAGE);
  }
  ~Memory() { munmap(data_, size_bytes_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  uint64_t size_bytes() const { return size_bytes_; }
  TensorView tensor(uint32_t dtype) const { return {data_, size_bytes_, dtype, 0, 0, 0}; }

 private:
  void* data_;
  uint64_t size_bytes_;
};

// An engine with one space and one client.
class Rig {
 public:
  Rig(const Shape& shape, uint32_t n_layers, uint32_t n_threads, uint64_t capacity_bytes,
      tiers::SlowTier* slow_tier = nullptr)
      : Rig(shape, n_layers, options_of(n_threads, capacity_bytes, slow_tier)) {}
  Rig(const Shape& shape, uint32_t n_layers, const engine::EngineOptions& options,
      const std::vector<kvm_index_params>& indexes = {})
      : shape_(shape) {
    engine_ = require(engine::Engine::open(options), "engine");
    client_ = engine_->add_client({});
    SpaceSpec spec;
    spec.name = "bench";
    spec.params.struct_size = sizeof(kvm_space_params);
    spec.params.n_layers = n_layers;
    spec.params.n_q_heads = shape.n_q_heads;
    spec.params.n_kv_heads = shape.n_kv_heads;
    spec.params.head_dim_k = shape.head_dim;
    spec.params.codec = static_cast<uint32_t>(shape.codec);
    spec.params.n_indexes = static_cast<uint32_t>(indexes.size());
    spec.indexes = indexes;
    space_ = require(engine_->register_space(spec), "space");
  }

  // In which pages move only when they are told to.
  static engine::EngineOptions options_of(uint32_t n_threads, uint64_t capacity_bytes,
                                          tiers::SlowTier* slow_tier) {
    engine::EngineOptions options;
    options.n_threads = n_threads;
    options.host_capacity_bytes = capacity_bytes;
    options.slow_tier = slow_tier;
    options.movement.is_automatic = false;
    return options;
  }

  engine::Engine& engine() { return *engine_; }
  // The first client, whose the sequences are for which none is named.
  engine::ClientId client() const { return client_; }
  kvm_space_id space() const { return space_; }

  kvm_seq_id create() { return create(client_); }
  kvm_seq_id create(engine::ClientId client) {
    SeqRequest request;
    request.verb = SeqVerb::kCreate;
    request.space = space_;
    return seq_verb(client, std::move(request));
  }

  kvm_seq_id seq_verb(SeqRequest&& request) { return seq_verb(client_, std::move(request)); }
  kvm_seq_id seq_verb(engine::ClientId client, SeqRequest&& request) {
    kvm::RequestResult result = run(*engine_, client, std::move(request));
    require(result.status, "sequence");
    return result.seq;
  }

  kvm_seq_id fork(kvm_seq_id seq) {
    SeqRequest request;
    request.verb = SeqVerb::kFork;
    request.seq = seq;
    request.n_tokens = KVM_POSITION_END;
    return seq_verb(std::move(request));
  }

  void free(kvm_seq_id seq) { free(client_, seq); }
  void free(engine::ClientId client, kvm_seq_id seq) {
    SeqRequest request;
    request.verb = SeqVerb::kFree;
    request.seq = seq;
    seq_verb(client, std::move(request));
  }

  // Rows 0 .. n_tokens - 1 of k and v, for every layer in [layer, layer + n_layers).
  void append(kvm_seq_id seq, uint32_t layer, uint32_t n_layers, uint32_t n_tokens, const Memory& k,
              const Memory& v) {
    StepRequest step;
    step.append = true;
    step.space = space_;
    step.layer_begin = layer;
    step.n_layers = n_layers;
    kvm_item item{};
    item.seq = seq;
    item.append_position = KVM_POSITION_END;
    item.n_append = n_tokens;
    step.items.push_back(item);
    step.k = k.tensor(KVM_DTYPE_BF16);
    step.v = v.tensor(KVM_DTYPE_BF16);
    require(run(*engine_, client_, std::move(step)).status, "append");
  }

  // Distinct data for every block of 4,096 tokens.
  void fill(kvm_seq_id seq, uint32_t layer, uint64_t n_tokens, uint64_t seed) {
    constexpr uint64_t kBlock = 4096;
    Memory k(kBlock * shape_.n_kv_heads * shape_.head_dim * 2);
    Memory v(kBlock * shape_.n_kv_heads * shape_.head_dim * 2);
    for (uint64_t at = 0; at < n_tokens; at += kBlock) {
      fill_random_bf16(k.as<uint16_t>(), k.size_bytes() / 2, seed + at * 2);
      fill_random_bf16(v.as<uint16_t>(), v.size_bytes() / 2, seed + at * 2 + 1);
      append(seq, layer, 1, static_cast<uint32_t>(std::min(kBlock, n_tokens - at)), k, v);
    }
  }

  // The last n_query tokens of each sequence attend to layer 0.
  StepRequest attend(const std::vector<kvm_seq_id>& seqs, uint32_t n_query, const Memory& q,
                     const Memory& o, const Memory& lse) const {
    StepRequest step;
    step.attend = true;
    step.space = space_;
    for (uint32_t i = 0; i < seqs.size(); ++i) {
      kvm_item item{};
      item.seq = seqs[i];
      item.n_query = n_query;
      item.query_row = i * n_query;
      item.query_position = KVM_POSITION_END;
      step.items.push_back(item);
    }
    step.q = q.tensor(KVM_DTYPE_BF16);
    step.o = o.tensor(KVM_DTYPE_F32);
    step.lse = lse.tensor(KVM_DTYPE_F32);
    return step;
  }

  kvm::RequestResult run_step(StepRequest step) {
    kvm::RequestResult result = run(*engine_, client_, std::move(step));
    require(result.status, "attend");
    return result;
  }

  std::vector<engine::MemoryPiece> memory(const std::vector<kvm_seq_id>& seqs) {
    std::vector<engine::MemoryPiece> pieces;
    for (kvm_seq_id seq : seqs) {
      const auto part = require(engine_->layer_memory(seq, 0), "layer memory");
      pieces.insert(pieces.end(), part.begin(), part.end());
    }
    return pieces;
  }

 private:
  Shape shape_;
  std::unique_ptr<engine::Engine> engine_;
  engine::ClientId client_ = 0;
  kvm_space_id space_ = 0;
};

}  // namespace kvm::bench

#endif  // KVM_BENCH_ENGINE_RIG_H_
