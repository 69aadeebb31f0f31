// SPDX-License-Identifier: Apache-2.0
#include "codecs/low_bits_avx2.h"

#include <immintrin.h>

namespace kvm::codecs {
namespace {

constexpr uint32_t kGroup = 64;

// Codes of eight channels, which stand in kBits bytes.
template <uint32_t kBits>
inline __m256 load_codes(const uint8_t* codes) {
  // In registers: a load that takes what two stores wrote would wait for both.
  uint32_t word = 0;
  for (uint32_t i = 0; i < kBits; ++i) {
    word |= uint32_t{codes[i]} << 8 * i;
  }
  const __m256i shifts =
      _mm256_setr_epi32(0, kBits, 2 * kBits, 3 * kBits, 4 * kBits, 5 * kBits, 6 * kBits, 7 * kBits);
  const __m256i each = _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(word)), shifts);
  return _mm256_cvtepi32_ps(_mm256_and_si256(each, _mm256_set1_epi32((1 << kBits) - 1)));
}

// Eight bf16.
inline __m256 load_params(const uint16_t* params) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(params));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

inline __m256 spread_param(uint16_t param) {
  return _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(uint32_t{param} << 16)));
}

template <uint32_t kBits>
void decode_by_channel(const uint8_t* codes, uint64_t row_bytes, const uint16_t* scales,
                       const uint16_t* zeros, uint32_t n_tokens, uint32_t n, float* out) {
  for (uint32_t i = 0; i < n; i += 8) {
    const __m256 scale = load_params(scales + i);
    const __m256 zero = load_params(zeros + i);
    const uint8_t* from = codes + i * kBits / 8;
    for (uint32_t t = 0; t < n_tokens; ++t) {
      const __m256 x = _mm256_add_ps(_mm256_mul_ps(load_codes<kBits>(from), scale), zero);
      _mm256_storeu_ps(out + uint64_t{t} * n + i, x);
      from += row_bytes;
    }
  }
}

enum class Channels { kPlain, kCentred, kBalanced };

// channels: means, or factors.
template <uint32_t kBits, Channels kChannels>
void decode_tokens(const uint8_t* codes, uint64_t row_bytes, const uint16_t* steps,
                   uint32_t n_groups, const uint16_t* channels, uint32_t n_tokens, uint32_t n,
                   float* out) {
  for (uint32_t t = 0; t < n_tokens; ++t) {
    for (uint32_t begin = 0; begin < n; begin += kGroup) {
      const __m256 scale = spread_param(steps[begin / kGroup * 2]);
      const __m256 zero = spread_param(steps[begin / kGroup * 2 + 1]);
      const uint32_t end = n - begin < kGroup ? n : begin + kGroup;
      for (uint32_t i = begin; i < end; i += 8) {
        __m256 x =
            _mm256_add_ps(_mm256_mul_ps(load_codes<kBits>(codes + i * kBits / 8), scale), zero);
        if (kChannels == Channels::kCentred) {
          x = _mm256_add_ps(x, load_params(channels + i));
        } else if (kChannels == Channels::kBalanced) {
          x = _mm256_mul_ps(x, load_params(channels + i));
        }
        _mm256_storeu_ps(out + i, x);
      }
    }
    codes += row_bytes;
    steps += 2 * n_groups;
    out += n;
  }
}

template <uint32_t kBits>
void decode_by_token(const uint8_t* codes, uint64_t row_bytes, const uint16_t* steps,
                     uint32_t n_groups, const uint16_t* means, const uint16_t* factors,
                     uint32_t n_tokens, uint32_t n, float* out) {
  const auto decode = means != nullptr     ? decode_tokens<kBits, Channels::kCentred>
                      : factors != nullptr ? decode_tokens<kBits, Channels::kBalanced>
                                           : decode_tokens<kBits, Channels::kPlain>;
  decode(codes, row_bytes, steps, n_groups, means != nullptr ? means : factors, n_tokens, n, out);
}

}  // namespace

void decode_by_channel_avx2(uint32_t bits, const uint8_t* codes, uint64_t row_bytes,
                            const uint16_t* scales, const uint16_t* zeros, uint32_t n_tokens,
                            uint32_t n, float* out) {
  const auto decode = bits == 4   ? decode_by_channel<4>
                      : bits == 3 ? decode_by_channel<3>
                                  : decode_by_channel<2>;
  decode(codes, row_bytes, scales, zeros, n_tokens, n, out);
}

void decode_by_token_avx2(uint32_t bits, const uint8_t* codes, uint64_t row_bytes,
                          const uint16_t* steps, uint32_t n_groups, const uint16_t* means,
                          const uint16_t* factors, uint32_t n_tokens, uint32_t n, float* out) {
  const auto decode = bits == 4   ? decode_by_token<4>
                      : bits == 3 ? decode_by_token<3>
                                  : decode_by_token<2>;
  decode(codes, row_bytes, steps, n_groups, means, factors, n_tokens, n, out);
}

}  // namespace kvm::codecs
