// SPDX-License-Identifier: Apache-2.0
// Merges partial states into results: o = sum_i e^(lse_i - lse) o_i, lse = ln sum_i e^lse_i. The
// formula is that of base/merge.h for many states at once; empty ones (lse = -inf) count nothing.
// A head's sink is one more of them, with o = 0.
//
// It may begin while the kernel before it runs (DecodeParams::merge_follows), and waits for its
// end.
//
// One block of kMergeThreads per row. All lse are loaded first, side by side; then threads read the
// states, 4 channels each, groups of threads taking every kGroups-th state. The order of additions
// depends on the number of states and on the dimension only.
#ifndef KVM_ATTENTION_CUDA_MERGE_KERNEL_H_
#define KVM_ATTENTION_CUDA_MERGE_KERNEL_H_

#include "attention/cuda/pages.h"
#include "attention/cuda/params.h"
#include "attention/cuda/primitives.h"

namespace kvm::attention::gpu {

inline constexpr uint32_t kMergeThreads = 128;

// Weights [kMaxMergeSlots], then one float per warp, then partial sums of every thread.
inline constexpr uint32_t kMergeWarps = kMergeThreads / 32;
inline constexpr uint32_t kMergeTops = kMaxMergeSlots * 4;
inline constexpr uint32_t kMergeTotals = kMergeTops + kMergeWarps * 4;
inline constexpr uint32_t kMergeSums = kMergeTotals + kMergeWarps * 4;
inline constexpr uint32_t kMergeSharedBytes = kMergeSums + kMergeThreads * 16;
static_assert(kMergeSums % 16 == 0);

// Reduces over the block what `value` is in each thread. REQUIRES: all threads call it.
template <bool kMax>
KVM_GPU float reduce_block(float value, SharedAddress scratch) {
#pragma unroll
  for (uint32_t mask = 16; mask > 0; mask /= 2) {
    const float other = shuffle_xor(value, mask);
    value = kMax ? fmaxf(value, other) : value + other;
  }
  if (lane_id() == 0) {
    // Not warp_id(): that is a shuffle, and the other lanes do not come here.
    store_shared(scratch + thread_id() / 32 * 4, value);
  }
  sync_block();
  float all = load_shared<float>(scratch);
#pragma unroll
  for (uint32_t warp = 1; warp < kMergeWarps; ++warp) {
    const float other = load_shared<float>(scratch + warp * 4);
    all = kMax ? fmaxf(all, other) : all + other;
  }
  return all;
}

// Does the work of one thread for one row of one merge.
template <uint32_t kDim>
KVM_GPU void merge_row(const MergeParams& p, const Merge& merge, uint32_t row) {
  constexpr uint32_t kColumns = kDim / 4;
  constexpr uint32_t kGroups = kMergeThreads / kColumns;
  const SharedAddress shared = shared_start();

  const RowPlace at =
      row_place(merge.q_token, merge.kv_head, p.tensors.group, merge.row_first + row);
  const float sink = sink_of(p.tensors, at);
  float lse[kMaxMergeSlots / kMergeThreads];
  float top = sink;
#pragma unroll
  for (uint32_t i = 0; i < kMaxMergeSlots / kMergeThreads; ++i) {
    const uint32_t slot = i * kMergeThreads + thread_id();
    lse[i] = minus_infinity();
    if (slot < merge.n_slots) {
      lse[i] = load_global<float>(
          p.partial_lse + static_cast<uint64_t>(merge.slot_first + slot) * p.block_rows + row);
    }
    top = fmaxf(top, lse[i]);
  }
  top = reduce_block<true>(top, shared + kMergeTops);
  const float base = top == minus_infinity() ? 0.0f : top;
  float total = 0.0f;
#pragma unroll
  for (uint32_t i = 0; i < kMaxMergeSlots / kMergeThreads; ++i) {
    const uint32_t slot = i * kMergeThreads + thread_id();
    const float weight = exp2_fast((lse[i] - base) * kLog2E);
    if (slot < merge.n_slots) {
      store_shared(shared + slot * 4, weight);
    }
    total += weight;
  }
  // Its barrier also hands on the weights.
  total = reduce_block<false>(total, shared + kMergeTotals);
  total += exp2_fast((sink - base) * kLog2E);

  const uint32_t channel = thread_id() % kColumns * 4;
  Float4 sum{0.0f, 0.0f, 0.0f, 0.0f};
  uint32_t first = thread_id() / kColumns;
  if constexpr (kMergeThreads % kColumns != 0) {
    first = first < kGroups ? first : merge.n_slots;  // of no group
  }
#pragma unroll 4
  for (uint32_t slot = first; slot < merge.n_slots; slot += kGroups) {
    const uint64_t slot_row = static_cast<uint64_t>(merge.slot_first + slot) * p.block_rows + row;
    const Float4 part = load_global<Float4>(p.partial_o + slot_row * kDim + channel);
    const float weight = load_shared<float>(shared + slot * 4);
    sum = {sum.x + weight * part.x, sum.y + weight * part.y, sum.z + weight * part.z,
           sum.w + weight * part.w};
  }
  store_shared(shared + kMergeSums + thread_id() * 16, sum);
  sync_block();
  if (thread_id() < kColumns) {
    for (uint32_t group = 1; group < kGroups; ++group) {
      const Float4 part =
          load_shared<Float4>(shared + kMergeSums + (group * kColumns + thread_id()) * 16);
      sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
    }
    // A total that is not a number says that the row saw one.
    const float inverse = total != 0.0f ? 1.0f / total : 0.0f;
    store_result(p.tensors, at, channel,
                 {sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse});
    if (thread_id() == 0) {
      store_lse(p.tensors, at, total != 0.0f ? top + log2_fast(total) * kLn2 : minus_infinity());
    }
  }
}

// Does the work of one thread of one block.
template <uint32_t kDim>
KVM_GPU void merge_thread(const MergeParams& p) {
  wait_for_kernel_before();
  const uint32_t n_rows =
      p.n_merges != nullptr ? load_global<uint32_t>(p.n_merges) * p.rows : block_count();
  // No barrier between rows: what a row writes first nobody reads behind the last barrier of the
  // row before, and the rest is written behind a barrier of its own.
  for (uint32_t i = block_id(); i < n_rows; i += block_count()) {
    const Merge merge = p.merges[i / p.rows];
    const uint32_t row = i % p.rows;
    const uint32_t rows_left = merge.n_query * p.tensors.group - merge.row_first;
    if (row >= rows_left || row >= p.block_rows) {
      continue;  // the whole block
    }
    merge_row<kDim>(p, merge, row);
  }
}

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_MERGE_KERNEL_H_
