// SPDX-License-Identifier: Apache-2.0
// Rows of K and V as floats.
#ifndef KVM_HASH_INDEX_SKETCH_ROWS_H_
#define KVM_HASH_INDEX_SKETCH_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/dtype.h"
#include "base/kv_view.h"
#include "base/simd/elem.h"
#include "codecs/rows.h"

namespace kvm::hash_index {

// n elements from `row` on, which is aligned to its elements (vec::Elem); `scale`: of a row of
// bytes.
inline void load_row(const void* row, uint8_t elem, float scale, uint32_t n, float* out) {
  switch (elem) {
    case vec::kElemF32:
      std::memcpy(out, row, size_t{n} * 4);
      break;
    case vec::kElemI8:
      for (uint32_t i = 0; i < n; ++i) {
        out[i] = scale * static_cast<float>(static_cast<const int8_t*>(row)[i]);
      }
      break;
    case vec::kElemF8:
      for (uint32_t i = 0; i < n; ++i) {
        out[i] = scale * e4m3_to_f32(static_cast<const uint8_t*>(row)[i]);
      }
      break;
    case vec::kElemF16:
      for (uint32_t i = 0; i < n; ++i) {
        out[i] = f16_to_f32(static_cast<const uint16_t*>(row)[i]);
      }
      break;
    case vec::kElemBf16:
      for (uint32_t i = 0; i < n; ++i) {
        out[i] = bf16_to_f32(static_cast<const uint16_t*>(row)[i]);
      }
      break;
  }
}

// The scale of the row of a slot, as a float; 1 where rows have none of their own.
inline float scale_at(const KvPlane& plane, uint32_t head, uint64_t slot) {
  const uint16_t* scale = codecs::row_scale_at(plane, head, slot);
  return scale == nullptr ? 1.0f : bf16_to_f32(*scale);
}

}  // namespace kvm::hash_index

#endif  // KVM_HASH_INDEX_SKETCH_ROWS_H_
