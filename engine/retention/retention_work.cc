// SPDX-License-Identifier: Apache-2.0
#include "engine/retention/retention_work.h"
#include "engine/retention/retention_plan.h"

#include <algorithm>

namespace kvm::engine {
namespace {

// Below this the driver does it at once.
constexpr uint64_t kSmallBytes = 128 << 10;
// Others' answers go before what saves memory: its cost counts so many times.
constexpr uint64_t kWeight = 2;

}  // namespace

void RetentionWork::clear() {
  targets_.clear();
  is_united_ = false;
  cursor_ = {};
  slice_.reset();
  stage_ = Stage::kPlan;
  n_tasks_ = 0;
}

void RetentionWork::add(Sequence* seq) {
  if (is_retention_due(seq)) {
    targets_.push_back(seq);
  }
}

bool RetentionWork::hand_over(uint32_t n_tasks, uint64_t bytes, uint32_t n_threads,
                              ThreadWorkspace& workspace, JobPlan* plan) {
  if (bytes >= kSmallBytes && n_tasks != 0) {
    n_tasks_ = n_tasks;
    *plan = {.n_tasks = n_tasks,
             .n_wake = std::min(n_threads - 1, n_tasks - 1),
             .cost = kWeight * bytes};
    return true;
  }
  for (uint32_t i = 0; i < n_tasks; ++i) {
    run(i, workspace);
  }
  return false;
}

// The next slice, on to those behind the last target; null: nothing is left.
bool RetentionWork::plan_slice(Store& store) {
  while (!targets_.empty()) {
    slice_ = plan_retention(store.memory(), targets_.back(), &cursor_);
    if (slice_ != nullptr) {
      return true;
    }
    targets_.pop_back();
    cursor_ = {};
  }
  return false;
}

RetentionWork::Next RetentionWork::next(Store& store, uint32_t n_threads,
                                        ThreadWorkspace& workspace, JobPlan* plan) {
  n_tasks_ = 0;
  if (!is_united_) {
    std::sort(targets_.begin(), targets_.end());
    targets_.erase(std::unique(targets_.begin(), targets_.end()), targets_.end());
    is_united_ = true;
  }
  // Small slices follow each other up to the size of one.
  uint64_t n_pages = 0;
  uint64_t n_bytes = 0;
  while (n_pages < RetentionSlice::kSlicePages && n_bytes < kSmallBytes) {
    if (stage_ == Stage::kPlan) {
      if (!plan_slice(store)) {
        clear();
        return Next::kDone;
      }
      stage_ = Stage::kDecide;
      if (hand_over(slice_->n_groups(), slice_->decide_bytes(), n_threads, workspace, plan)) {
        return Next::kTasks;
      }
    }
    if (stage_ == Stage::kDecide) {
      open_retention(&store.memory(), slice_.get());
      stage_ = Stage::kPieces;
      if (hand_over(slice_->n_pieces(), slice_->phase_bytes(), n_threads, workspace, plan)) {
        return Next::kTasks;
      }
    }
    while (slice_->next_phase()) {
      if (hand_over(slice_->n_pieces(), slice_->phase_bytes(), n_threads, workspace, plan)) {
        return Next::kTasks;
      }
    }
    n_pages += slice_->n_pages();
    n_bytes += slice_->decide_bytes() + slice_->bytes();
    close_retention(&store.memory(), slice_.get(), &cursor_);
    slice_.reset();
    stage_ = Stage::kPlan;
  }
  if (targets_.empty()) {  // stopped
    clear();
    return Next::kDone;
  }
  return Next::kMore;
}

void RetentionWork::run(uint32_t task, ThreadWorkspace& workspace) {
  if (stage_ == Stage::kDecide) {
    slice_->decide(task);
  } else {
    slice_->run(task, workspace);
  }
}

}  // namespace kvm::engine
