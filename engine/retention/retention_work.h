// SPDX-License-Identifier: Apache-2.0
// RetentionWork is what a request ends with: policies act on what it committed to its sequences.
// Until they have, its sequences are busy and it has not answered, so whatever is submitted behind
// it sees what they left, all of it.
//
//   add(...) for each sequence; then next() until nothing is left, running its tasks where it says.
//
// LIMIT: a call of next() does one slice (engine/retention/retention_slice.h), in steps between
// which its tasks run; those of small slices it runs itself. The next slice lines up behind what
// others have started.
//
// Threads: run() on any thread, each task once; the rest on the driver.
// Errors: none. An action that finds no memory is left to the next commit.
#ifndef KVM_ENGINE_RETENTION_RETENTION_WORK_H_
#define KVM_ENGINE_RETENTION_RETENTION_WORK_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/retention/retention_slice.h"
#include "engine/store/store.h"
#include "engine/tasks/scheduler.h"
#include "engine/tasks/workspace.h"

namespace kvm::engine {

class RetentionWork {
 public:
  enum class Next : uint8_t {
    kDone,   // nothing is left
    kTasks,  // run the tasks of *plan, then call again
    kMore,   // call again
  };

  // Forgets everything; policies are asked again at the next commit.
  void clear();
  // Plans no more slices: next() ends with the one that is being made.
  void stop() { targets_.clear(); }
  // Does nothing where no policy waits. What is added twice counts once.
  void add(Sequence* seq);
  bool is_empty() const { return targets_.empty() && slice_ == nullptr; }
  Next next(Store& store, uint32_t n_threads, ThreadWorkspace& workspace, JobPlan* plan);
  // Between a next() that gave tasks and the one after.
  bool is_running() const { return n_tasks_ != 0; }
  void run(uint32_t task, ThreadWorkspace& workspace);

 private:
  enum class Stage : uint8_t { kPlan, kDecide, kPieces };

  bool plan_slice(Store& store);
  // Runs tasks that are few; else true, and they are *plan's.
  bool hand_over(uint32_t n_tasks, uint64_t bytes, uint32_t n_threads, ThreadWorkspace& workspace,
                 JobPlan* plan);

  std::vector<Sequence*> targets_;  // the last is being worked on
  bool is_united_ = false;
  RetentionCursor cursor_;
  std::unique_ptr<RetentionSlice> slice_;
  Stage stage_ = Stage::kPlan;
  uint32_t n_tasks_ = 0;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RETENTION_RETENTION_WORK_H_
