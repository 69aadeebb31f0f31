// SPDX-License-Identifier: Apache-2.0
#include "engine/run/page_moves.h"

#include <algorithm>
#include <new>

#include "base/assert.h"
#include "base/reserve.h"
#include "codecs/convert.h"

namespace kvm::engine {
namespace {

// LIMIT: of one batch: some 1 ms of one thread, and 0.2 ms of the driver.
constexpr uint64_t kBatchBytes = uint64_t{4} << 20;
constexpr size_t kBatchPages = 1024;
constexpr size_t kBatchExtents = 16;
// LIMIT: frames that pages have left and that are still read: beyond, nothing is moved. An eighth
// of the pages in use, or 64 MiB where that is more; but not more than is free elsewhere, for
// nobody can use them.
constexpr uint64_t kMostLeftShare = 8;
constexpr uint64_t kMostLeftBytes = uint64_t{64} << 20;
// Of a task, about.
constexpr uint64_t kTaskBytes = uint64_t{256} << 10;

}  // namespace

bool PageMoves::begin(StoreMemory* memory, JobPlan* plan) {
  KVM_ASSERT(!has_begun());
  const tiers::PageTable& pages = memory->pages();
  const uint64_t most_left = std::max(kMostLeftBytes, pages.page_bytes_in_use() / kMostLeftShare);
  if (pages.left_bytes() > std::min(most_left, memory->free_bytes())) {
    return false;
  }
  bytes_ = 0;
  try {
    extents_.reserve(kBatchExtents);
    unmoved_.reserve(kBatchExtents);
    for (bool has_frames = true; has_frames && bytes_ < kBatchBytes &&
                                 moves_.size() < kBatchPages &&
                                 extents_.size() + unmoved_.size() < kBatchExtents;) {
      const auto extent = memory->close_thin_extent();
      if (!extent.has_value()) {
        break;
      }
      // As long as no page of it moves, others may empty it and fill it again.
      unmoved_.push_back(*extent);
      const size_t n_before = moves_.size();
      has_frames = empty(&memory->pages(), *extent);
      if (moves_.size() != n_before) {
        extents_.push_back(*extent);
        unmoved_.pop_back();
      }
    }
  } catch (const std::bad_alloc&) {
    // What has begun is a batch, too. The extent that it came to last is opened again, which does
    // no harm to pages that leave it.
  }
  for (const tiers::HostPool::ExtentRef extent : unmoved_) {
    memory->reopen(extent);
  }
  unmoved_.clear();
  if (moves_.empty()) {
    return false;
  }
  n_tasks_ = static_cast<uint32_t>(std::clamp<uint64_t>(bytes_ / kTaskBytes, 1, moves_.size()));
  *plan = {.n_tasks = n_tasks_, .cost = bytes_};
  return true;
}

bool PageMoves::empty(tiers::PageTable* pages, tiers::HostPool::ExtentRef extent) {
  movable_.clear();
  pages->collect_movable(extent, &movable_);
  reserve_growing(moves_, moves_.size() + movable_.size());
  for (const tiers::PageRef page : movable_) {
    const Result<tiers::PageTable::Move> move = pages->begin_move(page);
    if (!move.is_ok()) {
      return false;
    }
    moves_.push_back(move.value());
    bytes_ += move.value().size_bytes;
  }
  return true;
}

void PageMoves::run(uint32_t task, uint32_t /*thread*/) {
  const size_t begin = moves_.size() * task / n_tasks_;
  const size_t end = moves_.size() * (task + 1) / n_tasks_;
  for (size_t i = begin; i < end; ++i) {
    codecs::copy_past_caches(moves_[i].source, moves_[i].target, moves_[i].size_bytes);
  }
}

void PageMoves::end(StoreMemory* memory) {
  for (const tiers::PageTable::Move& move : moves_) {
    memory->pages().end_move(move);
  }
  memory->counts().n_pages_moved += moves_.size();
  moves_.clear();
  memory->pages().free_left_frames();
  for (const tiers::HostPool::ExtentRef extent : extents_) {
    memory->reopen_unless_left(extent);
  }
  extents_.clear();
}

}  // namespace kvm::engine
