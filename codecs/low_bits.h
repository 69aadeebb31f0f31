// SPDX-License-Identifier: Apache-2.0
// K or V of one head of a page in 4, 3 or 2 bits an element, as codes of steps up from a zero:
//
//   x  is stored as  q,  and read as  q * scale + zero,   0 <= q <= 15, 7 or 3
//
//   by channel   scale and zero of each channel, over the 64 tokens   KIVI's keys
//   by token     of each token's 64 channels, from 0, 64, ... on      KIVI's values
//   centred      as by token, of what is left without the mean of each channel over the 64 tokens
//   balanced     as by token, of what is left when each channel is divided by its factor: channels
//                get as much of the codes as they have of the scores      MiKV's keys
//
//   zero   the largest bf16 that no element is below
//   scale  the smallest bf16 with which the last code reaches the largest element; 0 where all are
//          `zero`, else at least 2^-126
//   q      (x - zero) / scale, rounded to nearest even
//   factor the bf16 nearest to sqrt(largest |x| of the channel / its weight), 2^63 at most; 1 of
//          zeros. Weights are the largest |q| of the queries that are known, as a part of the
//          largest of all channels, 2^-10 at least; 1 where none are
//
// So an element is off by half a scale at most, and nothing is cut off. q * scale is exact in fp32
// (4 bits times 8): what is read does not depend on whether the sum is fused.
//
// Source: KIVI (arXiv 2402.02750), section 3: keys by channel, values by token, asymmetric. A page
// is its group along tokens. Centred: what all keys have in common moves every score alike, which
// the softmax does not see; here it is added again when rows are read, so each page has its own.
// Balanced: MiKV (arXiv 2402.18096), section 3.3, by page instead of by prompt, and the keys are
// multiplied when they are read instead of the queries divided, so each page has its own again.
//
//   codes   [64][dim * bits / 8], little endian: element i is bits [i * bits, (i + 1) * bits) of a
//           row; of 3 bits it may cross a byte
//   params  by token, centred, balanced: [64][dim / 64, rounded up][2] scale and zero, then of
//           centred ones [dim] means, of balanced ones [dim] factors; by channel: [dim] scales,
//           then [dim] zeros. All are bf16, as bits.
//
// One scale speaks for many tokens or channels, so none of them may be without a number: a head
// with an element that is not finite, or above 2^126, is not encoded.
//
// The same bytes on every processor. Threads: any; pure.  Memory: none.  Errors: none.
#ifndef KVM_CODECS_LOW_BITS_H_
#define KVM_CODECS_LOW_BITS_H_

#include <cstdint>

#include "codecs/codec.h"

namespace kvm::codecs {

// Encodes rows [kPageTokens][dim]. False: an element is not finite, or above 2^126; codes and
// params hold nothing then. Nothing overlaps. largest_q: [dim] magnitudes of queries, finite, which
// balanced codecs look at; null: none are known.
// REQUIRES: codec.is_low_bits(); dim <= kMaxHeadDim, a multiple of 8.
[[nodiscard]] bool encode_low_bits(const Codec& codec, const float* rows, uint32_t dim,
                                   const float* largest_q, uint8_t* codes, uint16_t* params);

// Decodes the first n channels of n_tokens tokens from `slot` on. codes: of the first of them, rows
// of row_dim channels. out: [n_tokens][n]
// REQUIRES: n and row_dim are multiples of 8.
void decode_low_bits(const Codec& codec, const uint8_t* codes, const uint16_t* params,
                     uint32_t row_dim, uint32_t slot, uint32_t n_tokens, uint32_t n, float* out);

}  // namespace kvm::codecs

#endif  // KVM_CODECS_LOW_BITS_H_
