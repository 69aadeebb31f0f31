// SPDX-License-Identifier: Apache-2.0
// Rows of K and V as floats.
#ifndef KVM_HASH_INDEX_SKETCH_ROWS_H_
#define KVM_HASH_INDEX_SKETCH_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/kv_view.h"

namespace kvm::hash_index {

// n elements from `row` on, which is aligned to its elements; `scale`: of an int8 or fp8 row.
inline void load_row(const void* row, Dtype dtype, float scale, uint32_t n, float* out) {
  switch (dtype) {
    case Dtype::kF32:
      std::memcpy(out, row, size_t{n} * 4);
      break;
    case Dtype::kI8:
      for (uint32_t i = 0; i < n; ++i) {
        out[i] = scale * static_cast<float>(static_cast<const int8_t*>(row)[i]);
      }
      break;
    case Dtype::kF8:
      for (uint32_t i = 0; i < n; ++i) {
        out[i] = scale * e4m3_to_f32(static_cast<const uint8_t*>(row)[i]);
      }
      break;
    case Dtype::kF16:
      for (uint32_t i = 0; i < n; ++i) {
        out[i] = f16_to_f32(static_cast<const uint16_t*>(row)[i]);
      }
      break;
    case Dtype::kBf16:
      for (uint32_t i = 0; i < n; ++i) {
        out[i] = bf16_to_f32(static_cast<const uint16_t*>(row)[i]);
      }
      break;
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

}  // namespace kvm::hash_index

#endif  // KVM_HASH_INDEX_SKETCH_ROWS_H_
