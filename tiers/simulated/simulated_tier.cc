// SPDX-License-Identifier: Apache-2.0
#include "tiers/simulated/simulated_tier.h"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "base/assert.h"
#include "base/clock.h"
#include "base/reserve.h"
#include "base/splitmix.h"

namespace kvm::tiers {
namespace {

constexpr uint64_t kNsPerS = 1'000'000'000;
constexpr int kUndefinedByte = 0xdb;
constexpr int kReleasedByte = 0xdd;

Status no_space(uint64_t size_bytes, uint64_t free_bytes, uint64_t capacity_bytes) {
  return Status(KVM_ERR_NO_SPACE, "simulated tier: a page of " + std::to_string(size_bytes) +
                                      " bytes, " + std::to_string(free_bytes) + " of " +
                                      std::to_string(capacity_bytes) + " bytes are free");
}

}  // namespace

SimulatedTier::SimulatedTier(const SimulatedTierOptions& options)
    : options_(options), random_(options.seed) {
  KVM_ASSERT(options.reorder != 0);
  if (!options.is_manual) {
    thread_ = std::thread([this] { run(); });
  }
}

SimulatedTier::~SimulatedTier() {
  {
    const std::lock_guard lock(mutex_);
    KVM_ASSERT(n_in_flight_ == 0 && object_queue_.empty());
    is_stopping_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) {
    thread_.join();
  }
}

// --- Beginning -----------------------------------------------------------------------------------

void SimulatedTier::submit(std::span<Transfer* const> transfers) noexcept {
  std::unique_lock lock(mutex_);
  const uint64_t now = now_ns();
  for (Transfer* transfer : transfers) {
    try {
      accept(transfer, now);
    } catch (const std::bad_alloc&) {
      lock.unlock();
      transfer->status =
          Status::fixed(KVM_ERR_NO_MEMORY, "simulated tier: there is no memory for the transfer");
      transfer->on_done();
      lock.lock();
    }
  }
  lock.unlock();
  changed_.notify_one();
}

void SimulatedTier::accept(Transfer* transfer, uint64_t now) {
  KVM_ASSERT(transfer->data != nullptr && transfer->size_bytes != 0);
  const uint32_t size_bytes = transfer->size_bytes;
  Pending pending;
  pending.transfer = transfer;
  std::unique_ptr<std::byte[]> bytes;
  if (transfer->kind == Transfer::Kind::kRead) {
    const Place& place = written_place(transfer->place);
    KVM_ASSERT(place.size_bytes == size_bytes);
    pending.place = transfer->place;
    pending.bytes = place.bytes.get();
  } else if (const uint64_t free_bytes = options_.capacity_bytes - used_bytes_;
             size_bytes > free_bytes) {
    pending.status = no_space(size_bytes, free_bytes, options_.capacity_bytes);
  } else {
    if (free_places_.empty()) {
      add_free_place();
    }
    bytes = std::make_unique_for_overwrite<std::byte[]>(size_bytes);
    pending.place = free_places_.back();
    pending.bytes = bytes.get();
  }
  queue_.push_back(std::move(pending));

  // Nothing throws from here on.
  Pending& accepted = queue_.back();
  const bool is_refused = accepted.place == kNoPlace;
  if (!is_refused) {
    Place& place = place_of(accepted.place);
    if (transfer->kind == Transfer::Kind::kRead) {
      ++place.n_readers;
    } else {
      free_places_.pop_back();
      place.bytes = std::move(bytes);
      place.size_bytes = size_bytes;
      used_bytes_ += size_bytes;
    }
    accepted.status = next_fault(transfer->kind);
  }
  accepted.due_ns = pass_pipe(now, is_refused ? 0 : size_bytes);
  ++n_in_flight_;
}

void SimulatedTier::add_free_place() {
  reserve_growing(free_places_, places_.size() + 1);
  places_.emplace_back();
  free_places_.push_back(static_cast<PlaceId>(places_.size() - 1));
}

uint64_t SimulatedTier::pass_pipe(uint64_t now, uint64_t size_bytes) {
  pipe_free_ns_ = std::max(pipe_free_ns_, now);
  if (const uint64_t bytes_per_s = options_.bytes_per_s; bytes_per_s != 0) {
    pipe_free_ns_ += (size_bytes * kNsPerS + bytes_per_s - 1) / bytes_per_s;
  }
  return pipe_free_ns_ + options_.latency_ns;
}

// --- Ending --------------------------------------------------------------------------------------

void SimulatedTier::run() {
  // By default the system may wake a thread 50 us late.
  ::prctl(PR_SET_TIMERSLACK, 1);
  std::unique_lock lock(mutex_);
  for (;;) {
    if (!object_queue_.empty()) {
      lock.unlock();
      finish_object_if_waiting();
      lock.lock();
    } else if (is_first_ready()) {
      Pending first = std::move(queue_.front());
      queue_.pop_front();
      --n_copied_;
      --n_ready_;
      settle(&first);
      lock.unlock();
      first.transfer->on_done();
      lock.lock();
    } else if (n_copied_ < queue_.size()) {
      // Ahead of its time, so that its end is not late by the copy. Nobody else takes from the
      // queue, and what others append moves nothing.
      const Pending& next = queue_[n_copied_];
      lock.unlock();
      copy(next);
      lock.lock();
      ++n_copied_;
    } else if (!queue_.empty()) {
      changed_.wait_for(lock, std::chrono::nanoseconds(time_left(queue_.front().due_ns)));
    } else if (!is_stopping_) {
      changed_.wait(lock);
    } else {
      return;
    }
  }
}

bool SimulatedTier::is_first_ready() {
  if (n_ready_ != 0) {
    return true;
  }
  const uint64_t now = now_ns();
  const size_t most = std::min<size_t>(options_.reorder, queue_.size());
  size_t n_due = 0;
  while (n_due < most && queue_[n_due].due_ns <= now) {
    ++n_due;
  }
  // All of them are copied first: how many there are to choose from is not a matter of chance then.
  if (n_due == 0 || n_due > n_copied_) {
    return false;
  }
  for (size_t n = n_due; n > 1; --n) {
    random_ += kSplitMixStep;
    std::swap(queue_[n - 1], queue_[splitmix64(random_) % n]);
  }
  n_ready_ = n_due;
  return true;
}

void SimulatedTier::copy(const Pending& pending) {
  const Transfer& transfer = *pending.transfer;
  const bool is_read = transfer.kind == Transfer::Kind::kRead;
  if (!pending.status.is_ok()) {
    if (is_read) {
      std::memset(transfer.data, kUndefinedByte, transfer.size_bytes);
    }
    return;
  }
  std::memcpy(is_read ? transfer.data : pending.bytes, is_read ? pending.bytes : transfer.data,
              transfer.size_bytes);
}

void SimulatedTier::settle(Pending* pending) {
  Transfer& transfer = *pending->transfer;
  const bool is_ok = pending->status.is_ok();
  if (transfer.kind == Transfer::Kind::kRead) {
    Place& place = place_of(pending->place);
    --place.n_readers;
    place.n_reads += is_ok ? 1 : 0;
  } else if (is_ok) {
    place_of(pending->place).is_written = true;
    transfer.place = pending->place;
  } else if (pending->place != kNoPlace) {
    free_place(pending->place);
  }
  if (is_ok) {
    Count& count = counts_[static_cast<size_t>(transfer.kind)];
    ++count.n;
    count.bytes += transfer.size_bytes;
  }
  --n_in_flight_;
  transfer.status = std::move(pending->status);
}

bool SimulatedTier::finish_if_waiting(size_t index) {
  std::unique_lock lock(mutex_);
  KVM_ASSERT(options_.is_manual);
  if (index >= queue_.size()) {
    return false;
  }
  Pending pending = std::move(queue_[index]);
  queue_.erase(queue_.begin() + static_cast<ptrdiff_t>(index));
  lock.unlock();
  copy(pending);
  lock.lock();
  settle(&pending);
  lock.unlock();
  pending.transfer->on_done();
  return true;
}

void SimulatedTier::finish(size_t index) {
  const bool was_waiting = finish_if_waiting(index);
  KVM_ASSERT(was_waiting);
}

void SimulatedTier::finish_all() {
  while (finish_if_waiting(0) || finish_object_if_waiting()) {
  }
}

void SimulatedTier::finish_object() {
  KVM_ASSERT(options_.is_manual);
  const bool was_waiting = finish_object_if_waiting();
  KVM_ASSERT(was_waiting);
}

size_t SimulatedTier::n_objects_waiting() const {
  const std::lock_guard lock(mutex_);
  return object_queue_.size();
}

size_t SimulatedTier::n_waiting() const {
  const std::lock_guard lock(mutex_);
  return queue_.size();
}

// --- Places --------------------------------------------------------------------------------------

void SimulatedTier::add_ref(PlaceId id) noexcept {
  const std::lock_guard lock(mutex_);
  (void)written_place(id);
  ++place_of(id).n_refs;
}

void SimulatedTier::release(PlaceId id) noexcept {
  uint32_t size_bytes = 0;
  std::unique_ptr<std::byte[]> bytes;
  {
    const std::lock_guard lock(mutex_);
    const Place& place = written_place(id);
    if (--place_of(id).n_refs != 0) {
      return;
    }
    KVM_ASSERT(place.n_readers == 0);
    size_bytes = place.size_bytes;
    bytes = free_place(id);
  }
  std::memset(bytes.get(), kReleasedByte, size_bytes);
}

std::unique_ptr<std::byte[]> SimulatedTier::free_place(PlaceId id) {
  Place place = std::exchange(place_of(id), Place());
  used_bytes_ -= place.size_bytes;
  free_places_.push_back(id);
  return std::move(place.bytes);
}

const SimulatedTier::Place& SimulatedTier::written_place(PlaceId id) const {
  const auto index = static_cast<size_t>(id);
  KVM_ASSERT(index < places_.size() && places_[index].is_written);
  return places_[index];
}

uint64_t SimulatedTier::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_bytes_;
}

// --- Objects -------------------------------------------------------------------------------------

void SimulatedTier::Objects::submit(ObjectRequest* request) noexcept {
  try {
    const std::lock_guard lock(tier_->mutex_);
    PendingObject& pending = tier_->object_queue_.emplace_back();
    pending.request = request;
    for (ObjectFault& fault : tier_->object_faults_) {
      if (fault.kind == request->kind && --fault.n_left == 0) {
        pending.status = fault.status;
      }
    }
    std::erase_if(tier_->object_faults_,
                  [](const ObjectFault& fault) { return fault.n_left == 0; });
  } catch (const std::bad_alloc&) {
    request->status =
        Status::fixed(KVM_ERR_NO_MEMORY, "simulated tier: there is no memory for the object");
    request->on_done();
    return;
  }
  tier_->changed_.notify_one();
}

std::vector<ObjectInfo> SimulatedTier::Objects::list(std::string_view after, size_t n_max) const {
  std::vector<ObjectInfo> infos;
  const std::lock_guard lock(tier_->mutex_);
  for (auto it = tier_->kept_.upper_bound(after); it != tier_->kept_.end() && infos.size() < n_max;
       ++it) {
    ObjectInfo& info = infos.emplace_back();
    info.key = it->first;
    info.label = it->second.label;
    info.n_pages = it->second.pages.size();
    info.body_bytes = it->second.body.size();
    for (const ObjectRequest::Page& page : it->second.pages) {
      info.page_bytes += page.size_bytes;
    }
  }
  return infos;
}

bool SimulatedTier::finish_object_if_waiting() {
  ObjectRequest* request = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (object_queue_.empty()) {
      return false;
    }
    request = object_queue_.front().request;
    Status status = std::move(object_queue_.front().status);
    object_queue_.pop_front();
    if (status.is_ok()) {
      try {
        status = carry_out(request);
      } catch (const std::bad_alloc&) {
        status =
            Status::fixed(KVM_ERR_NO_MEMORY, "simulated tier: there is no memory for the object");
      }
    }
    request->status = std::move(status);
  }
  request->on_done();
  return true;
}

Status SimulatedTier::carry_out(ObjectRequest* request) {
  if (request->key.empty() || request->key.size() > kMaxObjectKeyBytes ||
      request->label.size() > kMaxObjectLabelBytes) {
    return {KVM_ERR_LIMIT, "simulated tier: a key of " + std::to_string(request->key.size()) +
                               " bytes and a label of " + std::to_string(request->label.size())};
  }
  if (request->kind == ObjectRequest::Kind::kPut) {
    return put(request);
  }
  const auto found = kept_.find(request->key);
  if (found == kept_.end()) {
    return {KVM_ERR_NOT_FOUND, "simulated tier: there is no object " + request->key};
  }
  if (request->kind == ObjectRequest::Kind::kRemove) {
    release_pages(found->second.pages);
    kept_.erase(found);
    return Status::ok();
  }
  request->label = found->second.label;
  request->body = found->second.body;
  request->pages = found->second.pages;
  for (const ObjectRequest::Page& page : request->pages) {
    ++place_of(page.place).n_refs;
  }
  return Status::ok();
}

Status SimulatedTier::put(ObjectRequest* request) {
  Object object{request->label, request->body, request->pages};
  Object& kept = kept_[request->key];
  for (const ObjectRequest::Page& page : object.pages) {
    const Place& place = written_place(page.place);
    KVM_ASSERT(place.size_bytes == page.size_bytes);
    ++place_of(page.place).n_refs;
  }
  std::swap(kept, object);
  release_pages(object.pages);
  return Status::ok();
}

void SimulatedTier::release_pages(const std::vector<ObjectRequest::Page>& pages) {
  for (const ObjectRequest::Page& page : pages) {
    if (--place_of(page.place).n_refs == 0) {
      KVM_ASSERT(written_place(page.place).n_readers == 0);
      free_place(page.place);
    }
  }
}

// --- Faults --------------------------------------------------------------------------------------

void SimulatedTier::fail_next(Transfer::Kind kind, uint64_t n, Status status) {
  KVM_ASSERT(n != 0 && !status.is_ok());
  const std::lock_guard lock(mutex_);
  faults_.push_back({kind, n, 0, std::move(status)});
}

void SimulatedTier::fail_every(Transfer::Kind kind, uint64_t n, Status status) {
  KVM_ASSERT(n != 0 && !status.is_ok());
  const std::lock_guard lock(mutex_);
  faults_.push_back({kind, n, n, std::move(status)});
}

void SimulatedTier::fail_object(ObjectRequest::Kind kind, uint64_t n, Status status) {
  KVM_ASSERT(n != 0 && !status.is_ok());
  const std::lock_guard lock(mutex_);
  object_faults_.push_back({kind, n, std::move(status)});
}

void SimulatedTier::clear_faults() {
  const std::lock_guard lock(mutex_);
  faults_.clear();
  object_faults_.clear();
}

Status SimulatedTier::next_fault(Transfer::Kind kind) {
  Status status;
  for (Fault& fault : faults_) {
    if (fault.kind == kind && --fault.n_left == 0) {
      status = fault.status;
      fault.n_left = fault.period;
    }
  }
  std::erase_if(faults_, [](const Fault& fault) { return fault.n_left == 0; });
  return status;
}

// --- Counts --------------------------------------------------------------------------------------

uint64_t SimulatedTier::n_in_flight() const {
  const std::lock_guard lock(mutex_);
  return n_in_flight_;
}

uint64_t SimulatedTier::n_reads() const {
  const std::lock_guard lock(mutex_);
  return count_of(Transfer::Kind::kRead).n;
}

uint64_t SimulatedTier::n_writes() const {
  const std::lock_guard lock(mutex_);
  return count_of(Transfer::Kind::kWrite).n;
}

uint64_t SimulatedTier::read_bytes() const {
  const std::lock_guard lock(mutex_);
  return count_of(Transfer::Kind::kRead).bytes;
}

uint64_t SimulatedTier::written_bytes() const {
  const std::lock_guard lock(mutex_);
  return count_of(Transfer::Kind::kWrite).bytes;
}

uint64_t SimulatedTier::reads_of(PlaceId id) const {
  const std::lock_guard lock(mutex_);
  return written_place(id).n_reads;
}

}  // namespace kvm::tiers
