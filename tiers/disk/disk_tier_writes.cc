// SPDX-License-Identifier: Apache-2.0
// DiskTier: writes, gathered into transfers to the open segment.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>
#include <string>
#include <utility>

#include "base/reserve.h"
#include "tiers/disk/crc32c.h"
#include "tiers/disk/disk_tier.h"

namespace kvm::tiers {
namespace {

constexpr uint64_t kAlign = kMaxDiskBlockBytes;
// While others are written, writes wait until there is as much: disks like no smaller transfers.
constexpr uint64_t kGatherBytes = 64 << 10;

}  // namespace

void DiskTier::begin_writes() {
  while (n_reading_ + n_writing_ < options_.queue_depth) {
    std::unique_lock lock(mutex_);
    const bool are_reads_waiting = !reads_.empty() || n_batch_begun_ != n_batch_;
    if (writes_.empty() || (n_writing_ + 1 >= options_.queue_depth && are_reads_waiting) ||
        (n_writing_ != 0 && waiting_write_bytes_ < kGatherBytes)) {
      return;
    }
    const uint64_t bytes = record_bytes(writes_.front().size_bytes);
    if (is_large(bytes) && n_large_ == kMaxLarge) {
      return;
    }
    const Room room = make_room_locked(lock, bytes);
    if (room == Room::kWait) {
      return;
    }
    if (room == Room::kNone) {
      refuse_write(lock, no_room_locked());
      continue;
    }
    Job* const job = take_job(Job::Purpose::kWrite, bytes);
    if (job == nullptr || !place_writes_locked(job)) {
      if (job != nullptr) {
        leave_queue(*job);
        give_job_back(job);
      }
      refuse_write(lock, Status::fixed(KVM_ERR_NO_MEMORY, "disk: there is no memory for the page"));
      continue;
    }
    const Filling filling = segments_[job->file].filling;
    lock.unlock();
    fill_records(job, filling);
    begun_.push_back(job);
  }
}

Status DiskTier::no_room_locked() const noexcept {
  const bool is_refused = std::any_of(drives_.begin(), drives_.end(), [&](const Drive& drive) {
    return drive.n_absent != 0 && options_.clock->now_ns() < drive.grows_from_ns;
  });
  if (is_refused) {
    try {
      return Status(KVM_ERR_NO_SPACE,
                    "disk: no more files can be made: " + std::string(last_refusal_.message()));
    } catch (const std::bad_alloc&) {
      return Status::fixed(KVM_ERR_NO_SPACE, "disk: no more files can be made");
    }
  }
  return Status::fixed(KVM_ERR_NO_SPACE,
                       "disk: it is full; what pages have left behind is less than a file");
}

// The first that waits; on_done is called without the lock.
void DiskTier::refuse_write(std::unique_lock<std::mutex>& lock, Status status) {
  const Part part = writes_.front();
  writes_.pop_front();
  const uint64_t bytes = record_bytes(part.size_bytes);
  waiting_write_bytes_ -= bytes;
  stats_.written_today_bytes -= std::min(stats_.written_today_bytes, bytes);
  stats_.n_no_space += status.code() == KVM_ERR_NO_SPACE ? 1 : 0;
  has_sync_failed_ = false;  // the next one may do better
  free_place_locked(part.place);
  --n_transfers_;
  lock.unlock();
  part.transfer->status = std::move(status);
  part.transfer->on_done();
}

// As many as wait and fit. Returns false where there is no memory. REQUIRES: the first fits.
bool DiskTier::place_writes_locked(Job* job) {
  Segment& segment = segments_[open_];
  try {
    reserve_growing(segment.places, segment.places.size() + kMaxParts);
  } catch (const std::bad_alloc&) {
    return false;
  }
  const uint64_t start = std::max<uint64_t>(segment.end_bytes, kSegmentHeaderBytes);
  uint64_t at = start;
  while (!writes_.empty() && job->parts.size() < kMaxParts) {
    Part part = writes_.front();
    const uint64_t bytes = record_bytes(part.size_bytes);
    if (at + bytes > room_end(segment.places.size() + 1) ||
        (at != start && at + bytes - start > transfer_limit())) {
      break;
    }
    writes_.pop_front();
    waiting_write_bytes_ -= bytes;
    part.unit = static_cast<uint32_t>(at / kRecordUnitBytes);
    part.segment = open_;
    Place& place = places_[static_cast<uint32_t>(part.place)];
    part.name = place.name;
    place.unit = part.unit;
    place.segment = static_cast<uint16_t>(open_);
    segment.live_bytes += bytes;
    segment.places.push_back(part.place);
    job->parts.push_back(part);
    at += bytes;
  }
  aim_write_locked(job, at);
  return true;
}

// From where the open segment ended, and with its header if it is new, up to `end`.
void DiskTier::aim_write_locked(Job* job, uint64_t end) {
  Segment& segment = segments_[open_];
  const bool is_first = segment.end_bytes == 0;
  const uint64_t padded = align_up(end, kAlign);
  job->kind = DiskOp::Kind::kWrite;
  job->file = open_;
  job->offset = segment.end_bytes;
  job->data = buffer_of(job) + (is_first ? 0 : kSegmentHeaderBytes);
  job->size_bytes = static_cast<uint32_t>(padded - job->offset);
  stats_.written_today_bytes += padded - end + (is_first ? kSegmentHeaderBytes : 0);
  segment.end_bytes = padded;
  segment.header = is_first ? Segment::Header::kInFlight : segment.header;
  ++segment.n_transfers;
  ++segment.n_writes;
}

SegmentHeader DiskTier::segment_header(const Filling& filling) const {
  return {.run_id = filling.run_id,
          .generation = filling.generation,
          .segment_bytes = options_.segment_bytes,
          .segment = filling.number,
          .run_number = run_number_};
}

void DiskTier::fill_records(Job* job, const Filling& filling) {
  if (job->offset == 0) {
    write_segment_header(segment_header(filling), job->data);
  }
  std::byte* end = job->data;
  for (const Part& part : job->parts) {
    std::byte* const record = record_of(job, part);
    RecordHeader header = header_of(part, filling);
    if (part.transfer != nullptr) {
      header.page_crc =
          copy_crc32c(record + sizeof(header), {part.transfer->data, part.size_bytes});
    } else {
      std::memcpy(&header.page_crc, record + offsetof(RecordHeader, page_crc), sizeof(uint32_t));
    }
    write_record_header(header, record);
    std::byte* const page_end = record + sizeof(header) + part.size_bytes;
    end = record + record_bytes(part.size_bytes);
    std::memset(page_end, 0, static_cast<size_t>(end - page_end));
  }
  std::memset(end, 0, static_cast<size_t>(job->data + job->size_bytes - end));
}

void DiskTier::end_write_locked(const Job& job) {
  Segment& segment = segments_[job.file];
  --segment.n_transfers;
  --segment.n_writes;
  segment.is_dirty = true;
  if (job.offset == 0) {
    segment.header = job.status.is_ok() ? Segment::Header::kWritten : Segment::Header::kNone;
  }
}

void DiskTier::finish_write(Job* job) {
  const bool is_ok = job->status.is_ok();
  const Status failure = is_ok ? Status() : io_error(*job);
  {
    const std::lock_guard lock(mutex_);
    end_write_locked(*job);
    stats_.n_io_errors += is_ok ? 0 : 1;
    for (const Part& part : job->parts) {
      if (is_ok) {
        places_[static_cast<uint32_t>(part.place)].state = Place::State::kWritten;
        ++stats_.n_writes;
        stats_.written_bytes += part.size_bytes;
      } else {
        free_place_locked(part.place);
      }
      --n_transfers_;
    }
    recycle_if_empty_locked(job->file);
    if (!is_ok) {
      turn_from_drive_locked(job->file);
    }
  }
  for (const Part& part : job->parts) {
    part.transfer->place = is_ok ? part.place : kNoPlace;
    part.transfer->status = failure;
    part.transfer->on_done();
  }
  give_job_back(job);
}

}  // namespace kvm::tiers
