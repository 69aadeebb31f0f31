// SPDX-License-Identifier: Apache-2.0
#include "codecs/int8.h"

#include <algorithm>
#include <bit>

namespace kvm::codecs {
namespace {

constexpr uint32_t kMagnitude = 0x7fffffffu;
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint16_t kNanScale = 0x7fc0u;
constexpr float kSmallestScale = 0x1p-126f;
constexpr uint32_t kRoundsToZero = 0x00400000u;  // 2^-127, half the smallest scale

// Magnitudes of floats are ordered as their bits are, with NaN on top: integers need no care.
uint32_t largest_magnitude(const float* src, uint32_t n) {
  uint32_t top = 0;
  for (uint32_t i = 0; i < n; ++i) {
    top = std::max(top, std::bit_cast<uint32_t>(src[i]) & kMagnitude);
  }
  return top;
}

}  // namespace

uint16_t encode_i8(const float* src, uint32_t n, int8_t* dst) {
  const uint32_t top = largest_magnitude(src, n);
  if (top <= kRoundsToZero || top >= kInfinity) {
    std::fill_n(dst, n, int8_t{0});
    return top <= kRoundsToZero ? uint16_t{0} : kNanScale;
  }
  const float wanted = std::max(std::bit_cast<float>(top) / 127.0f, kSmallestScale);
  const uint16_t scale = f32_to_bf16(wanted);
  const float inverse = 1.0f / bf16_to_f32(scale);
  // Adding 1.5 * 2^23 rounds to an integer, nearest even, and leaves it in the low bits.
  constexpr float kRound = 0x1.8p23f;
  for (uint32_t i = 0; i < n; ++i) {
    dst[i] = static_cast<int8_t>(std::bit_cast<uint32_t>(src[i] * inverse + kRound));
  }
  return scale;
}

void decode_i8(const int8_t* src, uint16_t scale, uint32_t n, float* dst) {
  const float step = bf16_to_f32(scale);
  for (uint32_t i = 0; i < n; ++i) {
    dst[i] = static_cast<float>(src[i]) * step;
  }
}

}  // namespace kvm::codecs
