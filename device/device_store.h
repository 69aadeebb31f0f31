// SPDX-License-Identifier: Apache-2.0
// DeviceStore: the sequences whose pages lie in one device's memory, and their moves to the host
// and back.
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
// Threads: one at a time.  Fails: with the codes of kvm_cuda.h; what fails has changed nothing.
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
#include "tiers/slab_class.h"

namespace kvm::device {

// A ClassLayout is of heads of a layer that keep the same tokens: sinks and a window, or all
// (n_recent = 0).
struct ClassLayout {
  std::vector<uint16_t> kv_heads;  // ascending
  uint64_t n_sinks = 0;
  uint64_t n_recent = 0;
  uint64_t slack = 0;
  // Filled in by DeviceStore::prepare: the list of the class's pages, and the layer's rank in each.
  uint32_t list = 0;
  uint32_t rank = 0;
};

// A ListLayout is of pages that several layers share: those that have a class of as many heads that
// keep the same tokens. A page holds 64 tokens of all of them, a part for each layer, one behind
// the other (ADR 0031). So what a step does to pages and page tables it does once for all layers.
struct ListLayout {
  static constexpr uint32_t kNoSlab = UINT32_MAX;
  uint32_t n_heads = 0;
  uint64_t n_sinks = 0;
  uint64_t n_recent = 0;
  uint64_t slack = 0;
  uint32_t n_layers = 0;
  uint64_t layer_bytes = 0;  // docs/storage.md: a page of one layer
  uint32_t slab = kNoSlab;

  // Tokens before it are never dropped.
  uint64_t first_droppable() const;
};

struct LayerLayout {
  bool has_keys = true;        // false: ABSENT
  uint32_t storage_layer = 0;  // itself, or the one whose keys it reads
  uint32_t n_q_heads = 0;
  uint32_t n_kv_heads = 0;
  uint64_t window = 0;               // 0: all
  std::vector<ClassLayout> classes;  // of layers that store keys themselves
  std::vector<float> sink_logits;    // [q head], or empty: AttendTensors::sink_logits

  uint32_t group() const { return n_q_heads / n_kv_heads; }
};

struct SpaceLayout {
  CodecId codec = CodecId::kBf16;  // of K and V; attention::gpu::is_on_devices
  // Channels of a key: is_head_dim_on_devices, of a value too; or kMlaDim, where is_mla_on_devices,
  // and values are the first kMlaValueDim of them.
  uint32_t dim = 0;
  float scale = 1.0f;
  float softcap = 0.0f;  // of logits; 0: none
  std::vector<LayerLayout> layers;
  std::vector<ListLayout> lists;  // filled in by DeviceStore::prepare

  const LayerLayout& storage(uint32_t layer) const { return layers[layers[layer].storage_layer]; }
  bool v_in_k() const { return dim == attention::gpu::kMlaDim; }
  uint32_t dim_v() const { return attention::gpu::value_dim(dim); }
  // How a layer's part of a page lies, with so many heads.
  tiers::SlabClass slab_class(uint32_t n_heads) const;
};

// A DevicePageList holds the pages of one ListLayout.
struct DevicePageList {
  std::vector<tiers::PageRef> pages;  // [block of 64 positions]; kNoPage: dropped, or on the host
  uint64_t kept_from = 0;             // positions from the sinks' pages up to here are dropped
};

// A DeviceSequence is the tokens of one sequence in a DeviceStore: its pages, or where they are on
// the host.
struct DeviceSequence {
  std::shared_ptr<const SpaceLayout> space;
  uint64_t n_tokens = 0;  // of every layer
  std::vector<DevicePageList> lists;
  uint64_t version = 0;  // changes with everything that a batch must know of
  // The batch whose page table is right up to the block changed_from, or null.
  const void* noted_by = nullptr;
  uint64_t changed_from = 0;
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

struct DeviceStoreCounters {
  uint64_t n_pages_copied = 0;
  uint64_t n_spilled = 0;  // at present
  uint64_t spilled_bytes = 0;
  uint64_t fetched_bytes = 0;
  uint64_t n_copies = 0;
};

class DeviceStore {
 public:
  // Fails: NO_MEMORY, DEVICE.
  static Result<std::unique_ptr<DeviceStore>> open(std::unique_ptr<Driver> driver,
                                                   const DeviceStoreOptions& options);
  // Waits for the device.
  ~DeviceStore();
  DeviceStore(const DeviceStore&) = delete;
  DeviceStore& operator=(const DeviceStore&) = delete;

  // Completes a layout: slabs and lists. Fails: LIMIT, NO_SPACE, DEVICE, UNSUPPORTED (pages of 4
  // GiB and more).
  Result<std::shared_ptr<const SpaceLayout>> prepare(SpaceLayout layout);

  std::shared_ptr<DeviceSequence> create(std::shared_ptr<const SpaceLayout> space);
  // Fails: INVALID, PARTIAL, BUSY (on the host).
  Result<std::shared_ptr<DeviceSequence>> fork(DeviceSequence& parent, uint64_t n_tokens);
  Status truncate(DeviceSequence* seq, uint64_t n_tokens);
  // Gives everything back.
  void clear(DeviceSequence* seq);

  // Of positions [begin, end): pages that lie in there with all their tokens and are not shared go
  // to the host; or pages of which any token lies in there come back.
  Status spill(DeviceSequence* seq, uint64_t begin, uint64_t end, Stream stream);
  Status fetch(DeviceSequence* seq, uint64_t begin, uint64_t end, Stream stream);
  // Returns when all moves are enqueued; waits for the device as long as that takes.
  void finish_moves();

  // A Growth is what a step does to one sequence.
  struct Growth {
    DeviceSequence* seq = nullptr;
    uint32_t n_append = 0;
    uint32_t n_query = 0;  // the last tokens after the append
  };
  // Lengthens sequences, each at most once, in two halves. begin_growth reserves pages, enqueues
  // copies of shared pages that will be written, and waits, on the stream, for copies of its own
  // that the sequences need; lists and lengths are new then. finish_growth drops what policies
  // drop; undo_growth makes all as it was before. One growth at a time.
  Status begin_growth(std::span<const Growth> growths, Stream stream);
  void finish_growth();
  void undo_growth();

  // Usage is the bytes of pages that the sequence refers to, and of those of them that others hold
  // too.
  struct Usage {
    uint64_t n_pages = 0;
    uint64_t bytes = 0;
    uint64_t bytes_shared = 0;
    uint64_t host_bytes = 0;
  };
  Usage usage(const DeviceSequence& seq) const;
  // Residence is where pages are, as far as moves are booked, and how many of the last move still
  // wait for their copies. Takes back what has failed.
  struct Residence {
    bool on_host = false;
    Lane lane = kToHost;  // of the last move
    uint64_t n_pages = 0;
    uint64_t n_host_pages = 0;
    uint64_t n_waiting_pages = 0;
  };
  Residence residence(DeviceSequence* seq);
  // Whether there are moves that are not enqueued, or not known to be.
  bool has_moves() const { return !booked_.empty(); }
  // (list, token) that policies have dropped.
  uint64_t n_dropped(const DeviceSequence& seq) const;

  Driver& driver() { return *driver_; }
  PagePool& pool() { return *pool_; }
  HostChunks& host() { return *host_; }
  Mover* mover() { return mover_.get(); }  // null: there is no room on the host
  DeviceStoreCounters counters() const;
  // Changes with the version of any sequence.
  uint64_t n_changes() const { return n_changes_; }
  // An event that nobody uses. Fails: DEVICE.
  Result<EventPtr> new_event() { return events_->take(); }

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
    DeviceSequence* seq = nullptr;            // null: gone
    std::vector<DeviceSequence::Part> parts;  // kToDevice: what the host had, by tickets
    uint64_t ticket_of_part(size_t part) const { return move->first + part; }
  };
  // A page for a fetch, and from which fence it was taken.
  struct Taken {
    tiers::PageRef page = tiers::kNoPage;
    Lane lane = kToHost;
    uint64_t ticket = 0;  // 0: of none
  };
  // A Change is one of those that begin_growth has made.
  struct Change {
    DeviceSequence* seq = nullptr;
    uint32_t list = 0;
    uint32_t block = 0;
    tiers::PageRef before = tiers::kNoPage;  // kNoPage: the block is new
  };

  DeviceStore(std::unique_ptr<Driver> driver, const DeviceStoreOptions& options);
  Status init(const DeviceStoreOptions& options);
  Status check_growth(const Growth& growth) const;
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
  Status settle(DeviceSequence* seq);
  // The same for whoever uses its pages, which need not wait for those that leave.
  // Fails: BUSY (on the host), and as settle.
  Status settle_for_use(DeviceSequence* seq);
  // Makes the stream wait for copies into the sequence's pages.
  Status await_pages(DeviceSequence* seq, Stream stream);
  // Gives a page or a chunk back when the ticket is done.
  void keep_until(Lane lane, uint64_t ticket, tiers::PageRef page, uint32_t chunk);
  // Drops a sequence's reference; a copy may still be under way into the page.
  void release(const DeviceSequence& seq, tiers::PageRef page);
  void set_on_host(DeviceSequence* seq, bool on_host);
  void drop_unseen(const Growth& growth, uint64_t n_before);
  // Checks that queries at n_tokens and later see only what is there of the first n_left tokens.
  Status check_visible(const DeviceSequence& seq, uint64_t n_tokens, uint64_t n_left) const;
  void forget_dropped(DeviceSequence* seq) const;
  void mark_changed(DeviceSequence* seq);
  Status not_captured(Stream stream);
  uint64_t n_chunks_to_take() const;
  // REQUIRES: there are as many. A piece that uses one waits for its ticket in *after.
  uint32_t take_chunk(Tickets* after);
  Status take_pages(std::span<const DeviceSequence::Part> parts, Stream stream,
                    std::vector<Taken>* taken);
  void give_back(std::span<const Taken> taken);
  Result<EventPtr> record_now(Stream stream);

  std::unique_ptr<Driver> driver_;
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
    uint64_t version_before = 0;
  };
  std::vector<Grown> grown_;
  DeviceStoreCounters counters_;
  uint64_t n_changes_ = 0;
};

}  // namespace kvm::device

#endif  // KVM_DEVICE_DEVICE_STORE_H_
