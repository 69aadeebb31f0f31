// SPDX-License-Identifier: Apache-2.0
// A request in flight. Internal to the engine.
#ifndef KVM_ENGINE_REQUEST_H_
#define KVM_ENGINE_REQUEST_H_

#include <array>
#include <atomic>
#include <boost/intrusive/list.hpp>
#include <boost/intrusive/unordered_set.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <variant>
#include <vector>

#include "base/splitmix.h"
#include "engine/aging_work.h"
#include "engine/engine.h"
#include "engine/index_work.h"
#include "engine/read_work.h"
#include "engine/scheduler.h"
#include "engine/sequence_order.h"
#include "engine/step.h"
#include "engine/validate.h"

namespace kvm::engine {

enum class RequestState : uint8_t {
  kWaiting,  // behind an earlier request of one of its sequences
  kReady,    // may start as soon as the scheduler has room
  kRunning,
  kDone,  // the callback is due
};

// What lists and finds requests without allocating: links within them, which undo themselves.
struct ByLine;
struct ByName;
using LineHook =
    boost::intrusive::list_base_hook<boost::intrusive::tag<ByLine>,
                                     boost::intrusive::link_mode<boost::intrusive::auto_unlink>>;
using NameHook = boost::intrusive::unordered_set_base_hook<
    boost::intrusive::tag<ByName>, boost::intrusive::link_mode<boost::intrusive::auto_unlink>>;

// Reused from request to request: its buffers keep their size.
struct Request final : TaskSet, LineHook, NameHook {
  explicit Request(std::vector<ThreadWorkspace>* workspaces) : thread_workspaces(workspaces) {}

  void run(uint32_t task, uint32_t thread) override {
    // Slices of policies are short, and are never left half done.
    if (is_abandoned.load(std::memory_order_relaxed) && !aging.is_running()) {
      return;
    }
    if (indexing.is_running()) {
      indexing.run(task, (*thread_workspaces)[thread]);
    } else if (aging.is_running()) {
      aging.run(task, (*thread_workspaces)[thread]);
    } else if (std::holds_alternative<StepRequest>(what)) {
      step.run(task, (*thread_workspaces)[thread]);
    } else {
      read.run(task);
    }
  }

  std::vector<ThreadWorkspace>* thread_workspaces;
  ClientId client = 0;
  RequestTag tag;
  RequestState state = RequestState::kWaiting;
  bool is_orphan = false;    // its client is gone: no callback
  bool is_in_parts = false;  // has begun to free or to cut its sequence, and is not done
  // The same for tasks, which then do nothing: nobody sees what they would have written.
  std::atomic<bool> is_abandoned{false};
  uint64_t cost = 0;   // estimate, in bytes of K and V that are read or written
  uint32_t index = 0;  // in the engine's list of requests
  uint64_t submitted_ns = 0;
  DoneCallback on_done;
  RequestResult result;
  std::variant<StepRequest, ReadRequest, ObserveRequest, SeqRequest> what;
  std::variant<StepTensors, ReadTensors, ObserveTensors> tensors;
  std::vector<kvm_seq_id> seqs;  // that it touches, each once
  SequenceOrder::Ticket ticket;
  IndexWork indexing;  // what has to be done before it begins
  Step step;
  ReadWork read;
  AgingWork aging;  // what it ends with
};

// Requests in order, of which each stands in one line at most. Any leaves it by LineHook::unlink().
using RequestLine = boost::intrusive::list<Request, boost::intrusive::base_hook<LineHook>,
                                           boost::intrusive::constant_time_size<false>>;

// Requests by client and tag, of which several may have the same. LIMIT: buckets for as many
// requests as some clients have in flight; beyond, a search takes longer, as it does for a client
// that chooses numbers which meet in a bucket.
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

#endif  // KVM_ENGINE_REQUEST_H_
