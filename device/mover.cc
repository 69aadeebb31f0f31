// SPDX-License-Identifier: Apache-2.0
#include "device/mover.h"

#include <algorithm>
#include <new>
#include <system_error>
#include <utility>

#include "base/assert.h"

namespace kvm::device {

Result<std::unique_ptr<Mover>> Mover::create(MemoryDriver* driver, Driver* kernels,
                                             EventPool* events) {
  std::unique_ptr<Mover> mover(new Mover(driver, kernels, events));
  KVM_TRY(mover->init());
  return mover;
}

Status Mover::init() {
  for (LaneState& lane : lanes_) {
    for (Stream& stream : lane.streams) {
      KVM_TRY_ASSIGN(stream, driver_->create_stream());
    }
    for (uint8_t*& bounce : lane.bounce) {
      if (kernels_ != nullptr) {
        KVM_TRY_ASSIGN(bounce, driver_->allocate(kChunkBytes));
      }
    }
  }
  if (driver_->facts().moves_in_a_thread) {
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& error) {
      return Status(KVM_ERR_NO_MEMORY, std::string("no thread for copies: ") + error.what());
    }
  }
  return Status::ok();
}

Mover::~Mover() {
  if (thread_.joinable()) {
    {
      const std::lock_guard lock(queue_);
      is_ending_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }
  // Where the device has faulted there is nothing left to wait for.
  (void)synchronize();
  for (const LaneState& lane : lanes_) {
    for (const Stream stream : lane.streams) {
      if (stream != nullptr) {
        driver_->destroy_stream(stream);
      }
    }
    for (uint8_t* const bounce : lane.bounce) {
      if (bounce != nullptr) {
        driver_->free(bounce);
      }
    }
  }
}

void Mover::run() {
  for (Lane lane = kToHost;; lane = other(lane)) {
    {
      std::unique_lock lock(queue_);
      wake_.wait(lock, [this] {
        return is_ending_ ||
               (!is_failed_ && (!lanes_[kToHost].jobs.empty() || !lanes_[kToDevice].jobs.empty()));
      });
      if (is_ending_) {
        return;
      }
    }
    (void)step(lane);
  }
}

// --- What callers ask ---------------------------------------------------------------------------

void Mover::submit(std::list<Job> job) {
  const size_t n = job.front().pieces.size();
  Move* const move = job.front().move.get();
  const std::lock_guard lock(queue_);
  LaneState& lane = lanes_[move->lane];
  move->first = lane.n_submitted + 1;
  lane.n_submitted += n;
  move->last = lane.n_submitted;
  // After a failure nothing is begun before it is acknowledged: then these pieces fail too.
  if (!is_failed_) {
    lane.jobs.splice(lane.jobs.end(), job);
    wake_.notify_one();
  }
}

uint64_t Mover::next_ticket(Lane lane) const {
  const std::lock_guard lock(queue_);
  return lanes_[lane].n_submitted + 1;
}

uint64_t Mover::n_enqueued(Lane lane) const {
  const std::lock_guard lock(queue_);
  return lanes_[lane].n_enqueued;
}

bool Mover::is_enqueued(const Move& move) const {
  const std::lock_guard lock(queue_);
  return move.last <= lanes_[move.lane].n_enqueued;
}

void Mover::finish(const Move& move) { finish_ticket(move.lane, move.last); }

void Mover::finish_ticket(Lane lane, uint64_t ticket) {
  for (;;) {
    {
      const std::lock_guard lock(queue_);
      if (is_failed_ || ticket <= lanes_[lane].n_enqueued) {
        return;
      }
    }
    (void)step(lane);
  }
}

void Mover::finish_all() {
  while (step(kToHost)) {
  }
}

Status Mover::await_enqueued(Lane lane, uint64_t ticket) {
  finish_ticket(lane, ticket);
  const std::lock_guard lock(queue_);
  return ticket > lanes_[lane].n_enqueued ? failure_ : Status::ok();
}

Status Mover::wait(Stream stream, Lane lane, uint64_t ticket) {
  KVM_TRY(await_enqueued(lane, ticket));
  return wait_for(stream, lane, ticket);
}

Status Mover::drain(Lane lane, uint64_t ticket) {
  KVM_TRY(await_enqueued(lane, ticket));
  return synchronize();
}

Status Mover::synchronize() {
  Status status;
  for (const LaneState& lane : lanes_) {
    for (const Stream stream : lane.streams) {
      const Status done = stream == nullptr ? Status::ok() : driver_->synchronize_stream(stream);
      status = status.is_ok() ? done : status;
    }
  }
  return status;
}

bool Mover::is_done(Lane lane, uint64_t ticket) {
  for (const bool ask : {true, false}) {
    {
      const std::lock_guard lock(queue_);
      const LaneState& of = lanes_[lane];
      if (ticket <= of.n_enqueued - of.events.size()) {
        return true;
      }
    }
    if (ask) {
      forget_done(lane);
    }
  }
  return false;
}

bool Mover::is_failed() const {
  const std::lock_guard lock(queue_);
  return is_failed_;
}

Status Mover::acknowledge(Tickets* good) {
  const std::lock_guard lock(queue_);
  KVM_ASSERT(is_failed_);
  for (const Lane lane : kLanes) {
    (*good)[lane] = lanes_[lane].n_enqueued;
    lanes_[lane].n_enqueued = lanes_[lane].n_submitted;
  }
  is_failed_ = false;
  return std::exchange(failure_, Status::ok());
}

// --- Steps --------------------------------------------------------------------------------------

bool Mover::step(Lane lane) {
  const std::lock_guard lock(running_);
  for (const bool may_wait : {false, true}) {
    for (const Lane which : {lane, other(lane)}) {
      if (try_step(which, may_wait)) {
        return true;
      }
    }
  }
  return false;
}

bool Mover::try_step(Lane lane, bool may_wait) {
  LaneState& of = lanes_[lane];
  const Move* move = nullptr;
  const Piece* piece = nullptr;  // stays where it is: jobs go only where running_ is held
  uint64_t number = 0;
  {
    const std::lock_guard lock(queue_);
    if (is_failed_ || of.jobs.empty()) {
      return false;
    }
    const Job& job = of.jobs.front();
    move = job.move.get();
    piece = &job.pieces[job.next];
    number = of.n_enqueued + 1;
    if (piece->after[other(lane)] > lanes_[other(lane)].n_enqueued) {
      return false;
    }
  }
  Status status;
  try {
    bool has_room = false;
    status = make_way(lane, may_wait, &has_room);
    if (status.is_ok() && !has_room) {
      return false;
    }
    if (status.is_ok()) {
      status = enqueue(lane, number, *move, *piece);
    }
  } catch (const std::bad_alloc&) {
    status = Status::fixed(KVM_ERR_NO_MEMORY, "no memory to enqueue copies with");
  }
  if (!status.is_ok()) {
    fail(std::move(status));
    return false;
  }
  return true;
}

Status Mover::make_way(Lane lane, bool may_wait, bool* has_room) {
  for (;;) {
    EventPtr oldest;
    {
      const std::lock_guard lock(queue_);
      *has_room = lanes_[lane].events.size() < kDepth;
      if (*has_room) {
        return Status::ok();
      }
      oldest = lanes_[lane].events.front();
    }
    KVM_TRY_ASSIGN(const bool done, driver_->is_done(oldest.get()));
    if (!done) {
      if (!may_wait) {
        return Status::ok();
      }
      KVM_TRY(driver_->synchronize(oldest.get()));
    }
    const std::lock_guard lock(queue_);
    if (!lanes_[lane].events.empty() && lanes_[lane].events.front() == oldest) {
      lanes_[lane].events.pop_front();
    }
  }
}

void Mover::forget_done(Lane lane) {
  for (;;) {
    EventPtr oldest;
    {
      const std::lock_guard lock(queue_);
      if (lanes_[lane].events.empty()) {
        return;
      }
      oldest = lanes_[lane].events.front();
    }
    const Result<bool> done = driver_->is_done(oldest.get());
    if (!done.is_ok() || !done.value()) {
      return;
    }
    // Somebody else may have asked as well.
    const std::lock_guard lock(queue_);
    if (!lanes_[lane].events.empty() && lanes_[lane].events.front() == oldest) {
      lanes_[lane].events.pop_front();
    }
  }
}

Status Mover::wait_for(Stream stream, Lane lane, uint64_t ticket) {
  // Of the piece and the one before it, on the lane's two streams; null: done.
  EventPtr last[2];
  {
    const std::lock_guard lock(queue_);
    const LaneState& of = lanes_[lane];
    const uint64_t n_done = of.n_enqueued - of.events.size();
    for (uint64_t i = 0; i < 2 && ticket > n_done + i; ++i) {
      last[i] = of.events[ticket - i - n_done - 1];
    }
  }
  for (const EventPtr& event : last) {
    if (event != nullptr) {
      KVM_TRY(driver_->wait(stream, event.get()));
    }
  }
  return Status::ok();
}

Status Mover::enqueue(Lane lane, uint64_t number, const Move& move, const Piece& piece) {
  LaneState& of = lanes_[lane];
  const Stream stream = of.streams[number % 2];
  KVM_TRY_ASSIGN(EventPtr done, events_->take());
  KVM_TRY(driver_->wait(stream, move.before.get()));
  for (const Lane which : kLanes) {
    KVM_TRY(wait_for(stream, which, piece.after[which]));
  }
  if (!move.is_cancelled.load(std::memory_order_relaxed)) {
    KVM_TRY(copy_piece(lane, number, piece));
  }
  KVM_TRY(driver_->record(done.get(), stream));
  const std::lock_guard lock(queue_);
  of.events.push_back(std::move(done));
  of.n_enqueued = number;
  Job& job = of.jobs.front();
  if (++job.next == job.pieces.size()) {
    of.jobs.pop_front();
  }
  return Status::ok();
}

Status Mover::copy_piece(Lane lane, uint64_t number, const Piece& piece) {
  const Stream stream = lanes_[lane].streams[number % 2];
  stretches_.clear();
  size_t page = 0;
  bool is_long = true;
  for (const Piece::Run& run : piece.runs) {
    for (uint32_t i = 0; i < run.n_pages; ++i, ++page) {
      const auto offset = static_cast<uint32_t>(run.offset + i * run.page_bytes);
      if (!stretches_.empty() &&
          stretches_.back().on_device + stretches_.back().size_bytes == piece.pages[page] &&
          stretches_.back().offset + stretches_.back().size_bytes == offset) {
        stretches_.back().size_bytes += run.page_bytes;
      } else {
        is_long = is_long && (stretches_.empty() || stretches_.back().size_bytes >= kLongPiece);
        stretches_.push_back({piece.pages[page], offset, run.page_bytes});
      }
    }
  }
  // What lies in several chunks consists of long pages.
  if (kernels_ == nullptr || piece.chunks.size() > 1 ||
      (is_long && (stretches_.size() == 1 || stretches_.back().size_bytes >= kLongPiece))) {
    for (const Stretch& stretch : stretches_) {
      KVM_TRY(copy_stretch(lane, piece, stretch, stream));
    }
    return Status::ok();
  }
  uint8_t* const bounce = lanes_[lane].bounce[number % 2];
  const uint32_t begin = piece.runs.front().offset;
  const uint64_t size =
      piece.runs.back().offset + piece.runs.back().n_pages * piece.runs.back().page_bytes - begin;
  if (lane == kToDevice) {
    KVM_TRY(copy(lane, bounce, piece.chunks[0] + begin, size, stream));
  }
  page = 0;
  for (const Piece::Run& run : piece.runs) {
    attention::gpu::MoveParams move;
    move.page_bytes = run.page_bytes;
    move.pack = lane == kToHost;
    for (uint32_t i = 0; i < run.n_pages; i += move.n_pages) {
      move.packed = bounce + (run.offset - begin) + i * run.page_bytes;
      move.n_pages = std::min(run.n_pages - i, attention::gpu::kMaxMovedPages);
      std::copy_n(piece.pages.begin() + static_cast<std::ptrdiff_t>(page), move.n_pages,
                  move.pages);
      page += move.n_pages;
      KVM_TRY(kernels_->move(move, stream));
    }
  }
  return lane == kToHost ? copy(lane, bounce, piece.chunks[0] + begin, size, stream) : Status::ok();
}

Status Mover::copy_stretch(Lane lane, const Piece& piece, const Stretch& stretch, Stream stream) {
  for (uint64_t done = 0; done < stretch.size_bytes;) {
    const uint64_t at = stretch.offset + done, in_chunk = at % kChunkBytes;
    const uint64_t size = std::min(stretch.size_bytes - done, kChunkBytes - in_chunk);
    KVM_TRY(copy(lane, stretch.on_device + done, piece.chunks[at / kChunkBytes] + in_chunk, size,
                 stream));
    done += size;
  }
  return Status::ok();
}

Status Mover::copy(Lane lane, uint8_t* on_device, uint8_t* on_host, uint64_t size_bytes,
                   Stream stream) {
  n_copies_.fetch_add(1, std::memory_order_relaxed);
  return lane == kToHost ? driver_->copy(on_host, on_device, size_bytes, stream)
                         : driver_->copy(on_device, on_host, size_bytes, stream);
}

void Mover::fail(Status status) {
  // Part of a piece may be under way, to or from pages that somebody else is about to get.
  (void)synchronize();
  const std::lock_guard lock(queue_);
  for (LaneState& lane : lanes_) {
    lane.jobs.clear();
    lane.events.clear();
  }
  failure_ = std::move(status);
  is_failed_ = true;
}

}  // namespace kvm::device
