// SPDX-License-Identifier: Apache-2.0
// What the streaming path over rows of codes (exact_codes.h) is made of, whatever the width of its
// vectors: parameters of codes as floats, queries and weights as words, and what codecs/gear.h adds
// to values.
//
// Included by exact_codes.h; internal linkage throughout.
#ifndef KVM_ATTENTION_EXACT_EXACT_CODES_PARTS_H_
#define KVM_ATTENTION_EXACT_EXACT_CODES_PARTS_H_

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "attention/exact/elementary.h"
#include "attention/exact/exact_args.h"
#include "attention/exact/reader.h"

namespace kvm {
namespace attention {
namespace {

constexpr uint32_t kCodeBlock = 64;  // channels whose codes are loaded at once; also a group's

// --- Loads --------------------------------------------------------------------------------------

// Codes of 3 bits are widened to 4 as they are loaded.
template <int kBits>
constexpr int kLoadedBits = kBits == 3 ? 4 : kBits;

// The 3 bytes of 8 codes of 3 bits, in 4 bytes.
inline __m256i triples_in_dwords(const uint8_t* p) {
  const __m256i both = _mm256_inserti128_si256(
      _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)), 1);
  return _mm256_shuffle_epi8(
      both, _mm256_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1, 4, 5, 6, -1, 7,
                             8, 9, -1, 10, 11, 12, -1, 13, 14, 15, -1));
}
// Spreads them over halves, bytes and halves of bytes; what is left over goes at the end.
inline __m256i widen_triples(__m256i x) {
  x = _mm256_blend_epi16(x, _mm256_slli_epi32(x, 4), 0xaa);
  x = _mm256_blendv_epi8(x, _mm256_slli_epi16(x, 2),
                         _mm256_set1_epi16(static_cast<int16_t>(0xff00)));
  return _mm256_or_si256(_mm256_and_si256(x, _mm256_set1_epi8(0x07)),
                         _mm256_and_si256(_mm256_slli_epi16(x, 1), _mm256_set1_epi8(0x70)));
}

// The codes of 64 channels as 16 words: plane n of a word, n < 4, is its code at bit
// n * kLoadedBits, of channel 4 word + n. Of 2 bits, of 8 word + n, and behind the eighth word
// 8 (word - 8) + 4 + n.
template <int kBits>
inline __m256i load_codes(const uint8_t* p) {
  if constexpr (kBits == 4) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  } else if constexpr (kBits == 3) {
    return widen_triples(triples_in_dwords(p));
  } else {
    const __m256i twice =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_blend_epi32(twice, _mm256_srli_epi16(twice, 8), 0xf0);
  }
}
template <int kBits>
inline __m256i code_plane(__m256i codes, int plane) {
  return _mm256_and_si256(_mm256_srli_epi16(codes, plane * kLoadedBits<kBits>),
                          _mm256_set1_epi16((1 << kBits) - 1));
}
constexpr size_t code_block_bytes(int bits) { return kCodeBlock * static_cast<size_t>(bits) / 8; }

inline __m256 load_params(const uint16_t* params) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(params));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

// Parameters of the tokens of an item for 64 channels: scale [16], zero [16].
struct TokenSteps {
  float scale[kItemTokens];
  float zero[kItemTokens];
};
// Of two bf16 in 32 bits, each is a number once the other is gone.
inline __m256 low_numbers(__m256i both) { return _mm256_castsi256_ps(_mm256_slli_epi32(both, 16)); }
inline __m256 high_numbers(__m256i both) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  return _mm256_castsi256_ps(_mm256_and_si256(both, high));
}
inline void put_steps(__m256i both, uint32_t token, TokenSteps* out) {
  _mm256_storeu_ps(out->scale + token, low_numbers(both));
  _mm256_storeu_ps(out->zero + token, high_numbers(both));
}
inline void load_steps(const CodeParams& params, uint32_t n_groups, uint32_t group,
                       TokenSteps* out) {
  const uint16_t* from = params.steps + group * 2;
  if (n_groups == 2) {
    // Both groups of eight tokens; dwords of one of them, in order.
    for (uint32_t t = 0; t < kItemTokens; t += 8) {
      const auto* at = reinterpret_cast<const float*>(params.steps + t * 4);
      const __m256 lo = _mm256_loadu_ps(at);
      const __m256 hi = _mm256_loadu_ps(at + 8);
      const __m256 own =
          group == 0 ? _mm256_shuffle_ps(lo, hi, 0x88) : _mm256_shuffle_ps(lo, hi, 0xdd);
      put_steps(_mm256_permute4x64_epi64(_mm256_castps_si256(own), 0xd8), t, out);
    }
    return;
  }
  uint32_t both[kItemTokens];
  for (uint32_t t = 0; t < kItemTokens; ++t)
    memcpy(&both[t], from + t * n_groups * 2, sizeof both[t]);
  for (uint32_t t = 0; t < kItemTokens; t += 8)
    put_steps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(both + t)), t, out);
}

// A of the tokens of an item as floats, [rank][16].
inline void load_factors(const CodeParams& params, float* out) {
  if (params.rank == 2) {  // 32 bits of a token, as with scale and zero
    for (uint32_t t = 0; t < kItemTokens; t += 8) {
      const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(params.a + t * 2));
      _mm256_storeu_ps(out + t, low_numbers(both));
      _mm256_storeu_ps(out + kItemTokens + t, high_numbers(both));
    }
    return;
  }
  for (uint32_t k = 0; k < params.rank; ++k) {
    for (uint32_t t = 0; t < kItemTokens; ++t) {
      const uint32_t bits = static_cast<uint32_t>(params.a[t * params.rank + k]) << 16;
      memcpy(out + k * kItemTokens + t, &bits, sizeof bits);
    }
  }
}

// Calls function(slot, channel, delta) for outliers: all of a page by channel, by token those of
// `n` slots from `first` on.
template <typename Function>
inline void for_each_outlier(const CodeParams& params, uint32_t dim, int32_t first, int32_t n,
                             const Function& function) {
  const auto number = [](uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
  };
  const uint16_t* deltas = params.b + params.rank * dim;
  if (params.steps == nullptr) {
    for (uint32_t pair = 0; pair < params.n_pairs; ++pair, deltas += 3 * dim) {
      for (uint32_t i = 0; i < dim; ++i) {
        const uint32_t places = deltas[2 * dim + i];
        const uint32_t last = kBlockTokens - 1;
        function(static_cast<int32_t>(places & last), i, number(deltas[i]));
        function(static_cast<int32_t>(places >> 8 & last), i, number(deltas[dim + i]));
      }
    }
    return;
  }
  const int32_t begin = first < 0 ? 0 : first;
  const int32_t limit = static_cast<int32_t>(kBlockTokens);
  const int32_t end = first + n < limit ? first + n : limit;
  for (uint32_t pair = 0; pair < params.n_pairs; ++pair, deltas += 4 * kBlockTokens) {
    for (uint32_t side = 0; side < 2; ++side) {
      for (int32_t slot = begin; slot < end; ++slot) {
        const uint16_t* own = deltas + side * kBlockTokens + slot;
        // A damaged page may name any channel.
        if (const uint32_t channel = own[2 * kBlockTokens]; channel < dim)
          function(slot, channel, number(*own));
      }
    }
  }
}

// --- Words --------------------------------------------------------------------------------------

// What 1 of a word stands for, where the largest number is `top`: the power of two with which it
// has 15 bits. `least`, the smallest exponent that counts, keeps it a normal number: of weights, as
// of queries and of their rests.
constexpr uint32_t kLeastWeight = 20;
constexpr uint32_t kLeastQuery = 36;
inline float word_step_of(float top, uint32_t least) {
  uint32_t bits;
  memcpy(&bits, &top, sizeof bits);
  const uint32_t exponent = bits >> 23 < least ? least : bits >> 23;
  bits = (exponent - 14) << 23;
  float step;
  memcpy(&step, &bits, sizeof step);
  return step;
}
// 16 floats in units of `inverse`, rounded to nearest even; 2^15 saturates.
inline __m256i to_words(__m256 a, __m256 b, __m256 inverse) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(a, inverse)),
                                           _mm256_cvtps_epi32(_mm256_mul_ps(b, inverse)));
  return _mm256_permute4x64_epi64(words, 0xd8);
}
inline __m256 words_to_floats(const int16_t* words) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words))));
}

inline float sum_of_8(__m256 a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
inline float max_of_8(__m256 a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}
// Eight sums in the order of a.
inline __m256i reduce_sums(const __m256i* a) {
  const __m256i lo =
      _mm256_hadd_epi32(_mm256_hadd_epi32(a[0], a[1]), _mm256_hadd_epi32(a[2], a[3]));
  const __m256i hi =
      _mm256_hadd_epi32(_mm256_hadd_epi32(a[4], a[5]), _mm256_hadd_epi32(a[6], a[7]));
  return _mm256_add_epi32(_mm256_permute2x128_si256(lo, hi, 0x20),
                          _mm256_permute2x128_si256(lo, hi, 0x31));
}
// Adds products of pairs of words to 8 sums.
inline __m256i add_products(__m256i sums, __m256i a, __m256i b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm256_dpwssd_epi32(sums, a, b);
#else
  sums = _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
  // Sums of integers may be added up in any order, and compilers choose trees for which there are
  // not enough registers. This is one that they do not look into.
  asm("" : "+x"(sums));
  return sums;
#endif
}

// --- Queries of a page --------------------------------------------------------------------------

// Tokens that kRows rows meet at once: 8 scores are a vector, [row][token].
template <int kRows>
constexpr uint32_t kCodeTokens = 8 / kRows;

// The queries of a tile, made anew for each page. Words [row][dim_k], planes of 16 for each 64
// channels; and `rests`, what their rounding lost, likewise.
inline int16_t* query_words(const StreamArgs& args, uint32_t row) {
  return args.code_words + static_cast<size_t>(row) * args.dim_k;
}
inline int16_t* query_rests(const StreamArgs& args, uint32_t row) {
  const uint32_t rows = (args.q.rows + kRowTile - 1) / kRowTile * kRowTile;
  return query_words(args, rows + row);
}
// Floats that go with them, for the 8 scores of a vector each.
enum QueryTerm : uint32_t {
  kTermStep,   // what 1 of a word is
  kTermLimit,  // scales above it need rests
  kTermPage,   // is added to all scores of the page
  kTermBlock,  // of each 64 channels: is multiplied by zeros of tokens; then those of B
};
inline float* query_terms(const StreamArgs& args, uint32_t tile) {
  const uint32_t n_terms = kTermBlock + args.dim_k / kCodeBlock + kMaxCodeRank;
  return args.code_terms + static_cast<size_t>(tile) * 8 * n_terms;
}
// What outliers add to the scores of a tile: [slot][row], of as many slots before and behind the
// page as an item may have that are not there.
constexpr uint32_t kSparseSlots = kItemTokens + kBlockTokens + kItemTokens;
inline float* query_sparse(const StreamArgs& args, uint32_t tile) {
  return args.code_sparse + static_cast<size_t>(tile) * kSparseSlots * kRowTile;
}
inline void put_term(float* terms, uint32_t term, uint32_t row, uint32_t n_tokens, float x) {
  for (uint32_t t = 0; t < n_tokens; ++t)
    terms[term * 8 + row * n_tokens + t] = x;
}

constexpr float kRestStep = 0x1p-15f;  // 1 of a rest, in words
// Where rounding to words may move a logit by more than this, root mean square, rests are added.
constexpr float kWordLogitError = 0x1p-11f;

// The largest scale of codes with which words of this step are near enough: rounding errors are
// independent and even within half a step (a root mean square of .29), codes are even (.58 of the
// last).
inline float near_scale(const StreamArgs& args, float step, float last_code) {
  const float each = step * (0.29f * 0.58f) * last_code;
  const float logit = each * args.scale * __builtin_sqrtf(static_cast<float>(args.dim_k));
  return kWordLogitError / __builtin_fabsf(logit);  // infinite where there is no scale
}

// Puts the words of 64 channels into planes, as load_codes has codes.
template <int kBits>
inline void put_planes(const int16_t* channels, int16_t* planes) {
  // In each lane of 128 bits, the two words of each plane next to each other.
  const __m256i pairs = _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15,  //
                                         0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
  __m256i a[4];
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm256_shuffle_epi8(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(channels + i * 16)), pairs);
  }
  const __m256i lo01 = _mm256_unpacklo_epi32(a[0], a[1]);
  const __m256i hi01 = _mm256_unpackhi_epi32(a[0], a[1]);
  const __m256i lo23 = _mm256_unpacklo_epi32(a[2], a[3]);
  const __m256i hi23 = _mm256_unpackhi_epi32(a[2], a[3]);
  const __m256i lanes[4] = {_mm256_unpacklo_epi64(lo01, lo23), _mm256_unpackhi_epi64(lo01, lo23),
                            _mm256_unpacklo_epi64(hi01, hi23), _mm256_unpackhi_epi64(hi01, hi23)};
  for (int plane = 0; plane < 4; ++plane) {
    __m256i words =
        _mm256_permutevar8x32_epi32(lanes[plane], _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    if constexpr (kBits == 2) {  // the even words of both lanes, and then the odd ones
      const __m256i apart =
          _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,  //
                           0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
      words = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(words, apart), 0xd8);
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(planes + plane * 16), words);
  }
}

#if defined(__AVX512VNNI__)

constexpr uint32_t kWideBlock = 2 * kCodeBlock;  // channels whose codes are a vector of 512 bits

// Of 128 channels, in bytes: [plane][upper, lower][64], as load_wide (exact_codes_wide.h) has
// codes.
constexpr size_t kWideQueryBytes = size_t{kWideBlock} * sizeof(int16_t);

// Puts the words of 64 channels, the lower or upper ones of 128, where they belong.
template <int kBits>
inline void put_wide(const int16_t* channels, uint32_t channel, int16_t* words) {
  auto* to = reinterpret_cast<uint8_t*>(words + channel / kWideBlock * kWideBlock);
  const bool is_upper_half = channel % kWideBlock != 0;
  const auto part = [](uint32_t plane, bool lower) { return (plane * 2 + (lower ? 1 : 0)) * 64; };
#pragma GCC unroll 2
  for (uint32_t i = 0; i < 2; ++i) {
    const __m512i x = _mm512_loadu_si512(channels + i * 32);
    if constexpr (kLoadedBits<kBits> == 4) {
      uint8_t* own = to + (is_upper_half ? 32 : 0) + i * 16;
      const auto put = [&](uint32_t at, __m512i bytes) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(own + at), _mm512_cvtepi32_epi8(bytes));
      };
      put(part(0, true), x);
      put(part(0, false), _mm512_srli_epi32(x, 8));
      put(part(1, true), _mm512_srli_epi32(x, 16));
      put(part(1, false), _mm512_srli_epi32(x, 24));
    } else {
      uint8_t* own = to + (is_upper_half ? 16 : 0) + i * 8;
      const auto put = [&](uint32_t at, __m512i bytes) {
        _mm_storel_epi64(reinterpret_cast<__m128i*>(own + at), _mm512_cvtepi64_epi8(bytes));
      };
      put(part(0, true), x);
      put(part(0, false), _mm512_srli_epi64(x, 8));
      put(part(0, true) + 32, _mm512_srli_epi64(x, 16));
      put(part(0, false) + 32, _mm512_srli_epi64(x, 24));
      put(part(1, true), _mm512_srli_epi64(x, 32));
      put(part(1, false), _mm512_srli_epi64(x, 40));
      put(part(1, true) + 32, _mm512_srli_epi64(x, 48));
      put(part(1, false) + 32, _mm512_srli_epi64(x, 56));
    }
  }
}

#endif  // defined(__AVX512VNNI__)

// Says whether tiles of kRows rows meet rows of this many channels in vectors of 512 bits.
template <int kRows>
constexpr bool is_wide([[maybe_unused]] uint32_t dim) {
#if defined(__AVX512VNNI__)
  return kRows == kRowTile && dim % kWideBlock == 0;
#else
  return false;
#endif
}

// Puts the words of 64 channels where kernels look for them. channel: the first of them.
template <int kRows, int kBits>
inline void put_words(const int16_t* channels, uint32_t channel, uint32_t dim, int16_t* words) {
#if defined(__AVX512VNNI__)
  if (is_wide<kRows>(dim))
    return put_wide<kBits>(channels, channel, words);
#endif
  (void)dim;
  put_planes<kBits>(channels, words + channel);
}

// Makes the query of one row, whose folded channels are given, into words and rests.
template <int kRows, int kBits>
inline void put_query(const float* folded, uint32_t dim, float step, int16_t* words,
                      int16_t* rests) {
  const __m256 unit = _mm256_set1_ps(step);
  const __m256 inverse = _mm256_set1_ps(1.0f / step);
  const __m256 finer = _mm256_set1_ps(1.0f / (step * kRestStep));
  int16_t in_order[2][kCodeBlock];
  for (uint32_t b = 0; b < dim; b += kCodeBlock) {
    for (uint32_t i = 0; i < kCodeBlock; i += 16) {
      const __m256 lo = _mm256_loadu_ps(folded + b + i);
      const __m256 hi = _mm256_loadu_ps(folded + b + i + 8);
      int16_t* word = in_order[0] + i;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(word), to_words(lo, hi, inverse));
      if (rests != nullptr) {
        const __m256i rest = to_words(_mm256_fnmadd_ps(words_to_floats(word), unit, lo),
                                      _mm256_fnmadd_ps(words_to_floats(word + 8), unit, hi), finer);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(in_order[1] + i), rest);
      }
    }
    put_words<kRows, kBits>(in_order[0], b, dim, words);
    if (rests != nullptr)
      put_words<kRows, kBits>(in_order[1], b, dim, rests);
  }
}

// kRows numbers that lie next to each other, one of each row of a tile.
template <int kRows>
struct RowNumbers;
template <>
struct RowNumbers<1> {
  static void add(float* to, const float* x, float factor) {
    *to = __builtin_fmaf(*x, factor, *to);
  }
};
template <>
struct RowNumbers<4> {
  static void add(float* to, const float* x, float factor) {
    _mm_storeu_ps(to, _mm_fmadd_ps(_mm_loadu_ps(x), _mm_set1_ps(factor), _mm_loadu_ps(to)));
  }
};

// The same of a tile for the parts of codecs/gear.h.
template <int kRows>
[[gnu::noinline]] void fold_gear(const StreamArgs& args, const KvItem& item, uint32_t row) {
  const CodeParams& params = item.k_codes;
  const uint32_t dim = args.dim_k;
  const uint32_t tile = row / kRows;
  float* terms = query_terms(args, tile);
  float* turned = args.code_turned;  // [channel][row]
  for (uint32_t r = 0; r < kRows; ++r) {
    const float* q = query_f32(args.q, item.variant, row + r);
    for (uint32_t k = 0; k < params.rank; ++k) {
      __m256 sum = _mm256_setzero_ps();
      for (uint32_t i = 0; i < dim; i += 8)
        sum = _mm256_fmadd_ps(_mm256_loadu_ps(q + i), load_params(params.b + k * dim + i), sum);
      put_term(terms, kTermBlock + dim / kCodeBlock + k, r, kCodeTokens<kRows>, sum_of_8(sum));
    }
  }
  if constexpr (kRows == 1) {
    memcpy(turned, query_f32(args.q, item.variant, row), dim * sizeof(float));
  } else {
    const size_t stride = args.q.stride;
    const float* q = query_f32(args.q, item.variant, row);
    for (uint32_t i = 0; i < dim; i += 4) {
      __m128 x0 = _mm_loadu_ps(q + i);
      __m128 x1 = _mm_loadu_ps(q + stride + i);
      __m128 x2 = _mm_loadu_ps(q + 2 * stride + i);
      __m128 x3 = _mm_loadu_ps(q + 3 * stride + i);
      _MM_TRANSPOSE4_PS(x0, x1, x2, x3);
      _mm_storeu_ps(turned + i * 4, x0);
      _mm_storeu_ps(turned + i * 4 + 4, x1);
      _mm_storeu_ps(turned + i * 4 + 8, x2);
      _mm_storeu_ps(turned + i * 4 + 12, x3);
    }
  }
  float* sparse = query_sparse(args, tile);
  memset(sparse, 0, kSparseSlots * kRows * sizeof(float));
  sparse += kItemTokens * kRows;
  for_each_outlier(params, dim, 0, kBlockTokens, [&](int32_t slot, uint32_t channel, float delta) {
    RowNumbers<kRows>::add(sparse + slot * kRows, turned + channel * kRows, delta);
  });
}

template <int kRows, int kBits>
[[gnu::noinline]] void fold_query(const StreamArgs& args, const KvItem& item, uint32_t row) {
  constexpr uint32_t kT = kCodeTokens<kRows>;
  constexpr float kLastCode = static_cast<float>((1 << kBits) - 1);
  const uint32_t dim = args.dim_k;
  const uint16_t* channels = item.k_codes.channels;
  const bool by_channel = item.k_codes.steps == nullptr;
  const bool balanced = item.k_codes.is_balanced;
  const __m256 huge = _mm256_set1_ps(kHugeLogit);
  float* terms = query_terms(args, row / kRows);
  for (uint32_t r = 0; r < kRows; ++r) {
    const float* q = query_f32(args.q, item.variant, row + r);
    float* folded = args.code_folded;
    __m256 top = _mm256_setzero_ps();
    __m256 of_page = _mm256_setzero_ps();
    for (uint32_t b = 0; b < dim; b += kCodeBlock) {
      __m256 of_block = _mm256_setzero_ps();
      for (uint32_t i = b; i < b + kCodeBlock; i += 8) {
        const __m256 x = _mm256_loadu_ps(q + i);
        __m256 y = x;
        if (by_channel) {
          // Overflow counts as a very large number, as in logits.
          y = _mm256_mul_ps(x, load_params(channels + i));
          y = _mm256_max_ps(_mm256_min_ps(y, huge), _mm256_sub_ps(_mm256_setzero_ps(), huge));
          of_page = _mm256_fmadd_ps(x, load_params(channels + dim + i), of_page);
        } else if (balanced) {
          y = _mm256_mul_ps(x, load_params(channels + i));
          // The same of each, so that their sum is none either.
          const __m256 part = _mm256_mul_ps(huge, _mm256_set1_ps(1.0f / kCodeBlock));
          y = _mm256_max_ps(_mm256_min_ps(y, part), _mm256_sub_ps(_mm256_setzero_ps(), part));
          of_block = _mm256_add_ps(of_block, y);
        } else {
          of_block = _mm256_add_ps(of_block, x);
          if (channels != nullptr)
            of_page = _mm256_fmadd_ps(x, load_params(channels + i), of_page);
        }
        _mm256_storeu_ps(folded + i, y);
        top = _mm256_max_ps(top, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), y));
      }
      put_term(terms, kTermBlock + b / kCodeBlock, r, kT, sum_of_8(of_block));
    }
    const float step = word_step_of(max_of_8(top), kLeastQuery);
    const float limit = near_scale(args, step, kLastCode);
    const bool rests = !by_channel || limit < 1.0f;  // scales of channels are in the query
    put_query<kRows, kBits>(folded, dim, step, query_words(args, row + r),
                            rests ? query_rests(args, row + r) : nullptr);
    put_term(terms, kTermStep, r, kT, step);
    put_term(terms, kTermLimit, r, kT, limit);
    put_term(terms, kTermPage, r, kT, sum_of_8(of_page));
  }
  if (item.k_codes.b != nullptr)
    fold_gear<kRows>(args, item, row);
}

// Calls function.operator()<bits, by token> as an item's rows have them, and returns what it does.
template <typename Function>
[[gnu::always_inline]] inline auto with_kind(uint8_t elem, const CodeParams& params,
                                             const Function& function) {
  const bool by_token = params.steps != nullptr;
  if (elem == kElemCodes4) {
    return by_token ? function.template operator()<4, true>()
                    : function.template operator()<4, false>();
  }
  if (elem == kElemCodes3) {
    return by_token ? function.template operator()<3, true>()
                    : function.template operator()<3, false>();
  }
  return by_token ? function.template operator()<2, true>()
                  : function.template operator()<2, false>();
}

// Makes the queries of all tiles for the page of an item, where they are not those already.
template <int kRows>
inline void fold_queries(const StreamArgs& args, const KvItem& item) {
  FoldedFor& folded = *args.folded_for;
  const uint16_t* page = item.k_codes.b != nullptr ? item.k_codes.b : item.k_codes.channels;
  if (folded.page == page && folded.elem == item.elem_k && folded.variant == item.variant &&
      folded.by_token == (item.k_codes.steps != nullptr))
    return;
  folded = {page, item.elem_k, item.variant, item.k_codes.steps != nullptr};
  with_kind(item.elem_k, item.k_codes, [&]<int kBits, bool>() {
    for (uint32_t row = 0; row < args.q.rows; row += kRows)
      fold_query<kRows, kBits>(args, item, row);
  });
}

// Asks for the rows of later items, as Reader does for rows of more bytes: an item of codes is so
// short that its lines go with those of an item as a whole.
class CodesAhead {
 public:
  CodesAhead(const StreamArgs& args, const uint8_t* const* reading) {
    for (uint32_t i = 0; i < kAttempts; ++i)
      later_[i] = after(reading, args.ahead[i]);
    far_ = after(reading, args.far_ahead);
  }
  // Of the bytes [at, at + n) of an item.
  void ask(uintptr_t at, uintptr_t n) const {
    for (uintptr_t line = (at + 63) / 64 * 64; line < at + n; line += 64) {
#pragma GCC unroll 4
      for (uint32_t i = 0; i < kAttempts; ++i)
        vec::prefetch(reinterpret_cast<const void*>(later_[i] + line));
      vec::prefetch_l2(reinterpret_cast<const void*>(far_ + line));
    }
  }

 private:
  static uintptr_t after(const uint8_t* const* reading, uint32_t quarters) {
    return reinterpret_cast<uintptr_t>(reading[(quarters + 3) / 4]);
  }

  uintptr_t later_[kAttempts];  // integers: the rows may be none
  uintptr_t far_;
};

// --- Values -------------------------------------------------------------------------------------

// The weights of a row over an item as words.
struct WordWeights {
  int16_t words[kItemTokens];
  float step;   // what 1 of a word is
  float added;  // to each sum
};

#if defined(__AVX512VNNI__)

// Sums, and the largest, of 16 numbers, in the order in which exact_codes_wide.h has those of four
// rows at once.
inline float sum_of_16(__m512 x) {
  x = _mm512_add_ps(x, _mm512_permute_ps(x, 0x4e));
  x = _mm512_add_ps(x, _mm512_permute_ps(x, 0xb1));
  x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e));
  x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
  return _mm512_cvtss_f32(x);
}
inline float sum_of_item(const float* weights) { return sum_of_16(_mm512_loadu_ps(weights)); }
inline WordWeights word_weights(const float* weights, const TokenSteps* steps) {
  __m512 w = _mm512_loadu_ps(weights);
  WordWeights out;
  out.added = 0;
  if (steps != nullptr) {
    out.added = sum_of_16(_mm512_mul_ps(w, _mm512_loadu_ps(steps->zero)));
    w = _mm512_mul_ps(w, _mm512_loadu_ps(steps->scale));
  }
  out.step = word_step_of(_mm512_reduce_max_ps(w), kLeastWeight);
  const __m512i words = _mm512_cvtps_epi32(_mm512_mul_ps(w, _mm512_set1_ps(1.0f / out.step)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.words), _mm512_cvtsepi32_epi16(words));
  return out;
}

#else

inline float sum_of_item(const float* weights) {
  return sum_of_8(_mm256_add_ps(_mm256_loadu_ps(weights), _mm256_loadu_ps(weights + 8)));
}
inline WordWeights word_weights(const float* weights, const TokenSteps* steps) {
  __m256 lo = _mm256_loadu_ps(weights);
  __m256 hi = _mm256_loadu_ps(weights + 8);
  WordWeights out;
  out.added = 0;
  if (steps != nullptr) {
    const __m256 zeros = _mm256_fmadd_ps(hi, _mm256_loadu_ps(steps->zero + 8),
                                         _mm256_mul_ps(lo, _mm256_loadu_ps(steps->zero)));
    out.added = sum_of_8(zeros);
    lo = _mm256_mul_ps(lo, _mm256_loadu_ps(steps->scale));
    hi = _mm256_mul_ps(hi, _mm256_loadu_ps(steps->scale + 8));
  }
  out.step = word_step_of(max_of_8(_mm256_max_ps(lo, hi)), kLeastWeight);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.words),
                      to_words(lo, hi, _mm256_set1_ps(1.0f / out.step)));
  return out;
}

#endif  // defined(__AVX512VNNI__)

// Adds to the sums of a tile what codecs/gear.h has beside codes.
template <int kRows>
[[gnu::noinline]] void add_gear_values(const StreamArgs& args, const KvItem& item, uint32_t row,
                                       const float (*weights)[kItemTokens]) {
  const CodeParams& params = item.v_codes;
  const uint32_t dim = args.dim_v;
  const size_t stride = args.acc_stride;
  float* acc = args.acc + row * stride;
  float factors[kMaxCodeRank * kItemTokens];
  load_factors(params, factors);
  for (uint32_t k = 0; k < params.rank; ++k) {
    const __m256 lo = _mm256_loadu_ps(factors + k * kItemTokens);
    const __m256 hi = _mm256_loadu_ps(factors + k * kItemTokens + 8);
    __m256 shares[kRows];
    for (int r = 0; r < kRows; ++r) {
      const __m256 sum = _mm256_fmadd_ps(_mm256_loadu_ps(weights[r] + 8), hi,
                                         _mm256_mul_ps(_mm256_loadu_ps(weights[r]), lo));
      shares[r] = _mm256_set1_ps(sum_of_8(sum));
    }
    for (uint32_t i = 0; i < dim; i += 8) {
      const __m256 b = load_params(params.b + k * dim + i);
#pragma GCC unroll 4
      for (uint32_t r = 0; r < kRows; ++r) {
        float* at = acc + r * stride + i;
        _mm256_storeu_ps(at, _mm256_fmadd_ps(shares[r], b, _mm256_loadu_ps(at)));
      }
    }
  }
  const auto n = static_cast<int32_t>(kItemTokens);
  for_each_outlier(params, dim, params.slot, n, [&](int32_t slot, uint32_t channel, float delta) {
    const int32_t t = slot - params.slot;
    // Of a token that is not there, delta may be anything.
    if (t < 0 || t >= n || (item.mask >> t & 1) == 0)
      return;
#pragma GCC unroll 4
    for (uint32_t r = 0; r < kRows; ++r) {
      float* at = acc + r * stride + channel;
      *at = __builtin_fmaf(weights[r][t], delta, *at);
    }
  });
}

}  // namespace
}  // namespace attention
}  // namespace kvm

#endif  // KVM_ATTENTION_EXACT_EXACT_CODES_PARTS_H_
