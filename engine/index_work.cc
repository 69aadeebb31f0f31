// SPDX-License-Identifier: Apache-2.0
#include "engine/index_work.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace kvm::engine {
namespace {

// Pages that the builds of one round list: about 16 MB.
constexpr uint64_t kMaxListedPages = 256 << 10;

}  // namespace

void IndexWork::clear() {
  targets_.clear();
  n_planned_ = 0;
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
}

void IndexWork::plan_builds(Store& store) {
  uint64_t n_pages = 0;
  if (n_planned_ == 0) {
    unite_targets();
  }
  while (n_planned_ < targets_.size() && n_pages < kMaxListedPages) {
    const Target& target = targets_[n_planned_++];
    std::unique_ptr<IndexBuild> build = store.plan_index(target.seq, target.layer, target.n_append);
    if (build != nullptr) {
      n_pages += build->n_pages();
      builds_.push_back(std::move(build));
    }
  }
}

bool IndexWork::next(Store& store, uint32_t n_threads, JobPlan* plan) {
  for (;;) {
    tasks_.clear();
    if (stage_ == Stage::kIdle) {
      plan_builds(store);
      if (builds_.empty()) {
        clear();
        return false;
      }
      stage_ = Stage::kFrames;
      for (const auto& build : builds_) {
        for (uint32_t i = 0; i < build->n_heads(); ++i) {
          tasks_.push_back({build.get(), i, Kind::kFrames});
        }
      }
    } else if (stage_ == Stage::kFrames) {
      stage_ = Stage::kCodes;
      for (const auto& build : builds_) {
        store.open_index(build.get());
        for (uint32_t i = 0; i < build->n_pieces(); ++i) {
          tasks_.push_back({build.get(), i, Kind::kCodes});
        }
        for (uint32_t i = 0; i < build->n_table_pieces(); ++i) {
          tasks_.push_back({build.get(), i, Kind::kTables});
        }
      }
    } else {
      for (const auto& build : builds_) {
        store.close_index(build.get());
      }
      builds_.clear();
      stage_ = Stage::kIdle;
    }
    if (!tasks_.empty()) {
      const auto n_tasks = static_cast<uint32_t>(tasks_.size());
      *plan = {.n_tasks = n_tasks, .n_wake = std::min(n_threads - 1, n_tasks - 1)};
      return true;
    }
  }
}

void IndexWork::run(uint32_t index, ThreadWorkspace& workspace) {
  const Task& task = tasks_[index];
  switch (task.kind) {
    case Kind::kFrames:
      task.build->make_frames(task.index);
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
