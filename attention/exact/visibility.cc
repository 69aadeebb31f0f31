// SPDX-License-Identifier: Apache-2.0
#include "attention/exact/visibility.h"

#include <algorithm>
#include <limits>

namespace kvm::attention {
namespace {

constexpr uint64_t kAll = ~uint64_t{0};
constexpr uint64_t kEnd = std::numeric_limits<uint64_t>::max();

// Bits of positions [begin, end) that lie in the block at base.
uint64_t span_bits(uint64_t base, uint64_t begin, uint64_t end) {
  const uint64_t from = begin > base ? begin - base : 0;
  const uint64_t to = end > base ? std::min<uint64_t>(end - base, 64) : 0;
  if (from >= to) {
    return 0;
  }
  const uint64_t width = to - from;
  return (width == 64 ? kAll : (uint64_t{1} << width) - 1) << from;
}

// Bits of the block at base that lie in one of the sorted ranges.
uint64_t range_bits(std::span<const PositionRange> ranges, uint64_t base) {
  auto at = std::partition_point(ranges.begin(), ranges.end(),
                                 [base](const PositionRange& r) { return r.end <= base; });
  uint64_t bits = 0;
  for (; at != ranges.end() && (at->begin <= base || at->begin - base < 64); ++at) {
    bits |= span_bits(base, at->begin, at->end);
  }
  return bits;
}

uint64_t saturating_add(uint64_t a, uint64_t b) { return a > kEnd - b ? kEnd : a + b; }

// First position inside the window of a query at `position`.
uint64_t window_begin(const Visibility& visible, uint64_t position) {
  if (visible.window == 0 || position < visible.window) {
    return 0;
  }
  return position - visible.window + 1;
}

}  // namespace

VisibleSet::VisibleSet(const Visibility& visible, uint32_t n_query, uint32_t first, uint32_t count)
    : visible_(visible), n_query_(n_query), first_(first), count_(count) {
  const uint64_t position = saturating_add(visible.query_position, first);
  window_low_ = window_begin(visible, position);
  low_ = visible.sinks > 0 ? 0 : window_low_;
  if (visible.tree != nullptr) {
    high_ = saturating_add(visible.query_position, n_query);
  } else if (visible.causal) {
    high_ = saturating_add(position, count);
  } else {
    high_ = kEnd;
  }
  if (!visible.include.empty()) {
    low_ = std::max(low_, visible.include.front().begin);
    high_ = std::min(high_, visible.include.back().end);
  }
}

uint64_t VisibleSet::ranges(uint64_t base) const {
  uint64_t bits = kAll;
  if (!visible_.include.empty()) {
    bits = range_bits(visible_.include, base);
  }
  if (!visible_.exclude.empty()) {
    bits &= ~range_bits(visible_.exclude, base);
  }
  return bits;
}

uint64_t VisibleSet::any(uint64_t base) const {
  const uint64_t bits =
      span_bits(base, window_low_, high_) | span_bits(base, 0, std::min(visible_.sinks, high_));
  return bits & ranges(base);
}

bool VisibleSet::uniform(uint64_t base) const {
  const uint64_t end = saturating_add(base, 64);
  const uint64_t first_position = saturating_add(visible_.query_position, first_);
  if (visible_.tree != nullptr) {
    if (end > visible_.query_position) {
      return false;
    }
  } else if (count_ == 1) {
    return true;
  } else if (visible_.causal && end > saturating_add(first_position, 1)) {
    return false;
  }
  if (visible_.window == 0 || end <= visible_.sinks) {
    return true;
  }
  const uint64_t last_low = window_begin(visible_, saturating_add(first_position, count_ - 1));
  return last_low == window_low_ || base >= last_low;
}

uint64_t VisibleSet::one(uint64_t base, uint32_t query) const {
  const uint64_t position = saturating_add(visible_.query_position, query);
  uint64_t bits = kAll;
  if (visible_.tree != nullptr) {
    const uint64_t start = visible_.query_position;
    bits = span_bits(base, 0, start);
    const uint64_t* row = visible_.tree + uint64_t{query} * visible_.tree_stride_words;
    const uint64_t in_tree = span_bits(base, start, saturating_add(start, n_query_));
    for (uint64_t left = in_tree; left != 0; left &= left - 1) {
      const uint64_t bit = left & (~left + 1);
      const uint64_t j = base + static_cast<uint64_t>(__builtin_ctzll(left)) - start;
      if ((row[j / 64] >> (j % 64) & 1) != 0) {
        bits |= bit;
      }
    }
  } else if (visible_.causal) {
    bits = span_bits(base, 0, saturating_add(position, 1));
  }
  if (visible_.window != 0) {
    bits &= span_bits(base, window_begin(visible_, position), kEnd) |
            span_bits(base, 0, visible_.sinks);
  }
  return bits & ranges(base);
}

}  // namespace kvm::attention
