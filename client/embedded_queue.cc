// SPDX-License-Identifier: Apache-2.0
#include "client/embedded_queue.h"
#include "base/clock.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace kvm::client {

namespace {

engine::TensorView view_of(const Tensor& tensor) {
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
      done_(std::make_shared<Done>()) {}

EmbeddedQueue::~EmbeddedQueue() {
  staged_.clear();
  std::vector<uint64_t> numbers;
  {
    const std::lock_guard lock(done_->mutex);
    for (const auto& [number, user_data] : done_->in_flight) {
      numbers.push_back(number);
    }
  }
  (void)service_->with_engine([&](engine::Engine& engine, engine::ClientId client) {
    for (const uint64_t number : numbers) {
      engine.cancel(client, {id_, number});
    }
    return Status::ok();
  });
  // Tasks that run still read and write the caller's buffers.
  while (n_in_flight() > 0 && service_->drive(UINT64_MAX)) {
  }
  service_->remove_queue();
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
  if (const uint32_t n = n_outstanding(); n >= n_entries_) {
    return Status(KVM_ERR_AGAIN, "the queue holds " + std::to_string(n) + " requests of at most " +
                                     std::to_string(n_entries_) + ": take completions first");
  }
  if (service_->is_down()) {
    return EmbeddedService::down_status();
  }
  staged_.push_back({user_data, std::move(request)});
  return Status::ok();
}

Status EmbeddedQueue::stage_nop(uint64_t user_data) { return stage(Nop{}, user_data); }

Status EmbeddedQueue::stage_step(const StepCall& call, uint64_t user_data) {
  const kvm_step_params& params = *call.params;
  engine::StepRequest request;
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
  engine::ReadRequest request;
  request.seq = call.params->seq;
  request.layer = call.params->layer;
  request.position = call.params->position;
  request.n_tokens = call.params->n_tokens;
  request.k = view_of(call.k);
  request.v = view_of(call.v);
  return stage(std::move(request), user_data);
}

Status EmbeddedQueue::stage_observe(const ObserveCall& call, uint64_t user_data) {
  engine::ObserveRequest request;
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

Status EmbeddedQueue::stage_seq(const SeqCall& call, uint64_t user_data) {
  return stage(seq_request(call), user_data);
}

void EmbeddedQueue::finish(Done* done, uint64_t number, const engine::RequestResult& result) {
  Answer answer{};
  kvm_completion& completion = answer.completion;
  completion.status = result.status.code();
  completion.mode = result.mode;
  completion.keys_present = result.keys_present;
  completion.keys_read = result.keys_read;
  completion.bytes_read = result.bytes_read;
  completion.service_ns = result.service_ns;
  completion.compute_ns = result.compute_ns;
  completion.err_max = result.err_max;
  completion.n_exact = result.n_exact;
  answer.sentence = result.status.message();
  const std::lock_guard lock(done->mutex);
  const auto it = done->in_flight.find(number);
  if (it == done->in_flight.end()) {
    return;
  }
  completion.user_data = it->second;
  done->in_flight.erase(it);
  done->answers.push_back(std::move(answer));
}

void EmbeddedQueue::submit_one(engine::Engine& engine, engine::ClientId client, Staged staged) {
  const uint64_t number = service_->next_number();
  {
    const std::lock_guard lock(done_->mutex);
    done_->in_flight.emplace(number, staged.user_data);
  }
  auto on_done = [done = done_, number](engine::RequestResult&& result) {
    finish(done.get(), number, result);
  };
  const engine::RequestTag tag{id_, number};
  if (std::holds_alternative<Nop>(staged.request)) {
    on_done(engine::RequestResult{});
  } else if (auto* step = std::get_if<engine::StepRequest>(&staged.request)) {
    engine.submit(client, tag, std::move(*step), std::move(on_done));
  } else if (auto* read = std::get_if<engine::ReadRequest>(&staged.request)) {
    engine.submit(client, tag, std::move(*read), std::move(on_done));
  } else if (auto* observe = std::get_if<engine::ObserveRequest>(&staged.request)) {
    engine.submit(client, tag, std::move(*observe), std::move(on_done));
  } else {
    engine.submit(client, tag, std::get<engine::SeqRequest>(std::move(staged.request)),
                  std::move(on_done));
  }
}

Status EmbeddedQueue::submit() {
  Status status = service_->with_engine([this](engine::Engine& engine, engine::ClientId client) {
    for (Staged& staged : staged_) {
      submit_one(engine, client, std::move(staged));
    }
    staged_.clear();
    return Status::ok();
  });
  if (!status.is_ok()) {
    fail_outstanding();
  }
  return status;
}

// After the engine's end nothing is answered any more.
void EmbeddedQueue::fail_outstanding() {
  const std::lock_guard lock(done_->mutex);
  const auto fail = [this](uint64_t user_data) {
    Answer answer{};
    answer.completion.user_data = user_data;
    answer.completion.status = KVM_ERR_DISCONNECTED;
    answer.completion.err_max = std::numeric_limits<float>::quiet_NaN();
    answer.sentence = EmbeddedService::down_status().message();
    done_->answers.push_back(std::move(answer));
  };
  for (const Staged& staged : staged_) {
    fail(staged.user_data);
  }
  for (const auto& [number, user_data] : done_->in_flight) {
    fail(user_data);
  }
  staged_.clear();
  done_->in_flight.clear();
}

uint32_t EmbeddedQueue::take_answers(kvm_completion* out, uint32_t n_max, std::string* sentence) {
  const std::lock_guard lock(done_->mutex);
  uint32_t n = 0;
  for (; n < n_max && !done_->answers.empty(); ++n) {
    out[n] = done_->answers.front().completion;
    if (out[n].status != KVM_OK) {
      *sentence = std::move(done_->answers.front().sentence);
    }
    done_->answers.pop_front();
  }
  return n;
}

Result<TakenCompletions> EmbeddedQueue::take(kvm_completion* out, uint32_t n_max, uint32_t n_min,
                                             uint64_t timeout_ns) {
  TakenCompletions taken;
  const uint64_t start = timeout_ns == UINT64_MAX || n_min == 0 ? 0 : now_ns();
  bool driven = false;
  for (;;) {
    taken.n += take_answers(out + taken.n, n_max - taken.n, &taken.sentence);
    const bool enough = taken.n >= std::min(n_min, n_max) && (driven || taken.n > 0);
    if (enough || n_in_flight() == 0) {
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
    driven = true;
    if (!service_->drive(left)) {
      fail_outstanding();
    }
  }
  if (taken.n == 0 && n_outstanding() == 0 && service_->is_down()) {
    return EmbeddedService::down_status();
  }
  return taken;
}

Status EmbeddedQueue::cancel(uint64_t user_data) {
  bool found = false;
  std::vector<uint64_t> numbers;
  {
    const std::lock_guard lock(done_->mutex);
    for (const auto& [number, data] : done_->in_flight) {
      if (data == user_data) {
        numbers.push_back(number);
      }
    }
    // What was not submitted has certainly not started.
    std::erase_if(staged_, [&](const Staged& staged) {
      if (staged.user_data != user_data) {
        return false;
      }
      found = true;
      Answer answer{};
      answer.completion.user_data = user_data;
      answer.completion.status = KVM_ERR_CANCELLED;
      answer.sentence = "the request was cancelled before it was submitted";
      done_->answers.push_back(std::move(answer));
      return true;
    });
  }
  if (numbers.empty() && !found) {
    return Status(KVM_ERR_NOT_FOUND, "no request with user_data " + std::to_string(user_data) +
                                         " is outstanding on this queue");
  }
  return service_->with_engine([&](engine::Engine& engine, engine::ClientId client) {
    for (const uint64_t number : numbers) {
      engine.cancel(client, {id_, number});
    }
    return Status::ok();
  });
}

}  // namespace kvm::client
