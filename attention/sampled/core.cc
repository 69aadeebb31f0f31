// SPDX-License-Identifier: Apache-2.0
#include "attention/sampled/core.h"

#include <algorithm>

namespace kvm::attention {
namespace {

Prepared carve_prepared(const ApproxInput& input, const Plan& exact, uint32_t n_stretches,
                        uint32_t n_uses, size_t query_bytes, Carver& carver) {
  Prepared p;
  p.head = carver.take<PreparedHead>(1);
  p.stretches = carver.take<Stretch>(n_stretches);
  p.uses = carver.take<Use>(n_uses);
  p.fixed = carver.take<PositionRange>(max_fixed_ranges(input, n_stretches));
  p.exact = carver.take<std::byte>(exact.prepared_bytes);
  p.queries = carver.take<std::byte>(query_bytes);
  return p;
}

Problem without_column_sums(const Problem& problem) {
  Problem copy = problem;
  copy.wants_column_sums = false;
  return copy;
}

}  // namespace

size_t prepared_bytes(const ApproxInput& input, const Plan& exact, const Counts& counts) {
  Carver carver(nullptr);
  carve_prepared(input, exact, counts.n_stretches, counts.n_uses, counts.query_bytes, carver);
  return carver.used_bytes();
}

Context make_context(const ApproxInput& input, const ApproxPlan& plan, const void* prepared) {
  Context c{.input = &input,
            .plan = &plan,
            .table = input.table != nullptr ? input.table : &active_table(),
            .problem = without_column_sums(*input.problem),
            .exact = {},
            .prepared = {},
            .rows = plan.rows};
  c.exact = make_plan(c.problem, c.table);
  Carver carver(const_cast<void*>(prepared));
  c.prepared = carve_prepared(input, c.exact, plan.n_stretches, plan.n_uses, 0, carver);
  return c;
}

Problem Context::fixed_problem() const {
  Problem fixed = problem;
  fixed.visible.include = {prepared.fixed, prepared.head->n_fixed};
  return fixed;
}

Shards::Shards(const Plan& exact) {
  if (exact.n_chunks == 0) {
    return;
  }
  const uint64_t chunks = kShardTokens / exact.chunk_tokens;
  const uint64_t end = exact.first_chunk + exact.n_chunks;
  first_ = exact.absolute(exact.first_chunk) / chunks;
  const bool has_gap = exact.gap_at < end && exact.gap_chunks > 0;
  const uint64_t last_before = has_gap ? exact.gap_at - 1 : end - 1;
  const uint64_t behind = exact.absolute(end - 1) / chunks;
  n_before_ = static_cast<uint32_t>(exact.absolute(last_before) / chunks - first_ + 1);
  if (has_gap) {
    behind_ = std::max(exact.absolute(exact.gap_at) / chunks, first_ + n_before_);
    n_behind_ = behind >= behind_ ? static_cast<uint32_t>(behind - behind_ + 1) : 0;
  }
}

hash_index::SketchSpan span_of(const Context& c, const Use& use, const Stretch& stretch) {
  const SketchedRun& run = c.input->index.sketches[stretch.index_run];
  const size_t block = hash_index::block_bytes(hash_index::frame_kind(*run.frame), c.problem.dim_k);
  const uint64_t offset = (stretch.position - run.position) / kPageTokens;
  return {.frame = run.frame,
          .query = c.prepared.queries + use.query_at,
          .blocks = run.blocks + offset * block,
          .n_blocks = stretch.n_blocks,
          .position = stretch.position};
}

void dense_queries(const Context& c, uint32_t variant, float* out) {
  const QueryRows q = query_rows(c.problem, c.prepared.exact);
  for (uint32_t r = 0; r < c.rows; ++r) {
    std::copy_n(q.f32 + variant * q.variant_stride + size_t{r} * q.stride, c.problem.dim_k,
                out + size_t{r} * c.problem.dim_k);
  }
}

uint64_t row_bytes(const Problem& problem) {
  if (problem.runs.empty()) {
    return 1;
  }
  const KvRun& run = problem.runs.front();
  return codecs::codec_of(run.k.codec).token_bytes(problem.dim_k) +
         codecs::codec_of(run.v.codec).token_bytes(problem.dim_v);
}

}  // namespace kvm::attention
