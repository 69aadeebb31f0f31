// SPDX-License-Identifier: Apache-2.0
#include "engine/attend/attend_work.h"
#include "engine/retention/policy_actions.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <new>

#include "base/assert.h"
#include "base/round.h"

namespace kvm::engine {
namespace {

// A request keeps so much for the next one, and a thread so much of its scratch.
constexpr size_t kKeepBytes = 64 << 20;
constexpr size_t kKeepVectorBytes = 4 << 20;

template <typename T>
void empty(std::vector<T>& vector) {
  vector.clear();
  if (vector.capacity() * sizeof(T) > kKeepVectorBytes) {
    vector.shrink_to_fit();
  }
}

}  // namespace

void AttendWork::clear() {
  empty(views_);
  empty(runs_);
  empty(ranges_);
  empty(transforms_);
  empty(rotation_at_);
  empty(rotations_);
  empty(heads_);
  empty(units_);
  empty(tasks_);
  empty(sum_tasks_);
  empty(prepare_);
  empty(indexes_);
  empty(sketches_);
  empty(hashes_);
  empty(approx_);
  shared_memory_.shrink(kKeepBytes);
  shared_ = nullptr;
  shared_bytes_ = 0;
  cost_ = prepare_bytes_ = n_keys_ = n_rows_ = 0;
  n_exact_keys_ = n_exact_bytes_ = n_exact_rows_ = n_not_finite_ = 0;
  n_extra_views_ = 0;
  time_share_ = 0;
  next_item_ = next_view_ = next_head_ = 0;
  is_planned_ = false;
  scratch_bytes_ = 0;
  n_shards_ = 0;
}

Status AttendWork::plan(const Store& store, const StepRequest& request,
                        std::span<Sequence* const> seqs, const StepTensors& tensors,
                        const Costs& costs, const TaskCrew& crew) {
  KVM_ASSERT(seqs.size() == request.items.size() && crew.n_threads != 0);
  request_ = &request;
  tensors_ = &tensors;
  costs_ = &costs;
  seqs_ = seqs;
  crew_ = crew;
  return plan_more(store);
}

Status AttendWork::plan_more(const Store& store) {
  KVM_ASSERT(!is_planned_);
  uint64_t n_left = kPlanPages;
  KVM_TRY(plan_items(store, &n_left));
  if (n_left != 0) {
    const bool is_first = next_view_ == 0 && next_head_ == 0;
    if (is_first && request_->mode == KVM_MODE_AUTO && request_->budget != 0) {
      share_time();
    }
    KVM_TRY(plan_views(&n_left));
  }
  return n_left != 0 ? plan_tasks() : Status::ok();
}

bool AttendWork::prepare(uint32_t task, ThreadWorkspace& workspace) {
  KVM_ASSERT(task < n_prepare_tasks());
  if (task >= prepare_.size()) {
    const ApproxHead& head = approx_[task - prepare_.size()];
    std::byte* scratch = workspace.scratch.reserve(head.plan.scratch_bytes);
    if (scratch == nullptr) {
      return false;
    }
    attention::prepare_approx(head.input, head.plan,
                              shared_at(head.prepared_at, head.plan.prepared_bytes), scratch);
    workspace.scratch.shrink(kKeepBytes);
    return true;
  }
  const Head& head = heads_[prepare_[task]];
  attention::prepare_queries(head.problem, head.plan,
                             shared_at(head.prepared_at, head.plan.prepared_bytes));
  return true;
}

bool AttendWork::evaluate(uint32_t task, ThreadWorkspace& workspace) {
  KVM_ASSERT(task < tasks_.size());
  const Task& t = tasks_[task];
  if (t.is_approx) {
    return evaluate_shard(t, workspace);
  }
  if (t.n_units == 0) {
    return evaluate_piece(t, workspace);
  }
  for (uint32_t i = 0; i < t.n_units; ++i) {
    if (!evaluate_whole(units_[t.unit + i], workspace)) {
      return false;
    }
  }
  return true;
}

// Chunks [chunk, chunk + n), counted from the plan's first. prepared: of each head of the unit.
void AttendWork::evaluate_chunks(const Unit& unit, uint32_t chunk, uint32_t n,
                                 std::byte* const* prepared, std::byte* scratch,
                                 std::byte* states) const {
  const Head& head = heads_[unit.head];
  KVM_ASSERT(chunk <= head.plan.n_chunks && n <= head.plan.n_chunks - chunk);
  const size_t stride = attention::state_bytes(head.problem, unit.rows.count);
  const uint64_t first = head.plan.first_chunk + chunk;
  if (unit.n_heads == 1) {
    attention::eval_chunks(head.problem, head.plan, prepared[0], unit.rows, first, n, scratch,
                           states + chunk * stride);
    return;
  }
  attention::GangMember members[attention::kMaxGang];
  for (uint32_t h = 0; h < unit.n_heads; ++h) {
    members[h] = {&heads_[unit.head + h].problem, prepared[h],
                  states + (size_t{h} * head.plan.n_chunks + chunk) * stride};
  }
  attention::eval_chunks({members, unit.n_heads}, head.plan, first, n, scratch);
}

bool AttendWork::evaluate_whole(const Unit& unit, ThreadWorkspace& workspace) {
  const Head& head = heads_[unit.head];
  const size_t prepared_bytes = round_up(head.plan.prepared_bytes, attention::kBufferAlign);
  std::byte* states = workspace.states.reserve(unit_state_bytes(unit));
  std::byte* scratch = workspace.scratch.reserve(unit.n_heads * head.plan.scratch_bytes);
  if (states == nullptr || scratch == nullptr) {
    return false;
  }
  std::byte* prepared[attention::kMaxGang] = {};
  if (head.plan.n_chunks != 0) {
    std::byte* own = nullptr;
    if (head.prepared_at == kNotShared) {
      own = workspace.prepared.reserve(unit.n_heads * prepared_bytes);
      if (own == nullptr) {
        return false;
      }
    }
    for (uint32_t h = 0; h < unit.n_heads; ++h) {
      const Head& member = heads_[unit.head + h];
      prepared[h] = own == nullptr ? shared_at(member.prepared_at, member.plan.prepared_bytes)
                                   : own + h * prepared_bytes;
      if (own != nullptr) {
        attention::prepare_queries(member.problem, member.plan, prepared[h]);
      }
    }
    evaluate_chunks(unit, 0, head.plan.n_chunks, prepared, scratch, states);
  }
  const size_t bytes = unit_state_bytes(unit) / unit.n_heads;
  for (uint32_t h = 0; h < unit.n_heads; ++h) {
    const Head& member = heads_[unit.head + h];
    attention::merge_chunks(member.problem, member.plan, unit.rows, states + h * bytes);
  }
  clear_errors(unit);
  for (uint32_t h = 0; h < unit.n_heads; ++h) {
    count_not_finite(heads_[unit.head + h].problem, unit.rows);
  }
  sum_columns(unit, prepared[0], scratch);
  return true;
}

bool AttendWork::evaluate_piece(const Task& task, ThreadWorkspace& workspace) {
  const Unit& unit = units_[task.unit];
  const Head& head = heads_[unit.head];
  std::byte* scratch = workspace.scratch.reserve(unit.n_heads * head.plan.scratch_bytes);
  if (scratch == nullptr) {
    return false;
  }
  std::byte* prepared[attention::kMaxGang];
  for (uint32_t h = 0; h < unit.n_heads; ++h) {
    const Head& member = heads_[unit.head + h];
    prepared[h] = shared_at(member.prepared_at, member.plan.prepared_bytes);
  }
  std::byte* states = shared_at(unit.states_at, unit_state_bytes(unit));
  evaluate_chunks(unit, task.first_chunk, task.n_chunks, prepared, scratch, states);
  for (uint32_t i = 0; i < task.n_chunks; ++i) {
    if (merge_up(unit, task.first_chunk + i, states)) {
      sum_columns(unit, prepared[0], scratch);
    }
  }
  return true;
}

bool AttendWork::evaluate_shard(const Task& task, ThreadWorkspace& workspace) {
  ApproxHead& head = approx_[task.unit];
  std::byte* scratch = workspace.scratch.reserve(head.plan.scratch_bytes);
  if (scratch == nullptr) {
    return false;
  }
  KVM_ASSERT(task.first_chunk < head.plan.n_shards);
  const std::byte* prepared = shared_at(head.prepared_at, head.plan.prepared_bytes);
  std::byte* states = shared_at(head.states_at, head.plan.n_shards * head.plan.state_bytes);
  attention::eval_shard(head.input, head.plan, prepared, task.first_chunk, scratch,
                        states + task.first_chunk * head.plan.state_bytes);
  // SYNC: releases the state of this shard; whoever comes last acquires those of all others.
  if (arrivals_[head.arrivals_at].fetch_add(1, std::memory_order_acq_rel) + 1 ==
      head.plan.n_shards) {
    attention::finish_approx(head.input, head.plan, prepared, scratch, states, &head.report);
    write_errors(head);
    count_not_finite(head.problem, {0, head.plan.rows});
  }
  // A large budget takes scratch that grows with it, and no request pays for what stays.
  workspace.scratch.shrink(kKeepBytes);
  return true;
}

void AttendWork::count_not_finite(const attention::Problem& problem, attention::RowRange rows) {
  uint64_t n = 0;
  for (uint32_t i = 0; i < rows.count; ++i) {
    n += attention::answer_is_finite(problem, rows.first + i) ? 0 : 1;
  }
  if (n != 0) [[unlikely]] {
    // SYNC: none; whoever reads the sum has waited for the tasks.
    std::atomic_ref<uint64_t>(n_not_finite_).fetch_add(n, std::memory_order_relaxed);
  }
}

void AttendWork::write_errors(const ApproxHead& head) const {
  const Tensor& err = tensors_->err;
  const uint32_t group = head.problem.group;
  for (uint32_t row = 0; err.is_present() && row < head.plan.rows; ++row) {
    auto* to = reinterpret_cast<float*>(
        err.at(0, uint64_t{head.row} + row / group, uint64_t{head.q_head} + row % group));
    to[0] = head.report.err_o[row];
    to[1] = head.report.err_lse[row];
  }
}

// Merges what the state of a chunk, now there, makes complete.
bool AttendWork::merge_up(const Unit& unit, uint32_t chunk, std::byte* states) {
  const Head& first = heads_[unit.head];
  const attention::MergeTree tree(first.plan);
  const size_t bytes = unit_state_bytes(unit) / unit.n_heads;
  attention::MergeTree::Node node = tree.leaf(chunk);
  while (const auto merge = tree.next(&node)) {
    KVM_ASSERT(merge->into < merge->from && merge->from < first.plan.n_chunks);
    // SYNC: releases the states of this node; whoever comes second acquires those of the other.
    if (arrivals_[unit.arrivals_at + merge->from].fetch_add(1, std::memory_order_acq_rel) == 0) {
      return false;
    }
    for (uint32_t h = 0; h < unit.n_heads; ++h) {
      attention::merge_states(heads_[unit.head + h].problem, unit.rows, *merge, states + h * bytes);
    }
  }
  for (uint32_t h = 0; h < unit.n_heads; ++h) {
    const Head& head = heads_[unit.head + h];
    attention::write_result(head.problem, head.plan, unit.rows, states + h * bytes);
  }
  clear_errors(unit);
  for (uint32_t h = 0; h < unit.n_heads; ++h) {
    count_not_finite(heads_[unit.head + h].problem, unit.rows);
  }
  return true;
}

void AttendWork::sum_columns(const Unit& unit, const std::byte* prepared, std::byte* scratch) {
  const Head& head = heads_[unit.head];
  if (!head.wants_sums || head.sums_later) {
    return;
  }
  // SYNC: releases the lse of these rows; whoever comes last acquires those of all others.
  if (arrivals_[head.arrivals_at].fetch_add(1, std::memory_order_acq_rel) + 1 != head.n_units) {
    return;
  }
  std::fill_n(head.problem.column_sums, head.n_positions, 0.0f);
  if (head.plan.n_chunks != 0) {
    attention::eval_column_sums(head.problem, head.plan, prepared, 0, sums_end(head), scratch);
  }
}

bool AttendWork::sum(uint32_t task, ThreadWorkspace& workspace) const {
  KVM_ASSERT(task < sum_tasks_.size());
  const SumTask& t = sum_tasks_[task];
  const Head& head = heads_[t.head];
  const attention::Problem& problem = head.problem;
  const uint64_t first = std::max(t.begin, problem.column_position);
  const uint64_t end = std::min(t.end, problem.column_position + head.n_positions);
  KVM_ASSERT(first < end);
  std::fill_n(problem.column_sums + (first - problem.column_position), end - first, 0.0f);
  if (head.plan.n_chunks == 0) {
    return true;
  }
  std::byte* scratch = workspace.scratch.reserve(head.plan.scratch_bytes);
  if (scratch == nullptr) {
    return false;
  }
  attention::eval_column_sums(problem, head.plan,
                              shared_at(head.prepared_at, head.plan.prepared_bytes), t.begin, t.end,
                              scratch);
  return true;
}

void AttendWork::add_masses(Store& store, std::span<Sequence* const> seqs) const {
  for (const Head& head : heads_) {
    if (head.wants_sums) {
      const View& view = views_[head.view];
      add_list_masses(&store.memory(), seqs[view.item], request_->layer_begin, view.class_index,
                      {head.problem.column_sums, head.n_positions}, head.problem.column_position,
                      request_->items[view.item].n_ranges == 0);
    }
  }
}

void AttendWork::offer_audits(Store& store, std::span<Sequence* const> seqs,
                              Auditor* auditor) const {
  for (const ApproxHead& head : approx_) {
    if (head.report.n_exact == head.plan.rows || !auditor->is_due()) {
      continue;
    }
    AuditJob* job = auditor->next_job();
    if (job == nullptr) {
      continue;
    }
    try {
      if (!job->take(head.problem, head.report)) {
        auditor->skip(Auditor::Skipped::kUnfit);
        continue;
      }
      const View& view = views_[head.view];
      store.pin_pages(seqs[view.item], request_->layer_begin, view.class_index, &job->pins);
    } catch (const std::bad_alloc&) {
      auditor->skip(Auditor::Skipped::kBusy);
      continue;
    }
    job->mode = head.mode == KVM_MODE_TOPK      ? AuditedAs::kTopK
                : head.mode == KVM_MODE_SAMPLED ? AuditedAs::kSampled
                                                : AuditedAs::kVerified;
    job->delta = head.input.params.delta;
    auditor->offer();
  }
}

void AttendWork::report(RequestResult* result) const {
  result->mode = approx_.empty() ? uint32_t{KVM_MODE_EXACT} : request_->mode;
  if (request_->mode == KVM_MODE_AUTO) {
    result->mode = auto_mode();
  }
  result->keys_present = n_keys_;
  result->keys_read = n_exact_keys_;
  result->bytes_read = n_exact_bytes_;
  result->n_exact = request_->mode <= KVM_MODE_EXACT ? 0 : static_cast<uint32_t>(n_exact_rows_);
  for (const ApproxHead& head : approx_) {
    result->keys_read += head.report.keys_read;
    result->bytes_read += head.report.bytes_read;
    result->n_exact += head.report.n_exact;
    for (uint32_t row = 0; row < head.plan.rows; ++row) {
      // NaN stays: the whole has no bar where a part of it has none.
      const float error = head.report.err_o[row];
      const bool is_worse = std::isnan(error) || error > result->err_max;
      result->err_max = is_worse && !std::isnan(result->err_max) ? error : result->err_max;
    }
  }
  result->n_not_finite = n_not_finite_;
  if (n_not_finite_ != 0) {
    result->err_max = std::numeric_limits<float>::quiet_NaN();
  }
  // Several problems of an item read some keys twice.
  result->keys_read = std::min(result->keys_read, n_keys_);
}

// Exact answers have none, unless they are no numbers.
void AttendWork::clear_errors(const Unit& unit) const {
  const Tensor& err = tensors_->err;
  for (uint32_t h = 0; err.is_present() && h < unit.n_heads; ++h) {
    const Head& head = heads_[unit.head + h];
    const uint32_t group = head.problem.group;
    const uint32_t end = unit.rows.first + unit.rows.count;
    for (uint32_t row = unit.rows.first; row < end; ++row) {
      auto* to = reinterpret_cast<float*>(
          err.at(0, uint64_t{head.row} + row / group, uint64_t{head.q_head} + row % group));
      const bool is_finite = attention::answer_is_finite(head.problem, row);
      to[0] = to[1] = is_finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    }
  }
}

}  // namespace kvm::engine
