// SPDX-License-Identifier: Apache-2.0
#include "tiers/host/ring_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/assert.h"
#include "base/reserve.h"
#include "base/round.h"
#include "tiers/slab_class.h"

namespace kvm::tiers {

RingMemory::~RingMemory() {
  KVM_ASSERT(n_taken_ == 0);
  if (base_ != nullptr) {
    memory_->release(base_, kMaxBytes);
    budget_->uncharge(size_bytes_);
  }
}

Status RingMemory::grow_to(uint64_t size_bytes) {
  size_bytes = round_up(size_bytes, kExtentBytes);
  if (size_bytes <= size_bytes_) {
    return Status::ok();
  }
  if (size_bytes > kMaxBytes) {
    return {KVM_ERR_LIMIT, fmt::format("pages that come from the disk need {} bytes of memory "
                                       "to pass through; at most {} are allowed",
                                       size_bytes, kMaxBytes)};
  }
  if (size_bytes >= budget_->capacity_bytes()) {
    return {KVM_ERR_NO_SPACE,
            fmt::format("pages that come from the disk need {} bytes of memory to pass through, "
                        "which leaves nothing of the capacity of {} for others",
                        size_bytes, budget_->capacity_bytes())};
  }
  const uint64_t more = size_bytes - size_bytes_;
  reserve_growing(free_, free_.size() + 1);
  if (!budget_->charge(more)) {
    return {KVM_ERR_NO_SPACE,
            fmt::format("pages that come from the disk need {} more bytes of memory to pass "
                        "through; {} of the capacity of {} are free",
                        more, budget_->free_bytes(), budget_->capacity_bytes())};
  }
  if (base_ == nullptr) {
    base_ = memory_->reserve(kMaxBytes);
  }
  if (base_ == nullptr || !memory_->open(base_ + size_bytes_, more)) {
    const int error = errno;
    budget_->uncharge(more);
    return {KVM_ERR_NO_MEMORY, fmt::format("the system refused {} bytes for pages that come from "
                                           "the disk to pass through: {}",
                                           more, std::strerror(error))};
  }
  if (!free_.empty() && free_.back().end == size_bytes_) {
    free_.back().end = size_bytes;
  } else {
    free_.push_back({size_bytes_, size_bytes});
  }
  size_bytes_ = size_bytes;
  return Status::ok();
}

uint64_t RingMemory::free_bytes() const {
  uint64_t sum = 0;
  for (const Stretch& stretch : free_) {
    sum += stretch.end - stretch.begin;
  }
  return sum;
}

std::byte* RingMemory::take(uint64_t size_bytes) {
  KVM_ASSERT(size_bytes != 0);
  size_bytes = round_up(size_bytes, kAlign);
  const auto found = std::ranges::find_if(
      free_, [&](const Stretch& stretch) { return stretch.end - stretch.begin >= size_bytes; });
  if (found == free_.end()) {
    return nullptr;
  }
  const auto at = found - free_.begin();
  // So many stretches at most are free when all rings are out: giving back needs no memory.
  reserve_growing(free_, n_taken_ + 2);
  Stretch& stretch = free_[static_cast<size_t>(at)];
  std::byte* data = base_ + stretch.begin;
  stretch.begin += size_bytes;
  if (stretch.begin == stretch.end) {
    free_.erase(free_.begin() + at);
  }
  ++n_taken_;
  return data;
}

void RingMemory::give_back(std::byte* data, uint64_t size_bytes) {
  const auto begin = static_cast<uint64_t>(data - base_);
  const uint64_t end = begin + round_up(size_bytes, kAlign);
  KVM_ASSERT(n_taken_ != 0 && end <= size_bytes_);
  --n_taken_;
  auto next = std::ranges::find_if(free_, [&](const Stretch& s) { return s.begin >= end; });
  const bool joins_next = next != free_.end() && next->begin == end;
  const bool joins_before = next != free_.begin() && std::prev(next)->end == begin;
  KVM_ASSERT(next == free_.begin() || std::prev(next)->end <= begin);
  if (joins_next && joins_before) {
    std::prev(next)->end = next->end;
    free_.erase(next);
  } else if (joins_next) {
    next->begin = begin;
  } else if (joins_before) {
    std::prev(next)->end = end;
  } else {
    free_.insert(next, {begin, end});
  }
}

}  // namespace kvm::tiers
