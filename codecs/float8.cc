// SPDX-License-Identifier: Apache-2.0
#include "codecs/float8.h"

#include <algorithm>
#include <bit>

#include "base/dtype.h"
#include "codecs/row_scale.h"

namespace kvm::codecs {
namespace {

constexpr float kLargestCode = 448.0f;
// 2^-136: half the least code times the smallest scale, a tie that goes to 0.
constexpr uint32_t kRoundsToZero = 0x00002000u;

// The nearest code; |x| <= 464. Selections instead of branches: loops of it become vector code.
uint8_t nearest_code(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // 20 bits of the mantissa go, and 120 of the exponent.
  const uint32_t normal = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
  // Below 2^-6, adding 2^14 rounds to a multiple of 2^-9 and leaves it in the low bits.
  const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
  const uint32_t subnormal = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0x1p14f);
  const uint32_t code = magnitude < std::bit_cast<uint32_t>(0x1p-6f) ? subnormal : normal;
  return static_cast<uint8_t>(code | (code == 0 ? 0u : bits >> 24 & 0x80u));
}

}  // namespace

uint16_t encode_f8(const float* src, uint32_t n, uint8_t* dst) {
  const RowScale scale = row_scale(src, n, kLargestCode, kRoundsToZero);
  if (!scale.has_codes) {
    std::fill_n(dst, n, uint8_t{0});
    return scale.bits;
  }
  const float step = bf16_to_f32(scale.bits);
  for (uint32_t i = 0; i < n; ++i) {
    dst[i] = nearest_code(src[i] / step);
  }
  return scale.bits;
}

void decode_f8(const uint8_t* src, uint16_t scale, uint32_t n, float* dst) {
  const float step = bf16_to_f32(scale);
  for (uint32_t i = 0; i < n; ++i) {
    dst[i] = e4m3_to_f32(src[i]) * step;
  }
}

}  // namespace kvm::codecs
