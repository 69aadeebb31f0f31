// SPDX-License-Identifier: Apache-2.0
// The layout of a block, the same for every instruction table.
//
// WIRE: a block of 64 keys, D = dim_k rounded up to a power of two (at least 8), all little-endian:
//
//   code     [planes][D / 8][64]  bit j of byte 4 l + v of row i belongs to coordinate 8 i + j of
//                                 key 16 v + l. Plane 0: set where the coordinate is positive.
//                                 Plane 1 (two bits): set where the codeword's coordinate is 1.5
//                                 and positive or .5 and negative: y = +-1 from plane 0, +-.5 from
//                                 plane 1.
//   lead     [2][64]              of 32 bits: the codes of four leading coordinates, first one
//                                 lowest, plus 128; kLead8Bits1 only
//   factors  [64]                 of 32 bits: f as bf16 in the upper half, |v| as bf16 in the
//                                 lower, raised to half of the block's typical one (sketch.h)
//
// The permutation of keys within a code row makes widening free: where a kernel adds bytes up in
// words and then splits the words, each 16 keys come out in order.
#ifndef KVM_HASH_INDEX_SKETCH_LAYOUT_H_
#define KVM_HASH_INDEX_SKETCH_LAYOUT_H_

#include <bit>
#include <cstdint>

#include "hash_index/sketch/scan_args.h"
#include "hash_index/sketch/sketch.h"

namespace kvm::hash_index {

static_assert(kScanKeys == kBlockKeys && kScanRows == kMaxRows && kScanMaxDim == kMaxSketchDim);

constexpr uint32_t padded_dim(uint32_t dim_k) { return dim_k <= 8 ? 8 : std::bit_ceil(dim_k); }

constexpr BlockShape block_shape(SketchKind kind, uint32_t dim_k) {
  BlockShape shape{};
  shape.code_rows = padded_dim(dim_k) / 8;
  shape.planes = kind == SketchKind::kBits2 ? 2 : 1;
  const uint32_t code_bytes = shape.planes * shape.code_rows * kBlockKeys;
  const bool lead = kind == SketchKind::kLead8Bits1;
  shape.lead_offset = lead ? code_bytes : 0;
  shape.factor_offset = code_bytes + (lead ? kLeadDims * kBlockKeys : 0);
  shape.bytes = shape.factor_offset + 4 * kBlockKeys;
  return shape;
}

}  // namespace kvm::hash_index

#endif  // KVM_HASH_INDEX_SKETCH_LAYOUT_H_
