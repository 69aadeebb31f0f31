// SPDX-License-Identifier: Apache-2.0
#ifndef KVM_ENGINE_ATTEND_ATTEND_STREAM_H_
#define KVM_ENGINE_ATTEND_ATTEND_STREAM_H_

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <span>

#include "attention/attention.h"
#include "engine/attend/attend_plan.h"
#include "engine/stream/page_stream.h"

namespace kvm::engine {

// Those of the runs that lie in the page have it at `data` from now on.
void point_runs_to(std::span<KvRun> runs, const AwayPage& page, const std::byte* data);

// An AttendStream says to a PageStream what the windows of a plan are.
class AttendStream final : public StreamSource {
 public:
  // n_before: tasks of the job before plan->tasks. The plan is cut, and outlives this.
  void begin(AttendPlan* plan, uint32_t n_before) {
    plan_ = plan;
    n_before_ = n_before;
  }
  StreamShape shape() const override { return plan_->stream_shape; }
  uint32_t place_window(uint32_t window, std::byte* slot, StreamRead* reads) override;
  uint32_t tasks_end(uint32_t window) const override {
    return n_before_ + plan_->windows[window].tasks_end;
  }
  uint32_t n_free_tasks() const override { return n_before_ + plan_->n_tasks_there; }
  bool is_part_there() const override { return plan_->n_tasks_there != 0; }

 private:
  // A window is a chunk of positions.
  static constexpr size_t kMaxPages = attention::kMaxChunkTokens / kPageTokens;
  using PageSet = std::bitset<kMaxPages>;

  PageSet seen_pages(const AttendPlan::Away& away, std::span<const AwayPage> pages) const;
  void point_views_to(const AttendPlan::Away& away, const AwayPage& page, const std::byte* data);

  AttendPlan* plan_ = nullptr;
  uint32_t n_before_ = 0;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_ATTEND_ATTEND_STREAM_H_
