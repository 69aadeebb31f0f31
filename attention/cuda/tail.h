// SPDX-License-Identifier: Apache-2.0
// Which piece a block does next: its own ones, as Work::next says, then of the launch's tail as
// long as there are any. ADR 0038 has the reasons.
//
// A block asks for a piece of the tail by counting in Tail::n_asked. The first n counts are the
// pieces; each block is told once that there are no more, and asks no more. So a launch of b blocks
// counts exactly n + b times, and counts round: who asks last leaves 0 for the next launch,
// whatever that is, without a launch or a message that would reset it.
//
// One thread asks when the tiles of its piece are done, and looks at the answer when the states of
// the warps have been merged: it is on its way meanwhile. To ask before would be to take a piece
// that somebody faster is free for first.
#ifndef KVM_ATTENTION_CUDA_TAIL_H_
#define KVM_ATTENTION_CUDA_TAIL_H_

#include "attention/cuda/params.h"
#include "attention/cuda/primitives.h"

namespace kvm::attention::gpu {

inline constexpr uint32_t kNotAsked = UINT32_MAX;

// Asks for a piece of the tail where `work` is the last of the block's own, or of the tail. Returns
// the count, to be given to piece_behind. One thread of the block, once for each piece.
KVM_GPU uint32_t ask_for_piece(const DecodeParams& p, const Work& work) {
  if (work.next != 0 || p.tail == nullptr) {
    return kNotAsked;
  }
  const uint32_t n = load_global<uint32_t>(&p.tail->n);
  return n != 0 ? count_up_to(&p.tail->n_asked, n + block_count() - 1) : kNotAsked;
}

// Returns the piece that is behind `work` for its block; 0 where there is none.
KVM_GPU uint32_t piece_behind(const DecodeParams& p, const Work& work, uint32_t asked) {
  if (asked == kNotAsked) {
    return work.next;
  }
  return asked < load_global<uint32_t>(&p.tail->n) ? load_global<uint32_t>(&p.tail->first) + asked
                                                   : 0;
}

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_TAIL_H_
