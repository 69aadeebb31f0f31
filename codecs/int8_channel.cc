// SPDX-License-Identifier: Apache-2.0
#include "codecs/int8_channel.h"

#include <algorithm>
#include <array>
#include <bit>

#include "base/dtype.h"
#include "base/limits.h"
#include "codecs/row_scale.h"

namespace kvm::codecs {
namespace {

constexpr float kLargestCode = 127.0f;
constexpr uint32_t kRoundsToZero = 0x00400000u;  // 2^-127, half the smallest scale
constexpr uint32_t kLargest = 0x7f000000u;       // 2^127

}  // namespace

bool encode_i8_channel(const float* rows, uint32_t dim, int8_t* codes, uint16_t* scales) {
  std::array<uint32_t, kMaxHeadDim> tops{};
  for (uint32_t t = 0; t < kPageTokens; ++t) {
    const float* row = rows + uint64_t{t} * dim;
    for (uint32_t i = 0; i < dim; ++i) {
      tops[i] = std::max(tops[i], magnitude_bits(row[i]));
    }
  }
  if (*std::max_element(tops.begin(), tops.begin() + dim) > kLargest) {
    return false;
  }
  std::array<float, kMaxHeadDim> steps;
  for (uint32_t i = 0; i < dim; ++i) {
    const RowScale scale = scale_of_top(tops[i], kLargestCode, kRoundsToZero);
    scales[i] = scale.bits;
    steps[i] = scale.has_codes ? bf16_to_f32(scale.bits) : 1.0f;  // all that is there becomes 0
  }
  for (uint32_t t = 0; t < kPageTokens; ++t) {
    const float* row = rows + uint64_t{t} * dim;
    int8_t* out = codes + uint64_t{t} * dim;
    for (uint32_t i = 0; i < dim; ++i) {
      // As in int8.cc: a quotient, so that ties are ties.
      constexpr float kRound = 0x1.8p23f;
      out[i] = static_cast<int8_t>(std::bit_cast<uint32_t>(row[i] / steps[i] + kRound));
    }
  }
  return true;
}

void decode_i8_channel(const int8_t* codes, const uint16_t* scales, uint32_t dim, float* row) {
  for (uint32_t i = 0; i < dim; ++i) {
    row[i] = static_cast<float>(codes[i]) * bf16_to_f32(scales[i]);
  }
}

}  // namespace kvm::codecs
