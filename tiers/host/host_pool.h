// SPDX-License-Identifier: Apache-2.0
// HostPool: the pages of the host tier, in anonymous memory with transparent huge OS pages.
//
// A slab is one virtual reservation for pages of one slab class. It grows and shrinks by extents of
// 2 MiB: an extent is charged to the budget before its memory is touched, holds
// floor(2 MiB / page_bytes) pages (none straddles its end), and becomes a cached extent when its
// last page is freed. Cached extents stay charged; trim gives those beyond a bound back to the
// operating system, a few at a time (each costs about 10 us), and an allocation that would
// fail otherwise takes whatever it needs of them at once.
//
// Pages are reference counted. Addresses are stable for the life of a page. A fresh page's content
// is undefined (zeros, or what a freed page of the same class left).
//
// Threads: one, the driver's; the bytes of pages may be used by any.
// Memory: used_bytes() of the budget at most; 6 bytes of heap per page slot.
#ifndef KVM_TIERS_HOST_HOST_POOL_H_
#define KVM_TIERS_HOST_HOST_POOL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "tiers/budget.h"
#include "tiers/host/host_slab.h"
#include "tiers/host/page_memory.h"
#include "tiers/slab_class.h"

namespace kvm::tiers {

class HostPool {
 public:
  // `budget` and `memory` must outlive the pool; others may charge the budget too. cached_bytes:
  // how much memory of emptied extents trim leaves.
  HostPool(MemoryBudget* budget, uint64_t cached_bytes, PageMemory* memory = system_page_memory());
  // Pages still referenced are gone with the pool.
  ~HostPool();
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  // A page with one reference.
  // Fails: NO_SPACE (the budget, or the number of slabs), NO_MEMORY (the operating system refused).
  // Throws std::bad_alloc. Nothing has changed then.
  Result<PageRef> allocate(const SlabClass& slab_class);
  void add_ref(PageRef page);
  // Returns whether that was the last reference; the page is free then.
  bool release(PageRef page);

  // REQUIRES here and below: `page` is allocated.
  uint32_t n_refs(PageRef page) const;
  std::byte* data(PageRef page) const { return slab_of(page).page_data(page_slot(page)); }
  const SlabClass& slab_class(PageRef page) const { return slab_of(page).slab_class(); }
  uint64_t page_bytes(PageRef page) const { return slab_of(page).page_bytes(); }

  // Gives cached extents back until the budget has size_bytes free or none are left. Returns
  // whether it has.
  bool make_room(uint64_t size_bytes);

  // Gives at most max_extents of the cached extents beyond the bound back. Returns whether more
  // remain.
  bool trim(uint64_t max_extents);

  uint64_t n_pages() const { return n_pages_; }
  uint64_t page_bytes_in_use() const { return page_bytes_in_use_; }
  uint64_t extent_bytes() const { return n_extents_ * kExtentBytes; }  // charged, cached included
  uint64_t peak_extent_bytes() const { return peak_extents_ * kExtentBytes; }
  uint64_t cached_bytes() const { return n_cached_ * kExtentBytes; }

  // Recounts pages, extents and bytes and aborts where they disagree with the running accounts.
  void check_accounts() const;

 private:
  const HostSlab& slab_of(PageRef page) const { return *slabs_[page_slab(page)]; }
  HostSlab& slab_of(PageRef page) { return *slabs_[page_slab(page)]; }
  // A slab of the class with a free page; it may have taken an extent for that.
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
  uint64_t n_pages_ = 0;
  uint64_t page_bytes_in_use_ = 0;
  uint64_t n_extents_ = 0;
  uint64_t peak_extents_ = 0;
  uint64_t n_cached_ = 0;
};

}  // namespace kvm::tiers

#endif  // KVM_TIERS_HOST_HOST_POOL_H_
