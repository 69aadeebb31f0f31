// SPDX-License-Identifier: Apache-2.0
// The streaming path over rows of 4, 3 and 2 bits (codecs/low_bits.h), which are never decoded:
// codes are integers, and meet queries and weights as integers of 16 bits.
//
//   a score   sum_i q_i (scale code_i + zero)
//     by channel   q_i scale_i is a new query for each page; sum_i q_i zero_i is the page's
//     by token     scale_t sum_i q_i code_i + zero_t sum_i q_i, for each 64 channels
//     centred      the same, and the page's sum_i q_i mean_i
//     balanced     by token, of q_i factor_i, a new query for each page
//   a sum     sum_t w_t (scale code_t + zero)
//     by channel   scale_i sum_t w_t code_t + zero_i sum_t w_t
//     by token     w_t scale_t are new weights for each 64 channels, sum_t w_t zero_t is added
//     centred      the same, and mean_i sum_t w_t
//
// What codecs/gear.h adds stays in its parts: a score gets sum_k (sum_i q_i B_ki) A_tk and
// q_i delta of its outliers, a sum gets sum_k (sum_t w_t A_tk) B_ki and w_t delta of its own.
//
// exact.h has the errors. Vectors are of 256 bits in every table that has this, but for tiles of
// rows where there is VNNI (exact_codes_wide.h): the integers are the same, whatever the width.
//
// Included by exact_kernel.h; internal linkage throughout.
#ifndef KVM_ATTENTION_EXACT_EXACT_CODES_H_
#define KVM_ATTENTION_EXACT_EXACT_CODES_H_

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "attention/exact/exact_codes_parts.h"
#if defined(__AVX512VNNI__)
#include "attention/exact/exact_codes_wide.h"
#endif

namespace kvm {
namespace attention {
namespace {

// --- Scores -------------------------------------------------------------------------------------

// Sums over blocks [begin, end) of codes of kCodeTokens tokens times words.
template <int kRows, int kBits>
inline __m256i dot_codes(const uint8_t* k, size_t row_bytes, const int16_t* words, uint32_t dim,
                         uint32_t begin, uint32_t end) {
  constexpr int kT = static_cast<int>(kCodeTokens<kRows>);
  __m256i acc[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    acc[i] = _mm256_setzero_si256();
  for (uint32_t b = begin; b < end; ++b) {
    __m256i codes[kT];
#pragma GCC unroll 8
    for (int t = 0; t < kT; ++t) {
      codes[t] =
          load_codes<kBits>(k + static_cast<size_t>(t) * row_bytes + b * code_block_bytes(kBits));
    }
#pragma GCC unroll 4
    for (int plane = 0; plane < 4; ++plane) {
      __m256i x[kT];
#pragma GCC unroll 8
      for (int t = 0; t < kT; ++t)
        x[t] = code_plane<kBits>(codes[t], plane);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m256i q = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(
            words + static_cast<size_t>(r) * dim + b * kCodeBlock + plane * 16));
#pragma GCC unroll 8
        for (int t = 0; t < kT; ++t)
          acc[r * kT + t] = add_products(acc[r * kT + t], x[t], q);
      }
    }
  }
  return reduce_sums(acc);
}

// Eight scores to the lanes of a tile. token: the first.
template <int kRows>
inline void put_scores(__m256 scores, uint32_t token, float* lanes) {
  using T = Tile<kRows>;
  constexpr uint32_t kT = kCodeTokens<kRows>;
  float* to = lanes + T::lane(0, static_cast<int>(token));
  if constexpr (T::kTokens == kT || kRows == 1) {
    _mm256_storeu_ps(to, scores);
  } else {
    float each[8];
    _mm256_storeu_ps(each, scores);
    for (uint32_t r = 0; r < kRows; ++r)
      memcpy(to + r * T::kTokens, each + r * kT, kT * sizeof(float));
  }
}

// kCodeTokens numbers, once for each row.
template <int kRows>
inline __m256 load_of_tokens(const float* p) {
  if constexpr (kRows == 1)
    return _mm256_loadu_ps(p);
  return _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(p)));
}

// Adds what codecs/gear.h has beside codes to 8 scores. factors: load_factors. token: the first.
template <int kRows>
inline __m256 add_gear(const StreamArgs& args, const CodeParams& params, uint32_t tile,
                       const float* factors, uint32_t token, __m256 scores) {
  const float* terms = query_terms(args, tile) + (kTermBlock + args.dim_k / kCodeBlock) * 8;
  for (uint32_t k = 0; k < params.rank; ++k) {
    scores = _mm256_fmadd_ps(load_of_tokens<kRows>(factors + k * kItemTokens + token),
                             _mm256_loadu_ps(terms + k * 8), scores);
  }
  const int32_t slot = static_cast<int32_t>(kItemTokens + token) + params.slot;
  __m256 sparse = _mm256_loadu_ps(query_sparse(args, tile) + slot * kRows);
  if constexpr (kRows != 1)  // two tokens of four rows
    sparse = _mm256_permutevar8x32_ps(sparse, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  return _mm256_add_ps(scores, sparse);
}

template <int kRows, bool kFirst, int kBits, bool kByToken>
[[gnu::noinline]] void scores_codes(const StreamArgs& args, const KvItem& item, uint32_t row,
                                    const uint8_t* const* reading, F* out) {
  using T = Tile<kRows>;
  constexpr uint32_t kT = kCodeTokens<kRows>;
  const uint32_t dim = args.dim_k;
  const uint32_t n_blocks = dim / kCodeBlock;
  const size_t row_bytes = n_blocks * code_block_bytes(kBits);
  const int16_t* words = query_words(args, row);
  const int16_t* rests = query_rests(args, row);
  const float* terms = query_terms(args, row / kRows);
  const __m256 step = _mm256_loadu_ps(terms + kTermStep * 8);
  const __m256 limit = _mm256_loadu_ps(terms + kTermLimit * 8);
  const __m256 of_page = _mm256_loadu_ps(terms + kTermPage * 8);
  const __m256 one = _mm256_set1_ps(1.0f);
  TokenSteps steps[kByToken ? kMaxCodeDim / kCodeBlock : 1];
  if constexpr (kByToken) {
    for (uint32_t b = 0; b < n_blocks; ++b)
      load_steps(item.k_codes, n_blocks, b, &steps[b]);
  }
  const bool is_gear = item.k_codes.b != nullptr;
  float factors[kMaxCodeRank * kItemTokens];
  if (is_gear)
    load_factors(item.k_codes, factors);
  const uint8_t* k = *reading;
  const CodesAhead ahead(args, reading);
  float lanes[T::kLanes];
#pragma GCC unroll 1
  for (uint32_t t = 0; t < kItemTokens; t += kT, k += kT * row_bytes) {
    if (kFirst)
      ahead.ask(t * row_bytes, kT * row_bytes);
    __m256 scores = of_page;
    for (uint32_t b = 0; b < n_blocks; b += kByToken ? 1 : n_blocks) {
      const uint32_t end = kByToken ? b + 1 : n_blocks;
      __m256 sum = _mm256_cvtepi32_ps(dot_codes<kRows, kBits>(k, row_bytes, words, dim, b, end));
      const __m256 scale = kByToken ? load_of_tokens<kRows>(steps[b].scale + t) : one;
      const __m256 is_far = _mm256_cmp_ps(scale, limit, _CMP_GT_OQ);
      if (_mm256_movemask_ps(is_far) != 0) {
        const __m256 rest =
            _mm256_cvtepi32_ps(dot_codes<kRows, kBits>(k, row_bytes, rests, dim, b, end));
        sum = _mm256_fmadd_ps(_mm256_and_ps(rest, is_far), _mm256_set1_ps(kRestStep), sum);
      }
      if constexpr (kByToken) {
        scores = _mm256_fmadd_ps(sum, _mm256_mul_ps(scale, step), scores);
        scores = _mm256_fmadd_ps(load_of_tokens<kRows>(steps[b].zero + t),
                                 _mm256_loadu_ps(terms + (kTermBlock + b) * 8), scores);
      } else {
        scores = _mm256_fmadd_ps(sum, step, scores);
      }
    }
    if (is_gear)
      scores = add_gear<kRows>(args, item.k_codes, row / kRows, factors, t, scores);
    put_scores<kRows>(scores, t, lanes);
  }
#pragma GCC unroll 16
  for (int g = 0; g < T::kGroups; ++g)
    out[g] = vec::load(lanes + g * kW);
}

template <int kRows, bool kFirst>
inline void scores_of_codes(const StreamArgs& args, const KvItem& item, uint32_t row,
                            const uint8_t* const* reading, F* out) {
  return with_kind(item.elem_k, item.k_codes, [&]<int kBits, bool kByToken>() {
#if defined(__AVX512VNNI__)
    if constexpr (kRows == kRowTile) {
      if (args.dim_k == kWideBlock)
        return scores_wide<kFirst, kBits, kByToken, kWideBlock>(args, item, row, reading, out);
      if (is_wide<kRows>(args.dim_k))
        return scores_wide<kFirst, kBits, kByToken, 0>(args, item, row, reading, out);
    }
#endif
    scores_codes<kRows, kFirst, kBits, kByToken>(args, item, row, reading, out);
  });
}

// --- Values -------------------------------------------------------------------------------------

inline __m256i pair_of(const WordWeights& weights, uint32_t token) {
  int32_t pair;
  memcpy(&pair, weights.words + token, sizeof pair);
  return _mm256_set1_epi32(pair);
}

// Sums of an item over tokens: vectors `first` to `first` + kVecs, of 8, of 64 channels. Vector
// 4 h + n has plane n of the words that unpacking puts into half h.
template <int kRows, int kBits, int kVecs>
inline void sum_codes(const uint8_t* v, size_t row_bytes, const WordWeights* weights, int first,
                      __m256i* sums) {
  __m256i acc[kRows][kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i)
      acc[r][i] = _mm256_setzero_si256();
  }
  // Passes over the same codes, else, are merged into one that has no registers for its sums.
  asm("" : "+r"(v));
  const auto add_pair = [&](uint32_t t) __attribute__((always_inline)) {
    const __m256i even = load_codes<kBits>(v);
    const __m256i odd = load_codes<kBits>(v + row_bytes);
    v += 2 * row_bytes;
    __m256i x[kVecs];
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i) {
      x[i] = code_plane<kBits>(
          first + i < 4 ? _mm256_unpacklo_epi16(even, odd) : _mm256_unpackhi_epi16(even, odd),
          (first + i) % 4);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m256i w = pair_of(weights[r], t);
#pragma GCC unroll 8
      for (int i = 0; i < kVecs; ++i)
        acc[r][i] = add_products(acc[r][i], x[i], w);
    }
  };
#pragma GCC unroll 1
  for (uint32_t t = 0; t < kItemTokens; t += 4) {
    add_pair(t);
    add_pair(t + 2);
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i)
      sums[r * 8 + first + i] = acc[r][i];
  }
}

// Brings the 8 vectors of sums of 64 channels into the order of channels.
template <int kBits>
inline void order_sums(const __m256i* sums, __m256* out) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    __m256 a[4];
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n)
      a[n] = _mm256_cvtepi32_ps(sums[half * 4 + n]);
    const __m256d lo01 = _mm256_castps_pd(_mm256_unpacklo_ps(a[0], a[1]));
    const __m256d hi01 = _mm256_castps_pd(_mm256_unpackhi_ps(a[0], a[1]));
    const __m256d lo23 = _mm256_castps_pd(_mm256_unpacklo_ps(a[2], a[3]));
    const __m256d hi23 = _mm256_castps_pd(_mm256_unpackhi_ps(a[2], a[3]));
    const __m256 t0 = _mm256_castpd_ps(_mm256_unpacklo_pd(lo01, lo23));
    const __m256 t1 = _mm256_castpd_ps(_mm256_unpackhi_pd(lo01, lo23));
    const __m256 t2 = _mm256_castpd_ps(_mm256_unpacklo_pd(hi01, hi23));
    const __m256 t3 = _mm256_castpd_ps(_mm256_unpackhi_pd(hi01, hi23));
    if constexpr (kLoadedBits<kBits> == 4) {
      out[half * 2] = _mm256_permute2f128_ps(t0, t1, 0x20);
      out[half * 2 + 1] = _mm256_permute2f128_ps(t2, t3, 0x20);
      out[half * 2 + 4] = _mm256_permute2f128_ps(t0, t1, 0x31);
      out[half * 2 + 5] = _mm256_permute2f128_ps(t2, t3, 0x31);
    } else {
      out[half * 4] = t0;
      out[half * 4 + 1] = t1;
      out[half * 4 + 2] = t2;
      out[half * 4 + 3] = t3;
    }
  }
}

template <int kRows, bool kFirst, int kBits, bool kByToken>
[[gnu::noinline]] void values_codes(const StreamArgs& args, const KvItem& item, uint32_t row,
                                    const float* lanes, const uint8_t* const* reading) {
  using T = Tile<kRows>;
  constexpr int kVecs = 8 / kRows;
  const uint32_t n_blocks = args.dim_v / kCodeBlock;
  const size_t row_bytes = n_blocks * code_block_bytes(kBits);
  const uint16_t* channels = item.v_codes.channels;
  float weights[kRows][kItemTokens];
  float total[kRows];
  WordWeights words[kRows];
  for (int r = 0; r < kRows; ++r) {
    for (int t = 0; t < static_cast<int>(kItemTokens); t += T::kTokens)
      memcpy(weights[r] + t, lanes + T::lane(r, t), T::kTokens * sizeof(float));
    total[r] = sum_of_item(weights[r]);
    if (!kByToken)
      words[r] = word_weights(weights[r], nullptr);
  }
  const CodesAhead ahead(args, reading);
  for (uint32_t b = 0; b < n_blocks; ++b) {
    if constexpr (kByToken) {
      TokenSteps steps;
      load_steps(item.v_codes, n_blocks, b, &steps);
      for (int r = 0; r < kRows; ++r)
        words[r] = word_weights(weights[r], &steps);
    }
    const uint8_t* v = *reading + b * code_block_bytes(kBits);
    if (kFirst)
      ahead.ask(b * kItemTokens * code_block_bytes(kBits), kItemTokens * code_block_bytes(kBits));
    __m256i sums[kRows * 8];
#pragma GCC unroll 4
    for (int first = 0; first < 8; first += kVecs)
      sum_codes<kRows, kBits, kVecs>(v, row_bytes, words, first, sums);
    for (int r = 0; r < kRows; ++r) {
      __m256 ordered[8];
      order_sums<kBits>(sums + r * 8, ordered);
      const __m256 step = _mm256_set1_ps(words[r].step);
      const __m256 added = _mm256_set1_ps(words[r].added);
      const __m256 of_all = _mm256_set1_ps(total[r]);
      float* acc = args.acc +
                   (row + static_cast<uint32_t>(r)) * static_cast<size_t>(args.acc_stride) +
                   b * kCodeBlock;
#pragma GCC unroll 8
      for (uint32_t i = 0; i < 8; ++i) {
        const uint32_t channel = b * kCodeBlock + i * 8;
        __m256 a = _mm256_loadu_ps(acc + i * 8);
        if constexpr (kByToken) {
          a = _mm256_add_ps(_mm256_fmadd_ps(ordered[i], step, a), added);
          if (channels != nullptr)
            a = _mm256_fmadd_ps(load_params(channels + channel), of_all, a);
        } else {
          a = _mm256_fmadd_ps(_mm256_mul_ps(ordered[i], step), load_params(channels + channel), a);
          a = _mm256_fmadd_ps(load_params(channels + args.dim_v + channel), of_all, a);
        }
        _mm256_storeu_ps(acc + i * 8, a);
      }
    }
  }
  if (item.v_codes.b != nullptr)
    add_gear_values<kRows>(args, item, row, weights);
}

template <int kRows, bool kFirst>
inline void values_of_codes(const StreamArgs& args, const KvItem& item, uint32_t row,
                            const float* lanes, const uint8_t* const* reading) {
  return with_kind(item.elem_v, item.v_codes, [&]<int kBits, bool kByToken>() {
#if defined(__AVX512VNNI__)
    if constexpr (kRows == kRowTile) {
      if (args.dim_v == kWideBlock)
        return values_wide<kFirst, kBits, kByToken, kWideBlock>(args, item, row, lanes, reading);
      if (is_wide<kRows>(args.dim_v))
        return values_wide<kFirst, kBits, kByToken, 0>(args, item, row, lanes, reading);
    }
#endif
    values_codes<kRows, kFirst, kBits, kByToken>(args, item, row, lanes, reading);
  });
}

}  // namespace
}  // namespace attention
}  // namespace kvm

#endif  // KVM_ATTENTION_EXACT_EXACT_CODES_H_
