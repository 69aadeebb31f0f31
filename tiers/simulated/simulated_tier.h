// SPDX-License-Identifier: Apache-2.0
// SimulatedTier: a slow tier made of memory, as slow and as faulty as it is told to be.
//
// Transfers end in one of two ways:
//   timed   a thread of the tier ends each when a device of the given bandwidth and latency would.
//           The bytes of transfers pass a pipe one after the other; their latencies overlap.
//   manual  nothing ends before finish() says so: in any order that a test wants to see.
//
// It keeps objects (objects()) for as long as it lives. Requests of these end one after the other,
// beside transfers: as soon as the tier's thread comes to them, or by hand.
//
// It aborts (KVM_ASSERT) where a place is read or released that holds no page, or is released while
// it is read. Places are used again, the one released last first, so that a name kept too long soon
// stands for another page.
//
// Threads: any. on_done is called without a lock: on the tier's thread (timed), or in finish()
// (manual); of a transfer for which there is no memory, in submit().
// Memory: a heap block for each page.
#ifndef KVM_TIERS_SIMULATED_SIMULATED_TIER_H_
#define KVM_TIERS_SIMULATED_SIMULATED_TIER_H_

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/status.h"
#include "tiers/object_store.h"
#include "tiers/slow_tier.h"

namespace kvm::tiers {

struct SimulatedTierOptions {
  uint64_t capacity_bytes = UINT64_MAX;
  uint64_t bytes_per_s = 0;  // of reads and writes together; 0: unlimited
  uint64_t latency_ns = 0;   // of each transfer, once its bytes have passed
  // Transfers end in the order of submission; of those that are due, up to `reorder` in an order
  // from the seed. REQUIRES: not 0.
  uint32_t reorder = 1;
  uint64_t seed = 0;
  bool is_manual = false;  // of the others only capacity_bytes and rates count then
  ReadRates rates = {};    // that it says it has
};

class SimulatedTier final : public SlowTier {
 public:
  // Throws std::bad_alloc, and std::system_error where the system refuses a thread.
  explicit SimulatedTier(const SimulatedTierOptions& options);
  ~SimulatedTier() override;
  SimulatedTier(const SimulatedTier&) = delete;
  SimulatedTier& operator=(const SimulatedTier&) = delete;

  // A write for which there is no room ends with NO_SPACE, in its turn.
  void submit(std::span<Transfer* const> transfers) noexcept override;
  void add_ref(PlaceId id) noexcept override;
  void release(PlaceId id) noexcept override;
  uint64_t used_bytes() const override;
  ReadRates read_rates() const override { return options_.rates; }
  ObjectStore* objects() override { return &objects_; }

  // --- Manual -----------------------------------------------------------------------------------

  size_t n_waiting() const;
  // Ends one of those that wait; 0 is the one that was submitted first.
  // REQUIRES: is_manual, and index < n_waiting().
  void finish(size_t index);
  // The same of requests of objects, of which the first ends. REQUIRES: is_manual, and one waits.
  size_t n_objects_waiting() const;
  void finish_object();
  // Ends the first until none waits: those too that an on_done submits. REQUIRES: is_manual.
  void finish_all();

  // --- Faults -----------------------------------------------------------------------------------
  //
  // They meet transfers that are submitted from now on. Those that are refused (NO_SPACE,
  // NO_MEMORY) are not counted. Where two faults meet, the one that was set last decides. A read
  // that fails finds 0xdb everywhere.

  // The n-th ends with `status`; the first is the next one. REQUIRES here and below: n != 0, and
  // that it is an error.
  void fail_next(Transfer::Kind kind, uint64_t n, Status status);
  // So does each n-th.
  void fail_every(Transfer::Kind kind, uint64_t n, Status status);
  // The n-th request of objects of this kind ends with `status`, and nothing has changed.
  void fail_object(ObjectRequest::Kind kind, uint64_t n, Status status);
  // Nothing fails of what is submitted from now on.
  void clear_faults();

  // --- Counts -----------------------------------------------------------------------------------

  uint64_t n_in_flight() const;
  // Here and below: transfers that have ended without fault.
  uint64_t n_reads() const;
  uint64_t n_writes() const;
  uint64_t read_bytes() const;
  uint64_t written_bytes() const;
  // Since it was written. REQUIRES: the place holds a page.
  uint64_t reads_of(PlaceId id) const;

 private:
  struct Place {
    std::unique_ptr<std::byte[]> bytes;  // nullptr: the place is free
    uint32_t size_bytes = 0;
    uint32_t n_readers = 0;  // in flight
    uint32_t n_refs = 1;
    uint64_t n_reads = 0;
    bool is_written = false;
  };
  struct Pending {
    Transfer* transfer = nullptr;
    PlaceId place = kNoPlace;    // kNoPlace: it was refused
    std::byte* bytes = nullptr;  // of the place
    uint64_t due_ns = 0;
    Status status;  // with which it ends
  };
  struct Fault {
    Transfer::Kind kind;
    uint64_t n_left;
    uint64_t period;  // 0: once
    Status status;
  };
  struct Count {
    uint64_t n = 0;
    uint64_t bytes = 0;
  };
  class Objects final : public ObjectStore {
   public:
    explicit Objects(SimulatedTier* tier) : tier_(tier) {}
    void submit(ObjectRequest* request) noexcept override;
    std::vector<ObjectInfo> list(std::string_view after, size_t n_max) const override;

   private:
    SimulatedTier* const tier_;
  };
  struct Object {
    std::string label;
    std::vector<std::byte> body;
    std::vector<ObjectRequest::Page> pages;  // with a reference on each place
  };
  struct PendingObject {
    ObjectRequest* request = nullptr;
    Status status;  // with which it ends, where it is an error
  };
  struct ObjectFault {
    ObjectRequest::Kind kind;
    uint64_t n_left;
    Status status;
  };

  // Called without the lock.
  bool finish_object_if_waiting();
  // With it. Throws std::bad_alloc: nothing has changed.
  Status carry_out(ObjectRequest* request);
  Status put(ObjectRequest* request);
  void release_pages(const std::vector<ObjectRequest::Page>& pages);

  static void copy(const Pending& pending);
  void run();
  bool finish_if_waiting(size_t index);
  // Those below are called with the lock.
  //
  // Throws std::bad_alloc: nothing has changed then, but for free places.
  void accept(Transfer* transfer, uint64_t now);
  void add_free_place();
  // OK: none.
  Status next_fault(Transfer::Kind kind);
  // When so many bytes that come now have passed, and the latency besides.
  uint64_t pass_pipe(uint64_t now, uint64_t size_bytes);
  bool is_first_ready();
  // What `pending` brings about is so from now on; its transfer may end.
  void settle(Pending* pending);
  // Returns what the place held.
  std::unique_ptr<std::byte[]> free_place(PlaceId id);
  Place& place_of(PlaceId id) { return places_[static_cast<size_t>(id)]; }
  const Place& written_place(PlaceId id) const;
  Count count_of(Transfer::Kind kind) const { return counts_[static_cast<size_t>(kind)]; }

  const SimulatedTierOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Place> places_;
  std::vector<PlaceId> free_places_;  // has room for all places
  // In the order of submission, which is that in which they become due, but for the first n_ready_.
  std::deque<Pending> queue_;
  size_t n_copied_ = 0;  // of its first: their bytes are where they are to go
  size_t n_ready_ = 0;   // of its first: they are due, copied, and in the order in which they end
  uint64_t pipe_free_ns_ = 0;
  uint64_t random_;
  std::vector<Fault> faults_;
  uint64_t used_bytes_ = 0;
  uint64_t n_in_flight_ = 0;
  std::array<Count, 2> counts_;  // by kind
  Objects objects_{this};
  std::map<std::string, Object, std::less<>> kept_;  // by key
  std::deque<PendingObject> object_queue_;
  std::vector<ObjectFault> object_faults_;
  bool is_stopping_ = false;
  std::thread thread_;
};

}  // namespace kvm::tiers

#endif  // KVM_TIERS_SIMULATED_SIMULATED_TIER_H_
