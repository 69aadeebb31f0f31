// SPDX-License-Identifier: Apache-2.0
// SequenceStore: the sequences whose pages lie in the memory of one device, as the process sees
// them that launches kernels on them.
//
//   DeviceStore    keeps the books itself: the memory is this process's
//   RemoteStore    has a copy of them: the memory is kvmd's, which keeps the books
//
// What is told of a sequence here (its length, its lists of pages) both have; whatever follows from
// these alone is here, too, so that the two cannot differ in it.
//
// Threads: one at a time, but for what moves_of returns.
// Fails: with the codes of kvm_cuda.h; what fails has changed nothing.
#ifndef KVM_DEVICE_SEQUENCE_STORE_H_
#define KVM_DEVICE_SEQUENCE_STORE_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/limits.h"
#include "base/round.h"
#include "base/status.h"
#include "device/driver.h"
#include "device/event_pool.h"
#include "tiers/slab_class.h"

namespace kvm::device {

// A ClassLayout is of heads of a layer that keep the same tokens: sinks and a window, or all
// (n_recent = 0).
struct ClassLayout {
  std::vector<uint16_t> kv_heads;  // ascending
  uint64_t n_sinks = 0;
  uint64_t n_recent = 0;
  uint64_t slack = 0;
  // Filled in by make_lists: the list of the class's pages, and the layer's rank in each.
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
  std::vector<ListLayout> lists;  // filled in by make_lists; their slabs, by prepare
  uint64_t number = 0;            // of a RemoteStore's

  const LayerLayout& storage(uint32_t layer) const { return layers[layers[layer].storage_layer]; }
  // Whether the layer stores keys itself.
  bool stores(uint32_t layer) const {
    return layers[layer].has_keys && layers[layer].storage_layer == layer;
  }
  bool v_in_k() const { return dim == attention::gpu::kMlaDim; }
  uint32_t dim_v() const { return attention::gpu::value_dim(dim); }
  // How a layer's part of a page lies, with so many heads.
  tiers::SlabClass slab_class(uint32_t n_heads) const;
};

// Completes a layout but for slabs. Fails: UNSUPPORTED (pages of 4 GiB and more).
Status make_lists(SpaceLayout* layout);

// A DevicePageList holds the pages of one ListLayout.
struct DevicePageList {
  std::vector<tiers::PageRef> pages;  // [block of 64 positions]; kNoPage: dropped, or on the host
  uint64_t kept_from = 0;             // positions from the sinks' pages up to here are dropped
};

// A DeviceSequence is the tokens of one sequence; each store has more to say of its own.
struct DeviceSequence {
  explicit DeviceSequence(std::shared_ptr<const SpaceLayout> of);
  virtual ~DeviceSequence() = default;

  std::shared_ptr<const SpaceLayout> space;
  uint64_t n_tokens = 0;  // of every layer
  // Of these, those that steps cannot turn out not to have kept (Growth::max_unsure). Known where
  // steps are planned: kvmd has it from growths.
  uint64_t n_sure = 0;
  std::vector<DevicePageList> lists;
  uint64_t version = 0;  // changes with everything that a batch must know of
  // The batch whose page table is right up to the block changed_from, or null.
  const void* noted_by = nullptr;
  uint64_t changed_from = 0;

  // Whether queries at n_before and later see only what is there of the first n_left tokens.
  // Fails: PARTIAL.
  Status check_visible(uint64_t n_before, uint64_t n_left) const;
  // (layer, token) that policies have dropped, once for each list of the layer.
  uint64_t n_dropped() const;
  // Cuts lists and length, behind check_visible. Calls let_go(page) for what goes.
  template <class LetGo>
  void cut(uint64_t n_left, LetGo let_go);

 protected:
  DeviceSequence(const DeviceSequence&) = default;
};
using SequencePtr = std::shared_ptr<DeviceSequence>;

// What a step does to one sequence.
struct Growth {
  DeviceSequence* seq = nullptr;
  uint32_t n_append = 0;
  uint32_t n_query = 0;  // the last tokens after the append
  // On the device the sequence may have up to n_unsure tokens fewer before the append: it is known
  // there only. After it, no more than max_unsure of those appended may turn out not to count.
  uint32_t n_unsure = 0;
  uint32_t max_unsure = 0;

  // The growth of a sequence of which up to max_unsure tokens may not be there, but none of those
  // that are sure.
  static Growth of(DeviceSequence* seq, uint32_t n_append, uint32_t n_query, uint32_t max_unsure);

  // Fails: INVALID, PARTIAL.
  Status check() const;
  // Whether the tokens have room in the last pages of a sequence that has n_before.
  bool stays_in_its_pages(uint64_t n_before) const {
    return n_before + n_append <= round_up(n_before, kPageTokens);
  }
  // The first block that the rows of its tokens may go to, of a sequence that has n_before.
  uint64_t first_written_block(uint64_t n_before) const {
    return (n_before - n_unsure) / kPageTokens;
  }
  // Tokens that the sequence is sure to have when it has grown to n_after.
  uint64_t sure_tokens(uint64_t n_after) const {
    return n_after - n_unsure - std::min(n_append, max_unsure);
  }
  // Positions of a list before it are seen by no query from this one on (0 where the growth neither
  // appends nor queries, and so says nothing of what is wanted), when the sequence has
  // grown from n_before tokens to n_after, whichever it turns out to have; a multiple of 64. Pages
  // that are begun in it stay until the next growth: the rows of its tokens are not enqueued yet.
  uint64_t unseen_before(uint32_t list, uint64_t n_before, uint64_t n_after) const;
  // Once it has been done to a sequence that had n_before tokens: drops what no later query sees,
  // and notes what is sure. Calls let_go(page) for what goes.
  template <class LetGo>
  void finish(uint64_t n_before, LetGo let_go) const;
};

// The pages of one kind that a store has: page slot i lies at base + i * page_bytes.
struct SlabPlace {
  uint8_t* base = nullptr;
  uint64_t page_bytes = 0;
  uint64_t n_slots = 0;
};

class SequenceStore {
 public:
  virtual ~SequenceStore() = default;

  // Whether it can be used. Fails: DISCONNECTED (who keeps the books has ended).  Threads: any.
  virtual Status state() const { return Status::ok(); }

  // Completes a layout: lists and slabs. Fails: LIMIT, NO_SPACE, DEVICE, UNSUPPORTED (pages of 4
  // GiB and more).
  virtual Result<std::shared_ptr<const SpaceLayout>> prepare(SpaceLayout layout) = 0;
  // REQUIRES: of a layout that was prepared and is still there.
  virtual SlabPlace slab(uint32_t slab) const = 0;

  // Fails: LIMIT (of what kvmd keeps for one client), as fork.
  virtual Result<SequencePtr> create(std::shared_ptr<const SpaceLayout> space) = 0;
  // Fails: INVALID, PARTIAL, BUSY (on the host), LIMIT.
  virtual Result<SequencePtr> fork(DeviceSequence& parent, uint64_t n_tokens) = 0;
  virtual Status truncate(DeviceSequence* seq, uint64_t n_tokens) = 0;
  // Gives everything back.
  virtual void clear(DeviceSequence* seq) = 0;

  // Of positions [begin, end): pages that lie in there with all their tokens and are not shared go
  // to the host; or pages of which any token lies in there come back.
  virtual Status spill(DeviceSequence* seq, uint64_t begin, uint64_t end, Stream stream) = 0;
  virtual Status fetch(DeviceSequence* seq, uint64_t begin, uint64_t end, Stream stream) = 0;
  // What returns when the last moves of these sequences are enqueued (of spills, where
  // also_spills); null: nothing has to be waited for. To be called while others use the store.
  using Wait = std::function<void()>;
  virtual Wait moves_of(std::span<DeviceSequence* const> seqs, bool also_spills) = 0;
  // Returns when all moves are enqueued; waits for the device as long as that takes.
  virtual void finish_moves() = 0;

  // Lengthens sequences, each at most once, in two halves. begin_growth reserves pages, enqueues
  // copies of shared pages that will be written, and waits, on the stream, for copies of its own
  // that the sequences need; lists and lengths are new then. finish_growth drops what policies
  // drop; undo_growth makes all as it was before, behind what was enqueued. One growth at a time.
  virtual Status begin_growth(std::span<const Growth> growths, Stream stream) = 0;
  virtual void finish_growth() = 0;
  virtual void undo_growth() = 0;

  // Usage is the bytes of pages that the sequence refers to, and of those of them that others hold
  // too.
  struct Usage {
    uint64_t n_pages = 0;
    uint64_t bytes = 0;
    uint64_t bytes_shared = 0;
    uint64_t host_bytes = 0;
  };
  virtual Result<Usage> usage(const DeviceSequence& seq) = 0;
  // Residence is where pages are, as far as moves are booked, and how many of the last move still
  // wait for their copies.
  struct Residence {
    bool on_host = false;
    bool leaves = false;  // the last move is to the host
    uint64_t n_pages = 0;
    uint64_t n_host_pages = 0;
    uint64_t n_waiting_pages = 0;
    int32_t failure = KVM_OK;  // what the next use of the sequence answers with
  };
  virtual Result<Residence> residence(DeviceSequence* seq) = 0;

  struct Figures {
    uint64_t pool_bytes = 0;  // the cap
    uint64_t pool_used_bytes = 0;
    uint64_t pool_page_bytes = 0;
    uint64_t pool_peak_bytes = 0;
    uint64_t n_pages = 0;
    uint64_t n_pages_copied = 0;
    uint64_t host_bytes = 0;  // the cap
    uint64_t host_used_bytes = 0;
    uint64_t n_spilled = 0;  // at present
    uint64_t spilled_bytes = 0;
    uint64_t fetched_bytes = 0;
    uint64_t n_copies = 0;
  };
  virtual Result<Figures> figures() = 0;

  // Changes with the version of any sequence.
  uint64_t n_changes() const { return n_changes_; }

 protected:
  void mark_changed(DeviceSequence* seq) {
    ++seq->version;
    ++n_changes_;
  }

 private:
  uint64_t n_changes_ = 0;
};

// --- Implementation of templates ----------------------------------------------------------------

template <class LetGo>
void DeviceSequence::cut(uint64_t n_left, LetGo let_go) {
  const uint64_t n_pages = (n_left + kPageTokens - 1) / kPageTokens;
  for (uint32_t i = 0; i < lists.size(); ++i) {
    DevicePageList& list = lists[i];
    for (uint64_t block = n_pages; block < list.pages.size(); ++block) {
      if (list.pages[block] != tiers::kNoPage) {
        let_go(list.pages[block]);
      }
    }
    list.pages.resize(n_pages);
    // The dropped tokens lay behind the end: those that come there are others.
    const uint64_t first = space->lists[i].first_droppable();
    list.kept_from = n_left <= first ? first : list.kept_from;
  }
  n_tokens = n_left;
  n_sure = std::min(n_sure, n_left);
}

template <class LetGo>
void Growth::finish(uint64_t n_before, LetGo let_go) const {
  for (uint32_t list = 0; list < seq->lists.size(); ++list) {
    const uint64_t end = unseen_before(list, n_before, seq->n_tokens);
    DevicePageList& lies = seq->lists[list];
    for (uint64_t block = lies.kept_from / kPageTokens; block < end / kPageTokens; ++block) {
      const tiers::PageRef page = std::exchange(lies.pages[block], tiers::kNoPage);
      if (page != tiers::kNoPage) {
        let_go(page);
      }
    }
    lies.kept_from = std::max(lies.kept_from, end);
  }
  seq->n_sure = sure_tokens(seq->n_tokens);
}

}  // namespace kvm::device

#endif  // KVM_DEVICE_SEQUENCE_STORE_H_
