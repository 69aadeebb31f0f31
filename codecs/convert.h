// SPDX-License-Identifier: Apache-2.0
// Conversion of rows between element types: how K and V get from a client's tensor into pages and
// back out.
//
// Rounds to nearest even; NaN stays NaN; what is too large becomes infinite. The same bits on every
// processor, except the payload of a NaN.
//
// Threads: any; pure in the arguments.  Memory: none.  Errors: none.
#ifndef KVM_CODECS_CONVERT_H_
#define KVM_CODECS_CONVERT_H_

#include <cstdint>

#include "base/dtype.h"
#include "base/limits.h"

namespace kvm::codecs {

// LIMIT: elements of a row that is converted from or to a scaled dtype: it passes through fp32.
inline constexpr uint32_t kMaxScaledRow = kMaxHeadDim;

// Converts n elements. src and dst may be misaligned and must not overlap.
// REQUIRES: neither dtype is scaled: those elements mean nothing without their row.
void convert(const void* src, Dtype src_dtype, void* dst, Dtype dst_dtype, uint64_t n);

// Copies bytes that are not read again soon: past the caches, where the processor can. src and dst
// may be misaligned and must not overlap.
void copy_past_caches(const void* src, void* dst, uint64_t n_bytes);

// SourceRows are rows of some heads in memory: the row of token t and head h starts at
//   data + t * row_stride_bytes + (heads ? heads[h] : h) * head_stride_bytes
// and where dtype is scaled its scale is scales[t + (heads ? heads[h] : h) * kPageTokens].
struct SourceRows {
  const void* data = nullptr;  // any alignment
  Dtype dtype = Dtype::kF32;
  uint64_t row_stride_bytes = 0;
  uint64_t head_stride_bytes = 0;
  const uint16_t* heads = nullptr;
  const uint16_t* scales = nullptr;
};

struct TargetRows {
  void* data = nullptr;  // any alignment
  Dtype dtype = Dtype::kF32;
  uint64_t row_stride_bytes = 0;
  uint64_t head_stride_bytes = 0;
  const uint16_t* heads = nullptr;
  uint16_t* scales = nullptr;
};

// Converts rows of row_elements elements of n_rows tokens times n_heads heads.
// REQUIRES: rows of target overlap neither each other nor source; row_elements <= kMaxScaledRow
// where the dtypes differ and one is scaled. What becomes int8 or fp8: codecs/int8.h, float8.h.
//
// Goes token by token, so that a tensor [token][head][dim] is read from front to back. Where much
// is copied unchanged to aligned rows, stores go around the caches; they are ordered before
// everything that the calling thread stores afterwards.
void convert_rows(const SourceRows& source, const TargetRows& target, uint64_t n_rows,
                  uint32_t n_heads, uint32_t row_elements);

// A row of n elements in a scaled dtype: encode_row returns its scale. dst must not overlap src.
// REQUIRES: dtype_is_scaled(dtype).
uint16_t encode_row(const float* src, uint32_t n, Dtype dtype, void* dst);
void decode_row(const void* src, Dtype dtype, uint16_t scale, uint32_t n, float* dst);

}  // namespace kvm::codecs

#endif  // KVM_CODECS_CONVERT_H_
