// SPDX-License-Identifier: Apache-2.0
// PageFetches brings pages of a sequence back from the slow tier to frames of their own, batch by
// batch, beside requests: those that have begun go on to read the places. The tier keeps what came
// back, so that it may leave again for nothing.
//
// Threads: the driver, but for the ends of transfers.  Memory: of one batch.
#ifndef KVM_ENGINE_RUN_PAGE_FETCHES_H_
#define KVM_ENGINE_RUN_PAGE_FETCHES_H_

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "engine/run/arrivals.h"
#include "engine/run/full_pages.h"
#include "engine/store/store.h"
#include "engine/stream/page_stream.h"
#include "engine/stream/page_transfers.h"

namespace kvm::engine {

class PageFetches final : private StreamListener {
 public:
  // A Batch is what became of one.
  struct Batch {
    uint64_t n_pages = 0;  // that are in memory again
    uint64_t size_bytes = 0;
    uint64_t n_failed = 0;  // that stay away
    Status status;          // why, of the first; or that there is no room
    bool is_last = false;   // the sequence has no more that are away, but for those that failed
  };

  explicit PageFetches(Arrivals* arrivals) : arrivals_(arrivals) {}

  // Whose pages come from now on. REQUIRES: !has_begun().
  void aim(kvm_seq_id seq);
  kvm_seq_id target() const { return target_; }
  // Begins a batch of about max_bytes, for which nothing makes way. REQUIRES: !has_begun(). Throws
  // std::bad_alloc: it has not begun.
  void begin(Store* store, uint64_t max_bytes);
  bool has_begun() const { return has_begun_; }
  // Whether no transfer is in flight.
  bool is_over() { return reads_.is_empty() || reads_.is_over(); }
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
  PageTransfers reads_;
  bool has_begun_ = false;
  Batch batch_;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RUN_PAGE_FETCHES_H_
