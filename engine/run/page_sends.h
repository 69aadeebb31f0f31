// SPDX-License-Identifier: Apache-2.0
// PageSends sends pages of sequences to the slow tier, batch by batch, beside requests: those that
// have begun read the frames of before, which are free when they have ended.
//
// Only full pages go, of heads of which no policy reads what it gives up.
//
// Threads: the driver, but for the ends of transfers.  Memory: of one batch.
#ifndef KVM_ENGINE_RUN_PAGE_SENDS_H_
#define KVM_ENGINE_RUN_PAGE_SENDS_H_

#include <cstdint>
#include <vector>

#include "engine/run/arrivals.h"
#include "engine/store/store.h"
#include "engine/stream/page_stream.h"
#include "engine/stream/page_transfers.h"
#include "tiers/page_table.h"

namespace kvm::engine {

class PageSends final : private StreamListener {
 public:
  explicit PageSends(Arrivals* arrivals) : arrivals_(arrivals) {}

  // What is in memory of the sequence will go, behind what was asked for before. Throws
  // std::bad_alloc.
  void add(kvm_seq_id seq) { queue_.push_back({.seq = seq}); }
  // Ends a batch that is over, and begins the next one. Returns whether it did anything. Throws
  // std::bad_alloc: another call goes on, with the next sequence after drop_first().
  bool go_on(Store* store);
  // What is left in memory of the sequence that is being sent stays.
  void drop_first();
  bool is_idle() const { return queue_.empty() && writes_.is_empty(); }
  // Whether go_on() has something to do that no transfer has to end for.
  bool is_ready() const { return !queue_.empty() && writes_.is_empty(); }
  // Waits for transfers in flight, and forgets the rest.
  void stop(StoreMemory* memory);

 private:
  struct Target {
    kvm_seq_id seq = 0;
    uint32_t list = 0;  // where it goes on
    uint64_t block = 0;
  };
  void on_arrival() noexcept override { arrivals_->post(); }
  void end(StoreMemory* memory);
  bool find(const StoreMemory& memory, const Sequence* seq);
  void begin(Store* store);

  Arrivals* const arrivals_;
  std::vector<Target> queue_;
  std::vector<tiers::PageRef> found_;
  PageTransfers writes_;   // of the first target
  bool is_whole_ = false;  // no page of it is left behind these
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RUN_PAGE_SENDS_H_
