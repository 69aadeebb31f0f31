// SPDX-License-Identifier: Apache-2.0
// The streaming path over rows of 4 and 2 bits (codecs/low_bits.h), which are never decoded: codes
// are integers, and meet queries and weights as integers of 16 bits.
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
// exact.h has the errors. Vectors are of 256 bits in every table that has this: the integers are
// the same, whatever the width of its floats.
//
// Included by exact_kernel.h; internal linkage throughout.
#ifndef KVM_ATTENTION_EXACT_EXACT_CODES_H_
#define KVM_ATTENTION_EXACT_EXACT_CODES_H_

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

// The codes of 64 channels as 16 words: plane n of a word is its code at bit n * kBits, n < 4, of
// channel 4 word + n. Of 2 bits, of 8 word + n, and behind the eighth word 8 (word - 8) + 4 + n.
template <int kBits>
inline __m256i load_codes(const uint8_t* p) {
  if constexpr (kBits == 4) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  } else {
    const __m256i twice =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_blend_epi32(twice, _mm256_srli_epi16(twice, 8), 0xf0);
  }
}
template <int kBits>
inline __m256i code_plane(__m256i codes, int plane) {
  return _mm256_and_si256(_mm256_srli_epi16(codes, plane * kBits),
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

// Makes the query of one row, whose folded channels are given, into words and rests.
template <int kBits>
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
    put_planes<kBits>(in_order[0], words + b);
    if (rests != nullptr)
      put_planes<kBits>(in_order[1], rests + b);
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
    put_query<kBits>(folded, dim, step, query_words(args, row + r),
                     rests ? query_rests(args, row + r) : nullptr);
    put_term(terms, kTermStep, r, kT, step);
    put_term(terms, kTermLimit, r, kT, limit);
    put_term(terms, kTermPage, r, kT, sum_of_8(of_page));
  }
  if (item.k_codes.b != nullptr)
    fold_gear<kRows>(args, item, row);
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
  for (uint32_t row = 0; row < args.q.rows; row += kRows) {
    if (item.elem_k == kElemCodes4) {
      fold_query<kRows, 4>(args, item, row);
    } else {
      fold_query<kRows, 2>(args, item, row);
    }
  }
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
  const bool by_token = item.k_codes.steps != nullptr;
  if (item.elem_k == kElemCodes4) {
    return by_token ? scores_codes<kRows, kFirst, 4, true>(args, item, row, reading, out)
                    : scores_codes<kRows, kFirst, 4, false>(args, item, row, reading, out);
  }
  return by_token ? scores_codes<kRows, kFirst, 2, true>(args, item, row, reading, out)
                  : scores_codes<kRows, kFirst, 2, false>(args, item, row, reading, out);
}

// --- Values -------------------------------------------------------------------------------------

// The weights of a row over an item as words.
struct WordWeights {
  int16_t words[kItemTokens];
  float step;   // what 1 of a word is
  float added;  // to each sum
};

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
    if constexpr (kBits == 4) {
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
    total[r] =
        sum_of_8(_mm256_add_ps(_mm256_loadu_ps(weights[r]), _mm256_loadu_ps(weights[r] + 8)));
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
  const bool by_token = item.v_codes.steps != nullptr;
  if (item.elem_v == kElemCodes4) {
    return by_token ? values_codes<kRows, kFirst, 4, true>(args, item, row, lanes, reading)
                    : values_codes<kRows, kFirst, 4, false>(args, item, row, lanes, reading);
  }
  return by_token ? values_codes<kRows, kFirst, 2, true>(args, item, row, lanes, reading)
                  : values_codes<kRows, kFirst, 2, false>(args, item, row, lanes, reading);
}

}  // namespace
}  // namespace attention
}  // namespace kvm

#endif  // KVM_ATTENTION_EXACT_EXACT_CODES_H_
