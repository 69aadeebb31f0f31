// SPDX-License-Identifier: Apache-2.0
// How the streaming path meets rows: tiles of query rows, and a walk through stored rows that asks
// for later ones. Internal linkage throughout; see kernel_table.h.
#ifndef KVM_ATTENTION_EXACT_READER_H_
#define KVM_ATTENTION_EXACT_READER_H_

#include <stddef.h>
#include <stdint.h>

#include "attention/exact/elementary.h"
#include "attention/exact/exact_args.h"

namespace kvm {
namespace attention {
namespace {

// A tile of kRows rows meets kTokens = kW / kRows tokens at a time; lane r * kTokens + t of the
// result is row r, token t. Tokens of an item come in groups of kTokens.
template <int kRows>
struct Tile {
  static constexpr int kTokens = kW / kRows;
  static constexpr int kGroups = static_cast<int>(kItemTokens) / kTokens;
  static constexpr int kLanes = kRows * static_cast<int>(kItemTokens);
  // Where the weight of (row, token) lies in a tile's buffer.
  static constexpr int lane(int row, int token) {
    return (token / kTokens) * kW + row * kTokens + token % kTokens;
  }
};

// Walks through a stretch of 16 rows, and through those that will be read later.
//
// Every line is prefetched kAttempts times on its way, into the first level, and before that once
// into the second, where args.far_ahead is further than the others. A core that reads
// faster than memory delivers has its prefetches dropped without a sign when its queues are full,
// and each line lost costs the whole latency later; what one attempt loses, the next one brings.
// The attempts for a line stand between the instructions that use another: these files are compiled
// without the pass that would gather them in bursts. docs/kernels.md has the figures.
//
// Only the first tile of rows that meets a stretch prefetches.
template <bool kFirst>
class Reader {
 public:
  Reader(const StreamArgs& args, const uint8_t* const* reading, size_t row_bytes)
      : args_(args), reading_(reading), quarter_bytes_(4 * row_bytes) {
    turn();
  }
  const uint8_t* rows() const { return *reading_; }
  // Goes before every fourth token, where a quarter of the stretch may have been read.
  inline void turn() {
    if (!kFirst || at_ < end_)
      return;
#pragma GCC unroll 4
    for (uint32_t i = 0; i < kAttempts; ++i)
      later_[i] = after(args_.ahead[i]);
    far_ = after(args_.far_ahead);
    ++n_quarters_;
    end_ += quarter_bytes_;
  }
  // Goes with each vector of a row that is read; kBytes from memory.
  template <int kBytes>
  inline void step() {
    if (!kFirst)
      return;
    if (kBytes == 64 || at_ % 64 == 0) {
#pragma GCC unroll 4
      for (uint32_t i = 0; i < kAttempts; ++i)
        vec::prefetch(reinterpret_cast<const void*>(later_[i] + at_));
      vec::prefetch_l2(reinterpret_cast<const void*>(far_ + at_));
    }
    at_ += kBytes;
  }

 private:
  // Where the quarter lies that is `ahead` of the present one, less what has been read.
  uintptr_t after(uint32_t ahead) const {
    const uint32_t quarter = n_quarters_ + ahead;
    return reinterpret_cast<uintptr_t>(reading_[quarter / 4]) + quarter % 4 * quarter_bytes_ - end_;
  }

  const StreamArgs& args_;
  const uint8_t* const* reading_;
  uintptr_t quarter_bytes_;
  uintptr_t later_[kAttempts];  // integers: the rows may be none
  uintptr_t far_ = 0;
  uintptr_t at_ = 0;   // bytes read
  uintptr_t end_ = 0;  // of the quarters in later_
  uint32_t n_quarters_ = 0;
};

}  // namespace
}  // namespace attention
}  // namespace kvm

#endif  // KVM_ATTENTION_EXACT_READER_H_
