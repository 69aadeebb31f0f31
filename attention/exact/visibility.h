// SPDX-License-Identifier: Apache-2.0
// Bit masks of the tokens of a block of 64 aligned positions that are visible: bit i is position
// base + i. The rule is at attention.h, struct Visibility.
#ifndef KVM_ATTENTION_EXACT_VISIBILITY_H_
#define KVM_ATTENTION_EXACT_VISIBILITY_H_

#include <cstdint>

#include "attention/attention.h"

namespace kvm::attention {

// A VisibleSet is the view of query tokens [first, first + count) of a problem. REQUIRES: count >=
// 1.
class VisibleSet {
 public:
  VisibleSet(const Visibility& visible, uint32_t n_query, uint32_t first, uint32_t count);

  // Positions that no query of the set sees lie outside [low(), high()), or are removed by ranges
  // or by a window behind the sinks.
  uint64_t low() const { return low_; }
  uint64_t high() const { return high_; }
  // First position inside the widest window of the set; what lies before it and behind the sinks is
  // seen by nobody.
  uint64_t window_low() const { return window_low_; }

  // Seen by at least one query, a tree counting as all its positions. REQUIRES: base % 64 == 0,
  // here and below.
  uint64_t any(uint64_t base) const;
  // True where every query of the set sees exactly any(base).
  bool uniform(uint64_t base) const;
  // Seen by query token `query` of the problem. A subset of any(base).
  uint64_t one(uint64_t base, uint32_t query) const;

 private:
  uint64_t ranges(uint64_t base) const;

  const Visibility& visible_;
  uint32_t n_query_;
  uint32_t first_;
  uint32_t count_;
  uint64_t low_;
  uint64_t high_;
  uint64_t window_low_;
};

}  // namespace kvm::attention

#endif  // KVM_ATTENTION_EXACT_VISIBILITY_H_
