// SPDX-License-Identifier: Apache-2.0
#include "attention/sampled/exact_part.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "attention/exact/layout.h"
#include "base/assert.h"
#include "base/merge.h"
#include "base/round.h"

namespace kvm::attention {
namespace {

// Chunks that are evaluated in one call: reading runs ahead inside of it.
constexpr uint32_t kChunksAtOnce = 8;

uint32_t rows_of(const Problem& problem) { return problem.n_query * problem.group; }

bool holds_something(const Problem& problem, const Plan& plan, uint64_t chunk) {
  const std::span<const PositionRange> include = problem.visible.include;
  if (include.empty()) {
    return true;
  }
  const uint64_t begin = chunk * plan.chunk_tokens;
  const auto at = std::partition_point(include.begin(), include.end(),
                                       [&](const PositionRange& r) { return r.end <= begin; });
  if (at == include.end() || at->begin >= begin + plan.chunk_tokens) {
    return false;
  }
  const uint64_t first = std::max(begin, at->begin);
  const size_t run = first_run_after(problem.runs, first);
  return run < problem.runs.size() && problem.runs[run].position < begin + plan.chunk_tokens;
}

}  // namespace

StateStack::StateStack(const Problem& problem, void* memory)
    : problem_(problem),
      memory_(static_cast<std::byte*>(memory)),
      stride_(state_bytes(problem, rows_of(problem))) {}

uint32_t StateStack::depth_for(uint64_t first_index, uint64_t last_index) {
  return static_cast<uint32_t>(std::bit_width(first_index ^ last_index)) + 2;
}

void StateStack::merge_top() {
  const uint32_t rows = rows_of(problem_);
  const StateView into = state_view(problem_, rows, state(n_ - 2));
  const StateView from = state_view(problem_, rows, state(n_ - 1));
  for (uint32_t r = 0; r < rows; ++r) {
    const size_t at = size_t{r} * problem_.dim_v;
    merge_row(into.o + at, into.m + r, into.l + r, from.o + at, from.m[r], from.l[r],
              problem_.dim_v);
  }
  --n_;
}

void StateStack::push(uint64_t index) {
  // The new state stays where it is: what lies below it merges only down to its place.
  while (n_ >= 2 &&
         std::bit_width(index_[n_ - 2] ^ index_[n_ - 1]) < std::bit_width(index_[n_ - 1] ^ index)) {
    void* fresh = state(n_);
    merge_top();
    std::memmove(state(n_), fresh, stride_);
  }
  KVM_ASSERT(n_ < kMaxDepth);
  index_[n_++] = index;
}

void StateStack::finish(void* out) {
  while (n_ >= 2) {
    merge_top();
  }
  if (n_ == 1) {
    std::memcpy(out, state(0), stride_);
    return;
  }
  std::memset(out, 0, stride_);
  const StateView view = state_view(problem_, rows_of(problem_), out);
  std::fill_n(view.m, rows_of(problem_), kEmptyLse);
}

size_t exact_scratch_bytes(const Problem& problem, const Plan& plan) {
  const size_t stride = state_bytes(problem, plan.rows);
  const uint64_t last = plan.first_chunk + std::max(plan.n_chunks, 1u) - 1;
  const uint32_t depth =
      StateStack::depth_for(plan.absolute(plan.first_chunk), plan.absolute(last));
  const size_t kernel = round_up(plan.scratch_bytes, kBufferAlign);
  return kernel + (kChunksAtOnce + depth) * stride;
}

void eval_exact(const Problem& problem, const Plan& plan, const void* prepared, uint64_t begin,
                uint64_t end, void* scratch, void* state) {
  const size_t stride = state_bytes(problem, plan.rows);
  Carver carver(scratch);
  std::byte* kernel_scratch = carver.take<std::byte>(plan.scratch_bytes);
  std::byte* fresh = carver.take<std::byte>(kChunksAtOnce * stride);
  StateStack stack(problem, fresh + kChunksAtOnce * stride);
  const uint64_t last = plan.first_chunk + plan.n_chunks;
  const auto wanted = [&](uint64_t number) {
    const uint64_t chunk = plan.absolute(number);
    return begin <= chunk && chunk < end && holds_something(problem, plan, chunk);
  };
  uint64_t number = begin <= plan.gap_at
                        ? begin
                        : std::max(plan.gap_at, begin - std::min(begin, plan.gap_chunks));
  for (number = std::max(number, plan.first_chunk); number < last && plan.absolute(number) < end;) {
    uint32_t n = 0;
    while (n < kChunksAtOnce && number + n < last && wanted(number + n)) {
      ++n;
    }
    if (n == 0) {
      ++number;
      continue;
    }
    eval_chunks(problem, plan, prepared, {0, plan.rows}, number, n, kernel_scratch, fresh);
    for (uint32_t i = 0; i < n; ++i) {
      std::memcpy(stack.next(), fresh + i * stride, stride);
      stack.push(plan.absolute(number + i));
    }
    number += n;
  }
  stack.finish(state);
}

}  // namespace kvm::attention
