// SPDX-License-Identifier: Apache-2.0
#include "attention/sampled/gather.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/assert.h"
#include "base/cpu_features.h"
#include "base/merge.h"

namespace kvm::attention {
namespace {

static_assert(kRowTile == 4, "padded_rows and the kernel's tiles");

// The logit of lanes without a key: e^ of it is 0.
constexpr float kNothing = -1e30f;

constexpr uint32_t kLineBytes = 64;

// The scales of rows that have none.
alignas(64) constexpr float kOnes[kGatherKeys] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

// Loads what the rows of a batch are multiplied by; where they have no scales, `at` holds null
// pointers.
const float* load_factors(const uint16_t* const* at, uint8_t elem, float* factors) {
  if (at[0] == nullptr) {
    return kOnes;
  }
  for (uint32_t i = 0; i < kGatherKeys; ++i) {
    factors[i] = row_factor(elem, *at[i]);
  }
  return factors;
}

// Two batches ahead, rows are asked for into the first level where that is large, else into the
// second: the kernel asks again when they are near. docs/kernels.md has the figures.
void ask_for(const uint8_t* row, uint32_t bytes, bool is_large) {
  for (uint32_t at = 0; at < bytes; at += kLineBytes) {
    if (is_large) {
      __builtin_prefetch(row + at);
    } else {
      __builtin_prefetch(row + at, 0, 2);
    }
  }
}

void fill_columns(const GatherContext& context, const GatherList& list, size_t first,
                  GatherBatch* batch, float* per_row) {
  if (list.kind == kGatherClosed) {
    batch->per_row = nullptr;
    return;
  }
  const uint32_t rows = context.q.rows;
  const bool grown = list.kind == kGatherGrown;
  const bool open = list.kind == kGatherOpen || grown;
  if (batch->n < kGatherKeys || rows != padded_rows(rows)) {
    std::fill_n(per_row, size_t{padded_rows(rows)} * kGatherKeys, open ? kNothing : 0.0f);
    std::fill_n(batch->p, kGatherKeys, 1.0f);
    std::fill_n(batch->p_before, kGatherKeys, 1.0f);
  }
  for (uint32_t i = 0; i < batch->n; ++i) {
    const size_t id = list.ids[first + i];
    if (open) {
      batch->p[i] = grown && list.p[id] >= 1.0f ? INFINITY : list.p[id];
    }
    if (grown) {
      batch->p_before[i] = list.p_before[id];
    }
    const float* from = list.per_row + id * rows;
    for (uint32_t r = 0; r < rows; ++r) {
      per_row[r * kGatherKeys + i] = from[r];
    }
  }
  batch->per_row = per_row;
}

}  // namespace

void fill_row_masks(uint32_t rows, const uint16_t* masks, uint32_t n, float* per_row) {
  std::fill_n(per_row, size_t{padded_rows(rows)} * kGatherKeys, 0.0f);
  for (uint32_t i = 0; i < n; ++i) {
    for (uint32_t r = 0; r < rows; ++r) {
      per_row[r * kGatherKeys + i] = (masks[i] >> r & 1) != 0 ? 1.0f : 0.0f;
    }
  }
}

uint32_t padded_rows(uint32_t rows) {
  return rows == 1 ? 1 : (rows + kRowTile - 1) / kRowTile * kRowTile;
}

uint32_t acc_stride(const Problem& problem) { return (problem.dim_v + 31) / 32 * 32; }

GatherContext gather_context(const Problem& problem, const KernelTable& table,
                             const void* prepared_queries) {
  return {.problem = &problem,
          .kernels = table.sampled,
          .q = query_rows(problem, prepared_queries),
          .bf16_dot = table.has_bf16_dot};
}

namespace {

GatherSums carve_sums(const Problem& problem, Carver& carver) {
  const uint32_t rows = padded_rows(problem.n_query * problem.group);
  GatherSums sums;
  sums.m = carver.take<float>(rows);
  sums.sums = carver.take<float>(size_t{rows} * kGatherSums * kGatherKeys);
  sums.acc = carver.take<float>(size_t{kGatherVectors} * rows * acc_stride(problem));
  return sums;
}

}  // namespace

size_t gather_sums_bytes(const Problem& problem) {
  Carver carver(nullptr);
  carve_sums(problem, carver);
  return carver.used_bytes();
}

GatherSums gather_sums_view(const Problem& problem, void* memory) {
  Carver carver(memory);
  return carve_sums(problem, carver);
}

bool sums_are_finite(const Problem& problem, const GatherSums& sums) {
  const uint32_t rows = problem.n_query * problem.group;
  float bad = 0.0f;
  for (uint32_t row = 0; row < rows; ++row) {
    for (const GatherSum which : {kSumClosed, kSumClosedNorm, kSumOpen, kSumOpenNorm}) {
      const float* at = sums.sums + (size_t{row} * kGatherSums + which) * kGatherKeys;
      for (uint32_t i = 0; i < kGatherKeys; ++i) {
        bad += at[i] * 0.0f;
      }
    }
  }
  return bad == 0.0f;
}

void clear_sums(const Problem& problem, const GatherSums& sums) {
  std::memset(sums.m, 0, gather_sums_bytes(problem));
  std::fill_n(sums.m, padded_rows(problem.n_query * problem.group), kEmptyLse);
}

// Keys are read in order, a page or two apart; the first one, and one that lies far, is searched.
void BatchMaker::open(uint64_t position) {
  const Problem& problem = *context_.problem;
  if (run_ == SIZE_MAX) {
    run_ = first_run_after(problem.runs, position);
  }
  const auto ends_before = [&](size_t run) {
    return problem.runs[run].position + problem.runs[run].n_tokens <= position;
  };
  for (int step = 0; step < 16 && ends_before(run_); ++step) {
    ++run_;
  }
  if (ends_before(run_)) {
    run_ += first_run_after(problem.runs.subspan(run_), position);
  }
  const KvRun& run = problem.runs[run_];
  KVM_ASSERT(run.position <= position);
  const codecs::Codec& codec_k = codecs::codec_of(run.k.codec);
  const codecs::Codec& codec_v = codecs::codec_of(run.v.codec);
  source_ = {.begin = run.position,
             .end = run.position + run.n_tokens,
             .k = k_row(problem, run, 0),
             .v = v_row(problem, run, 0),
             .k_bytes = static_cast<uint32_t>(codec_k.row_bytes(problem.dim_k)),
             .v_bytes = static_cast<uint32_t>(codec_v.row_bytes(problem.dim_v)),
             .k_scale = k_scale(problem, run, 0),
             .v_scale = v_scale(problem, run, 0),
             .variant = run.transform,
             .elem_k = codec_k.elem,
             .elem_v = codec_v.elem};
}

void BatchMaker::make_room() {
  const uint32_t left = n_ - at_;
  const auto move = [&](auto* column) {
    std::memmove(column, column + at_, left * sizeof(*column));
  };
  move(k_);
  move(v_);
  move(k_scale_);
  move(v_scale_);
  n_ = left;
  at_ = 0;
}

// Those behind the last row repeat it.
void BatchMaker::pad() {
  for (uint32_t i = n_; i < n_ + kAhead + kGatherKeys; ++i) {
    k_[i] = k_[n_ - 1];
    v_[i] = v_[n_ - 1];
    k_scale_[i] = k_scale_[n_ - 1];
    v_scale_[i] = v_scale_[n_ - 1];
  }
}

// Puts the row behind the others and asks for it; false where it is of another kind. All rows of a
// batch are asked for together: each one lies in two pages of memory of its own, and looking those
// up takes longer than the core can run ahead, so it is done for many at once. All lines of a row
// are asked for: with the first alone, rows of bf16 took a tenth longer and of int8 two thirds.
// Scales lie in pages of their own: they are asked for here as well, and read with their batch.
bool BatchMaker::find(uint64_t position) {
  if (position >= source_.end) {
    const Source before = source_;
    open(position);
    if (n_ > at_ && !source_.same_kind(before)) {
      source_ = before;
      return false;
    }
  }
  const uint64_t token = position - source_.begin;
  k_[n_] = source_.k + token * source_.k_bytes;
  v_[n_] = source_.v + token * source_.v_bytes;
  ask_for(k_[n_], source_.k_bytes, is_large_);
  ask_for(v_[n_], list_.keys_only ? 0 : source_.v_bytes, is_large_);
  k_scale_[n_] = v_scale_[n_] = nullptr;
  if (source_.k_scale != nullptr) {
    k_scale_[n_] = source_.k_scale + token;
    __builtin_prefetch(k_scale_[n_]);
  }
  if (source_.v_scale != nullptr && !list_.keys_only) {
    v_scale_[n_] = source_.v_scale + token;
    __builtin_prefetch(v_scale_[n_]);
  }
  ++n_;
  return true;
}

// Resolves rows as long as they are of one kind, up to kAhead beyond the next batch.
void BatchMaker::fill() {
  if (n_ + 2 * (kAhead + kGatherKeys) > kRoom) {
    make_room();
  }
  const uint32_t wanted = at_ + kAhead + kGatherKeys;
  while (n_ < wanted && !done_) {
    done_ = resolved_ == list_.ids.size() || !find(list_.position[list_.ids[resolved_]]);
    resolved_ += done_ ? 0 : 1;
  }
  if (done_ && n_ > at_) {
    pad();
  }
}

bool BatchMaker::next(GatherArgs* args, GatherBatch* batch) {
  if (at_ == n_) {
    at_ = n_ = 0;
    done_ = false;  // with what was behind them, rows of another kind begin
  }
  if (!done_) {
    fill();
  }
  if (at_ == n_) {
    return false;
  }
  const uint32_t n = std::min<uint32_t>(n_ - at_, kGatherKeys);
  batch->k = k_ + at_;
  batch->v = v_ + at_;
  batch->k_scale = load_factors(k_scale_ + at_, source_.elem_k, k_scales_);
  batch->v_scale = load_factors(v_scale_ + at_, source_.elem_v, v_scales_);
  batch->n = n;
  batch->elem_k = source_.elem_k;
  batch->elem_v = source_.elem_v;
  const Problem& problem = *context_.problem;
  const QueryRows& q = context_.q;
  const uint32_t variant = source_.variant;
  const uint64_t at = variant * q.variant_stride;
  const bool bf16 = context_.bf16_dot && q.bf16_exact[variant] != 0;
  *args = {.q = q.f32 + at,
           .q_bf16 = bf16 ? q.bf16 + at : nullptr,
           .q_stride = q.stride,
           .rows = q.rows,
           .rows_padded = padded_rows(q.rows),
           .dim_k = problem.dim_k,
           .dim_v = problem.dim_v,
           .acc_stride = acc_stride(problem),
           .scale = problem.scale,
           .softcap = problem.softcap,
           .fp32_weights = problem.fp32_weights ? 1u : 0u};
  at_ += n;
  first_ = next_first_;
  next_first_ += n;
  return true;
}

void gather(const GatherContext& context, const GatherList& list, const GatherSums& sums) {
  BatchMaker maker(context, list);
  GatherArgs args;
  GatherBatch batch;
  alignas(64) float per_row[kMaxGatherRows * kGatherKeys];
  while (maker.next(&args, &batch)) {
    batch.kind = list.kind;
    fill_columns(context, list, maker.first(), &batch, per_row);
    context.kernels->gather(&args, &batch, &sums);
  }
}

}  // namespace kvm::attention
