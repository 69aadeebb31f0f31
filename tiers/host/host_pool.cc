// SPDX-License-Identifier: Apache-2.0
#include "tiers/host/host_pool.h"

#include <algorithm>
#include <string>
#include <utility>

namespace kvm::tiers {
namespace {

// A slab's reservation of addresses: all slabs together stay well inside the 128 TiB of a process.
constexpr uint64_t kMaxReservationBytes = uint64_t{64} << 30;

uint64_t extents_for(uint64_t size_bytes) {
  return size_bytes / kExtentBytes + (size_bytes % kExtentBytes != 0 ? 1 : 0);
}

Status no_space(const MemoryBudget& budget) {
  return Status(KVM_ERR_NO_SPACE, "host memory: an extent of " + std::to_string(kExtentBytes) +
                                      " bytes is needed, " + std::to_string(budget.used_bytes()) +
                                      " of " + std::to_string(budget.capacity_bytes()) +
                                      " bytes are in use");
}

}  // namespace

HostPool::HostPool(MemoryBudget* budget, uint64_t cached_bytes, PageMemory* memory)
    : budget_(budget), max_cached_(cached_bytes / kExtentBytes), memory_(memory) {}

HostPool::~HostPool() { budget_->uncharge(extent_bytes()); }

Result<FrameRef> HostPool::allocate(const SlabClass& slab_class, uint32_t owner) {
  KVM_TRY_ASSIGN(const uint32_t index, slab_with_room(slab_class));
  HostSlab& slab = *slabs_[index];
  const uint64_t n_cached_before = slab.n_cached();
  const uint32_t slot = slab.take(owner);
  n_cached_ -= n_cached_before - slab.n_cached();
  ++n_frames_;
  frame_bytes_ += slab.page_bytes();
  share_bytes_ += kExtentBytes / slab.frames_per_extent();
  return FrameRef{make_page_ref(index, slot)};
}

void HostPool::free(FrameRef frame) {
  HostSlab& slab = *slabs_[page_slab(frame.number)];
  const uint64_t n_cached_before = slab.n_cached();
  slab.free(page_slot(frame.number));
  --n_frames_;
  frame_bytes_ -= slab.page_bytes();
  share_bytes_ -= kExtentBytes / slab.frames_per_extent();
  n_cached_ += slab.n_cached() - n_cached_before;
}

Result<uint32_t> HostPool::slab_with_room(const SlabClass& slab_class) {
  uint32_t growable = kMaxSlabs;
  for (uint32_t i = 0; i < n_slabs_; ++i) {
    if (slabs_[i] == nullptr || slabs_[i]->slab_class() != slab_class) {
      continue;
    }
    if (slabs_[i]->has_free_frame()) {
      return i;
    }
    if (growable == kMaxSlabs && slabs_[i]->has_absent_extent()) {
      growable = i;
    }
  }
  if (growable == kMaxSlabs) {
    // Room first: a slab that stays empty would be left behind.
    if (!make_room(kExtentBytes)) {
      return no_space(*budget_);
    }
    KVM_TRY_ASSIGN(growable, make_slab(slab_class));
  }
  KVM_TRY(open_extent(*slabs_[growable]));
  return growable;
}

Result<uint32_t> HostPool::make_slab(const SlabClass& slab_class) {
  uint32_t index = n_slabs_;
  if (n_slabs_ == kMaxSlabs) {
    // Numbers have run out: take that of a slab without frames in use.
    const auto empty = std::find_if(slabs_.begin(), slabs_.end(), [](const auto& slab) {
      return slab == nullptr || slab->n_frames() == 0;
    });
    if (empty == slabs_.end()) {
      return Status(KVM_ERR_NO_SPACE, "host memory: all " + std::to_string(kMaxSlabs) +
                                          " slabs hold pages of other kinds");
    }
    index = static_cast<uint32_t>(empty - slabs_.begin());
    while (*empty != nullptr && (*empty)->n_cached() > 0) {
      close_cached_extent(**empty);
    }
    empty->reset();
  }
  const uint64_t max_extents =
      extents_for(std::min(budget_->capacity_bytes(), kMaxReservationBytes));
  KVM_TRY_ASSIGN(slabs_[index], HostSlab::create(slab_class, max_extents, memory_));
  n_slabs_ = std::max(n_slabs_, index + 1);
  return index;
}

Status HostPool::open_extent(HostSlab& slab) {
  if (!make_room(kExtentBytes)) {
    return no_space(*budget_);
  }
  KVM_ASSERT(budget_->charge(kExtentBytes));
  const Status status = slab.add_extent();
  if (!status.is_ok()) {
    budget_->uncharge(kExtentBytes);
    return status;
  }
  ++n_extents_;
  ++n_cached_;
  peak_extents_ = std::max(peak_extents_, n_extents_);
  return Status::ok();
}

void HostPool::close_cached_extent(HostSlab& slab) {
  slab.remove_extent();
  --n_extents_;
  --n_cached_;
  budget_->uncharge(kExtentBytes);
}

std::optional<HostPool::ExtentRef> HostPool::close_thin_extent() {
  for (uint32_t i = 0; i < n_slabs_; ++i) {
    if (slabs_[i] == nullptr || slabs_[i]->slab_class().index_bytes != 0) {
      continue;
    }
    HostSlab& slab = *slabs_[i];
    const uint64_t least = std::max(2 * slab.frames_per_extent(), slab.n_frames() / kMaxSpare);
    const uint32_t extent = slab.n_spare() < least ? HostSlab::kNoExtent : slab.thinnest_extent();
    if (extent != HostSlab::kNoExtent) {
      slab.close_extent(extent);
      return ExtentRef{i, extent};
    }
  }
  return std::nullopt;
}

void HostPool::reopen(ExtentRef extent) {
  if (slabs_[extent.slab] != nullptr) {
    slabs_[extent.slab]->reopen_extent(extent.extent);
  }
}

bool HostPool::reopen_closed() {
  bool has_any = false;
  for (uint32_t i = 0; i < n_slabs_; ++i) {
    has_any |= slabs_[i] != nullptr && slabs_[i]->reopen_all();
  }
  return has_any;
}

bool HostPool::make_room(uint64_t size_bytes) {
  for (uint32_t i = 0; i < n_slabs_ && budget_->free_bytes() < size_bytes; ++i) {
    while (slabs_[i] != nullptr && slabs_[i]->n_cached() > 0 &&
           budget_->free_bytes() < size_bytes) {
      close_cached_extent(*slabs_[i]);
    }
  }
  return budget_->free_bytes() >= size_bytes;
}

bool HostPool::trim(uint64_t max_extents) {
  for (uint32_t i = 0; i < n_slabs_ && max_extents > 0 && n_cached_ > max_cached_; ++i) {
    while (slabs_[i] != nullptr && slabs_[i]->n_cached() > 0 && max_extents > 0 &&
           n_cached_ > max_cached_) {
      close_cached_extent(*slabs_[i]);
      --max_extents;
    }
  }
  return n_cached_ > max_cached_;
}

void HostPool::check_accounts() const {
  uint64_t n_frames = 0;
  uint64_t page_bytes = 0;
  uint64_t share_bytes = 0;
  uint64_t n_extents = 0;
  uint64_t n_cached = 0;
  for (uint32_t i = 0; i < n_slabs_; ++i) {
    if (slabs_[i] == nullptr) {
      continue;
    }
    slabs_[i]->check_accounts();
    n_frames += slabs_[i]->n_frames();
    page_bytes += slabs_[i]->n_frames() * slabs_[i]->page_bytes();
    share_bytes += slabs_[i]->n_frames() * (kExtentBytes / slabs_[i]->frames_per_extent());
    n_extents += slabs_[i]->n_open() + slabs_[i]->n_cached();
    n_cached += slabs_[i]->n_cached();
  }
  KVM_ASSERT(n_frames == n_frames_ && page_bytes == frame_bytes_);
  KVM_ASSERT(share_bytes == share_bytes_);
  KVM_ASSERT(n_extents == n_extents_ && n_cached == n_cached_);
  KVM_ASSERT(extent_bytes() <= budget_->used_bytes());
}

}  // namespace kvm::tiers
