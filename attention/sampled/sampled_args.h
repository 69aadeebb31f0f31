// SPDX-License-Identifier: Apache-2.0
// Arguments that the drivers of approximate attention hand to the per-ISA kernels. Plain data:
// kernel files include nothing else of ours.
#ifndef KVM_ATTENTION_SAMPLED_SAMPLED_ARGS_H_
#define KVM_ATTENTION_SAMPLED_SAMPLED_ARGS_H_

#include <stddef.h>
#include <stdint.h>

namespace kvm {
namespace attention {

enum : uint32_t {
  kGatherKeys = 16,  // keys of a batch
  kGatherAhead = 2,  // batches that prefetching runs ahead
  kMaxGatherRows = 16,
};

// The query rows that gathered keys meet, and where their vectors of sums lie.
struct GatherArgs {
  const float* q;          // [rows_padded][q_stride]
  const uint16_t* q_bf16;  // the same as bf16 where that is exact, else null
  uint32_t q_stride;       // elements; a multiple of kDimPad, zero beyond dim_k
  uint32_t rows;
  uint32_t rows_padded;  // 1, or a multiple of kRowTile
  uint32_t dim_k;
  uint32_t dim_v;
  uint32_t acc_stride;  // floats of a vector of sums; a multiple of 32, >= dim_v
  float scale;
  float softcap;
  // 0: where the table has a bf16 dot product, weights are rounded to bf16 before they meet values
  // of bf16, int8 or fp8, and so are those in the sums that go with the values
  // (Problem::fp32_weights).
  uint32_t fp32_weights = 0;
};

// A GatherBatch is up to 16 keys at any addresses.
struct GatherBatch {
  // [(1 + kGatherAhead) * kGatherKeys]: rows, and then those of the next batches, which are only
  // prefetched.
  const uint8_t* const* k;
  const uint8_t* const* v;
  const float* k_scale;  // [kGatherKeys]: 1, but for int8 and fp8 rows; times elem_unit
  const float* v_scale;
  // Inclusion probabilities: of kGatherOpen below 1, of kGatherGrown infinite where the key is
  // closed now.
  float p[kGatherKeys];
  float p_before[kGatherKeys];  // kGatherGrown only: those with which the sums have the key
  // [rows_padded][16]. kGatherOpen, kGatherGrown: the sketch's logits. kGatherWeighted: factors of
  // the weights, 0 where the row does not use the key. Else null.
  const float* per_row;
  uint32_t n;      // keys behind it repeat a row and count nothing
  uint8_t elem_k;  // vec::Elem
  uint8_t elem_v;
  uint8_t kind;  // GatherKind
};

enum GatherKind : uint8_t {
  kGatherClosed,    // p = 1: weight w
  kGatherOpen,      // p < 1: weight w / p, and what the variance needs
  kGatherGrown,     // what the sums of kGatherOpen change by where p was p_before
  kGatherWeighted,  // weight w * per_row
};

// Sums over keys of a row, each in 16 lanes. w = e^(s - m) is the weight, h = e^(s_hat - m) the
// sketch's, e = s - s_hat. Those from kSumOpen on are over open keys.
enum GatherSum : uint32_t {
  kSumClosed,      // w
  kSumClosedNorm,  // w |v|^2
  kSumOpen,        // w/p
  kSumOpenNorm,    // w/p |v|^2
  kSumHat,         // h/p
  kSumResidual,    // w/p e
  kSumResidual2,   // w/p e^2
  kSumSquare,      // w^2 (1 - p)/p^2
  kSumSquareNorm,  // w^2 (1 - p)/p^2 |v|^2
  kSumSquareHat,   // w h (1 - p)/p^2
  kSumSquareHat2,  // h^2 (1 - p)/p^2
  kGatherSums
};

// Vectors of sums of a row.
enum GatherVector : uint32_t {
  kVecClosed,  // w v
  kVecOpen,    // w/p v
  kVecSquare,  // w^2 (1 - p)/p^2 v
  kGatherVectors
};

// GatherSums are relative to m, which grows.
struct GatherSums {
  float* m;     // [rows_padded]; -inf where nothing was added
  float* sums;  // [rows_padded][kGatherSums][16]
  float* acc;   // [kGatherVectors][rows_padded][acc_stride]
};

struct SampledKernels {
  // Adds a batch.
  void (*gather)(const GatherArgs* args, const GatherBatch* batch, const GatherSums* sums);
  // Dot products of the rows at batch->k with q: logits [rows_padded][16]; with a scale of 1 and no
  // soft cap, the products themselves. Only k, k_scale, n and elem_k are used.
  void (*logits)(const GatherArgs* args, const GatherBatch* batch, float* out);
  // Sum of squares of the first dim elements of each of the 16 rows, scales not applied.
  void (*norms)(const uint8_t* const* rows, uint32_t elem, uint32_t dim, float* out);

  // The first n of 16 rows as floats, scaled: out [n][stride], zero beyond dim.
  void (*widen)(const uint8_t* const* rows, const float* scale, uint32_t elem, uint32_t dim,
                uint32_t n, uint32_t stride, float* out);
  // Products of all pairs of n vectors: out [n][out_stride]. x [n][stride], n a multiple of 16 and
  // stride of 32.
  void (*products)(const float* x, uint32_t n, uint32_t stride, uint32_t out_stride, float* out);
  // Products of each of n vectors with y [stride].
  void (*dots)(const float* x, uint32_t n, uint32_t stride, const float* y, float* out);
  // terms[i][j] = root[i] root[j] (products[i][j] - along[i] - along[j]); returns the sum of their
  // squares. n and stride are multiples of 16; matrices are [n][stride].
  float (*terms)(const float* products, const float* along, const float* root, uint32_t n,
                 uint32_t stride, float* terms);
  // u = terms u for a symmetric matrix; u and room [n].
  void (*turn)(const float* terms, uint32_t n, uint32_t stride, float* u, float* room);

  // The threshold of a row over n keys; n is a multiple of 16, arrays are aligned to 64 bytes.
  float (*largest)(const float* x, size_t n);
  // out = e^min(x - top, 80) norm
  void (*sizes)(const float* x, const float* norm, float top, size_t n, float* out);
  // out = max(out, factor x)
  void (*raise)(const float* x, float factor, size_t n, float* out);
  // How many reach the limit, and the sum of the others.
  void (*saturation)(const float* x, float limit, size_t n, uint64_t* count, double* sum);
};

// One object per per-ISA file.
extern const SampledKernels kSampledScalar;
extern const SampledKernels kSampledAvx2;
extern const SampledKernels kSampledAvx512;
extern const SampledKernels kSampledAvx512Bf16;

}  // namespace attention
}  // namespace kvm

#endif  // KVM_ATTENTION_SAMPLED_SAMPLED_ARGS_H_
