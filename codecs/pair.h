// SPDX-License-Identifier: Apache-2.0
// K or V of one head of a page for two layers at once. Of each token the layers share a direction
// and have a length of their own:
//
//   u, v    the rows of the deeper and the shallower layer, each by its length
//   Omega   their angle
//   e       [ sin((1 - t) Omega) v + sin(t Omega) u ] / sin Omega, the direction that both have
//   read    |row| e, so the length is right and the relative error is 2 sin(t Omega / 2) of the
//           shallower row, 2 sin((1 - t) Omega / 2) of the deeper one
//
// Tokens with the largest angles keep the rows of both as they are; equal ones: the earlier. Where
// the angle is near 0 or pi weights are 1 - t and t; where they leave no direction it is the deeper
// row's. A row of zeros is read as zeros and leaves the other its direction.
//
// Source: MiniCache (arXiv 2405.14366), section 4: equations 2 to 4, and retention. K and V keep
// their tokens apart; a page is what the largest angles are looked for in.
//
//   rows    [64][dim] in the codec's elements: e, or the shallower row of a token that is kept
//   params  PairLayout has the offsets: of each side a factor for each token, an fp32 in two
//           params, which a row is multiplied by; the slots that are kept, ascending; the deeper
//           rows of these, in the codec's elements
//
// A factor is |row| / |e as it is stored|, so rounding of e moves no length. That of a kept token
// is 1.
//
// A head with a row that is not finite, or whose length is none from 2^-100 to 2^100 nor 0, is not
// encoded.
//
// Threads: any; pure.  Memory: 5 KiB of the stack.  Errors: none. The same bytes wherever the C
// library's sines and arc tangents are the same.
#ifndef KVM_CODECS_PAIR_H_
#define KVM_CODECS_PAIR_H_

#include <cstdint>

#include "base/kv_view.h"
#include "base/limits.h"
#include "codecs/codec.h"

namespace kvm::codecs {

// A PairLayout says where the parts of a head's params begin. dim: channels from row to row.
struct PairLayout {
  constexpr PairLayout(const Codec& codec, uint32_t dim)
      : n_kept(codec.pair_kept), row_params(dim * codec.bits() / 16) {}

  constexpr uint32_t factors(PairSide side) const {
    return side == PairSide::kDeep ? 2 * kPageTokens : 0;
  }
  static constexpr uint32_t slots() { return 4 * kPageTokens; }
  // The deeper row of the i-th kept token.
  constexpr uint32_t row(uint32_t i) const { return slots() + n_kept + i * row_params; }

  uint32_t n_kept;
  uint32_t row_params;  // of a row
};

// Encodes rows [kPageTokens][dim] of both layers. False: see above; rows and params hold nothing
// then. Nothing overlaps.
// REQUIRES: codec.is_pair(), whichever side; rows are exact in its elements; 0 < t <= 1;
// dim <= kMaxHeadDim, a multiple of 8.
[[nodiscard]] bool encode_pair(const Codec& codec, const float* shallow, const float* deep,
                               uint32_t dim, float t, uint8_t* rows, uint16_t* params);

// Encodes a head of a page. scratch: [2][kPageTokens][dim]. False: as encode_pair.
// REQUIRES: shallow and deep are pages in the tail of to's codec, and the caller may write to `to`.
[[nodiscard]] bool encode_pair_head(const KvPlane& shallow, const KvPlane& deep, const KvPlane& to,
                                    uint32_t head, uint32_t dim, float t, float* scratch);

// Decodes the first n channels of n_tokens tokens from `slot` on, of the codec's side. rows: of the
// first of them, row_dim channels from row to row. out: [n_tokens][n]
void decode_pair(const Codec& codec, const uint8_t* rows, const uint16_t* params, uint32_t row_dim,
                 uint32_t slot, uint32_t n_tokens, uint32_t n, float* out);

}  // namespace kvm::codecs

#endif  // KVM_CODECS_PAIR_H_
