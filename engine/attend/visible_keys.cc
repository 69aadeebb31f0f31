// SPDX-License-Identifier: Apache-2.0
#include "engine/attend/visible_keys.h"

#include <algorithm>

#include "base/assert.h"

namespace kvm::engine {

// REQUIRES: begin is not below that of the last call.
void VisibleKeys::see(uint64_t begin, uint64_t end) {
  if (begin >= end) {
    return;
  }
  KVM_ASSERT(seen_.empty() || seen_.back().begin <= begin);
  if (!seen_.empty() && begin <= seen_.back().end) {
    seen_.back().end = std::max(seen_.back().end, end);
  } else {
    seen_.push_back({begin, end});
  }
}

void VisibleKeys::see_tree(const attention::Visibility& visible, uint32_t n_query) {
  for (uint32_t j = 0; j < n_query; ++j) {
    const uint64_t position = visible.query_position + j;
    for (uint32_t i = 0; i < n_query; ++i) {
      const uint64_t word = visible.tree[uint64_t{i} * visible.tree_stride_words + j / 64];
      const bool in_window =
          visible.window == 0 || position < visible.sinks || j >= i || i - j < visible.window;
      if ((word >> (j % 64) & 1) != 0 && in_window) {
        see(position, position + 1);
        break;
      }
    }
  }
}

void VisibleKeys::keep(std::span<const PositionRange> ranges) {
  std::swap(seen_, before_);
  seen_.clear();
  auto range = ranges.begin();
  for (const PositionRange& s : before_) {
    while (range != ranges.end() && range->end <= s.begin) {
      ++range;
    }
    for (auto r = range; r != ranges.end() && r->begin < s.end; ++r) {
      see(std::max(s.begin, r->begin), std::min(s.end, r->end));
    }
  }
}

void VisibleKeys::remove(std::span<const PositionRange> ranges) {
  std::swap(seen_, before_);
  seen_.clear();
  auto range = ranges.begin();
  for (const PositionRange& s : before_) {
    while (range != ranges.end() && range->end <= s.begin) {
      ++range;
    }
    uint64_t begin = s.begin;
    for (auto r = range; r != ranges.end() && r->begin < s.end; ++r) {
      see(begin, std::min(r->begin, s.end));
      begin = std::max(begin, r->end);
    }
    see(begin, s.end);
  }
}

void VisibleKeys::add(const attention::Visibility& visible, uint32_t n_query) {
  if (n_query == 0) {
    return;
  }
  const uint64_t first = visible.query_position;
  uint64_t end = UINT64_MAX;
  if (visible.tree != nullptr) {
    end = first;
  } else if (visible.causal) {
    end = first + n_query;
  }
  const uint64_t window_begin =
      visible.window == 0 || first < visible.window ? 0 : first - visible.window + 1;
  seen_.clear();
  see(0, window_begin == 0 ? end : std::min(visible.sinks, end));
  see(window_begin, end);
  if (visible.tree != nullptr) {
    see_tree(visible, n_query);
  }
  if (!visible.include.empty()) {
    keep(visible.include);
  }
  remove(visible.exclude);
  all_.insert(all_.end(), seen_.begin(), seen_.end());
}

uint64_t VisibleKeys::count(KvRuns runs) {
  const auto by_begin = [](const PositionRange& a, const PositionRange& b) {
    return a.begin < b.begin;
  };
  if (!std::is_sorted(all_.begin(), all_.end(), by_begin)) {
    std::sort(all_.begin(), all_.end(), by_begin);
  }
  seen_.clear();
  for (const PositionRange& range : all_) {
    see(range.begin, range.end);
  }
  uint64_t n = 0;
  auto s = seen_.begin();
  for (const KvRun& run : runs) {
    const uint64_t run_end = run.position + run.n_tokens;
    while (s != seen_.end() && s->end <= run.position) {
      ++s;
    }
    for (auto t = s; t != seen_.end() && t->begin < run_end; ++t) {
      n += std::min(run_end, t->end) - std::max(run.position, t->begin);
    }
  }
  return n;
}

}  // namespace kvm::engine
