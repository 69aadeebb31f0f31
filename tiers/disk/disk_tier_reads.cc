// SPDX-License-Identifier: Apache-2.0
// DiskTier: reads, neighbours together, and what is made of what they find.
#include <algorithm>
#include <mutex>
#include <new>
#include <span>
#include <utility>

#include "tiers/disk/crc32c.h"
#include "tiers/disk/disk_tier.h"

namespace kvm::tiers {
namespace {

constexpr uint64_t kAlign = kMaxDiskBlockBytes;
// Neighbours are read together across gaps of up to this: it costs less than a transfer.
constexpr uint64_t kGapBytes = 16 << 10;

}  // namespace

void DiskTier::begin_reads() {
  while (n_reading_ + n_writing_ < options_.queue_depth) {
    if (n_batch_begun_ == n_batch_ && !fill_batch()) {
      return;
    }
    if (n_reading_ + 1 >= options_.queue_depth) {
      const std::lock_guard lock(mutex_);
      if (!writes_.empty()) {
        return;  // one is left for them
      }
    }
    const std::span<const Part> left(batch_.data() + n_batch_begun_, n_batch_ - n_batch_begun_);
    size_t n = 1;
    uint64_t end = offset_of(left[0].unit) + record_bytes(left[0].size_bytes);
    const uint64_t begin_bytes = offset_of(left[0].unit);
    for (; n < left.size() && left[n].segment == left[0].segment; ++n) {
      const uint64_t next = offset_of(left[n].unit);
      const uint64_t next_end = std::max(end, next + record_bytes(left[n].size_bytes));
      if (next > end + kGapBytes || next_end - begin_bytes > transfer_limit()) {
        break;
      }
      end = next_end;
    }
    const uint64_t data_bytes = align_up(end, kAlign) - align_down(begin_bytes, kAlign);
    if (is_large(data_bytes) && n_large_ == kMaxLarge) {
      return;
    }
    const bool is_apart = n == 1 && !is_near(n_batch_begun_) && !is_near(n_batch_begun_ + 1);
    n_batch_begun_ += n;
    Job* const job = take_job(Job::Purpose::kRead, data_bytes);
    if (job == nullptr) {
      left[0].transfer->status =
          Status::fixed(KVM_ERR_NO_MEMORY, "disk: there is no memory for a large page");
      settle_reads(left.first(n), 0);
      continue;
    }
    job->parts.assign(left.begin(), left.begin() + static_cast<ptrdiff_t>(n));
    job->is_apart = is_apart;
    aim_read(job, job->parts);
    meter_.begin(options_.clock->now_ns());
    begun_.push_back(job);
  }
}

// Whether a part of the batch lies next to the one before it.
bool DiskTier::is_near(size_t at) const {
  if (at == 0 || at >= n_batch_ || batch_[at].segment != batch_[at - 1].segment) {
    return false;
  }
  const uint64_t end = offset_of(batch_[at - 1].unit) + record_bytes(batch_[at - 1].size_bytes);
  return offset_of(batch_[at].unit) <= end + kGapBytes;
}

// The next that wait, in the order of the disk. Their segments are held from now on, so that they
// stay where they are.
bool DiskTier::fill_batch() {
  n_batch_ = 0;
  n_batch_begun_ = 0;
  {
    const std::lock_guard lock(mutex_);
    while (n_batch_ < kMaxParts && !reads_.empty()) {
      Part part = reads_.front();
      reads_.pop_front();
      const Place& place = written_place_locked(part.place);
      part.unit = place.unit;
      part.name = place.name;
      part.segment = place.segment;
      ++segments_[place.segment].n_transfers;
      batch_[n_batch_++] = part;
    }
  }
  std::sort(batch_.begin(), batch_.begin() + static_cast<ptrdiff_t>(n_batch_),
            [](const Part& a, const Part& b) {
              return a.segment != b.segment ? a.segment < b.segment : a.unit < b.unit;
            });
  return n_batch_ != 0;
}

void DiskTier::aim_read(Job* job, std::span<const Part> parts) {
  const uint64_t block = io_->block_bytes();
  uint64_t end = 0;
  for (const Part& part : parts) {
    end = std::max(end, offset_of(part.unit) + record_bytes(part.size_bytes));
  }
  job->kind = DiskOp::Kind::kRead;
  job->file = parts[0].segment;
  job->offset = align_down(offset_of(parts[0].unit), block);
  job->data = buffer_of(job) + kSegmentHeaderBytes;
  job->size_bytes = static_cast<uint32_t>(align_up(end, block) - job->offset);
}

std::byte* DiskTier::record_of(Job* job, const Part& part) const {
  return job->data + (offset_of(part.unit) - job->offset);
}

RecordHeader DiskTier::header_of(const Part& part, const Filling& filling) {
  return {.name = part.name,
          .run_id = filling.run_id,
          .generation = filling.generation,
          .offset = offset_of(part.unit),
          .segment = filling.number,
          .size_bytes = part.size_bytes};
}

Status DiskTier::check_read(Job* job, const Part& part, const Filling& filling) {
  const std::byte* const record = record_of(job, part);
  uint32_t page_crc = 0;
  const char* wrong =
      check_record_header(header_of(part, filling), {record, sizeof(RecordHeader)}, &page_crc);
  if (wrong == nullptr && copy_crc32c(part.transfer->data, {record + sizeof(RecordHeader),
                                                            part.size_bytes}) != page_crc) {
    wrong = "the checksum of the page does not match";
  }
  return wrong == nullptr ? Status() : corrupt(part.segment, offset_of(part.unit), wrong);
}

void DiskTier::finish_read(Job* job) {
  Filling filling;
  const bool has_failed = !job->status.is_ok();
  meter_.end(options_.clock->now_ns(), has_failed ? 0 : job->size_bytes, job->is_apart);
  {
    const std::lock_guard lock(mutex_);
    filling = segments_[job->file].filling;
    stats_.n_io_errors += has_failed ? 1 : 0;
  }
  if (has_failed && !job->is_single && job->parts.size() > 1) {
    job->is_single = true;
  } else {
    const std::span<const Part> all(job->parts);
    const std::span<const Part> ended = job->is_single ? all.last(1) : all;
    uint64_t n_corrupt = 0;
    for (const Part& part : ended) {
      part.transfer->status = has_failed ? io_error(*job) : check_read(job, part, filling);
      n_corrupt += part.transfer->status.code() == KVM_ERR_CORRUPT ? 1 : 0;
    }
    settle_reads(ended, n_corrupt);
    job->parts.resize(all.size() - ended.size());
  }
  if (job->parts.empty()) {
    give_job_back(job);
    return;
  }
  aim_read(job, std::span<const Part>(job->parts).last(1));
  ++n_reading_;
  meter_.begin(options_.clock->now_ns());
  begun_.push_back(job);
}

void DiskTier::note_corrupt_locked(uint64_t n, const Status& error) noexcept {
  stats_.n_corrupt += n;
  try {
    stats_.corruption = error.message();
  } catch (const std::bad_alloc&) {
    stats_.corruption.clear();
  }
}

// Their statuses are set.
void DiskTier::settle_reads(std::span<const Part> parts, uint64_t n_corrupt) {
  {
    const std::lock_guard lock(mutex_);
    if (n_corrupt != 0) {
      const auto last = std::find_if(parts.rbegin(), parts.rend(), [](const Part& part) {
        return part.transfer->status.code() == KVM_ERR_CORRUPT;
      });
      note_corrupt_locked(n_corrupt, last->transfer->status);
    }
    for (const Part& part : parts) {
      --places_[static_cast<uint32_t>(part.place)].n_readers;
      --segments_[part.segment].n_transfers;
      recycle_if_empty_locked(part.segment);
      --n_transfers_;
      if (part.transfer->status.is_ok()) {
        ++stats_.n_reads;
        stats_.read_bytes += part.size_bytes;
      }
    }
  }
  for (const Part& part : parts) {
    part.transfer->on_done();
  }
}

}  // namespace kvm::tiers
