// SPDX-License-Identifier: Apache-2.0
// DeviceStore: the books of the sequences whose pages lie in one device's memory, and their moves
// to the host and back. Sequences that it gets must be its own.
//
// Everything here is bookkeeping on the host, done when a call is made, and copies that are
// enqueued. It relies on one timeline (kvm_cuda.h): what is enqueued later is done later. So a page
// that is released may be handed out at once. The exceptions are the copies between host and
// device: a Mover enqueues them later, on streams of its own. Pages and chunks that these still use
// are kept by fences, each with the mover's ticket (docs/adr/0008-device-memory.md draws the flow):
//
//  - the timeline gets a page of a fence when its piece is enqueued (allocate waits until then) and
//    the caller's stream has been made to wait for it;
//  - a move gets it at once: its own piece names the ticket, and the mover keeps the order.
//
// Moves are booked when they are asked for. One that fails later is taken back, as far as its
// pieces were not enqueued, by whichever call comes next, in the order of the moves; the next call
// that names the sequence says why. Since every piece behind a failure fails, no copy into a page
// or a chunk that has been taken back is ever enqueued.
//
// Threads: one at a time.
#ifndef KVM_DEVICE_DEVICE_STORE_H_
#define KVM_DEVICE_DEVICE_STORE_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/limits.h"
#include "base/status.h"
#include "device/driver.h"
#include "device/event_pool.h"
#include "device/host_chunks.h"
#include "device/mover.h"
#include "device/page_pool.h"
#include "device/sequence_store.h"
#include "tiers/slab_class.h"

namespace kvm::device {

// What a DeviceStore has of a sequence: its pages, or where they are on the host.
struct HeldSequence final : DeviceSequence {
  using DeviceSequence::DeviceSequence;
  HeldSequence(const HeldSequence&) = default;

  uint64_t ready = 0;  // kToDevice: copies into its pages; 0: none are under way, or waited for

  // Pages that lie on the host, packed in one chunk, or in several where one has no room for any.
  struct HostPage {
    uint32_t list = 0;
    uint32_t block = 0;
    uint32_t offset = 0;  // in all chunks, as if they lay side by side
    uint32_t slab = 0;
  };
  struct Part {
    std::vector<uint32_t> chunks;
    uint64_t written = 0;  // kToHost: copies to the chunks
    std::vector<HostPage> places;
    std::vector<tiers::PageRef> pages;  // while the move is not enqueued: where they came from
  };
  bool on_host = false;  // in part, or all: has to be fetched
  std::vector<Part> parts;
  MovePtr moving;  // its last move, until that is enqueued
  Status failure;  // why a move was taken back, until a call has said so
};

struct DeviceStoreOptions {
  uint64_t pool_bytes = 0;
  uint64_t host_bytes = 0;
};

class DeviceStore final : public SequenceStore {
 public:
  // Fails: NO_MEMORY, DEVICE.
  static Result<std::unique_ptr<DeviceStore>> open(std::unique_ptr<Driver> driver,
                                                   const DeviceStoreOptions& options);
  // Over a driver without kernels.
  static Result<std::unique_ptr<DeviceStore>> open_without_kernels(
      std::shared_ptr<MemoryDriver> driver, const DeviceStoreOptions& options);
  // Waits for the device.
  ~DeviceStore() override;
  DeviceStore(const DeviceStore&) = delete;
  DeviceStore& operator=(const DeviceStore&) = delete;

  // --- SequenceStore ----------------------------------------------------------------------------
  Result<std::shared_ptr<const SpaceLayout>> prepare(SpaceLayout layout) override;
  SlabPlace slab(uint32_t slab) const override {
    return {pool_->base(slab), pool_->slab_page_bytes(slab), pool_->slab_slots(slab)};
  }
  Result<SequencePtr> create(std::shared_ptr<const SpaceLayout> space) override;
  Result<SequencePtr> fork(DeviceSequence& parent, uint64_t n_tokens) override;
  Status truncate(DeviceSequence* seq, uint64_t n_tokens) override;
  void clear(DeviceSequence* seq) override;
  Status spill(DeviceSequence* seq, uint64_t begin, uint64_t end, Stream stream) override;
  Status fetch(DeviceSequence* seq, uint64_t begin, uint64_t end, Stream stream) override;
  Wait moves_of(std::span<DeviceSequence* const> seqs, bool also_spills) override;
  void finish_moves() override;
  Status begin_growth(std::span<const Growth> growths, Stream stream) override;
  void finish_growth() override;
  void undo_growth() override;
  Result<Usage> usage(const DeviceSequence& seq) override;
  // Takes back what has failed.
  Result<Residence> residence(DeviceSequence* seq) override;
  Result<Figures> figures() override;

  // --- Of books that are kept for others (device/store_server.h) ---------------------------------
  // Waits until the sequence can be used, but for copies that a stream can wait for.
  // Fails: BUSY (on the host); why a move was taken back, once.
  Status settle_for_use(DeviceSequence* seq);
  // Lengthens a sequence by tokens that its last pages have room for, and that nobody shares.
  // Fails: INVALID (they have not, or somebody does); as settle_for_use.
  Status extend(DeviceSequence* seq, uint64_t n_tokens);
  // Whether the last move of the sequence is not enqueued yet.
  bool is_moving(const DeviceSequence& seq, bool also_spills) const;
  // (list, block) and the page it has now: those of the last begin_growth, or the undoing of none.
  struct Change {
    DeviceSequence* seq = nullptr;
    uint32_t list = 0;
    uint32_t block = 0;
    tiers::PageRef before = tiers::kNoPage;  // kNoPage: the block is new
  };
  std::span<const Change> changes() const { return changes_; }

  // --- For tests and figures ---------------------------------------------------------------------
  PagePool& pool() { return *pool_; }
  HostChunks& host() { return *host_; }
  Mover* mover() { return mover_.get(); }  // null: there is no room on the host

  // Compares all references with the accounts and aborts where they disagree. REQUIRES: `all` is
  // every sequence, and no growth is begun.
  void check_accounts(std::span<const DeviceSequence* const> all) const;

 private:
  // A Fence is for pages or chunks that a piece of the mover still uses.
  struct Fence {
    uint64_t ticket = 0;
    std::vector<tiers::PageRef> pages;
    std::vector<uint32_t> chunks;
  };
  // A Booked move is one that may still fail.
  struct Booked {
    MovePtr move;
    HeldSequence* seq = nullptr;            // null: gone
    std::vector<HeldSequence::Part> parts;  // kToDevice: what the host had, by tickets
    uint64_t ticket_of_part(size_t part) const { return move->first + part; }
  };
  // A page for a fetch, and from which fence it was taken.
  struct Taken {
    tiers::PageRef page = tiers::kNoPage;
    Lane lane = kToHost;
    uint64_t ticket = 0;  // 0: of none
  };
  // `kernels`: the same driver, or null.
  DeviceStore(std::shared_ptr<MemoryDriver> driver, Driver* kernels,
              const DeviceStoreOptions& options);
  static Result<std::unique_ptr<DeviceStore>> open_over(std::shared_ptr<MemoryDriver> driver,
                                                        Driver* kernels,
                                                        const DeviceStoreOptions& options);
  Status init(const DeviceStoreOptions& options);
  Status reserve_pages(const Growth& growth, Stream stream);
  Status pages_of_list(const Growth& growth, uint32_t list, Stream stream);
  // A page for the timeline. Where only moves that are not enqueued leave one, waits for these.
  Result<tiers::PageRef> allocate(uint32_t slab, Stream stream);
  // Looks after moves: takes back what has failed, hands out again what fences keep whose tickets
  // are done.
  void collect_fences();
  void take_back_failed();
  void take_back(Booked* booked, uint64_t good, const Status& why);
  void open_fence(const Fence& fence);
  // Waits until the sequence's moves are enqueued, and says once why one of them failed.
  Status settle(HeldSequence* seq);
  // Makes the stream wait for copies into the sequence's pages.
  Status await_pages(HeldSequence* seq, Stream stream);
  // Gives a page or a chunk back when the ticket is done.
  void keep_until(Lane lane, uint64_t ticket, tiers::PageRef page, uint32_t chunk);
  // Drops a sequence's reference; a copy may still be under way into the page.
  void release(const HeldSequence& seq, tiers::PageRef page);
  void set_on_host(HeldSequence* seq, bool on_host);
  Status not_captured(Stream stream);
  uint64_t n_chunks_to_take() const;
  // REQUIRES: there are as many. A piece that uses one waits for its ticket in *after.
  uint32_t take_chunk(Tickets* after);
  Status take_pages(std::span<const HeldSequence::Part> parts, Stream stream,
                    std::vector<Taken>* taken);
  void give_back(std::span<const Taken> taken);
  Result<EventPtr> record_now(Stream stream);

  const std::shared_ptr<MemoryDriver> driver_;
  Driver* const kernels_;
  std::unique_ptr<EventPool> events_;
  std::shared_ptr<PagePool> pool_;  // layouts give their slabs back to it, if it is still there
  std::unique_ptr<HostChunks> host_;
  std::unique_ptr<Mover> mover_;
  std::deque<Fence> fences_[2];  // by lane
  std::vector<Booked> booked_;   // in the order of the calls
  uint64_t n_taken_back_ = 0;    // times that moves were
  std::vector<Change> changes_;
  struct Grown {
    Growth growth;
    uint64_t n_before = 0;
  };
  std::vector<Grown> grown_;
  struct Counters {
    uint64_t n_pages_copied = 0;
    uint64_t n_spilled = 0;  // at present
    uint64_t spilled_bytes = 0;
    uint64_t fetched_bytes = 0;
  };
  Counters counters_;
};

}  // namespace kvm::device

#endif  // KVM_DEVICE_DEVICE_STORE_H_
