// SPDX-License-Identifier: Apache-2.0
#include "attention/sampled/sample.h"

#include <algorithm>
#include <cmath>

#include "base/merge.h"

namespace kvm::attention {
namespace {

using hash_index::Candidates;

constexpr float kHalving = 0.693147181f;

Candidates carve_candidates(uint32_t capacity, uint32_t rows, Carver& carver) {
  Candidates list;
  list.position = carver.take<uint64_t>(capacity);
  list.size = carver.take<float>(capacity);
  list.random = carver.take<float>(capacity);
  list.logits = carver.take<float>(size_t{capacity} * rows);
  list.capacity = capacity;
  return list;
}

struct SampleScratch {
  uint32_t* open;  // ids
  uint32_t* closed;
  Candidates candidates;
};

SampleScratch carve_scratch(const ApproxParams& params, uint64_t n_keys, uint32_t rows,
                            Carver& carver) {
  const uint32_t capacity = candidate_capacity(params, n_keys, rows);
  SampleScratch s;
  s.open = carver.take<uint32_t>(capacity);
  s.closed = carver.take<uint32_t>(capacity);
  if (!may_grow(params)) {
    s.candidates = carve_candidates(capacity, rows, carver);
  }
  return s;
}

SampleScratch scratch_of(const Context& c, void* scratch) {
  Carver carver(scratch);
  return carve_scratch(c.params(), c.plan->n_keys_indexed, c.rows, carver);
}

SampleState carve_state(const ApproxInput& input, uint64_t n_keys, uint32_t rows, Carver& carver) {
  SampleState s{};
  s.exact = carver.take<std::byte>(state_bytes(*input.problem, rows));
  s.head = carver.take<SampleHead>(1);
  std::byte* sums = carver.take<std::byte>(gather_sums_bytes(*input.problem));
  if (sums != nullptr) {
    s.sums = gather_sums_view(*input.problem, sums);
  }
  if (may_grow(input.params)) {
    s.candidates = carve_candidates(candidate_capacity(input.params, n_keys, rows), rows, carver);
  }
  return s;
}

void add_bias(const Context& c, const float* bias, uint32_t first, const Candidates& list) {
  for (uint32_t i = first; i < list.n; ++i) {
    for (uint32_t r = 0; r < c.rows; ++r) {
      list.logits[size_t{i} * c.rows + r] += bias[r] * c.problem.scale;
    }
  }
}

// One attempt. False where the candidates do not fit.
bool scan(const Context& c, uint64_t begin, uint64_t end, Candidates* list, SampleHead* head) {
  const QueryRows q = query_rows(c.problem, c.prepared.exact);
  bool fits = true;
  for_stretches_in(c, begin, end, [&](const Use& use, const Stretch& stretch) {
    if (!fits) {
      return;
    }
    const SketchedRun& run = c.input->index.sketches[stretch.index_run];
    const size_t block =
        hash_index::block_bytes(hash_index::frame_kind(*run.frame), c.problem.dim_k);
    const uint64_t offset = (stretch.position - run.position) / kPageTokens;
    const hash_index::SketchSpan span{.frame = run.frame,
                                      .query = c.prepared.queries + use.query_at,
                                      .blocks = run.blocks + offset * block,
                                      .n_blocks = stretch.n_blocks,
                                      .position = stretch.position};
    hash_index::DrawParams draw;
    draw.seed = c.params().seed;
    draw.reach = head->reach;
    const float* bias = bias_of(q, use.variant);
    for (uint32_t r = 0; r < c.rows; ++r) {
      draw.log_c[r] = head->log_c[r] + (bias == nullptr ? 0.0f : bias[r] * c.problem.scale);
    }
    const uint32_t first = list->n;
    fits = hash_index::scan_draw({&span, 1}, c.rows, draw, list, &head->sums);
    head->index_bytes += stretch.n_blocks * block;
    if (fits && bias != nullptr) {
      add_bias(c, bias, first, *list);
    }
  });
  return fits;
}

GatherList list_of(const Candidates& from, GatherKind kind, std::span<const uint32_t> ids) {
  return {.kind = kind,
          .ids = ids,
          .position = from.position,
          .p = from.size,
          .per_row = kind == kGatherOpen ? from.logits : nullptr};
}

// Weight of a candidate by the sketch, in units of 1 / c.
double hat(const Candidates& list, uint32_t i, uint32_t row, uint32_t rows,
           const SampleHead& head) {
  return std::exp(static_cast<double>(list.logits[size_t{i} * rows + row]) +
                  static_cast<double>(head.log_c[row]));
}

// sum h^2 over open keys, from the candidates: they hold every key of size 1/reach or more, and the
// others with chance reach times their size.
void add_squares(const Context& c, const Candidates& list, SampleHead* head) {
  for (uint32_t i = 0; i < list.n; ++i) {
    const float size = list.size[i];
    if (size >= 1.0f || size < kLeastSquared) {
      continue;
    }
    const double chance = std::min(1.0, static_cast<double>(size * head->reach));
    for (uint32_t r = 0; r < c.rows; ++r) {
      const double h = hat(list, i, r, c.rows, *head);
      head->square[r] += h * h / chance;
    }
  }
}

}  // namespace

bool may_grow(const ApproxParams& params) { return params.mode == ApproxMode::kVerified; }

uint32_t candidate_capacity(const ApproxParams& params, uint64_t n_keys, uint32_t rows) {
  const uint64_t most = std::min(n_keys, kShardTokens);
  uint64_t wanted = kShardTokens / 2;
  if (params.budget > 0 && !may_grow(params)) {
    const uint64_t budget = std::min(params.budget, n_keys);
    wanted = std::min(wanted, budget * rows + budget * rows / 4 + 1024);
  }
  return static_cast<uint32_t>(std::min(most, wanted));
}

size_t sample_state_bytes(const ApproxInput& input, uint64_t n_keys, uint32_t rows) {
  Carver carver(nullptr);
  carve_state(input, n_keys, rows, carver);
  return carver.used_bytes();
}

size_t sample_scratch_bytes(const ApproxInput& input, uint64_t n_keys, uint32_t rows) {
  Carver carver(nullptr);
  carve_scratch(input.params, n_keys, rows, carver);
  return carver.used_bytes();
}

SampleState sample_state(const Context& c, void* state, void* scratch) {
  Carver carver(state);
  SampleState s = carve_state(*c.input, c.plan->n_keys_indexed, c.rows, carver);
  if (may_grow(c.params())) {
    s.candidates.n = s.head->n_candidates;
  } else if (scratch != nullptr) {
    s.candidates = scratch_of(c, scratch).candidates;
  }
  return s;
}

void draw_shard(const Context& c, uint64_t shard_id, float log_growth, void* scratch,
                const SampleState& state) {
  SampleHead& head = *state.head;
  const uint64_t keys_before = head.keys_read;
  const uint64_t bytes_before = head.index_bytes;
  float reach = may_grow(c.params()) ? kReach : 1.0f;
  float shift = 0.0f;
  Candidates list = state.candidates;
  while (true) {
    head = SampleHead{};
    head.keys_read = keys_before;
    head.index_bytes = bytes_before;
    head.reach = reach;
    for (uint32_t r = 0; r < c.rows; ++r) {
      head.log_c[r] = c.prepared.head->log_c[r] + log_growth - shift;
    }
    list.n = 0;
    if (scan(c, shard_id * kShardTokens, (shard_id + 1) * kShardTokens, &list, &head)) {
      break;
    }
    if (reach > 1.0f) {
      reach = std::max(reach / 2, 1.0f);
    } else {
      // In the end by shares of itself: where log_c is so large that it has no place for a factor
      // of two, the loop comes to an end as well.
      shift += std::max(kHalving, shift / 8);
    }
  }
  head.n_candidates = list.n;
  if (may_grow(c.params())) {
    add_squares(c, list, &head);
  }
  SampleState drawn = state;
  drawn.candidates = list;
  clear_sums(c.problem, state.sums);
  gather_drawn(c, drawn, scratch);
}

void gather_drawn(const Context& c, const SampleState& state, void* scratch) {
  const SampleScratch s = scratch_of(c, scratch);
  const Candidates& list = state.candidates;
  uint32_t n_open = 0;
  uint32_t n_closed = 0;
  for (uint32_t i = 0; i < list.n; ++i) {
    if (list.size[i] >= 1.0f) {
      s.closed[n_closed++] = i;
    } else if (list.random[i] < list.size[i]) {
      s.open[n_open++] = i;
    }
  }
  const GatherContext context = c.gathering();
  gather(context, list_of(list, kGatherClosed, {s.closed, n_closed}), state.sums);
  GatherList open = list_of(list, kGatherOpen, {s.open, n_open});
  open.split = may_grow(c.params());
  gather(context, open, state.sums);
  state.head->n_open = n_open;
  state.head->n_closed = n_closed;
  state.head->keys_read += n_open + n_closed;
}

void grow_shard(const Context& c, double from, double to, void* scratch, const SampleState& state) {
  const SampleScratch s = scratch_of(c, scratch);
  const Candidates& list = state.candidates;
  const GatherContext context = c.gathering();
  // What f closes leaves the open sums, and joins the closed ones with what is drawn closed now.
  uint32_t n_leaving = 0;
  uint32_t n_closed = 0;
  for (uint32_t i = 0; i < list.n; ++i) {
    const double size = static_cast<double>(list.size[i]);
    if (size * from < 1.0 && size * to >= 1.0) {
      s.closed[n_closed++] = i;
      if (static_cast<double>(list.random[i]) < size * from) {
        s.open[n_leaving++] = i;
      }
    }
  }
  GatherList leaving = list_of(list, kGatherOpen, {s.open, n_leaving});
  leaving.split = true;
  leaving.sign = -1.0f;
  gather(context, leaving, state.sums);
  gather(context, list_of(list, kGatherClosed, {s.closed, n_closed}), state.sums);
  uint32_t n_new = 0;
  for (uint32_t i = 0; i < list.n; ++i) {
    const double size = static_cast<double>(list.size[i]);
    const double u = static_cast<double>(list.random[i]);
    if (size * to < 1.0 && u >= size * from && u < size * to) {
      s.open[n_new++] = i;
    }
  }
  GatherList fresh = list_of(list, kGatherOpen, {s.open, n_new});
  fresh.split = true;
  gather(context, fresh, state.sums);
  state.head->n_open += n_new - n_leaving;
  state.head->n_closed += n_closed;
  state.head->keys_read += n_new + n_closed - n_leaving;
}

GrownSums grown_sums(const Context& c, const SampleState& state, double f) {
  const SampleHead& head = *state.head;
  const Candidates& list = state.candidates;
  GrownSums grown;
  std::copy_n(head.sums.open_mass, c.rows, grown.open_mass);
  if (f == 1.0) {
    grown.expected = head.sums.expected;
    grown.n_open = head.sums.n_keys - static_cast<double>(head.n_closed);
    std::copy_n(head.sums.spread, c.rows, grown.spread);
    return grown;
  }
  // sum h^2 (1 - p)/p = sum h^2/p - sum h^2 over open keys; the scan gives the difference. What f
  // closes was open and is among the candidates, all of it: f <= reach.
  double closed = 0;
  double closing = 0;
  double closing_size = 0;
  double closing_over_p[kMaxApproxRows] = {};
  double closing_square[kMaxApproxRows] = {};
  const auto least = static_cast<float>(1.0 / f);
  for (uint32_t i = 0; i < list.n; ++i) {
    if (list.size[i] < least) {
      continue;
    }
    if (list.size[i] >= 1.0f) {
      closed += 1;
      continue;
    }
    const auto size = static_cast<double>(list.size[i]);
    closing += 1;
    closing_size += size;
    for (uint32_t r = 0; r < c.rows; ++r) {
      const double h = hat(list, i, r, c.rows, head);
      grown.open_mass[r] -= h;
      closing_over_p[r] += h * h / size;
      closing_square[r] += h * h;
    }
  }
  const double open_size = std::max(head.sums.expected - closed - closing_size, 0.0);
  grown.expected = closed + closing + f * open_size;
  grown.n_open = head.sums.n_keys - closed - closing;
  for (uint32_t r = 0; r < c.rows; ++r) {
    grown.open_mass[r] = std::max(grown.open_mass[r], 0.0);
    const double over_p = head.sums.spread[r] + head.square[r] - closing_over_p[r];
    grown.spread[r] = std::max(over_p / f - (head.square[r] - closing_square[r]), 0.0);
  }
  return grown;
}

}  // namespace kvm::attention
