// SPDX-License-Identifier: Apache-2.0
#include "daemon/served_queue.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "daemon/session.h"

namespace kvm::daemon {

ServedQueue::ServedQueue(Session* session, uint32_t id, ipc::Mapping client_region,
                         ipc::Mapping daemon_region, ipc::Fd eventfd)
    : session_(session),
      id_(id),
      client_region_(std::move(client_region)),
      daemon_region_(std::move(daemon_region)),
      eventfd_(std::move(eventfd)),
      requests_(reinterpret_cast<const ipc::ClientRegion*>(client_region_.data()),
                reinterpret_cast<ipc::DaemonRegion*>(daemon_region_.data())),
      completions_(reinterpret_cast<const ipc::ClientRegion*>(client_region_.data()),
                   reinterpret_cast<ipc::DaemonRegion*>(daemon_region_.data())),
      in_flight_(ipc::kCompletionEntries) {
  for (uint32_t i = ipc::kCompletionEntries; i > 0; --i) {
    free_.push_back(i - 1);
  }
}

// kMaxOutstanding requests and a cancel for each of them fit, so entries of libkvm never wait here.
Result<uint32_t> ServedQueue::n_answerable() const {
  KVM_TRY_ASSIGN(const uint32_t room, completions_.room());
  return room > n_in_flight_ ? room - n_in_flight_ : 0;
}

Result<uint32_t> ServedQueue::take(ipc::RequestEntry* out, uint32_t n_max) {
  KVM_TRY_ASSIGN(const uint32_t n_free, n_answerable());
  return requests_.take(out, std::min(n_max, n_free));
}

bool ServedQueue::prepare_sleep() {
  if (requests_.prepare_sleep()) {
    return true;
  }
  // SYNC: the flag is up, sequentially consistent, before cq_head is read: either this look sees
  // the room, or the client that has made it sees the flag.
  requests_.raise_wakeup();
  const Result<uint32_t> n_free = n_answerable();
  if (n_free.is_ok() && n_free.value() == 0) {
    return true;
  }
  requests_.finish_sleep();
  return false;
}

InFlight* ServedQueue::begin(ipc::Request* request, uint64_t private_bytes) {
  KVM_ASSERT(!free_.empty());
  InFlight& slot = in_flight_[free_.back()];
  free_.pop_back();
  slot.queue = this;
  slot.user_data = request->user_data;
  slot.result = request->result;
  slot.pins = std::move(request->pins);
  slot.private_bytes = private_bytes;
  slot.in_use = true;
  ++n_in_flight_;
  private_bytes_ += private_bytes;
  session_->account->charge(engine::Resource::kRequests, 1);
  return &slot;
}

void ServedQueue::complete(InFlight* request, const ipc::CompletionEntry& entry, uint64_t seq,
                           std::string_view sentence, uint64_t n_not_finite) {
  KVM_ASSERT(request->in_use);
  ipc::write_result(request->result, seq, sentence, n_not_finite);
  request->pins.release();
  request->in_use = false;
  --n_in_flight_;
  private_bytes_ -= request->private_bytes;
  session_->give_back(engine::Resource::kRequests, 1);
  free_.push_back(static_cast<uint32_t>(request - in_flight_.data()));
  completions_.stage(entry);
}

void ServedQueue::complete_now(const ipc::CompletionEntry& entry) { completions_.stage(entry); }

bool ServedQueue::publish() { return completions_.publish(); }

}  // namespace kvm::daemon
