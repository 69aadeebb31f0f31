// SPDX-License-Identifier: Apache-2.0
// A TailFetch brings the pages that an append goes on in back into memory. Only full pages are sent
// to a slow tier, but where a sequence was cut within one, that is its tail.
//
// Threads: the driver, but for the ends of transfers.  Memory: a transfer a page.
#ifndef KVM_ENGINE_RUN_TAIL_FETCH_H_
#define KVM_ENGINE_RUN_TAIL_FETCH_H_

#include <cstdint>
#include <span>

#include "base/status.h"
#include "engine/store/store.h"
#include "engine/stream/page_stream.h"
#include "engine/stream/page_transfers.h"

namespace kvm::engine {

class TailFetch {
 public:
  enum class Next {
    kDone,     // all tails are there
    kWait,     // the listener hears when those have come that were begun
    kClaimed,  // others fetch what is missing
  };
  // Begins to fetch the tails that the items go on in and that are away; or the first of them,
  // where there is no memory for more: whoever asks again, after end(), gets the others.
  // REQUIRES: !has_begun(). Fails: as StoreMemory::begin_fetch; throws std::bad_alloc. Nothing has
  // begun then.
  Result<Next> begin(StoreMemory* memory, std::span<const AppendItem> items,
                     StreamListener* listener);
  bool has_begun() const { return !reads_.is_empty(); }
  uint64_t size_bytes() const { return size_bytes_; }  // of what has begun
  // Whether no transfer is in flight.
  bool is_over() { return reads_.is_over(); }
  // REQUIRES: is_over(). Returns the first error.
  Status end(StoreMemory* memory);

 private:
  PageTransfers reads_;
  uint64_t size_bytes_ = 0;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RUN_TAIL_FETCH_H_
