// SPDX-License-Identifier: Apache-2.0
// IndexWork is what a request waits for before it begins: that the indexes of its sequences cover
// what they can.
//
//   add(...) for each (sequence, layer); then, as long as next() has a job, run its tasks. Where it
//   waits, ask again when a build of another request is closed.
//
// LIMIT: a job has slices (engine/index/index_build.h) of kJobCost a thread and one head more, some
// 10 ms at 128 channels; the next one lines up behind what others have started meanwhile. Each task
// is as short as index_build.h says, and next() makes room for no more than a job's worth.
//
// Threads: run() on any thread, each task once; the rest on the driver.
// Errors: none. What finds no memory is not indexed.
#ifndef KVM_ENGINE_INDEX_INDEX_WORK_H_
#define KVM_ENGINE_INDEX_INDEX_WORK_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/index/index_build.h"
#include "engine/store/store.h"
#include "engine/tasks/scheduler.h"
#include "engine/tasks/workspace.h"

namespace kvm::engine {

class IndexWork {
 public:
  static constexpr uint64_t kJobCost = 1024;  // of IndexBuild::cost(), for each thread

  enum class Next : uint8_t {
    kTasks,  // run those of the plan, then ask again
    kWait,   // sequences of other requests build what this one shares with them
    kDone,   // everything is indexed
  };

  // Forgets everything; builds that are open are left as they are, unused.
  void clear();
  // Plans no more slices: next() ends with the one that is being made.
  void stop() { targets_.clear(); }
  // Ends at once, without what tasks would have made that did not run. REQUIRES: is_running(), no
  // task will run any more.
  void abandon(Store& store);
  // See Store::plan_index. Layers are OWN, so that no index is named twice.
  void add(Sequence* seq, uint32_t layer, uint64_t n_append);
  // After all tasks of the last job have ended.
  Next next(Store& store, uint32_t n_threads, JobPlan* plan);
  // Between a next() with tasks and the one after.
  bool is_running() const { return stage_ != Stage::kIdle; }
  void run(uint32_t task, ThreadWorkspace& workspace);

 private:
  struct Target {
    Sequence* seq = nullptr;
    uint32_t layer = 0;
    uint64_t n_append = 0;
  };
  enum class Kind : uint8_t { kFrame, kSum, kCodes, kTables };
  struct Task {
    IndexBuild* build = nullptr;
    uint32_t index = 0;
    Kind kind = Kind::kFrame;
  };
  enum class Stage : uint8_t { kIdle, kFrames, kCodes };

  void unite_targets();
  void plan_builds(Store& store, uint64_t max_cost);
  void add_first_tasks();
  void open_builds(Store& store);

  std::vector<Target> targets_;  // that may lack something still
  bool is_united_ = false;
  std::vector<std::unique_ptr<IndexBuild>> builds_;
  std::vector<Task> tasks_;
  Stage stage_ = Stage::kIdle;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_INDEX_INDEX_WORK_H_
