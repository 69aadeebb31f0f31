// SPDX-License-Identifier: Apache-2.0
// Where the rows of a page, and their scales, lie.
#ifndef KVM_CODECS_ROWS_H_
#define KVM_CODECS_ROWS_H_

#include <cstddef>
#include <cstdint>

#include "base/kv_view.h"
#include "codecs/codec.h"

namespace kvm::codecs {

// The row of a slot of a head. dim: channels of a row.
inline const uint8_t* row_at(const KvPlane& plane, uint32_t dim, uint32_t head, uint64_t slot) {
  const uint64_t row = uint64_t{head} * kPageTokens + slot;
  return static_cast<const uint8_t*>(plane.rows) + row * codec_of(plane.codec).row_bytes(dim);
}

// The parameters of a head; null where the codec has none.
inline const uint16_t* params_at(const KvPlane& plane, uint32_t dim, uint32_t head) {
  const auto* params = static_cast<const uint16_t*>(plane.params);
  return params == nullptr ? nullptr : params + head * codec_of(plane.codec).n_scales(dim);
}

// The scale of a row, a bf16 as bits; null where rows have none of their own, or are away.
inline const uint16_t* row_scale_at(const KvPlane& plane, uint32_t head, uint64_t slot) {
  return plane.params == nullptr || codec_of(plane.codec).scaling != Scaling::kRow
             ? nullptr
             : static_cast<const uint16_t*>(plane.params) + uint64_t{head} * kPageTokens + slot;
}

}  // namespace kvm::codecs

#endif  // KVM_CODECS_ROWS_H_
