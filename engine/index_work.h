// SPDX-License-Identifier: Apache-2.0
// What a request waits for before it begins: that the indexes of its sequences cover what they can.
//
//   add(...) for each (sequence, layer); then, as long as next() has a job, run its tasks.
//
// Threads: run() on any thread, each task once; the rest on the driver.
// Errors: none. What finds no memory is not indexed.
#ifndef KVM_ENGINE_INDEX_WORK_H_
#define KVM_ENGINE_INDEX_WORK_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/index_build.h"
#include "engine/scheduler.h"
#include "engine/store.h"
#include "engine/workspace.h"

namespace kvm::engine {

class IndexWork {
 public:
  // Forgets everything; builds that are open are left as they are, unused.
  void clear();
  // See Store::plan_index. Layers are OWN, so that no index is named twice.
  void add(Sequence* seq, uint32_t layer, uint64_t n_append);
  // The next job, after all tasks of the last have ended; false when everything is indexed.
  bool next(Store& store, uint32_t n_threads, JobPlan* plan);
  // Between a next() that was true and the one after.
  bool is_running() const { return stage_ != Stage::kIdle; }
  void run(uint32_t task, ThreadWorkspace& workspace);

 private:
  struct Target {
    Sequence* seq = nullptr;
    uint32_t layer = 0;
    uint64_t n_append = 0;
  };
  enum class Kind : uint8_t { kFrames, kCodes, kTables };
  struct Task {
    IndexBuild* build = nullptr;
    uint32_t index = 0;
    Kind kind = Kind::kFrames;
  };
  enum class Stage : uint8_t { kIdle, kFrames, kCodes };

  void unite_targets();
  void plan_builds(Store& store);

  std::vector<Target> targets_;
  size_t n_planned_ = 0;  // of targets_
  std::vector<std::unique_ptr<IndexBuild>> builds_;
  std::vector<Task> tasks_;
  Stage stage_ = Stage::kIdle;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_INDEX_WORK_H_
