// SPDX-License-Identifier: Apache-2.0
#include "engine/index/index_work.h"
#include "engine/index/sequence_index.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace kvm::engine {
namespace {

// A unit of IndexBuild::cost() takes some 15 us, in which as many bytes of K and V are read.
constexpr uint64_t kBytesPerCost = uint64_t{128} << 10;

}  // namespace

void IndexWork::clear() {
  targets_.clear();
  is_united_ = false;
  builds_.clear();
  tasks_.clear();
  stage_ = Stage::kIdle;
}

void IndexWork::add(Sequence* seq, uint32_t layer, uint64_t n_append) {
  targets_.push_back({seq, layer, n_append});
}

// One target for each (sequence, layer), the one with the most tokens.
void IndexWork::unite_targets() {
  std::sort(targets_.begin(), targets_.end(), [](const Target& a, const Target& b) {
    return std::tie(a.seq, a.layer, b.n_append) < std::tie(b.seq, b.layer, a.n_append);
  });
  const auto end = std::unique(
      targets_.begin(), targets_.end(),
      [](const Target& a, const Target& b) { return a.seq == b.seq && a.layer == b.layer; });
  targets_.erase(end, targets_.end());
  is_united_ = true;
}

// The next slice of each of the first targets; those that lack nothing any more are forgotten, and
// those that are built elsewhere are left for later.
void IndexWork::plan_builds(Store& store, uint64_t max_cost) {
  if (!is_united_) {
    unite_targets();
  }
  uint64_t cost = 0;
  size_t n_kept = 0;
  size_t i = 0;
  for (; i < targets_.size() && cost < max_cost; ++i) {
    const Target target = targets_[i];
    PlannedBuild build = plan_index_build(&store.memory(), target.seq, target.layer,
                                          target.n_append, max_cost - cost);
    if (build.slice != nullptr) {
      cost += build.slice->cost();
      builds_.push_back(std::move(build.slice));
      targets_[n_kept++] = target;
    } else if (build.is_claimed) {
      targets_[n_kept++] = target;
    }
  }
  targets_.erase(targets_.begin() + static_cast<ptrdiff_t>(n_kept),
                 targets_.begin() + static_cast<ptrdiff_t>(i));
}

void IndexWork::add_first_tasks() {
  for (const auto& build : builds_) {
    for (uint32_t i = 0; i < build->n_heads(); ++i) {
      if (build->has_frame(i)) {
        tasks_.push_back({build.get(), i, Kind::kFrame});
      }
    }
    for (uint32_t i = 0; i < build->n_sum_pieces(); ++i) {
      tasks_.push_back({build.get(), i, Kind::kSum});
    }
  }
}

void IndexWork::open_builds(Store& store) {
  for (const auto& build : builds_) {
    open_index_build(&store.memory(), build.get());
    for (uint32_t i = 0; i < build->n_pieces(); ++i) {
      tasks_.push_back({build.get(), i, Kind::kCodes});
    }
    for (uint32_t i = 0; i < build->n_table_pieces(); ++i) {
      tasks_.push_back({build.get(), i, Kind::kTables});
    }
  }
}

void IndexWork::abandon(Store& store) {
  if (stage_ == Stage::kCodes) {
    for (const auto& build : builds_) {
      close_index_build(&store.memory(), build.get());
    }
  }
  clear();
}

IndexWork::Next IndexWork::next(Store& store, uint32_t n_threads, JobPlan* plan) {
  for (;;) {
    tasks_.clear();
    if (stage_ == Stage::kIdle) {
      plan_builds(store, kJobCost * n_threads);
      if (builds_.empty() && !targets_.empty()) {
        return Next::kWait;
      }
      if (builds_.empty()) {
        clear();
        return Next::kDone;
      }
      stage_ = Stage::kFrames;
      add_first_tasks();
    } else if (stage_ == Stage::kFrames) {
      stage_ = Stage::kCodes;
      open_builds(store);
    } else {
      for (const auto& build : builds_) {
        close_index_build(&store.memory(), build.get());
      }
      builds_.clear();
      stage_ = Stage::kIdle;
    }
    if (!tasks_.empty()) {
      const auto n_tasks = static_cast<uint32_t>(tasks_.size());
      uint64_t cost = 0;
      for (const auto& build : builds_) {
        cost += build->cost() * kBytesPerCost;
      }
      *plan = {.n_tasks = n_tasks, .n_wake = std::min(n_threads - 1, n_tasks - 1), .cost = cost};
      return Next::kTasks;
    }
  }
}

void IndexWork::run(uint32_t index, ThreadWorkspace& workspace) {
  const Task& task = tasks_[index];
  switch (task.kind) {
    case Kind::kFrame:
      task.build->make_frame(task.index);
      return;
    case Kind::kSum:
      task.build->sum_keys(task.index);
      return;
    case Kind::kCodes:
      task.build->encode(task.index);
      return;
    case Kind::kTables:
      task.build->hash(task.index, workspace);
      return;
  }
}

}  // namespace kvm::engine
