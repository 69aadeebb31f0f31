// SPDX-License-Identifier: Apache-2.0
// K or V of one head of a page as int8 with a scale for each channel: element (t, i) is
// q_ti * scale_i, -127 <= q_ti <= 127.
//
//   scale_i  the bf16 nearest to max over t |x_ti| / 127, at least 2^-126; 0 where all q_ti are
//   q_ti     x_ti / scale_i, rounded to nearest even
//
// Keys have channels that are large in all tokens (KIVI, arXiv 2402.02750, section 3): a scale of
// its own keeps such a channel from taking the others' bits, as it does where rows have scales. An
// element is off by half a scale at most, 1/254 of the largest of its channel; reading and encoding
// again gives the same bytes. row_scale.h says why scales are bf16.
//
// One scale speaks for 64 tokens, so none of them may be without a number: a head with an element
// that is not finite, or so large that it may come back as infinity, is not encoded.
//
// The same bytes on every processor. Threads: any; pure.  Memory: none.  Errors: none.
#ifndef KVM_CODECS_INT8_CHANNEL_H_
#define KVM_CODECS_INT8_CHANNEL_H_

#include <cstdint>

namespace kvm::codecs {

// Encodes rows [kPageTokens][dim] as codes [kPageTokens][dim] and scales [dim], bf16 as bits.
// False: an element is not finite, or above 2^127; codes and scales hold nothing then. Nothing
// overlaps.
// REQUIRES: dim <= kMaxHeadDim.
[[nodiscard]] bool encode_i8_channel(const float* rows, uint32_t dim, int8_t* codes,
                                     uint16_t* scales);

// Decodes the codes of one token.
void decode_i8_channel(const int8_t* codes, const uint16_t* scales, uint32_t dim, float* row);

}  // namespace kvm::codecs

#endif  // KVM_CODECS_INT8_CHANNEL_H_
