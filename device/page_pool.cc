// SPDX-License-Identifier: Apache-2.0
#include "device/page_pool.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/assert.h"
#include "base/round.h"

namespace kvm::device {

using tiers::make_page_ref;
using tiers::page_slab;
using tiers::page_slot;
using tiers::PageRef;

PagePool::Touched PagePool::Slab::touched(uint32_t slot) const {
  const uint64_t begin = slot * page_bytes;
  const auto first = static_cast<uint32_t>(begin / extent_bytes);
  const bool goes_on = begin + page_bytes > (first + uint64_t{1}) * extent_bytes;
  return {first, goes_on ? first + 1 : first};
}

uint32_t PagePool::Slab::slots_begin(uint32_t extent) const {
  return static_cast<uint32_t>(std::min<uint64_t>(n_slots, extent * extent_bytes / page_bytes));
}

uint32_t PagePool::Slab::slots_end(uint32_t extent) const {
  return static_cast<uint32_t>(
      std::min<uint64_t>(n_slots, div_up((extent + uint64_t{1}) * extent_bytes, page_bytes)));
}

PagePool::PagePool(MemoryDriver* driver, uint64_t capacity_bytes)
    : driver_(driver), capacity_bytes_(capacity_bytes) {}

PagePool::~PagePool() {
  for (Slab& slab : slabs_) {
    for (uint32_t i = 0; i < slab.extents.size(); ++i) {
      if (slab.extents[i].mapped) {
        driver_->unmap(slab.extent_at(i), slab.extent_bytes);
      }
    }
    driver_->release(slab.base, slab.extents.size() * slab.extent_bytes);
  }
}

Result<uint32_t> PagePool::open_slab(const tiers::SlabClass& slab_class, uint32_t n_layers) {
  for (uint32_t i = 0; i < slabs_.size(); ++i) {
    if (slabs_[i].slab_class == slab_class && slabs_[i].n_layers == n_layers) {
      ++slabs_[i].n_users;
      return i;
    }
  }
  Slab slab;
  slab.n_users = 1;
  slab.slab_class = slab_class;
  slab.n_layers = n_layers;
  slab.page_bytes = slab_class.page_bytes() * n_layers;
  slab.extent_bytes = round_up(std::max(slab.page_bytes, extent_target(capacity_bytes_)),
                               driver_->facts().granularity_bytes);
  const uint64_t n_extents =
      std::min(capacity_bytes_ / slab.extent_bytes,
               (uint64_t{1} << tiers::kSlotBits) * slab.page_bytes / slab.extent_bytes);
  if (n_extents == 0) {
    return Status(KVM_ERR_NO_SPACE, "pages of " + std::to_string(slab.page_bytes) +
                                        " bytes come in extents of " +
                                        std::to_string(slab.extent_bytes) + "; the pool has " +
                                        std::to_string(capacity_bytes_) + " bytes");
  }
  slab.extents.resize(n_extents);
  slab.n_slots = static_cast<uint32_t>(n_extents * slab.extent_bytes / slab.page_bytes);
  slabs_.reserve(slabs_.size() + 1);
  KVM_TRY_ASSIGN(const uint32_t place, free_place());
  KVM_TRY_ASSIGN(slab.base, driver_->reserve(n_extents * slab.extent_bytes));
  if (place == slabs_.size()) {
    slabs_.push_back(std::move(slab));
  } else {
    Slab& old = slabs_[place];
    for (uint32_t i = 0; i < old.extents.size(); ++i) {
      if (old.extents[i].mapped) {
        close_extent(old, i);
      }
    }
    driver_->release(old.base, old.extents.size() * old.extent_bytes);
    old = std::move(slab);
  }
  return place;
}

Result<uint32_t> PagePool::free_place() {
  if (slabs_.size() < attention::gpu::kMaxSegments) {
    return static_cast<uint32_t>(slabs_.size());
  }
  const auto unused = std::find_if(slabs_.begin(), slabs_.end(), [](const Slab& slab) {
    return slab.n_users == 0 && std::none_of(slab.extents.begin(), slab.extents.end(),
                                             [](const Extent& of) { return of.n_used != 0; });
  });
  if (unused == slabs_.end()) {
    return Status(KVM_ERR_LIMIT, "pages of " + std::to_string(slabs_.size()) +
                                     " different kinds, the most that a device holds");
  }
  // Work that was enqueued while its pages were in use may still read them.
  KVM_TRY(driver_->synchronize_device());
  return static_cast<uint32_t>(unused - slabs_.begin());
}

Result<PageRef> PagePool::allocate(uint32_t slab_index) {
  Slab& slab = slabs_[slab_index];
  if (slab.free.empty()) {
    KVM_TRY(open_extent(slab));
  }
  const uint32_t slot = slab.free.lowest();
  slab.free.erase(slot);
  slab.refs[slot] = 1;
  const Touched in = slab.touched(slot);
  for (uint32_t i = in.first; i <= in.last; ++i) {
    ++slab.extents[i].n_used;
  }
  ++n_pages_;
  page_bytes_in_use_ += slab.page_bytes;
  return make_page_ref(slab_index, slot);
}

bool PagePool::release(PageRef page) {
  Slab& slab = slabs_[page_slab(page)];
  const uint32_t slot = page_slot(page);
  KVM_ASSERT(slab.refs[slot] > 0);
  if (--slab.refs[slot] != 0) {
    return false;
  }
  slab.free.insert(slot);
  const Touched in = slab.touched(slot);
  for (uint32_t i = in.first; i <= in.last; ++i) {
    --slab.extents[i].n_used;
  }
  --n_pages_;
  page_bytes_in_use_ -= slab.page_bytes;
  return true;
}

Status PagePool::open_extent(Slab& slab) {
  const auto absent = std::find_if(slab.extents.begin(), slab.extents.end(),
                                   [](const Extent& extent) { return !extent.mapped; });
  if (absent == slab.extents.end()) {
    return Status(KVM_ERR_NO_SPACE,
                  "the device's pool of " + std::to_string(capacity_bytes_) + " bytes is full");
  }
  // Of this slab this closes later extents only: all before are in use to their ends.
  KVM_TRY(make_room(slab.extent_bytes));
  const auto index = static_cast<uint32_t>(absent - slab.extents.begin());
  const uint32_t begin = slab.slots_begin(index), end = slab.slots_end(index);
  if (slab.refs.size() < end) {
    slab.refs.resize(end);
    slab.free.resize(end);
  }
  Status mapped = driver_->map(slab.extent_at(index), slab.extent_bytes);
  if (mapped.code() == KVM_ERR_NO_SPACE && used_bytes_ != 0) {
    // Others have the rest of the device: what this pool has to spare may do.
    KVM_TRY_ASSIGN(const uint64_t n_bytes, close_empty(slab.extent_bytes));
    if (n_bytes != 0) {
      mapped = driver_->map(slab.extent_at(index), slab.extent_bytes);
    }
  }
  KVM_TRY(mapped);
  absent->mapped = true;
  used_bytes_ += slab.extent_bytes;
  peak_bytes_ = std::max(peak_bytes_, used_bytes_);
  // The page that begins here, or in the extent before, is whole now: no page is longer.
  for (uint32_t slot = begin; slot < end; ++slot) {
    const Touched in = slab.touched(slot);
    if (slab.extents[in.first].mapped && slab.extents[in.last].mapped) {
      slab.free.insert(slot);
    }
  }
  KVM_ASSERT(!slab.free.empty());
  return Status::ok();
}

Result<uint64_t> PagePool::close_empty(uint64_t size_bytes) {
  uint64_t closed = 0;
  for (Slab& slab : slabs_) {
    // From the end, so that what stays is one run.
    for (auto i = static_cast<uint32_t>(slab.extents.size()); closed < size_bytes && i-- > 0;) {
      if (!slab.extents[i].mapped || slab.extents[i].n_used != 0) {
        continue;
      }
      if (closed == 0) {
        // Work that was enqueued while its pages were in use may still read them.
        KVM_TRY(driver_->synchronize_device());
      }
      close_extent(slab, i);
      closed += slab.extent_bytes;
    }
  }
  return closed;
}

Status PagePool::make_room(uint64_t size_bytes) {
  if (used_bytes_ + size_bytes > capacity_bytes_) {
    KVM_TRY(close_empty(used_bytes_ + size_bytes - capacity_bytes_).status());
  }
  if (used_bytes_ + size_bytes <= capacity_bytes_) {
    return Status::ok();
  }
  return Status(KVM_ERR_NO_SPACE, "the device's pool has " +
                                      std::to_string(capacity_bytes_ - used_bytes_) + " of " +
                                      std::to_string(capacity_bytes_) + " bytes left; needed are " +
                                      std::to_string(size_bytes));
}

void PagePool::close_extent(Slab& slab, uint32_t extent) {
  driver_->unmap(slab.extent_at(extent), slab.extent_bytes);
  slab.extents[extent].mapped = false;
  used_bytes_ -= slab.extent_bytes;
  for (uint32_t slot = slab.slots_begin(extent); slot < slab.slots_end(extent); ++slot) {
    if (slab.free.contains(slot)) {
      slab.free.erase(slot);
    }
  }
}

void PagePool::check_accounts() const {
  uint64_t n_pages = 0, bytes = 0, used = 0;
  for (const Slab& slab : slabs_) {
    std::vector<uint32_t> n_used(slab.extents.size());
    uint32_t n_free = 0;
    for (uint32_t slot = 0; slot < slab.refs.size(); ++slot) {
      const Touched in = slab.touched(slot);
      const bool mapped = slab.extents[in.first].mapped && slab.extents[in.last].mapped;
      if (slab.refs[slot] != 0) {
        ++n_used[in.first];
        n_used[in.last] += in.last != in.first ? 1 : 0;
        ++n_pages;
        bytes += slab.page_bytes;
        KVM_ASSERT(mapped);
      }
      n_free += slab.free.contains(slot) ? 1 : 0;
      KVM_ASSERT(slab.free.contains(slot) == (mapped && slab.refs[slot] == 0));
    }
    KVM_ASSERT(n_free == slab.free.size());
    for (uint32_t i = 0; i < slab.extents.size(); ++i) {
      KVM_ASSERT(n_used[i] == slab.extents[i].n_used);
      used += slab.extents[i].mapped ? slab.extent_bytes : 0;
    }
  }
  KVM_ASSERT(n_pages == n_pages_ && bytes == page_bytes_in_use_ && used == used_bytes_);
  KVM_ASSERT(used_bytes_ <= capacity_bytes_);
}

}  // namespace kvm::device
