// SPDX-License-Identifier: Apache-2.0
// Rows of K and V as floats.
#ifndef KVM_HASH_INDEX_SKETCH_ROWS_H_
#define KVM_HASH_INDEX_SKETCH_ROWS_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/kv_view.h"

namespace kvm::hash_index {

// n elements from `row` on; `scale`: of an int8 row.
inline void load_row(const void* row, Dtype dtype, float scale, uint32_t n, float* out) {
  const auto* bytes = static_cast<const std::byte*>(row);
  for (uint32_t i = 0; i < n; ++i) {
    uint16_t half = 0;
    switch (dtype) {
      case Dtype::kF32:
        std::memcpy(out + i, bytes + size_t{i} * 4, 4);
        break;
      case Dtype::kI8:
        out[i] = scale * static_cast<float>(static_cast<int8_t>(bytes[i]));
        break;
      default:
        std::memcpy(&half, bytes + size_t{i} * 2, 2);
        out[i] = dtype == Dtype::kF16 ? f16_to_f32(half) : bf16_to_f32(half);
    }
  }
}

// Where the row of (head, token) begins, and its scale.
inline const std::byte* row_at(const void* plane, Dtype dtype, uint32_t head, uint32_t token,
                               uint32_t dim) {
  return static_cast<const std::byte*>(plane) +
         (size_t{head} * kPageTokens + token) * dim * dtype_size_bytes(dtype);
}
inline float scale_at(const uint16_t* scales, uint32_t head, uint32_t token) {
  return scales == nullptr ? 1.0f : bf16_to_f32(scales[size_t{head} * kPageTokens + token]);
}

inline void load_key(const KvRun& run, uint32_t head, uint32_t token, uint32_t dim, float* out) {
  load_row(row_at(run.k, run.dtype_k, head, token, dim), run.dtype_k,
           scale_at(run.k_scale, head, token), dim, out);
}

}  // namespace kvm::hash_index

#endif  // KVM_HASH_INDEX_SKETCH_ROWS_H_
