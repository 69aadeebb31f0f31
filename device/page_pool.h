// SPDX-License-Identifier: Apache-2.0
// PagePool: pages in device memory, named as those of every tier are (tiers/slab_class.h).
//
// A slab is one range of addresses for pages of one class, reserved for good, so that its base may
// be a constant of a captured graph; page slot i lies at base + i * page_bytes, without gaps.
// Memory is mapped into it by extents of one length, a multiple of the driver's granularity and not
// shorter than a page. Pages need not divide them: one that lies across two extents can be used
// while both are mapped, and an extent is empty when no page in use touches it. So extents are as
// long as is good for mapping (extent_target), whatever the page: one of int8 with its scales has
// few factors of two, and would take hundreds of MiB to end where the granularity does. What this
// costs is the memory beside the ends of a run of mapped extents, less than a page at each; a slab
// that has not given extents away has one run, from its first address on.
//
// An extent is charged against the capacity before it is mapped. Emptied ones stay, until somebody
// has no other way to grow.
//
// Pages are reference counted; the lowest free slot goes first. A fresh page's content is
// undefined. A page that is released may be handed out at once: whoever uses the pool sees to it
// that what writes it is enqueued behind what reads it.
//
// Threads: one at a time.
#ifndef KVM_DEVICE_PAGE_POOL_H_
#define KVM_DEVICE_PAGE_POOL_H_

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "device/driver.h"
#include "device/slot_set.h"
#include "tiers/slab_class.h"

namespace kvm::device {

// How long extents are to be; but at least a page. Each is a call of the driver, and of memory that
// kvmd owns a round trip: in a large pool they are longer.
constexpr uint64_t extent_target(uint64_t capacity_bytes) {
  constexpr uint64_t kUsual = uint64_t{32} << 20, kMost = uint64_t{256} << 20;
  const uint64_t large = capacity_bytes / 256 < kMost ? capacity_bytes / 256 : kMost;
  const uint64_t small = capacity_bytes / 64 < kUsual ? capacity_bytes / 64 : kUsual;
  return large > small ? large : small;
}

class PagePool {
 public:
  // `driver` must outlive the pool.
  PagePool(MemoryDriver* driver, uint64_t capacity_bytes);
  // REQUIRES: no enqueued work uses a page.
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // The slab for pages that hold n_layers pages of a class, one behind the other; made if there is
  // none. Fails: LIMIT (kMaxSegments slabs),
  // NO_SPACE (a single extent is more than the capacity), DEVICE.
  // Slabs that nobody has open any more, and that have no page in use, make room for others.
  Result<uint32_t> open_slab(const tiers::SlabClass& slab_class, uint32_t n_layers = 1);
  // REQUIRES: opened once more than closed; whoever closes it allocates no more pages of it.
  void close_slab(uint32_t slab) { --slabs_[slab].n_users; }
  uint32_t n_slabs() const { return static_cast<uint32_t>(slabs_.size()); }
  // REQUIRES here and below: the slab is open, the page is allocated.
  uint8_t* base(uint32_t slab) const { return slabs_[slab].base; }
  uint64_t slab_page_bytes(uint32_t slab) const { return slabs_[slab].page_bytes; }
  // Pages that the slab's addresses have room for.
  uint32_t slab_slots(uint32_t slab) const { return slabs_[slab].n_slots; }
  uint64_t slab_extent_bytes(uint32_t slab) const { return slabs_[slab].extent_bytes; }

  // A page with one reference, the lowest free one. May wait for the device, where an extent of
  // another slab is taken.
  // Fails: NO_SPACE, DEVICE.
  Result<tiers::PageRef> allocate(uint32_t slab);
  void add_ref(tiers::PageRef page) { ++refs(page); }
  // Returns whether that was the last reference.
  bool release(tiers::PageRef page);
  uint32_t n_refs(tiers::PageRef page) const {
    return slabs_[tiers::page_slab(page)].refs[tiers::page_slot(page)];
  }
  uint8_t* data(tiers::PageRef page) const {
    const Slab& slab = slabs_[tiers::page_slab(page)];
    return slab.base + tiers::page_slot(page) * slab.page_bytes;
  }
  uint64_t page_bytes(tiers::PageRef page) const {
    return slabs_[tiers::page_slab(page)].page_bytes;
  }

  uint64_t capacity_bytes() const { return capacity_bytes_; }
  uint64_t used_bytes() const { return used_bytes_; }  // mapped
  uint64_t peak_bytes() const { return peak_bytes_; }
  uint64_t page_bytes_in_use() const { return page_bytes_in_use_; }
  uint64_t n_pages() const { return n_pages_; }

  // Unmaps empty extents, of size_bytes or all that there are; how many bytes it were. Waits for
  // the device where there is one. Fails: DEVICE.
  Result<uint64_t> close_empty(uint64_t size_bytes);

  // Recounts and aborts where that disagrees with the running accounts.
  void check_accounts() const;

 private:
  struct Extent {
    bool mapped = false;
    uint32_t n_used = 0;  // pages in use that touch it
  };
  // The extents that a page touches: last is first, or the next one.
  struct Touched {
    uint32_t first = 0;
    uint32_t last = 0;
  };
  struct Slab {
    tiers::SlabClass slab_class;
    uint32_t n_layers = 1;
    uint32_t n_users = 0;  // open_slab less close_slab
    uint64_t page_bytes = 0;
    uint64_t extent_bytes = 0;
    uint32_t n_slots = 0;
    uint8_t* base = nullptr;
    std::vector<Extent> extents;  // all that the range has room for
    std::vector<uint32_t> refs;   // [slot]
    SlotSet free;                 // slots that nobody holds and that are mapped from end to end

    Touched touched(uint32_t slot) const;
    // Slots that touch an extent: from the first to before the last.
    uint32_t slots_begin(uint32_t extent) const;
    uint32_t slots_end(uint32_t extent) const;
    uint8_t* extent_at(uint32_t extent) const { return base + extent * extent_bytes; }
  };

  uint32_t& refs(tiers::PageRef page) {
    return slabs_[tiers::page_slab(page)].refs[tiers::page_slot(page)];
  }
  // REQUIRES: the slab has no free slot; then it has one.
  // Where another slab can go: behind the others, or in the place of one that nobody needs.
  // Fails: LIMIT, DEVICE.
  Result<uint32_t> free_place();
  Status open_extent(Slab& slab);
  // Unmaps empty extents until size_bytes more fit. Fails: NO_SPACE, DEVICE.
  Status make_room(uint64_t size_bytes);
  void close_extent(Slab& slab, uint32_t extent);

  MemoryDriver* const driver_;
  const uint64_t capacity_bytes_;
  std::vector<Slab> slabs_;
  uint64_t used_bytes_ = 0;
  uint64_t peak_bytes_ = 0;
  uint64_t page_bytes_in_use_ = 0;
  uint64_t n_pages_ = 0;
};

}  // namespace kvm::device

#endif  // KVM_DEVICE_PAGE_POOL_H_
