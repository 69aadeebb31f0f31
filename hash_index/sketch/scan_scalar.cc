// SPDX-License-Identifier: Apache-2.0
// The scan: the scalar table. CMakeLists.txt gives this file its instruction-set flags.
#include "base/simd/vec_scalar.h"
//
#include "hash_index/sketch/lanes.h"
#include "hash_index/sketch/scan_args.h"

namespace kvm {
namespace hash_index {
namespace {

template <int kRows>
inline void code_sums(const ScanQuery& q, uint32_t first, const uint8_t* block,
                      uint32_t (*sums)[kScanKeys]) {
  const uint8_t* tables = reinterpret_cast<const uint8_t*>(&q) + kLookupOffset +
                          static_cast<size_t>(first) * q.n_groups * 16;
  for (int r = 0; r < kRows; ++r) {
    for (uint32_t i = 0; i < kScanKeys; ++i) {
      sums[r][i] = 0;
    }
  }
  const uint32_t n_rows = q.shape.code_rows * q.shape.planes;
  for (uint32_t row = 0; row < n_rows; ++row) {
    const uint32_t weight = q.shape.planes == 2 && row < q.shape.code_rows ? 2 : 1;
    const uint8_t* low = tables + (row % q.shape.code_rows) * (2 * kRows * 16);
    const uint8_t* high = low + kRows * 16;
    for (uint32_t i = 0; i < kScanKeys; ++i) {
      const uint8_t code = block[row * kScanKeys + i];
      const uint32_t key = i % 4 * 16 + i / 4;
      for (int r = 0; r < kRows; ++r) {
        const uint32_t sum = low[r * 16 + (code & 15)] + uint32_t{high[r * 16 + (code >> 4)]};
        sums[r][key] += weight * sum;
      }
    }
  }
}

inline U lead_sums(U bias, U a, U b, const uint32_t* lead) {
  S sum = (S)bias;
  for (int byte = 0; byte < 4; ++byte) {
    const int shift = 8 * byte;
    const auto qa = static_cast<int8_t>(lead[0] >> shift & 255);
    const auto qb = static_cast<int8_t>(lead[1] >> shift & 255);
    sum += (S)((a >> shift) & 255u) * int32_t{qa} + (S)((b >> shift) & 255u) * int32_t{qb};
  }
  return (U)sum;
}

constexpr bool kAnyPower = false;

inline F inverse_of(F a) { return vec::div(vec::set1(1.0f), a); }
inline F root_of(F a) {
  return F{__builtin_sqrtf(a[0]), __builtin_sqrtf(a[1]), __builtin_sqrtf(a[2]),
           __builtin_sqrtf(a[3])};
}
inline uint32_t mask_lt(F a, F b) {
  const auto less = a < b;
  uint32_t mask = 0;
  for (int i = 0; i < vec::kWidth; ++i) {
    mask |= static_cast<uint32_t>(less[i] & 1) << i;
  }
  return mask;
}

}  // namespace
}  // namespace hash_index
}  // namespace kvm

#include "hash_index/sketch/encode_kernel.h"
#include "hash_index/sketch/scan_kernel.h"

namespace kvm {
namespace hash_index {

extern const ScanKernels kScanScalar = {0, scan_logits_kernel, scan_draw_kernel, encode_kernel,
                                        norms_kernel};

}  // namespace hash_index
}  // namespace kvm
