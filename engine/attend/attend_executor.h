// SPDX-License-Identifier: Apache-2.0
#ifndef KVM_ENGINE_ATTEND_ATTEND_EXECUTOR_H_
#define KVM_ENGINE_ATTEND_ATTEND_EXECUTOR_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "attention/attention.h"
#include "attention/sampled/approx.h"
#include "base/request.h"
#include "base/status.h"
#include "engine/attend/attend_plan.h"
#include "engine/attend/audit.h"
#include "engine/store/store.h"
#include "engine/tasks/workspace.h"

namespace kvm::engine {

// An AttendExecutor carries out the tasks of a plan: it has the memory that they share, and what
// they find.
//
//   begin -> prepare (all) -> evaluate (all) -> draw (some) -> sum (all)
//         -> report, add_masses, offer_audits
//
// Threads: prepare(), evaluate(), draw() and sum() on any thread, each task once and every one of a
// kind before the first of the next; the rest on the driver. Where the plan has approximate
// problems, prepare() reads stored tokens.
class AttendExecutor {
 public:
  // The plan, and what it refers to, stay alive and unchanged until rest() or the next begin().
  // Fails: NO_MEMORY.
  Status begin(const AttendPlan& plan);
  // Gives memory beyond what is worth keeping back. No task may be running.
  void rest();

  // Tasks of plan.n_prepare_tasks(), plan.tasks and plan.sum_tasks. All return false when the
  // machine refused memory: results are missing then.
  [[nodiscard]] bool prepare(uint32_t task, ThreadWorkspace& workspace);
  [[nodiscard]] bool evaluate(uint32_t task, ThreadWorkspace& workspace);
  [[nodiscard]] bool sum(uint32_t task, ThreadWorkspace& workspace) const;

  // Of an Away that is drawn, after the last of plan.tasks: whether it may be, which it may not
  // where a problem is to be answered exactly; and what a window reads.
  struct DrawnPages {
    uint32_t n_pages = 0;
    uint64_t size_bytes = 0;
    uint64_t all_bytes = 0;  // of all of its pages that are away
  };
  bool may_draw(uint32_t away) const { return is_left_[away] == 0; }
  const DrawnPages& drawn_pages(uint32_t window) const { return drawn_pages_[window]; }
  // Whether it reads the page of a block of its shard. Any thread.
  bool reads_block(uint32_t window, uint64_t block) const;
  // Instead of draw(): the problems of the Away are left.
  void leave(uint32_t away);
  // A task of plan.drawn_tasks, once its pages are there. As evaluate().
  [[nodiscard]] bool draw(uint32_t task, ThreadWorkspace& workspace);
  // After the last of plan.tasks, and of plan.drawn_tasks: the approximate problems that have to be
  // answered exactly, by number, ascending. Their outputs are not written.
  std::span<const uint32_t> find_left();
  // After the last task: what was done, as kvm_step_stats has it. `left`: the executor of what
  // find_left() found; null where that is nothing.
  void report(const AttendExecutor* left, RequestResult* result) const;
  // After the last task, before the sequences change: hands over the attention mass of tokens of
  // heads that choose by it, and the answers that are due to be audited. seqs: of the items.
  void add_masses(Store& store, std::span<Sequence* const> seqs) const;
  // read_epoch: of the request (tiers/read_epochs.h).
  void offer_audits(Store& store, std::span<Sequence* const> seqs, uint64_t read_epoch,
                    Auditor* auditor) const;

 private:
  using Head = AttendPlan::Head;
  using Unit = AttendPlan::Unit;
  using ApproxHead = AttendPlan::ApproxHead;
  static constexpr uint32_t kBlockWords = AttendPlan::kShardBlocks / 64;

  // The stretch of shared memory that begins at `at` and has room for size_bytes.
  std::byte* memory_at(MemoryAt at, size_t size_bytes) const;
  std::byte* prepared_of(const Head& head) const;
  std::atomic<uint32_t>& counter(CounterAt at, size_t offset = 0) const;
  // The problem of a head with all of its outputs.
  const attention::Problem& problem_of(const Head& head) const;
  void point_to_sums();
  void evaluate_chunks(const Unit& unit, uint32_t chunk, uint32_t n, std::byte* const* prepared,
                       std::byte* scratch, std::byte* states) const;
  bool evaluate_whole(const Unit& unit, ThreadWorkspace& workspace);
  bool evaluate_piece(const AttendPlan::Task& task, ThreadWorkspace& workspace);
  bool evaluate_shard(const AttendPlan::Task& task, ThreadWorkspace& workspace);
  // Finds out which pages that are away a shard will read.
  bool find_pages(const AttendPlan::Task& task, ThreadWorkspace& workspace);
  void count_pages(uint32_t window);
  // Whether that was the last merge of the unit.
  bool merge_up(const Unit& unit, uint32_t chunk, std::byte* states);
  // After the results of a unit's rows.
  void finish_unit(const Unit& unit, const std::byte* prepared, std::byte* scratch);
  void sum_columns(const Unit& unit, const std::byte* prepared, std::byte* scratch) const;
  void clear_errors(const Unit& unit) const;
  void write_errors(const ApproxHead& head, const attention::ApproxReport& report) const;
  void count_not_finite(const attention::Problem& problem, attention::RowRange rows);
  uint32_t auto_mode() const;

  const AttendPlan* plan_ = nullptr;
  Workspace workspace_;
  std::byte* memory_ = nullptr;  // plan_->shared_bytes
  std::unique_ptr<std::atomic<uint32_t>[]> counters_;
  size_t n_counters_ = 0;
  std::vector<attention::Problem> summed_;        // of plan_->sums
  std::vector<attention::ApproxReport> reports_;  // of plan_->approx
  std::vector<uint8_t> is_answered_;              // likewise
  std::vector<uint32_t> left_;                    // those that are not
  std::vector<uint8_t> is_left_;                  // of plan_->aways; tasks set it by atomic_ref
  std::vector<DrawnPages> drawn_pages_;           // of plan_->drawn_windows
  std::vector<uint64_t> drawn_blocks_;  // likewise, [kBlockWords]; tasks set bits by atomic_ref
  uint64_t n_not_finite_ = 0;  // rows of q heads, answered NaN; tasks add to it by atomic_ref
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_ATTEND_ATTEND_EXECUTOR_H_
