// SPDX-License-Identifier: Apache-2.0
// Shared by the tables for AVX-512, beside lanes.h, which is included before.
#ifndef KVM_HASH_INDEX_SKETCH_LANES_AVX512_H_
#define KVM_HASH_INDEX_SKETCH_LANES_AVX512_H_

#include <immintrin.h>
#include <stdint.h>

namespace kvm {
namespace hash_index {
namespace {

constexpr bool kAnyPower = true;

// One step of Newton's, for the divider takes ten cycles.
inline F inverse_of(F a) {
  const F x = _mm512_rcp14_ps(a);
  return _mm512_mul_ps(x, _mm512_fnmadd_ps(a, x, _mm512_set1_ps(2.0f)));
}
inline F root_of(F a) { return _mm512_sqrt_ps(a); }
inline uint32_t mask_lt(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }

}  // namespace
}  // namespace hash_index
}  // namespace kvm

#endif  // KVM_HASH_INDEX_SKETCH_LANES_AVX512_H_
