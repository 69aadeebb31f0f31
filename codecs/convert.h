// SPDX-License-Identifier: Apache-2.0
// Conversion of rows between encodings: how K and V get from a client's tensor into pages, from
// pages into others, and back out.
//
// Rounds to nearest even; NaN stays NaN; what is too large becomes infinite. The same bits on every
// processor, except the payload of a NaN.
//
// Threads: any; pure in the arguments.  Memory: none.  Errors: none.
#ifndef KVM_CODECS_CONVERT_H_
#define KVM_CODECS_CONVERT_H_

#include <cstdint>

#include "base/dtype.h"
#include "base/kv_view.h"
#include "base/limits.h"
#include "codecs/codec.h"

namespace kvm::codecs {

// LIMIT: channels of a row that is encoded or decoded: it passes through fp32.
inline constexpr uint32_t kMaxScaledRow = kMaxHeadDim;

// Converts n elements. src and dst may be misaligned and must not overlap.
void convert(const void* src, Dtype src_dtype, void* dst, Dtype dst_dtype, uint64_t n);

// Copies bytes that are not read again soon: past the caches, where the processor can. src and dst
// may be misaligned and must not overlap.
void copy_past_caches(const void* src, void* dst, uint64_t n_bytes);

// SourceRows are rows of some heads in memory. With place = heads ? heads[h] : h, the row of token
// t and head h starts at
//   data + (slot + t) * row_stride_bytes + place * head_stride_bytes
// and its parameters are those of slot + t in head `place` of params (codecs/codec.h), where heads
// lie head_scales scales apart.
struct SourceRows {
  const void* data = nullptr;  // any alignment
  CodecId codec = CodecId::kF32;
  uint64_t row_stride_bytes = 0;
  uint64_t head_stride_bytes = 0;
  const uint16_t* heads = nullptr;
  const void* params = nullptr;
  uint32_t head_scales = 0;
  uint32_t slot = 0;
  uint32_t row_dim = 0;  // channels from row to row; only where the codec is scaled by page
};

struct TargetRows {
  void* data = nullptr;  // any alignment
  CodecId codec = CodecId::kF32;
  uint64_t row_stride_bytes = 0;
  uint64_t head_stride_bytes = 0;
  const uint16_t* heads = nullptr;
  void* params = nullptr;
  uint32_t head_scales = 0;
  uint32_t slot = 0;
};

// Rows of a page, from a slot on. dim: channels from row to row; convert_rows may be asked for
// fewer, the first ones.
SourceRows rows_of(const KvPlane& plane, uint32_t dim, uint32_t slot);
// The same to write to. REQUIRES: the caller may write to the page.
TargetRows writable_rows(const KvPlane& plane, uint32_t dim, uint32_t slot);

// Converts rows of dim channels of n_rows tokens times n_heads heads. What becomes int8 or fp8:
// codecs/int8.h, float8.h.
// Where the codec of both is scaled by page, the heads of target take over the parameters of
// source, and whatever else they hold means nothing any more; of codecs/gear.h and pair.h from
// slots to the same slots.
// REQUIRES: rows of target overlap neither each other nor source; dim <= kMaxScaledRow where the
// codecs differ and one is scaled; rows of target stand alone where the codecs differ.
//
// Goes token by token, so that a tensor [token][head][dim] is read from front to back. Where much
// is copied unchanged to aligned rows, stores go around the caches; they are ordered before
// everything that the calling thread stores afterwards.
void convert_rows(const SourceRows& source, const TargetRows& target, uint64_t n_rows,
                  uint32_t n_heads, uint32_t dim);

// Decodes the first dim channels of rows of head 0 of a page. row_dim: channels from row to row.
// out: [n_rows][dim]
void decode_rows(const KvPlane& plane, uint32_t row_dim, uint32_t slot, uint32_t n_rows,
                 uint32_t dim, float* out);

// Encodes a head of a whole page anew. dim: channels of a row. largest_q: [dim], as encode_low_bits
// has it, or null. scratch: [kPageTokens][dim].
// False: an element is none that the codec of `to` can hold; the head of `to` holds nothing then.
// REQUIRES: both are pages with this head, and the caller may write to `to`.
[[nodiscard]] bool encode_page_head(const KvPlane& from, const KvPlane& to, uint16_t head,
                                    uint32_t dim, const float* largest_q, float* scratch);
// The same of rows [kPageTokens][dim], to head 0 of `to`.
[[nodiscard]] bool encode_rows(const float* rows, const KvPlane& to, uint32_t dim,
                               const float* largest_q);

// A row of n channels in a scaled codec whose rows stand alone: encode_row returns its scale. dst
// must not overlap src.
uint16_t encode_row(const float* src, uint32_t n, CodecId codec, void* dst);
// Of any scaled codec, the first n channels of n_rows rows from `slot` on. src: of the first;
// params: those of the rows' head; row_dim: channels from row to row. dst: [n_rows][n]
void decode_scaled(const void* src, CodecId codec, const void* params, uint32_t row_dim,
                   uint32_t slot, uint32_t n_rows, uint32_t n, float* dst);
// One row of n channels.
inline void decode_row(const void* src, CodecId codec, const void* params, uint32_t slot,
                       uint32_t n, float* dst) {
  decode_scaled(src, codec, params, n, slot, 1, n, dst);
}

}  // namespace kvm::codecs

#endif  // KVM_CODECS_CONVERT_H_
