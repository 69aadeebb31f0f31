// SPDX-License-Identifier: Apache-2.0
// PageSends sends pages of a sequence to the slow tier, batch by batch, beside requests: those that
// have begun read the frames of before, which are free when they have ended.
//
// Threads: the driver, but for the ends of transfers.  Memory: of one batch.
#ifndef KVM_ENGINE_RUN_PAGE_SENDS_H_
#define KVM_ENGINE_RUN_PAGE_SENDS_H_

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

class PageSends final : private StreamListener {
 public:
  // A Batch is what became of one.
  struct Batch {
    uint64_t n_pages = 0;  // that have left memory
    uint64_t size_bytes = 0;
    uint64_t written_bytes = 0;  // of these; the tier had the others
    uint64_t n_failed = 0;       // that stay
    Status status;               // why, of the first
    bool is_last = false;        // the sequence has no more that may go, but for those that failed
    bool has_passed = false;     // some were passed over
    bool is_kept = false;        // keep() was called: those that were written stay
  };

  explicit PageSends(Arrivals* arrivals) : arrivals_(arrivals) {}

  // Which of a sequence are passed over.
  struct Limits {
    bool takes_shared = true;  // those too that other sequences have
    bool writes = true;        // those too that the tier does not have yet
  };
  // Whose pages go from now on. REQUIRES: !has_begun().
  void aim(kvm_seq_id seq);
  kvm_seq_id target() const { return target_; }
  // Begins a batch of about max_bytes. REQUIRES: !has_begun(). Throws std::bad_alloc: it has not
  // begun.
  void begin(Store* store, const Limits& limits, uint64_t max_bytes);
  // Those of the batch that has begun, if one has, stay in memory after all.
  void keep() { batch_.is_kept = has_begun_; }
  bool has_begun() const { return has_begun_; }
  // Whether no transfer is in flight.
  bool is_over() { return writes_.is_empty() || writes_.is_over(); }
  // REQUIRES: has_begun() and is_over().
  Batch end(StoreMemory* memory);
  // Waits for transfers in flight, and ends them.
  void stop(StoreMemory* memory);

 private:
  void on_arrival() noexcept override { arrivals_->post(); }

  Arrivals* const arrivals_;
  kvm_seq_id target_ = 0;
  FullPages from_;
  std::vector<FullPage> found_;
  PageTransfers writes_;
  bool has_begun_ = false;
  Batch batch_;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RUN_PAGE_SENDS_H_
