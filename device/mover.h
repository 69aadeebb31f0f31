// SPDX-License-Identifier: Apache-2.0
// Mover: copies between pages and chunks of the host, enqueued by a thread of its own.
//
// A Move is cut into Pieces, of a chunk or, where pages are longer, of several. There is a lane for
// each direction; pieces of a lane are enqueued in the order in which they were submitted, and
// numbered from 1: a ticket is a lane and a number. At most kDepth pieces of a lane are under way;
// before the next one somebody waits until the oldest is done. That is the thread of the mover, or
// whoever cannot go on until some piece is enqueued (finish, wait): they all call step, which takes
// turns.
//
// Consecutive pieces of a lane go to two streams in turn, each with a buffer on the device. Where
// pages do not lie together a kernel gathers them there (or spreads them) and one copy takes all:
// the kernel of one piece runs beside the copy of the one before. Without kernels every stretch of
// pages is a copy.
//
// A piece waits, on the device, for what the caller had enqueued when it was submitted, and for the
// tickets that it names. These were submitted before it, so the oldest piece can always go on.
//
// When the driver fails, everything that is not enqueued yet has failed: is_failed says so, and
// nothing more is enqueued, nothing counts as done, until acknowledge. What had been enqueued
// before has been waited for.
//
// Threads: any, but submit and acknowledge one at a time. Calls that wait hold no lock that those
// which do not wait take.
#ifndef KVM_DEVICE_MOVER_H_
#define KVM_DEVICE_MOVER_H_

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/status.h"
#include "device/driver.h"
#include "device/event_pool.h"
#include "device/host_chunks.h"

namespace kvm::device {

enum Lane : uint8_t { kToHost, kToDevice };
inline constexpr Lane kLanes[] = {kToHost, kToDevice};
constexpr Lane other(Lane lane) { return lane == kToHost ? kToDevice : kToHost; }

// Pieces of a lane that are under way at most. The link needs two; the rest is time for a thread
// to wake up in.
inline constexpr uint64_t kDepth = 8;
// A copy of at least so many bytes is worth more than a gather.
inline constexpr uint64_t kLongPiece = uint64_t{1} << 20;

// One number for each lane; 0: none.
using Tickets = std::array<uint64_t, 2>;

struct Move {
  Lane lane = kToHost;
  EventPtr before;     // of the caller's stream
  uint64_t first = 0;  // tickets of its pieces; last < first: it has none
  uint64_t last = 0;
  // Nobody wants the bytes: pieces keep their places in the order, and copy nothing.
  std::atomic<bool> is_cancelled{false};
};
using MovePtr = std::shared_ptr<Move>;

class Mover {
 public:
  // What one part of a sequence has on the host: pages in a chunk, or longer ones across several.
  struct Piece {
    struct Run {  // pages of one length, one behind the other
      uint32_t offset = 0;
      uint32_t n_pages = 0;
      uint64_t page_bytes = 0;
    };
    std::vector<uint8_t*> chunks;  // offsets count as if they lay side by side
    std::vector<uint8_t*> pages;   // of all runs
    std::vector<Run> runs;         // by ascending offset
    Tickets after{};
  };

  // Makes streams and buffers, and the thread where the driver's facts want one. `kernels`: the
  // same driver, or null: there are none. Fails: NO_MEMORY (no thread), DEVICE, NO_SPACE.
  static Result<std::unique_ptr<Mover>> create(MemoryDriver* driver, Driver* kernels,
                                               EventPool* events);
  // What is not enqueued yet is forgotten. REQUIRES: the device is waited for before pages and
  // chunks go.
  ~Mover();
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  struct Job {
    MovePtr move;
    std::vector<Piece> pieces;  // at least one
    size_t next = 0;            // of these, to be enqueued
  };

  // Numbers the move's pieces and queues them, in constant time and without asking for memory.
  // REQUIRES: one job.
  void submit(std::list<Job> job);
  // The number that the next piece that is submitted to a lane gets.
  uint64_t next_ticket(Lane lane) const;

  // Pieces of a lane that are enqueued.
  uint64_t n_enqueued(Lane lane) const;
  // Whether all pieces of a move are.
  bool is_enqueued(const Move& move) const;
  // Returns when they are, or the mover has failed. Waits for the device, as long as the pieces
  // before them take.
  void finish(const Move& move);
  // The same for all that was submitted.
  void finish_all();
  // Makes a stream wait for a piece and all before it in its lane; returns when that is enqueued.
  // Fails: DEVICE; or what the mover has failed with.
  Status wait(Stream stream, Lane lane, uint64_t ticket);
  // Returns when the piece and all before it have been done. Fails: as wait.
  Status drain(Lane lane, uint64_t ticket);
  // Whether they have. Asks the driver.
  bool is_done(Lane lane, uint64_t ticket);

  // Lets one piece be enqueued, if one waits; of `lane` rather than of the other. False: none does,
  // or the mover has failed.
  bool step(Lane lane);

  bool is_failed() const;
  // Takes the failure back. *good: the last piece of each lane that was enqueued; those behind it
  // never will be, and their tickets count as done from now on. REQUIRES: is_failed().
  Status acknowledge(Tickets* good);

  uint64_t n_copies() const { return n_copies_.load(std::memory_order_relaxed); }

 private:
  struct LaneState {
    Stream streams[2] = {};
    uint8_t* bounce[2] = {};
    std::list<Job> jobs;
    uint64_t n_submitted = 0;
    uint64_t n_enqueued = 0;
    std::deque<EventPtr> events;  // of the last pieces enqueued, those that may be under way
  };

  struct Stretch {  // bytes that lie together on both sides
    uint8_t* on_device = nullptr;
    uint32_t offset = 0;
    uint64_t size_bytes = 0;
  };

  Mover(MemoryDriver* driver, Driver* kernels, EventPool* events)
      : driver_(driver), kernels_(kernels), events_(events) {}
  Status init();
  void run();
  void finish_ticket(Lane lane, uint64_t ticket);
  // Likewise. Fails: with what the mover has failed with.
  Status await_enqueued(Lane lane, uint64_t ticket);
  void forget_done(Lane lane);
  // Waits for everything that is enqueued.
  Status synchronize();
  // These are for who holds running_.
  bool try_step(Lane lane, bool may_wait);
  Status make_way(Lane lane, bool may_wait, bool* has_room);
  Status enqueue(Lane lane, uint64_t number, const Move& move, const Piece& piece);
  Status copy_piece(Lane lane, uint64_t number, const Piece& piece);
  Status copy_stretch(Lane lane, const Piece& piece, const Stretch& stretch, Stream stream);
  Status copy(Lane lane, uint8_t* on_device, uint8_t* on_host, uint64_t size_bytes, Stream stream);
  Status wait_for(Stream stream, Lane lane, uint64_t ticket);
  void fail(Status status);

  MemoryDriver* const driver_;
  Driver* const kernels_;
  EventPool* const events_;
  std::mutex running_;        // held while pieces are enqueued and waited for
  mutable std::mutex queue_;  // of all below; never held in a call that waits
  std::condition_variable wake_;
  LaneState lanes_[2];
  Status failure_;
  bool is_failed_ = false;
  bool is_ending_ = false;
  std::thread thread_;
  std::atomic<uint64_t> n_copies_{0};
  std::vector<Stretch> stretches_;  // scratch, of who holds running_
};

}  // namespace kvm::device

#endif  // KVM_DEVICE_MOVER_H_
