// SPDX-License-Identifier: Apache-2.0
// exact_codes.h for tiles of rows, in vectors of 512 bits: codes stay bytes, and words meet them as
// two bytes each, in products of bytes that add up four at a time (VNNI).
//
//   word code = 2^8 (upper byte, signed) code + (lower byte, unsigned) code
//
// The integers are those of exact_codes.h, and what is done to them as floats has its order: where
// parameters are finite, a row has the same bits in a tile as alone. Takes rows of 128 channels, or
// multiples; a row alone, and others, go the way of exact_codes.h.
//
// Included by exact_codes.h, in tables with VNNI; internal linkage throughout.
#ifndef KVM_ATTENTION_EXACT_EXACT_CODES_WIDE_H_
#define KVM_ATTENTION_EXACT_EXACT_CODES_WIDE_H_

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "attention/exact/elementary.h"
#include "attention/exact/exact_args.h"
#include "attention/exact/exact_codes_parts.h"
#include "attention/exact/reader.h"

// `#pragma GCC unroll n`, but not for sanitizers: with their checks in loops so long, this header's
// functions took half a minute to compile.
#ifdef __SANITIZE_ADDRESS__
#define KVM_WIDE_UNROLL(n)
#else
#define KVM_WIDE_PRAGMA(text) _Pragma(#text)
#define KVM_WIDE_UNROLL(n) KVM_WIDE_PRAGMA(GCC unroll n)
#endif

namespace kvm {
namespace attention {
namespace {

constexpr uint32_t kWideTokens = 4;  // that are a vector of scores: [token][row]

// --- Loads --------------------------------------------------------------------------------------

// widen_triples.
inline __m512i widen_wide(__m512i x) {
  constexpr int kSelect = 0xca;  // bits of the second where the first has some, else of the third
  x = _mm512_ternarylogic_epi32(_mm512_set1_epi32(static_cast<int>(0xffff0000)),
                                _mm512_slli_epi32(x, 4), x, kSelect);
  x = _mm512_ternarylogic_epi32(_mm512_set1_epi16(static_cast<int16_t>(0xff00)),
                                _mm512_slli_epi16(x, 2), x, kSelect);
  x = _mm512_ternarylogic_epi32(_mm512_set1_epi8(static_cast<char>(0xf0)), _mm512_slli_epi16(x, 1),
                                x, kSelect);
  return x;  // the fourth bit of each code may be anything
}

// The codes of 128 channels, two in each byte: planes are its lower and its upper half. Byte j of
// plane p is, of 4 and 3 bits, channel 2 j + p; of 2 bits channel 4 j + 2 p, and behind the 32nd
// byte 4 (j - 32) + 2 p + 1.
template <int kBits>
inline __m512i load_wide(const uint8_t* p) {
  if constexpr (kBits == 4)
    return _mm512_loadu_si512(p);
  if constexpr (kBits == 3) {
    // Twelve bytes in each lane of 128 bits, and then three in each dword.
    const __m512i in_lanes = _mm512_permutexvar_epi32(
        _mm512_setr_epi32(0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8, 9, 10, 11, 11),
        _mm512_maskz_loadu_epi32(0x0fff, p));
    return widen_wide(
        _mm512_shuffle_epi8(in_lanes, _mm512_broadcast_i32x4(_mm_setr_epi8(
                                          0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1))));
  }
  const __m256i once = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_inserti64x4(_mm512_castsi256_si512(once), _mm256_srli_epi16(once, 2), 1);
}
template <int kBits>
inline void put_halves(__m512i codes, __m512i* lower, __m512i* upper) {
  const __m512i mask = _mm512_set1_epi8((1 << kBits) - 1);
  *lower = _mm512_and_si512(codes, mask);
  *upper = _mm512_and_si512(_mm512_srli_epi16(codes, 4), mask);
}

// Vector i gets the i-th 128 bits of each of four.
[[gnu::always_inline]] inline void transpose_lanes(__m512i a, __m512i b, __m512i c, __m512i d,
                                                   __m512i* out) {
  const __m512i ab01 = _mm512_shuffle_i32x4(a, b, 0x44);
  const __m512i ab23 = _mm512_shuffle_i32x4(a, b, 0xee);
  const __m512i cd01 = _mm512_shuffle_i32x4(c, d, 0x44);
  const __m512i cd23 = _mm512_shuffle_i32x4(c, d, 0xee);
  out[0] = _mm512_shuffle_i32x4(ab01, cd01, 0x88);
  out[1] = _mm512_shuffle_i32x4(ab01, cd01, 0xdd);
  out[2] = _mm512_shuffle_i32x4(ab23, cd23, 0x88);
  out[3] = _mm512_shuffle_i32x4(ab23, cd23, 0xdd);
}

// Adds products of unsigned and signed bytes to 16 sums, four to each. As the intrinsic, but for
// which GCC 12 copies the sums back and forth.
[[gnu::always_inline]] inline void add_bytes(__m512i* sums, __m512i u, __m512i s) {
  asm("vpdpbusd %2, %1, %0" : "+v"(*sums) : "v"(u), "v"(s));
}

inline __m512 load_wide_params(const uint16_t* params) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(params));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// Parameters of the tokens of an item for one group of 64 channels.
struct WideSteps {
  __m512 scale;
  __m512 zero;
};
[[gnu::always_inline]] inline void load_wide_steps(const CodeParams& params, uint32_t n_groups,
                                                   uint32_t group, WideSteps* out) {
  __m512i both;  // of each token, both bf16 in 32 bits
  if (n_groups == 2) {
    const __m512i tokens = _mm512_add_epi32(
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
        _mm512_set1_epi32(static_cast<int>(group)));
    both = _mm512_permutex2var_epi32(_mm512_loadu_si512(params.steps), tokens,
                                     _mm512_loadu_si512(params.steps + 32));
  } else {
    const __m512i tokens =
        _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                           _mm512_set1_epi32(static_cast<int>(n_groups)));
    both = _mm512_i32gather_epi32(tokens, params.steps + group * 2, 4);
  }
  out->scale = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  out->zero =
      _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

// Numbers of the rows of a tile that put_term left, for each of kWideTokens tokens.
inline __m512 load_of_rows(const float* term) {
  const __m512i rows = _mm512_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6, 0, 2, 4, 6, 0, 2, 4, 6);
  return _mm512_permutexvar_ps(rows, _mm512_castps256_ps512(_mm256_loadu_ps(term)));
}
// Numbers of kWideTokens tokens of 16, from `token` on, for each row.
inline __m512 of_wide_tokens(__m512 x, uint32_t token) {
  const __m512i tokens =
      _mm512_add_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                       _mm512_set1_epi32(static_cast<int>(token)));
  return _mm512_permutexvar_ps(tokens, x);
}

// --- Scores -------------------------------------------------------------------------------------

inline __m512i add_halves_of_pairs(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}

// Sums of a token as vectors [4][row], from those of its rows; upper bytes count 2^8 fold.
[[gnu::always_inline]] inline __m512i lanes_of_rows(__m512i of01, __m512i of23) {
  return _mm512_add_epi32(_mm512_unpacklo_epi64(of01, of23), _mm512_unpackhi_epi64(of01, of23));
}
[[gnu::always_inline]] inline __m512i both_bytes(__m512i upper, __m512i lower) {
  return _mm512_add_epi32(lower, _mm512_slli_epi32(upper, 8));
}

// The rest of the way: [token][row]. By token there are two groups of channels.
template <int kBits, bool kByToken>
[[gnu::always_inline]] inline void add_lanes(const __m512i* lanes, __m512i* out) {
  // Lanes of 128 bits next to each other have a group of 4 and 3 bits, every second one of 2.
  const auto add = [](__m512i a, __m512i b) __attribute__((always_inline)) {
    return kByToken && kLoadedBits<kBits> == 4 ? _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88),
                                                                  _mm512_shuffle_i32x4(a, b, 0xdd))
                                               : _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x44),
                                                                  _mm512_shuffle_i32x4(a, b, 0xee));
  };
  const __m512i of01 = add(lanes[0], lanes[1]);
  const __m512i of23 = add(lanes[2], lanes[3]);
  const __m512i even = _mm512_shuffle_i32x4(of01, of23, 0x88);
  const __m512i odd = _mm512_shuffle_i32x4(of01, of23, 0xdd);
  if constexpr (kByToken) {
    out[0] = even;
    out[1] = odd;
  } else {
    out[0] = _mm512_add_epi32(even, odd);
  }
}

// Words of kRowTile rows for 128 channels, as put_wide has them.
struct WideQueries {
  __m512i bytes[kRowTile][2][2];  // [row][plane][upper, lower]
};
[[gnu::always_inline]] inline void load_wide_queries(const int16_t* words, size_t dim,
                                                     WideQueries* out) {
  KVM_WIDE_UNROLL(16)
  for (uint32_t i = 0; i < kRowTile * 4; ++i) {
    out->bytes[i / 4][i / 2 % 2][i % 2] = _mm512_loadu_si512(
        reinterpret_cast<const uint8_t*>(words + i / 4 * dim) + i % 4 * size_t{64});
  }
}

// Sums of codes of kWideTokens tokens times words.
template <int kBits, bool kByToken>
[[gnu::always_inline]] inline void dot_wide(const uint8_t* k, size_t row_bytes,
                                            const WideQueries& queries, __m512i* out) {
  __m512i lanes[kWideTokens];
  KVM_WIDE_UNROLL(4)
  for (uint32_t t = 0; t < kWideTokens; ++t) {
    __m512i x[2];
    put_halves<kBits>(load_wide<kBits>(k + t * row_bytes), &x[0], &x[1]);
    __m512i sums[kRowTile];
    KVM_WIDE_UNROLL(4)
    for (uint32_t r = 0; r < kRowTile; ++r) {
      const auto& q = queries.bytes[r];
      __m512i upper = _mm512_setzero_si512();
      __m512i lower = _mm512_setzero_si512();
      add_bytes(&upper, x[0], q[0][0]);
      add_bytes(&lower, q[0][1], x[0]);
      add_bytes(&upper, x[1], q[1][0]);
      add_bytes(&lower, q[1][1], x[1]);
      sums[r] = both_bytes(upper, lower);
    }
    lanes[t] =
        lanes_of_rows(add_halves_of_pairs(sums[0], sums[1]), add_halves_of_pairs(sums[2], sums[3]));
  }
  add_lanes<kBits, kByToken>(lanes, out);
}

// The same over blocks [begin, end) of 128 channels; by token there is one.
template <int kBits, bool kByToken>
[[gnu::noinline]] void dot_wide_blocks(const uint8_t* k, size_t row_bytes, const int16_t* words,
                                       uint32_t dim, uint32_t begin, uint32_t end, __m512i* out) {
  __m512i lanes[kWideTokens];
  for (uint32_t t = 0; t < kWideTokens; ++t) {
    __m512i upper[kRowTile];
    __m512i lower[kRowTile];
    KVM_WIDE_UNROLL(4)
    for (uint32_t r = 0; r < kRowTile; ++r)
      upper[r] = lower[r] = _mm512_setzero_si512();
    for (uint32_t b = begin; b < end; ++b) {
      __m512i x[2];
      const uint8_t* from = k + t * row_bytes + b * 2 * code_block_bytes(kBits);
      put_halves<kBits>(load_wide<kBits>(from), &x[0], &x[1]);
      KVM_WIDE_UNROLL(4)
      for (uint32_t r = 0; r < kRowTile; ++r) {
        const auto* q = reinterpret_cast<const uint8_t*>(words + r * static_cast<size_t>(dim)) +
                        b * kWideQueryBytes;
        KVM_WIDE_UNROLL(2)
        for (uint32_t plane = 0; plane < 2; ++plane) {
          add_bytes(&upper[r], x[plane], _mm512_loadu_si512(q + plane * 128));
          add_bytes(&lower[r], _mm512_loadu_si512(q + plane * 128 + 64), x[plane]);
        }
      }
    }
    KVM_WIDE_UNROLL(4)
    for (uint32_t r = 0; r < kRowTile; ++r)
      lower[r] = both_bytes(upper[r], lower[r]);
    lanes[t] = lanes_of_rows(add_halves_of_pairs(lower[0], lower[1]),
                             add_halves_of_pairs(lower[2], lower[3]));
  }
  add_lanes<kBits, kByToken>(lanes, out);
}

// kDim: dim_k, or 0: any.
template <bool kFirst, int kBits, bool kByToken, uint32_t kDim>
[[gnu::noinline]] void scores_wide(const StreamArgs& args, const KvItem& item, uint32_t row,
                                   const uint8_t* const* reading, F* out) {
  static_assert(Tile<kRowTile>::kTokens == kWideTokens);
  const uint32_t dim = kDim != 0 ? kDim : args.dim_k;
  const uint32_t n_blocks = dim / kCodeBlock;
  const size_t row_bytes = n_blocks * code_block_bytes(kBits);
  const int16_t* words = query_words(args, row);
  const int16_t* rests = query_rests(args, row);
  const float* terms = query_terms(args, row / kRowTile);
  const __m512 step = load_of_rows(terms + kTermStep * 8);
  const __m512 limit = load_of_rows(terms + kTermLimit * 8);
  const __m512 of_page = load_of_rows(terms + kTermPage * 8);
  WideSteps steps[kByToken ? kMaxCodeDim / kCodeBlock : 1];
  // Whether any row may need what rounding lost, for any token; scales of channels are in words.
  __mmask16 any_far = _mm512_cmp_ps_mask(_mm512_set1_ps(1.0f), limit, _CMP_GT_OQ);
  if constexpr (kByToken) {
    const __m512 least = _mm512_set1_ps(_mm512_reduce_min_ps(limit));
    any_far = 0;
    for (uint32_t b = 0; b < n_blocks; ++b) {
      load_wide_steps(item.k_codes, n_blocks, b, &steps[b]);
      any_far |= _mm512_cmp_ps_mask(steps[b].scale, least, _CMP_GT_OQ);
    }
  }
  const bool is_gear = item.k_codes.b != nullptr;
  float factors[kMaxCodeRank * kItemTokens];
  if (is_gear)
    load_factors(item.k_codes, factors);
  const __m512i by_row = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  WideQueries queries;
  if constexpr (kDim == kWideBlock)
    load_wide_queries(words, dim, &queries);
  const uint8_t* k = *reading;
  const CodesAhead ahead(args, reading);
#pragma GCC unroll 1
  for (uint32_t t = 0; t < kItemTokens; t += kWideTokens, k += kWideTokens * row_bytes) {
    if (kFirst)
      ahead.ask(t * row_bytes, kWideTokens * row_bytes);
    __m512 scores = of_page;
    const uint32_t n_wide = n_blocks / 2;
    for (uint32_t b = 0; b < n_wide; b += kByToken ? 1 : n_wide) {
      const uint32_t end = kByToken ? b + 1 : n_wide;
      constexpr int kGroups = kByToken ? 2 : 1;
      __m512i sums[kGroups];
      if constexpr (kDim == kWideBlock) {
        dot_wide<kBits, kByToken>(k, row_bytes, queries, sums);
      } else {
        dot_wide_blocks<kBits, kByToken>(k, row_bytes, words, dim, b, end, sums);
      }
      __m512i rest[kGroups];
      if (any_far != 0)
        dot_wide_blocks<kBits, kByToken>(k, row_bytes, rests, dim, b, end, rest);
      KVM_WIDE_UNROLL(2)
      for (int g = 0; g < kGroups; ++g) {
        const WideSteps& own = steps[kByToken ? 2 * b + static_cast<uint32_t>(g) : 0];
        const __m512 scale = kByToken ? of_wide_tokens(own.scale, t) : _mm512_set1_ps(1.0f);
        __m512 sum = _mm512_cvtepi32_ps(sums[g]);
        if (any_far != 0) {
          sum = _mm512_mask3_fmadd_ps(_mm512_cvtepi32_ps(rest[g]), _mm512_set1_ps(kRestStep), sum,
                                      _mm512_cmp_ps_mask(scale, limit, _CMP_GT_OQ));
        }
        if constexpr (kByToken) {
          const float* of_block = terms + (kTermBlock + 2 * b + static_cast<uint32_t>(g)) * 8;
          scores = _mm512_fmadd_ps(sum, _mm512_mul_ps(scale, step), scores);
          scores = _mm512_fmadd_ps(of_wide_tokens(own.zero, t), load_of_rows(of_block), scores);
        } else {
          scores = _mm512_fmadd_ps(sum, step, scores);
        }
      }
    }
    if (is_gear) {
      const float* own = terms + (kTermBlock + n_blocks) * 8;
      for (uint32_t i = 0; i < item.k_codes.rank; ++i) {
        scores = _mm512_fmadd_ps(of_wide_tokens(_mm512_loadu_ps(factors + i * kItemTokens), t),
                                 load_of_rows(own + i * 8), scores);
      }
      const int32_t slot = static_cast<int32_t>(kItemTokens + t) + item.k_codes.slot;
      scores = _mm512_add_ps(scores, _mm512_loadu_ps(query_sparse(args, row / kRowTile) +
                                                     slot * static_cast<int32_t>(kRowTile)));
    }
    out[t / kWideTokens] = _mm512_permutexvar_ps(by_row, scores);
  }
}

// --- Values -------------------------------------------------------------------------------------

// The codes of an item for 128 channels: of each 4 tokens, planes of bytes [column][token], four
// vectors each. Vector u of lane L has columns 16 L + 4 u to + 3 of load_wide.
struct WideCodes {
  __m512i x[kItemTokens / 4][2][4];
};

template <int kBits>
inline void load_wide_codes(const uint8_t* v, size_t row_bytes, WideCodes* out) {
  KVM_WIDE_UNROLL(4)
  for (uint32_t g = 0; g < kItemTokens / 4; ++g, v += 4 * row_bytes) {
    __m512i token[4];
    KVM_WIDE_UNROLL(4)
    for (uint32_t t = 0; t < 4; ++t)
      token[t] = load_wide<kBits>(v + t * row_bytes);
    const __m512i lo01 = _mm512_unpacklo_epi8(token[0], token[1]);
    const __m512i hi01 = _mm512_unpackhi_epi8(token[0], token[1]);
    const __m512i lo23 = _mm512_unpacklo_epi8(token[2], token[3]);
    const __m512i hi23 = _mm512_unpackhi_epi8(token[2], token[3]);
    const __m512i columns[4] = {
        _mm512_unpacklo_epi16(lo01, lo23), _mm512_unpackhi_epi16(lo01, lo23),
        _mm512_unpacklo_epi16(hi01, hi23), _mm512_unpackhi_epi16(hi01, hi23)};
    KVM_WIDE_UNROLL(4)
    for (uint32_t u = 0; u < 4; ++u)
      put_halves<kBits>(columns[u], &out->x[g][0][u], &out->x[g][1][u]);
  }
}

// Weights of a row over an item as bytes: dword g of a group has those of tokens 4 g to 4 g + 3.
struct ByteWeights {
  __m512i upper;
  __m512i lower;
};

// Of four vectors, one of each row, [row] four times: sums of 16, or the largest.
template <typename Op>
[[gnu::always_inline]] inline __m512 of_rows(const __m512* x, const Op& op) {
  const __m512d of01 =
      _mm512_castps_pd(op(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1])));
  const __m512d of23 =
      _mm512_castps_pd(op(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3])));
  __m512 all = op(_mm512_castpd_ps(_mm512_unpacklo_pd(of01, of23)),
                  _mm512_castpd_ps(_mm512_unpackhi_pd(of01, of23)));
  all = op(all, _mm512_shuffle_f32x4(all, all, 0x4e));
  return op(all, _mm512_shuffle_f32x4(all, all, 0xb1));
}
[[gnu::always_inline]] inline __m512 sums_of_rows(const __m512* x) {
  return of_rows(x, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
}
[[gnu::always_inline]] inline __m512 largest_of_rows(const __m512* x) {
  return of_rows(x, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); });
}
// A number of row r, in all lanes.
[[gnu::always_inline]] inline __m512 of_row(__m512 rows, uint32_t r) {
  return _mm512_permutexvar_ps(_mm512_set1_epi32(static_cast<int>(r)), rows);
}

// What word_weights makes for the rows of a tile and one group of channels; numbers as of_rows.
struct TileWords {
  __m512 step;
  __m512 added;
  __m128i upper[kRowTile];
  __m128i lower[kRowTile];
};
[[gnu::always_inline]] inline void tile_words(const __m512* weights, const WideSteps* steps,
                                              TileWords* out) {
  __m512 w[kRowTile];
  if (steps != nullptr) {
    KVM_WIDE_UNROLL(4)
    for (uint32_t r = 0; r < kRowTile; ++r)
      w[r] = _mm512_mul_ps(weights[r], steps->zero);
    out->added = sums_of_rows(w);
    KVM_WIDE_UNROLL(4)
    for (uint32_t r = 0; r < kRowTile; ++r)
      w[r] = _mm512_mul_ps(weights[r], steps->scale);
  } else {
    out->added = _mm512_setzero_ps();
    KVM_WIDE_UNROLL(4)
    for (uint32_t r = 0; r < kRowTile; ++r)
      w[r] = weights[r];
  }
  // word_step_of, and its inverse.
  const __m512i top = _mm512_srli_epi32(_mm512_castps_si512(largest_of_rows(w)), 23);
  const __m512i exponent = _mm512_sub_epi32(_mm512_max_epu32(top, _mm512_set1_epi32(kLeastWeight)),
                                            _mm512_set1_epi32(14));
  out->step = _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
  const __m512 inverse = _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(254), exponent), 23));
  KVM_WIDE_UNROLL(4)
  for (uint32_t r = 0; r < kRowTile; ++r) {
    const __m512i words = _mm512_cvtps_epi32(_mm512_mul_ps(w[r], of_row(inverse, r)));
    const __m512i short_of = _mm512_min_epi32(words, _mm512_set1_epi32(INT16_MAX));
    out->lower[r] = _mm512_cvtepi32_epi8(short_of);
    out->upper[r] = _mm512_cvtepi32_epi8(_mm512_srai_epi32(short_of, 8));
  }
}
inline __m512i both_groups(__m128i a, __m128i b) {
  return _mm512_castsi256_si512(_mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1));
}

// Sums of an item over tokens for kPair rows: [row][plane][4], as WideCodes has columns.
constexpr uint32_t kPair = 2;
template <int kBits, bool kByToken>
[[gnu::always_inline]] inline void sum_wide(const WideCodes& codes, const ByteWeights* weights,
                                            __m512i (*acc)[2][4]) {
  // Whose weights a lane of 128 bits has.
  __m512i group = _mm512_setzero_si512();
  if constexpr (kByToken) {
    group = kLoadedBits<kBits> == 4
                ? _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4)
                : _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 0, 0, 0, 0, 4, 4, 4, 4);
  }
  const __m512i one = _mm512_set1_epi32(1);
  KVM_WIDE_UNROLL(16)
  for (uint32_t i = 0; i < kPair * 8; ++i)
    acc[i / 8][i / 4 % 2][i % 4] = _mm512_setzero_si512();
  const auto add_all = [&]<bool kUpper>() __attribute__((always_inline)) {
    __m512i own = group;
#pragma GCC unroll 1
    for (uint32_t g = 0; g < kItemTokens / 4; ++g) {
      __m512i w[kPair];
      KVM_WIDE_UNROLL(2)
      for (uint32_t r = 0; r < kPair; ++r)
        w[r] = _mm512_permutexvar_epi32(own, kUpper ? weights[r].upper : weights[r].lower);
      own = _mm512_add_epi32(own, one);
      KVM_WIDE_UNROLL(8)
      for (uint32_t i = 0; i < 8; ++i) {
        const __m512i x = codes.x[g][i / 4][i % 4];
        KVM_WIDE_UNROLL(2)
        for (uint32_t r = 0; r < kPair; ++r)
          add_bytes(&acc[r][i / 4][i % 4], kUpper ? x : w[r], kUpper ? w[r] : x);
      }
    }
  };
  add_all.template operator()<true>();
  KVM_WIDE_UNROLL(16)
  for (uint32_t i = 0; i < kPair * 8; ++i) {
    acc[i / 8][i / 4 % 2][i % 4] = _mm512_slli_epi32(acc[i / 8][i / 4 % 2][i % 4], 8);
  }
  add_all.template operator()<false>();
}

// Brings the sums of a row into the order of channels: 8 vectors of 16.
template <int kBits>
[[gnu::always_inline]] inline void order_wide(const __m512i (*sums)[4], __m512* out) {
  if constexpr (kLoadedBits<kBits> == 4) {
    KVM_WIDE_UNROLL(2)
    for (uint32_t half = 0; half < 2; ++half) {
      const __m512i* even = sums[0] + half * 2;
      const __m512i* odd = sums[1] + half * 2;
      const __m512i a = _mm512_unpacklo_epi32(even[0], odd[0]);
      const __m512i b = _mm512_unpackhi_epi32(even[0], odd[0]);
      const __m512i c = _mm512_unpacklo_epi32(even[1], odd[1]);
      const __m512i d = _mm512_unpackhi_epi32(even[1], odd[1]);
      __m512i of_lanes[4];
      transpose_lanes(a, b, c, d, of_lanes);
      KVM_WIDE_UNROLL(4)
      for (uint32_t lane = 0; lane < 4; ++lane)
        out[2 * lane + half] = _mm512_cvtepi32_ps(of_lanes[lane]);
    }
  } else {
    const __m512i lower =
        _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
    const __m512i upper = _mm512_add_epi32(lower, _mm512_set1_epi32(4));
    KVM_WIDE_UNROLL(4)
    for (uint32_t u = 0; u < 4; ++u) {
      out[u] = _mm512_cvtepi32_ps(_mm512_permutex2var_epi32(sums[0][u], lower, sums[1][u]));
      out[4 + u] = _mm512_cvtepi32_ps(_mm512_permutex2var_epi32(sums[0][u], upper, sums[1][u]));
    }
  }
}

// kDim: dim_v, or 0: any.
template <bool kFirst, int kBits, bool kByToken, uint32_t kDim>
[[gnu::noinline]] void values_wide(const StreamArgs& args, const KvItem& item, uint32_t row,
                                   const float* lanes, const uint8_t* const* reading) {
  using T = Tile<kRowTile>;
  constexpr uint32_t kGroups = kByToken ? 2 : 1;
  const uint32_t dim = kDim != 0 ? kDim : args.dim_v;
  const uint32_t n_blocks = dim / kCodeBlock;
  const size_t row_bytes = n_blocks * code_block_bytes(kBits);
  const uint16_t* channels = item.v_codes.channels;
  // Lane r of vector g has the weights of row r and tokens 4 g to 4 g + 3.
  static_assert(T::lane(1, 0) == 4 && T::lane(0, 4) == 16);
  __m512i of_lanes[kRowTile];
  transpose_lanes(_mm512_loadu_si512(lanes), _mm512_loadu_si512(lanes + 16),
                  _mm512_loadu_si512(lanes + 32), _mm512_loadu_si512(lanes + 48), of_lanes);
  __m512 by_token[kRowTile];
  KVM_WIDE_UNROLL(4)
  for (uint32_t r = 0; r < kRowTile; ++r)
    by_token[r] = _mm512_castsi512_ps(of_lanes[r]);
  const __m512 total = sums_of_rows(by_token);
  ByteWeights bytes[kRowTile];
  TileWords words[kGroups];
  if constexpr (!kByToken) {
    tile_words(by_token, nullptr, &words[0]);
    KVM_WIDE_UNROLL(4)
    for (uint32_t r = 0; r < kRowTile; ++r) {
      bytes[r] = {_mm512_castsi128_si512(words[0].upper[r]),
                  _mm512_castsi128_si512(words[0].lower[r])};
    }
  }
  const CodesAhead ahead(args, reading);
#pragma GCC unroll 1
  for (uint32_t b = 0; b < n_blocks; b += 2) {
    if constexpr (kByToken) {
      WideSteps steps[kGroups];
      KVM_WIDE_UNROLL(2)
      for (uint32_t group = 0; group < kGroups; ++group) {
        load_wide_steps(item.v_codes, n_blocks, b + group, &steps[group]);
        tile_words(by_token, &steps[group], &words[group]);
      }
      KVM_WIDE_UNROLL(4)
      for (uint32_t r = 0; r < kRowTile; ++r) {
        bytes[r] = {both_groups(words[0].upper[r], words[1].upper[r]),
                    both_groups(words[0].lower[r], words[1].lower[r])};
      }
    }
    constexpr size_t kBytes = 2 * kItemTokens * code_block_bytes(kBits);
    if (kFirst)
      ahead.ask(b / 2 * kBytes, kBytes);
    WideCodes codes;
    load_wide_codes<kBits>(*reading + b * code_block_bytes(kBits), row_bytes, &codes);
#pragma GCC unroll 1
    for (uint32_t pair = 0; pair < kRowTile; pair += kPair) {
      __m512i sums[kPair][2][4];
      sum_wide<kBits, kByToken>(codes, bytes + pair, sums);
      KVM_WIDE_UNROLL(2)
      for (uint32_t i = 0; i < kPair; ++i) {
        const uint32_t r = pair + i;
        __m512 ordered[8];
        order_wide<kBits>(sums[i], ordered);
        const __m512 of_all = of_row(total, r);
        float* acc = args.acc + (row + r) * static_cast<size_t>(args.acc_stride) + b * kCodeBlock;
        KVM_WIDE_UNROLL(8)
        for (uint32_t n = 0; n < 8; ++n) {
          const uint32_t channel = b * kCodeBlock + n * 16;
          const uint32_t group = kByToken ? n / 4 : 0;
          const __m512 own_step = of_row(words[group].step, r);
          __m512 a = _mm512_loadu_ps(acc + n * 16);
          if constexpr (kByToken) {
            a = _mm512_add_ps(_mm512_fmadd_ps(ordered[n], own_step, a),
                              of_row(words[group].added, r));
            if (channels != nullptr)
              a = _mm512_fmadd_ps(load_wide_params(channels + channel), of_all, a);
          } else {
            a = _mm512_fmadd_ps(_mm512_mul_ps(ordered[n], own_step),
                                load_wide_params(channels + channel), a);
            a = _mm512_fmadd_ps(load_wide_params(channels + dim + channel), of_all, a);
          }
          _mm512_storeu_ps(acc + n * 16, a);
        }
      }
    }
  }
  if (item.v_codes.b != nullptr) {
    float weights[kRowTile][kItemTokens];
    KVM_WIDE_UNROLL(4)
    for (uint32_t r = 0; r < kRowTile; ++r)
      vec::store(weights[r], by_token[r]);
    add_gear_values<kRowTile>(args, item, row, weights);
  }
}

}  // namespace
}  // namespace attention
}  // namespace kvm

#undef KVM_WIDE_UNROLL
#undef KVM_WIDE_PRAGMA

#endif  // KVM_ATTENTION_EXACT_EXACT_CODES_WIDE_H_
