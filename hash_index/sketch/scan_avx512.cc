// SPDX-License-Identifier: Apache-2.0
// The scan: the avx512 table. CMakeLists.txt gives this file its instruction-set flags.
#include "base/simd/vec_avx512.h"
//
#include "hash_index/sketch/lanes.h"
//
#include "hash_index/sketch/lanes_avx512.h"

namespace kvm {
namespace hash_index {
namespace {

typedef __m512i Bytes;

inline Bytes no_bytes() { return _mm512_setzero_si512(); }
inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Bytes table(const uint8_t* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Bytes low_nibbles(Bytes a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes a) { return low_nibbles(_mm512_srli_epi16(a, 4)); }
inline Bytes look_up(Bytes a, Bytes i) { return _mm512_shuffle_epi8(a, i); }
inline Bytes add_bytes(Bytes a, Bytes b) { return _mm512_add_epi8(a, b); }
inline Bytes add_words(Bytes a, Bytes b) { return _mm512_add_epi16(a, b); }
inline Bytes high_bytes(Bytes a) { return _mm512_srli_epi16(a, 8); }
inline Bytes double_words(Bytes a) { return _mm512_slli_epi16(a, 1); }
inline Bytes drop_high(Bytes a, Bytes b) { return _mm512_sub_epi16(a, _mm512_slli_epi16(b, 8)); }

// Codes are unsigned bytes: even and odd ones meet the query's in 16 bits.
inline U lead_word(U sum, U codes, uint32_t lead) {
  const __m512i a = (__m512i)codes;
  const __m512i q = _mm512_set1_epi32(static_cast<int32_t>(lead));
  const __m512i even = _mm512_madd_epi16(_mm512_and_si512(a, _mm512_set1_epi16(255)),
                                         _mm512_srai_epi16(_mm512_slli_epi16(q, 8), 8));
  const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(a, 8), _mm512_srai_epi16(q, 8));
  return sum + (U)_mm512_add_epi32(even, odd);
}
inline U lead_sums(U bias, U a, U b, const uint32_t* lead) {
  return lead_word(lead_word(bias, a, lead[0]), b, lead[1]);
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

extern const ScanKernels kScanAvx512 = {0, scan_logits_kernel, scan_draw_kernel, encode_kernel,
                                        norms_kernel};

}  // namespace hash_index
}  // namespace kvm
