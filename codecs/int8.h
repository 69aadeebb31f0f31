// SPDX-License-Identifier: Apache-2.0
// Rows of K and V as int8 with one scale: channel i is q_i * scale, -127 <= q_i <= 127.
//
//   scale  the bf16 nearest to max |x| / 127, at least 2^-126; 0 where all q_i are
//   q_i    x_i / scale, rounded to nearest even
//
// The scale is a bf16 (row_scale.h says why), and q_i * scale is exact in fp32. So
// |x - q scale| <= scale / 2 holds for what is read back, and reading a row and encoding it again
// gives the same bytes. A scale rounded by half an ulp moves
// the largest channel to 126.51 ... 127.49 steps, hence never beyond 127: rounding the scale costs
// nothing but bits that are not there.
//
// A row with an element that is not finite has scale NaN and all q_i 0: it reads as NaN in every
// channel. -0 becomes 0.
//
// The same bytes on every processor. Threads: any; pure.  Memory: none.  Errors: none.
#ifndef KVM_CODECS_INT8_H_
#define KVM_CODECS_INT8_H_

#include <cstdint>

namespace kvm::codecs {

// Encodes a row of n elements; returns the scale as bits. dst must not overlap src.
uint16_t encode_i8(const float* src, uint32_t n, int8_t* dst);

// Decodes a row of n elements.
void decode_i8(const int8_t* src, uint16_t scale, uint32_t n, float* dst);

}  // namespace kvm::codecs

#endif  // KVM_CODECS_INT8_H_
