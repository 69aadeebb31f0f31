// SPDX-License-Identifier: Apache-2.0
// SlowTier: where pages lie that are not in memory. A disk, say; in tests and benches a simulated
// one (tiers/simulated/simulated_tier.h).
//
//   submit(write) --> on_done: the page has a place --> submit(read) of that place, any number of
//   times --> release(place)
//
// A place has one reference when it was written. It may be used again when the last has gone.
//
// Threads: submit() and release() on any. on_done is called on any thread, the submitter's before
// submit() returns included; it may submit, and must neither throw nor block.
#ifndef KVM_TIERS_SLOW_TIER_H_
#define KVM_TIERS_SLOW_TIER_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "tiers/read_rates.h"

namespace kvm::tiers {

class ObjectStore;  // tiers/object_store.h

// Names a stretch of a slow tier that holds one page. What it stands for is the tier's affair.
enum class PlaceId : uint32_t {};
inline constexpr PlaceId kNoPlace{0xffffffffu};

// A Transfer is one page on its way. It belongs to the submitter and stays as it is, and so does
// the memory at `data`, from submit() until on_done.
class Transfer {
 public:
  enum class Kind : uint8_t { kRead, kWrite };

  Kind kind = Kind::kRead;
  PlaceId place = kNoPlace;   // read: given; write: where the page lies, once it has not failed
  std::byte* data = nullptr;  // REQUIRES: not null
  uint32_t size_bytes = 0;    // REQUIRES: not 0; of a read, as it was written
  // By the time of on_done: OK; IO; NO_MEMORY; of a read CORRUPT: what is at `data` is undefined;
  // of a write NO_SPACE: nothing was written. Its sentence names the tier's reason.
  Status status;

  // The last that the tier does with it: it may be gone when this returns.
  virtual void on_done() noexcept = 0;

 protected:
  ~Transfer() = default;
};

class SlowTier {
 public:
  // REQUIRES: no transfer is in flight, and every submit() has returned.
  virtual ~SlowTier() = default;

  // Begins them all; none has to end before another does. Throws nothing: a tier that has no memory
  // for one ends it with an error.
  virtual void submit(std::span<Transfer* const> transfers) noexcept = 0;
  // One reference more, and one less. REQUIRES: the place holds a page; where the last goes,
  // nothing reads it any more.
  virtual void add_ref(PlaceId place) noexcept = 0;
  virtual void release(PlaceId place) noexcept = 0;
  // Of pages that have a place, and of writes in flight.
  virtual uint64_t used_bytes() const = 0;
  // Any thread; others from one moment to the next, as transfers show.
  virtual ReadRates read_rates() const { return {}; }
  // Null: what is here goes with the tier.
  virtual ObjectStore* objects() { return nullptr; }
};

}  // namespace kvm::tiers

#endif  // KVM_TIERS_SLOW_TIER_H_
