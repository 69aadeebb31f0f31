// SPDX-License-Identifier: Apache-2.0
#include "attention/sampled/gather.h"

#include <algorithm>
#include <cstring>

#include "base/assert.h"
#include "base/merge.h"

namespace kvm::attention {
namespace {

static_assert(kRowTile == 4, "padded_rows and the kernel's tiles");

float scale_of(const uint16_t* scale) { return scale == nullptr ? 1.0f : bf16_to_f32(*scale); }

// What the sketch says of lanes without a key: e^ of it is 0.
constexpr float kNothing = -1e30f;

void fill_columns(const GatherContext& context, const GatherList& list, size_t first,
                  GatherBatch* batch, float* per_row) {
  const uint32_t rows = context.q.rows;
  const bool open = list.kind == kGatherOpen;
  std::fill_n(per_row, size_t{padded_rows(rows)} * kGatherKeys, open ? kNothing : 0.0f);
  for (uint32_t i = 0; i < kGatherKeys; ++i) {
    batch->p[i] = 1.0f;
    if (i >= batch->n) {
      continue;
    }
    const size_t id = list.ids[first + i];
    if (open) {
      batch->p[i] = list.p[id];
    }
    for (uint32_t r = 0; r < rows && list.per_row != nullptr; ++r) {
      per_row[r * kGatherKeys + i] = list.per_row[id * rows + r];
    }
  }
  batch->per_row = list.kind == kGatherClosed ? nullptr : per_row;
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

void clear_sums(const Problem& problem, const GatherSums& sums) {
  std::memset(sums.m, 0, gather_sums_bytes(problem));
  std::fill_n(sums.m, padded_rows(problem.n_query * problem.group), kEmptyLse);
}

BatchMaker::Row BatchMaker::find(uint64_t position) {
  const Problem& problem = *context_.problem;
  // Keys are read in order, a page or two apart; the first one, and one that lies far, is searched.
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
  const uint64_t token = position - run.position;
  return {.k = k_row(problem, run, token),
          .v = v_row(problem, run, token),
          .k_scale = scale_of(k_scale(problem, run, token)),
          .v_scale = scale_of(v_scale(problem, run, token)),
          .variant = run.transform,
          .dtype_k = static_cast<uint8_t>(run.dtype_k),
          .dtype_v = static_cast<uint8_t>(run.dtype_v)};
}

void BatchMaker::fill() {
  std::memmove(rows_, rows_ + used_, (n_rows_ - used_) * sizeof(Row));
  n_rows_ -= used_;
  used_ = 0;
  while (n_rows_ < 3 * kGatherKeys && resolved_ < list_.ids.size()) {
    rows_[n_rows_++] = find(list_.position[list_.ids[resolved_++]]);
  }
}

bool BatchMaker::next(GatherArgs* args, GatherBatch* batch) {
  fill();
  if (n_rows_ == 0) {
    return false;
  }
  uint32_t n = 1;
  while (n < std::min<uint32_t>(n_rows_, kGatherKeys) && rows_[n].same_kind(rows_[0])) {
    ++n;
  }
  for (uint32_t i = 0; i < kGatherKeys; ++i) {
    const Row& row = rows_[std::min(i, n - 1)];
    const Row& later = rows_[std::min(n + i, n_rows_ - 1)];
    batch->k[i] = row.k;
    batch->v[i] = row.v;
    batch->k[kGatherKeys + i] = later.k;
    batch->k[2 * kGatherKeys + i] = rows_[std::min(n + kGatherKeys + i, n_rows_ - 1)].k;
    batch->v[kGatherKeys + i] = later.v;
    batch->k_scale[i] = row.k_scale;
    batch->v_scale[i] = row.v_scale;
  }
  batch->n = n;
  batch->dtype_k = rows_[0].dtype_k;
  batch->dtype_v = rows_[0].dtype_v;
  const Problem& problem = *context_.problem;
  const QueryRows& q = context_.q;
  const uint32_t variant = rows_[0].variant;
  const uint64_t at = variant * q.variant_stride;
  const bool bf16 = context_.bf16_dot && q.bf16_exact[variant] != 0;
  *args = {.q = q.f32 + at,
           .q_bf16 = bf16 ? q.bf16 + at : nullptr,
           .bias = q.bias == nullptr ? nullptr : q.bias + size_t{variant} * q.variant_rows,
           .q_stride = q.stride,
           .rows = q.rows,
           .rows_padded = padded_rows(q.rows),
           .dim_k = problem.dim_k,
           .dim_v = problem.dim_v,
           .acc_stride = acc_stride(problem),
           .scale = problem.scale,
           .softcap = problem.softcap};
  used_ = n;
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
    batch.split = list.split ? 1 : 0;
    batch.sign = list.sign;
    fill_columns(context, list, maker.first(), &batch, per_row);
    context.kernels->gather(&args, &batch, &sums);
  }
}

}  // namespace kvm::attention
