// SPDX-License-Identifier: Apache-2.0
// A DrawnStream says to a PageStream which pages the samples of a plan read: of each shard of
// positions those that hold a key which some head has drawn, or that is always read. What an Away
// draws is streamed as drawn, or it is left: where too many pages would be read, and where those of
// a shard have no room in the ring.
//
// Threads: choose() on the driver; the others as StreamSource says.
#ifndef KVM_ENGINE_ATTEND_DRAWN_STREAM_H_
#define KVM_ENGINE_ATTEND_DRAWN_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/attend/attend_executor.h"
#include "engine/attend/attend_plan.h"
#include "engine/stream/page_stream.h"
#include "tiers/read_rates.h"

namespace kvm::engine {

class DrawnStream final : public StreamSource {
 public:
  // After the last of plan->tasks: decides for each Away that is drawn, by what was found to be
  // read, and leaves it to `executor` where it is streamed whole. Plan and executor outlive this.
  // Throws std::bad_alloc.
  void choose(AttendPlan* plan, AttendExecutor* executor, uint64_t ring_bytes,
              const tiers::ReadRates& rates);
  void clear();
  // Of the job: of plan->drawn_tasks each task, and the window that it belongs to.
  uint32_t n_tasks() const { return static_cast<uint32_t>(tasks_.size()); }
  uint32_t task(uint32_t i) const { return tasks_[i].drawn; }
  uint32_t window_of(uint32_t i) const { return tasks_[i].window; }
  uint64_t size_bytes() const { return size_bytes_; }  // that will be read

  StreamShape shape() const override { return shape_; }
  uint32_t place_window(uint32_t window, std::byte* slot, StreamRead* reads) override;
  uint32_t tasks_end(uint32_t window) const override { return windows_[window].tasks_end; }
  uint32_t n_free_tasks() const override { return 0; }
  bool is_part_there() const override { return false; }

 private:
  struct Window {
    uint32_t drawn = 0;  // of plan_->drawn_windows
    uint32_t tasks_end = 0;
  };
  struct Task {
    uint32_t drawn = 0;   // of plan_->drawn_tasks
    uint32_t window = 0;  // of windows_
  };

  bool pays(const AttendPlan::Away& away, uint64_t ring_bytes, const tiers::ReadRates& rates) const;
  void add(const AttendPlan::Away& away);

  AttendPlan* plan_ = nullptr;
  const AttendExecutor* executor_ = nullptr;
  StreamShape shape_;
  std::vector<Window> windows_;
  std::vector<Task> tasks_;
  uint64_t size_bytes_ = 0;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_ATTEND_DRAWN_STREAM_H_
