// SPDX-License-Identifier: Apache-2.0
// DiskTier: pages that move from a segment with much dead space to the open one.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>

#include "base/assert.h"
#include "base/reserve.h"
#include "tiers/disk/crc32c.h"
#include "tiers/disk/disk_tier.h"

namespace kvm::tiers {
namespace {

constexpr uint64_t kAlign = kMaxDiskBlockBytes;
constexpr uint64_t kNsPerS = 1'000'000'000;
constexpr uint64_t kGapBytes = 64 << 10;
// A segment that could not be moved is tried again after a second, two, four: up to an hour, for
// a page that is damaged stays so until it is released.
constexpr uint32_t kMostFailedMoves = 12;

}  // namespace

bool DiskTier::begin_victim_locked(uint64_t min_dead_bytes) {
  const uint64_t budget = options_.write_bytes_per_day;
  if (is_stopping_ || (budget != 0 && stats_.written_today_bytes >= budget)) {
    return false;
  }
  const uint64_t now = options_.clock->now_ns();
  uint32_t best = kNoSegment;
  for (uint32_t i = 0; i < n_segments_; ++i) {
    const Segment& segment = segments_[i];
    if (segment.state != Segment::State::kSealed || now < segment.moves_from_ns ||
        segment.n_writes != 0 ||
        segment.end_bytes - kSegmentHeaderBytes - segment.live_bytes < min_dead_bytes ||
        !fits_locked(segment)) {
      continue;
    }
    if (best == kNoSegment || segment.live_bytes < segments_[best].live_bytes) {
      best = i;
    }
  }
  if (best == kNoSegment) {
    return false;
  }
  move_.records.clear();
  try {
    reserve_growing(move_.records, segments_[best].places.size());
  } catch (const std::bad_alloc&) {
    return false;
  }
  for (const PlaceId id : segments_[best].places) {
    const Place& place = places_[static_cast<uint32_t>(id)];
    if (place.state == Place::State::kWritten && place.segment == best) {
      move_.records.emplace_back(place.unit, id);
    }
  }
  std::sort(move_.records.begin(), move_.records.end());
  // A place that was used twice in this segment is listed twice.
  move_.records.erase(std::unique(move_.records.begin(), move_.records.end()), move_.records.end());
  move_.victim = best;
  move_.n_begun = 0;
  return true;
}

// Whether what lives there has room, whatever the padding of transfers takes.
bool DiskTier::fits_locked(const Segment& victim) const {
  const uint64_t needed = victim.live_bytes + victim.live_bytes / 16 + 2 * kAlign;
  if (n_free_locked() >= 1) {
    return needed <= room_end(victim.places.size()) - kSegmentHeaderBytes;
  }
  return has_room_locked(needed, victim.places.size());
}

void DiskTier::begin_moves() {
  std::unique_lock lock(mutex_);
  move_.waits_ns = UINT64_MAX;
  if (move_.victim == kNoSegment) {
    const uint32_t low = std::max(1u, n_segments_ / 16);
    if (n_free_locked() > low || !begin_victim_locked(options_.segment_bytes / 4)) {
      return;
    }
  }
  while (move_.n_jobs < kMoveJobs && !is_stopping_) {
    const uint64_t now = options_.clock->now_ns();
    if (move_.n_begun < move_.records.size() && now < move_.next_ns) {
      move_.waits_ns = move_.next_ns;
      return;
    }
    Job* job = nullptr;
    if (!aim_move_locked(&job)) {
      return;
    }
    if (job == nullptr) {
      if (move_.n_jobs == 0) {
        end_victim_locked();
      }
      return;
    }
    if (options_.move_bytes_per_s != 0) {
      move_.next_ns =
          std::max(now, move_.next_ns) + job->size_bytes * kNsPerS / options_.move_bytes_per_s;
    }
    ++move_.n_jobs;
    ++segments_[move_.victim].n_transfers;
    begun_.push_back(job);
  }
}

// Sets *job to a transfer that reads the next pages of the victim; null: there are none. Returns
// false where it has to wait.
bool DiskTier::aim_move_locked(Job** job) {
  uint64_t begin = 0;
  uint64_t end = 0;
  for (; move_.n_begun < move_.records.size(); ++move_.n_begun) {
    const auto& [unit, id] = move_.records[move_.n_begun];
    const Place& place = places_[static_cast<uint32_t>(id)];
    if (place.state != Place::State::kWritten || place.segment != move_.victim ||
        place.unit != unit) {
      continue;  // it was released
    }
    const uint64_t at = offset_of(unit);
    const uint64_t next_end = at + record_bytes(place.size_bytes);
    if (*job == nullptr) {
      begin = at;
      const uint64_t data_bytes = next_end - begin + 2 * kAlign;
      if (is_large(data_bytes) && n_large_ == kMaxLarge) {
        return false;
      }
      *job = take_job(Job::Purpose::kMoveRead, data_bytes);
      if (*job == nullptr) {
        continue;  // there is no memory for it: it stays
      }
    } else if (at > end + kGapBytes || next_end - begin > transfer_limit() ||
               (*job)->parts.size() == kMaxParts) {
      break;
    }
    end = next_end;
    (*job)->parts.push_back({.place = id,
                             .name = place.name,
                             .unit = unit,
                             .size_bytes = place.size_bytes,
                             .segment = move_.victim});
  }
  if (*job != nullptr) {
    aim_read(*job, (*job)->parts);
  }
  return true;
}

void DiskTier::end_victim_locked() {
  const uint32_t victim = std::exchange(move_.victim, kNoSegment);
  Segment& segment = segments_[victim];
  if (segment.live_bytes != 0) {  // what is left could not be read or written, or had no room
    segment.moves_from_ns = options_.clock->now_ns() + (kNsPerS << segment.n_failed_moves);
    segment.n_failed_moves += segment.n_failed_moves < kMostFailedMoves ? 1 : 0;
  }
  recycle_if_empty_locked(victim);
  has_news_ = true;
}

void DiskTier::finish_move_read(Job* job) {
  if (!job->status.is_ok()) {
    {
      const std::lock_guard lock(mutex_);
      ++stats_.n_io_errors;
    }
    return end_move(job);
  }
  Filling filling;
  {
    const std::lock_guard lock(mutex_);
    filling = segments_[job->file].filling;
  }
  // A page that is damaged stays where it is, so that whoever reads it is told so.
  Status error;
  const size_t n_corrupt = std::erase_if(job->parts, [&](const Part& part) {
    const std::byte* const record = record_of(job, part);
    uint32_t page_crc = 0;
    const char* wrong =
        check_record_header(header_of(part, filling), {record, sizeof(RecordHeader)}, &page_crc);
    if (wrong == nullptr && crc32c({record + sizeof(RecordHeader), part.size_bytes}) != page_crc) {
      wrong = "the checksum of the page does not match";
    }
    if (wrong != nullptr) {
      error = corrupt(part.segment, offset_of(part.unit), wrong);
    }
    return wrong != nullptr;
  });
  if (n_corrupt != 0) {
    const std::lock_guard lock(mutex_);
    note_corrupt_locked(n_corrupt, error);
  }
  if (!place_moves(job)) {
    end_move(job);
  }
}

// Turns a job that has read into one that writes. Returns false where there is nothing to be
// written, or no room.
bool DiskTier::place_moves(Job* job) {
  std::unique_lock lock(mutex_);
  uint64_t bytes = 0;
  std::erase_if(job->parts, [&](const Part& part) {
    const Place& place = places_[static_cast<uint32_t>(part.place)];
    const bool is_there = place.state == Place::State::kWritten && place.segment == move_.victim &&
                          place.unit == part.unit;
    bytes += is_there ? record_bytes(part.size_bytes) : 0;
    return !is_there;
  });
  if (job->parts.empty()) {
    return false;
  }
  if (!has_room_locked(bytes, job->parts.size())) {
    if (n_free_locked() == 0) {
      return false;
    }
    seal_open_locked();
    while (!open_next_locked(lock)) {
      if (n_free_locked() == 0) {
        return false;
      }
    }
  }
  Segment& segment = segments_[open_];
  try {
    reserve_growing(segment.places, segment.places.size() + job->parts.size());
  } catch (const std::bad_alloc&) {
    return false;
  }
  std::byte* const source = job->data;
  const uint64_t source_offset = job->offset;
  const uint64_t start = std::max<uint64_t>(segment.end_bytes, kSegmentHeaderBytes);
  uint64_t at = start;
  for (Part& part : job->parts) {
    part.old_unit = part.unit;
    part.unit = static_cast<uint32_t>(at / kRecordUnitBytes);
    part.segment = open_;
    segment.places.push_back(part.place);
    at += record_bytes(part.size_bytes);
  }
  aim_write_locked(job, at);
  stats_.written_today_bytes += bytes;
  job->purpose = Job::Purpose::kMoveWrite;
  const Filling filling = segment.filling;
  lock.unlock();
  // Records only move forward in the buffer, past what was dead between them.
  for (const Part& part : job->parts) {
    std::memmove(source + (offset_of(part.unit) - start),
                 source + (offset_of(part.old_unit) - source_offset),
                 record_bytes(part.size_bytes));
  }
  fill_records(job, filling);
  begun_.push_back(job);
  return true;
}

void DiskTier::finish_move_write(Job* job) {
  {
    const std::lock_guard lock(mutex_);
    Segment& segment = segments_[job->file];
    Segment& victim = segments_[move_.victim];
    end_write_locked(*job);
    stats_.n_io_errors += job->status.is_ok() ? 0 : 1;
    for (const Part& part : job->parts) {
      Place& place = places_[static_cast<uint32_t>(part.place)];
      // One that was released meanwhile, and perhaps taken anew, has nothing of the copy.
      if (!job->status.is_ok() || place.state != Place::State::kWritten ||
          place.segment != move_.victim || place.unit != part.old_unit) {
        continue;
      }
      const uint64_t bytes = record_bytes(part.size_bytes);
      place.unit = part.unit;
      place.segment = static_cast<uint16_t>(job->file);
      victim.live_bytes -= bytes;
      // Objects may name it, or may do so when a round is over that will not sync the copy.
      victim.waits_for_sync |= !objects_.empty() || !works_.empty() || !limbo_.empty();
      segment.live_bytes += bytes;
      ++stats_.n_moved;
      stats_.moved_bytes += bytes;
    }
    recycle_if_empty_locked(job->file);
    if (!job->status.is_ok()) {
      turn_from_drive_locked(job->file);
    }
  }
  end_move(job);
}

void DiskTier::end_move(Job* job) {
  {
    const std::lock_guard lock(mutex_);
    --segments_[move_.victim].n_transfers;
    --move_.n_jobs;
  }
  give_job_back(job);
}

}  // namespace kvm::tiers
