// SPDX-License-Identifier: Apache-2.0
#include "client/embedded_queue.h"

#include <algorithm>
#include <limits>
#include <new>
#include <utility>

#include "base/clock.h"

namespace kvm::client {

namespace {

TensorView view_of(const Tensor& tensor) {
  return {tensor.data,         tensor.size_bytes, tensor.dtype,
          tensor.stride_layer, tensor.stride_row, tensor.stride_head};
}

// Tags tell queues apart; 0 is the client's own calls.
std::atomic<uint64_t> g_last_queue_id{0};

}  // namespace

EmbeddedQueue::EmbeddedQueue(std::shared_ptr<EmbeddedService> service, uint32_t n_entries)
    : service_(std::move(service)),
      n_entries_(n_entries),
      id_(++g_last_queue_id),
      done_(std::make_shared<Done>()),
      sentences_(n_entries) {}

EmbeddedQueue::~EmbeddedQueue() {
  staged_.clear();
  (void)service_->with_engine([&](engine::Engine& engine, engine::ClientId client) {
    // Callbacks come from the engine, which is locked: nothing changes meanwhile.
    for (const Entry& entry : done_->in_flight) {
      engine.cancel(client, {id_, entry.number});
    }
    return Status::ok();
  });
  // Tasks that run still read and write the caller's buffers.
  while (n_in_flight() > 0 && service_->drive(UINT64_MAX)) {
  }
  free_untaken();
  service_->remove_queue();
}

// Nobody knows the sequences that requests have made whose completions nobody took.
void EmbeddedQueue::free_untaken() {
  (void)service_->with_engine([&](engine::Engine& engine, engine::ClientId client) {
    for (const Entry& entry : done_->answers) {
      if (entry.completion.seq != 0) {
        SeqRequest call;
        call.verb = SeqVerb::kFree;
        call.seq = entry.completion.seq;
        ++n_freeing_;
        // Until this one is over the queue is there, or the engine is not.
        engine.submit(client, {id_, service_->next_number()}, std::move(call),
                      [this](RequestResult&&) { --n_freeing_; });
      }
    }
    return Status::ok();
  });
  // An engine starts so many at a time, and nobody may drive it for long after this.
  while (n_freeing_ > 0 && service_->drive(UINT64_MAX)) {
  }
}

uint32_t EmbeddedQueue::n_in_flight() const {
  const std::lock_guard lock(done_->mutex);
  return static_cast<uint32_t>(done_->in_flight.size());
}

uint32_t EmbeddedQueue::n_outstanding() const {
  const std::lock_guard lock(done_->mutex);
  return static_cast<uint32_t>(staged_.size() + done_->in_flight.size() + done_->answers.size());
}

Status EmbeddedQueue::stage(Request request, uint64_t user_data) {
  KVM_TRY(check_open());
  if (const uint32_t n = n_outstanding(); n >= n_entries_) {
    return Status(KVM_ERR_AGAIN, "the queue holds " + std::to_string(n) + " requests of at most " +
                                     std::to_string(n_entries_) + ": take completions first");
  }
  Entry& entry = staged_.emplace_back();
  entry.completion.user_data = user_data;
  entry.request = std::move(request);
  return Status::ok();
}

Status EmbeddedQueue::stage_nop(uint64_t user_data) { return stage(Nop{}, user_data); }

Status EmbeddedQueue::stage_step(const StepCall& call, uint64_t user_data) {
  const kvm_step_params& params = *call.params;
  StepRequest request;
  request.append = call.append;
  request.attend = call.attend;
  request.flags = params.flags;
  request.space = params.space;
  request.layer_begin = params.layer_begin;
  request.n_layers = params.n_layers;
  request.items.assign(params.items, params.items + params.n_items);
  request.ranges.assign(params.ranges, params.ranges + params.n_ranges);
  request.tree_mask.assign(params.tree_mask, params.tree_mask + params.n_tree_words);
  request.mode = params.mode;
  request.proposal = params.proposal;
  request.scale = params.scale;
  request.eps = params.eps;
  request.delta = params.delta;
  request.budget = params.budget;
  request.seed = params.seed;
  request.deadline_ns = params.deadline_ns;
  request.k = view_of(call.k);
  request.v = view_of(call.v);
  request.q = view_of(call.q);
  request.o = view_of(call.o);
  request.lse = view_of(call.lse);
  request.err = view_of(call.err);
  return stage(std::move(request), user_data);
}

Status EmbeddedQueue::stage_read(const ReadCall& call, uint64_t user_data) {
  ReadRequest request;
  request.seq = call.params->seq;
  request.layer = call.params->layer;
  request.position = call.params->position;
  request.n_tokens = call.params->n_tokens;
  request.k = view_of(call.k);
  request.v = view_of(call.v);
  return stage(std::move(request), user_data);
}

Status EmbeddedQueue::stage_observe(const ObserveCall& call, uint64_t user_data) {
  ObserveRequest request;
  request.seq = call.params->seq;
  request.layer = call.params->layer;
  request.n_rows = call.params->n_rows;
  request.query_position = call.params->query_position;
  request.column_begin = call.params->column_begin;
  request.n_columns = call.params->n_columns;
  request.q = view_of(call.q);
  request.column_sums = view_of(call.column_sums);
  return stage(std::move(request), user_data);
}

Status EmbeddedQueue::stage_seq(const SeqRequest& call, uint64_t user_data) {
  return stage(call, user_data);
}

// The engine says that it keeps nothing.
Status EmbeddedQueue::stage_snapshot(const SnapshotRequest& call, uint64_t user_data) {
  return stage(SnapshotRequest(call), user_data);
}

void EmbeddedQueue::answer(Entry* entry, Status status) {
  entry->completion.status = status.code();
  entry->status = std::move(status);
}

void EmbeddedQueue::finish(Done* done, Entries::iterator entry, RequestResult&& result) {
  kvm_completion& completion = entry->completion;
  completion.mode = result.mode;
  completion.keys_present = result.keys_present;
  completion.keys_read = result.keys_read;
  completion.bytes_read = result.bytes_read;
  completion.service_ns = result.service_ns;
  completion.compute_ns = result.compute_ns;
  completion.err_max = result.err_max;
  completion.n_exact = result.n_exact;
  completion.n_not_finite = result.n_not_finite;
  completion.seq = result.status.is_ok() ? result.seq : 0;
  answer(&*entry, std::move(result.status));
  const std::lock_guard lock(done->mutex);
  done->answers.splice(done->answers.end(), done->in_flight, entry);
  if (done->event != nullptr) {
    done->event->raise();
  }
}

void EmbeddedQueue::hand_over(engine::Engine& engine, engine::ClientId client,
                              Entries::iterator entry) {
  // After the engine's end no callback comes any more, so the entry is there for the one that does.
  auto on_done = [done = done_, entry](RequestResult&& result) {
    finish(done.get(), entry, std::move(result));
  };
  const engine::RequestTag tag{id_, entry->number};
  Request request = std::move(entry->request);
  if (std::holds_alternative<Nop>(request)) {
    on_done(RequestResult{});
  } else if (auto* step = std::get_if<StepRequest>(&request)) {
    engine.submit(client, tag, std::move(*step), std::move(on_done));
  } else if (auto* read = std::get_if<ReadRequest>(&request)) {
    engine.submit(client, tag, std::move(*read), std::move(on_done));
  } else if (auto* observe = std::get_if<ObserveRequest>(&request)) {
    engine.submit(client, tag, std::move(*observe), std::move(on_done));
  } else if (auto* snapshot = std::get_if<SnapshotRequest>(&request)) {
    engine.submit(client, tag, std::move(*snapshot), std::move(on_done));
  } else {
    engine.submit(client, tag, std::get<SeqRequest>(std::move(request)), std::move(on_done));
  }
}

void EmbeddedQueue::submit_one(engine::Engine& engine, engine::ClientId client) {
  const auto entry = staged_.begin();
  entry->number = service_->next_number();
  {
    const std::lock_guard lock(done_->mutex);
    done_->in_flight.splice(done_->in_flight.end(), staged_, entry);
  }
  try {
    hand_over(engine, client, entry);
  } catch (const std::bad_alloc&) {
    // For the callback: the engine does not have it.
    RequestResult result;
    result.status = Status::fixed(KVM_ERR_NO_MEMORY, "the process is out of memory");
    finish(done_.get(), entry, std::move(result));
  }
}

Status EmbeddedQueue::submit() {
  Status status = service_->with_engine([this](engine::Engine& engine, engine::ClientId client) {
    while (!staged_.empty()) {
      submit_one(engine, client);
    }
    return Status::ok();
  });
  if (!status.is_ok()) {
    fail_outstanding();
  } else if (event_ != nullptr) {
    service_->wake_driver();
  }
  return status;
}

Status EmbeddedQueue::check_open() {
  return service_->is_down() ? EmbeddedService::down_status() : Status::ok();
}

// After the engine's end nothing is answered any more.
void EmbeddedQueue::fail_outstanding() {
  const std::lock_guard lock(done_->mutex);
  done_->in_flight.splice(done_->in_flight.end(), staged_);
  for (Entry& entry : done_->in_flight) {
    entry.completion.err_max = std::numeric_limits<float>::quiet_NaN();
    answer(&entry, EmbeddedService::down_status());
  }
  done_->answers.splice(done_->answers.end(), done_->in_flight);
}

int EmbeddedQueue::fd() {
  if (event_ == nullptr) {
    event_ = service_->watch();
    if (event_ == nullptr) {
      return -1;
    }
    const std::lock_guard lock(done_->mutex);
    done_->event = event_;
  }
  service_->wake_driver();
  raise_event_if_ready();
  return event_->fd();
}

// Before the answers are looked at, so that what arrives later makes it readable again.
void EmbeddedQueue::reset_event() const {
  if (event_ != nullptr) {
    event_->reset();
  }
}

// After the engine's end there is always something to learn.
void EmbeddedQueue::raise_event_if_ready() const {
  if (event_ == nullptr) {
    return;
  }
  const std::lock_guard lock(done_->mutex);
  if (!done_->answers.empty() || service_->has_ended()) {
    event_->raise();
  }
}

uint32_t EmbeddedQueue::take_answers(kvm_completion* out, uint32_t n_max) {
  const std::lock_guard lock(done_->mutex);
  uint32_t n = 0;
  for (; n < n_max && !done_->answers.empty(); ++n) {
    const Entry& entry = done_->answers.front();
    out[n] = entry.completion;
    out[n].message = entry.status.is_ok() ? "" : sentences_.keep(entry.status.message());
    done_->answers.pop_front();
  }
  return n;
}

Result<uint32_t> EmbeddedQueue::take(kvm_completion* out, uint32_t n_max, uint32_t n_min,
                                     uint64_t timeout_ns, Interrupt interrupt) {
  uint32_t n = 0;
  sentences_.clear();
  reset_event();
  const uint64_t start = timeout_ns == UINT64_MAX || n_min == 0 ? 0 : now_ns();
  uint64_t next_question_ns = interrupt ? add_saturating(now_ns(), kInterruptSliceNs) : UINT64_MAX;
  bool was_interrupted = false;
  bool driven = false;
  for (;;) {
    n += take_answers(out + n, n_max - n);
    const bool enough = n >= std::min(n_min, n_max) && (driven || n > 0);
    if (enough) {
      break;
    }
    if (n_in_flight() == 0) {
      // Another thread's drive may have answered some since the answers were taken.
      n += take_answers(out + n, n_max - n);
      break;
    }
    uint64_t left = n_min == 0 ? 0 : timeout_ns;
    if (left != UINT64_MAX && left != 0) {
      const uint64_t passed = now_ns() - start;
      left = passed < timeout_ns ? timeout_ns - passed : 0;
    }
    if (left == 0 && driven) {
      break;
    }
    if (interrupt && now_ns() >= next_question_ns) {
      if (interrupt.is_raised()) {
        was_interrupted = true;
        break;
      }
      next_question_ns = add_saturating(now_ns(), kInterruptSliceNs);
    }
    driven = true;
    if (!service_->drive(left)) {
      fail_outstanding();
    }
  }
  raise_event_if_ready();
  if (n == 0 && was_interrupted) {
    return Interrupt::status();
  }
  if (n == 0 && n_outstanding() == 0 && service_->is_down()) {
    return EmbeddedService::down_status();
  }
  return n;
}

Status EmbeddedQueue::cancel(uint64_t user_data) {
  const auto is_meant = [user_data](const Entry& entry) {
    return entry.completion.user_data == user_data;
  };
  bool found = false;
  // Requests that were not submitted have certainly not started.
  for (auto entry = staged_.begin(); entry != staged_.end();) {
    const auto at = entry++;
    if (is_meant(*at)) {
      found = true;
      answer(&*at,
             Status::fixed(KVM_ERR_CANCELLED, "the request was cancelled before it was submitted"));
      const std::lock_guard lock(done_->mutex);
      done_->answers.splice(done_->answers.end(), staged_, at);
    }
  }
  const Status status = service_->with_engine([&](engine::Engine& engine, engine::ClientId client) {
    for (const Entry& entry : done_->in_flight) {
      if (is_meant(entry)) {
        found = true;
        engine.cancel(client, {id_, entry.number});
      }
    }
    return Status::ok();
  });
  raise_event_if_ready();
  if (!found) {
    KVM_TRY(status);
    return Status(KVM_ERR_NOT_FOUND, "no request with user_data " + std::to_string(user_data) +
                                         " is outstanding on this queue");
  }
  return status;
}

}  // namespace kvm::client
