// SPDX-License-Identifier: Apache-2.0
// PageBatches sends pages of a sequence to the slow tier, or brings some back to frames of their
// own, batch by batch, and one behind another, beside requests: those that have begun read the
// frames of before, which are free when they have ended, or the places. The tier keeps what came
// back, so that it may leave again for nothing.
//
// Threads: the driver, but for the ends of transfers.  Memory: of kMaxBegun batches.
#ifndef KVM_ENGINE_RUN_PAGE_BATCHES_H_
#define KVM_ENGINE_RUN_PAGE_BATCHES_H_

#include <array>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "engine/run/arrivals.h"
#include "engine/run/full_pages.h"
#include "engine/store/store.h"
#include "engine/stream/page_stream.h"
#include "engine/stream/page_transfers.h"
#include "tiers/page_table.h"

namespace kvm::engine {

class PageBatches final : private StreamListener {
 public:
  // A Batch is what became of one.
  struct Batch {
    uint64_t n_pages = 0;  // that have left memory, or are in it again
    uint64_t size_bytes = 0;
    uint64_t written_bytes = 0;  // of pages that were sent: the tier had the others
    uint64_t n_failed = 0;       // that stay where they are
    Status status;               // why, of the first; or that there is no room to come back to
    bool is_last = false;        // the sequence has no more of them, but for those that failed
    bool has_passed = false;     // some that are in memory were passed over
  };

  explicit PageBatches(Arrivals* arrivals) : arrivals_(arrivals) {}

  // Whose pages move from now on. REQUIRES: !has_begun().
  void aim(kvm_seq_id seq);
  kvm_seq_id target() const { return target_; }
  // Which of a sequence are not sent.
  struct Limits {
    FullPages::Worth worth{};
    bool takes_shared = true;  // those too that other sequences have
    bool writes = true;        // those too that the tier does not have yet
  };
  // LIMIT: of batches that have begun: while one ends, the tier has the next.
  static constexpr uint32_t kMaxBegun = 2;
  // Begin a batch of about max_bytes; for one that comes back nothing makes way.
  // REQUIRES: can_begin(). Throw std::bad_alloc: it has not begun.
  void begin_send(Store* store, const Limits& limits, uint64_t max_bytes);
  void begin_fetch(Store* store, uint64_t max_bytes);
  // Not behind one that is the last, or that found no room.
  bool can_begin() const { return n_begun_ < kMaxBegun && !(has_begun() && is_at_end_); }
  bool has_begun() const { return n_begun_ != 0; }
  // Whether no transfer of the first that has begun is in flight.
  bool is_over() { return first().transfers.is_empty() || first().transfers.is_over(); }
  // Ends the first that has begun. REQUIRES: has_begun() and is_over().
  Batch end(StoreMemory* memory);
  // Waits for transfers in flight, and ends them.
  void stop(StoreMemory* memory);

 private:
  struct Flight {
    PageTransfers transfers;
    Batch batch;
  };

  void on_arrival() noexcept override { arrivals_->post(); }
  Flight& first() { return flights_[first_]; }
  // The one that is about to begin.
  Flight& next() { return flights_[(first_ + n_begun_) % kMaxBegun]; }
  // Finds the pages of the next batch. Throws std::bad_alloc.
  void find(Store* store, bool in_memory, const FullPages::Worth& worth, uint64_t max_bytes);
  void submit(tiers::PageTable* pages);

  Arrivals* const arrivals_;
  kvm_seq_id target_ = 0;
  FullPages from_;
  std::vector<FullPage> found_;
  std::array<Flight, kMaxBegun> flights_;
  uint32_t first_ = 0;
  uint32_t n_begun_ = 0;
  bool is_at_end_ = false;  // nothing begins behind the last that has begun
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RUN_PAGE_BATCHES_H_
