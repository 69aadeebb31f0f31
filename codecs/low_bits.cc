// SPDX-License-Identifier: Apache-2.0
#include "codecs/low_bits.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

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
  steps.zero = bf16_below(smallest + 0.0f);  // no -0: which zero comes first does not matter
  const float span = largest - bf16_to_f32(steps.zero);
  if (span > 0) {
    steps.scale = bf16_above(std::max(span / static_cast<float>(last_code), kSmallestRowScale));
  }
  return steps;
}
// What elements less their zero are divided by. All are 0 where there is no scale.
float divisor_of(uint16_t scale) { return scale == 0 ? 1.0f : bf16_to_f32(scale); }

// Loops below go over independent elements, or kLanes of them, so that compilers make vectors.
constexpr uint32_t kLanes = 8;  // dims are multiples of it

void find_bounds(const float* x, uint32_t n, float* smallest, float* largest) {
  std::array<float, kLanes> least;
  std::array<float, kLanes> most;
  std::copy_n(x, kLanes, least.begin());
  std::copy_n(x, kLanes, most.begin());
  for (uint32_t i = kLanes; i < n; i += kLanes) {
    for (uint32_t j = 0; j < kLanes; ++j) {
      const float element = x[i + j];
      least[j] = element < least[j] ? element : least[j];
      most[j] = element > most[j] ? element : most[j];
    }
  }
  *smallest = *std::min_element(least.begin(), least.end());
  *largest = *std::max_element(most.begin(), most.end());
}

// Codes of elements, a byte each: quotients, so that ties are ties.
void find_codes(const float* x, const float* zeros, const float* divisors, uint32_t n,
                uint32_t last_code, uint8_t* codes) {
  const float limit = kRound + static_cast<float>(last_code);
  for (uint32_t i = 0; i < n; ++i) {
    const float rounded = std::min((x[i] - zeros[i]) / divisors[i] + kRound, limit);
    codes[i] = static_cast<uint8_t>(std::bit_cast<uint32_t>(rounded));
  }
}

// Puts n codes next to each other, eight at a time: two, then four, then all.
static_assert(std::endian::native == std::endian::little);
template <uint32_t kBits>
void pack_codes(const uint8_t* codes, uint32_t n, uint8_t* row) {
  constexpr uint64_t kOfTwo = 0x0001000100010001u * ((uint64_t{1} << 2 * kBits) - 1);
  constexpr uint64_t kOfFour = 0x0000000100000001u * ((uint64_t{1} << 4 * kBits) - 1);
  for (uint32_t i = 0; i < n; i += 8, row += kBits) {
    uint64_t x;
    std::memcpy(&x, codes + i, sizeof(x));
    x = (x | x >> (8 - kBits)) & kOfTwo;
    x = (x | x >> (16 - 2 * kBits)) & kOfFour;
    x |= x >> (32 - 4 * kBits);
    std::memcpy(row, &x, kBits);
  }
}
void pack_codes(const uint8_t* codes, uint32_t n, uint32_t bits, uint8_t* row) {
  const auto pack = bits == 4 ? pack_codes<4> : bits == 3 ? pack_codes<3> : pack_codes<2>;
  pack(codes, n, row);
}

struct Params {
  Params(const Codec& codec, uint32_t dim)
      : n_groups(codec.n_groups(dim)), channels(kPageTokens * codec.group_params * n_groups) {}
  uint32_t group(uint32_t slot, uint32_t g) const { return (slot * n_groups + g) * 2; }

  uint32_t n_groups;
  uint32_t channels;  // where those of channels begin
};

bool are_in_range(const float* rows, uint32_t n) {
  std::array<int32_t, kLanes> top{};  // magnitudes, which are no negative integers
  for (uint32_t i = 0; i < n; i += kLanes) {
    for (uint32_t j = 0; j < kLanes; ++j) {
      top[j] = std::max(top[j], static_cast<int32_t>(magnitude_bits(rows[i + j])));
    }
  }
  return *std::max_element(top.begin(), top.end()) <= static_cast<int32_t>(kLargest);
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
      const float element = rows[t * dim + i];
      smallest[i] = element < smallest[i] ? element : smallest[i];
      largest[i] = element > largest[i] ? element : largest[i];
    }
  }
  for (uint32_t i = 0; i < dim; ++i) {
    const Steps steps = steps_of(smallest[i], largest[i], last);
    params[i] = steps.scale;
    params[dim + i] = steps.zero;
    smallest[i] = bf16_to_f32(steps.zero);
    largest[i] = divisor_of(steps.scale);
  }
  std::array<uint8_t, kMaxHeadDim> row;
  for (uint32_t t = 0; t < kPageTokens; ++t) {
    find_codes(rows + t * dim, smallest.data(), largest.data(), dim, last, row.data());
    pack_codes(row.data(), dim, codec.bits(), codes + t * codec.row_bytes(dim));
  }
}

// The factors of a balanced page.
void find_factors(const float* rows, uint32_t dim, const float* largest_q, uint16_t* factors) {
  constexpr float kSmallestWeight = 0x1p-10f;
  const float most = largest_q == nullptr ? 0.0f : *std::max_element(largest_q, largest_q + dim);
  std::array<float, kMaxHeadDim> largest{};
  for (uint32_t t = 0; t < kPageTokens; ++t) {
    for (uint32_t i = 0; i < dim; ++i) {
      largest[i] = std::max(largest[i], std::fabs(rows[t * dim + i]));
    }
  }
  for (uint32_t i = 0; i < dim; ++i) {
    const float weight = most > 0 ? std::max(largest_q[i] / most, kSmallestWeight) : 1.0f;
    // No larger than what 2^126 has without queries: what is read is finite.
    const float factor = std::min(std::sqrt(largest[i]) / std::sqrt(weight), 0x1p63f);
    factors[i] = f32_to_bf16(largest[i] > 0 ? factor : 1.0f);
  }
}

void find_means(const float* rows, uint32_t dim, uint16_t* means) {
  std::array<double, kMaxHeadDim> sums{};
  for (uint32_t t = 0; t < kPageTokens; ++t) {
    for (uint32_t i = 0; i < dim; ++i) {
      sums[i] += double{rows[t * dim + i]};
    }
  }
  for (uint32_t i = 0; i < dim; ++i) {
    means[i] = f32_to_bf16(static_cast<float>(sums[i] / kPageTokens));
  }
}

void encode_by_token(const Codec& codec, const float* rows, uint32_t dim, const float* largest_q,
                     uint8_t* codes, uint16_t* params) {
  const Params at(codec, dim);
  std::array<float, kMaxHeadDim> means{};
  std::array<float, kMaxHeadDim> factors;
  factors.fill(1);
  uint16_t* const of_channels = params + at.channels;
  if (codec.is_balanced) {
    find_factors(rows, dim, largest_q, of_channels);
    std::transform(of_channels, of_channels + dim, factors.begin(), bf16_to_f32);
  } else if (codec.channel_params != 0) {
    find_means(rows, dim, of_channels);
    std::transform(of_channels, of_channels + dim, means.begin(), bf16_to_f32);
  }
  std::array<float, kMaxHeadDim> rest;
  std::array<float, Codec::kGroupChannels> zeros;
  std::array<float, Codec::kGroupChannels> divisors;
  std::array<uint8_t, kMaxHeadDim> row;
  for (uint32_t t = 0; t < kPageTokens; ++t) {
    for (uint32_t i = 0; i < dim; ++i) {
      rest[i] = (rows[t * dim + i] - means[i]) / factors[i];
    }
    for (uint32_t g = 0; g < at.n_groups; ++g) {
      const uint32_t begin = g * Codec::kGroupChannels;
      const uint32_t n = std::min(dim - begin, Codec::kGroupChannels);
      float smallest;
      float largest;
      find_bounds(rest.data() + begin, n, &smallest, &largest);
      const Steps steps = steps_of(smallest, largest, codec.last_code());
      params[at.group(t, g)] = steps.scale;
      params[at.group(t, g) + 1] = steps.zero;
      zeros.fill(bf16_to_f32(steps.zero));
      divisors.fill(divisor_of(steps.scale));
      find_codes(rest.data() + begin, zeros.data(), divisors.data(), n, codec.last_code(),
                 row.data() + begin);
    }
    pack_codes(row.data(), dim, codec.bits(), codes + t * codec.row_bytes(dim));
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
