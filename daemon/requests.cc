// SPDX-License-Identifier: Apache-2.0
#include "daemon/requests.h"

#include <fmt/format.h>

#include <new>
#include <utility>
#include <variant>
#include <vector>

#include "base/kill_point.h"

namespace kvm::daemon {
namespace {

uint64_t private_bytes_of(const StepRequest& step) {
  return step.items.size() * sizeof(kvm_item) + step.ranges.size() * sizeof(kvm_range) +
         step.tree_mask.size() * sizeof(uint64_t);
}
template <typename Message>
uint64_t private_bytes_of(const Message&) {
  return 0;
}

RequestVerb verb_of(const StepRequest& step) {
  return !step.attend  ? RequestVerb::kAppend
         : step.append ? RequestVerb::kStep
                       : RequestVerb::kAttend;
}
RequestVerb verb_of(const ReadRequest&) { return RequestVerb::kRead; }
RequestVerb verb_of(const ObserveRequest&) { return RequestVerb::kObserve; }
RequestVerb verb_of(const SeqRequest&) { return RequestVerb::kSequence; }
RequestVerb verb_of(const SnapshotRequest&) { return RequestVerb::kSnapshot; }

void mark_dirty(ServedQueue* queue) {
  if (!queue->is_dirty) {
    queue->is_dirty = true;
    queue->session()->service()->dirty.push_back(queue);
  }
}

void finish(InFlight* request, RequestResult&& result) {
  ServedQueue* queue = request->queue;
  const ipc::CompletionEntry entry = {.user_data = request->user_data,
                                      .status = result.status.code(),
                                      .mode = result.mode,
                                      .keys_present = result.keys_present,
                                      .keys_read = result.keys_read,
                                      .bytes_read = result.bytes_read,
                                      .service_ns = result.service_ns,
                                      .compute_ns = result.compute_ns,
                                      .err_max = result.err_max,
                                      .n_exact = result.n_exact};
  queue->session()->service()->requests.add(request->verb, result);
  KVM_KILL_POINT("daemon/request_finished");
  queue->complete(request, entry, result.seq, result.status.message(), result.n_not_finite);
  mark_dirty(queue);
}

// A Dispatch does what each kind of message asks for.
struct Dispatch {
  Session* session;
  ServedQueue* queue;
  ipc::Request* request;

  void operator()(ipc::NopMessage&) const { answer(KVM_OK); }

  void operator()(ipc::CancelMessage& cancel) const {
    const bool known = session->service()->engine->cancel(
        session->client, engine::RequestTag{queue->id(), cancel.user_data});
    ipc::write_result(request->result, 0,
                      known ? "" : "no request with this number is outstanding");
    answer(known ? KVM_OK : KVM_ERR_NOT_FOUND);
  }

  template <typename Message>
  void operator()(Message& message) const {
    const Status room = session->account->check(engine::Resource::kRequests, 1, "a request");
    if (!room.is_ok()) {
      ipc::write_result(request->result, 0, room.message());
      answer(room.code());
      return;
    }
    session->note_engine();
    const uint64_t private_bytes = private_bytes_of(message);
    session->copied_bytes += private_bytes;
    InFlight* slot = queue->begin(request, private_bytes);
    slot->verb = verb_of(message);
    session->service()->engine->submit(
        session->client, engine::RequestTag{queue->id(), slot->user_data}, std::move(message),
        [slot](RequestResult&& result) { finish(slot, std::move(result)); });
  }

  void answer(kvm_status status) const { answer_request(queue, request->user_data, status); }
};

}  // namespace

void dispatch_request(Session* session, ServedQueue* queue, ipc::Request&& request) {
  // One client's request must not take the others down with it, whatever a library throws.
  try {
    std::visit(Dispatch{session, queue, &request}, request.message);
  } catch (const std::bad_alloc&) {
    // Before the engine had it, which answers for itself.
    answer_no_memory(queue, request);
  } catch (const std::exception& error) {
    session->doom(error.what());
  }
}

void answer_request(ServedQueue* queue, uint64_t user_data, kvm_status status) {
  Service* service = queue->session()->service();
  ++service->n_immediate;
  service->n_immediate_failed += status == KVM_OK ? 0 : 1;
  service->requests.add(RequestVerb::kNull, {});
  queue->complete_now({.user_data = user_data, .status = status});
  mark_dirty(queue);
}

void answer_no_memory(ServedQueue* queue, const ipc::Request& request) {
  ipc::write_result(request.result, 0, "the machine refused memory to kvmd");
  answer_request(queue, request.user_data, KVM_ERR_NO_MEMORY);
}

void cancel_all(Session* session, ServedQueue* queue) {
  // Cancelling completes requests, which changes what is in flight: collect first.
  std::vector<uint64_t> numbers;
  try {
    queue->for_each_in_flight(
        [&numbers](const InFlight& request) { numbers.push_back(request.user_data); });
  } catch (const std::bad_alloc&) {
    // Those that are missing run to their end.
  }
  for (const uint64_t number : numbers) {
    session->service()->engine->cancel(session->client, {queue->id(), number});
  }
}

}  // namespace kvm::daemon
