// SPDX-License-Identifier: Apache-2.0
// Merges a few states of the same rows over different tokens: (o, lse) from wherever it was
// computed, in the caller's tensors, as kvm_merge does on CPUs. The formula is that of
// base/merge.h: o = sum_i e^(lse_i - lse) o_i, lse = ln sum_i e^lse_i; a state with lse = -inf
// counts nothing, whatever its o holds. What is not a number in any other shows.
//
// Not merge_kernel.h, which takes up to kMaxMergeSlots partial states of a launch as that lays them
// out, a block for each row. Here a warp has a row: its lanes have the states' lse side by side, so
// those of host memory are waited for once, and all are read before any result is written. A result
// may so take the place of a state.
#ifndef KVM_ATTENTION_CUDA_STATES_KERNEL_H_
#define KVM_ATTENTION_CUDA_STATES_KERNEL_H_

#include "attention/cuda/params.h"
#include "attention/cuda/primitives.h"

namespace kvm::attention::gpu {

inline constexpr uint32_t kStatesThreads = kStatesWarps * 32;

// 4 channels of a tensor from `element` on.
KVM_GPU Float4 load_channels(const RowTensor& tensor, int64_t element) {
  if (tensor.dtype == Dtype::kF32) {
    return load_global<Float4>(static_cast<const float*>(tensor.data) + element);
  }
  const Word2 raw = load_global<Word2>(static_cast<const uint16_t*>(tensor.data) + element);
  if (tensor.dtype == Dtype::kBf16) {
    return {unpack<Element::kBf16>(raw.x, 0), unpack<Element::kBf16>(raw.x, 1),
            unpack<Element::kBf16>(raw.y, 0), unpack<Element::kBf16>(raw.y, 1)};
  }
  return {unpack<Element::kF16>(raw.x, 0), unpack<Element::kF16>(raw.x, 1),
          unpack<Element::kF16>(raw.y, 0), unpack<Element::kF16>(raw.y, 1)};
}

KVM_GPU void store_channels(const RowTensor& tensor, int64_t element, Float4 x) {
  if (tensor.dtype == Dtype::kF32) {
    store_global(static_cast<float*>(tensor.data) + element, x);
    return;
  }
  const Word2 packed = tensor.dtype == Dtype::kBf16
                           ? Word2{pack<Element::kBf16>(x.x, x.y), pack<Element::kBf16>(x.z, x.w)}
                           : Word2{pack<Element::kF16>(x.x, x.y), pack<Element::kF16>(x.z, x.w)};
  store_global(static_cast<uint16_t*>(tensor.data) + element, packed);
}

KVM_GPU int64_t element_of(const RowTensor& tensor, int64_t row, int64_t head) {
  return row * tensor.stride_token + head * tensor.stride_head;
}

// Does the work of one lane for one row of one head. REQUIRES: the whole warp calls it.
KVM_GPU void merge_states_row(const StatesParams& p, int64_t row, int64_t head) {
  float lse = minus_infinity();
  if (lane_id() < p.n_states) {
    const RowTensor& from = p.lse[lane_id()];
    lse = load_global<float>(static_cast<const float*>(from.data) + element_of(from, row, head));
  }
  float top = lse;
#pragma unroll
  for (uint32_t mask = 16; mask > 0; mask /= 2) {
    top = fmaxf(top, shuffle_xor(top, mask));
  }
  float total = 0.0f;
  for (uint32_t first = 0; first < p.dim; first += 128) {
    const uint32_t channel = first + lane_id() * 4;
    Float4 sum{0.0f, 0.0f, 0.0f, 0.0f};
    total = 0.0f;
    for (uint32_t i = 0; i < p.n_states; ++i) {
      const float lse_i = shuffle(lse, i);
      if (lse_i == minus_infinity()) {
        continue;  // the whole warp
      }
      const float weight = exp2_fast((lse_i - top) * kLog2E);
      total += weight;
      if (channel < p.dim) {
        const Float4 part = load_channels(p.o[i], element_of(p.o[i], row, head) + channel);
        sum = {sum.x + weight * part.x, sum.y + weight * part.y, sum.z + weight * part.z,
               sum.w + weight * part.w};
      }
    }
    // A total that is not a number says that the row saw one.
    const float inverse = total != 0.0f ? 1.0f / total : 0.0f;
    if (channel < p.dim) {
      store_channels(p.out_o, element_of(p.out_o, row, head) + channel,
                     {sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse});
    }
  }
  if (p.out_lse.data != nullptr && lane_id() == 0) {
    store_global(static_cast<float*>(p.out_lse.data) + element_of(p.out_lse, row, head),
                 total != 0.0f ? top + log2_fast(total) * kLn2 : minus_infinity());
  }
}

// Does the work of one thread of one block of kStatesThreads; warps take rows in turn.
KVM_GPU void merge_states_thread(const StatesParams& p) {
  const uint64_t n = static_cast<uint64_t>(p.n_rows) * p.n_heads;
  const uint64_t step = static_cast<uint64_t>(block_count()) * kStatesWarps;
  for (uint64_t i = static_cast<uint64_t>(block_id()) * kStatesWarps + warp_id(); i < n;
       i += step) {
    merge_states_row(p, static_cast<int64_t>(i / p.n_heads), static_cast<int64_t>(i % p.n_heads));
  }
}

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_STATES_KERNEL_H_
