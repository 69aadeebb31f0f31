// SPDX-License-Identifier: Apache-2.0
#include "engine/stream/page_stream.h"

#include <algorithm>

#include "base/assert.h"

namespace kvm::engine {

void PageStream::begin(tiers::SlowTier* tier, StreamSource* source, StreamListener* listener,
                       const StreamShape& shape, std::byte* ring) {
  KVM_ASSERT(!has_begun() && shape.n_windows != 0 && shape.n_slots != 0 &&
             shape.n_slots <= StreamShape::kMaxSlots);
  const size_t n_reads = size_t{shape.n_slots} * shape.max_pages;
  windows_ = std::make_unique<Window[]>(shape.n_windows);
  reads_ = std::make_unique<Read[]>(n_reads);
  to_tier_ = std::make_unique<tiers::Transfer*[]>(n_reads);
  listed_ = std::make_unique<StreamRead[]>(n_reads);
  for (size_t i = 0; i < n_reads; ++i) {
    reads_[i].stream = this;
    to_tier_[i] = &reads_[i];
  }
  source_ = source;
  listener_ = listener;
  shape_ = shape;
  ring_ = ring;
  is_stopped_.store(false, std::memory_order_relaxed);
  n_there_ = 0;
  scheduler_ = nullptr;
  status_ = Status::ok();
  uint32_t before = source->n_free_tasks();
  for (uint32_t i = 0; i < shape.n_windows; ++i) {
    const uint32_t end = source->tasks_end(i);
    KVM_ASSERT(end > before);
    windows_[i].n_tasks.store(end - before, std::memory_order_relaxed);
    before = end;
  }
  tier_ = tier;
}

void PageStream::start() {
  const uint32_t n = std::min(shape_.n_windows, shape_.n_slots);
  for (uint32_t i = 0; i < n; ++i) {
    if (claim(i)) {
      begin_window(i);
    }
  }
}

bool PageStream::claim(uint64_t window) {
  const std::lock_guard lock(mutex_);
  if (window >= shape_.n_windows || windows_[window].state != State::kWaiting) {
    return false;
  }
  windows_[window].state = State::kBegun;
  return true;
}

void PageStream::begin_window(uint32_t window) {
  const uint32_t slot = window % shape_.n_slots;
  const size_t first = size_t{slot} * shape_.max_pages;
  StreamRead* listed = &listed_[first];
  const uint32_t n = source_->place_window(window, ring_ + slot * shape_.slot_bytes, listed);
  KVM_ASSERT(n <= shape_.max_pages);
  for (uint32_t i = 0; i < n; ++i) {
    Read& read = reads_[first + i];
    read.window = window;
    read.place = listed[i].place;
    read.data = listed[i].to;
    read.size_bytes = listed[i].size_bytes;
    read.status = Status::ok();
  }
  // SYNC: none; the tier orders this before its ends of transfers.
  windows_[window].n_reads.store(n + 1, std::memory_order_relaxed);
  if (n != 0) {
    tier_->submit({&to_tier_[first], n});
  }
  end_one(window);
}

void PageStream::end_read(Read* read) {
  if (!read->status.is_ok()) {
    stop(read->status);
  }
  end_one(read->window);
}

void PageStream::end_one(uint32_t window) {
  // SYNC: releases what this transfer brought; whoever ends the last passes all of it on, by the
  // lock and by Scheduler::open or start.
  if (windows_[window].n_reads.fetch_sub(1, std::memory_order_acq_rel) != 1) {
    return;
  }
  const std::lock_guard lock(mutex_);
  windows_[window].state = State::kThere;
  note_there();
}

// The driver may end the stream as soon as the last window is there and the lock is free: whoever
// holds it does nothing with the stream afterwards.
void PageStream::note_there() {
  const uint32_t n_before = n_there_;
  while (n_there_ < shape_.n_windows && windows_[n_there_].state == State::kThere) {
    ++n_there_;
  }
  if (n_there_ == n_before) {
    return;
  }
  if (scheduler_ != nullptr) {
    scheduler_->open(job_, n_open());
  } else {
    listener_->on_arrival();
  }
}

uint32_t PageStream::n_open() const {
  return n_there_ == 0 ? source_->n_free_tasks() : source_->tasks_end(n_there_ - 1);
}

bool PageStream::is_ready() {
  const std::lock_guard lock(mutex_);
  return n_there_ != 0;
}

void PageStream::start_job(Scheduler* scheduler, TaskSet* set, JobPlan plan) {
  const std::lock_guard lock(mutex_);
  KVM_ASSERT(scheduler_ == nullptr);
  plan.n_open = n_open();
  job_ = scheduler->start(set, plan);
  scheduler_ = scheduler;
}

void PageStream::end_task(uint32_t window) {
  KVM_ASSERT(window < shape_.n_windows);
  // SYNC: the tasks of this window have read its slot before others write there.
  if (windows_[window].n_tasks.fetch_sub(1, std::memory_order_acq_rel) != 1) {
    return;
  }
  const uint64_t next = uint64_t{window} + shape_.n_slots;
  if (claim(next)) {
    begin_window(static_cast<uint32_t>(next));
  }
}

void PageStream::stop(const Status& why) {
  const std::lock_guard lock(mutex_);
  if (is_stopped_.exchange(true, std::memory_order_acq_rel)) {
    return;
  }
  status_ = why;
  for (uint32_t i = n_there_; i < shape_.n_windows; ++i) {
    if (windows_[i].state == State::kWaiting) {
      windows_[i].state = State::kThere;
    }
  }
  note_there();
}

bool PageStream::is_over() {
  const std::lock_guard lock(mutex_);
  return n_there_ == shape_.n_windows;
}

Status PageStream::end() {
  // Whoever brought the last window holds the lock to the end.
  const std::lock_guard lock(mutex_);
  KVM_ASSERT(has_begun() && n_there_ == shape_.n_windows);
  tier_ = nullptr;
  source_ = nullptr;
  listener_ = nullptr;
  scheduler_ = nullptr;
  windows_.reset();
  reads_.reset();
  to_tier_.reset();
  listed_.reset();
  return status_;
}

}  // namespace kvm::engine
