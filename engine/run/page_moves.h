// SPDX-License-Identifier: Apache-2.0
// PageMoves: empties extents of the host tier that few pages are left in, so that what other pages
// or other kinds of pages need is there again. Sequences that grew side by side lie in the same
// extents; when most of them are gone, those that stay keep all of these.
//
//   begin (driver)      closes thin extents, and finds frames elsewhere for their pages
//   tasks (any thread)  copy pages
//   end (driver)        the pages are where they were copied to (tiers/page_table.h)
//
// Requests go on meanwhile: those that have begun read the frames of before, which are free when
// they have ended. Nothing but the table of pages changes.
//
// Threads: the driver, but for run().  Memory: lists of one batch.
#ifndef KVM_ENGINE_RUN_PAGE_MOVES_H_
#define KVM_ENGINE_RUN_PAGE_MOVES_H_

#include <cstdint>
#include <vector>

#include "engine/store/store_memory.h"
#include "engine/tasks/scheduler.h"
#include "tiers/page_table.h"

namespace kvm::engine {

class PageMoves final : public TaskSet {
 public:
  // Begins a batch. False: nothing is worth moving, or can be moved now. REQUIRES: none has begun.
  bool begin(StoreMemory* memory, JobPlan* plan);
  void run(uint32_t task, uint32_t thread) override;
  // Ends it, after its last task.
  void end(StoreMemory* memory);
  bool has_begun() const { return !moves_.empty(); }
  // Of the last batch.
  uint64_t size_bytes() const { return bytes_; }

 private:
  // Begins the moves of what can move of an extent. False: nobody has a frame for more. Throws
  // std::bad_alloc: some have begun.
  bool empty(tiers::PageTable* pages, tiers::HostPool::ExtentRef extent);

  std::vector<tiers::HostPool::ExtentRef> extents_;  // closed; of each some page moves
  std::vector<tiers::HostPool::ExtentRef> unmoved_;  // closed until begin() ends
  std::vector<tiers::PageRef> movable_;
  std::vector<tiers::PageTable::Move> moves_;
  uint64_t bytes_ = 0;    // of moves_
  uint32_t n_tasks_ = 0;  // each copies as many pages
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RUN_PAGE_MOVES_H_
