// SPDX-License-Identifier: Apache-2.0
#include "bench/approx/solver.h"

#include <algorithm>

#include "codecs/codec.h"

namespace kvm::bench {

namespace {

Solved make_solved(const HeadData& head) {
  Solved out;
  out.o.resize(size_t{head.group} * head.dim);
  out.lse.resize(head.group);
  return out;
}

}  // namespace

Solved Solver::solve(const HeadData& head, uint32_t set, const attention::HeadIndex& index,
                     const attention::ApproxParams& params) {
  Solved out = make_solved(head);
  const attention::Problem problem = make_problem(head, set, out.o.data(), out.lse.data());
  const attention::ApproxInput input{&problem, index, params, nullptr};
  const attention::ApproxPlan plan = attention::plan_approx(input);
  if (plan.exact) {
    fill_exact(problem, &out);
    return out;
  }
  std::byte* prepared = prepared_.get(plan.prepared_bytes);
  std::byte* scratch = scratch_.get(plan.scratch_bytes);
  std::byte* states = states_.get(plan.n_shards * plan.state_bytes);
  attention::prepare_approx(input, plan, prepared, scratch);
  for (uint32_t s = 0; s < plan.n_shards; ++s) {
    attention::eval_shard(input, plan, prepared, s, scratch, states + s * plan.state_bytes);
  }
  if (!attention::finish_approx(input, plan, prepared, scratch, states, &out.report)) {
    solve_exactly(problem);
  }
  return out;
}

Solved Solver::solve_exact(const HeadData& head, uint32_t set) {
  Solved out = make_solved(head);
  fill_exact(make_problem(head, set, out.o.data(), out.lse.data()), &out);
  return out;
}

void Solver::solve_exactly(const attention::Problem& problem) {
  const attention::Plan plan = attention::make_plan(problem);
  std::byte* prepared = prepared_.get(plan.prepared_bytes);
  std::byte* scratch = scratch_.get(plan.scratch_bytes);
  std::byte* states = states_.get(plan.n_chunks * attention::state_bytes(problem, plan.rows));
  attention::prepare_queries(problem, plan, prepared);
  attention::eval_chunks(problem, plan, prepared, {0, plan.rows}, plan.first_chunk, plan.n_chunks,
                         scratch, states);
  attention::merge_chunks(problem, plan, {0, plan.rows}, states);
}

void Solver::fill_exact(const attention::Problem& problem, Solved* out) {
  solve_exactly(problem);
  out->planned_exact = true;
  attention::ApproxReport& report = out->report;
  report.n_exact = problem.n_query * problem.group;
  report.keys_present = report.keys_read = problem.visible.query_position + 1;
  for (const KvRun& run : problem.runs) {
    if (run.position >= report.keys_present) {
      break;
    }
    const uint64_t n = std::min<uint64_t>(run.n_tokens, report.keys_present - run.position);
    report.bytes_read += n * (codecs::codec_of(run.k.codec).token_bytes(problem.dim_k) +
                              codecs::codec_of(run.v.codec).token_bytes(problem.dim_v));
  }
}

}  // namespace kvm::bench
