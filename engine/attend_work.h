// SPDX-License-Identifier: Apache-2.0
// The attend half of a request: one attention problem per (item, kv head), cut into tasks.
//
//   plan() collects the runs of every (item, head class), builds the problems, weighs them, and
//   cuts them so that all threads finish together:
//     unit   rows of a problem; blocked problems have several. Or several heads of the same pages
//            with few rows, which are then read page by page
//     task   consecutive whole units, each evaluated and merged by one thread in its own memory,
//            or a stretch of the chunks of one large unit, whose states lie in shared memory and
//            are merged up the tree by whoever completes a node
//
// The bits of the results do not depend on the cut: attention/attention.h fixes them by chunk.
#ifndef KVM_ENGINE_ATTEND_WORK_H_
#define KVM_ENGINE_ATTEND_WORK_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "attention/attention.h"
#include "base/status.h"
#include "engine/engine.h"
#include "engine/store.h"
#include "engine/validate.h"
#include "engine/visible_keys.h"
#include "engine/workspace.h"

namespace kvm::engine {

// Threads: prepare() and evaluate() on any thread, each task once and every prepare() before the
// first evaluate(); the rest on the driver.
class AttendWork {
 public:
  // Forgets the last request.
  void clear();
  // seqs[i] belongs to request.items[i]; tokens reserved for this request count as stored. What the
  // arguments refer to stays alive and unchanged until the last task has ended.
  // Fails: INVALID (fewer tokens than query rows), PARTIAL, UNSUPPORTED (a tree across a change of
  // what a head's policy shows), LIMIT (too many such changes, too many rows
  // at once), NO_MEMORY.
  Status plan(const Store& store, const StepRequest& request, std::span<Sequence* const> seqs,
              const StepTensors& tensors, uint32_t n_threads);

  // Work in bytes of K and V read, computation converted to bytes that take as long.
  uint64_t cost() const { return cost_; }
  uint32_t n_prepare_tasks() const { return static_cast<uint32_t>(prepare_.size()); }
  uint64_t prepare_bytes() const { return prepare_bytes_; }
  uint32_t n_tasks() const { return static_cast<uint32_t>(tasks_.size()); }
  void prepare(uint32_t task);
  // False when the machine refused memory: results are missing.
  [[nodiscard]] bool evaluate(uint32_t task, ThreadWorkspace& workspace);

  // Of the whole request, as kvm_step_stats has them.
  uint64_t n_keys() const { return n_keys_; }
  uint64_t n_bytes() const { return n_bytes_; }
  uint64_t n_rows() const { return n_rows_; }

 private:
  // Rows of an item that see a head class by the same rule.
  struct View {
    uint32_t item = 0;
    uint32_t class_index = 0;
    uint32_t first_row = 0;
    uint32_t n_rows = 0;
    uint64_t position = 0;  // of first_row
    HeadVisibility rule;
    // Stretches of runs_ and ranges_.
    size_t run_begin = 0;
    size_t n_runs = 0;
    size_t include_begin = 0;
    size_t n_include = 0;
    size_t exclude_begin = 0;
    size_t n_exclude = 0;
    uint64_t n_keys = 0;       // for statistics
    uint64_t n_cost_keys = 0;  // for the cut
  };
  struct Head {
    attention::Problem problem;
    attention::Plan plan;
    uint64_t cost = 0;
    uint32_t view = 0;
    size_t prepared_at = kNotShared;  // in shared_
    uint32_t row = 0;                 // of the tensors, of query token 0
    uint32_t q_head = 0;              // of the layer, of q head 0 of the group
  };
  struct Unit {
    uint32_t head = 0;
    uint32_t n_heads = 1;  // from `head` on; more than one are a gang
    attention::RowRange rows;
    uint32_t n_pieces = 1;          // 1: whole
    size_t states_at = kNotShared;  // in shared_, where n_pieces > 1: [n_heads][n_chunks] states
    size_t arrivals_at = 0;         // in arrivals_, where n_pieces > 1: [n_chunks]
    uint64_t cost = 0;
  };
  struct Task {
    uint32_t unit = 0;
    uint32_t n_units = 0;      // whole units, or 0: a stretch of the chunks of `unit`
    uint32_t first_chunk = 0;  // counted from the plan's first
    uint32_t n_chunks = 0;
  };
  static constexpr size_t kNotShared = SIZE_MAX;

  Status add_item(const Store& store, uint32_t item, const Sequence* seq);
  Status add_views(const Store& store, const Sequence* seq, const View& whole);
  Status choose_rule(const View& whole, View* view);
  void count_keys(size_t first_view, KvRuns runs);
  void add_ranges(const kvm_item& item, View* view);
  void exclude_dropped_sinks(View* view);
  void add_heads(uint32_t view);
  attention::Visibility visibility(const View& view) const;
  void add_units(uint64_t gang_cost);
  void add_row_blocks(uint32_t head);
  uint64_t choose_task_cost(uint64_t task_cost);
  size_t lay_out(uint64_t task_cost);
  void add_tasks(uint64_t task_cost);
  size_t unit_state_bytes(const Unit& unit) const;
  void evaluate_chunks(const Unit& unit, uint32_t chunk, uint32_t n, std::byte* const* prepared,
                       std::byte* scratch, std::byte* states) const;
  void merge_up(const Unit& unit, uint32_t chunk, std::byte* states);
  void clear_errors(const Unit& unit) const;
  bool evaluate_whole(const Unit& unit, ThreadWorkspace& workspace) const;
  bool evaluate_piece(const Task& task, ThreadWorkspace& workspace);

  const StepRequest* request_ = nullptr;
  const StepTensors* tensors_ = nullptr;
  const Space* space_ = nullptr;
  float scale_ = 0;
  std::vector<View> views_;
  std::vector<KvRun> runs_;
  std::vector<PositionRange> ranges_;
  std::vector<Head> heads_;
  std::vector<Unit> units_;
  std::vector<Task> tasks_;
  std::vector<uint32_t> prepare_;  // heads whose queries are prepared in shared memory
  // For each chunk of units that are cut: how many of the two nodes are complete that the merge
  // from this chunk's state needs. Whoever completes the second merges.
  std::unique_ptr<std::atomic<uint32_t>[]> arrivals_;
  size_t arrivals_size_ = 0;
  Workspace shared_memory_;
  std::byte* shared_ = nullptr;
  VisibleKeys visible_keys_;
  size_t n_extra_views_ = 0;
  uint64_t cost_ = 0;
  uint64_t prepare_bytes_ = 0;
  uint64_t n_keys_ = 0;
  uint64_t n_bytes_ = 0;
  uint64_t n_rows_ = 0;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_ATTEND_WORK_H_
