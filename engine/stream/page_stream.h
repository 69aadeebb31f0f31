// SPDX-License-Identifier: Apache-2.0
// A PageStream brings pages of a slow tier to the tasks of one job, through a ring of frames: in
// windows, of which as many are in memory at a time as the ring has slots.
//
//   begin (driver) --> start: the transfers of the first windows begin
//   a window's last transfer --> the tasks of all windows up to there may run (Scheduler::open)
//   a window's last task --> its slot is free: the transfers of the window n_slots later begin
//
// So nobody waits for a page: no thread, and, before the first window is there, no slot of the
// scheduler. The ring is there, whole, before anything begins: no stream waits for another that has
// begun, whatever the size of the memory. Every page is read once.
//
// A transfer that fails ends the stream: what has begun comes to its end, nothing else begins, and
// all tasks are opened, which then have nothing to do (has_failed()).
//
// Threads: as said at each function.  Memory: a transfer for each page of the ring; of each window
// some bytes.
#ifndef KVM_ENGINE_STREAM_PAGE_STREAM_H_
#define KVM_ENGINE_STREAM_PAGE_STREAM_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/round.h"
#include "base/status.h"
#include "engine/tasks/scheduler.h"
#include "tiers/host/ring_memory.h"
#include "tiers/slow_tier.h"

namespace kvm::engine {

// A StreamRead is one page that comes to a slot.
struct StreamRead {
  tiers::PlaceId place = tiers::kNoPlace;
  std::byte* to = nullptr;
  uint32_t size_bytes = 0;
};

// Of a task that belongs to no window.
inline constexpr uint32_t kNoWindow = UINT32_MAX;

// A StreamShape says how large a stream is.
struct StreamShape {
  // So a window begins when all those are done, with their tasks, that are so many before it.
  static constexpr uint32_t kMaxSlots = 8;

  uint32_t n_windows = 0;
  uint32_t max_pages = 0;   // of a window
  uint64_t slot_bytes = 0;  // a multiple of the ring's alignment
  uint32_t n_slots = 0;     // of the ring, at most kMaxSlots

  uint64_t ring_bytes() const { return slot_bytes * n_slots; }
  void add_window(uint32_t n_pages, uint64_t size_bytes) {
    ++n_windows;
    max_pages = std::max(max_pages, n_pages);
    slot_bytes = std::max(slot_bytes, round_up(size_bytes, tiers::RingMemory::kAlign));
  }
};

// A StreamSource knows what the windows of a stream consist of.
class StreamSource {
 public:
  // Of all windows; n_slots is left to the caller.
  virtual StreamShape shape() const = 0;
  // Lists what window `window` reads into its slot, at most StreamShape::max_pages, and makes the
  // window's tasks look there. Any thread, once for each window; no task of it has begun. Must not
  // throw or block.
  virtual uint32_t place_window(uint32_t window, std::byte* slot, StreamRead* reads) = 0;
  // Tasks of the job up to the last of this window; at least one more than of the one before.
  virtual uint32_t tasks_end(uint32_t window) const = 0;
  // Tasks of the job before those of the first window, which wait for none.
  virtual uint32_t n_free_tasks() const = 0;
  // Whether these are worth a slot of the scheduler while the first window is on its way.
  virtual bool is_part_there() const = 0;

 protected:
  ~StreamSource() = default;
};

// A StreamListener hears that windows have come while there is no job yet. Any thread; with the
// stream's lock held: it must not call the stream.
class StreamListener {
 public:
  virtual void on_arrival() noexcept = 0;

 protected:
  ~StreamListener() = default;
};

class PageStream {
 public:
  PageStream() = default;
  PageStream(const PageStream&) = delete;
  PageStream& operator=(const PageStream&) = delete;

  // Driver. What the arguments name stays alive until end(). ring: shape.ring_bytes().
  // Throws std::bad_alloc: nothing has begun.
  void begin(tiers::SlowTier* tier, StreamSource* source, StreamListener* listener,
             const StreamShape& shape, std::byte* ring);
  bool has_begun() const { return tier_ != nullptr; }
  std::byte* ring() const { return ring_; }
  const StreamShape& shape() const { return shape_; }
  // Driver: the first transfers begin.
  void start();
  // Driver: whether some window is there, or none is to be waited for.
  bool is_ready();
  // Driver: starts the job, of which the tasks are open that need wait for nothing. The stream
  // opens the others. REQUIRES: scheduler->has_room(); plan.n_tasks is all of them.
  void start_job(Scheduler* scheduler, TaskSet* set, JobPlan plan);
  // Any thread: a task of the window has ended, or has nothing to do.
  void end_task(uint32_t window);
  // Any thread: no more transfers begin; their windows count as come, and end() says why. After an
  // error of a transfer the stream does this by itself. The first reason counts.
  void stop(const Status& why);
  // Any thread: whether tasks have nothing to do, for what they would read is not there.
  bool has_failed() const { return is_stopped_.load(std::memory_order_acquire); }
  // Driver: whether no transfer is in flight and none will be. It is so when the job has ended.
  bool is_over();
  // Driver, REQUIRES: is_over(). Returns why it was stopped; OK: it was not.
  Status end();

 private:
  struct Read final : tiers::Transfer {
    void on_done() noexcept override { stream->end_read(this); }
    PageStream* stream = nullptr;
    uint32_t window = 0;
  };
  enum class State : uint8_t { kWaiting, kBegun, kThere };
  struct Window {
    std::atomic<uint32_t> n_reads{0};  // in flight, and one while they are submitted
    std::atomic<uint32_t> n_tasks{0};  // not ended
    State state = State::kWaiting;     // under the lock
  };

  // REQUIRES: its state is kBegun, and the slot is free.
  void begin_window(uint32_t window);
  void end_read(Read* read);
  void end_one(uint32_t window);
  // Whether the caller is to begin the window: it waits, and has not been stopped.
  bool claim(uint64_t window);
  // With the lock held.
  void note_there();
  uint32_t n_open() const;

  tiers::SlowTier* tier_ = nullptr;
  StreamSource* source_ = nullptr;
  StreamListener* listener_ = nullptr;
  StreamShape shape_;
  std::byte* ring_ = nullptr;
  std::unique_ptr<Window[]> windows_;
  std::unique_ptr<Read[]> reads_;                // [n_slots][max_pages]
  std::unique_ptr<tiers::Transfer*[]> to_tier_;  // likewise
  std::unique_ptr<StreamRead[]> listed_;         // likewise
  std::atomic<bool> is_stopped_{false};
  std::mutex mutex_;                // guards what follows, and the states of windows
  uint32_t n_there_ = 0;            // windows, the first ones
  Scheduler* scheduler_ = nullptr;  // once the job has started
  JobHandle job_{};
  Status status_;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STREAM_PAGE_STREAM_H_
