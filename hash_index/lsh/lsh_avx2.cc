// SPDX-License-Identifier: Apache-2.0
// LSH: the avx2 table. CMakeLists.txt gives this file its flags.
#include "base/simd/vec_avx2.h"

namespace kvm {
namespace hash_index {
namespace {
namespace lane {

typedef __m256i V;
typedef __m256i B;

constexpr uint32_t kLanes = 8;
constexpr uint32_t kMaxBits = 2;

inline V set1(int32_t x) { return _mm256_set1_epi32(x); }
inline B load(const uint8_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
inline B bytes(const int8_t* w) {
  int32_t four;
  __builtin_memcpy(&four, w, sizeof four);
  return _mm256_set1_epi32(four);
}
// The sums of two products are at most 2 * 255 * 63 and so never saturate.
inline V dot(V a, B x, B w) {
  const __m256i pairs = _mm256_maddubs_epi16(x, w);
  return _mm256_add_epi32(a, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline V or_if_positive(V c, V a, int32_t bit) {
  const __m256i positive = _mm256_cmpgt_epi32(a, _mm256_setzero_si256());
  return _mm256_or_si256(c, _mm256_and_si256(positive, _mm256_set1_epi32(bit)));
}
inline void store(uint16_t* p, V c) {
  const __m128i codes = _mm_packus_epi32(_mm256_castsi256_si128(c), _mm256_extracti128_si256(c, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), codes);
}

inline uint64_t not_zero(const uint8_t* p) {
  const __m256i zero = _mm256_setzero_si256();
  const int lo = _mm256_movemask_epi8(_mm256_cmpeq_epi8(load(p), zero));
  const int hi = _mm256_movemask_epi8(_mm256_cmpeq_epi8(load(p + 32), zero));
  return ~((uint64_t)(uint32_t)hi << 32 | (uint32_t)lo);
}

}  // namespace lane
}  // namespace
}  // namespace hash_index
}  // namespace kvm

#include "hash_index/lsh/lsh_kernel.h"

namespace kvm {
namespace hash_index {

extern const LshKernels kLshAvx2 = {"avx2", pack, hash, collect, list, inclusion};

}  // namespace hash_index
}  // namespace kvm
