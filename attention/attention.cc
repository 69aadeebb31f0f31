// SPDX-License-Identifier: Apache-2.0
#include "attention/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention/exact/layout.h"
#include "attention/exact/visibility.h"
#include "base/assert.h"
#include "base/merge.h"
#include "base/round.h"

namespace kvm::attention {
namespace {

bool is_identity(const QueryTransform& t) { return t.n_pairs == 0 && t.channel_scale == nullptr; }

float load_element(const void* p, Dtype dtype, uint64_t i) {
  switch (dtype) {
    case Dtype::kF32:
      return static_cast<const float*>(p)[i];
    case Dtype::kF16:
      return f16_to_f32(static_cast<const uint16_t*>(p)[i]);
    case Dtype::kBf16:
      return bf16_to_f32(static_cast<const uint16_t*>(p)[i]);
  }
  return 0.0f;
}

void rotate(const QueryTransform& t, uint64_t token, const float* in, float* out) {
  const float* cos = t.cos + token * t.token_stride;
  const float* sin = t.sin + token * t.token_stride;
  for (uint32_t i = 0; i < t.n_pairs; ++i) {
    const bool interleaved = t.layout == RotationLayout::kInterleaved;
    const uint32_t x = interleaved ? 2 * i : i;
    const uint32_t y = interleaved ? 2 * i + 1 : i + t.n_pairs;
    out[x] = in[x] * cos[i] - in[y] * sin[i];
    out[y] = in[x] * sin[i] + in[y] * cos[i];
  }
}

// One row of a query token under one transform: fp32 channels to `out`.
void transform_row(const QueryTransform& t, uint64_t token, const float* in, uint32_t dim,
                   float* out) {
  std::copy_n(in, dim, out);
  if (t.n_pairs != 0) {
    rotate(t, token, in, out);
  }
  if (t.channel_scale != nullptr) {
    for (uint32_t d = 0; d < dim; ++d) {
      out[d] *= t.channel_scale[d];
    }
  }
}

void check_problem(const Problem& p) {
  KVM_ASSERT(p.group >= 1 && p.group <= kMaxGroup);
  KVM_ASSERT(p.dim_k >= 8 && p.dim_k <= kMaxHeadDim && p.dim_k % 8 == 0);
  KVM_ASSERT(p.dim_v >= 8 && p.dim_v <= kMaxHeadDim && p.dim_v % 8 == 0);
  KVM_ASSERT(!p.v_in_k || p.dim_v <= p.dim_k);
  KVM_ASSERT(p.transforms.size() <= kMaxTransforms);
  KVM_ASSERT(p.item_rows == 0 || p.item_rows >= uint64_t{p.n_query} * p.group);
}

void store_element(void* p, Dtype dtype, uint64_t i, float value) {
  switch (dtype) {
    case Dtype::kF32:
      static_cast<float*>(p)[i] = value;
      break;
    case Dtype::kF16:
      static_cast<uint16_t*>(p)[i] = f32_to_f16(value);
      break;
    case Dtype::kBf16:
      static_cast<uint16_t*>(p)[i] = f32_to_bf16(value);
      break;
  }
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// o and lse of one row from its whole state: NaN where that or the query is.
void write_row(const Problem& p, uint32_t row, const float* o, float m, float l) {
  const uint32_t query = row / p.group;
  const uint32_t head = row % p.group;
  const bool is_number = !std::isnan(l) && query_is_finite(p, row);
  float factor = 1.0f;
  if (p.sink_logits != nullptr) {
    // The sink is a state with l = 1 and o = 0.
    const float sink = p.sink_logits[head];
    const MergeWeights w = merge_weights(m, sink);
    factor = w.a;
    l = w.a * l + w.b;
    m = w.m;
  }
  if (!is_number) {
    l = factor = kNan;
  } else {
    factor = l > 0.0f ? factor / l : 0.0f;
  }
  const uint64_t at = query * p.o_stride_query + head * p.o_stride_head;
  for (uint32_t d = 0; d < p.dim_v; ++d) {
    store_element(p.o, p.dtype_o, at + d, o[d] * factor);
  }
  if (p.lse != nullptr) {
    p.lse[query * p.lse_stride_query + head * p.lse_stride_head] = state_lse(m, l);
  }
}

}  // namespace

size_t first_run_after(KvRuns runs, uint64_t position) {
  const auto at = std::partition_point(runs.begin(), runs.end(), [position](const KvRun& run) {
    return run.position + run.n_tokens <= position;
  });
  return static_cast<size_t>(at - runs.begin());
}

PreparedQueries carve_queries(const Problem& problem, Carver& carver) {
  PreparedQueries q;
  q.n_variants = std::max<uint32_t>(1, static_cast<uint32_t>(problem.transforms.size()));
  q.variant_rows = problem.n_query * problem.group + kRowPad;
  q.stride = static_cast<uint32_t>(round_up(problem.dim_k, kDimPad));
  const size_t n = size_t{q.n_variants} * q.variant_rows;
  q.f32 = carver.take<float>(n * q.stride);
  q.bf16 = carver.take<uint16_t>(n * q.stride);
  q.bf16_exact = carver.take<uint8_t>(q.n_variants);
  q.i16 = carver.take<int16_t>(n * q.stride);
  q.i16_step = carver.take<float>(n);
  q.i16_near = carver.take<uint8_t>(n);
  return q;
}

QueryRows query_rows(const Problem& problem, const void* prepared) {
  Carver carver(const_cast<void*>(prepared));
  const PreparedQueries q = carve_queries(problem, carver);
  return {.f32 = q.f32,
          .bf16 = q.bf16,
          .bf16_exact = q.bf16_exact,
          .i16 = q.i16,
          .i16_step = q.i16_step,
          .i16_near = q.i16_near,
          .variant_stride = uint64_t{q.variant_rows} * q.stride,
          .stride = q.stride,
          .rows = problem.n_query * problem.group,
          .group = problem.group,
          .variant_rows = q.variant_rows};
}

StateView state_view(const Problem& problem, uint32_t row_count, void* state) {
  float* o = static_cast<float*>(state);
  float* m = o + size_t{row_count} * problem.dim_v;
  return {o, m, m + row_count};
}

size_t state_bytes(const Problem& problem, uint32_t row_count) {
  const size_t bytes = size_t{row_count} * (problem.dim_v + 2) * sizeof(float);
  return round_up(bytes, kBufferAlign);
}

namespace {

// A ChunkRange holds chunks by their absolute index.
struct ChunkRange {
  uint64_t begin = 0;
  uint64_t end = 0;
};

// Those of which every token lies behind the sinks and before every row's window.
ChunkRange hidden_chunks(const Problem& problem, const Plan& plan, const VisibleSet& visible) {
  const uint64_t sinks = problem.visible.sinks;
  if (sinks >= visible.window_low() || problem.wants_column_sums) {
    return {};
  }
  return {(sinks + plan.chunk_tokens - 1) / plan.chunk_tokens,
          visible.window_low() / plan.chunk_tokens};
}

// Numbers the chunks of `all` but not of `hidden`.
void number_chunks(ChunkRange all, ChunkRange hidden, Plan* plan) {
  hidden = {std::max(hidden.begin, all.begin), std::min(hidden.end, all.end)};
  if (hidden.begin < hidden.end) {
    if (hidden.begin == all.begin) {
      all.begin = hidden.end;
    } else if (hidden.end == all.end) {
      all.end = hidden.begin;
    } else {
      plan->gap_at = hidden.begin;
      plan->gap_chunks = hidden.end - hidden.begin;
    }
  }
  plan->first_chunk = all.begin;
  plan->n_chunks = static_cast<uint32_t>(all.end - all.begin - plan->gap_chunks);
}

}  // namespace

Plan make_plan(const Problem& problem, const KernelTable* table) {
  check_problem(problem);
  Plan plan;
  plan.table = table != nullptr ? table : &active_table();
  plan.rows = problem.n_query * problem.group;
  plan.blocked = std::max(plan.rows, problem.item_rows) >= kBlockedRows;
  plan.rows_divisible = plan.blocked;
  plan.chunk_tokens = plan.blocked ? kBlockedChunkTokens : kStreamChunkTokens;
  Carver carver(nullptr);
  carve_queries(problem, carver);
  plan.prepared_bytes = carver.used_bytes();
  plan.scratch_bytes = plan.blocked ? block_scratch_bytes(problem) : stream_scratch_bytes(problem);
  if (plan.rows == 0 || problem.runs.empty()) {
    return plan;
  }
  const VisibleSet visible(problem.visible, problem.n_query, 0, problem.n_query);
  const KvRun& last = problem.runs.back();
  const uint64_t begin = std::max(visible.low(), problem.runs.front().position);
  const uint64_t end = std::min(visible.high(), last.position + last.n_tokens);
  if (begin < end) {
    number_chunks({begin / plan.chunk_tokens, (end - 1) / plan.chunk_tokens + 1},
                  hidden_chunks(problem, plan, visible), &plan);
  }
  return plan;
}

namespace {

// The row's channels as fp32, and as bf16 where that is exact or else rounded.
void prepare_row(const Problem& problem, const QueryTransform& t, bool exact, uint64_t token,
                 uint64_t from, float* out, uint16_t* out_bf16) {
  const uint32_t dim = problem.dim_k;
  if (exact) {
    const uint16_t* in = static_cast<const uint16_t*>(problem.q) + from;
    std::memcpy(out_bf16, in, dim * sizeof(uint16_t));
    for (uint32_t d = 0; d < dim; ++d) {
      out[d] = bf16_to_f32(in[d]);
    }
    return;
  }
  float in[kMaxHeadDim];
  for (uint32_t d = 0; d < dim; ++d) {
    in[d] = load_element(problem.q, problem.dtype_q, from + d);
  }
  transform_row(t, token, in, dim, out);
  for (uint32_t d = 0; d < dim; ++d) {
    out_bf16[d] = f32_to_bf16(out[d]);
  }
}

// The most that rounding a query row to words may change, relative to its length. bf16 queries keep
// every bit of channels down to 1/128 of the largest.
constexpr float kI16QueryError = 0x1p-14f;

// The bits of a query row's integers: as many as words have, and fewer where the product with a row
// of int8 could leave 32 bits.
constexpr int query_bits(uint32_t dim) {
  constexpr uint32_t kMostWords = INT32_MAX / (127 * 32767);
  return dim <= kMostWords ? 15 : 14;
}
static_assert(query_bits(kMaxHeadDim) == 14 && kMaxHeadDim <= INT32_MAX / (127 * 16384));

// A row as integers of query_bits times *step, a power of two; whether that is near enough. A row
// that is not finite is not.
bool round_row(const float* in, uint32_t dim, int16_t* out, float* step) {
  float top = 0.0f;
  for (uint32_t d = 0; d < dim; ++d) {
    top = std::max(top, std::fabs(in[d]));
  }
  if (!(top >= 0x1p-100f && top <= 0x1p100f)) {
    *step = 0.0f;
    return top == 0.0f;
  }
  int exponent = 0;
  std::frexp(top, &exponent);
  const int bits = query_bits(dim);
  *step = std::ldexp(1.0f, exponent - bits);
  const float inverse = std::ldexp(1.0f, bits - exponent);
  constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer
  float error = 0.0f;
  float length = 0.0f;
  for (uint32_t d = 0; d < dim; ++d) {
    const float x = in[d] * inverse;
    const float rounded = std::min((x + kRound) - kRound, 32767.0f);
    error += (x - rounded) * (x - rounded);
    length += x * x;
    out[d] = static_cast<int16_t>(rounded);
  }
  return error <= kI16QueryError * kI16QueryError * length;
}

}  // namespace

void prepare_queries(const Problem& problem, const Plan& plan, void* prepared) {
  Carver carver(prepared);
  const PreparedQueries q = carve_queries(problem, carver);
  std::memset(prepared, 0, carver.used_bytes());
  const QueryTransform identity;
  for (uint32_t variant = 0; variant < q.n_variants; ++variant) {
    const QueryTransform& t = problem.transforms.empty() ? identity : problem.transforms[variant];
    const bool exact = problem.dtype_q == Dtype::kBf16 && is_identity(t);
    q.bf16_exact[variant] = exact;
    std::fill_n(q.i16_near + size_t{variant} * q.variant_rows, q.variant_rows, uint8_t{1});
    for (uint32_t row = 0; row < plan.rows; ++row) {
      const size_t at = size_t{variant} * q.variant_rows + row;
      const uint64_t from = row / problem.group * problem.q_stride_query +
                            row % problem.group * problem.q_stride_head;
      if (!query_is_finite(problem, row)) {
        continue;  // zeros, which spoil nothing; write_row knows
      }
      prepare_row(problem, t, exact, row / problem.group, from, q.f32 + at * q.stride,
                  q.bf16 + at * q.stride);
      if (!plan.blocked) {  // which has no use for them
        const bool near =
            round_row(q.f32 + at * q.stride, problem.dim_k, q.i16 + at * q.stride, q.i16_step + at);
        q.i16_near[at] = near ? 1 : 0;
      }
    }
  }
}

namespace {

// Calls eval(first absolute chunk, number of chunks, number of chunks before them) for what lies
// before the gap and for what lies behind it.
template <typename Eval>
void for_stretches(const Plan& plan, uint64_t chunk, uint32_t n, Eval eval) {
  const auto n_before =
      chunk < plan.gap_at ? static_cast<uint32_t>(std::min<uint64_t>(n, plan.gap_at - chunk)) : 0u;
  if (n_before > 0) {
    eval(chunk, n_before, 0u);
  }
  if (n > n_before) {
    eval(chunk + n_before + plan.gap_chunks, n - n_before, n_before);
  }
}

}  // namespace

void eval_chunks(const Problem& problem, const Plan& plan, const void* prepared, RowRange rows,
                 uint64_t chunk, uint32_t n, void* scratch, void* states) {
  KVM_ASSERT(uint64_t{rows.first} + rows.count <= plan.rows);
  KVM_ASSERT(plan.blocked || (rows.first == 0 && rows.count == plan.rows));
  const size_t stride = state_bytes(problem, rows.count);
  for_stretches(plan, chunk, n, [&](uint64_t first, uint32_t count, uint32_t n_before) {
    std::byte* to = static_cast<std::byte*>(states) + n_before * stride;
    if (plan.blocked) {
      block_chunks(problem, plan, prepared, rows, first, count, scratch, to);
    } else {
      stream_chunks(problem, plan, prepared, first, count, scratch, to);
    }
  });
}

void eval_chunks(std::span<const GangMember> members, const Plan& plan, uint64_t chunk, uint32_t n,
                 void* scratch) {
  KVM_ASSERT(!plan.blocked && !members.empty() && members.size() <= kMaxGang);
  for_stretches(plan, chunk, n, [&](uint64_t first, uint32_t count, uint32_t n_before) {
    GangMember later[kMaxGang];
    for (size_t m = 0; m < members.size(); ++m) {
      const size_t stride = state_bytes(*members[m].problem, plan.rows);
      later[m] = members[m];
      later[m].states = static_cast<std::byte*>(members[m].states) + n_before * stride;
    }
    stream_gang({later, members.size()}, plan, first, count, scratch);
  });
}

MergeTree::MergeTree(const Plan& plan)
    : plan_(&plan), end_(plan.first_chunk + plan.n_chunks + plan.gap_chunks) {}

// The first chunk at or behind `chunk` that has a state.
uint64_t MergeTree::present(uint64_t chunk) const {
  const uint64_t gap_at = plan_->gap_at;
  const uint64_t gap_chunks = plan_->gap_chunks;
  chunk = std::max(chunk, plan_->first_chunk);
  return gap_at <= chunk && chunk - gap_at < gap_chunks ? gap_at + gap_chunks : chunk;
}

uint32_t MergeTree::state(uint64_t chunk) const {
  const uint64_t skipped = chunk < plan_->gap_at ? 0 : plan_->gap_chunks;
  return static_cast<uint32_t>(chunk - plan_->first_chunk - skipped);
}

MergeTree::Node MergeTree::leaf(uint32_t state) const {
  return {plan_->absolute(plan_->first_chunk + state), 1};
}

std::optional<MergeTree::Merge> MergeTree::next(Node* node) const {
  while (node->begin > plan_->first_chunk || node->begin + node->size < end_) {
    const uint64_t half = node->size;
    const uint64_t begin = node->begin / (2 * half) * (2 * half);
    const bool is_last = begin != node->begin;
    *node = {begin, 2 * half};
    // A node without a left or a right half is the other half.
    const uint64_t left = present(begin);
    const uint64_t right = present(begin + half);
    if (left < begin + half && right < std::min(begin + 2 * half, end_)) {
      return Merge{state(left), state(right), is_last};
    }
  }
  return std::nullopt;
}

uint32_t MergeTree::states_end(const Node& node) const {
  return state(present(std::min(node.begin + node.size, end_)));
}

void merge_states(const Problem& problem, RowRange rows, const MergeTree::Merge& merge,
                  void* states) {
  const size_t stride = state_bytes(problem, rows.count);
  auto* base = static_cast<std::byte*>(states);
  const StateView into = state_view(problem, rows.count, base + merge.into * stride);
  const StateView from = state_view(problem, rows.count, base + merge.from * stride);
  for (uint32_t r = 0; r < rows.count; ++r) {
    merge_row(into.o + size_t{r} * problem.dim_v, into.m + r, into.l + r,
              from.o + size_t{r} * problem.dim_v, from.m[r], from.l[r], problem.dim_v);
  }
}

void write_result(const Problem& problem, const Plan& plan, RowRange rows, void* states) {
  float nothing[kMaxHeadDim] = {};
  for (uint32_t r = 0; r < rows.count; ++r) {
    if (plan.n_chunks == 0) {
      write_row(problem, rows.first + r, nothing, kEmptyLse, 0.0f);
      continue;
    }
    const StateView whole = state_view(problem, rows.count, states);
    write_row(problem, rows.first + r, whole.o + size_t{r} * problem.dim_v, whole.m[r], whole.l[r]);
  }
}

bool answer_is_finite(const Problem& problem, uint32_t row) {
  const uint64_t at =
      row / problem.group * problem.o_stride_query + row % problem.group * problem.o_stride_head;
  return !std::isnan(load_element(problem.o, problem.dtype_o, at));
}

void merge_chunks(const Problem& problem, const Plan& plan, RowRange rows, void* states) {
  const MergeTree tree(plan);
  for (uint32_t i = 0; i < plan.n_chunks; ++i) {
    MergeTree::Node node = tree.leaf(i);
    for (auto merge = tree.next(&node); merge && merge->is_last; merge = tree.next(&node)) {
      merge_states(problem, rows, *merge, states);
    }
  }
  write_result(problem, plan, rows, states);
}

void eval_column_sums(const Problem& problem, const Plan& plan, const void* prepared,
                      uint64_t begin, uint64_t end, void* scratch) {
  KVM_ASSERT(problem.wants_column_sums && problem.column_sums != nullptr && problem.lse != nullptr);
  KVM_ASSERT(begin % kPageTokens == 0 && end % kPageTokens == 0 && plan.gap_chunks == 0);
  begin = std::max(begin, plan.first_chunk * plan.chunk_tokens);
  end = std::min(end, (plan.first_chunk + plan.n_chunks) * plan.chunk_tokens);
  if (begin >= end) {
    return;
  }
  for (size_t i = first_run_after(problem.runs, begin);
       i < problem.runs.size() && problem.runs[i].position < end; ++i) {
    const KvRun& run = problem.runs[i];
    std::fill_n(problem.column_sums + (run.position - problem.column_position), run.n_tokens, 0.0f);
  }
  const auto add = plan.blocked ? block_sums : stream_sums;
  add(problem, plan, prepared, begin, end, scratch);
}

}  // namespace kvm::attention
