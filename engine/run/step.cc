// SPDX-License-Identifier: Apache-2.0
#include "engine/run/step.h"

#include <algorithm>
#include <new>
#include <span>

namespace kvm::engine {
namespace {

// Work below this, in bytes read, is done at once by the driver.
constexpr uint64_t kSmallCost = 256 << 10;
// Appends below this are copied at once by the driver: a decode step of a few sequences.
constexpr uint64_t kSmallAppendBytes = 64 << 10;
constexpr uint64_t kSmallPrepareBytes = 128 << 10;
constexpr uint64_t kCopyTaskBytes = 256 << 10;
// A sleeping worker takes some 50 us to come: time in which the others read this much.
constexpr uint64_t kCostPerWake = 512 << 10;

}  // namespace

Status Step::begin(Store& store, ClientId client, const StepRequest& request,
                   const StepTensors& tensors, const Costs& costs, const TaskCrew& crew,
                   ThreadWorkspace& workspace) {
  append_.clear();
  attend_plan_.clear();
  seqs_.clear();
  pins_.clear();
  plan_ = {};
  n_copies_ = 0;
  n_prepared_ = 0;
  is_small_ = false;
  attends_ = request.attend;
  stage_ = Stage::kFirst;
  has_left_ = false;
  crew_ = crew;
  out_of_memory_.store(false, std::memory_order_relaxed);
  for (const kvm_item& item : request.items) {
    KVM_TRY_ASSIGN(Sequence * seq, store.find_seq(client, item.seq, access_of(item)));
    seqs_.push_back(seq);
  }
  if (request.append) {
    KVM_TRY(append_.reserve(store, request, seqs_, tensors));
  }
  if (request.attend) {
    for (size_t i = 0; i < seqs_.size() && request.mode > KVM_MODE_EXACT; ++i) {
      if (request.items[i].n_query != 0) {
        pins_.push_back(pin_layer_index(seqs_[i], request.layer_begin));
      }
    }
    return check_planned(store,
                         planner_.begin(store, request, seqs_, tensors, costs, crew, &attend_plan_),
                         workspace);
  }
  make_plan(workspace);
  return Status::ok();
}

Status Step::plan_more(Store& store, ThreadWorkspace& workspace) {
  return check_planned(store, planner_.go_on(store), workspace);
}

Status Step::check_planned(Store& store, Status status, ThreadWorkspace& workspace) {
  if (status.is_ok() && planner_.is_done()) {
    status = executor_.begin(attend_plan_);
  }
  if (!status.is_ok()) {
    abandon(store);
  } else if (planner_.is_done()) {
    make_plan(workspace);
  }
  return status;
}

void Step::rest() {
  planner_.clear();
  attend_plan_.clear();
  executor_.rest();
  draws_.clear();
  left_plan_.clear();
  left_executor_.rest();
}

void Step::make_plan(ThreadWorkspace& workspace) {
  const uint64_t cost = append_.n_bytes() + attend_plan_.prepare_bytes + attend_plan_.cost;
  is_small_ = cost < kSmallCost && !has_windows();
  const bool copy_now = append_.n_bytes() < kSmallAppendBytes;
  const bool prepare_now =
      attend_plan_.prepare_bytes < kSmallPrepareBytes && (copy_now || attend_plan_.approx.empty());
  append_.cut(copy_now ? UINT64_MAX : kCopyTaskBytes);
  if (copy_now) {
    for (uint32_t i = 0; i < append_.n_tasks(); ++i) {
      append_.copy(i);
    }
  } else {
    n_copies_ = append_.n_tasks();
  }
  n_prepared_ = n_copies_;
  if (prepare_now) {
    for (uint32_t i = 0; i < attend_plan_.n_prepare_tasks(); ++i) {
      prepare(i, workspace);
    }
  } else {
    n_prepared_ += attend_plan_.n_prepare_tasks();
  }
  windows_.begin(&attend_plan_, n_prepared_);
  plan_.n_first = attend_plan_.approx.empty() ? n_prepared_ : n_copies_;
  plan_.n_middle = n_prepared_;
  plan_.n_tasks = n_prepared_ + static_cast<uint32_t>(attend_plan_.tasks.size());
  plan_.cost = cost;
  plan_.n_wake =
      static_cast<uint32_t>(std::min<uint64_t>(crew_.n_threads - 1, cost / kCostPerWake));
}

StreamSource* Step::windows() {
  if (!attends_) {
    return nullptr;
  }
  switch (stage_) {
    case Stage::kFirst:
      return has_windows() ? &windows_ : nullptr;
    case Stage::kDrawing:
      return &draws_;
    case Stage::kSecond:
      break;
  }
  return has_left_windows() ? &left_windows_ : nullptr;
}

uint32_t Step::window_of(uint32_t task) const {
  switch (stage_) {
    case Stage::kFirst:
      return task < n_prepared_ || !has_windows() ? kNoWindow
                                                  : attend_plan_.tasks[task - n_prepared_].window;
    case Stage::kDrawing:
      return draws_.window_of(task);
    case Stage::kSecond:
      break;
  }
  return task < plan_.n_first || !has_left_windows()
             ? kNoWindow
             : left_plan_.tasks[task - plan_.n_first].window;
}

bool Step::plan_next(const Store& store, const Costs& costs) {
  if (!attends_ || out_of_memory_.load(std::memory_order_relaxed)) {
    return false;
  }
  switch (stage_) {
    case Stage::kFirst:
      stage_ = Stage::kDrawing;
      if (plan_draws(store, costs)) {
        return true;
      }
      [[fallthrough]];
    case Stage::kDrawing:
      stage_ = Stage::kSecond;
      return plan_second();
    case Stage::kSecond:
      break;
  }
  return false;
}

bool Step::plan_draws(const Store& store, const Costs& costs) {
  if (attend_plan_.drawn_windows.empty()) {
    return false;
  }
  draws_.choose(&attend_plan_, &executor_, store.memory().rings().size_bytes(), costs.read_rates());
  plan_ = {};
  plan_.n_tasks = draws_.n_tasks();
  plan_.cost = draws_.size_bytes();
  plan_.n_wake =
      static_cast<uint32_t>(std::min<uint64_t>(crew_.n_threads - 1, plan_.cost / kCostPerWake));
  return plan_.n_tasks != 0;
}

bool Step::plan_second() {
  const std::span<const uint32_t> left = executor_.find_left();
  if (!left.empty()) {
    has_left_ = true;
    left_plan_.clear();
    // Few rows each: they are within what a request may take.
    if (!plan_left(&attend_plan_, left, crew_, &left_plan_).is_ok() ||
        !left_executor_.begin(left_plan_).is_ok()) {
      fail();
      return false;
    }
  }
  // The sums, what prepares, and what attends.
  plan_ = {};
  plan_.n_first = static_cast<uint32_t>(attend_plan_.sum_tasks.size());
  plan_.n_first += has_left_ ? left_plan_.n_prepare_tasks() : 0;
  plan_.n_tasks = plan_.n_first + (has_left_ ? static_cast<uint32_t>(left_plan_.tasks.size()) : 0);
  plan_.cost = has_left_ ? left_plan_.cost : 0;
  plan_.n_wake = plan_.n_tasks == 0 ? 0 : std::min(crew_.n_threads, plan_.n_tasks) - 1;
  left_windows_.begin(&left_plan_, plan_.n_first);
  return plan_.n_tasks != 0;
}

void Step::evaluate_second(uint32_t task, ThreadWorkspace& workspace) {
  const auto n_sums = static_cast<uint32_t>(attend_plan_.sum_tasks.size());
  bool is_done = true;
  if (task < n_sums) {
    is_done = executor_.sum(task, workspace);
  } else if (task < plan_.n_first) {
    is_done = left_executor_.prepare(task - n_sums, workspace);
  } else {
    is_done = left_executor_.evaluate(task - plan_.n_first, workspace);
  }
  if (!is_done) {
    fail();
  }
}

void Step::run(uint32_t task, ThreadWorkspace& workspace) {
  if (stage_ == Stage::kSecond) {
    evaluate_second(task, workspace);
  } else if (stage_ == Stage::kDrawing) {
    if (!out_of_memory_.load(std::memory_order_relaxed) &&
        !executor_.draw(draws_.task(task), workspace)) {
      fail();
    }
  } else if (task < n_copies_) {
    append_.copy(task);
  } else if (task < n_prepared_) {
    prepare(task - n_copies_, workspace);
  } else if (out_of_memory_.load(std::memory_order_relaxed)) {
    // What a task of an earlier stage should have prepared may be missing.
  } else if (!executor_.evaluate(task - n_prepared_, workspace)) {
    // The end of the job orders this before end().
    out_of_memory_.store(true, std::memory_order_relaxed);
  }
}

void Step::prepare(uint32_t task, ThreadWorkspace& workspace) {
  if (!executor_.prepare(task, workspace)) {
    out_of_memory_.store(true, std::memory_order_relaxed);
  }
}

Status Step::end(Store& store, uint64_t read_epoch, Auditor* auditor, RequestResult* result) {
  const bool failed = out_of_memory_.load(std::memory_order_relaxed);
  pins_.clear();
  // Before the appended tokens are published: policies may then give pages back.
  if (attends_ && !failed && auditor != nullptr) {
    executor_.offer_audits(store, seqs_, read_epoch, auditor);
  }
  if (attends_ && !failed) {
    try {
      executor_.add_masses(store, seqs_);
    } catch (const std::bad_alloc&) {
      // The answer is right; what policies go by misses some of it.
    }
  }
  append_.close(store, !failed);
  if (failed) {
    return Status::fixed(KVM_ERR_NO_MEMORY, "the machine refused memory for intermediate results");
  }
  if (attends_) {
    executor_.report(has_left_ ? &left_executor_ : nullptr, result);
  }
  return Status::ok();
}

void Step::abandon(Store& store) {
  pins_.clear();
  append_.close(store, false);
}

}  // namespace kvm::engine
