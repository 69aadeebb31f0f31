// SPDX-License-Identifier: Apache-2.0
// The scan: the avx2 table. CMakeLists.txt gives this file its instruction-set flags.
#include "base/simd/vec_avx2.h"
//
#include "hash_index/sketch/lanes.h"

namespace kvm {
namespace hash_index {
namespace {

typedef __m256i Bytes;

inline Bytes no_bytes() { return _mm256_setzero_si256(); }
inline Bytes load_bytes(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline Bytes table(const uint8_t* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Bytes low_nibbles(Bytes a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes a) { return low_nibbles(_mm256_srli_epi16(a, 4)); }
inline Bytes look_up(Bytes a, Bytes i) { return _mm256_shuffle_epi8(a, i); }
inline Bytes add_bytes(Bytes a, Bytes b) { return _mm256_add_epi8(a, b); }
inline Bytes add_words(Bytes a, Bytes b) { return _mm256_add_epi16(a, b); }
inline Bytes high_bytes(Bytes a) { return _mm256_srli_epi16(a, 8); }
inline Bytes double_words(Bytes a) { return _mm256_slli_epi16(a, 1); }
inline Bytes drop_high(Bytes a, Bytes b) { return _mm256_sub_epi16(a, _mm256_slli_epi16(b, 8)); }

// Codes are unsigned bytes: even and odd ones meet the query's in 16 bits.
inline U lead_word(U sum, U codes, uint32_t lead) {
  const __m256i a = (__m256i)codes;
  const __m256i q = _mm256_set1_epi32(static_cast<int32_t>(lead));
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(q, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(q, 8));
  return sum + (U)_mm256_add_epi32(even, odd);
}
inline U lead_sums(U bias, U a, U b, const uint32_t* lead) {
  return lead_word(lead_word(bias, a, lead[0]), b, lead[1]);
}
constexpr bool kAnyPower = false;

inline F inverse_of(F a) { return vec::div(vec::set1(1.0f), a); }
inline F root_of(F a) { return _mm256_sqrt_ps(a); }
inline uint32_t mask_lt(F a, F b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)));
}

}  // namespace
}  // namespace hash_index
}  // namespace kvm

#include "hash_index/sketch/nibble_sums.h"
//
#include "hash_index/sketch/encode_kernel.h"
#include "hash_index/sketch/scan_kernel.h"

namespace kvm {
namespace hash_index {

extern const ScanKernels kScanAvx2 = {0, scan_logits_kernel, scan_draw_kernel, encode_kernel,
                                      norms_kernel};

}  // namespace hash_index
}  // namespace kvm
