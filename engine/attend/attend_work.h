// SPDX-License-Identifier: Apache-2.0
// The attend half of a request: one attention problem per (item, kv head), cut into tasks.
//
//   plan(), plan_more() collect the runs of every (item, head class), build the problems, weigh
//   them, and cut them so that all threads finish together. Of a problem that is solved exactly:
//     unit   rows of a problem; blocked problems have several. Or several heads of the same pages
//            with few rows, which are then read page by page
//     task   consecutive whole units, each evaluated and merged by one thread in its own memory,
//            or a stretch of the chunks of one large unit, whose states lie in shared memory and
//            are merged up the tree by whoever completes a node
//
// The class is written in three files: attend_problems.cc finds what to attend to, attend_cut.cc
// cuts it into tasks, attend_work.cc carries the tasks out and reports.
//
// The bits of the results do not depend on the cut: attention/attention.h fixes them by chunk.
//
// In an approximate mode a problem whose head has an index is one of attention/sampled/approx.h:
// prepared once, a task for each of its shards, and finished by whoever evaluates the last. All
// others are solved exactly. With KVM_MODE_AUTO each problem gets the mode that
// engine/attend/cost_model.h chooses for it.
#ifndef KVM_ENGINE_ATTEND_ATTEND_WORK_H_
#define KVM_ENGINE_ATTEND_ATTEND_WORK_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "attention/attention.h"
#include "attention/sampled/approx.h"
#include "base/status.h"
#include "engine/attend/audit.h"
#include "engine/attend/cost_model.h"
#include "engine/attend/visible_keys.h"
#include "engine/space/validate.h"
#include "engine/store/store.h"
#include "engine/tasks/workspace.h"

namespace kvm::engine {

// A TaskCrew is the threads that run a request's tasks.
struct TaskCrew {
  uint32_t n_threads = 1;
  // Whether other clients may ask meanwhile: tasks are shorter then.
  bool is_shared = false;
};

// AttendWork is the attention of one request.
//
// Threads: prepare() and evaluate() on any thread, each task once and every prepare() before the
// first evaluate(); the rest on the driver. Where has_approx(), prepare() reads stored tokens.
class AttendWork {
 public:
  // Forgets the last request.
  void clear();
  // Begins: as long as !is_planned(), plan_more() goes on. seqs[i] belongs to request.items[i];
  // tokens reserved for this request count as stored. What the arguments refer to stays alive and
  // unchanged until the last task has ended.
  // Fails: INVALID (fewer tokens than query rows), PARTIAL, UNSUPPORTED (a tree across a change of
  // what a head's policy shows), LIMIT (too many such changes, too many rows or approximate
  // problems at once), NO_MEMORY.
  // `costs` is asked with KVM_MODE_AUTO only.
  Status plan(const Store& store, const StepRequest& request, std::span<Sequence* const> seqs,
              const StepTensors& tensors, const Costs& costs, const TaskCrew& crew);

  // LIMIT: a call of plan() or plan_more() looks at about kPlanPages pages, those of each head that
  // is approximated counted: some 0.1 ms, and 0.7 ms more where one head has 4M tokens. The other
  // functions here are for what is planned to the end.
  static constexpr uint64_t kPlanPages = 16 << 10;
  bool is_planned() const { return is_planned_; }
  // REQUIRES: !is_planned(). Fails: as plan().
  Status plan_more(const Store& store);

  // Work in bytes of K and V read, computation converted to bytes that take as long.
  uint64_t cost() const { return cost_; }
  uint32_t n_prepare_tasks() const {
    return static_cast<uint32_t>(prepare_.size() + approx_.size());
  }
  uint64_t prepare_bytes() const { return prepare_bytes_; }
  uint32_t n_tasks() const { return static_cast<uint32_t>(tasks_.size()); }
  bool has_approx() const { return !approx_.empty(); }
  // Both: false when the machine refused memory: results are missing.
  [[nodiscard]] bool prepare(uint32_t task, ThreadWorkspace& workspace);
  [[nodiscard]] bool evaluate(uint32_t task, ThreadWorkspace& workspace);
  // The mass of tokens of heads that choose by it, where that is too much to do beside their
  // results: tasks of their own, after the last task. Returns their number.
  uint32_t plan_sums();
  [[nodiscard]] bool sum(uint32_t task, ThreadWorkspace& workspace) const;

  uint64_t n_rows() const { return n_rows_; }
  // After the last task: what was done, as kvm_step_stats has it.
  void report(RequestResult* result) const;
  // After the last task, before the sequences change: hands over the attention mass of tokens of
  // heads that choose by it, and the answers that are due to be audited.
  void add_masses(Store& store, std::span<Sequence* const> seqs) const;
  void offer_audits(Store& store, std::span<Sequence* const> seqs, Auditor* auditor) const;

 private:
  static constexpr size_t kNotShared = SIZE_MAX;
  // A View is the rows of an item that see a head class by the same rule.
  struct View {
    uint32_t item = 0;
    uint32_t class_index = 0;
    uint32_t first_row = 0;
    uint32_t n_rows = 0;
    uint32_t end_row = 0;            // where rows end that meet keys alike
    uint32_t max_rows = UINT32_MAX;  // of one problem
    uint64_t position = 0;           // of first_row
    HeadVisibility rule;
    // Stretches of runs_ and ranges_.
    size_t run_begin = 0;
    size_t n_runs = 0;
    size_t include_begin = 0;
    size_t n_include = 0;
    size_t exclude_begin = 0;
    size_t n_exclude = 0;
    size_t index_begin = kNotShared;    // in indexes_, [heads of the class]; kNotShared: exact
    uint64_t n_keys = 0;                // for statistics
    uint64_t n_cost_keys = 0;           // for the cut
    size_t transforms_at = kNotShared;  // in transforms_, [2]; kNotShared: none
  };
  struct Head {
    attention::Problem problem;
    attention::Plan plan;
    uint64_t cost = 0;
    uint32_t view = 0;
    size_t prepared_at = kNotShared;  // in shared_
    uint32_t row = 0;                 // of the tensors, of query token 0
    uint32_t q_head = 0;              // of the layer, of q head 0 of the group
    // Where column sums are wanted: where they lie in shared_ (and row lse, where nobody else wants
    // them), of how many positions, units of rows, and in arrivals_ how many are done.
    bool wants_sums = false;
    bool sums_later = false;  // by sum(), not by who evaluates the last unit
    size_t sums_at = 0;
    size_t lse_at = kNotShared;
    uint64_t n_positions = 0;
    uint32_t n_units = 0;
    size_t arrivals_at = 0;
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
  // Stretches of sketches_ and hashes_.
  struct IndexPart {
    size_t sketch_begin = 0;
    size_t n_sketches = 0;
    size_t hash_begin = 0;
    size_t n_hashes = 0;
  };
  // An ApproxHead is a problem that is solved approximately.
  struct ApproxHead {
    attention::Problem problem;
    attention::ApproxInput input;
    attention::ApproxPlan plan;
    attention::ApproxReport report;
    uint32_t mode = 0;  // KVM_MODE_*, not AUTO
    uint32_t view = 0;
    uint32_t row = 0;  // as in Head
    uint32_t q_head = 0;
    size_t prepared_at = 0;  // in shared_
    size_t states_at = 0;    // in shared_, [n_shards]
    size_t arrivals_at = 0;  // in arrivals_: shards that are evaluated
  };
  struct Task {
    uint32_t unit = 0;
    uint32_t n_units = 0;      // whole units, or 0: a stretch of the chunks of `unit`
    uint32_t first_chunk = 0;  // counted from the plan's first
    uint32_t n_chunks = 0;
    bool is_approx = false;  // shard `first_chunk` of approx_[unit]
  };

  // A SumTask is positions of one head whose mass is summed up.
  struct SumTask {
    uint32_t head = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
  };

  Status add_item(const Store& store, uint32_t item, const Sequence* seq);
  Status add_views(const Store& store, const Sequence* seq, const View& whole);
  void add_index(const Store& store, const Sequence* seq, View* view);
  Status choose_rule(const View& whole, View* view);
  void count_keys(size_t first_view, KvRuns runs);
  void add_ranges(const kvm_item& item, View* view);
  void exclude_dropped_sinks(View* view);
  uint32_t n_plain_rows(const View& view) const;
  void turn_sinks(size_t run_begin, uint64_t n_sinks);
  Status add_rotation(View* view);
  Status plan_items(const Store& store, uint64_t* n_left);
  Status plan_views(uint64_t* n_left);
  Status plan_tasks();
  size_t approx_bytes() const;
  // The stretch of shared_ that begins at `offset` and has room for size_bytes.
  std::byte* shared_at(size_t offset, size_t size_bytes) const;
  // These look at everything that was planned, for checked builds.
  bool covers_all_rows() const;
  bool covers_all_chunks() const;
  bool is_laid_out_apart() const;
  Status check_size(size_t size_bytes) const;
  // Those of a view from first_head on; returns where n_left came to an end.
  uint32_t add_heads(uint32_t view, uint32_t first_head, uint64_t* n_left);
  bool add_approx(const Head& head, uint32_t kv_head, const IndexPart& part);
  attention::ApproxPlan plan_like_last(const ApproxHead& head) const;
  uint64_t exact_cost(const View& view) const;
  bool has_index(const View& view, uint32_t head) const;
  ProblemCost problem_cost(const View& view, const IndexPart& part) const;
  void share_time();
  bool choose(const View& view, const IndexPart& part, attention::ApproxParams* params) const;
  uint32_t auto_mode() const;
  attention::Visibility visibility(const View& view) const;
  void add_units(uint64_t gang_cost);
  void add_row_blocks(uint32_t head);
  uint64_t choose_task_cost(uint64_t task_cost);
  size_t lay_out(uint64_t task_cost);
  void add_tasks(uint64_t task_cost);
  size_t unit_state_bytes(const Unit& unit) const;
  void evaluate_chunks(const Unit& unit, uint32_t chunk, uint32_t n, std::byte* const* prepared,
                       std::byte* scratch, std::byte* states) const;
  // Whether that was the last.
  bool merge_up(const Unit& unit, uint32_t chunk, std::byte* states);
  size_t lay_out_sums(size_t at);
  void point_to_sums();
  // After the results of a unit's rows: the sums, if it was the last unit.
  void sum_columns(const Unit& unit, const std::byte* prepared, std::byte* scratch);
  static uint64_t sums_end(const Head& head);
  void clear_errors(const Unit& unit) const;
  bool evaluate_whole(const Unit& unit, ThreadWorkspace& workspace);
  bool evaluate_piece(const Task& task, ThreadWorkspace& workspace);
  bool evaluate_shard(const Task& task, ThreadWorkspace& workspace);
  void write_errors(const ApproxHead& head) const;
  void count_not_finite(const attention::Problem& problem, attention::RowRange rows);

  const StepRequest* request_ = nullptr;
  std::span<Sequence* const> seqs_;
  const StepTensors* tensors_ = nullptr;
  TaskCrew crew_;
  // How far the planning is.
  uint32_t next_item_ = 0;
  uint32_t next_view_ = 0;
  uint32_t next_head_ = 0;  // of that view
  bool is_planned_ = false;
  const Space* space_ = nullptr;
  const Costs* costs_ = nullptr;
  float scale_ = 0;
  std::vector<View> views_;
  std::vector<KvRun> runs_;
  std::vector<PositionRange> ranges_;
  // Views whose queries are turned for the sinks have the identity, then a rotation for each query
  // token, whose numbers lie in rotations_ from rotation_at_[i / 2] on, cosines before sines.
  std::vector<QueryTransform> transforms_;
  std::vector<size_t> rotation_at_;
  std::vector<float> rotations_;
  std::vector<Head> heads_;
  std::vector<Unit> units_;
  std::vector<Task> tasks_;
  std::vector<SumTask> sum_tasks_;
  std::vector<uint32_t> prepare_;  // heads whose queries are prepared in shared memory
  std::vector<IndexPart> indexes_;
  std::vector<attention::SketchedRun> sketches_;
  std::vector<attention::HashedRun> hashes_;
  std::vector<ApproxHead> approx_;
  // For each chunk of units that are cut: how many of the two nodes are complete that the merge
  // from this chunk's state needs. Whoever completes the second merges. For each approximate head:
  // how many shards are evaluated.
  std::unique_ptr<std::atomic<uint32_t>[]> arrivals_;
  size_t arrivals_size_ = 0;
  // These are of approximate problems.
  size_t scratch_bytes_ = 0;  // the most of a task
  uint64_t n_shards_ = 0;
  Workspace shared_memory_;
  std::byte* shared_ = nullptr;
  size_t shared_bytes_ = 0;
  VisibleKeys visible_keys_;
  size_t n_extra_views_ = 0;
  uint64_t cost_ = 0;
  uint64_t prepare_bytes_ = 0;
  uint64_t n_keys_ = 0;        // visible
  uint64_t n_exact_keys_ = 0;  // of them, of heads that are solved exactly
  uint64_t n_exact_bytes_ = 0;
  uint64_t n_exact_rows_ = 0;  // (row, q head)
  uint64_t n_not_finite_ = 0;  // likewise, answered NaN; tasks add to it through atomic_ref
  uint64_t n_rows_ = 0;
  // AUTO with a time: what part of the time that it takes exactly each problem with an index gets.
  double time_share_ = 0;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_ATTEND_ATTEND_WORK_H_
