// SPDX-License-Identifier: Apache-2.0
#include "engine/aging_work.h"

#include <algorithm>

namespace kvm::engine {
namespace {

// Below this the driver does it at once.
constexpr uint64_t kSmallBytes = 128 << 10;

}  // namespace

void AgingWork::clear() {
  targets_.clear();
  is_united_ = false;
  cursor_ = {};
  aging_.reset();
  stage_ = Stage::kPlan;
  n_tasks_ = 0;
}

void AgingWork::add(const Store& store, Sequence* seq) {
  if (store.is_aging_due(seq)) {
    targets_.push_back(seq);
  }
}

bool AgingWork::hand_over(uint32_t n_tasks, uint64_t bytes, uint32_t n_threads,
                          ThreadWorkspace& workspace, JobPlan* plan) {
  if (bytes >= kSmallBytes && n_tasks != 0) {
    n_tasks_ = n_tasks;
    *plan = {.n_tasks = n_tasks, .n_wake = std::min(n_threads - 1, n_tasks - 1)};
    return true;
  }
  for (uint32_t i = 0; i < n_tasks; ++i) {
    run(i, workspace);
  }
  return false;
}

// The next slice, on to those behind the last target; null: nothing is left.
bool AgingWork::plan_slice(Store& store) {
  while (!targets_.empty()) {
    aging_ = store.plan_aging(targets_.back(), &cursor_);
    if (aging_ != nullptr) {
      return true;
    }
    targets_.pop_back();
    cursor_ = {};
  }
  return false;
}

AgingWork::Next AgingWork::next(Store& store, uint32_t n_threads, ThreadWorkspace& workspace,
                                JobPlan* plan) {
  n_tasks_ = 0;
  if (!is_united_) {
    std::sort(targets_.begin(), targets_.end());
    targets_.erase(std::unique(targets_.begin(), targets_.end()), targets_.end());
    is_united_ = true;
  }
  // Small slices follow each other up to the size of one.
  uint64_t n_pages = 0;
  uint64_t n_bytes = 0;
  while (n_pages < Aging::kSlicePages && n_bytes < kSmallBytes) {
    if (stage_ == Stage::kPlan) {
      if (!plan_slice(store)) {
        clear();
        return Next::kDone;
      }
      stage_ = Stage::kDecide;
      if (hand_over(aging_->n_groups(), aging_->decide_bytes(), n_threads, workspace, plan)) {
        return Next::kTasks;
      }
    }
    if (stage_ == Stage::kDecide) {
      store.open_aging(aging_.get());
      stage_ = Stage::kPieces;
      if (hand_over(aging_->n_pieces(), aging_->bytes(), n_threads, workspace, plan)) {
        return Next::kTasks;
      }
    }
    n_pages += aging_->n_pages();
    n_bytes += aging_->decide_bytes() + aging_->bytes();
    store.close_aging(aging_.get(), &cursor_);
    aging_.reset();
    stage_ = Stage::kPlan;
  }
  if (targets_.empty()) {  // stopped
    clear();
    return Next::kDone;
  }
  return Next::kMore;
}

void AgingWork::run(uint32_t task, ThreadWorkspace& workspace) {
  if (stage_ == Stage::kDecide) {
    aging_->decide(task);
  } else {
    aging_->run(task, workspace);
  }
}

}  // namespace kvm::engine
