// SPDX-License-Identifier: Apache-2.0
// DiskTier: which segment is written, and when one is begun again.
#include <algorithm>
#include <climits>
#include <mutex>
#include <new>
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
  return options_.directories[segments_[segment].directory] + "/" +
         segment_file_name(segments_[segment].filling.number);
}

uint32_t DiskTier::n_free_locked() const {
  const uint64_t now = options_.clock->now_ns();
  uint32_t n = n_idle_;
  for (const Drive& drive : drives_) {
    n += now < drive.grows_from_ns ? 0 : drive.n_absent;
  }
  return n;
}

uint64_t DiskTier::room_end(uint64_t n_records) const {
  return options_.segment_bytes - table_bytes(n_records);
}

bool DiskTier::has_room_locked(uint64_t bytes, uint64_t n_records) const {
  return open_ != kNoSegment &&
         std::max<uint64_t>(segments_[open_].end_bytes, kSegmentHeaderBytes) + bytes <=
             room_end(segments_[open_].places.size() + n_records);
}

void DiskTier::seal_open_locked() {
  if (open_ != kNoSegment) {
    const uint32_t sealed = open_;
    segments_[sealed].state = Segment::State::kSealed;
    segments_[sealed].wants_table = true;
    are_tables_wanted_ = true;
    open_ = kNoSegment;
    recycle_if_empty_locked(sealed);
  }
}

// None: there is none that can be begun.
uint32_t DiskTier::next_segment_locked() const {
  const uint64_t now = options_.clock->now_ns();
  uint32_t best = kNoSegment;
  int best_rank = INT_MAX;
  for (uint32_t i = 0; i < segments_.size() && best_rank != 0; ++i) {
    const Drive& drive = drive_of(i);
    const bool is_absent = segments_[i].state == Segment::State::kAbsent && i < n_segments_;
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
    segment.is_new = true;
  } else {
    --n_idle_;
  }
  segment.state = Segment::State::kOpen;
  segment.n_failed_moves = 0;
  segment.moves_from_ns = 0;
  segment.end_bytes = 0;
  segment.header = Segment::Header::kNone;
  segment.is_dirty = false;
  segment.filling.run_id = run_id_;
  ++segment.filling.generation;
  segment.waits_for_sync = false;
  segment.wants_table = false;
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
  while (!has_room_locked(bytes, 1) && n_free_locked() >= 2) {
    seal_open_locked();
    open_next_locked(lock);
  }
  if (has_room_locked(bytes, 1) && n_free_locked() >= 1) {
    return Room::kReady;
  }
  if (move_.victim != kNoSegment || begin_victim_locked(options_.segment_bytes / 8) ||
      is_freed_by_sync_locked()) {
    return Room::kWait;
  }
  // Nothing else may be worth emptying than the one that is open and full.
  if (open_ != kNoSegment && n_free_locked() >= 1) {
    seal_open_locked();
    if (n_free_locked() >= 2 || begin_victim_locked(options_.segment_bytes / 8) ||
        is_freed_by_sync_locked()) {
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
  segment.places = {};
  has_news_ = true;
  // What has moved away is nowhere but here until the copies are synced.
  if (segment.waits_for_sync) {
    segment.state = Segment::State::kHeld;
    ++n_held_;
    return;
  }
  segment.state = Segment::State::kFree;
  ++n_idle_;
}

// --- Tables --------------------------------------------------------------------------------------

// Writes the tables of segments that have been sealed. One that cannot be written is done without.
void DiskTier::begin_tables() {
  const std::lock_guard lock(mutex_);
  if (!are_tables_wanted_) {
    return;
  }
  bool must_wait = false;
  for (uint32_t i = 0; i < segments_.size(); ++i) {
    Segment& segment = segments_[i];
    if (!segment.wants_table || segment.state != Segment::State::kSealed) {
      continue;
    }
    // What moves there is there once it is written.
    if (segment.n_writes != 0) {
      must_wait = true;
      continue;
    }
    const uint64_t size_bytes = table_bytes(segment.places.size());
    if (n_round_jobs_ + kManifestCopies >= kRoundJobs ||
        (is_large(size_bytes) && n_large_ == kMaxLarge)) {
      return;
    }
    segment.wants_table = false;
    std::vector<TableEntry> entries;
    try {
      entries.reserve(segment.places.size());
    } catch (const std::bad_alloc&) {
      continue;
    }
    for (const PlaceId id : segment.places) {
      const Place& place = places_[static_cast<uint32_t>(id)];
      if (place.segment == i && place.state != Place::State::kFree) {
        entries.push_back({place.name, place.unit, place.size_bytes});
      }
    }
    Job* const job = take_job(Job::Purpose::kTable, size_bytes);
    if (job == nullptr) {
      continue;
    }
    job->kind = DiskOp::Kind::kWrite;
    job->file = i;
    job->data = buffer_of(job) + kSegmentHeaderBytes;
    job->size_bytes = static_cast<uint32_t>(table_bytes(entries.size()));
    job->offset = options_.segment_bytes - job->size_bytes;
    write_table(segment_header(segment.filling), entries, job->data);
    ++segment.n_transfers;
    stats_.written_today_bytes += job->size_bytes;
    begun_.push_back(job);
  }
  are_tables_wanted_ = must_wait;
}

void DiskTier::finish_table(Job* job) {
  {
    const std::lock_guard lock(mutex_);
    Segment& segment = segments_[job->file];
    --segment.n_transfers;
    segment.is_dirty = true;
    stats_.n_io_errors += job->status.is_ok() ? 0 : 1;
    recycle_if_empty_locked(job->file);
  }
  give_job_back(job);
}

}  // namespace kvm::tiers
