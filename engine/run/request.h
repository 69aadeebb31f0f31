// SPDX-License-Identifier: Apache-2.0
// A Request is one in flight. Internal to the engine.
#ifndef KVM_ENGINE_RUN_REQUEST_H_
#define KVM_ENGINE_RUN_REQUEST_H_

#include <array>
#include <atomic>
#include <boost/intrusive/list.hpp>
#include <boost/intrusive/unordered_set.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <variant>
#include <vector>

#include "base/assert.h"
#include "base/splitmix.h"
#include "engine/engine.h"
#include "engine/index/index_work.h"
#include "engine/retention/retention_work.h"
#include "engine/run/arrivals.h"
#include "engine/run/read_work.h"
#include "engine/run/sequence_order.h"
#include "engine/run/step.h"
#include "engine/run/tail_fetch.h"
#include "engine/space/validate.h"
#include "engine/stream/page_stream.h"
#include "engine/tasks/scheduler.h"

namespace kvm::engine {

// A Phase says where a request is in its life. Only the driver changes it, and never while tasks of
// the request run, which it tells what to do.
//
//   kWaiting -> kReady -> kIndexing -> [kFetching] -> [kPlanning] -> [kFetching] -> kComputing ->
//                                      [kFetching -> kComputing ...] -> kRetaining -> kDone
//                                   -> kInParts -> kDone
//                                   -> kStoring -> kDone
//
// Any phase may end in kDone: the request fails, is cancelled, or its client leaves.
enum class Phase : uint8_t {
  kWaiting,    // behind an earlier request of one of its sequences
  kReady,      // may start as soon as the scheduler has room
  kIndexing,   // started: what it wants of indexes is made first
  kFetching,   // waits for room to append, a tail to append to, a ring, or its first window; each
               // of its jobs may have windows
  kPlanning,   // a step that has begun and is not planned to its end
  kInParts,    // frees or cuts a sequence, some pages at a time
  kStoring,    // Snapshots go on with it, beside others of its sequence
  kComputing,  // its own tasks
  kRetaining,  // policies act on what it committed
  kDone,       // the callback is due
};

// Whether `next` may follow `phase`.
constexpr bool may_follow(Phase phase, Phase next) {
  switch (phase) {
    case Phase::kWaiting:
      return next == Phase::kReady || next == Phase::kDone;
    case Phase::kReady:
      return next == Phase::kIndexing || next == Phase::kDone;
    case Phase::kIndexing:
      return next == Phase::kFetching || next == Phase::kPlanning || next == Phase::kInParts ||
             next == Phase::kStoring || next == Phase::kComputing || next == Phase::kDone;
    case Phase::kFetching:
      return next == Phase::kPlanning || next == Phase::kComputing || next == Phase::kDone;
    case Phase::kPlanning:
      return next == Phase::kFetching || next == Phase::kComputing || next == Phase::kDone;
    case Phase::kComputing:
      return next == Phase::kFetching || next == Phase::kRetaining || next == Phase::kDone;
    case Phase::kInParts:
    case Phase::kStoring:
    case Phase::kRetaining:
      return next == Phase::kDone;
    case Phase::kDone:
      break;
  }
  return false;
}

// These hooks list and find requests without allocating: links within them, which undo themselves.
struct ByLine;
struct ByName;
using LineHook =
    boost::intrusive::list_base_hook<boost::intrusive::tag<ByLine>,
                                     boost::intrusive::link_mode<boost::intrusive::auto_unlink>>;
using NameHook = boost::intrusive::unordered_set_base_hook<
    boost::intrusive::tag<ByName>, boost::intrusive::link_mode<boost::intrusive::auto_unlink>>;

// What a request is about to do with its sequence.
inline Access access_of(SeqVerb verb) {
  switch (verb) {
    case SeqVerb::kFork:
    case SeqVerb::kFree:
    case SeqVerb::kTake:
    case SeqVerb::kPrefetch:
    case SeqVerb::kSetPriority:
      return Access::kUse;
    default:
      return Access::kChange;
  }
}

inline Status client_is_gone() { return Status::fixed(KVM_ERR_CANCELLED, "the client is gone"); }
inline Status cancelled() { return Status::fixed(KVM_ERR_CANCELLED, "cancelled"); }

// A Request is used again from request to request: its buffers keep their size.
struct Request final : TaskSet, StreamListener, LineHook, NameHook {
  Request(std::vector<ThreadWorkspace>* workspaces, Arrivals* arrived)
      : thread_workspaces(workspaces), arrivals(arrived) {}

  void on_arrival() noexcept override { arrivals->post(this); }

  void run(uint32_t task, uint32_t thread) override {
    if (phase == Phase::kComputing && window_of(task) != kNoWindow) {
      run_in_window(task, thread);
      return;
    }
    // Slices of policies are short, and are never left half done.
    if (is_abandoned.load(std::memory_order_relaxed) && phase != Phase::kRetaining) {
      return;
    }
    ThreadWorkspace& workspace = (*thread_workspaces)[thread];
    switch (phase) {
      case Phase::kIndexing:
        indexing.run(task, workspace);
        return;
      case Phase::kComputing:
        if (std::holds_alternative<StepRequest>(what)) {
          step.run(task, workspace);
        } else {
          read.run(task);
        }
        return;
      case Phase::kRetaining:
        retention.run(task, workspace);
        return;
      default:
        KVM_ASSERT(!"a request of this phase has no tasks");
    }
  }

  // The window must hear that the task is over, even where it has had nothing to do.
  void run_in_window(uint32_t task, uint32_t thread) {
    if (!is_abandoned.load(std::memory_order_relaxed) && !stream.has_failed()) {
      if (std::holds_alternative<StepRequest>(what)) {
        step.run(task, (*thread_workspaces)[thread]);
      } else {
        read.run(task);
      }
    }
    stream.end_task(window_of(task));
  }
  uint32_t window_of(uint32_t task) const {
    if (!stream.has_begun()) {
      return kNoWindow;
    }
    return std::holds_alternative<StepRequest>(what) ? step.window_of(task) : read.window_of(task);
  }
  // What comes window by window; null: nothing does.
  StreamSource* source() {
    if (std::holds_alternative<StepRequest>(what)) {
      return step.windows();
    }
    return std::holds_alternative<ReadRequest>(what) && read.has_windows() ? &read : nullptr;
  }

  void enter(Phase next) {
    KVM_ASSERT(may_follow(phase, next));
    phase = next;
    KVM_CHECK_INVARIANT(is_valid());
  }
  // Says whether what it asks for has such a phase.
  bool is_valid() const {
    const auto* seq = std::get_if<SeqRequest>(&what);
    switch (phase) {
      case Phase::kPlanning:
        return std::holds_alternative<StepRequest>(what);
      case Phase::kFetching:
        return std::holds_alternative<StepRequest>(what) ||
               std::holds_alternative<ReadRequest>(what);
      case Phase::kInParts:
        return seq != nullptr && (seq->verb == SeqVerb::kTruncate || seq->verb == SeqVerb::kFree ||
                                  seq->verb == SeqVerb::kPublish || seq->verb == SeqVerb::kTake);
      case Phase::kStoring:
        return std::holds_alternative<SnapshotRequest>(what);
      default:
        return is_orphan == is_abandoned.load(std::memory_order_relaxed);
    }
  }
  // Not yet started: it may be dropped as if it had never been.
  bool is_pending() const { return phase == Phase::kWaiting || phase == Phase::kReady; }
  // Started and not finished: it counts as running.
  bool is_started() const { return !is_pending() && phase != Phase::kDone; }
  bool is_wanted() const { return !is_orphan && !is_cancelled; }
  Status reason_unwanted() const { return is_orphan ? client_is_gone() : cancelled(); }

  std::vector<ThreadWorkspace>* thread_workspaces;
  Arrivals* arrivals;
  bool is_posted = false;  // theirs
  ClientId client = 0;
  RequestTag tag;
  Phase phase = Phase::kWaiting;
  bool is_orphan = false;           // its client is gone: no callback
  bool is_cancelled = false;        // before it computed
  bool is_running = false;          // it counts as that: started, and not waiting for pages
  bool is_next = false;             // it waits for a turn to run, once it has pages
  bool is_reading = false;          // read_epoch has begun, and not ended
  bool is_parked = false;           // it waits for room, has nothing of it, and reads nothing
  uint64_t room_number = 0;         // its place among its client's; 0: it never waited for room
  uint64_t room_bytes = 0;          // what it waits for, as it was when it began to
  bool has_waited_in_vain = false;  // nothing may go any more: it waits no further
  // Of the memory that was free when it was tried last, what others have not taken since; 0: it was
  // not tried. And what its own tails took that came back for it since.
  uint64_t room_tried_bytes = 0;
  uint64_t tail_bytes = 0;
  // The same for tasks, which then do nothing: nobody sees what they would have written.
  std::atomic<bool> is_abandoned{false};
  uint64_t cost = 0;   // estimate, in bytes of K and V that are read or written
  uint32_t index = 0;  // in the engine's list of requests
  uint64_t submitted_ns = 0;
  uint64_t read_epoch = 0;  // once it has started (tiers/read_epochs.h)
  DoneCallback on_done;
  RequestResult result;
  std::variant<StepRequest, ReadRequest, ObserveRequest, SeqRequest, SnapshotRequest> what;
  std::variant<StepTensors, ReadTensors, ObserveTensors> tensors;
  std::vector<kvm_seq_id> seqs;  // that it touches, each once
  SequenceOrder::Ticket ticket;
  IndexWork indexing;  // what has to be done before it begins
  Step step;
  ReadWork read;
  RetentionWork retention;  // what it ends with
  TailFetch tails;
  PageStream stream;  // of its windows, from when it has a ring to the end of its job
};

// A RequestLine has requests in order, of which each stands in one line at most. Any leaves it by
// LineHook::unlink().
using RequestLine = boost::intrusive::list<Request, boost::intrusive::base_hook<LineHook>,
                                           boost::intrusive::constant_time_size<false>>;

// RequestNames find requests by client and tag, of which several may have the same. LIMIT: buckets
// for as many requests as some clients have in flight; beyond, a search takes longer, as it does
// for a client that chooses numbers which meet in a bucket.
class RequestNames {
 public:
  void enter(Request* request) { table_.insert(*request); }
  static void leave(Request* request) { request->NameHook::unlink(); }
  // Calls f(Request*) for each of that name; f may not let any leave.
  template <typename F>
  void for_each(ClientId client, RequestTag tag, F f) {
    const auto [begin, end] = table_.equal_range(Name{client, tag});
    for (auto it = begin; it != end; ++it) {
      f(&*it);
    }
  }

 private:
  struct Name {
    ClientId client;
    RequestTag tag;
    bool operator==(const Name& other) const {
      return client == other.client && tag.queue == other.tag.queue &&
             tag.number == other.tag.number;
    }
  };
  struct NameOf {
    using type = Name;
    Name operator()(const Request& request) const { return {request.client, request.tag}; }
  };
  struct Hash {
    size_t operator()(const Name& name) const {
      return splitmix64(splitmix64(splitmix64(name.client) + name.tag.queue) + name.tag.number);
    }
  };
  using Table = boost::intrusive::unordered_multiset<
      Request, boost::intrusive::base_hook<NameHook>, boost::intrusive::key_of_value<NameOf>,
      boost::intrusive::hash<Hash>, boost::intrusive::equal<std::equal_to<Name>>,
      boost::intrusive::power_2_buckets<true>, boost::intrusive::constant_time_size<false>>;

  std::array<Table::bucket_type, 4096> buckets_;
  Table table_{Table::bucket_traits(buckets_.data(), buckets_.size())};
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RUN_REQUEST_H_
