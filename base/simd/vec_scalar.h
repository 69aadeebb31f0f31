// SPDX-License-Identifier: Apache-2.0
// The vector wrapper for any machine: four floats in a compiler vector, no instruction-set flags.
//
// A wrapper gives kernels one float vector F of kWidth lanes and the few operations they need; the
// same names, with the same meaning, stand in vec_avx2.h and vec_avx512.h. Everything has internal
// linkage: a kernel file includes exactly one wrapper and is compiled with that wrapper's flags.
//
//   load_as<kElem>(p, i)        kWidth elements from element i of the row p, as floats; of int8 and
//                               fp8 rows without their scale, in units of elem_unit(kElem)
//   load_as_n<kElem>(p, i, n)   the first n of them, n a multiple of 8 below kWidth; the rest is 0
//   load_repeated<n>(p)         n floats, kWidth / n times; n = kWidth or kWidth / 4
//   fma(a, b, c)                a * b + c, fused where the hardware fuses
//   min, max(a, b)              b where either is NaN
//   keep_ge(x, bound, a)        x >= bound ? a : 0
//   scale_pow2(a, n)            a * 2^n for integral n in [-126, 127]
//   reduce(a)                   lane i = sum of the lanes of a[i]; the same tree for each i
//   transpose(a)                kWidth vectors of kWidth lanes, in place
//   group_max<n>, group_sum<n>  over aligned groups of n lanes, the result in every lane
//   prefetch(p)                 one cache line, into the first level
//   prefetch_l2(p)              the same, into the second
#ifndef KVM_BASE_SIMD_VEC_SCALAR_H_
#define KVM_BASE_SIMD_VEC_SCALAR_H_

#include <stddef.h>
#include <stdint.h>

#include "base/simd/elem.h"

namespace kvm {
namespace {
namespace vec {

typedef float F __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));

constexpr int kWidth = 4;
constexpr int kTileRows = 3;  // register tile of the blocked product: rows by vectors
constexpr int kTileVecs = 2;
constexpr bool kHasBf16Dot = false;
constexpr bool kHasWordDot = false;

inline F set1(float x) { return F{x, x, x, x}; }
inline F zero() { return set1(0.0f); }
inline F load(const float* p) {
  F r;
  __builtin_memcpy(&r, p, sizeof r);
  return r;
}
template <int kCount>
inline F load_repeated(const float* p) {
  return kCount == 4 ? load(p) : set1(*p);
}
inline void store(float* p, F a) { __builtin_memcpy(p, &a, sizeof a); }
inline F add(F a, F b) { return a + b; }
inline F sub(F a, F b) { return a - b; }
inline F mul(F a, F b) { return a * b; }
inline F div(F a, F b) { return a / b; }
inline F fma(F a, F b, F c) { return a * b + c; }
inline F select(I mask, F a, F b) { return (F)(((I)a & mask) | ((I)b & ~mask)); }
inline F max(F a, F b) { return select(a > b, a, b); }
inline F min(F a, F b) { return select(a < b, a, b); }
inline F keep_ge(F x, F bound, F a) { return (F)((I)a & (x >= bound)); }
inline bool any_gt(F a, F b) {
  const I m = a > b;
  return (m[0] | m[1] | m[2] | m[3]) != 0;
}
// Rounds to the nearest integer; |a| < 2^22.
inline F round_nearest(F a) {
  const F magic = set1(12582912.0f);
  return (a + magic) - magic;
}
inline F scale_pow2(F a, F n) {
  const I bits = (__builtin_convertvector(n, I) + 127) << 23;
  return a * (F)bits;
}

inline float from_bits(uint32_t bits) {
  float f;
  __builtin_memcpy(&f, &bits, sizeof f);
  return f;
}
inline float half_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
  const uint32_t rest = h & 0x7fffu;
  if (rest >= 0x7c00u) {
    return from_bits(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  }
  // Scaling by 2^112 moves the exponent and is exact for normal and subnormal values alike.
  const float magnitude = from_bits(rest << 13) * 0x1p112f;
  return sign != 0 ? -magnitude : magnitude;
}

// 2^-8 of the value of an e4m3 code. The multiplication moves the exponent, as above.
inline float f8_to_float(uint8_t code) {
  const float magnitude = from_bits((uint32_t)(code & 0x7fu) << 20) * 0x1p112f;
  return (code & 0x80u) != 0 ? -magnitude : magnitude;
}

template <int kElem>
inline F load_as(const void* p, unsigned i) {
  if constexpr (kElem == kElemF32) {
    return load(static_cast<const float*>(p) + i);
  } else if constexpr (kElem == kElemI8) {
    const int8_t* e = static_cast<const int8_t*>(p) + i;
    return F{(float)e[0], (float)e[1], (float)e[2], (float)e[3]};
  } else if constexpr (kElem == kElemF8) {
    const uint8_t* e = static_cast<const uint8_t*>(p) + i;
    return F{f8_to_float(e[0]), f8_to_float(e[1]), f8_to_float(e[2]), f8_to_float(e[3])};
  } else {
    uint16_t e[4];
    __builtin_memcpy(e, static_cast<const uint16_t*>(p) + i, sizeof e);
    if constexpr (kElem == kElemBf16) {
      const I bits = {(int32_t)((uint32_t)e[0] << 16), (int32_t)((uint32_t)e[1] << 16),
                      (int32_t)((uint32_t)e[2] << 16), (int32_t)((uint32_t)e[3] << 16)};
      return (F)bits;
    } else {
      return F{half_to_float(e[0]), half_to_float(e[1]), half_to_float(e[2]), half_to_float(e[3])};
    }
  }
}
// Never needed: rows are multiples of 8 elements.
template <int kElem>
inline F load_as_n(const void* p, unsigned i, unsigned) {
  return load_as<kElem>(p, i);
}

inline F reduce(const F* a) {
  F r = zero();
  for (int i = 0; i < 4; ++i) {
    r[i] = (a[i][0] + a[i][2]) + (a[i][1] + a[i][3]);
  }
  return r;
}
inline void transpose(F* a) {
  for (int i = 0; i < 4; ++i) {
    for (int j = i + 1; j < 4; ++j) {
      const float x = a[i][j];
      a[i][j] = a[j][i];
      a[j][i] = x;
    }
  }
}
template <int kGroup>
inline F group_max(F a) {
  if constexpr (kGroup == 1) {
    return a;
  } else {
    const F b = max(a, F{a[2], a[3], a[0], a[1]});
    return max(b, F{b[1], b[0], b[3], b[2]});
  }
}
template <int kGroup>
inline F group_sum(F a) {
  if constexpr (kGroup == 1) {
    return a;
  } else {
    const F b = a + F{a[2], a[3], a[0], a[1]};
    return b + F{b[1], b[0], b[3], b[2]};
  }
}
inline void prefetch(const void* p) { __builtin_prefetch(p); }
inline void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace vec
}  // namespace
}  // namespace kvm

#endif  // KVM_BASE_SIMD_VEC_SCALAR_H_
