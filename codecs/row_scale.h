// SPDX-License-Identifier: Apache-2.0
// The scale of a row of K or V that is stored as bytes: what int8.h and float8.h have in common.
//
//   scale  the bf16 nearest to max |x| / largest, at least 2^-126, where `largest` is the largest
//          magnitude of a code; NaN where an element is not finite; 0 where all codes are 0
//
// Why bf16: it has the range of fp32, and with its 8 significant bits and the few of a code their
// product is exact in fp32. What is read back is thus what kernels compute with, and encoding it
// again gives the same bytes.
//
// Threads: any; pure.  Memory: none.  Errors: none.
#ifndef KVM_CODECS_ROW_SCALE_H_
#define KVM_CODECS_ROW_SCALE_H_

#include <algorithm>
#include <bit>
#include <cstdint>

#include "base/dtype.h"

namespace kvm::codecs {

inline constexpr float kSmallestRowScale = 0x1p-126f;

struct RowScale {
  uint16_t bits = 0;
  bool has_codes = false;  // false: all codes are 0 whatever the elements
};

// Magnitudes of floats are ordered as their bits are, with NaN on top: integers need no care.
inline uint32_t magnitude_bits(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffffu; }

// top: the largest magnitude, as bits. rounds_to_zero: likewise the largest that kSmallestRowScale
// takes to a code of 0.
inline RowScale scale_of_top(uint32_t top, float largest, uint32_t rounds_to_zero) {
  constexpr uint32_t kInfinity = 0x7f800000u;
  constexpr uint16_t kNanScale = 0x7fc0u;
  if (top <= rounds_to_zero) {
    return {};
  }
  if (top >= kInfinity) {
    return {kNanScale, false};
  }
  return {f32_to_bf16(std::max(std::bit_cast<float>(top) / largest, kSmallestRowScale)), true};
}

// Of a row.
inline RowScale row_scale(const float* src, uint32_t n, float largest, uint32_t rounds_to_zero) {
  uint32_t top = 0;
  for (uint32_t i = 0; i < n; ++i) {
    top = std::max(top, magnitude_bits(src[i]));
  }
  return scale_of_top(top, largest, rounds_to_zero);
}

}  // namespace kvm::codecs

#endif  // KVM_CODECS_ROW_SCALE_H_
