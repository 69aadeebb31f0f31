// SPDX-License-Identifier: Apache-2.0
// A Step is one append, attend or step request from its start to its end.
//
//   begin()    checks it against the state of its sequences, reserves pages, cuts it into tasks
//   plan_next() further jobs: samples of pages that are away, and what needs all results
//   run()      copies K and V into pages and prepares queries, then attends. What is attended
//              includes what is appended: approximate problems, which look at tokens when they are
//              prepared, are so in a stage between.
//   end()      publishes the appended tokens; or abandon(), which leaves nothing of them
//
// Threads: run() on any thread, each task once; the rest on the driver.
// Memory:  keeps its buffers for the next request, up to a size once it rests.
#ifndef KVM_ENGINE_RUN_STEP_H_
#define KVM_ENGINE_RUN_STEP_H_

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "engine/attend/attend_executor.h"
#include "engine/attend/attend_plan.h"
#include "engine/attend/attend_planner.h"
#include "engine/attend/attend_stream.h"
#include "engine/attend/drawn_stream.h"
#include "engine/engine.h"
#include "engine/run/append_work.h"
#include "engine/space/validate.h"
#include "engine/store/store.h"
#include "engine/tasks/scheduler.h"
#include "engine/tasks/workspace.h"

namespace kvm::engine {

// What an item is about to do with its sequence.
inline Access access_of(const kvm_item& item) {
  return item.n_append != 0 ? Access::kChange : Access::kUse;
}

class Step {
 public:
  // `request` and `tensors` stay alive and unchanged until end() or abandon().
  // `workspace` is that of the driver; `costs` are asked with KVM_MODE_AUTO.
  // Fails: as kvm_step; nothing has changed then. The sequences were found by `client`.
  Status begin(Store& store, ClientId client, const StepRequest& request,
               const StepTensors& tensors, const Costs& costs, const TaskCrew& crew,
               ThreadWorkspace& workspace);
  // begin() has not planned everything: plan_more() does, some of it with each call, before
  // anything else. It fails as begin() does.
  bool is_planning() const { return attends_ && !planner_.is_done(); }
  Status plan_more(Store& store, ThreadWorkspace& workspace);
  // n_tasks may be 0: begin() has done everything.
  const JobPlan& plan() const { return plan_; }
  // True when handing tasks to other threads would take longer than running them.
  bool is_small() const { return is_small_; }
  // The windows of what it attends to that is away; null: there are none.
  StreamSource* windows();
  // The window of a task, or kNoWindow.
  uint32_t window_of(uint32_t task) const;
  uint64_t n_rows() const { return attend_plan_.n_rows; }
  // Returns the sequences of the items.
  const std::vector<Sequence*>& seqs() const { return seqs_; }
  void run(uint32_t task, ThreadWorkspace& workspace);
  // After every task has ended: another job, of samples whose pages are away, or where something is
  // left that needs all results (sums of attention mass, problems that could not be approximated);
  // else false. plan(), windows() and run() are of that one then.
  bool plan_next(const Store& store, const Costs& costs);
  // Makes end() fail: the machine refused memory.
  void fail() { out_of_memory_.store(true, std::memory_order_relaxed); }
  // After every task has ended, of both jobs. `auditor` may be null: nothing is audited.
  // Fails: NO_MEMORY (a task had none; nothing was appended).
  // read_epoch: of the request.
  Status end(Store& store, uint64_t read_epoch, Auditor* auditor, RequestResult* result);
  void abandon(Store& store);
  // Gives memory beyond what is worth keeping back. Nothing may be running.
  void rest();

 private:
  // Which job plan_ is of.
  enum class Stage : uint8_t { kFirst, kDrawing, kSecond };

  // After planner_ has begun or gone on: abandons a request that failed, and makes plan_ of one
  // that is planned.
  Status check_planned(Store& store, Status status, ThreadWorkspace& workspace);
  bool has_windows() const { return !attend_plan_.windows.empty(); }
  bool has_left_windows() const { return has_left_ && !left_plan_.windows.empty(); }
  void make_plan(ThreadWorkspace& workspace);
  bool plan_draws(const Store& store, const Costs& costs);
  bool plan_second();
  void evaluate_second(uint32_t task, ThreadWorkspace& workspace);
  void prepare(uint32_t task, ThreadWorkspace& workspace);

  AppendWork append_;
  AttendPlanner planner_;
  AttendPlan attend_plan_;  // made by planner_, carried out by executor_
  AttendStream windows_;
  AttendExecutor executor_;
  DrawnStream draws_;     // of attend_plan_
  AttendPlan left_plan_;  // of what executor_ left, for left_executor_
  AttendStream left_windows_;
  AttendExecutor left_executor_;
  TaskCrew crew_;
  std::vector<Sequence*> seqs_;
  std::vector<IndexPin> pins_;  // of what attend_plan_ reads
  JobPlan plan_;
  uint32_t n_copies_ = 0;    // tasks that copy
  uint32_t n_prepared_ = 0;  // tasks before this one and behind the copies prepare
  bool is_small_ = false;
  bool attends_ = false;
  Stage stage_ = Stage::kFirst;
  bool has_left_ = false;
  std::atomic<bool> out_of_memory_{false};
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RUN_STEP_H_
