// SPDX-License-Identifier: Apache-2.0
// The configurations of the emulator suite, on the device.
#include <span>
#include <string>
#include <vector>

#include "attention/cuda/launch.h"
#include "bench/gpu/device.h"
#include "tests/gpu/cases.h"

namespace kvm::bench::gpu {
namespace {

using attention::gpu::AppendParams;
using attention::gpu::AppendToken;
using attention::gpu::DecodeKernel;
using attention::gpu::DecodeParams;
using attention::gpu::DecodePlan;
using attention::gpu::MergeParams;
using attention::gpu::testing::Case;
using attention::gpu::testing::CaseSpec;

// What a case points to, on the device.
struct Uploaded {
  std::vector<DeviceBuffer> buffers;

  template <class T>
  T* add(const T* data, size_t n) {
    buffers.push_back(upload(std::span<const T>(data, n)));
    return reinterpret_cast<T*>(buffers.back().data());
  }
  template <class T>
  T* add(const std::vector<T>& of) {
    return add(of.data(), of.size());
  }
};

template <class T>
void download(T* to, const T* from, size_t n) {
  if (n != 0) {
    check(cudaMemcpy(to, from, n * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy to the host");
  }
}

bool verify_case(const CaseSpec& spec, uint64_t seed) {
  Case one(spec, seed);
  const DecodePlan plan = one.plan();
  DecodeParams decode = one.decode_params(plan);
  MergeParams merge = one.merge_params(plan);
  one.clear_results();

  Uploaded on;
  for (size_t i = 0; i < one.segments.size(); ++i) {
    decode.pool.segments[i] = on.add(one.segments[i].data(), one.segments[i].size());
  }
  decode.pool.heads = on.add(one.heads);
  decode.page_table = on.add(one.page_table);
  decode.log_weights = on.add(one.log_weights);
  decode.tree_mask = on.add(one.tree_mask);
  decode.work = on.add(plan.work);
  decode.partial_o = on.add(one.partial_o);
  decode.partial_lse = on.add(one.partial_lse);
  decode.tensors.q = on.add(one.q.data(), one.q.size());
  uint8_t* o = on.add(one.o.data(), one.o.size());
  float* lse = on.add(one.lse);
  decode.tensors.o = o;
  decode.tensors.lse = spec.reads_lse ? lse : nullptr;
  merge.tensors = decode.tensors;
  merge.merges = on.add(plan.merges);
  merge.partial_o = decode.partial_o;
  merge.partial_lse = decode.partial_lse;

  check(launch_decode(DecodeKernel{spec.dtype, spec.dim, one.block_rows()}, decode, plan.n_blocks,
                      nullptr),
        "decode kernel");
  check(launch_merge(spec.dim, merge, static_cast<uint32_t>(plan.merges.size()), nullptr),
        "merge kernel");
  check(cudaDeviceSynchronize(), spec.name.c_str());
  download(one.o.data(), o, one.o.size());
  download(one.lse.data(), lse, one.lse.size());
  const Case::Errors errors = one.errors();
  print_bar({"verify o", spec.name, "relative", errors.o, 0, errors.bound_o, false});
  print_bar({"verify lse", spec.name, "absolute", errors.lse, 0, errors.bound_lse, false});
  return errors.ok();
}

// Appends fp32 rows and compares bits with the conversions of the host.
bool verify_append(Dtype to) {
  constexpr uint32_t kTokens = 40, kHeads = 2, kDim = 128, kPageTokens = 16;
  std::vector<float> source(kTokens * kHeads * kDim);
  for (size_t i = 0; i < source.size(); ++i) {
    source[i] = static_cast<float>(static_cast<int>(i * 2654435761u >> 8) % 100003) * 1e-3f;
  }
  const std::vector<uint16_t> heads = {1, 0};
  AppendParams params;
  auto& of = params.pool.classes[0];
  of.n_heads = kHeads;
  of.head_stride_bytes = kPageTokens * kDim * 2;
  of.v_offset_bytes = kHeads * of.head_stride_bytes;
  of.page_bytes = 2 * of.v_offset_bytes;
  std::vector<uint16_t> pages(3 * of.page_bytes / 2, 0xffff);
  std::vector<AppendToken> tokens;
  for (uint32_t t = 0; t < kTokens; ++t) {
    tokens.push_back({t / kPageTokens, t % kPageTokens, t, 0});
  }
  const std::vector<uint32_t> page_table = {0, 1, 2};
  Uploaded on;
  params.pool.heads = on.add(heads);
  params.page_table = on.add(page_table);
  uint16_t* device_pages = on.add(pages);
  params.pool.segments[0] = reinterpret_cast<uint8_t*>(device_pages);
  params.k = params.v = on.add(source);
  params.stride_token = kHeads * kDim;
  params.stride_head = kDim;
  params.tokens = on.add(tokens);
  params.dtype = Dtype::kF32;
  params.dim = kDim;
  check(launch_append(to, params, kTokens, nullptr), "append kernel");
  check(cudaDeviceSynchronize(), "append kernel");
  download(pages.data(), device_pages, pages.size());
  uint64_t wrong = 0;
  for (uint32_t t = 0; t < kTokens; ++t) {
    for (uint32_t i = 0; i < 2 * kHeads * kDim; ++i) {  // K, then V
      const uint32_t head = i / kDim % kHeads;
      const float value = source[(t * kHeads + heads[head]) * kDim + i % kDim];
      const size_t at = (t / kPageTokens) * of.page_bytes / 2 +
                        (i / kDim / kHeads) * of.v_offset_bytes / 2 +
                        head * of.head_stride_bytes / 2 + (t % kPageTokens) * kDim + i % kDim;
      wrong += pages[at] != (to == Dtype::kBf16 ? f32_to_bf16(value) : f32_to_f16(value));
    }
  }
  return print_bar(
      {"verify append", dtype_name(to), "wrong elements", static_cast<double>(wrong), 0, 0, false});
}

}  // namespace

int run_verify(const Args& args) {
  check(attention::gpu::attend_init(), "attend_init");
  bool right = true;
  const uint64_t n_seeds = args.quick || args.small ? 1 : 5;
  for (uint64_t seed = 1; seed <= n_seeds; ++seed) {
    for (const CaseSpec& spec : attention::gpu::testing::all_cases()) {
      right = verify_case(spec, seed) && right;
    }
  }
  right = verify_append(Dtype::kBf16) && right;
  right = verify_append(Dtype::kF16) && right;
  print_fact("verify", "all", right ? "right" : "WRONG");
  return right ? 0 : 1;
}

}  // namespace kvm::bench::gpu
