// SPDX-License-Identifier: Apache-2.0
// How the elements of stored rows are named to kernels, whichever wrapper they use.
#ifndef KVM_BASE_SIMD_ELEM_H_
#define KVM_BASE_SIMD_ELEM_H_

#include <stdint.h>

namespace kvm {
namespace {
namespace vec {

// Elements of stored rows (codecs/codec.h); the first three are those of Dtype.
enum Elem { kElemF32 = 1, kElemF16 = 2, kElemBf16 = 3, kElemI8 = 4, kElemF8 = 5 };

constexpr uint32_t elem_bytes(int elem) {
  return elem == kElemF32 ? 4 : elem == kElemI8 || elem == kElemF8 ? 1 : 2;
}

// The value that 1 of a loaded element stands for. e4m3 codes are loaded as numbers of 5 bits of
// exponent, or 8, with the bias of fp16: exactly, and 2^-8 of their values. Scales make up for
// that: code that multiplies rows by them multiplies these by the unit first, which is exact, too.
constexpr float elem_unit(int elem) { return elem == kElemF8 ? 256.0f : 1.0f; }

}  // namespace vec
}  // namespace
}  // namespace kvm

#endif  // KVM_BASE_SIMD_ELEM_H_
