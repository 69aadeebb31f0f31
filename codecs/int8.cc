// SPDX-License-Identifier: Apache-2.0
#include "codecs/int8.h"

#include <algorithm>
#include <bit>

#include "base/dtype.h"
#include "codecs/row_scale.h"

namespace kvm::codecs {
namespace {

constexpr float kLargestCode = 127.0f;
constexpr uint32_t kRoundsToZero = 0x00400000u;  // 2^-127, half the smallest scale

}  // namespace

uint16_t encode_i8(const float* src, uint32_t n, int8_t* dst) {
  const RowScale scale = row_scale(src, n, kLargestCode, kRoundsToZero);
  if (!scale.has_codes) {
    std::fill_n(dst, n, int8_t{0});
    return scale.bits;
  }
  // A quotient is a tie where x lies midway between two steps, and nowhere else: next to it, x is
  // farther from there than rounding reaches. A product with the inverse is not so exact.
  const float step = bf16_to_f32(scale.bits);
  // Adding 1.5 * 2^23 rounds to an integer, nearest even, and leaves it in the low bits.
  constexpr float kRound = 0x1.8p23f;
  for (uint32_t i = 0; i < n; ++i) {
    dst[i] = static_cast<int8_t>(std::bit_cast<uint32_t>(src[i] / step + kRound));
  }
  return scale.bits;
}

void decode_i8(const int8_t* src, uint16_t scale, uint32_t n, float* dst) {
  const float step = bf16_to_f32(scale);
  for (uint32_t i = 0; i < n; ++i) {
    dst[i] = static_cast<float>(src[i]) * step;
  }
}

}  // namespace kvm::codecs
