// SPDX-License-Identifier: Apache-2.0
// DeviceStore: the sequences whose pages lie in one device's memory, and their moves to the host
// and back.
//
// Everything here is bookkeeping on the host, done when a call is made, and copies that are
// enqueued. It relies on one timeline (kvm_cuda.h): what is enqueued later is done later. So a page
// that is released may be handed out at once. The exceptions are the store's own two streams for
// copies between host and device; pages and chunks that these still use are kept by a fence, and
// handed out again when its event has happened or is waited for by whoever gets them.
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
#include "device/host_chunks.h"
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
  // Filled in by DeviceStore::prepare: the list of the class's pages, and which part of each is the
  // layer's.
  uint32_t list = 0;
  uint32_t part = 0;
};

// A ListLayout is of pages that several layers share: those that have a class of as many heads that
// keep the same tokens. A page holds 64 tokens of all of them, a part for each layer, one behind
// the other (ADR 0031). So what a step does to pages and page tables it does once for all layers.
struct ListLayout {
  uint32_t n_heads = 0;
  uint64_t n_sinks = 0;
  uint64_t n_recent = 0;
  uint64_t slack = 0;
  uint32_t n_parts = 0;
  uint64_t part_bytes = 0;  // docs/storage.md: a page of one layer
  uint32_t slab = 0;

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

  uint32_t group() const { return n_q_heads / n_kv_heads; }
};

struct SpaceLayout {
  CodecId codec = CodecId::kBf16;  // of K and V; attention::gpu::is_on_devices
  uint32_t dim = 0;                // 64, 128, 256
  float scale = 1.0f;
  float softcap = 0.0f;  // of logits; 0: none
  std::vector<LayerLayout> layers;
  std::vector<ListLayout> lists;  // filled in by DeviceStore::prepare

  const LayerLayout& storage(uint32_t layer) const { return layers[layers[layer].storage_layer]; }
  // How a layer's part of a page lies, with so many heads.
  tiers::SlabClass slab_class(uint32_t n_heads) const;
};

// An event of the driver that is used again when nobody holds it.
using EventPtr = std::shared_ptr<void>;

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
  EventPtr ready;  // copies into its pages; null: none are under way, or they are waited for

  // On the host: where its pages are.
  struct HostPage {
    uint32_t list = 0;
    uint32_t block = 0;
    uint32_t part = 0;
    uint32_t chunk = 0;  // of `chunks`
    uint32_t offset = 0;
  };
  bool on_host = false;
  std::vector<HostPage> host_pages;
  std::vector<uint32_t> chunks;
  EventPtr left;  // copies to these chunks
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
  Result<std::shared_ptr<DeviceSequence>> fork(const DeviceSequence& parent, uint64_t n_tokens);
  Status truncate(DeviceSequence* seq, uint64_t n_tokens);
  // Gives everything back.
  void clear(DeviceSequence* seq);

  Status spill(DeviceSequence* seq, Stream stream);
  Status fetch(DeviceSequence* seq, Stream stream);

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
  // (list, token) that policies have dropped.
  uint64_t n_dropped(const DeviceSequence& seq) const;

  Driver& driver() { return *driver_; }
  PagePool& pool() { return *pool_; }
  HostChunks& host() { return *host_; }
  const DeviceStoreCounters& counters() const { return counters_; }
  // Changes with the version of any sequence.
  uint64_t n_changes() const { return n_changes_; }
  // An event that nobody uses. Fails: DEVICE.
  Result<EventPtr> new_event();

  // Compares all references with the accounts and aborts where they disagree. REQUIRES: `all` is
  // every sequence, and no growth is begun.
  void check_accounts(std::span<const DeviceSequence* const> all) const;

 private:
  // A Fence is for pages or chunks that a copy of ours still uses.
  struct Fence {
    EventPtr event;
    std::vector<tiers::PageRef> pages;
    std::vector<uint32_t> chunks;
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
  // A page; makes `stream` wait for a fence if it takes that.
  Result<tiers::PageRef> allocate(uint32_t slab, Stream stream);
  // Hands out again what fences keep whose events have happened.
  void collect_fences();
  void open_fence(const Fence& fence);
  // Drops a sequence's reference; a copy may still be under way into the page.
  void release(const DeviceSequence& seq, tiers::PageRef page);
  void give_back_chunks(DeviceSequence* seq, EventPtr event);
  void drop_unseen(const Growth& growth, uint64_t n_before);
  // Checks that queries at n_tokens and later see only what is there of the first n_left tokens.
  Status check_visible(const DeviceSequence& seq, uint64_t n_tokens, uint64_t n_left) const;
  void forget_dropped(DeviceSequence* seq) const;
  void mark_changed(DeviceSequence* seq);
  Status not_captured(Stream stream);
  // Enqueues the copies between pages and the places in chunks that belong to them, behind
  // `stream` and behind `also`; *done happens after them.
  Status transfer(const SpaceLayout& space, std::span<const DeviceSequence::HostPage> places,
                  std::span<uint8_t* const> parts, std::span<const uint32_t> chunks, bool to_host,
                  Stream stream, const EventPtr& also, EventPtr* done);
  Status copy_run(uint8_t* packed, std::span<uint8_t* const> parts, uint64_t part_bytes,
                  bool to_host);
  Status gather_run(uint8_t* packed, std::span<uint8_t* const> parts, uint64_t part_bytes,
                    bool to_host);
  Status copy(uint8_t* on_device, uint8_t* on_host, uint64_t size_bytes, bool to_host);
  Status take_chunks(uint64_t n, std::vector<uint32_t>* out);

  std::unique_ptr<Driver> driver_;
  std::vector<Event> free_events_;
  size_t n_events_ = 0;  // that there are
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<HostChunks> host_;
  Stream to_host_ = nullptr;
  Stream to_device_ = nullptr;
  uint8_t* bounce_[2] = {};         // kChunkBytes each, of to_host_ and to_device_
  std::deque<Fence> page_fences_;   // whoever gets their pages waits on the timeline
  std::deque<Fence> chunk_fences_;  // whoever gets their chunks waits on to_host_
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
