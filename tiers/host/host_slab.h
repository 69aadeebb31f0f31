// SPDX-License-Identifier: Apache-2.0
// HostSlab: one virtual reservation cut into extents, and those into frames for pages of one slab
// class. Keeps the books of its own slots; HostPool decides what is charged and what is given back.
#ifndef KVM_TIERS_HOST_HOST_SLAB_H_
#define KVM_TIERS_HOST_HOST_SLAB_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "tiers/host/page_memory.h"
#include "tiers/slab_class.h"

namespace kvm::tiers {

// An extent is absent (no memory), cached (memory, no frame in use) or open (some frame in use).
// Slot numbers are (extent << slot_shift) | frame within the extent.
class HostSlab {
 public:
  // Reserves address space for max_extents extents, fewer where the slot number could not name
  // them. `memory` must outlive the slab. Fails: NO_MEMORY.
  static Result<std::unique_ptr<HostSlab>> create(const SlabClass& slab_class, uint64_t max_extents,
                                                  PageMemory* memory);
  ~HostSlab();
  HostSlab(const HostSlab&) = delete;
  HostSlab& operator=(const HostSlab&) = delete;

  const SlabClass& slab_class() const { return slab_class_; }
  uint64_t page_bytes() const { return page_bytes_; }
  std::byte* frame_data(uint32_t slot) const {
    return base_ + uint64_t{slot >> slot_shift_} * kExtentBytes +
           uint64_t{slot & slot_mask_} * page_bytes_;
  }

  bool has_free_frame() const { return !partial_.empty() || !cached_.empty(); }
  bool has_absent_extent() const { return !absent_.empty() || extents_.size() < max_extents_; }
  uint64_t n_frames() const { return n_frames_; }  // in use
  uint64_t n_cached() const { return cached_.size(); }
  uint64_t n_open() const { return n_open_; }

  // Turns an absent extent into a cached one.
  // REQUIRES: has_absent_extent(). Fails: NO_MEMORY, and the extent stays absent. Whatever frames
  // and extents do later needs no memory for the books.
  Status add_extent();
  // Turns a cached extent into an absent one. REQUIRES: n_cached() > 0.
  void remove_extent();

  // Takes a frame for what `owner` names. Prefers extents that are open already.
  // REQUIRES: has_free_frame().
  uint32_t take(uint32_t owner);
  // REQUIRES: the frame is in use.
  void free(uint32_t slot);
  bool is_used(uint32_t slot) const { return next_free_[slot] == kUsed; }
  // REQUIRES: the frame is in use.
  uint32_t owner(uint32_t slot) const { return owners_[slot]; }
  void set_owner(uint32_t slot, uint32_t owner) { owners_[slot] = owner; }

  // Free frames of open extents that are not closed.
  uint64_t n_spare() const { return n_open_ * frames_per_extent_ - n_frames_ - n_closed_free_; }
  uint64_t frames_per_extent() const { return frames_per_extent_; }
  // The open extent with the fewest frames in use of some that have a free one and are not closed:
  // of kLooked, others each time; kNoExtent: there is none.
  uint32_t thinnest_extent();
  // A closed extent gives no frames out; it is closed until its last frame is free, or until it is
  // opened.
  // REQUIRES: the extent is open.
  void close_extent(uint32_t extent);
  // Does nothing where it is not closed, or where there is no such extent.
  void reopen_extent(uint32_t extent);
  // Returns whether any was closed.
  bool reopen_all();
  // Whether is(slot) holds for any frame of an extent that is in use.
  template <typename Predicate>
  bool any_used(uint32_t extent, Predicate is) const {
    for (uint32_t frame = 0; frame < frames_per_extent_; ++frame) {
      const uint32_t slot = (extent << slot_shift_) + frame;
      if (is_used(slot) && is(slot)) {
        return true;
      }
    }
    return false;
  }
  static constexpr uint32_t kNoExtent = 0xffffffffu;

  void check_accounts() const;

 private:
  struct Extent {
    uint16_t n_used = 0;
    uint16_t free_head = 0;   // first free frame; kNoSlot: none
    uint32_t list_index = 0;  // where the extent is in partial_ or cached_
    bool is_closed = false;   // in no list then
    enum : uint8_t { kAbsent, kCached, kOpen } state = kAbsent;
  };
  static constexpr uint16_t kNoSlot = 0xffff;
  static constexpr size_t kLooked = 1024;
  static constexpr uint16_t kUsed = 0xfffe;

  HostSlab(const SlabClass& slab_class, uint64_t max_extents, PageMemory* memory);
  // Makes more extents accessible, where all of these have been used. False: refused.
  bool open_more();
  // Room in the books for n_extents.
  void reserve_books(size_t n_extents);
  void list_add(std::vector<uint32_t>* list, uint32_t extent);
  void list_remove(std::vector<uint32_t>* list, uint32_t extent);
  std::byte* extent_data(uint32_t extent) const { return base_ + uint64_t{extent} * kExtentBytes; }

  const SlabClass slab_class_;
  const uint64_t page_bytes_;
  const uint32_t frames_per_extent_;
  const uint32_t slot_shift_;
  const uint32_t slot_mask_;
  const uint64_t max_extents_;
  PageMemory* const memory_;
  std::byte* mapping_ = nullptr;  // as mapped
  uint64_t mapping_bytes_ = 0;
  std::byte* base_ = nullptr;  // first multiple of kExtentBytes inside

  std::vector<Extent> extents_;      // those ever used
  std::vector<uint16_t> next_free_;  // [slot], frame within the extent; kUsed
  std::vector<uint32_t> owners_;     // [slot], of frames in use
  std::vector<uint32_t> partial_;    // open extents with a free frame, not closed
  std::vector<uint32_t> cached_;
  std::vector<uint32_t> absent_;  // those of extents_ that are absent
  uint64_t n_accessible_ = 0;     // extents of which memory is accessible
  uint64_t n_open_ = 0;           // closed ones included
  uint64_t n_closed_free_ = 0;    // free frames of closed extents
  uint64_t n_frames_ = 0;
  uint64_t n_closed_ = 0;
  size_t next_looked_ = 0;  // of partial_
};

}  // namespace kvm::tiers

#endif  // KVM_TIERS_HOST_HOST_SLAB_H_
