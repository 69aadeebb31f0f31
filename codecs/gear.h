// SPDX-License-Identifier: Apache-2.0
// K or V of one head of a page in 4 or 2 bits an element, with what these lose put back in two
// ways. An element of token t and channel i is read as
//
//   x^ = codes and steps of low_bits.h  +  sum over k of A[t][k] B[k][i]  +  delta
//
//   A B    the low-rank part: what the codes are off by, as far as few vectors tell it
//   delta  of outliers only: the largest and the smallest elements of each vector, which is what
//          low_bits.h has steps for: a channel of the 64 tokens, or a token
//
// Outliers are found first. The codes see in their place the mean of the others that share their
// steps, so they widen no step; A B is asked for nothing there; and delta is what is missing at
// last, so they are read to half a unit of the last of 8 bits of delta.
//
// Everything is a sum, so attention needs no decoded rows: the score of a token is that of its
// codes, plus (q . B[k]) A[t][k], plus q[i] delta; the sum of values likewise, with weights for A.
//
// Source: GEAR (arXiv 2403.05527), sections 3 and 4, with groups as KIVI's. A page is its block.
// Other than there: outliers are exact with A B, too; columns of A and rows of B are found one by
// one, each from what those before have left as they are stored. So a part of rank r has those of
// rank r - 1 in it, and its error, without outliers, is never larger.
//
//   codes   as in low_bits.h
//   params  those of low_bits.h, then A [64][rank], B [rank][dim], then of each pair of outliers:
//           by channel: [dim] deltas of the largest, [dim] of the smallest, [dim] tokens: that of
//                       the largest in bits 0 to 5, that of the smallest in bits 8 to 13
//           by token:   [64] deltas of the largest, [64] of the smallest, then [64] channels of the
//                       largest, [64] of the smallest
//           A, B and deltas are bf16, as bits. GearLayout has the offsets.
//
// An element of A or B is 0, or of a magnitude from 2^-60 to 2^60: products are exact in fp32, and
// what is read does not depend on whether sums are fused.
//
// As with low_bits.h a head with an element that is not finite, or above 2^126, is not encoded.
// Where elements are off by 2^111 or more, or all by less than 2^-110, A and B are 0.
//
// The same bytes on every processor. Threads: any; pure.  Memory: 200 KiB of the stack.
// Errors: none.
#ifndef KVM_CODECS_GEAR_H_
#define KVM_CODECS_GEAR_H_

#include <cstdint>

#include "base/dtype.h"
#include "base/limits.h"
#include "codecs/codec.h"

namespace kvm::codecs {

// LIMIT: of sums of products of A and B, so that they stay finite; GEAR has 4 at most.
inline constexpr uint32_t kMaxGearRank = 16;
// LIMIT: pairs of a vector, so that the shortest row has place for them.
inline constexpr uint32_t kMaxGearOutliers = kMinHeadDim / 2;

// An Outlier is an element with what is added to it.
struct Outlier {
  uint32_t slot;
  uint32_t channel;
  float delta;
};

// A GearLayout says where the parts of a head's params begin. dim: channels from row to row.
struct GearLayout {
  constexpr GearLayout(const Codec& codec, uint32_t dim)
      : by_channel(codec.group_params == 0),
        rank(codec.rank),
        n_pairs(codec.outliers),
        n_vectors(codec.n_vectors(dim)),
        a(codec.step_params(dim)),
        b(a + kPageTokens * rank),
        outliers(b + rank * dim),
        pair_params(codec.outlier_params() * n_vectors) {}

  // Offsets of deltas [n_vectors] and places [n_vectors]. side: 0 largest, 1 smallest. The places
  // of both sides of a channel share a param.
  constexpr uint32_t deltas(uint32_t pair, uint32_t side) const {
    return outliers + pair * pair_params + side * n_vectors;
  }
  constexpr uint32_t places(uint32_t pair, uint32_t side) const {
    return deltas(pair, by_channel ? 2 : 2 + side);
  }
  // The bit that the place of a side begins at.
  constexpr uint32_t place_bit(uint32_t side) const { return by_channel ? 8 * side : 0; }

  // The outlier of a vector: of a channel, or of a slot.
  Outlier outlier(const uint16_t* params, uint32_t pair, uint32_t side, uint32_t vector) const {
    const uint32_t place = params[places(pair, side) + vector] >> place_bit(side);
    const float delta = bf16_to_f32(params[deltas(pair, side) + vector]);
    return by_channel ? Outlier{place & (kPageTokens - 1), vector, delta}
                      : Outlier{vector, place, delta};
  }

  bool by_channel;  // vectors are channels, else tokens
  uint32_t rank;
  uint32_t n_pairs;  // of outliers, of each vector
  uint32_t n_vectors;
  uint32_t a;            // offset of A
  uint32_t b;            // offset of B
  uint32_t outliers;     // offset of the first pair
  uint32_t pair_params;  // from pair to pair
};

// Encodes rows [kPageTokens][dim]. False: an element is not finite, or above 2^126; codes and
// params hold nothing then. Nothing overlaps.
// REQUIRES: codec.is_low_bits(), without means; its rank and outliers are within the limits;
// dim <= kMaxHeadDim, a multiple of 8.
[[nodiscard]] bool encode_gear(const Codec& codec, const float* rows, uint32_t dim, uint8_t* codes,
                               uint16_t* params);

// Decodes the first n channels of n_tokens tokens from `slot` on. codes: of the first of them, rows
// of row_dim channels. out: [n_tokens][n]
// REQUIRES: n and row_dim are multiples of 8.
void decode_gear(const Codec& codec, const uint8_t* codes, const uint16_t* params, uint32_t row_dim,
                 uint32_t slot, uint32_t n_tokens, uint32_t n, float* out);

}  // namespace kvm::codecs

#endif  // KVM_CODECS_GEAR_H_
