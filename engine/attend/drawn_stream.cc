// SPDX-License-Identifier: Apache-2.0
#include "engine/attend/drawn_stream.h"

#include <span>
#include <utility>

#include "base/round.h"
#include "engine/attend/attend_stream.h"

namespace kvm::engine {

void DrawnStream::clear() {
  plan_ = nullptr;
  executor_ = nullptr;
  shape_ = {};
  size_bytes_ = 0;
  empty(&windows_);
  empty(&tasks_);
}

void DrawnStream::choose(AttendPlan* plan, AttendExecutor* executor, uint64_t ring_bytes,
                         const tiers::ReadRates& rates) {
  clear();
  plan_ = plan;
  executor_ = executor;
  for (uint32_t i = 0; i < plan->aways.size(); ++i) {
    const AttendPlan::Away& away = plan->aways[i];
    if (away.drawn.is_empty()) {
      continue;
    }
    if (executor->may_draw(i) && pays(away, ring_bytes, rates)) {
      add(away);
    } else {
      executor->leave(i);
    }
  }
}

bool DrawnStream::pays(const AttendPlan::Away& away, uint64_t ring_bytes,
                       const tiers::ReadRates& rates) const {
  uint64_t n_drawn = 0;
  uint64_t drawn_bytes = 0;
  uint64_t all_bytes = 0;
  for (uint32_t i = 0; i < away.drawn.n; ++i) {
    const auto window = static_cast<uint32_t>(away.drawn.begin + i);
    const AttendExecutor::DrawnPages& drawn = executor_->drawn_pages(window);
    if (round_up(drawn.size_bytes, tiers::RingMemory::kAlign) > ring_bytes) {
      return false;
    }
    n_drawn += drawn.n_pages;
    drawn_bytes += drawn.size_bytes;
    all_bytes += drawn.all_bytes;
  }
  return rates.apart_ns(n_drawn, drawn_bytes) <= rates.in_order_ns(all_bytes);
}

void DrawnStream::add(const AttendPlan::Away& away) {
  for (uint32_t i = 0; i < away.drawn.n; ++i) {
    const auto drawn = static_cast<uint32_t>(away.drawn.begin + i);
    const AttendPlan::DrawnWindow& window = plan_->drawn_windows[drawn];
    for (size_t task = 0; task < window.tasks.n; ++task) {
      tasks_.push_back({static_cast<uint32_t>(window.tasks.begin + task),
                        static_cast<uint32_t>(windows_.size())});
    }
    windows_.push_back({drawn, n_tasks()});
    const AttendExecutor::DrawnPages& pages = executor_->drawn_pages(drawn);
    shape_.add_window(pages.n_pages, pages.size_bytes);
    size_bytes_ += pages.size_bytes;
  }
}

uint32_t DrawnStream::place_window(uint32_t index, std::byte* slot, StreamRead* reads) {
  const uint32_t drawn = windows_[index].drawn;
  const AttendPlan::DrawnWindow& window = plan_->drawn_windows[drawn];
  const auto lists = plan_->aways[window.away].drawn_runs.in(std::as_const(plan_->drawn_runs));
  uint32_t n = 0;
  for (const AwayPage& page : window.pages.in(std::as_const(plan_->away_pages))) {
    if (!executor_->reads_block(drawn, page.block)) {
      continue;
    }
    reads[n++] = {page.place, slot, page.size_bytes};
    for (const Part<KvRun>& runs : lists) {
      point_runs_to(runs.in(plan_->runs), page, slot);
    }
    slot += page.size_bytes;
  }
  return n;
}

}  // namespace kvm::engine
