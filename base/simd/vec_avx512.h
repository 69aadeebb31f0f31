// SPDX-License-Identifier: Apache-2.0
// The vector wrapper for AVX-512 (F + BW + DQ + VL), with the bf16 dot product where the file that
// includes it is compiled for AVX512_BF16. vec_scalar.h explains the operations.
//
// The bf16 part, all in natural element order:
//   load_pairs(p)              32 bf16 elements
//   load_as_pairs<kElem>(p, i) 32 elements from element i of a row of bf16, int8 or fp8
//   load_as_pairs_n<kElem>(p, i, n)  the first n of them, as load_pairs_n
//   load_pairs_n(p, n)         the first n of them, n a multiple of 8 below 32; the rest is 0
//   interleave_lo/hi(a, b)     a0 b0 a1 b1 ... of elements 0 to 15 / 16 to 31
//   set1_pair(p)               the two bf16 at p, 16 times
//   dot(c, a, b)               lane i = c_i + a_2i * b_2i + a_2i+1 * b_2i+1; denormals count as 0
//   store_rounded(p, a)        a as 16 bf16, nearest even; returns the stored values as floats
// The part for int8 rows, where the file is compiled for AVX512_VNNI; I is 16 integers of 32 bits
// or 32 of 16 (words):
//   load_i8_words(p), _n       32 int8 as words; the first n of them, n a multiple of 8
//   load_byte_pairs(x, y, n, lo, hi)   words x_i y_i side by side, for n <= 32 channels in an
//                              order that split_pair_sums undoes
//   set1_words(p)              the two words at p, 16 times
//   dot_words(c, a, b)         lane i = c_i + a_2i * b_2i + a_2i+1 * b_2i+1
//   word_step(top, inverse)    for weights up to `top` (bits of floats): the power of two that is 1
//                              of a word, and 1 / it; NaN where top is
//   store_words(p, a)          a, rounded to nearest even, as 16 words; saturates
#ifndef KVM_BASE_SIMD_VEC_AVX512_H_
#define KVM_BASE_SIMD_VEC_AVX512_H_

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#include "base/simd/elem.h"

namespace kvm {
namespace {
namespace vec {

typedef __m512 F;

constexpr int kWidth = 16;
constexpr int kTileRows = 6;
constexpr int kTileVecs = 4;
#if defined(__AVX512BF16__)
constexpr bool kHasBf16Dot = true;
#else
constexpr bool kHasBf16Dot = false;
#endif
#if defined(__AVX512VNNI__)
constexpr bool kHasWordDot = true;
#else
constexpr bool kHasWordDot = false;
#endif

inline F set1(float x) { return _mm512_set1_ps(x); }
inline F zero() { return _mm512_setzero_ps(); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
template <int kCount>
inline F load_repeated(const float* p) {
  if constexpr (kCount == 16)
    return load(p);
  return _mm512_broadcast_f32x4(_mm_loadu_ps(p));
}
inline void store(float* p, F a) { _mm512_storeu_ps(p, a); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F keep_ge(F x, F bound, F a) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, bound, _CMP_GE_OQ), a);
}
inline bool any_gt(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
inline F round_nearest(F a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline F scale_pow2(F a, F n) { return _mm512_scalef_ps(a, n); }

// Sixteen e4m3 codes as fp16, 2^-8 of their values: the exponent keeps its place, subnormals too.
inline __m256i f8_to_halves(__m128i codes) {
  const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
  return _mm256_and_si256(words, _mm256_set1_epi16((int16_t)0xbfff));
}

template <int kElem>
inline F load_as(const void* p, unsigned i) {
  if constexpr (kElem == kElemF32) {
    return _mm512_loadu_ps(static_cast<const float*>(p) + i);
  } else if constexpr (kElem == kElemI8) {
    const __m128i e =
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const int8_t*>(p) + i));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(e));
  } else if constexpr (kElem == kElemF8) {
    const __m128i e =
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint8_t*>(p) + i));
    return _mm512_cvtph_ps(f8_to_halves(e));
  } else {
    const __m256i e =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(p) + i));
    if constexpr (kElem == kElemF16) {
      return _mm512_cvtph_ps(e);
    } else {
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(e), 16));
    }
  }
}
// n is 8: rows are multiples of 8 elements.
template <int kElem>
inline F load_as_n(const void* p, unsigned i, unsigned) {
  if constexpr (kElem == kElemF32) {
    return _mm512_maskz_loadu_ps(0xff, static_cast<const float*>(p) + i);
  } else if constexpr (kElem == kElemI8) {
    const __m128i e =
        _mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const int8_t*>(p) + i));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(e));
  } else if constexpr (kElem == kElemF8) {
    const __m128i e =
        _mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const uint8_t*>(p) + i));
    return _mm512_cvtph_ps(f8_to_halves(e));
  } else {
    const __m256i e = _mm256_zextsi128_si256(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(p) + i)));
    if constexpr (kElem == kElemF16) {
      return _mm512_cvtph_ps(e);
    } else {
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(e), 16));
    }
  }
}

inline F add_lo_hi(F a, F b) { return add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); }
inline F add_pairs(F a, F b) {
  const __m512d x = _mm512_castps_pd(a);
  const __m512d y = _mm512_castps_pd(b);
  return add(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
             _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}
inline F reduce_4(const F* a) { return add_pairs(add_lo_hi(a[0], a[1]), add_lo_hi(a[2], a[3])); }
inline F reduce(const F* a) {
  const F u0 = reduce_4(a);
  const F u1 = reduce_4(a + 4);
  const F u2 = reduce_4(a + 8);
  const F u3 = reduce_4(a + 12);
  const F v0 = add(_mm512_shuffle_f32x4(u0, u1, 0x44), _mm512_shuffle_f32x4(u0, u1, 0xEE));
  const F v1 = add(_mm512_shuffle_f32x4(u2, u3, 0x44), _mm512_shuffle_f32x4(u2, u3, 0xEE));
  return add(_mm512_shuffle_f32x4(v0, v1, 0x88), _mm512_shuffle_f32x4(v0, v1, 0xDD));
}
// 4 x 4 blocks inside 128-bit lanes, then the lanes themselves. Moves bits, whatever they mean.
inline void transpose(F* a) {
  F b[16];
  for (int i = 0; i < 16; i += 4) {
    const __m512d lo0 = _mm512_castps_pd(_mm512_unpacklo_ps(a[i], a[i + 1]));
    const __m512d hi0 = _mm512_castps_pd(_mm512_unpackhi_ps(a[i], a[i + 1]));
    const __m512d lo1 = _mm512_castps_pd(_mm512_unpacklo_ps(a[i + 2], a[i + 3]));
    const __m512d hi1 = _mm512_castps_pd(_mm512_unpackhi_ps(a[i + 2], a[i + 3]));
    b[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(lo0, lo1));
    b[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(lo0, lo1));
    b[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(hi0, hi1));
    b[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(hi0, hi1));
  }
  for (int j = 0; j < 4; ++j) {
    const F p = _mm512_shuffle_f32x4(b[j], b[j + 4], 0x88);
    const F q = _mm512_shuffle_f32x4(b[j + 8], b[j + 12], 0x88);
    const F r = _mm512_shuffle_f32x4(b[j], b[j + 4], 0xDD);
    const F s = _mm512_shuffle_f32x4(b[j + 8], b[j + 12], 0xDD);
    a[j] = _mm512_shuffle_f32x4(p, q, 0x88);
    a[j + 4] = _mm512_shuffle_f32x4(r, s, 0x88);
    a[j + 8] = _mm512_shuffle_f32x4(p, q, 0xDD);
    a[j + 12] = _mm512_shuffle_f32x4(r, s, 0xDD);
  }
}
inline F swap_1(F a) { return _mm512_permute_ps(a, 0xB1); }
inline F swap_2(F a) { return _mm512_permute_ps(a, 0x4E); }
inline F swap_4(F a) { return _mm512_shuffle_f32x4(a, a, 0xB1); }
inline F swap_8(F a) { return _mm512_shuffle_f32x4(a, a, 0x4E); }
template <int kGroup>
inline F group_max(F a) {
  if constexpr (kGroup >= 2)
    a = max(a, swap_1(a));
  if constexpr (kGroup >= 4)
    a = max(a, swap_2(a));
  if constexpr (kGroup >= 8)
    a = max(a, swap_4(a));
  if constexpr (kGroup >= 16)
    a = max(a, swap_8(a));
  return a;
}
template <int kGroup>
inline F group_sum(F a) {
  if constexpr (kGroup >= 2)
    a = add(a, swap_1(a));
  if constexpr (kGroup >= 4)
    a = add(a, swap_2(a));
  if constexpr (kGroup >= 8)
    a = add(a, swap_4(a));
  if constexpr (kGroup >= 16)
    a = add(a, swap_8(a));
  return a;
}
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_l2(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

#if defined(__AVX512BF16__)
typedef __m512bh B;

inline B load_pairs(const uint16_t* p) { return (B)_mm512_loadu_si512(p); }
inline B load_pairs_n(const uint16_t* p, unsigned n) {
  return (B)_mm512_maskz_loadu_epi16((__mmask32)((1u << n) - 1), p);
}
// 32 e4m3 codes, sign-extended to words, as bf16, 2^-8 of their values. Subnormal codes are normal
// numbers of bf16, and the dot product would take what is not for 0: they are looked up, by m.
inline B f8_to_pairs(__m512i x) {
  const __m512i subnormals = _mm512_castsi128_si512(
      _mm_set_epi16(0x3860, 0x3840, 0x3820, 0x3800, 0x37c0, 0x3780, 0x3700, 0));
  // (x << 4 & 0x07f0) | 112 << 7
  __m512i magnitude = _mm512_ternarylogic_epi32(_mm512_slli_epi16(x, 4), _mm512_set1_epi16(0x07f0),
                                                _mm512_set1_epi16(0x3800), 0xea);
  magnitude = _mm512_mask_permutexvar_epi16(
      magnitude, _mm512_testn_epi16_mask(x, _mm512_set1_epi16(0x78)), x, subnormals);
  // The sign of x, the rest of magnitude.
  return (B)_mm512_ternarylogic_epi32(x, magnitude, _mm512_set1_epi16((int16_t)0x8000), 0xe4);
}
template <int kElem>
inline B load_as_pairs(const void* p, size_t i) {
  if constexpr (kElem == kElemBf16) {
    return load_pairs(static_cast<const uint16_t*>(p) + i);
  } else if constexpr (kElem == kElemF8) {
    const uint8_t* e = static_cast<const uint8_t*>(p) + i;
    return f8_to_pairs(
        _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(e))));
  } else {
    const int8_t* e = static_cast<const int8_t*>(p) + i;
    return _mm512_cvtne2ps_pbh(load_as<kElemI8>(e, 16), load_as<kElemI8>(e, 0));
  }
}
template <int kElem>
inline B load_as_pairs_n(const void* p, size_t i, unsigned n) {
  if constexpr (kElem == kElemBf16) {
    return load_pairs_n(static_cast<const uint16_t*>(p) + i, n);
  } else if constexpr (kElem == kElemF8) {
    return f8_to_pairs(_mm512_cvtepi8_epi16(
        _mm256_maskz_loadu_epi8((__mmask32)((1u << n) - 1), static_cast<const uint8_t*>(p) + i)));
  } else {
    const __m256i e =
        _mm256_maskz_loadu_epi8((__mmask32)((1u << n) - 1), static_cast<const int8_t*>(p) + i);
    const F low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(e)));
    const F high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(e, 1)));
    return _mm512_cvtne2ps_pbh(high, low);
  }
}
inline B no_pairs() { return (B)_mm512_setzero_si512(); }
inline void store_pairs(uint16_t* p, B a) { _mm512_storeu_si512(p, (__m512i)a); }
inline F as_floats(B a) { return (F)a; }
inline B interleave_lo(B a, B b) {
  const __m512i index = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40,
                                         8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  return (B)_mm512_permutex2var_epi16((__m512i)a, index, (__m512i)b);
}
inline B interleave_hi(B a, B b) {
  const __m512i index =
      _mm512_set_epi16(63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24, 55, 23, 54,
                       22, 53, 21, 52, 20, 51, 19, 50, 18, 49, 17, 48, 16);
  return (B)_mm512_permutex2var_epi16((__m512i)a, index, (__m512i)b);
}
inline B set1_pair(const uint16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, sizeof pair);
  return (B)_mm512_set1_epi32(pair);
}
inline F dot(F c, B a, B b) { return _mm512_dpbf16_ps(c, a, b); }
inline F store_rounded(uint16_t* p, F a) {
  const __m256i e = (__m256i)_mm512_cvtneps_pbh(a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), e);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(e), 16));
}
#endif

#if defined(__AVX512VNNI__)
typedef __m512i I;

inline I zero_i() { return _mm512_setzero_si512(); }
inline I as_ints(F a) { return _mm512_castps_si512(a); }
inline F to_floats(I a) { return _mm512_cvtepi32_ps(a); }
inline I max_i(I a, I b) { return _mm512_max_epi32(a, b); }
inline I load_words(const int16_t* p) { return _mm512_loadu_si512(p); }
inline I load_i8_words(const void* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
inline __mmask32 first_bytes(unsigned n) {
  return n >= 32 ? 0xffffffffu : (__mmask32)((1u << n) - 1);
}
inline I load_i8_words_n(const void* p, unsigned n) {
  return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(first_bytes(n), p));
}
inline void load_byte_pairs(const uint8_t* x, const uint8_t* y, unsigned n, I* lo, I* hi) {
  __m256i a, b;
  if (n == 32) {
    a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(y));
  } else {
    a = _mm256_maskz_loadu_epi8(first_bytes(n), x);
    b = _mm256_maskz_loadu_epi8(first_bytes(n), y);
  }
  *lo = _mm512_cvtepi8_epi16(_mm256_unpacklo_epi8(a, b));
  *hi = _mm512_cvtepi8_epi16(_mm256_unpackhi_epi8(a, b));
}
// Channels 0-7 and 16-23 are in lo, the others in hi.
inline void split_pair_sums(F lo, F hi, F* first, F* second) {
  *first = _mm512_shuffle_f32x4(lo, hi, 0x44);
  *second = _mm512_shuffle_f32x4(lo, hi, 0xEE);
}
inline I set1_words(const int16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, sizeof pair);
  return _mm512_set1_epi32(pair);
}
inline I dot_words(I c, I a, I b) { return _mm512_dpwssd_epi32(c, a, b); }
inline I add_i(I a, I b) { return _mm512_add_epi32(a, b); }
// As reduce; integers need no order.
inline I reduce_i(const I* a) {
  I u[4];
  for (int i = 0; i < 4; ++i) {
    const I* b = a + 4 * i;
    const I x = add_i(_mm512_unpacklo_epi32(b[0], b[1]), _mm512_unpackhi_epi32(b[0], b[1]));
    const I y = add_i(_mm512_unpacklo_epi32(b[2], b[3]), _mm512_unpackhi_epi32(b[2], b[3]));
    u[i] = add_i(_mm512_unpacklo_epi64(x, y), _mm512_unpackhi_epi64(x, y));
  }
  const I v0 =
      add_i(_mm512_shuffle_i32x4(u[0], u[1], 0x44), _mm512_shuffle_i32x4(u[0], u[1], 0xEE));
  const I v1 =
      add_i(_mm512_shuffle_i32x4(u[2], u[3], 0x44), _mm512_shuffle_i32x4(u[2], u[3], 0xEE));
  return add_i(_mm512_shuffle_i32x4(v0, v1, 0x88), _mm512_shuffle_i32x4(v0, v1, 0xDD));
}
// kWidth / kCount floats, kCount times each; kCount = 4 or 16.
template <int kCount>
inline F spread(const float* p) {
  if constexpr (kCount == 16)
    return set1(*p);
  const __m512i index = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  return _mm512_permutexvar_ps(index, _mm512_castps128_ps512(_mm_loadu_ps(p)));
}
template <int kGroup>
inline I group_max_i(I a) {
  a = max_i(a, _mm512_shuffle_epi32(a, (_MM_PERM_ENUM)0xB1));
  a = max_i(a, _mm512_shuffle_epi32(a, (_MM_PERM_ENUM)0x4E));
  if constexpr (kGroup == 16) {
    a = max_i(a, _mm512_shuffle_i32x4(a, a, 0xB1));
    a = max_i(a, _mm512_shuffle_i32x4(a, a, 0x4E));
  }
  return a;
}
// 2^(e - 14) for 2^e <= top < 2^(e + 1): words up to 2^15, of which 2^15 itself saturates. e is at
// least -107, so that all of these are normal numbers.
inline F word_step(I top, F* inverse) {
  const I exponent = max_i(_mm512_srli_epi32(top, 23), _mm512_set1_epi32(20));
  const F step =
      _mm512_castsi512_ps(_mm512_slli_epi32(add_i(exponent, _mm512_set1_epi32(-14)), 23));
  *inverse = _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(268), exponent), 23));
  return fma(_mm512_castsi512_ps(top), zero(), step);
}
inline void store_words(int16_t* p, F a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a)));
}
#endif

}  // namespace vec
}  // namespace
}  // namespace kvm

#endif  // KVM_BASE_SIMD_VEC_AVX512_H_
