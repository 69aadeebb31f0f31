// SPDX-License-Identifier: Apache-2.0
// The arguments of the per-ISA kernels of frame.cc and eigen.cc, beside scan_args.h: plain data,
// kernel files include nothing else of ours. Channels are a multiple of 8, at most kScanMaxDim.
//
// Every element is summed up in one fixed order without fused operations, so every table gives the
// same bits. Rows of floats lie `stride` floats apart, a multiple of kFrameAlign; up to the next
// such multiple they are zero beyond dim.
#ifndef KVM_HASH_INDEX_SKETCH_FRAME_ARGS_H_
#define KVM_HASH_INDEX_SKETCH_FRAME_ARGS_H_

#include <stddef.h>
#include <stdint.h>

#include "hash_index/sketch/scan_args.h"

namespace kvm {
namespace hash_index {

enum : uint32_t { kFrameAlign = 16 };

struct FrameRows {
  const float* data;
  size_t n;
  uint32_t stride;
  uint32_t dim;
};

struct FrameKernels {
  // A stored row of dim elements as floats, zero up to the stride; scale: of an int8 or fp8 row.
  void (*load)(const void* row, uint32_t elem, float scale, uint32_t dim, uint32_t stride,
               float* out);
  // out[i] = |row i|^2.
  void (*squares)(const FrameRows* rows, double* out);
  // sum [stride] += rows, in their order.
  void (*add_rows)(const FrameRows* rows, double* sum);
  // rows [n][stride] -= x [stride].
  void (*subtract)(const float* x, size_t n, uint32_t stride, float* rows);
  // sum [dim][dim] += x x^T over the rows, lower triangle: sums of 64 rows in fp32, of those in
  // fp64.
  void (*moments)(const FrameRows* rows, double* sum);
  // out [n][kLeadDims] = L^T x of every row x, L [dim][kLeadDims].
  void (*leads)(const FrameRows* rows, const float* lead, double* out);
  // out [n_out] = sum over k of x[k] m[k * m_stride + j], in fp32.
  void (*turn)(const float* x, uint32_t dim, const float* m, uint32_t m_stride, uint32_t n_out,
               float* out);
  // c = a b, all [n][n].
  void (*multiply)(const double* a, const double* b, uint32_t n, double* c);
  // a [n][n], symmetric, is destroyed. Rows of vectors [n][n] become unit eigenvectors, in no
  // order, values [n] theirs. scratch: n * (n + 1).
  void (*eigen)(double* a, uint32_t n, double* values, double* vectors, double* scratch);
};

// One object per per-ISA file.
extern const FrameKernels kFrameScalar;
extern const FrameKernels kFrameAvx2;
extern const FrameKernels kFrameAvx512;

}  // namespace hash_index
}  // namespace kvm

#endif  // KVM_HASH_INDEX_SKETCH_FRAME_ARGS_H_
