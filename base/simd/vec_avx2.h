// SPDX-License-Identifier: Apache-2.0
// The vector wrapper for AVX2 + FMA + F16C. vec_scalar.h explains the operations.
#ifndef KVM_BASE_SIMD_VEC_AVX2_H_
#define KVM_BASE_SIMD_VEC_AVX2_H_

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#include "base/simd/elem.h"

namespace kvm {
namespace {
namespace vec {

typedef __m256 F;

constexpr int kWidth = 8;
constexpr int kTileRows = 3;
constexpr int kTileVecs = 4;
constexpr bool kHasBf16Dot = false;
constexpr bool kHasWordDot = false;

inline F set1(float x) { return _mm256_set1_ps(x); }
inline F zero() { return _mm256_setzero_ps(); }
inline F load(const float* p) { return _mm256_loadu_ps(p); }
template <int kCount>
inline F load_repeated(const float* p) {
  if constexpr (kCount == 8)
    return load(p);
  return _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(p)));
}
inline void store(float* p, F a) { _mm256_storeu_ps(p, a); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline F keep_ge(F x, F bound, F a) {
  return _mm256_and_ps(_mm256_cmp_ps(x, bound, _CMP_GE_OQ), a);
}
inline bool any_gt(F a, F b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }
inline F round_nearest(F a) {
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline F scale_pow2(F a, F n) {
  const __m256i bits =
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(a, _mm256_castsi256_ps(bits));
}

// Eight e4m3 codes as fp16, 2^-8 of their values: the exponent keeps its place, subnormals too.
inline __m128i f8_to_halves(__m128i codes) {
  const __m128i words = _mm_slli_epi16(_mm_cvtepi8_epi16(codes), 7);
  return _mm_and_si128(words, _mm_set1_epi16((int16_t)0xbfff));
}

template <int kElem>
inline F load_as(const void* p, unsigned i) {
  if constexpr (kElem == kElemF32) {
    return _mm256_loadu_ps(static_cast<const float*>(p) + i);
  } else if constexpr (kElem == kElemI8) {
    const __m128i e =
        _mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const int8_t*>(p) + i));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(e));
  } else if constexpr (kElem == kElemF8) {
    const __m128i e =
        _mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const uint8_t*>(p) + i));
    return _mm256_cvtph_ps(f8_to_halves(e));
  } else {
    const __m128i e =
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(p) + i));
    if constexpr (kElem == kElemF16) {
      return _mm256_cvtph_ps(e);
    } else {
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(e), 16));
    }
  }
}
// Never needed: rows are multiples of 8 elements.
template <int kElem>
inline F load_as_n(const void* p, unsigned i, unsigned) {
  return load_as<kElem>(p, i);
}

inline F reduce(const F* a) {
  const F t0 = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
  const F t1 = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(t0, t1, 0x20), _mm256_permute2f128_ps(t0, t1, 0x31));
}
inline void transpose(F* a) {
  F b[8];
  for (int i = 0; i < 8; i += 4) {
    const __m256d lo0 = _mm256_castps_pd(_mm256_unpacklo_ps(a[i], a[i + 1]));
    const __m256d hi0 = _mm256_castps_pd(_mm256_unpackhi_ps(a[i], a[i + 1]));
    const __m256d lo1 = _mm256_castps_pd(_mm256_unpacklo_ps(a[i + 2], a[i + 3]));
    const __m256d hi1 = _mm256_castps_pd(_mm256_unpackhi_ps(a[i + 2], a[i + 3]));
    b[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(lo0, lo1));
    b[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(lo0, lo1));
    b[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(hi0, hi1));
    b[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(hi0, hi1));
  }
  for (int j = 0; j < 4; ++j) {
    a[j] = _mm256_permute2f128_ps(b[j], b[j + 4], 0x20);
    a[j + 4] = _mm256_permute2f128_ps(b[j], b[j + 4], 0x31);
  }
}
inline F swap_1(F a) { return _mm256_permute_ps(a, 0xB1); }
inline F swap_2(F a) { return _mm256_permute_ps(a, 0x4E); }
inline F swap_4(F a) { return _mm256_permute2f128_ps(a, a, 0x01); }
template <int kGroup>
inline F group_max(F a) {
  if constexpr (kGroup >= 2)
    a = max(a, swap_1(a));
  if constexpr (kGroup >= 4)
    a = max(a, swap_2(a));
  if constexpr (kGroup >= 8)
    a = max(a, swap_4(a));
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
  return a;
}
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_l2(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace vec
}  // namespace
}  // namespace kvm

#endif  // KVM_BASE_SIMD_VEC_AVX2_H_
