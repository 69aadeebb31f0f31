// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/disk_tier.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/assert.h"

namespace kvm::tiers {
namespace {

constexpr uint64_t kDayNs = uint64_t{24} * 3600 * 1'000'000'000;
constexpr uint64_t kAlign = kMaxDiskBlockBytes;

std::string bytes_text(uint64_t n) { return std::to_string(n) + " bytes"; }

}  // namespace

// --- Any thread ----------------------------------------------------------------------------------

void DiskTier::submit(std::span<Transfer* const> transfers) noexcept {
  bool must_wake = false;
  std::unique_lock lock(mutex_);
  for (Transfer* transfer : transfers) {
    Status status;
    try {
      status = accept_locked(transfer);
    } catch (const std::bad_alloc&) {
      status = Status::fixed(KVM_ERR_NO_MEMORY, "disk: there is no memory for the transfer");
    }
    if (status.is_ok()) {
      must_wake = nudge_locked() || must_wake;
      continue;
    }
    lock.unlock();
    transfer->status = std::move(status);
    transfer->on_done();
    lock.lock();
  }
  lock.unlock();
  if (must_wake) {
    io_->wake();
  }
}

Status DiskTier::accept_locked(Transfer* transfer) {
  const uint32_t size_bytes = transfer->size_bytes;
  KVM_ASSERT(transfer->data != nullptr && size_bytes != 0);
  transfer->status = Status();
  if (transfer->kind == Transfer::Kind::kRead) {
    Place& place = written_place_locked(transfer->place);
    KVM_ASSERT(place.size_bytes == size_bytes);
    reads_.push_back({.transfer = transfer, .place = transfer->place, .size_bytes = size_bytes});
    ++place.n_readers;
  } else {
    if (Status status = refusal_locked(size_bytes); !status.is_ok()) {
      ++stats_.n_no_space;
      return status;
    }
    const PlaceId id = take_place_locked(size_bytes);
    try {
      writes_.push_back({.transfer = transfer, .place = id, .size_bytes = size_bytes});
    } catch (const std::bad_alloc&) {
      free_place_locked(id);
      return Status::fixed(KVM_ERR_NO_MEMORY, "disk: there is no memory for the transfer");
    }
    waiting_write_bytes_ += record_bytes(size_bytes);
    stats_.written_today_bytes += record_bytes(size_bytes);
  }
  ++n_transfers_;
  return Status::ok();
}

Status DiskTier::refusal_locked(uint32_t size_bytes) {
  const uint64_t bytes = record_bytes(size_bytes);
  const uint64_t in_segment = room_end(1) - kSegmentHeaderBytes;
  if (bytes > in_segment) {
    return Status(KVM_ERR_NO_SPACE, "disk: a page of " + bytes_text(size_bytes) +
                                        "; a segment holds one of " +
                                        bytes_text(in_segment - sizeof(RecordHeader)));
  }
  // Tables of pages from 4 KiB on take no more.
  const uint64_t capacity =
      (n_segments_ - 1) * (in_segment - align_down(options_.segment_bytes / 256, kAlign));
  if (bytes > capacity - used_bytes_) {
    return Status(KVM_ERR_NO_SPACE, "disk: a page of " + bytes_text(size_bytes) + ", " +
                                        std::to_string(capacity - used_bytes_) + " of " +
                                        bytes_text(capacity) + " are free");
  }
  begin_day_locked();
  const uint64_t limit = options_.write_bytes_per_day;
  if (limit != 0 && stats_.written_today_bytes + bytes > limit) {
    return Status(KVM_ERR_NO_SPACE, "disk: the writes of this day are used up: " +
                                        std::to_string(stats_.written_today_bytes) + " of " +
                                        bytes_text(limit));
  }
  return Status::ok();
}

void DiskTier::begin_day_locked() {
  const uint64_t n_days = (options_.clock->now_ns() - day_ns_) / kDayNs;
  if (n_days != 0) {
    day_ns_ += n_days * kDayNs;
    stats_.written_today_bytes = 0;
  }
}

PlaceId DiskTier::take_place_locked(uint32_t size_bytes) {
  if (first_free_place_ == static_cast<uint32_t>(kNoPlace)) {
    KVM_ASSERT(places_.size() < static_cast<uint32_t>(kNoPlace));
    places_.push_back({.unit = first_free_place_});
    first_free_place_ = static_cast<uint32_t>(places_.size() - 1);
  }
  const uint32_t index = first_free_place_;
  Place& place = places_[index];
  first_free_place_ = place.unit;
  place = {.size_bytes = size_bytes, .state = Place::State::kWriting, .name = next_name_++};
  used_bytes_ += record_bytes(size_bytes);
  return static_cast<PlaceId>(index);
}

void DiskTier::free_place_locked(PlaceId id) {
  Place& place = places_[static_cast<uint32_t>(id)];
  const uint64_t bytes = record_bytes(place.size_bytes);
  const uint32_t segment = place.segment;
  used_bytes_ -= bytes;
  place = {.unit = std::exchange(first_free_place_, static_cast<uint32_t>(id))};
  if (segment != kNoSegment) {
    segments_[segment].live_bytes -= bytes;
    recycle_if_empty_locked(segment);
  }
}

DiskTier::Place& DiskTier::written_place_locked(PlaceId id) {
  const auto index = static_cast<uint32_t>(id);
  KVM_ASSERT(index < places_.size() && places_[index].state == Place::State::kWritten);
  return places_[index];
}

void DiskTier::add_ref(PlaceId id) noexcept {
  const std::lock_guard lock(mutex_);
  ++written_place_locked(id).n_refs;
}

void DiskTier::release(PlaceId id) noexcept {
  bool must_wake = false;
  {
    const std::lock_guard lock(mutex_);
    Place& place = written_place_locked(id);
    if (--place.n_refs != 0) {
      return;
    }
    KVM_ASSERT(place.n_readers == 0);
    free_place_locked(id);
    must_wake = !writes_.empty() && nudge_locked();
  }
  if (must_wake) {
    io_->wake();
  }
}

bool DiskTier::nudge_locked() {
  has_news_ = true;
  return std::exchange(is_asleep_, false);
}

uint64_t DiskTier::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_bytes_;
}

DiskTierStats DiskTier::stats() const {
  const std::lock_guard lock(mutex_);
  DiskTierStats stats = stats_;
  const uint64_t now = options_.clock->now_ns();
  stats.n_passed_over =
      static_cast<uint64_t>(std::count_if(drives_.begin(), drives_.end(), [&](const Drive& drive) {
        return now < std::max(drive.grows_from_ns, drive.trusted_from_ns);
      }));
  if (std::any_of(drives_.begin(), drives_.end(),
                  [now](const Drive& drive) { return now < drive.grows_from_ns; })) {
    stats.refusal = last_refusal_.message();
  }
  return stats;
}

// --- The tier's thread ---------------------------------------------------------------------------

void DiskTier::run() {
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (is_stopping_ && idle_.size() == jobs_.size()) {
        return;
      }
    }
    do_turn(true);
  }
}

bool DiskTier::turn() {
  KVM_ASSERT(options_.is_manual);
  do_turn(false);
  const std::lock_guard lock(mutex_);
  return n_transfers_ != 0 || move_.victim != kNoSegment || idle_.size() != jobs_.size() ||
         round_.stage != Round::Stage::kIdle;
}

void DiskTier::do_turn(bool may_wait) {
  uint64_t timeout_ns = 0;
  {
    const std::lock_guard lock(mutex_);
    is_asleep_ = may_wait && !has_news_;
    timeout_ns = is_asleep_ ? patience_ns() : 0;
    has_news_ = false;
  }
  const size_t n_ended = io_->reap(ended_, timeout_ns);
  {
    const std::lock_guard lock(mutex_);
    is_asleep_ = false;
  }
  for (size_t i = 0; i < n_ended; ++i) {
    leave_queue(*static_cast<Job*>(ended_[i]));
  }
  begin_reads();
  begin_writes();
  begin_moves();
  begin_tables();
  go_on_with_objects();
  submit_begun();
  if (n_ended != 0) {
    for (size_t i = 0; i < n_ended; ++i) {
      finish(static_cast<Job*>(ended_[i]));
    }
    // There may be room now, and what has failed may have to be begun again.
    const std::lock_guard lock(mutex_);
    has_news_ = true;
  }
}

void DiskTier::submit_begun() {
  if (begun_.empty()) {
    return;
  }
  io_->submit(begun_);
  const std::lock_guard lock(mutex_);
  stats_.is_direct = io_->is_direct();
  for (const DiskOp* op : begun_) {
    if (op->kind == DiskOp::Kind::kSync) {
      continue;
    }
    const bool is_read = op->kind == DiskOp::Kind::kRead;
    ++(is_read ? stats_.n_disk_reads : stats_.n_disk_writes);
    (is_read ? stats_.disk_read_bytes : stats_.disk_written_bytes) += op->size_bytes;
  }
  begun_.clear();
}

uint64_t DiskTier::patience_ns() const {
  return is_stopping_ ? UINT64_MAX : options_.clock->patience_ns(move_.waits_ns);
}

void DiskTier::finish(Job* job) {
  switch (job->purpose) {
    case Job::Purpose::kRead:
      return finish_read(job);
    case Job::Purpose::kWrite:
      return finish_write(job);
    case Job::Purpose::kMoveRead:
      return finish_move_read(job);
    case Job::Purpose::kMoveWrite:
      return finish_move_write(job);
    case Job::Purpose::kTable:
      return finish_table(job);
    case Job::Purpose::kRound:
      return finish_round_job(job);
  }
}

// A transfer with room for so many bytes besides a segment's header. Null: there is no memory.
// REQUIRES: one is idle, and less than kMaxLarge are large.
DiskTier::Job* DiskTier::take_job(Job::Purpose purpose, uint64_t data_bytes) {
  Job* const job = idle_.back();
  if (is_large(data_bytes)) {
    job->large = DiskMemory(kSegmentHeaderBytes + align_up(data_bytes, kAlign));
    if (job->large.bytes().empty()) {
      return nullptr;
    }
    ++n_large_;
  }
  idle_.pop_back();
  job->purpose = purpose;
  job->is_single = false;
  job->parts.clear();
  n_reading_ += purpose == Job::Purpose::kRead ? 1 : 0;  // until leave_queue()
  n_writing_ += purpose == Job::Purpose::kWrite ? 1 : 0;
  n_round_jobs_ += purpose >= Job::Purpose::kTable ? 1 : 0;
  return job;
}

// It is in flight no more.
void DiskTier::leave_queue(const Job& job) {
  n_reading_ -= job.purpose == Job::Purpose::kRead ? 1 : 0;
  n_writing_ -= job.purpose == Job::Purpose::kWrite ? 1 : 0;
  n_round_jobs_ -= job.purpose >= Job::Purpose::kTable ? 1 : 0;
}

void DiskTier::give_job_back(Job* job) {
  if (!job->large.bytes().empty()) {
    job->large = DiskMemory();
    --n_large_;
  }
  idle_.push_back(job);
}

// Of the records that go together.
uint64_t DiskTier::transfer_limit() const { return options_.transfer_bytes + kHeaderRoom; }

bool DiskTier::is_large(uint64_t data_bytes) const {
  return data_bytes > transfer_limit() + 2 * kAlign;
}

std::byte* DiskTier::buffer_of(Job* job) const {
  return job->large.bytes().empty() ? job->own : job->large.bytes().data();
}

Status DiskTier::io_error(const Job& job) noexcept {
  try {
    return Status(job.status.code(), path_of(job.file) + ": " + std::string(job.status.message()));
  } catch (const std::bad_alloc&) {
    return job.status;
  }
}

Status DiskTier::corrupt(uint32_t segment, uint64_t offset, const char* reason) noexcept {
  try {
    return Status(KVM_ERR_CORRUPT,
                  path_of(segment) + ", offset " + std::to_string(offset) + ": " + reason);
  } catch (const std::bad_alloc&) {
    return Status::fixed(KVM_ERR_CORRUPT, "disk: a page is damaged");
  }
}

}  // namespace kvm::tiers
