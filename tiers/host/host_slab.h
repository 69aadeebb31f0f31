// SPDX-License-Identifier: Apache-2.0
// HostSlab: one virtual reservation cut into extents, and those into pages of one slab class. Keeps
// the books of its own slots; HostPool decides what is charged and what is given back.
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

// An extent is absent (no memory), cached (memory, no page in use) or open (some page in use).
// Slot numbers are (extent << slot_shift) | page within the extent.
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
  std::byte* page_data(uint32_t slot) const {
    return base_ + uint64_t{slot >> slot_shift_} * kExtentBytes +
           uint64_t{slot & slot_mask_} * page_bytes_;
  }

  bool has_free_page() const { return !partial_.empty() || !cached_.empty(); }
  bool has_absent_extent() const { return !absent_.empty() || extents_.size() < max_extents_; }
  uint64_t n_pages() const { return n_pages_; }
  uint64_t n_cached() const { return cached_.size(); }
  uint64_t n_open() const { return n_open_; }

  // Turns an absent extent into a cached one.
  // REQUIRES: has_absent_extent(). Fails: NO_MEMORY, and the extent stays absent. Whatever pages
  // and extents do later needs no memory for the books.
  Status add_extent();
  // Turns a cached extent into an absent one. REQUIRES: n_cached() > 0.
  void remove_extent();

  // Takes a page, with one reference. Prefers extents that are open already.
  // REQUIRES: has_free_page().
  uint32_t take();
  // REQUIRES: n_refs(slot) > 0.
  void add_ref(uint32_t slot) { ++refs_[slot]; }
  // Returns whether the page is free now.
  bool release(uint32_t slot);
  uint32_t n_refs(uint32_t slot) const { return refs_[slot]; }

  void check_accounts() const;

 private:
  struct Extent {
    uint16_t n_used = 0;
    uint16_t free_head = 0;   // first free page; kNoSlot: none
    uint32_t list_index = 0;  // where the extent is in partial_ or cached_
    enum : uint8_t { kAbsent, kCached, kOpen } state = kAbsent;
  };
  static constexpr uint16_t kNoSlot = 0xffff;

  HostSlab(const SlabClass& slab_class, uint64_t max_extents, PageMemory* memory);
  // Room in the books for n_extents.
  void reserve_books(size_t n_extents);
  void list_add(std::vector<uint32_t>* list, uint32_t extent);
  void list_remove(std::vector<uint32_t>* list, uint32_t extent);
  std::byte* extent_data(uint32_t extent) const { return base_ + uint64_t{extent} * kExtentBytes; }

  const SlabClass slab_class_;
  const uint64_t page_bytes_;
  const uint32_t pages_per_extent_;
  const uint32_t slot_shift_;
  const uint32_t slot_mask_;
  const uint64_t max_extents_;
  PageMemory* const memory_;
  std::byte* mapping_ = nullptr;  // as mapped
  uint64_t mapping_bytes_ = 0;
  std::byte* base_ = nullptr;  // first multiple of kExtentBytes inside

  std::vector<Extent> extents_;      // those ever used; memory of all of them is accessible
  std::vector<uint32_t> refs_;       // [slot]
  std::vector<uint16_t> next_free_;  // [slot], page within the extent
  std::vector<uint32_t> partial_;    // open extents with a free page
  std::vector<uint32_t> cached_;
  std::vector<uint32_t> absent_;  // those of extents_ that are absent
  uint64_t n_open_ = 0;
  uint64_t n_pages_ = 0;
};

}  // namespace kvm::tiers

#endif  // KVM_TIERS_HOST_HOST_SLAB_H_
