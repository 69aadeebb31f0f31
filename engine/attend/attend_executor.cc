// SPDX-License-Identifier: Apache-2.0
#include "engine/attend/attend_executor.h"
#include "engine/retention/policy_actions.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <new>

#include "base/assert.h"
#include "base/round.h"

namespace kvm::engine {
namespace {

// A request keeps so much for the next one, and a thread so much of its scratch.
constexpr size_t kKeepBytes = 64 << 20;

}  // namespace

Status AttendExecutor::begin(const AttendPlan& plan) {
  plan_ = &plan;
  n_not_finite_ = 0;
  memory_ = nullptr;
  if (plan.shared_bytes != 0) {
    memory_ = workspace_.reserve(plan.shared_bytes);
    if (memory_ == nullptr) {
      return {KVM_ERR_NO_MEMORY,
              fmt::format("{} bytes for intermediate results were refused", plan.shared_bytes)};
    }
  }
  if (n_counters_ < plan.n_counters) {
    // The size last: there may be no memory.
    const size_t size = plan.n_counters + plan.n_counters / 4;
    counters_ = std::make_unique<std::atomic<uint32_t>[]>(size);
    n_counters_ = size;
  }
  for (size_t i = 0; i < plan.n_counters; ++i) {
    counters_[i].store(0, std::memory_order_relaxed);
  }
  reports_.assign(plan.approx.size(), {});
  is_answered_.assign(plan.approx.size(), 0);
  left_.clear();
  is_left_.assign(plan.aways.size(), 0);
  for (const ApproxHead& head : plan.approx) {
    if (head.plan.n_shards == 0) {
      is_left_[head.away] = 1;
    }
  }
  drawn_pages_.assign(plan.drawn_windows.size(), {});
  drawn_blocks_.assign(plan.drawn_windows.size() * kBlockWords, 0);
  point_to_sums();
  return Status::ok();
}

void AttendExecutor::rest() {
  plan_ = nullptr;
  memory_ = nullptr;
  workspace_.shrink(kKeepBytes);
  empty(&summed_);
  empty(&reports_);
  empty(&is_answered_);
  empty(&left_);
  empty(&is_left_);
  empty(&drawn_pages_);
  empty(&drawn_blocks_);
}

void AttendExecutor::point_to_sums() {
  summed_.clear();
  for (const AttendPlan::Sums& part : plan_->sums) {
    attention::Problem problem = plan_->heads[part.head].problem;
    problem.column_sums =
        reinterpret_cast<float*>(memory_at(part.sums_at, part.n_positions * sizeof(float)));
    if (part.lse_at.is_set()) {
      const uint64_t rows = uint64_t{problem.n_query} * problem.group;
      problem.lse = reinterpret_cast<float*>(memory_at(part.lse_at, rows * sizeof(float)));
      problem.lse_stride_query = problem.group;
      problem.lse_stride_head = 1;
    }
    summed_.push_back(problem);
  }
}

std::byte* AttendExecutor::memory_at(MemoryAt at, size_t size_bytes) const {
  KVM_ASSERT(at.offset <= plan_->shared_bytes && size_bytes <= plan_->shared_bytes - at.offset);
  return memory_ + at.offset;
}

std::byte* AttendExecutor::prepared_of(const Head& head) const {
  return memory_at(head.prepared_at, head.plan.prepared_bytes);
}

std::atomic<uint32_t>& AttendExecutor::counter(CounterAt at, size_t offset) const {
  KVM_ASSERT(at.index < plan_->n_counters && offset < plan_->n_counters - at.index);
  return counters_[at.index + offset];
}

const attention::Problem& AttendExecutor::problem_of(const Head& head) const {
  return head.sums == AttendPlan::kNoSums ? head.problem : summed_[head.sums];
}

bool AttendExecutor::prepare(uint32_t task, ThreadWorkspace& workspace) {
  KVM_ASSERT(task < plan_->n_prepare_tasks());
  if (task >= plan_->prepare.size()) {
    const ApproxHead& head = plan_->approx[task - plan_->prepare.size()];
    if (head.plan.n_shards == 0) {
      return true;
    }
    std::byte* scratch = workspace.scratch.reserve(head.plan.scratch_bytes);
    if (scratch == nullptr) {
      return false;
    }
    attention::prepare_approx(head.input, head.plan,
                              memory_at(head.prepared_at, head.plan.prepared_bytes), scratch);
    workspace.scratch.shrink(kKeepBytes);
    return true;
  }
  const Head& head = plan_->heads[plan_->prepare[task]];
  attention::prepare_queries(head.problem, head.plan, prepared_of(head));
  return true;
}

bool AttendExecutor::evaluate(uint32_t task, ThreadWorkspace& workspace) {
  KVM_ASSERT(task < plan_->tasks.size());
  const AttendPlan::Task& t = plan_->tasks[task];
  if (t.is_approx) {
    const bool is_away = plan_->approx[t.unit].away != AttendPlan::kNoAway;
    return is_away ? find_pages(t, workspace) : evaluate_shard(t, workspace);
  }
  if (t.n_units == 0) {
    return evaluate_piece(t, workspace);
  }
  for (uint32_t i = 0; i < t.n_units; ++i) {
    if (!evaluate_whole(plan_->units[t.unit + i], workspace)) {
      return false;
    }
  }
  return true;
}

// Chunks [chunk, chunk + n), counted from the plan's first, whose states follow each other.
// prepared: of each head of the unit.
void AttendExecutor::evaluate_chunks(const Unit& unit, uint32_t chunk, uint32_t n,
                                     std::byte* const* prepared, std::byte* scratch,
                                     std::byte* states) const {
  const Head* heads = &plan_->heads[unit.head];
  const attention::Plan& plan = heads[0].plan;
  KVM_ASSERT(chunk <= plan.n_chunks && n <= plan.n_chunks - chunk);
  const size_t stride = attention::state_bytes(heads[0].problem, unit.rows.count);
  const uint64_t first = plan.first_chunk + chunk;
  const size_t slot = plan_->state_slot(heads[0], chunk);
  KVM_ASSERT(n == 1 || heads[0].state_slots.is_empty());
  if (unit.n_heads == 1) {
    attention::eval_chunks(heads[0].problem, plan, prepared[0], unit.rows, first, n, scratch,
                           states + slot * stride);
    return;
  }
  attention::GangMember members[attention::kMaxGang];
  for (uint32_t h = 0; h < unit.n_heads; ++h) {
    members[h] = {&heads[h].problem, prepared[h],
                  states + (size_t{h} * heads[0].n_states + slot) * stride};
  }
  attention::eval_chunks({members, unit.n_heads}, plan, first, n, scratch);
}

bool AttendExecutor::evaluate_whole(const Unit& unit, ThreadWorkspace& workspace) {
  const Head* heads = &plan_->heads[unit.head];
  const attention::Plan& plan = heads[0].plan;
  const size_t state_bytes = plan_->unit_state_bytes(unit);
  std::byte* states = workspace.states.reserve(state_bytes);
  std::byte* scratch = workspace.scratch.reserve(unit.n_heads * plan.scratch_bytes);
  if (states == nullptr || scratch == nullptr) {
    return false;
  }
  std::byte* prepared[attention::kMaxGang] = {};
  if (plan.n_chunks != 0) {
    const size_t prepared_bytes = round_up(plan.prepared_bytes, attention::kBufferAlign);
    std::byte* own = nullptr;
    if (!heads[0].prepared_at.is_set()) {
      own = workspace.prepared.reserve(unit.n_heads * prepared_bytes);
      if (own == nullptr) {
        return false;
      }
    }
    for (uint32_t h = 0; h < unit.n_heads; ++h) {
      prepared[h] = own == nullptr ? prepared_of(heads[h]) : own + h * prepared_bytes;
      if (own != nullptr) {
        attention::prepare_queries(heads[h].problem, heads[h].plan, prepared[h]);
      }
    }
    evaluate_chunks(unit, 0, plan.n_chunks, prepared, scratch, states);
  }
  for (uint32_t h = 0; h < unit.n_heads; ++h) {
    attention::merge_chunks(problem_of(heads[h]), heads[h].plan, unit.rows,
                            states + h * (state_bytes / unit.n_heads));
  }
  finish_unit(unit, prepared[0], scratch);
  return true;
}

bool AttendExecutor::evaluate_piece(const AttendPlan::Task& task, ThreadWorkspace& workspace) {
  const Unit& unit = plan_->units[task.unit];
  const Head* heads = &plan_->heads[unit.head];
  std::byte* scratch = workspace.scratch.reserve(unit.n_heads * heads[0].plan.scratch_bytes);
  if (scratch == nullptr) {
    return false;
  }
  std::byte* prepared[attention::kMaxGang];
  for (uint32_t h = 0; h < unit.n_heads; ++h) {
    prepared[h] = prepared_of(heads[h]);
  }
  std::byte* states = memory_at(unit.states_at, plan_->unit_state_bytes(unit));
  evaluate_chunks(unit, task.first_chunk, task.n_chunks, prepared, scratch, states);
  for (uint32_t i = 0; i < task.n_chunks; ++i) {
    if (merge_up(unit, task.first_chunk + i, states)) {
      finish_unit(unit, prepared[0], scratch);
    }
  }
  return true;
}

bool AttendExecutor::evaluate_shard(const AttendPlan::Task& task, ThreadWorkspace& workspace) {
  const ApproxHead& head = plan_->approx[task.unit];
  std::byte* scratch = workspace.scratch.reserve(head.plan.scratch_bytes);
  if (scratch == nullptr) {
    return false;
  }
  KVM_ASSERT(task.first_chunk < head.plan.n_shards);
  const std::byte* prepared = memory_at(head.prepared_at, head.plan.prepared_bytes);
  std::byte* states = memory_at(head.states_at, head.plan.n_shards * head.plan.state_bytes);
  attention::eval_shard(head.input, head.plan, prepared, task.first_chunk, scratch,
                        states + task.first_chunk * head.plan.state_bytes);
  // SYNC: releases the state of this shard; whoever comes last acquires those of all others.
  if (counter(head.n_evaluated).fetch_add(1, std::memory_order_acq_rel) + 1 == head.plan.n_shards) {
    attention::ApproxReport& report = reports_[task.unit];
    if (attention::finish_approx(head.input, head.plan, prepared, scratch, states, &report)) {
      is_answered_[task.unit] = 1;
      write_errors(head, report);
      count_not_finite(head.problem, {0, head.plan.rows});
    }
  }
  // A large budget takes scratch that grows with it, and no request pays for what stays.
  workspace.scratch.shrink(kKeepBytes);
  return true;
}

bool AttendExecutor::draw(uint32_t task, ThreadWorkspace& workspace) {
  KVM_ASSERT(task < plan_->drawn_tasks.size());
  return evaluate_shard(plan_->drawn_tasks[task], workspace);
}

bool AttendExecutor::find_pages(const AttendPlan::Task& task, ThreadWorkspace& workspace) {
  const ApproxHead& head = plan_->approx[task.unit];
  std::byte* scratch = workspace.scratch.reserve(head.plan.scratch_bytes);
  if (scratch == nullptr) {
    return false;
  }
  const std::byte* prepared = memory_at(head.prepared_at, head.plan.prepared_bytes);
  std::byte* states = memory_at(head.states_at, head.plan.n_shards * head.plan.state_bytes);
  uint64_t blocks[kBlockWords] = {};
  const bool is_drawn =
      attention::find_blocks(head.input, head.plan, prepared, task.first_chunk, scratch,
                             states + task.first_chunk * head.plan.state_bytes, blocks);
  workspace.scratch.shrink(kKeepBytes);
  const Part<AttendPlan::DrawnWindow>& all = plan_->aways[head.away].drawn;
  const uint64_t number = attention::shard_number(head.input, task.first_chunk);
  const auto windows = all.in(plan_->drawn_windows);
  const auto window = static_cast<uint32_t>(
      all.begin + (std::ranges::lower_bound(windows, number, {}, &AttendPlan::DrawnWindow::number) -
                   windows.begin()));
  if (!is_drawn) {
    // SYNC: none; whoever reads it has waited for the tasks.
    std::atomic_ref<uint8_t>(is_left_[head.away]).store(1, std::memory_order_relaxed);
  }
  for (uint32_t i = 0; i < kBlockWords; ++i) {
    if (blocks[i] != 0) {
      // SYNC: none; the counter below orders it.
      std::atomic_ref<uint64_t>(drawn_blocks_[size_t{window} * kBlockWords + i])
          .fetch_or(blocks[i], std::memory_order_relaxed);
    }
  }
  // SYNC: releases these bits; whoever comes last acquires those of all others.
  const size_t n_tasks = plan_->drawn_windows[window].tasks.n;
  if (counter(plan_->drawn_windows[window].n_found).fetch_add(1, std::memory_order_acq_rel) + 1 ==
      n_tasks) {
    count_pages(window);
  }
  return true;
}

// Here, and not on the driver: there may be many.
void AttendExecutor::count_pages(uint32_t window) {
  DrawnPages& drawn = drawn_pages_[window];
  for (const AwayPage& page : plan_->drawn_windows[window].pages.in(plan_->away_pages)) {
    drawn.all_bytes += page.size_bytes;
    if (reads_block(window, page.block)) {
      ++drawn.n_pages;
      drawn.size_bytes += page.size_bytes;
    }
  }
}

bool AttendExecutor::reads_block(uint32_t window, uint64_t block) const {
  const uint64_t at = block % AttendPlan::kShardBlocks;
  return (drawn_blocks_[size_t{window} * kBlockWords + at / 64] >> at % 64 & 1) != 0;
}

void AttendExecutor::leave(uint32_t away) {
  const Part<ApproxHead>& heads = plan_->aways[away].drawn_heads;
  for (size_t i = heads.begin; i < heads.begin + heads.n; ++i) {
    const ApproxHead& head = plan_->approx[i];
    if (head.away == away && head.plan.n_shards != 0) {
      attention::report_left(head.input, head.plan, &reports_[i]);
    }
  }
}

// Merges what the state of a chunk, now there, makes complete.
bool AttendExecutor::merge_up(const Unit& unit, uint32_t chunk, std::byte* states) {
  const Head* heads = &plan_->heads[unit.head];
  const attention::Plan& plan = heads[0].plan;
  const attention::MergeTree tree(plan);
  const size_t bytes = plan_->unit_state_bytes(unit) / unit.n_heads;
  attention::MergeTree::Node node = tree.leaf(chunk);
  while (const auto merge = tree.next(&node)) {
    KVM_ASSERT(merge->into < merge->from && merge->from < plan.n_chunks);
    // SYNC: releases the states of this node; whoever comes second acquires those of the other.
    if (counter(unit.n_complete, merge->from).fetch_add(1, std::memory_order_acq_rel) == 0) {
      return false;
    }
    attention::MergeTree::Merge slots = *merge;
    slots.into = plan_->state_slot(heads[0], merge->into);
    slots.from = plan_->state_slot(heads[0], merge->from);
    for (uint32_t h = 0; h < unit.n_heads; ++h) {
      attention::merge_states(heads[h].problem, unit.rows, slots, states + h * bytes);
    }
  }
  for (uint32_t h = 0; h < unit.n_heads; ++h) {
    attention::write_result(problem_of(heads[h]), heads[h].plan, unit.rows, states + h * bytes);
  }
  return true;
}

void AttendExecutor::finish_unit(const Unit& unit, const std::byte* prepared, std::byte* scratch) {
  clear_errors(unit);
  for (uint32_t h = 0; h < unit.n_heads; ++h) {
    count_not_finite(plan_->heads[unit.head + h].problem, unit.rows);
  }
  sum_columns(unit, prepared, scratch);
}

void AttendExecutor::sum_columns(const Unit& unit, const std::byte* prepared,
                                 std::byte* scratch) const {
  const Head& head = plan_->heads[unit.head];
  if (head.sums == AttendPlan::kNoSums || plan_->sums[head.sums].is_later) {
    return;
  }
  const AttendPlan::Sums& part = plan_->sums[head.sums];
  // SYNC: releases the lse of these rows; whoever comes last acquires those of all others.
  if (counter(part.n_evaluated).fetch_add(1, std::memory_order_acq_rel) + 1 != part.n_units) {
    return;
  }
  const attention::Problem& problem = problem_of(head);
  std::fill_n(problem.column_sums, part.n_positions, 0.0f);
  for (const PositionRange& stretch : plan_->summed(part)) {
    if (head.plan.n_chunks != 0 && stretch.begin < stretch.end) {
      attention::eval_column_sums(problem, head.plan, prepared, stretch.begin, stretch.end,
                                  scratch);
    }
  }
}

bool AttendExecutor::sum(uint32_t task, ThreadWorkspace& workspace) const {
  KVM_ASSERT(task < plan_->sum_tasks.size());
  const AttendPlan::SumTask& t = plan_->sum_tasks[task];
  const AttendPlan::Sums& part = plan_->sums[t.sums];
  const Head& head = plan_->heads[part.head];
  const attention::Problem& problem = problem_of(head);
  const uint64_t first = std::max(t.begin, problem.column_position);
  const uint64_t end = std::min(t.end, problem.column_position + part.n_positions);
  KVM_ASSERT(first < end);
  std::fill_n(problem.column_sums + (first - problem.column_position), end - first, 0.0f);
  if (head.plan.n_chunks == 0) {
    return true;
  }
  std::byte* scratch = workspace.scratch.reserve(head.plan.scratch_bytes);
  if (scratch == nullptr) {
    return false;
  }
  attention::eval_column_sums(problem, head.plan, prepared_of(head), t.begin, t.end, scratch);
  return true;
}

// Exact answers have no error, unless they are no numbers.
void AttendExecutor::clear_errors(const Unit& unit) const {
  const Tensor& err = plan_->err;
  for (uint32_t h = 0; err.is_present() && h < unit.n_heads; ++h) {
    const Head& head = plan_->heads[unit.head + h];
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

void AttendExecutor::write_errors(const ApproxHead& head,
                                  const attention::ApproxReport& report) const {
  const Tensor& err = plan_->err;
  const uint32_t group = head.problem.group;
  for (uint32_t row = 0; err.is_present() && row < head.plan.rows; ++row) {
    auto* to = reinterpret_cast<float*>(
        err.at(0, uint64_t{head.row} + row / group, uint64_t{head.q_head} + row % group));
    to[0] = report.err_o[row];
    to[1] = report.err_lse[row];
  }
}

void AttendExecutor::count_not_finite(const attention::Problem& problem, attention::RowRange rows) {
  uint64_t n = 0;
  for (uint32_t i = 0; i < rows.count; ++i) {
    n += attention::answer_is_finite(problem, rows.first + i) ? 0 : 1;
  }
  if (n != 0) [[unlikely]] {
    // SYNC: none; whoever reads the sum has waited for the tasks.
    std::atomic_ref<uint64_t>(n_not_finite_).fetch_add(n, std::memory_order_relaxed);
  }
}

// --- After the last task ------------------------------------------------------------------------

void AttendExecutor::add_masses(Store& store, std::span<Sequence* const> seqs) const {
  for (const AttendPlan::Sums& part : plan_->sums) {
    const attention::Problem& problem = problem_of(plan_->heads[part.head]);
    add_list_masses(&store.memory(), seqs[part.item], plan_->layer, part.class_index,
                    {problem.column_sums, part.n_positions}, problem.column_position,
                    part.is_packed);
  }
}

void AttendExecutor::offer_audits(Store& store, std::span<Sequence* const> seqs,
                                  uint64_t read_epoch, Auditor* auditor) const {
  for (size_t i = 0; i < plan_->approx.size(); ++i) {
    const ApproxHead& head = plan_->approx[i];
    if (reports_[i].n_exact == head.plan.rows || !auditor->is_due()) {
      continue;
    }
    if (head.away != AttendPlan::kNoAway) {
      auditor->skip(Auditor::Skipped::kUnfit);  // what it would read has gone
      continue;
    }
    AuditJob* job = auditor->next_job();
    if (job == nullptr) {
      continue;
    }
    try {
      if (!job->take(head.problem, reports_[i])) {
        auditor->skip(Auditor::Skipped::kUnfit);
        continue;
      }
      store.pin_pages(seqs[head.item], plan_->layer, head.class_index, read_epoch, &job->pins);
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

// Returns the mode that most rows got.
uint32_t AttendExecutor::auto_mode() const {
  uint64_t n_rows[KVM_MODE_AUTO] = {};
  for (size_t i = 0; i < plan_->approx.size(); ++i) {
    const ApproxHead& head = plan_->approx[i];
    n_rows[head.mode] += head.plan.rows - reports_[i].n_exact;
  }
  const auto* most = std::max_element(std::begin(n_rows), std::end(n_rows));
  return *most == 0 ? uint32_t{KVM_MODE_EXACT} : static_cast<uint32_t>(most - std::begin(n_rows));
}

std::span<const uint32_t> AttendExecutor::find_left() {
  left_.clear();
  for (uint32_t i = 0; i < is_answered_.size(); ++i) {
    if (is_answered_[i] == 0) {
      left_.push_back(i);
    }
  }
  return left_;
}

void AttendExecutor::report(const AttendExecutor* left, RequestResult* result) const {
  result->mode = plan_->approx.empty() ? uint32_t{KVM_MODE_EXACT} : plan_->mode;
  if (plan_->mode == KVM_MODE_AUTO) {
    result->mode = auto_mode();
  }
  result->keys_present = plan_->n_keys;
  result->keys_read = plan_->n_exact_keys;
  result->bytes_read = plan_->n_exact_bytes;
  result->n_exact = plan_->mode <= KVM_MODE_EXACT ? 0 : static_cast<uint32_t>(plan_->n_exact_rows);
  for (size_t i = 0; i < plan_->approx.size(); ++i) {
    const attention::ApproxReport& report = reports_[i];
    result->keys_read += report.keys_read;
    result->bytes_read += report.bytes_read;
    result->n_exact += report.n_exact;
    for (uint32_t row = 0; row < plan_->approx[i].plan.rows; ++row) {
      // NaN stays: the whole has no bar where a part of it has none.
      const float error = report.err_o[row];
      const bool is_worse = std::isnan(error) || error > result->err_max;
      result->err_max = is_worse && !std::isnan(result->err_max) ? error : result->err_max;
    }
  }
  result->n_not_finite = n_not_finite_ + (left != nullptr ? left->n_not_finite_ : 0);
  if (result->n_not_finite != 0) {
    result->err_max = std::numeric_limits<float>::quiet_NaN();
  }
  // Several problems of an item read some keys twice.
  result->keys_read = std::min(result->keys_read, plan_->n_keys);
}

}  // namespace kvm::engine
