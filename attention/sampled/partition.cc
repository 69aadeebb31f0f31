// SPDX-License-Identifier: Apache-2.0
#include "attention/sampled/partition.h"

#include <algorithm>
#include <limits>

#include "attention/exact/layout.h"
#include "attention/sampled/hashed.h"
#include "base/round.h"

namespace kvm::attention {
namespace {

constexpr uint64_t kEnd = std::numeric_limits<uint64_t>::max();

uint64_t block_below(uint64_t position) { return position / kPageTokens * kPageTokens; }
uint64_t block_above(uint64_t position) {
  return position > kEnd - kPageTokens ? kEnd : block_below(position + kPageTokens - 1);
}

struct IndexRange {
  uint64_t begin = 0;
  uint64_t end = 0;
};

size_t n_index_runs(const ApproxInput& input) {
  switch (input.params.proposal) {
    case Proposal::kSketch:
      return input.index.sketches.size();
    case Proposal::kLsh:
      return input.index.planes == nullptr ? 0 : input.index.hashes.size();
  }
  return 0;
}

IndexRange index_range(const ApproxInput& input, size_t i) {
  switch (input.params.proposal) {
    case Proposal::kSketch: {
      const SketchedRun& run = input.index.sketches[i];
      return {run.position, run.position + uint64_t{run.n_blocks} * kPageTokens};
    }
    case Proposal::kLsh: {
      const HashedRun& run = input.index.hashes[i];
      return {run.position, run.position + run.n_keys};
    }
  }
  return {};
}

// A Walk finds the positions that may belong to R.
class Walk {
 public:
  explicit Walk(const ApproxInput& input)
      : input_(input),
        problem_(*input.problem),
        visible_(problem_.visible, problem_.n_query, 0, problem_.n_query),
        low_(block_above(input.params.n_sinks)) {
    const Visibility& v = problem_.visible;
    const KvRun& last = problem_.runs.back();
    uint64_t end = last.position + last.n_tokens;
    if (v.tree != nullptr) {
      end = std::min(end, v.query_position);
    } else if (v.causal) {
      end = std::min(end, v.query_position + 1);
    }
    high_ = block_below(end - std::min(end, input.params.n_recent));
  }

  // Calls body(Stretch) in order of position.
  template <typename Body>
  void stretches(Body body) const {
    uint64_t from = low_;
    size_t run = SIZE_MAX;  // first one that ends behind `from`; unknown
    for (size_t i = 0; i < n_index_runs(input_); ++i) {
      const IndexRange range = index_range(input_, i);
      from = std::max(from, block_above(range.begin));
      const uint64_t end = std::min(high_, block_below(range.end));
      if (from < end) {
        index_run(static_cast<uint32_t>(i), from, end, &run, body);
        from = end;
      }
    }
  }

 private:
  // Says whether the block's tokens are all stored and plain; `run` is the first that ends behind
  // base, and becomes the first that ends behind the block.
  bool whole(uint64_t base, size_t* run, uint16_t* variant) const {
    const KvRun& first = problem_.runs[*run];
    *variant = first.transform;
    bool plain = true;
    uint64_t n = 0;
    for (; *run < problem_.runs.size() && problem_.runs[*run].position < base + kPageTokens;
         ++*run) {
      const KvRun& r = problem_.runs[*run];
      plain = plain && r.log_weight == nullptr && r.transform == *variant;
      n += r.n_tokens;
    }
    return plain && n == kPageTokens;
  }

  bool seen_by_all(uint64_t base) const {
    const Visibility& v = problem_.visible;
    if (v.window == 0 && v.include.empty() && v.exclude.empty()) {
      return true;  // high_ has seen to causality
    }
    return visible_.any(base) == ~uint64_t{0} && visible_.uniform(base);
  }

  template <typename Body>
  void index_run(uint32_t index, uint64_t begin, uint64_t end, size_t* at, Body& body) const {
    const KvRuns runs = problem_.runs;
    Stretch stretch;
    const auto flush = [&] {
      if (stretch.n_blocks > 0) {
        body(stretch);
      }
      stretch.n_blocks = 0;
    };
    // Most often an index run begins where the last one ended.
    size_t run = *at;
    const bool found = run < runs.size() && runs[run].position >= begin &&
                       (run == 0 || runs[run - 1].position + runs[run - 1].n_tokens <= begin);
    if (!found) {
      run = first_run_after(runs, begin);
    }
    while (run < runs.size()) {
      const uint64_t base = block_below(runs[run].position);
      if (base >= end) {
        break;
      }
      uint16_t variant = 0;
      if (!whole(base, &run, &variant) || !seen_by_all(base)) {
        flush();
        continue;
      }
      if (stretch.n_blocks > 0 && stretch.end() == base && stretch.variant == variant) {
        ++stretch.n_blocks;
        continue;
      }
      flush();
      stretch = {base, 1, index, variant};
    }
    flush();
    *at = run;
  }

  const ApproxInput& input_;
  const Problem& problem_;
  VisibleSet visible_;
  uint64_t low_;
  uint64_t high_ = 0;
};

// Tokens stored in [begin, end) that some row sees.
uint64_t count_present(const Problem& problem, uint64_t begin, uint64_t end) {
  const VisibleSet visible(problem.visible, problem.n_query, 0, problem.n_query);
  begin = std::max(begin, visible.low());
  end = std::min(end, visible.high());
  uint64_t n = 0;
  for (size_t i = first_run_after(problem.runs, begin);
       i < problem.runs.size() && problem.runs[i].position < end; ++i) {
    const KvRun& run = problem.runs[i];
    const uint64_t base = block_below(run.position);
    uint64_t present = (run.n_tokens == 64 ? ~uint64_t{0} : (uint64_t{1} << run.n_tokens) - 1)
                       << (run.position - base);
    if (begin > base) {
      present &= ~uint64_t{0} << std::min<uint64_t>(begin - base, 63);
    }
    if (end - base < kPageTokens) {
      present &= (uint64_t{1} << (end - base)) - 1;
    }
    n += static_cast<uint64_t>(__builtin_popcountll(visible.any(base) & present));
  }
  return n;
}

bool has_tokens(const Problem& problem) { return problem.n_query > 0 && !problem.runs.empty(); }

}  // namespace

bool same_use(const ApproxInput& input, const Stretch& a, const Stretch& b) {
  if (a.variant != b.variant) {
    return false;
  }
  const auto& sketches = input.index.sketches;
  return a.index_run == b.index_run || (input.params.proposal == Proposal::kSketch &&
                                        sketches[a.index_run].frame == sketches[b.index_run].frame);
}

bool same_index_runs(const ApproxInput& a, const ApproxInput& b) {
  const size_t n = n_index_runs(a);
  if (a.params.proposal != b.params.proposal || n_index_runs(b) != n) {
    return false;
  }
  Stretch before;
  Stretch here;
  for (size_t i = 0; i < n; ++i) {
    const IndexRange of_a = index_range(a, i);
    const IndexRange of_b = index_range(b, i);
    here.index_run = static_cast<uint32_t>(i);
    if (of_a.begin != of_b.begin || of_a.end != of_b.end ||
        use_query_bytes(a, here) != use_query_bytes(b, here) ||
        (i > 0 && same_use(a, here, before) != same_use(b, here, before))) {
      return false;
    }
    before = here;
  }
  return true;
}

size_t use_query_bytes(const ApproxInput& input, const Stretch& stretch) {
  const uint32_t rows = input.problem->n_query * input.problem->group;
  size_t bytes = 0;
  switch (input.params.proposal) {
    case Proposal::kSketch:
      bytes = hash_index::scan_query_bytes(*input.index.sketches[stretch.index_run].frame, rows);
      break;
    case Proposal::kLsh:
      bytes = hashed_query_bytes(input);
      break;
  }
  return round_up(bytes, kBufferAlign);
}

Counts count_stretches(const ApproxInput& input) {
  Counts counts;
  if (!has_tokens(*input.problem)) {
    return counts;
  }
  Stretch last;
  uint64_t from = 0;  // behind the last stretch
  Walk(input).stretches([&](const Stretch& stretch) {
    if (counts.n_stretches == 0 || !same_use(input, stretch, last)) {
      ++counts.n_uses;
      counts.query_bytes += use_query_bytes(input, stretch);
    }
    ++counts.n_stretches;
    counts.n_keys += uint64_t{stretch.n_blocks} * kPageTokens;
    counts.n_present += count_present(*input.problem, from, stretch.position);
    from = stretch.end();
    last = stretch;
  });
  counts.n_present += counts.n_keys + count_present(*input.problem, from, kEnd);
  return counts;
}

void fill_stretches(const ApproxInput& input, std::span<Stretch> stretches) {
  size_t n = 0;
  Walk(input).stretches([&](const Stretch& stretch) { stretches[n++] = stretch; });
}

size_t max_fixed_ranges(const ApproxInput& input, uint32_t n_stretches) {
  return size_t{n_stretches} + 1 + input.problem->visible.include.size();
}

size_t fill_fixed_ranges(const ApproxInput& input, std::span<const Stretch> stretches,
                         PositionRange* out) {
  const std::span<const PositionRange> include = input.problem->visible.include;
  size_t n = 0;
  size_t at = 0;  // first range of include that ends behind what was written
  const auto add = [&](uint64_t begin, uint64_t end) {
    if (begin >= end) {
      return;
    }
    if (include.empty()) {
      out[n++] = {begin, end};
      return;
    }
    while (at < include.size() && include[at].end <= begin) {
      ++at;
    }
    for (size_t i = at; i < include.size() && include[i].begin < end; ++i) {
      const PositionRange part{std::max(begin, include[i].begin), std::min(end, include[i].end)};
      if (part.begin < part.end) {
        out[n++] = part;
      }
    }
  };
  uint64_t from = 0;
  for (const Stretch& stretch : stretches) {
    add(from, stretch.position);
    from = stretch.end();
  }
  add(from, kEnd);
  return n;
}

}  // namespace kvm::attention
