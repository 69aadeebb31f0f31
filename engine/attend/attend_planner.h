// SPDX-License-Identifier: Apache-2.0
// An AttendPlanner makes the AttendPlan of a request.
//
//   items -> views      attend_views.cc: rows that see the keys of a head class by the same rule
//   views -> problems   attend_problems.cc: exact, or approximate where a head has an index. With
//                       KVM_MODE_AUTO each gets the mode that engine/attend/cost_model.h chooses
//   problems -> tasks   attend_cut.h
//
// Threads: the driver's.
#ifndef KVM_ENGINE_ATTEND_ATTEND_PLANNER_H_
#define KVM_ENGINE_ATTEND_ATTEND_PLANNER_H_

#include <cstdint>
#include <span>
#include <vector>

#include "base/request.h"
#include "base/status.h"
#include "engine/attend/attend_plan.h"
#include "engine/attend/cost_model.h"
#include "engine/attend/visible_keys.h"
#include "engine/space/validate.h"
#include "engine/store/store.h"

namespace kvm::engine {

// What the rows of an item of an attend see, the first of which is at first_query.
SeenPart seen_part(const StepRequest& request, const kvm_item& item, uint64_t first_query);

class AttendPlanner {
 public:
  // LIMIT: a call of begin() or go_on() looks at about kPlanPages pages, those of each head that is
  // approximated counted: some 0.1 ms, and 0.7 ms more where one head has 4M tokens.
  static constexpr uint64_t kPlanPages = 16 << 10;

  // Begins to fill an empty plan: as long as !is_done(), go_on() does some more. seqs[i] belongs to
  // request.items[i]; tokens reserved for this request count as stored. What the arguments refer to
  // stays alive and unchanged until the last task of the plan has ended.
  // Fails: INVALID (fewer tokens than query rows), PARTIAL, UNSUPPORTED (a tree across a change of
  // what a head's policy shows), LIMIT (too many such changes, too many rows or approximate
  // problems at once). `costs` is asked with KVM_MODE_AUTO only.
  Status begin(const Store& store, const StepRequest& request, std::span<Sequence* const> seqs,
               const StepTensors& tensors, const Costs& costs, const TaskCrew& crew,
               AttendPlan* plan);
  // Whether the plan is made, and cut.
  bool is_done() const { return is_done_; }
  // REQUIRES: !is_done(). Fails: as begin().
  Status go_on(const Store& store);
  // Forgets the last request.
  void clear();

 private:
  // An IndexPart is what one head has of an index.
  struct IndexPart {
    Part<attention::SketchedRun> sketches;
    Part<attention::HashedRun> hashes;

    bool is_empty() const { return sketches.is_empty() && hashes.is_empty(); }
  };
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
    Part<KvRun> runs;
    Part<PositionRange> include;
    Part<PositionRange> exclude;
    Part<QueryTransform> transforms;
    Part<float> rotations;
    Part<IndexPart> indexes;  // of the heads of the class; empty: exact
    uint32_t away = AttendPlan::kNoAway;
    uint64_t n_keys = 0;       // for statistics, as the next
    uint64_t n_key_bytes = 0;  // of them, with their values
    uint64_t n_cost_keys = 0;  // for the cut
  };
  // These two do some more, until n_left pages have been looked at; it is 0 then, and else more.
  Status plan_items(const Store& store, uint64_t* n_left);
  Status plan_views(uint64_t* n_left);

  // Views.
  Status add_item(const Store& store, uint32_t item, const Sequence* seq);
  Status add_views(const Store& store, const Sequence* seq, const View& whole);
  Status collect_runs(const Store& store, const Sequence* seq, View* view);
  void add_index(const Store& store, const Sequence* seq, View* view);
  void add_away(View* view);
  bool may_draw(const View& view) const;
  Status choose_rule(const View& whole, View* view);
  void count_keys(size_t first_view, KvRuns runs);
  void add_ranges(const kvm_item& item, View* view);
  void exclude_dropped_sinks(View* view);
  uint32_t n_plain_rows(const View& view) const;
  // Says whether tokens that a head chose to keep may stand side by side (Store::collect_runs): not
  // where ranges or a bias by distance ask for their own positions.
  bool is_packed(const View& view) const {
    return request_->items[view.item].n_ranges == 0 && space_->slopes() == nullptr;
  }
  void turn_sinks(size_t run_begin, uint64_t n_sinks);
  Status add_rotation(View* view);
  attention::Visibility visibility(const View& view) const;
  const Retention& retention(const View& view) const;

  // Problems.
  attention::Problem problem_of(const View& view);
  uint32_t add_heads(uint32_t view, uint32_t first_head, uint64_t* n_left);
  uint32_t first_row(const View& view) const;
  PositionRange unwanted_masses(const View& view) const;
  void add_exact(const attention::Problem& problem, uint32_t view, uint32_t q_head);
  void count_exact(const View& view, uint32_t group);
  AttendPlan::ApproxHead approx_head(const attention::Problem& problem, uint32_t view,
                                     uint32_t q_head) const;
  void add_left(const attention::Problem& problem, uint32_t view, uint32_t q_head);
  void add_drawn_runs(const View& view);
  // Whether a view is approximated, as far as its pages are concerned.
  bool may_approximate(const View& view) const;
  bool add_parts(const attention::Problem& problem, uint32_t view, uint32_t kv_head,
                 const IndexPart& index);
  bool add_approx(const attention::Problem& problem, uint32_t view, uint32_t kv_head,
                  uint32_t q_head, const IndexPart& part);
  attention::ApproxPlan plan_like_last(const AttendPlan::ApproxHead& head) const;
  uint64_t exact_cost(const View& view) const;
  uint64_t head_cost(const View& view) const;
  ProblemCost problem_cost(const View& view, uint32_t group, const IndexPart& part) const;
  void share_time();
  bool choose(const View& view, uint32_t group, const IndexPart& part,
              attention::ApproxParams* params) const;
  // What the request takes beside what its tasks share.
  size_t other_bytes() const;

  const StepRequest* request_ = nullptr;
  std::span<Sequence* const> seqs_;
  const StepTensors* tensors_ = nullptr;
  const Costs* costs_ = nullptr;
  TaskCrew crew_;
  AttendPlan* plan_ = nullptr;
  // How far the planning is.
  uint32_t next_item_ = 0;
  uint32_t next_view_ = 0;
  uint32_t next_head_ = 0;  // of that view
  bool is_done_ = false;
  const Space* space_ = nullptr;
  float scale_ = 0;
  std::vector<View> views_;
  std::vector<IndexPart> indexes_;
  std::vector<AwayPage> away_;  // of the view whose runs were collected last
  VisibleKeys visible_keys_;
  size_t n_extra_views_ = 0;
  // AUTO with a time: what part of the time that it takes exactly each problem with an index gets.
  double time_share_ = 0;
};

// Plans, exactly, the approximate problems of a plan with these numbers, ascending. *left is empty;
// it refers to what `plan` refers to. What comes window by window comes by *left from then on:
// `plan` hands its lists of pages and runs over. Fails: LIMIT.
Status plan_left(AttendPlan* plan, std::span<const uint32_t> problems, const TaskCrew& crew,
                 AttendPlan* left);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_ATTEND_ATTEND_PLANNER_H_
