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
#include "engine/stream/page_stream.h"
#include "engine/tasks/scheduler.h"

namespace kvm::engine {

// Threads: run() on any thread, each task once; the rest on the driver.
class ReadWork final : public StreamSource {
 public:
  // `tensors` stays alive until the last task has ended. Fails: INVALID, PARTIAL.
  Status begin(const Store& store, const Sequence* seq, const ReadRequest& request,
               const ReadTensors& tensors, uint32_t n_threads);
  const JobPlan& plan() const { return plan_; }
  bool is_small() const { return is_small_; }
  void run(uint32_t task) const;

  // Where some of what it reads is away, its tasks come window by window.
  bool has_windows() const { return !windows_.empty(); }
  uint32_t window_of(uint32_t task) const;
  StreamShape shape() const override { return shape_; }
  uint32_t place_window(uint32_t window, std::byte* slot, StreamRead* reads) override;
  uint32_t tasks_end(uint32_t window) const override { return windows_[window].tasks_end; }
  uint32_t n_free_tasks() const override { return 0; }
  bool is_part_there() const override { return false; }

 private:
  // Tokens of one run, all heads of its class.
  struct Piece {
    KvRun run;
    uint64_t row = 0;  // of the tensors
    const HeadClass* cls = nullptr;
    AwayPage away;  // where it lies, if it is away
  };
  struct Window {
    uint32_t tasks_end = 0;
    uint32_t n_pages = 0;  // that are away
    uint64_t size_bytes = 0;
  };
  void copy_piece(const Piece& piece) const;
  void cut_windows();

  const ReadTensors* tensors_ = nullptr;
  std::vector<KvRun> runs_;
  std::vector<Piece> pieces_;
  std::vector<uint32_t> task_ends_;  // index behind the last piece of each task
  std::vector<AwayPage> away_;
  std::vector<Window> windows_;
  StreamShape shape_;  // of these
  JobPlan plan_;
  bool is_small_ = false;
};

// Converts what a client observed and hands it to the store. Fails: INVALID, QUOTA, NO_SPACE.
Status observe(Store& store, Sequence* seq, const ObserveRequest& request,
               const ObserveTensors& tensors);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RUN_READ_WORK_H_
