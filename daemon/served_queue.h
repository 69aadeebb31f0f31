// SPDX-License-Identifier: Apache-2.0
// The daemon's side of one queue: takes entries from the request ring, remembers what is in flight,
// and publishes completions.
//
// INVARIANT: requests in flight and completions not yet taken by the client are together at most
// kCompletionEntries, so a completion always has a slot.
//
// Threads: the dispatcher.
#ifndef KVM_DAEMON_SERVED_QUEUE_H_
#define KVM_DAEMON_SERVED_QUEUE_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "daemon/request_stats.h"
#include "ipc/fd.h"
#include "ipc/memory.h"
#include "ipc/ring.h"
#include "ipc/validate.h"
#include "ipc/wire.h"

namespace kvm::daemon {

class Session;
class ServedQueue;

// An InFlight is a request that the engine has. Its address stays the same until it is released.
struct InFlight {
  ServedQueue* queue = nullptr;
  uint64_t user_data = 0;
  ipc::ResultBlock* result = nullptr;
  ipc::RegionPins pins;
  uint64_t private_bytes = 0;  // of arrays copied out of the arena
  RequestVerb verb = RequestVerb::kNull;
  bool in_use = false;
};

class ServedQueue {
 public:
  ServedQueue(Session* session, uint32_t id, ipc::Mapping client_region, ipc::Mapping daemon_region,
              ipc::Fd eventfd);

  Session* session() const { return session_; }
  uint32_t id() const { return id_; }

  // Copies entries out of the ring: at most n_max, and as many as completions are sure to fit for.
  // Fails: PROTOCOL (an impossible index).
  Result<uint32_t> take(ipc::RequestEntry* out, uint32_t n_max);

  // Takes over what the request needs to be answered, and charges it to the session's account.
  // REQUIRES: take() returned it; the account has room.
  InFlight* begin(ipc::Request* request, uint64_t private_bytes);
  // Answers a request of begin() and releases it.
  void complete(InFlight* request, const ipc::CompletionEntry& entry, uint64_t seq,
                std::string_view sentence, uint64_t n_not_finite);
  // Answers a request that was never begun. entry.user_data is the client's.
  void complete_now(const ipc::CompletionEntry& entry);
  // Makes completions visible and wakes the client. Returns whether there were any.
  bool publish();

  uint32_t n_in_flight() const { return n_in_flight_; }
  uint64_t private_bytes() const { return private_bytes_; }
  // Calls f(const InFlight&) for each; f must not complete any.
  template <typename F>
  void for_each_in_flight(F f) const {
    for (const InFlight& request : in_flight_) {
      if (request.in_use) {
        f(request);
      }
    }
  }

  // Before sleep: raises sq_need_wakeup and looks again. False: there is something to take. Entries
  // that wait for the client to take completions are nothing to stay awake for: a client that makes
  // room rings, as for new entries (docs/protocol.md).
  bool prepare_sleep();
  void finish_sleep() { requests_.finish_sleep(); }

  // Says whether the client has asked for its eventfd to be written.
  bool wants_eventfd() const { return eventfd_.is_open() && completions_.wants_eventfd(); }
  int eventfd() const { return eventfd_.get(); }
  bool must_notify = false;             // completions were published since the last write
  bool notification_under_way = false;  // one write at a time

  // Being destroyed: nothing is taken any more, and the reply to this message is due at the end.
  bool closing = false;
  uint64_t close_message_id = 0;
  bool is_dirty = false;  // in the dispatcher's list of queues to publish

 private:
  // Requests that could be taken now with a slot left for the completion of each.
  Result<uint32_t> n_answerable() const;

  Session* session_;
  uint32_t id_;
  ipc::Mapping client_region_;
  ipc::Mapping daemon_region_;
  ipc::Fd eventfd_;
  ipc::RequestConsumer requests_;
  ipc::CompletionProducer completions_;
  std::vector<InFlight> in_flight_;
  std::vector<uint32_t> free_;
  uint32_t n_in_flight_ = 0;
  uint64_t private_bytes_ = 0;
};

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_SERVED_QUEUE_H_
