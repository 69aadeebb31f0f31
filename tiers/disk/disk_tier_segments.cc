// SPDX-License-Identifier: Apache-2.0
// DiskTier: which segment is written, and when one is begun again.
#include <algorithm>
#include <mutex>
#include <string>

#include "base/assert.h"
#include "tiers/disk/disk_tier.h"

namespace kvm::tiers {

std::string DiskTier::path_of(uint32_t segment) const {
  return options_.directories[segment % options_.directories.size()] + "/" +
         segment_file_name(segment);
}

uint32_t DiskTier::n_free_locked() const {
  return n_idle_ + (can_grow_ ? n_segments_ - static_cast<uint32_t>(stats_.n_segments) : 0);
}

bool DiskTier::has_room_locked(uint64_t bytes) const {
  return open_ != kNoSegment &&
         std::max<uint64_t>(segments_[open_].end_bytes, kSegmentHeaderBytes) + bytes <=
             options_.segment_bytes;
}

void DiskTier::seal_open_locked() {
  if (open_ != kNoSegment) {
    const uint32_t sealed = open_;
    segments_[sealed].state = Segment::State::kSealed;
    open_ = kNoSegment;
    recycle_if_empty_locked(sealed);
  }
}

// REQUIRES: none is open.
bool DiskTier::open_next_locked(std::unique_lock<std::mutex>& lock) {
  // One that has a file costs no more room.
  uint32_t next = kNoSegment;
  for (const Segment::State state : {Segment::State::kFree, Segment::State::kAbsent}) {
    for (uint32_t i = 0; i < n_segments_ && next == kNoSegment; ++i) {
      next = segments_[i].state == state ? i : kNoSegment;
    }
  }
  if (next == kNoSegment) {
    return false;
  }
  Segment& segment = segments_[next];
  if (segment.state == Segment::State::kAbsent) {
    // Nobody but this thread makes segments of absent ones.
    lock.unlock();
    const Status status = io_->create(next, path_of(next), options_.segment_bytes);
    lock.lock();
    if (!status.is_ok()) {
      can_grow_ = false;
      stats_.n_io_errors += status.code() == KVM_ERR_NO_SPACE ? 0 : 1;
      return false;
    }
    ++stats_.n_segments;
    stats_.physical_bytes += options_.segment_bytes;
  } else {
    --n_idle_;
  }
  segment.state = Segment::State::kOpen;
  segment.is_pinned = false;
  segment.end_bytes = 0;
  ++segment.generation;
  open_ = next;
  return true;
}

DiskTier::Room DiskTier::make_room_locked(std::unique_lock<std::mutex>& lock, uint64_t bytes) {
  // The last free segment is for pages that move: without it none could be emptied.
  while (!has_room_locked(bytes) && n_free_locked() >= 2) {
    seal_open_locked();
    open_next_locked(lock);
  }
  if (has_room_locked(bytes) && n_free_locked() >= 1) {
    return Room::kReady;
  }
  if (move_.victim != kNoSegment || begin_victim_locked(options_.segment_bytes / 8)) {
    return Room::kWait;
  }
  // Nothing else may be worth emptying than the one that is open and full.
  if (open_ != kNoSegment && n_free_locked() >= 1) {
    seal_open_locked();
    if (n_free_locked() >= 2 || begin_victim_locked(options_.segment_bytes / 8)) {
      has_news_ = true;
      return Room::kWait;
    }
  }
  return is_draining_locked() ? Room::kWait : Room::kNone;
}

bool DiskTier::is_draining_locked() const {
  return std::any_of(segments_.begin(), segments_.end(), [](const Segment& segment) {
    // A write in flight may yet turn out to leave nothing, or something to be moved.
    return segment.n_writes != 0 || (segment.live_bytes == 0 && segment.n_transfers != 0);
  });
}

void DiskTier::recycle_if_empty_locked(uint32_t index) {
  Segment& segment = segments_[index];
  // One that pages are moved from is looked at until that ends.
  if (segment.live_bytes != 0 || segment.n_transfers != 0 || index == move_.victim ||
      (segment.state != Segment::State::kSealed && segment.state != Segment::State::kOpen)) {
    return;
  }
  if (index == open_) {
    open_ = kNoSegment;
  }
  segment.state = Segment::State::kFree;
  segment.places = {};
  ++n_idle_;
  has_news_ = true;
}

}  // namespace kvm::tiers
