// SPDX-License-Identifier: Apache-2.0
#include "codecs/low_bits.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "base/assert.h"
#include "base/cpu_features.h"
#include "base/dtype.h"
#include "base/limits.h"
#include "codecs/row_scale.h"
#if defined(__x86_64__)
#include "codecs/low_bits_avx2.h"
#endif

namespace kvm::codecs {
namespace {

constexpr uint32_t kLargest = 0x7e800000u;  // 2^126
constexpr float kRound = 0x1.8p23f;         // added, the integer next to a number below 2^22

// The largest bf16 that is not above x. REQUIRES: x is finite, and not near the largest number.
uint16_t bf16_below(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const bool is_cut = (bits & 0xffffu) != 0;
  return static_cast<uint16_t>((bits >> 16) + (is_cut && (bits >> 31) != 0 ? 1 : 0));
}
// The smallest that is not below x. REQUIRES: likewise, and x >= 0.
uint16_t bf16_above(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits >> 16) + ((bits & 0xffffu) != 0 ? 1 : 0));
}

// Scale and zero of some elements.
struct Steps {
  uint16_t scale = 0;
  uint16_t zero = 0;
};

Steps steps_of(float smallest, float largest, uint32_t last_code) {
  Steps steps;
  steps.zero = bf16_below(smallest);
  const float span = largest - bf16_to_f32(steps.zero);
  if (span > 0) {
    steps.scale = bf16_above(std::max(span / static_cast<float>(last_code), kSmallestRowScale));
  }
  return steps;
}

uint32_t code_of(float x, float zero, float scale, uint32_t last_code) {
  // A quotient, so that ties are ties.
  const float steps = scale == 0 ? 0.0f : (x - zero) / scale;
  return std::min(std::bit_cast<uint32_t>(steps + kRound) & 0xffu, last_code);
}

// Codes go into zeroed bytes. The last one ends with its byte: nothing behind a row is touched.
void put_code(uint8_t* row, uint32_t bits, uint32_t i, uint32_t code) {
  const uint32_t shift = i * bits % 8;
  uint8_t* at = row + i * bits / 8;
  at[0] = static_cast<uint8_t>(at[0] | code << shift);
  if (shift + bits > 8) {
    at[1] = static_cast<uint8_t>(at[1] | code >> (8 - shift));
  }
}

struct Params {
  Params(const Codec& codec, uint32_t dim)
      : n_groups(codec.n_groups(dim)), channels(kPageTokens * codec.group_params * n_groups) {}
  uint32_t group(uint32_t slot, uint32_t g) const { return (slot * n_groups + g) * 2; }

  uint32_t n_groups;
  uint32_t channels;  // where those of channels begin
};

bool are_in_range(const float* rows, uint32_t n) {
  return std::all_of(rows, rows + n, [](float x) { return magnitude_bits(x) <= kLargest; });
}

void encode_by_channel(const Codec& codec, const float* rows, uint32_t dim, uint8_t* codes,
                       uint16_t* params) {
  const uint32_t last = codec.last_code();
  std::array<float, kMaxHeadDim> smallest;
  std::array<float, kMaxHeadDim> largest;
  std::copy_n(rows, dim, smallest.begin());
  std::copy_n(rows, dim, largest.begin());
  for (uint32_t t = 1; t < kPageTokens; ++t) {
    for (uint32_t i = 0; i < dim; ++i) {
      smallest[i] = std::min(smallest[i], rows[t * dim + i]);
      largest[i] = std::max(largest[i], rows[t * dim + i]);
    }
  }
  for (uint32_t i = 0; i < dim; ++i) {
    const Steps steps = steps_of(smallest[i], largest[i], last);
    params[i] = steps.scale;
    params[dim + i] = steps.zero;
    smallest[i] = bf16_to_f32(steps.zero);
    largest[i] = bf16_to_f32(steps.scale);
  }
  for (uint32_t t = 0; t < kPageTokens; ++t) {
    for (uint32_t i = 0; i < dim; ++i) {
      put_code(codes + t * codec.row_bytes(dim), codec.bits(), i,
               code_of(rows[t * dim + i], smallest[i], largest[i], last));
    }
  }
}

// The factors of a balanced page.
void find_factors(const float* rows, uint32_t dim, const float* largest_q, uint16_t* factors) {
  constexpr float kSmallestWeight = 0x1p-10f;
  const float most = largest_q == nullptr ? 0.0f : *std::max_element(largest_q, largest_q + dim);
  for (uint32_t i = 0; i < dim; ++i) {
    float largest = 0;
    for (uint32_t t = 0; t < kPageTokens; ++t) {
      largest = std::max(largest, std::fabs(rows[t * dim + i]));
    }
    const float weight = most > 0 ? std::max(largest_q[i] / most, kSmallestWeight) : 1.0f;
    // No larger than what 2^126 has without queries: what is read is finite.
    const float factor = std::min(std::sqrt(largest) / std::sqrt(weight), 0x1p63f);
    factors[i] = f32_to_bf16(largest > 0 ? factor : 1.0f);
  }
}

void encode_by_token(const Codec& codec, const float* rows, uint32_t dim, const float* largest_q,
                     uint8_t* codes, uint16_t* params) {
  const Params at(codec, dim);
  std::array<float, kMaxHeadDim> means{};
  std::array<float, kMaxHeadDim> factors;
  factors.fill(1);
  if (codec.is_balanced) {
    find_factors(rows, dim, largest_q, params + at.channels);
    std::transform(params + at.channels, params + at.channels + dim, factors.begin(), bf16_to_f32);
  } else if (codec.channel_params != 0) {
    for (uint32_t i = 0; i < dim; ++i) {
      double sum = 0;
      for (uint32_t t = 0; t < kPageTokens; ++t) {
        sum += double{rows[t * dim + i]};
      }
      params[at.channels + i] = f32_to_bf16(static_cast<float>(sum / kPageTokens));
      means[i] = bf16_to_f32(params[at.channels + i]);
    }
  }
  for (uint32_t t = 0; t < kPageTokens; ++t) {
    for (uint32_t g = 0; g < at.n_groups; ++g) {
      const uint32_t begin = g * Codec::kGroupChannels;
      const uint32_t n = std::min(dim - begin, Codec::kGroupChannels);
      std::array<float, Codec::kGroupChannels> rest;
      for (uint32_t i = 0; i < n; ++i) {
        rest[i] = (rows[t * dim + begin + i] - means[begin + i]) / factors[begin + i];
      }
      const auto [smallest, largest] = std::minmax_element(rest.begin(), rest.begin() + n);
      const Steps steps = steps_of(*smallest, *largest, codec.last_code());
      params[at.group(t, g)] = steps.scale;
      params[at.group(t, g) + 1] = steps.zero;
      for (uint32_t i = 0; i < n; ++i) {
        put_code(
            codes + t * codec.row_bytes(dim), codec.bits(), begin + i,
            code_of(rest[i], bf16_to_f32(steps.zero), bf16_to_f32(steps.scale), codec.last_code()));
      }
    }
  }
}

// The code of channel i of a row.
float code_at(const uint8_t* codes, uint32_t bits, uint32_t i) {
  const uint32_t shift = i * bits % 8;
  const uint8_t* at = codes + i * bits / 8;
  const uint32_t both = at[0] | (shift + bits > 8 ? uint32_t{at[1]} << 8 : 0);
  return static_cast<float>(both >> shift & ((1u << bits) - 1));
}

// As decode_by_channel_avx2.
void decode_by_channel(uint32_t bits, const uint8_t* codes, uint64_t row_bytes,
                       const uint16_t* scales, const uint16_t* zeros, uint32_t n_tokens, uint32_t n,
                       float* out) {
  for (uint32_t t = 0; t < n_tokens; ++t) {
    for (uint32_t i = 0; i < n; ++i) {
      *out++ = code_at(codes, bits, i) * bf16_to_f32(scales[i]) + bf16_to_f32(zeros[i]);
    }
    codes += row_bytes;
  }
}

// As decode_by_token_avx2.
void decode_by_token(uint32_t bits, const uint8_t* codes, uint64_t row_bytes, const uint16_t* steps,
                     uint32_t n_groups, const uint16_t* means, const uint16_t* factors,
                     uint32_t n_tokens, uint32_t n, float* out) {
  for (uint32_t t = 0; t < n_tokens; ++t) {
    for (uint32_t i = 0; i < n; ++i) {
      const uint16_t* own = steps + i / Codec::kGroupChannels * 2;
      const float x = code_at(codes, bits, i) * bf16_to_f32(own[0]) + bf16_to_f32(own[1]);
      *out++ = means != nullptr     ? x + bf16_to_f32(means[i])
               : factors != nullptr ? x * bf16_to_f32(factors[i])
                                    : x;
    }
    codes += row_bytes;
    steps += 2 * n_groups;
  }
}

// What low_bits_avx2.h reads.
static_assert(std::all_of(kCodecs.begin(), kCodecs.end(), [](const Codec& codec) {
  return !codec.is_low_bits() || (codec.bits() >= 2 && codec.bits() <= 4);
}));

struct Decoders {
  decltype(&decode_by_channel) by_channel = decode_by_channel;
  decltype(&decode_by_token) by_token = decode_by_token;
};

Decoders decoders() {
#if defined(__x86_64__)
  if (cpu_features().avx2) {
    return {decode_by_channel_avx2, decode_by_token_avx2};
  }
#endif
  return {};
}

}  // namespace

bool encode_low_bits(const Codec& codec, const float* rows, uint32_t dim, const float* largest_q,
                     uint8_t* codes, uint16_t* params) {
  KVM_ASSERT(codec.is_low_bits() && dim <= kMaxHeadDim && dim % 8 == 0);
  if (!are_in_range(rows, kPageTokens * dim)) {
    return false;
  }
  std::fill_n(codes, codec.head_rows_bytes(dim), uint8_t{0});
  if (codec.group_params == 0) {
    encode_by_channel(codec, rows, dim, codes, params);
  } else {
    encode_by_token(codec, rows, dim, largest_q, codes, params);
  }
  return true;
}

void decode_low_bits(const Codec& codec, const uint8_t* codes, const uint16_t* params,
                     uint32_t row_dim, uint32_t slot, uint32_t n_tokens, uint32_t n, float* out) {
  KVM_ASSERT(codec.is_low_bits() && n % 8 == 0 && n <= row_dim && row_dim <= kMaxHeadDim);
  const Params at(codec, row_dim);
  const uint64_t row_bytes = codec.row_bytes(row_dim);
  if (codec.group_params == 0) {
    decoders().by_channel(codec.bits(), codes, row_bytes, params, params + row_dim, n_tokens, n,
                          out);
    return;
  }
  const uint16_t* channels = codec.channel_params != 0 ? params + at.channels : nullptr;
  decoders().by_token(codec.bits(), codes, row_bytes, params + at.group(slot, 0), at.n_groups,
                      codec.is_balanced ? nullptr : channels,
                      codec.is_balanced ? channels : nullptr, n_tokens, n, out);
}

}  // namespace kvm::codecs
