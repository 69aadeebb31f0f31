// SPDX-License-Identifier: Apache-2.0
// HostPool: the frames of the host tier, where pages lie: anonymous memory with transparent huge OS
// pages. Which page lies in a frame is the affair of the table of pages (tiers/page_table.h).
//
// A slab is one virtual reservation for frames of one slab class. It grows and shrinks by extents
// of 2 MiB: an extent is charged to the budget before its memory is touched, holds
// floor(2 MiB / page_bytes) frames (none straddles its end), and becomes a cached extent when its
// last frame is freed. Cached extents stay charged; trim gives those beyond a bound back to the
// operating system, a few at a time (each costs about 10 us), and an allocation that would
// fail otherwise takes whatever it needs of them at once.
//
// The address of a frame is its own until it is freed. What a fresh one holds is undefined (zeros,
// or what a freed one of the same class left).
//
// Threads: one, the driver's; the bytes of frames may be used by any.
// Memory: used_bytes() of the budget at most; 6 bytes of heap per slot.
#ifndef KVM_TIERS_HOST_HOST_POOL_H_
#define KVM_TIERS_HOST_HOST_POOL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/status.h"
#include "tiers/budget.h"
#include "tiers/host/host_slab.h"
#include "tiers/host/page_memory.h"
#include "tiers/slab_class.h"

namespace kvm::tiers {

// Names a frame of a HostPool.
struct FrameRef {
  uint32_t number = 0;  // bits as those of a PageRef: slab, slot

  bool operator==(const FrameRef&) const = default;
};
inline constexpr FrameRef kNoFrame{kNoPage};

class HostPool {
 public:
  // `budget` and `memory` must outlive the pool; others may charge the budget too. cached_bytes:
  // how much memory of emptied extents trim leaves.
  HostPool(MemoryBudget* budget, uint64_t cached_bytes, PageMemory* memory = system_page_memory());
  // Frames in use are gone with the pool.
  ~HostPool();
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  // Fails: NO_SPACE (the budget, or the number of slabs), NO_MEMORY (the operating system refused).
  // Throws std::bad_alloc. Nothing has changed then.
  // owner: a number that the pool keeps for the caller, for as long as the frame is in use.
  Result<FrameRef> allocate(const SlabClass& slab_class, uint32_t owner);
  // REQUIRES here and below: `frame` is in use.
  void free(FrameRef frame);

  std::byte* data(FrameRef frame) const {
    return slabs_[page_slab(frame.number)]->frame_data(page_slot(frame.number));
  }
  const SlabClass& slab_class(FrameRef frame) const { return slab_of(frame).slab_class(); }
  uint32_t owner(FrameRef frame) const { return slab_of(frame).owner(page_slot(frame.number)); }
  void set_owner(FrameRef frame, uint32_t owner) {
    slabs_[page_slab(frame.number)]->set_owner(page_slot(frame.number), owner);
  }
  bool is_used(FrameRef frame) const { return slab_of(frame).is_used(page_slot(frame.number)); }

  // --- Emptying extents -------------------------------------------------------------------------
  // Where frames of a slab lie scattered, some of its extents can be emptied into others.

  // Names an extent of a slab.
  struct ExtentRef {
    uint32_t slab = 0;
    uint32_t extent = 0;
  };
  // Closes the extent with the fewest frames in use of a slab that has room for them in other open
  // extents: it gives no frames out until its last one is free. Nothing, where free frames are few:
  // fewer than two extents' worth in a slab, or than one for kMaxSpare in use. Slabs of indexes are
  // passed over: their pages do not move.
  std::optional<ExtentRef> close_thin_extent();
  // Opens it again, if it is closed.
  void reopen(ExtentRef extent);
  // Opens all; returns whether any was closed. O(extents).
  bool reopen_closed();
  // Whether is(FrameRef) holds for any frame of an extent that is in use.
  template <typename Predicate>
  bool any_used(ExtentRef extent, Predicate is) const {
    return slabs_[extent.slab]->any_used(extent.extent, [&](uint32_t slot) {
      return is(FrameRef{make_page_ref(extent.slab, slot)});
    });
  }
  // Calls visit(FrameRef) for these frames.
  template <typename Visitor>
  void for_each_used(ExtentRef extent, Visitor visit) const {
    any_used(extent, [&](FrameRef frame) {
      visit(frame);
      return false;
    });
  }
  static constexpr uint64_t kMaxSpare = 8;  // one for so many in use

  // Gives cached extents back until the budget has size_bytes free or none are left. Returns
  // whether it has.
  bool make_room(uint64_t size_bytes);

  // Gives at most max_extents of the cached extents beyond the bound back. Returns whether more
  // remain.
  bool trim(uint64_t max_extents);

  uint64_t n_frames() const { return n_frames_; }        // in use
  uint64_t frame_bytes() const { return frame_bytes_; }  // of these
  // Of these, each with its share of what its extent has beyond a whole number of frames.
  uint64_t share_bytes() const { return share_bytes_; }
  uint64_t extent_bytes() const { return n_extents_ * kExtentBytes; }  // charged, cached included
  uint64_t peak_extent_bytes() const { return peak_extents_ * kExtentBytes; }
  uint64_t cached_bytes() const { return n_cached_ * kExtentBytes; }

  // Recounts frames, extents and bytes and aborts where they disagree with the running accounts.
  void check_accounts() const;

 private:
  const HostSlab& slab_of(FrameRef frame) const { return *slabs_[page_slab(frame.number)]; }
  // A slab of the class with a free frame; it may have taken an extent for that.
  Result<uint32_t> slab_with_room(const SlabClass& slab_class);
  Result<uint32_t> make_slab(const SlabClass& slab_class);
  // Charges and opens one absent extent of a slab that has one.
  Status open_extent(HostSlab& slab);
  void close_cached_extent(HostSlab& slab);

  MemoryBudget* const budget_;
  const uint64_t max_cached_;
  PageMemory* const memory_;
  std::array<std::unique_ptr<HostSlab>, kMaxSlabs> slabs_;
  uint32_t n_slabs_ = 0;  // slots of slabs_ ever used are below this
  uint64_t n_frames_ = 0;
  uint64_t frame_bytes_ = 0;
  uint64_t share_bytes_ = 0;
  uint64_t n_extents_ = 0;
  uint64_t peak_extents_ = 0;
  uint64_t n_cached_ = 0;
};

}  // namespace kvm::tiers

#endif  // KVM_TIERS_HOST_HOST_POOL_H_
