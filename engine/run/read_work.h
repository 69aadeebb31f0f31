// SPDX-License-Identifier: Apache-2.0
// ReadWork copies stored K and V out to tensors (kvm_read); observe() copies observations in
// (kvm_observe).
#ifndef KVM_ENGINE_RUN_READ_WORK_H_
#define KVM_ENGINE_RUN_READ_WORK_H_

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "engine/space/validate.h"
#include "engine/store/store.h"
#include "engine/tasks/scheduler.h"

namespace kvm::engine {

// Threads: run() on any thread, each task once; the rest on the driver.
class ReadWork {
 public:
  // `tensors` stays alive until the last task has ended. Fails: INVALID, PARTIAL.
  Status begin(const Store& store, const Sequence* seq, const ReadRequest& request,
               const ReadTensors& tensors, uint32_t n_threads);
  const JobPlan& plan() const { return plan_; }
  bool is_small() const { return is_small_; }
  void run(uint32_t task) const;

 private:
  // Tokens of one run, all heads of its class.
  struct Piece {
    KvRun run;
    uint64_t row = 0;  // of the tensors
    const HeadClass* cls = nullptr;
  };
  void copy_piece(const Piece& piece) const;

  const ReadTensors* tensors_ = nullptr;
  std::vector<KvRun> runs_;
  std::vector<Piece> pieces_;
  std::vector<uint32_t> task_ends_;  // index behind the last piece of each task
  JobPlan plan_;
  bool is_small_ = false;
};

// Converts what a client observed and hands it to the store. Fails: INVALID, QUOTA, NO_SPACE.
Status observe(Store& store, Sequence* seq, const ObserveRequest& request,
               const ObserveTensors& tensors);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RUN_READ_WORK_H_
