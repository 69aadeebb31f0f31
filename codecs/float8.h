// SPDX-License-Identifier: Apache-2.0
// Rows of K and V as 8-bit floating point with one scale: channel i is code_i * scale, where a code
// is an e4m3 number of the OCP 8-bit Floating Point Specification (revision 1.0): a sign, 4 bits of
// exponent with bias 7 and 3 of mantissa, so
//
//   s eeee mmm   (-1)^s 2^(e - 7) (1 + m / 8), and (-1)^s 2^-6 m / 8 where e is 0
//
// with 448 as the largest and 2^-9 as the least magnitude. There are no infinities, and the two
// codes of NaN (e = 15, m = 7) are never stored.
//
//   scale   the bf16 nearest to max |x| / 448, at least 2^-126; 0 where all codes are
//   code_i  the nearest to x_i / scale (a division in fp32), ties to even m; -0 becomes 0
//
// No code exceeds 448: rounding the scale, by 2^-8 of it at most, and the divisions move the
// largest channel to 446.2 ... 449.8, and the nearest e4m3 of what is between 432 and 464 is 448;
// where the scale is 2^-126 it was raised to that, which makes quotients smaller. 448 * scale does
// not exceed the largest float either: for that float itself the scale is rounded down.
//
// code_i * scale has at most 4 + 8 significant bits, and its last one is worth at least
// 2^-9 * 2^-133 = 2^-142: exact in fp32. Reading a row and encoding it again gives the same bytes:
// the largest channel has the code 448, hence gives the same scale (or both are 2^-126), and
// x / scale is exactly the code.
//
// A channel is within 1/16 of what was encoded (and 2^-23 of it for the division), or within
// 2^-10 scale where that is more: below 2^-6 scale codes are multiples of 2^-9.
//
// A row with an element that is not finite has scale NaN and all codes 0: it reads as NaN in every
// channel.
//
// The same bytes on every processor. Threads: any; pure.  Memory: none.  Errors: none.
#ifndef KVM_CODECS_FLOAT8_H_
#define KVM_CODECS_FLOAT8_H_

#include <cstdint>

namespace kvm::codecs {

// Encodes a row of n elements; returns the scale as bits. dst must not overlap src.
uint16_t encode_f8(const float* src, uint32_t n, uint8_t* dst);

// Decodes a row of n elements.
void decode_f8(const uint8_t* src, uint16_t scale, uint32_t n, float* dst);

}  // namespace kvm::codecs

#endif  // KVM_CODECS_FLOAT8_H_
