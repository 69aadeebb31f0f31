// SPDX-License-Identifier: Apache-2.0
// DiskTier: which segment is written, and when one is begun again.
#include <algorithm>
#include <climits>
#include <mutex>
#include <string>
#include <utility>

#include "base/assert.h"
#include "tiers/disk/disk_tier.h"

namespace kvm::tiers {
namespace {

// How long others are taken in the place of a drive that has refused or failed.
constexpr uint64_t kPassedOverNs = uint64_t{5} * 1'000'000'000;

}  // namespace

std::string DiskTier::path_of(uint32_t segment) const {
  return options_.directories[segment % options_.directories.size()] + "/" +
         segment_file_name(segment);
}

uint32_t DiskTier::n_free_locked() const {
  const uint64_t now = options_.clock->now_ns();
  uint32_t n = n_idle_;
  for (const Drive& drive : drives_) {
    n += now < drive.grows_from_ns ? 0 : drive.n_absent;
  }
  return n;
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

// None: there is none that can be begun.
uint32_t DiskTier::next_segment_locked() const {
  const uint64_t now = options_.clock->now_ns();
  uint32_t best = kNoSegment;
  int best_rank = INT_MAX;
  for (uint32_t i = 0; i < n_segments_ && best_rank != 0; ++i) {
    const Drive& drive = drive_of(i);
    const bool is_absent = segments_[i].state == Segment::State::kAbsent;
    if (is_absent ? now < drive.grows_from_ns : segments_[i].state != Segment::State::kFree) {
      continue;
    }
    // One that has a file costs no more room.
    const int rank = (now < drive.trusted_from_ns ? 2 : 0) + (is_absent ? 1 : 0);
    if (rank < best_rank) {
      best = i;
      best_rank = rank;
    }
  }
  return best;
}

// Returns false where there is none, or where one could not be made: another may do then, as long
// as n_free_locked() is not 0. REQUIRES: none is open.
bool DiskTier::open_next_locked(std::unique_lock<std::mutex>& lock) {
  const uint32_t next = next_segment_locked();
  if (next == kNoSegment) {
    return false;
  }
  Segment& segment = segments_[next];
  if (segment.state == Segment::State::kAbsent) {
    // Nobody but this thread makes segments of absent ones.
    lock.unlock();
    Status status = io_->create(next, path_of(next), options_.segment_bytes);
    lock.lock();
    if (!status.is_ok()) {
      drive_of(next).grows_from_ns = options_.clock->now_ns() + kPassedOverNs;
      last_refusal_ = std::move(status);
      stats_.n_io_errors += last_refusal_.code() == KVM_ERR_NO_SPACE ? 0 : 1;
      return false;
    }
    --drive_of(next).n_absent;
    ++stats_.n_segments;
    stats_.physical_bytes += options_.segment_bytes;
  } else {
    --n_idle_;
  }
  segment.state = Segment::State::kOpen;
  segment.n_failed_moves = 0;
  segment.moves_from_ns = 0;
  segment.end_bytes = 0;
  ++segment.generation;
  open_ = next;
  return true;
}

// A write to the segment has failed: what follows goes to other drives, where they have room.
void DiskTier::turn_from_drive_locked(uint32_t segment) {
  Drive& drive = drive_of(segment);
  drive.trusted_from_ns = options_.clock->now_ns() + kPassedOverNs;
  if (open_ == kNoSegment || &drive_of(open_) != &drive || n_free_locked() < 2) {
    return;
  }
  const uint32_t next = next_segment_locked();
  if (next != kNoSegment && options_.clock->now_ns() >= drive_of(next).trusted_from_ns) {
    segments_[open_].end_bytes = options_.segment_bytes;  // the rest is dead, to be won back
    seal_open_locked();
  }
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
