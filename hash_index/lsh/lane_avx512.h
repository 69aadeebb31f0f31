// SPDX-License-Identifier: Apache-2.0
// The lanes of lsh_kernel.h for AVX-512, with the byte dot product where the file that includes
// this is compiled for AVX512_VNNI.
#ifndef KVM_HASH_INDEX_LSH_LANE_AVX512_H_
#define KVM_HASH_INDEX_LSH_LANE_AVX512_H_

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

namespace kvm {
namespace hash_index {
namespace {
namespace lane {

typedef __m512i V;
typedef __m512i B;

constexpr uint32_t kLanes = 16;
constexpr uint32_t kMaxBits = 5;

inline V set1(int32_t x) { return _mm512_set1_epi32(x); }
inline B load(const uint8_t* p) { return _mm512_load_si512(p); }
inline B bytes(const int8_t* w) {
  int32_t four;
  __builtin_memcpy(&four, w, sizeof four);
  return _mm512_set1_epi32(four);
}
inline V dot(V a, B x, B w) {
#if defined(__AVX512VNNI__)
  return _mm512_dpbusd_epi32(a, x, w);
#else
  // The sums of two products are at most 2 * 255 * 63 and so never saturate.
  const __m512i pairs = _mm512_maddubs_epi16(x, w);
  return _mm512_add_epi32(a, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
}
inline V or_if_positive(V c, V a, int32_t bit) {
  const __mmask16 positive = _mm512_cmpgt_epi32_mask(a, _mm512_setzero_si512());
  return _mm512_mask_or_epi32(c, positive, c, _mm512_set1_epi32(bit));
}
inline void store(uint16_t* p, V c) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(c));
}

inline uint64_t not_zero(const uint8_t* p) {
  const __m512i x = _mm512_load_si512(p);
  return _mm512_test_epi8_mask(x, x);
}

}  // namespace lane
}  // namespace
}  // namespace hash_index
}  // namespace kvm

#endif  // KVM_HASH_INDEX_LSH_LANE_AVX512_H_
