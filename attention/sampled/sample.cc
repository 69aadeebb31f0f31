// SPDX-License-Identifier: Apache-2.0
#include "attention/sampled/sample.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "attention/sampled/pilot.h"
#include "base/merge.h"

namespace kvm::attention {
namespace {

using hash_index::Candidates;

constexpr float kHalving = 0.693147181f;
// Of sums in fp32, what has to be left of them when keys are taken out.
constexpr double kLeastLeft = 1e-3;

Candidates carve_candidates(uint32_t capacity, uint32_t rows, Carver& carver) {
  Candidates list;
  list.position = carver.take<uint64_t>(capacity);
  list.size = carver.take<float>(capacity);
  list.random = carver.take<float>(capacity);
  list.logits = carver.take<float>(size_t{capacity} * rows);
  list.capacity = capacity;
  return list;
}

// Ids of candidates, and what a sample that grows has to know of them.
struct SampleScratch {
  uint32_t* open;
  uint32_t* closed;
  uint32_t* fresh;  // of the open ones: drawn now
  uint32_t* grown;  // drawn and open before, with another p now
  float* before;    // by id: size before growth
  Candidates candidates;
};

SampleScratch carve_scratch(const ApproxInput& input, uint64_t n_keys, uint32_t rows,
                            Carver& carver) {
  const uint32_t capacity = candidate_capacity(input, n_keys, rows);
  SampleScratch s;
  s.open = carver.take<uint32_t>(capacity);
  s.closed = carver.take<uint32_t>(capacity);
  const uint32_t growing = may_grow(input.params) ? capacity : 0;
  s.fresh = carver.take<uint32_t>(growing);
  s.grown = carver.take<uint32_t>(growing);
  s.before = carver.take<float>(growing);
  if (!may_grow(input.params)) {
    s.candidates = carve_candidates(capacity, rows, carver);
  }
  return s;
}

SampleScratch scratch_of(const Context& c, void* scratch) {
  Carver carver(scratch);
  return carve_scratch(*c.input, c.plan->n_keys_indexed, c.rows, carver);
}

SampleState carve_state(const ApproxInput& input, uint64_t n_keys, uint32_t rows, uint32_t n_shards,
                        Carver& carver) {
  SampleState s{};
  s.exact = carver.take<std::byte>(state_bytes(*input.problem, rows));
  s.head = carver.take<SampleHead>(1);
  std::byte* sums = carver.take<std::byte>(gather_sums_bytes(*input.problem));
  if (sums != nullptr) {
    s.sums = gather_sums_view(*input.problem, sums);
  }
  s.told.position = carver.take<uint64_t>(kMostTold);
  s.told.p = carver.take<float>(kMostTold);
  if (input.is_in_parts) {
    s.told.logits = carver.take<float>(size_t{rows} * most_taken(n_shards));
    s.told.values = carver.take<float>(size_t{acc_stride(*input.problem)} * most_taken(n_shards));
  }
  if (may_grow(input.params)) {
    s.candidates = carve_candidates(candidate_capacity(input, n_keys, rows), rows, carver);
  }
  return s;
}

// One attempt. False where the candidates do not fit.
bool scan(const Context& c, uint64_t begin, uint64_t end, Candidates* list, SampleHead* head) {
  hash_index::DrawParams draw;
  draw.seed = c.params().seed;
  draw.reach = head->reach;
  std::copy_n(head->log_c, c.rows, draw.log_c);
  bool fits = true;
  // One behind, so that each span is scanned knowing what is read after it.
  hash_index::SketchSpan last;
  const auto scan_last = [&](const std::byte* next_blocks) {
    if (!fits || last.n_blocks == 0) {
      return;
    }
    draw.next_blocks = next_blocks;
    fits = hash_index::scan_draw({&last, 1}, c.rows, draw, list, &head->sums);
    head->index_bytes += last.n_blocks * hash_index::block_bytes(
                                             hash_index::frame_kind(*last.frame), c.problem.dim_k);
  };
  for_stretches_in(c, begin, end, [&](const Use& use, const Stretch& stretch) {
    const hash_index::SketchSpan span = span_of(c, use, stretch);
    scan_last(span.blocks);
    last = span;
  });
  scan_last(nullptr);
  return fits;
}

GatherList list_of(const Candidates& from, GatherKind kind, std::span<const uint32_t> ids) {
  return {.kind = kind,
          .ids = ids,
          .position = from.position,
          .p = from.size,
          .per_row = kind == kGatherClosed ? nullptr : from.logits};
}

// e^x for 0 <= x <= ln(kMostReach) within 3e-4, at least 1: the compiler makes vectors of it.
float exp_of_growth(float x) {
  const float y = x * 0.0625f;
  float e = 1.0f + y * (1.0f + y * (0.5f + y * (1.0f / 6.0f + y * (1.0f / 24.0f))));
  e *= e;
  e *= e;
  e *= e;
  return e * e;
}

// Sizes with every row's c times e^log_growth; takes what that closes out of the open mass. A size
// is e^(its largest logit) |v|, so only the largest logit has to be found again. was: sizes before.
void grow_sizes(const float* log_growth, uint32_t rows, const Candidates& list, SampleHead* head,
                float* was) {
  constexpr uint32_t kLanes = 16;
  float before[kLanes];
  float after[kLanes];
  double closed[kMaxApproxRows] = {};
  for (uint32_t i = 0; i < list.n; i += kLanes) {
    const uint32_t n = std::min(kLanes, list.n - i);
    std::fill_n(before, kLanes, -INFINITY);
    std::fill_n(after, kLanes, -INFINITY);
    for (uint32_t r = 0; r < rows; ++r) {
      const float* logits = list.logits + size_t{i} * rows + r;
      for (uint32_t j = 0; j < n; ++j) {
        const float x = logits[size_t{j} * rows] + head->log_c[r];
        before[j] = std::max(before[j], x);
        after[j] = std::max(after[j], x + log_growth[r]);
      }
    }
    for (uint32_t j = 0; j < n; ++j) {
      const float size = list.size[i + j];
      const float grown = size * exp_of_growth(after[j] - before[j]);
      was[i + j] = size;
      list.size[i + j] = grown;
      if (size < 1.0f && grown >= 1.0f) {
        for (uint32_t r = 0; r < rows; ++r) {
          closed[r] += static_cast<double>(
              std::exp(list.logits[size_t{i + j} * rows + r] + head->log_c[r] + log_growth[r]));
        }
      }
    }
  }
  for (uint32_t r = 0; r < rows; ++r) {
    head->log_c[r] += log_growth[r];
    double& mass = head->sums.open_mass[r];
    mass = std::max(mass * std::exp(static_cast<double>(log_growth[r])) - closed[r], 0.0);
  }
}

}  // namespace

namespace {

// Keeps the places of every so many-th open key.
void tell(const Candidates& list, std::span<const uint32_t> open, const SampleState& state) {
  const auto n = static_cast<uint32_t>(open.size());
  const uint32_t step = (n + kMostTold - 1) / kMostTold;
  uint32_t n_told = 0;
  for (uint32_t i = 0; i < n; i += step) {
    state.told.position[n_told] = list.position[open[i]];
    state.told.p[n_told++] = list.size[open[i]];
  }
  state.head->n_told = n_told;
  state.head->told_weight = static_cast<float>(step);
}

}  // namespace

bool may_grow(const ApproxParams& params) {
  return params.mode == ApproxMode::kVerified || params.mode == ApproxMode::kBalanced;
}

uint32_t candidate_capacity(const ApproxInput& input, uint64_t n_keys, uint32_t rows) {
  const ApproxParams& params = input.params;
  const uint64_t most = std::min(n_keys, kShardTokens);
  // More than what is worth sampling is never drawn, shards that hold more than others apart.
  auto wanted = static_cast<uint64_t>(1.25 * max_read_fraction(params, *input.problem, n_keys) *
                                      static_cast<double>(kShardTokens)) +
                1024;
  if (params.budget > 0 && params.mode != ApproxMode::kVerified) {
    const auto budget = static_cast<double>(std::min(params.budget, n_keys) * rows);
    double drawn = budget;
    if (params.mode == ApproxMode::kBalanced) {
      // As far as the first scan looks (reach_of), of which a shard has at most twice its part: it
      // keeps them until the request ends.
      drawn = std::min(kMostBudgets * budget, std::max(kCandidates, kLeastReach * budget));
      drawn *= std::min(1.0, 2.0 * double{kShardTokens} / static_cast<double>(n_keys));
    }
    wanted = static_cast<uint64_t>(std::min(double{kShardTokens / 2}, 1.25 * drawn + 1024));
  }
  return static_cast<uint32_t>(std::min(most, wanted));
}

size_t sample_state_bytes(const ApproxInput& input, uint64_t n_keys, uint32_t rows,
                          uint32_t n_shards) {
  Carver carver(nullptr);
  carve_state(input, n_keys, rows, n_shards, carver);
  return carver.used_bytes();
}

size_t sample_scratch_bytes(const ApproxInput& input, uint64_t n_keys, uint32_t rows) {
  Carver carver(nullptr);
  carve_scratch(input, n_keys, rows, carver);
  return carver.used_bytes();
}

SampleState sample_state(const Context& c, void* state, void* scratch) {
  Carver carver(state);
  SampleState s = carve_state(*c.input, c.plan->n_keys_indexed, c.rows, c.plan->n_shards, carver);
  s.told.n = s.head->n_told;
  s.told.weight = s.head->told_weight;
  if (may_grow(c.params())) {
    s.candidates.n = s.head->n_candidates;
  } else if (scratch != nullptr) {
    s.candidates = scratch_of(c, scratch).candidates;
  }
  return s;
}

Candidates scan_shard(const Context& c, uint64_t shard_id, const float* log_c, float reach,
                      const SampleState& state) {
  SampleHead& head = *state.head;
  const uint64_t bytes_before = head.index_bytes;
  float shift = 0.0f;
  Candidates list = state.candidates;
  while (true) {
    head = SampleHead{};
    head.index_bytes = bytes_before;
    head.reach = reach;
    for (uint32_t r = 0; r < c.rows; ++r) {
      head.log_c[r] = log_c[r] - shift;
    }
    list.n = 0;
    if (scan(c, shard_id * kShardTokens, (shard_id + 1) * kShardTokens, &list, &head)) {
      return list;
    }
    if (reach > 1.0f) {
      reach = std::max(reach / 2, 1.0f);
    } else {
      // In the end by shares of itself: where log_c is so large that it has no place for a factor
      // of two, the loop comes to an end as well.
      shift += std::max(kHalving, shift / 8);
    }
  }
}

void draw_shard(const Context& c, uint64_t shard_id, const float* log_c, float reach, void* scratch,
                const SampleState& state) {
  SampleState drawn = state;
  drawn.candidates = scan_shard(c, shard_id, log_c, reach, state);
  state.head->n_candidates = drawn.candidates.n;
  clear_sums(c.problem, state.sums);
  gather_drawn(c, drawn, scratch);
}

namespace {

double sum_of(const GatherSums& sums, uint32_t row, GatherSum which) {
  const float* at = sums.sums + (size_t{row} * kGatherSums + which) * kGatherKeys;
  return std::accumulate(at, at + kGatherKeys, 0.0);
}

// Reads the keys of a sample that has grown whose p is another, and those that are new. False where
// so little is left of a sum that rounding what was taken from it would show.
bool gather_growth(const Context& c, const SampleState& state, const SampleScratch& s) {
  const Candidates& list = state.candidates;
  uint32_t n_open = 0;
  uint32_t n_closed = 0;
  uint32_t n_fresh = 0;
  uint32_t n_grown = 0;
  for (uint32_t i = 0; i < list.n; ++i) {
    const float p = list.size[i];
    const bool was_closed = s.before[i] >= 1.0f;
    const bool was_open = !was_closed && list.random[i] < s.before[i];
    const bool is_open = p < 1.0f && list.random[i] < p;
    s.open[n_open] = s.closed[n_closed] = s.fresh[n_fresh] = s.grown[n_grown] = i;
    n_open += is_open ? 1 : 0;
    n_closed += p >= 1.0f && !was_closed ? 1 : 0;
    n_fresh += is_open && !was_open ? 1 : 0;
    n_grown += was_open && p != s.before[i] ? 1 : 0;
  }
  double open[kMaxApproxRows];
  double square[kMaxApproxRows];
  for (uint32_t r = 0; r < c.rows; ++r) {
    open[r] = sum_of(state.sums, r, kSumOpen);
    square[r] = sum_of(state.sums, r, kSumSquare);
  }
  const GatherContext context = c.gathering();
  GatherList grown = list_of(list, kGatherGrown, {s.grown, n_grown});
  grown.p_before = s.before;
  gather(context, grown, state.sums);
  gather(context, list_of(list, kGatherClosed, {s.closed, n_closed}), state.sums);
  gather(context, list_of(list, kGatherOpen, {s.fresh, n_fresh}), state.sums);
  tell(list, {s.open, n_open}, state);
  state.head->n_open = n_open;
  state.head->n_closed += n_closed;
  for (uint32_t r = 0; r < c.rows; ++r) {
    if (!(sum_of(state.sums, r, kSumOpen) >= kLeastLeft * open[r]) ||
        !(sum_of(state.sums, r, kSumSquare) >= kLeastLeft * square[r])) {
      return false;
    }
  }
  return n_open > 0;
}

}  // namespace

void redraw_shard(const Context& c, const float* log_growth, void* scratch,
                  const SampleState& state) {
  SampleHead& head = *state.head;
  const SampleScratch s = scratch_of(c, scratch);
  grow_sizes(log_growth, c.rows, state.candidates, &head, s.before);
  head.reach /= std::exp(*std::max_element(log_growth, log_growth + c.rows));
  head.redrawn = true;
  if (!gather_growth(c, state, s)) {
    clear_sums(c.problem, state.sums);
    gather_drawn(c, state, scratch);
  }
}

void gather_drawn(const Context& c, const SampleState& state, void* scratch) {
  const SampleScratch s = scratch_of(c, scratch);
  const Candidates& list = state.candidates;
  uint32_t n_open = 0;
  uint32_t n_closed = 0;
  // Chance decides which list a key goes to: no branches on it.
  for (uint32_t i = 0; i < list.n; ++i) {
    const bool closed = list.size[i] >= 1.0f;
    const bool drawn = list.random[i] < list.size[i];
    s.closed[n_closed] = i;
    s.open[n_open] = i;
    n_closed += closed ? 1 : 0;
    n_open += drawn && !closed ? 1 : 0;
  }
  const GatherContext context = c.gathering();
  gather(context, list_of(list, kGatherClosed, {s.closed, n_closed}), state.sums);
  gather(context, list_of(list, kGatherOpen, {s.open, n_open}), state.sums);
  tell(list, {s.open, n_open}, state);
  state.head->n_open = n_open;
  state.head->n_closed = n_closed;
}

}  // namespace kvm::attention
