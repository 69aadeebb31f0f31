// SPDX-License-Identifier: Apache-2.0
// A batch of sequences in device memory, to be attended to again and again.
#ifndef KVM_BENCH_GPU_WORKLOAD_H_
#define KVM_BENCH_GPU_WORKLOAD_H_

#include <cstdint>
#include <string>
#include <vector>

#include "attention/cuda/launch.h"
#include "attention/cuda/plan.h"
#include "base/codec_id.h"
#include "bench/gpu/device.h"

namespace kvm::bench::gpu {

struct WorkloadSpec {
  std::vector<uint32_t> lengths;  // per sequence
  uint32_t q_heads = 32;
  uint32_t group = 4;
  uint32_t dim = 128;  // of keys; with kMlaDim values are in them
  CodecId codec = CodecId::kBf16;
  uint32_t n_query = 1;
  bool tree = false;     // of the query tokens, two branches; else one after the other
  bool prefill = false;  // by the prefill kernel
  float softcap = 0.0f;
  uint32_t page_tokens = 64;
  bool ordered = false;  // pages lie in the order of the tokens; else at random
  // Layers whose parts a page holds, one behind the other (ADR 0031); 0: each layer lies apart, and
  // there are as many as are wanted.
  uint32_t layers_per_page = 0;

  uint32_t dim_v() const { return attention::gpu::value_dim(dim); }
  bool is_latent() const { return dim == attention::gpu::kMlaDim; }
  uint32_t n_planes() const { return is_latent() ? 1 : 2; }
  uint64_t kv_bytes() const;
  // Of the products with keys and values, for what rows see.
  double flops() const;
  std::string name() const;
};

// Enough layers, each with pages and results of its own, that no call finds its keys in the L2.
class Workload {
 public:
  // memory: random data, of which as much as wanted is read. REQUIRES: spec.kv_bytes(), with whole
  // pages, fits.
  Workload(const WorkloadSpec& spec, const DeviceBuffer& memory);

  // Cuts the work for that many blocks at once. tail_part, tail_load_tokens: as of PlanOptions.
  void plan(uint32_t blocks, uint32_t tail_part = attention::gpu::kTailPart,
            uint32_t tail_load_tokens = attention::gpu::kTailLoadTokens);
  // Those of the shipped kernel.
  uint32_t resident_blocks() const;

  attention::gpu::DecodeKernel kernel() const;
  const attention::gpu::DecodeParams& decode_params(uint32_t layer) const {
    return decode_[layer % decode_.size()];
  }
  const attention::gpu::DecodePlan& current_plan() const { return plan_; }
  void launch_merge(cudaStream_t stream) const;
  // Decode and merge of layer i.
  void launch(uint32_t i, cudaStream_t stream) const;
  // Microseconds of launch.
  double measure_us(const Args& args, double expected_us) const;

 private:
  WorkloadSpec spec_;
  attention::gpu::DecodePlan plan_;
  std::vector<attention::gpu::Request> requests_;
  std::vector<attention::gpu::PageClass> classes_;
  std::vector<uint16_t> heads_;
  DeviceBuffer device_heads_, page_table_, tree_mask_, q_, o_, lse_;
  DeviceBuffer work_, tail_, merges_, partial_o_, partial_lse_;
  std::vector<attention::gpu::DecodeParams> decode_;  // per layer
  attention::gpu::MergeParams merge_;
};

}  // namespace kvm::bench::gpu

#endif  // KVM_BENCH_GPU_WORKLOAD_H_
