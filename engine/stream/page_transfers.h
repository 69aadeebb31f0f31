// SPDX-License-Identifier: Apache-2.0
// PageTransfers are pages on their way to a slow tier, or back from it to frames of their own, that
// were begun together: reserve, add for each, submit; and end, when the listener has heard.
//
// Threads: the driver, but for the ends of transfers.  Memory: a transfer a page.
#ifndef KVM_ENGINE_STREAM_PAGE_TRANSFERS_H_
#define KVM_ENGINE_STREAM_PAGE_TRANSFERS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/assert.h"
#include "base/status.h"
#include "engine/stream/page_stream.h"
#include "tiers/page_table.h"
#include "tiers/slow_tier.h"

namespace kvm::engine {

class PageTransfers {
 public:
  // Room for n pages. REQUIRES: is_empty(). Throws std::bad_alloc: nothing has changed.
  void reserve(size_t n);
  // A move that has begun: to memory, from the page's place; or from memory, with kNoPlace.
  // REQUIRES: room.
  void add(const tiers::PageTable::Move& move, tiers::PlaceId place);
  bool is_empty() const { return submitted_.empty(); }
  size_t size() const { return submitted_.size(); }
  // Begins them. The listener hears when the last has ended. REQUIRES: !is_empty().
  void submit(tiers::SlowTier* tier, StreamListener* listener);
  // Whether no transfer is in flight.
  bool is_over();
  // Calls end_one(move, transfer) for each, and is empty. REQUIRES: is_over().
  template <typename EndOne>
  void end(EndOne end_one) {
    KVM_ASSERT(is_over());
    for (size_t i = 0; i < submitted_.size(); ++i) {
      end_one(parts_[i].move, static_cast<const tiers::Transfer&>(parts_[i]));
    }
    submitted_.clear();
    parts_.reset();
  }

 private:
  struct Part final : tiers::Transfer {
    void on_done() noexcept override { all->end_part(); }
    PageTransfers* all = nullptr;
    tiers::PageTable::Move move;
  };
  void end_part();

  std::unique_ptr<Part[]> parts_;
  std::vector<tiers::Transfer*> submitted_;  // those of parts_ that have been added
  StreamListener* listener_ = nullptr;
  std::mutex mutex_;   // held to the end by whoever ends the last transfer
  size_t n_left_ = 0;  // guarded by it
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STREAM_PAGE_TRANSFERS_H_
