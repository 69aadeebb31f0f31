// SPDX-License-Identifier: Apache-2.0
#include "device/page_pool.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "base/assert.h"
#include "base/round.h"

namespace kvm::device {

using tiers::make_page_ref;
using tiers::page_slab;
using tiers::page_slot;
using tiers::PageRef;

PagePool::PagePool(Driver* driver, uint64_t capacity_bytes)
    : driver_(driver), capacity_bytes_(capacity_bytes) {}

PagePool::~PagePool() {
  for (Slab& slab : slabs_) {
    for (uint32_t i = 0; i < slab.extents.size(); ++i) {
      if (slab.extents[i].mapped) {
        driver_->unmap(slab.base + i * slab.extent_bytes, slab.extent_bytes);
      }
    }
    driver_->release(slab.base, slab.extents.size() * slab.extent_bytes);
  }
}

Result<uint32_t> PagePool::open_slab(const tiers::SlabClass& slab_class, uint32_t n_parts) {
  for (uint32_t i = 0; i < slabs_.size(); ++i) {
    if (slabs_[i].slab_class == slab_class && slabs_[i].n_parts == n_parts) {
      return i;
    }
  }
  if (slabs_.size() == attention::gpu::kMaxSegments) {
    return Status(KVM_ERR_LIMIT, "pages of " + std::to_string(slabs_.size()) +
                                     " different kinds, the most that a device holds");
  }
  Slab slab;
  slab.slab_class = slab_class;
  slab.n_parts = n_parts;
  slab.page_bytes = slab_class.page_bytes() * n_parts;
  const uint64_t unit = std::lcm(driver_->facts().granularity_bytes, slab.page_bytes);
  slab.extent_bytes =
      unit * std::max<uint64_t>(1, std::min(kExtentTarget, capacity_bytes_ / 64) / unit);
  slab.extent_pages = static_cast<uint32_t>(slab.extent_bytes / slab.page_bytes);
  const uint64_t n_extents = std::min(capacity_bytes_ / slab.extent_bytes,
                                      (uint64_t{1} << tiers::kSlotBits) / slab.extent_pages);
  if (n_extents == 0) {
    return Status(KVM_ERR_NO_SPACE, "pages of " + std::to_string(slab.page_bytes) +
                                        " bytes come in extents of " +
                                        std::to_string(slab.extent_bytes) + "; the pool has " +
                                        std::to_string(capacity_bytes_) + " bytes");
  }
  KVM_TRY_ASSIGN(slab.base, driver_->reserve(n_extents * slab.extent_bytes));
  slab.extents.resize(n_extents);
  slabs_.push_back(std::move(slab));
  return static_cast<uint32_t>(slabs_.size() - 1);
}

Result<PageRef> PagePool::allocate(uint32_t slab_index) {
  Slab& slab = slabs_[slab_index];
  if (slab.free.empty()) {
    KVM_TRY(open_extent(slab));
  }
  const uint32_t slot = slab.free.top();
  slab.free.pop();
  slab.refs[slot] = 1;
  ++slab.extents[slot / slab.extent_pages].n_used;
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
  slab.free.push(slot);
  --slab.extents[slot / slab.extent_pages].n_used;
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
  KVM_TRY(make_room(slab, slab.extent_bytes));
  const auto index = static_cast<uint32_t>(absent - slab.extents.begin());
  const uint32_t begin = index * slab.extent_pages;
  slab.refs.resize(std::max<size_t>(slab.refs.size(), begin + slab.extent_pages));
  KVM_TRY(driver_->map(slab.base + index * slab.extent_bytes, slab.extent_bytes));
  absent->mapped = true;
  used_bytes_ += slab.extent_bytes;
  peak_bytes_ = std::max(peak_bytes_, used_bytes_);
  for (uint32_t i = 0; i < slab.extent_pages; ++i) {
    slab.free.push(begin + i);
  }
  return Status::ok();
}

Status PagePool::make_room(const Slab& but, uint64_t size_bytes) {
  bool waited = false;
  for (Slab& slab : slabs_) {
    for (uint32_t i = 0; i < slab.extents.size(); ++i) {
      if (used_bytes_ + size_bytes <= capacity_bytes_) {
        return Status::ok();
      }
      if (&slab == &but || !slab.extents[i].mapped || slab.extents[i].n_used != 0) {
        continue;
      }
      if (!waited) {
        // Work that was enqueued while its pages were in use may still read them.
        KVM_TRY(driver_->synchronize_device());
        waited = true;
      }
      close_extent(slab, i);
    }
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
  driver_->unmap(slab.base + extent * slab.extent_bytes, slab.extent_bytes);
  slab.extents[extent].mapped = false;
  used_bytes_ -= slab.extent_bytes;
  decltype(slab.free) kept;
  for (; !slab.free.empty(); slab.free.pop()) {
    if (slab.free.top() / slab.extent_pages != extent) {
      kept.push(slab.free.top());
    }
  }
  slab.free = std::move(kept);
}

void PagePool::check_accounts() const {
  uint64_t n_pages = 0, bytes = 0, used = 0;
  for (const Slab& slab : slabs_) {
    uint64_t n_mapped = 0;
    for (uint32_t i = 0; i < slab.extents.size(); ++i) {
      uint32_t n_used = 0;
      for (uint32_t slot = i * slab.extent_pages;
           slot < std::min<size_t>(slab.refs.size(), (i + 1) * slab.extent_pages); ++slot) {
        n_used += slab.refs[slot] != 0 ? 1 : 0;
      }
      KVM_ASSERT(n_used == slab.extents[i].n_used);
      KVM_ASSERT(n_used == 0 || slab.extents[i].mapped);
      n_pages += n_used;
      bytes += n_used * slab.page_bytes;
      n_mapped += slab.extents[i].mapped ? 1 : 0;
    }
    used += n_mapped * slab.extent_bytes;
  }
  KVM_ASSERT(n_pages == n_pages_ && bytes == page_bytes_in_use_ && used == used_bytes_);
  KVM_ASSERT(used_bytes_ <= capacity_bytes_);
}

}  // namespace kvm::device
