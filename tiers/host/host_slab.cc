// SPDX-License-Identifier: Apache-2.0
#include "tiers/host/host_slab.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <new>
#include <string>

#if defined(__SANITIZE_ADDRESS__)
#define KVM_HAS_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVM_HAS_ASAN 1
#endif
#endif
#if defined(KVM_HAS_ASAN)
#include <sanitizer/asan_interface.h>
#endif

namespace kvm::tiers {
namespace {

// Free frames are out of bounds for AddressSanitizer, so that a task that still uses one is found.
void poison([[maybe_unused]] std::byte* data, [[maybe_unused]] uint64_t size_bytes) {
#if defined(KVM_HAS_ASAN)
  __asan_poison_memory_region(data, size_bytes);
#endif
}

void unpoison([[maybe_unused]] std::byte* data, [[maybe_unused]] uint64_t size_bytes) {
#if defined(KVM_HAS_ASAN)
  __asan_unpoison_memory_region(data, size_bytes);
#endif
}

// LIMIT: of extents that become accessible together: they take no memory before they are used.
constexpr uint64_t kOpenedTogether = 32;

std::string os_error() { return std::string(std::strerror(errno)); }

}  // namespace

HostSlab::HostSlab(const SlabClass& slab_class, uint64_t max_extents, PageMemory* memory)
    : slab_class_(slab_class),
      page_bytes_(slab_class.page_bytes()),
      frames_per_extent_(static_cast<uint32_t>(kExtentBytes / page_bytes_)),
      slot_shift_(static_cast<uint32_t>(std::bit_width(frames_per_extent_ - 1))),
      slot_mask_((1u << slot_shift_) - 1),
      max_extents_(std::min<uint64_t>(max_extents, (1u << kSlotBits) >> slot_shift_)),
      memory_(memory) {}

Result<std::unique_ptr<HostSlab>> HostSlab::create(const SlabClass& slab_class,
                                                   uint64_t max_extents, PageMemory* memory) {
  KVM_ASSERT(slab_class.page_bytes() > 0 && slab_class.page_bytes() <= kExtentBytes);
  KVM_ASSERT(kExtentBytes / slab_class.page_bytes() < kUsed);
  std::unique_ptr<HostSlab> slab(new HostSlab(slab_class, max_extents, memory));
  // One extent more, to begin at a multiple of its size, and one on each side that stays without
  // access: no page has another mapping for a neighbour. Addresses are all that costs.
  const uint64_t size_bytes = (slab->max_extents_ + 3) * kExtentBytes;
  slab->mapping_ = memory->reserve(size_bytes);
  if (slab->mapping_ == nullptr) {
    return Status(KVM_ERR_NO_MEMORY, "reserving " + std::to_string(size_bytes) +
                                         " bytes of address space: " + os_error());
  }
  slab->mapping_bytes_ = size_bytes;
  const uintptr_t address = reinterpret_cast<uintptr_t>(slab->mapping_);
  slab->base_ = slab->mapping_ + (-address & (kExtentBytes - 1)) + kExtentBytes;
  return slab;
}

HostSlab::~HostSlab() {
  if (mapping_ != nullptr) {
    unpoison(base_, n_accessible_ * kExtentBytes);
    memory_->release(mapping_, mapping_bytes_);
  }
}

void HostSlab::list_add(std::vector<uint32_t>* list, uint32_t extent) {
  extents_[extent].list_index = static_cast<uint32_t>(list->size());
  list->push_back(extent);
}

void HostSlab::list_remove(std::vector<uint32_t>* list, uint32_t extent) {
  const uint32_t index = extents_[extent].list_index;
  const uint32_t last = list->back();
  (*list)[index] = last;
  extents_[last].list_index = index;
  list->pop_back();
}

void HostSlab::reserve_books(size_t n_extents) {
  if (n_extents <= extents_.capacity()) {
    return;
  }
  const size_t n = 2 * n_extents;
  next_free_.reserve(n << slot_shift_);
  owners_.reserve(n << slot_shift_);
  partial_.reserve(n);
  cached_.reserve(n);
  absent_.reserve(n);
  extents_.reserve(n);  // last: it stands for the others
}

// They are accessible from here on, even while absent: one mapping that only ever grows. As many as
// there are, up to a bound: the system waits for whoever touches memory of the mapping. Fewer,
// where it refuses so many (RLIMIT_DATA, and overcommit, count them).
bool HostSlab::open_more() {
  if (extents_.size() < n_accessible_) {
    return true;
  }
  uint64_t n = std::min(
      {std::max<uint64_t>(1, n_accessible_), kOpenedTogether, max_extents_ - n_accessible_});
  std::byte* const data = extent_data(static_cast<uint32_t>(n_accessible_));
  while (!memory_->open(data, n * kExtentBytes)) {
    if (n == 1) {
      return false;
    }
    n /= 2;
  }
  poison(data, n * kExtentBytes);
  n_accessible_ += n;
  return true;
}

Status HostSlab::add_extent() {
  KVM_ASSERT(has_absent_extent());
  uint32_t extent = static_cast<uint32_t>(extents_.size());
  if (!absent_.empty()) {
    extent = absent_.back();
    absent_.pop_back();
  } else {
    try {
      reserve_books(extents_.size() + 1);
    } catch (const std::bad_alloc&) {
      return Status::fixed(KVM_ERR_NO_MEMORY, "the machine refused memory for the books of pages");
    }
    if (!open_more()) {
      return Status(KVM_ERR_NO_MEMORY, "making an extent accessible: " + os_error());
    }
    extents_.emplace_back();
    next_free_.resize(extents_.size() << slot_shift_);
    owners_.resize(extents_.size() << slot_shift_);
  }
  Extent& record = extents_[extent];
  for (uint32_t frame = 0; frame < frames_per_extent_; ++frame) {
    next_free_[(extent << slot_shift_) + frame] =
        frame + 1 < frames_per_extent_ ? static_cast<uint16_t>(frame + 1) : kNoSlot;
  }
  record.free_head = 0;
  record.n_used = 0;
  record.state = Extent::kCached;
  list_add(&cached_, extent);
  memory_->expect(extent_data(extent));
  return Status::ok();
}

void HostSlab::remove_extent() {
  const uint32_t extent = cached_.back();
  list_remove(&cached_, extent);
  extents_[extent].state = Extent::kAbsent;
  absent_.push_back(extent);
  memory_->discard(extent_data(extent), kExtentBytes);
}

uint32_t HostSlab::take(uint32_t owner) {
  KVM_ASSERT(has_free_frame());
  if (partial_.empty()) {
    const uint32_t opened = cached_.back();
    list_remove(&cached_, opened);
    extents_[opened].state = Extent::kOpen;
    list_add(&partial_, opened);
    ++n_open_;
  }
  const uint32_t extent = partial_.back();
  Extent& record = extents_[extent];
  const uint32_t slot = (extent << slot_shift_) + record.free_head;
  record.free_head = next_free_[slot];
  ++record.n_used;
  if (record.free_head == kNoSlot) {
    list_remove(&partial_, extent);
  }
  next_free_[slot] = kUsed;
  owners_[slot] = owner;
  ++n_frames_;
  unpoison(frame_data(slot), page_bytes_);
  return slot;
}

void HostSlab::free(uint32_t slot) {
  KVM_ASSERT(is_used(slot));
  const uint32_t extent = slot >> slot_shift_;
  Extent& record = extents_[extent];
  if (record.free_head == kNoSlot && !record.is_closed) {
    list_add(&partial_, extent);
  }
  next_free_[slot] = record.free_head;
  record.free_head = static_cast<uint16_t>(slot & slot_mask_);
  --record.n_used;
  --n_frames_;
  poison(frame_data(slot), page_bytes_);
  n_closed_free_ += record.is_closed ? 1 : 0;
  if (record.n_used == 0) {
    if (record.is_closed) {
      record.is_closed = false;
      --n_closed_;
      n_closed_free_ -= frames_per_extent_;
    } else {
      list_remove(&partial_, extent);
    }
    record.state = Extent::kCached;
    list_add(&cached_, extent);
    --n_open_;
  }
}

uint32_t HostSlab::thinnest_extent() {
  uint32_t thinnest = kNoExtent;
  for (size_t n = std::min(kLooked, partial_.size()); n > 0; --n) {
    next_looked_ = next_looked_ + 1 < partial_.size() ? next_looked_ + 1 : 0;
    const uint32_t extent = partial_[next_looked_];
    if (thinnest == kNoExtent || extents_[extent].n_used < extents_[thinnest].n_used) {
      thinnest = extent;
    }
  }
  return thinnest;
}

void HostSlab::close_extent(uint32_t extent) {
  Extent& record = extents_[extent];
  KVM_ASSERT(record.state == Extent::kOpen && !record.is_closed);
  if (record.free_head != kNoSlot) {
    const uint32_t filled = partial_.back();
    list_remove(&partial_, extent);
    if (filled != extent) {  // it goes on being the one that is filled
      list_remove(&partial_, filled);
      list_add(&partial_, filled);
    }
  }
  record.is_closed = true;
  ++n_closed_;
  n_closed_free_ += frames_per_extent_ - record.n_used;
}

void HostSlab::reopen_extent(uint32_t extent) {
  if (extent >= extents_.size() || !extents_[extent].is_closed) {
    return;
  }
  Extent& record = extents_[extent];
  record.is_closed = false;
  --n_closed_;
  n_closed_free_ -= frames_per_extent_ - record.n_used;
  if (record.free_head != kNoSlot) {
    list_add(&partial_, extent);
  }
}

bool HostSlab::reopen_all() {
  const bool has_any = n_closed_ != 0;
  for (uint32_t extent = 0; n_closed_ != 0; ++extent) {
    reopen_extent(extent);
  }
  return has_any;
}

void HostSlab::check_accounts() const {
  uint64_t n_frames = 0;
  uint64_t n_open = 0;
  uint64_t n_cached = 0;
  uint64_t n_partial = 0;
  uint64_t n_closed_free = 0;
  for (uint32_t extent = 0; extent < extents_.size(); ++extent) {
    const Extent& record = extents_[extent];
    uint32_t n_used = 0;
    for (uint32_t frame = 0; frame < frames_per_extent_; ++frame) {
      n_used += is_used((extent << slot_shift_) + frame) ? 1 : 0;
    }
    uint32_t n_free = 0;
    for (uint32_t frame = record.free_head; record.state != Extent::kAbsent && frame != kNoSlot;
         frame = next_free_[(extent << slot_shift_) + frame]) {
      KVM_ASSERT(frame < frames_per_extent_);
      ++n_free;
    }
    KVM_ASSERT(record.state == Extent::kAbsent ? n_used == 0
                                               : n_used + n_free == frames_per_extent_);
    KVM_ASSERT((record.state == Extent::kOpen) == (n_used > 0));
    KVM_ASSERT(record.state == Extent::kAbsent || record.n_used == n_used);
    KVM_ASSERT(!record.is_closed || record.state == Extent::kOpen);
    n_closed_free += record.is_closed ? n_free : 0;
    n_frames += n_used;
    n_open += record.state == Extent::kOpen ? 1 : 0;
    n_cached += record.state == Extent::kCached ? 1 : 0;
    n_partial += record.state == Extent::kOpen && n_free > 0 && !record.is_closed ? 1 : 0;
  }
  KVM_ASSERT(n_frames == n_frames_ && n_open == n_open_ && n_closed_free == n_closed_free_);
  KVM_ASSERT(n_cached == cached_.size() && n_partial == partial_.size());
  KVM_ASSERT(absent_.size() == extents_.size() - n_open - n_cached);
}

}  // namespace kvm::tiers
