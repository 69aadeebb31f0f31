// SPDX-License-Identifier: Apache-2.0
#include "bindings/python/src/queue.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include "bindings/python/src/prefix.h"
#include "bindings/python/src/records.h"

namespace nb = nanobind;

namespace kvm::python {
namespace {

constexpr uint32_t kMaxTaken = 64;
constexpr uint64_t kMaxTurnNs = 10'000'000;  // until a thread that waits for its turn looks again

uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

// Runs the handlers of signals that came. REQUIRES: the GIL, and no lock.
void run_signal_handlers() {
  if (PyErr_CheckSignals() != 0) {
    throw nb::python_error();
  }
}

// Runs f without the GIL; what it throws passes on after the GIL is back.
template <typename F>
void without_gil(const F& f) {
  const Unlocked unlocked;
  f();
}

}  // namespace

Queue::Queue(std::shared_ptr<Client> client, uint32_t n_entries, uint64_t spin_ns)
    : client_(std::move(client)) {
  auto params = sized<kvm_queue_params>();
  params.n_entries = n_entries;
  params.spin_ns = spin_ns;
  // Ends a wait every 10 ms, and after a signal: then Python may look.
  params.is_interrupted = [](void* /*user*/) { return 1; };
  client_->call([&](kvm_client* c) {
    const kvm_status status = kvm_queue_create(c, &params, &queue_);
    if (status == KVM_OK) {
      client_->add_queue(this);
    }
    return status;
  });
}

Queue::~Queue() {
  if (generation_ != fork_generation()) {
    (void)flights_.release();  // another thread may have been changing it when the fork came
    return;
  }
  without_gil([this] { client_->remove_queue(this); });
  close();
}

void Queue::check_process() const {
  if (generation_ != fork_generation()) {
    throw StatusError{KVM_ERR_FORKED, "the queue belongs to the parent of this process"};
  }
}

template <typename F>
void Queue::alone(const F& f) {
  without_gil([&] {
    // f throws where a call fails; those who sleep look again after kMaxTurnNs then.
    {
      ++n_wanting_;
      const std::lock_guard lock(mutex_);
      --n_wanting_;
      f();
    }
    wake_waiters();
  });
}

int Queue::fd() {
  check_process();
  int fd = -1;
  alone([&] { fd = queue_ == nullptr ? -1 : kvm_queue_fd(queue_); });
  return fd;
}

void Queue::close() {
  if (generation_ != fork_generation()) {
    return;
  }
  Done done;
  without_gil([&] { end(&done); });
}

void Queue::end(Done* done) {
  {
    ++n_wanting_;
    const std::lock_guard lock(mutex_);
    --n_wanting_;
    // The memory of requests may be used until the queue is gone.
    kvm_queue_destroy(std::exchange(queue_, nullptr));
    finish_all(KVM_ERR_CANCELLED, "the queue was closed before the request was done", done);
  }
  wake_waiters();
}

kvm_status Queue::stage(Flight* flight) {
  const Request& r = *flight->request;
  switch (r.verb) {
    case Request::Verb::kAppend:
      return kvm_append_async(queue_, &r.step, flight->id);
    case Request::Verb::kAttend:
      return kvm_attend_async(queue_, &r.step, flight->id);
    case Request::Verb::kStep:
      return kvm_step_async(queue_, &r.step, flight->id);
    case Request::Verb::kRead:
      return kvm_read_async(queue_, &r.read, flight->id);
    case Request::Verb::kObserve:
      return kvm_observe_async(queue_, &r.observe, flight->id);
    case Request::Verb::kCreate:
      return kvm_seq_create_async(queue_, r.id, &r.create, flight->id);
    case Request::Verb::kFork:
      return kvm_seq_fork_async(queue_, r.id, r.n_tokens, flight->id);
    case Request::Verb::kTruncate:
      return kvm_seq_truncate_async(queue_, r.id, r.n_tokens, flight->id);
    case Request::Verb::kCommit:
      return kvm_seq_commit_async(queue_, r.id, r.n_tokens, flight->id);
    case Request::Verb::kFree:
      return kvm_seq_free_async(queue_, r.id, flight->id);
    case Request::Verb::kPublish:
      return kvm_seq_publish_async(queue_, r.id, flight->id);
    case Request::Verb::kTake:
      return kvm_seq_take_async(queue_, r.id, flight->id);
    case Request::Verb::kPrefetch:
      return kvm_seq_prefetch_async(queue_, r.id, flight->id);
    case Request::Verb::kSave:
      return kvm_seq_save_async(queue_, r.id, r.name.c_str(), r.flags, flight->id);
    case Request::Verb::kLoad:
      return kvm_seq_load_async(queue_, r.id, r.name.c_str(), flight->id);
    case Request::Verb::kDeleteSnapshot:
      return kvm_snapshot_delete_async(queue_, r.name.c_str(), flight->id);
    case Request::Verb::kPublishPrefix:
      return kvm_prefix_publish_async(queue_, r.id, r.hashes.data(), count_of(r.hashes), r.keep_ns,
                                      flight->id);
    case Request::Verb::kSetPriority:
      return kvm_seq_set_priority_async(queue_, &r.priority, flight->id);
    case Request::Verb::kDrop:
      return kvm_seq_drop_async(queue_, r.id, r.begin, r.n_tokens, flight->id);
    case Request::Verb::kNop:
      return kvm_nop_async(queue_, flight->id);
  }
  return KVM_ERR_INTERNAL;
}

std::shared_ptr<Flight> Queue::make_flight(const std::shared_ptr<Request>& request) const {
  check_process();
  if (request->client != client_) {
    refuse("the request was made for another client than the queue's");
  }
  auto flight = std::make_shared<Flight>();
  flight->request = request;
  return flight;
}

bool Queue::try_start(const std::shared_ptr<Flight>& flight, bool submits) {
  if (queue_ == nullptr) {
    throw StatusError{KVM_ERR_DISCONNECTED, "the queue is closed"};
  }
  flight->id = ++n_started_;
  const kvm_status status = stage(flight.get());
  if (status == KVM_ERR_AGAIN && !flights_->empty()) {
    return false;
  }
  check(status);
  client_->n_copied_bytes += flight->request->copied_bytes;
  flights_->emplace(flight->id, flight);
  if (submits) {
    publish();
  } else {
    has_staged_.store(true, std::memory_order_release);
  }
  return true;
}

void Queue::publish() {
  has_staged_.store(false, std::memory_order_release);
  kvm_submit(queue_);  // a failure arrives as the status of the requests
}

std::shared_ptr<Flight> Queue::start(const std::shared_ptr<Request>& request, bool submits) {
  std::shared_ptr<Flight> flight = make_flight(request);
  for (bool is_staged = false; !is_staged;) {
    Done done;
    alone([&] {
      is_staged = try_start(flight, submits);
      if (!is_staged) {
        publish();
        take(1, UINT64_MAX, &done);
      }
    });
    if (!is_staged) {
      run_signal_handlers();
    }
  }
  return flight;
}

std::shared_ptr<Flight> Queue::run(const std::shared_ptr<Request>& request) {
  std::shared_ptr<Flight> flight = make_flight(request);
  bool is_staged = false;
  Done done;
  alone([&] {
    is_staged = try_start(flight, true);
    if (is_staged) {
      take(1, UINT64_MAX, &done);
    }
  });
  done.clear();
  if (!is_staged) {
    flight = start(request, true);
  }
  wait(flight.get(), UINT64_MAX);
  if (flight->completion.status != KVM_OK) {
    throw StatusError{flight->completion.status, flight->message};
  }
  return flight;
}

void Queue::submit() {
  check_process();
  if (!has_staged_.load(std::memory_order_acquire)) {
    return;
  }
  alone([&] {
    if (queue_ != nullptr) {
      publish();
    }
  });
}

void Queue::finish(const kvm_completion& completion, Done* done) {
  const auto found = flights_->find(completion.user_data);
  if (found == flights_->end()) {
    return;
  }
  const std::shared_ptr<Flight> flight = std::move(found->second);
  flights_->erase(found);
  flight->completion = completion;
  flight->message = completion.message;
  flight->completion.message = nullptr;
  done->push_back(std::move(flight->request));
  flight->is_done.store(true, std::memory_order_release);
}

void Queue::finish_all(kvm_status status, const std::string& message, Done* done) {
  while (!flights_->empty()) {
    kvm_completion completion{};
    completion.user_data = flights_->begin()->first;
    completion.status = status;
    completion.message = message.c_str();
    finish(completion, done);
  }
}

void Queue::take(uint32_t n_min, uint64_t timeout_ns, Done* done) {
  kvm_completion completions[kMaxTaken];
  const int32_t n = n_min == 0 ? kvm_poll(queue_, completions, kMaxTaken)
                               : kvm_wait(queue_, completions, kMaxTaken, n_min, timeout_ns);
  for (int32_t i = 0; i < n; ++i) {
    finish(completions[i], done);
  }
  if (n < 0 && n != KVM_ERR_INTERRUPTED) {
    finish_all(n, kvm_last_error(), done);
  }
}

void Queue::wake_waiters() {
  if (n_sleeping_.load() != 0) {
    { const std::lock_guard lock(turn_mutex_); }  // who looks whether to sleep has done so
    turn_.notify_all();
  }
}

bool Queue::wait(Flight* flight, uint64_t timeout_ns) {
  const auto is_done = [flight] { return flight->is_done.load(std::memory_order_acquire); };
  if (is_done()) {
    return true;
  }
  const uint64_t begin_ns = now_ns();
  submit();  // kvm_wait comes back at once from what is only staged
  for (;;) {
    Done done;
    const uint64_t waited_ns = now_ns() - begin_ns;
    const uint64_t left_ns = timeout_ns - std::min(waited_ns, timeout_ns);
    without_gil([&] {
      while (n_wanting_.load(std::memory_order_relaxed) != 0) {
        std::this_thread::yield();
      }
      std::unique_lock lock(mutex_, std::try_to_lock);
      if (!lock.owns_lock()) {
        std::unique_lock turn_lock(turn_mutex_);
        ++n_sleeping_;
        // Who held it may have gone before there was anybody to wake.
        if (!lock.try_lock() && !is_done()) {
          turn_.wait_for(turn_lock, std::chrono::nanoseconds(std::min(left_ns, kMaxTurnNs)));
        }
        --n_sleeping_;
      }
      if (lock.owns_lock()) {
        if (!is_done()) {
          take(1, left_ns, &done);
        }
        lock.unlock();
        wake_waiters();
      }
    });
    if (is_done() || waited_ns >= timeout_ns) {
      return is_done();
    }
    done.clear();
    run_signal_handlers();
  }
}

void Queue::poll() {
  check_process();
  Done done;
  alone([&] {
    if (queue_ != nullptr) {
      take(0, 0, &done);
    }
  });
}

void Queue::cancel(const Flight& flight) {
  check_process();
  alone([&] {
    if (queue_ == nullptr || flight.is_done.load(std::memory_order_acquire)) {
      return;
    }
    const kvm_status status = kvm_cancel(queue_, flight.id);
    if (status != KVM_ERR_NOT_FOUND) {
      check(status);
    }
  });
}

size_t Queue::n_outstanding() {
  check_process();
  size_t n = 0;
  alone([&] { n = flights_->size(); });
  return n;
}

// --- Python -------------------------------------------------------------------------------------

namespace {

std::shared_ptr<Flight> run_step(Queue& queue, std::shared_ptr<Client> client, uint64_t space,
                                 uint32_t layer, uint32_t n_q_heads, uint32_t n_kv_heads,
                                 uint32_t dim_k, uint32_t dim_v, const nb::list& items,
                                 nb::handle k, nb::handle v, nb::handle q, nb::handle o,
                                 nb::handle lse, nb::handle err, bool heads_first, uint32_t flags,
                                 uint32_t mode, uint32_t proposal, float scale, float eps,
                                 float delta, uint64_t budget, uint64_t seed,
                                 uint64_t deadline_ns) {
  return queue.run(make_step(std::move(client), space, layer, n_q_heads, n_kv_heads, dim_k, dim_v,
                             items, k, v, q, o, lse, err, heads_first, flags, mode, proposal, scale,
                             eps, delta, budget, seed, deadline_ns));
}

}  // namespace

void register_queue(nb::module_& module) {
  nb::class_<Flight>(module, "Flight")
      .def_prop_ro("is_done", [](const Flight& f) { return f.is_done.load(); })
      .def("check",
           [](const Flight& f) {
             if (f.completion.status != KVM_OK) {
               throw StatusError{f.completion.status, f.message};
             }
           })
      .def_prop_ro("status", [](const Flight& f) { return f.completion.status; })
      .def_prop_ro("message", [](const Flight& f) { return f.message; })
      .def_prop_ro("seq", [](const Flight& f) { return f.completion.seq; })
      .def_prop_ro("mode", [](const Flight& f) { return f.completion.mode; })
      .def_prop_ro("keys_present", [](const Flight& f) { return f.completion.keys_present; })
      .def_prop_ro("keys_read", [](const Flight& f) { return f.completion.keys_read; })
      .def_prop_ro("bytes_read", [](const Flight& f) { return f.completion.bytes_read; })
      .def_prop_ro("service_ns", [](const Flight& f) { return f.completion.service_ns; })
      .def_prop_ro("compute_ns", [](const Flight& f) { return f.completion.compute_ns; })
      .def_prop_ro("err_max", [](const Flight& f) { return f.completion.err_max; })
      .def_prop_ro("n_exact", [](const Flight& f) { return f.completion.n_exact; })
      .def_prop_ro("n_not_finite", [](const Flight& f) { return f.completion.n_not_finite; });
  nb::class_<Queue>(module, "Queue", nb::is_weak_referenceable())
      .def(nb::init<std::shared_ptr<Client>, uint32_t, uint64_t>(), nb::arg("client"),
           nb::arg("n_entries"), nb::arg("spin_ns"))
      .def("fd", &Queue::fd)
      .def("close", &Queue::close)
      .def("start", &Queue::start, nb::arg("request"), nb::arg("submits"))
      .def("submit", &Queue::submit)
      .def("wait", &Queue::wait, nb::arg("flight"), nb::arg("timeout_ns"))
      .def("run", &Queue::run, nb::arg("request"))
      .def("step", run_step, nb::arg("client"), nb::arg("space"), nb::arg("layer"),
           nb::arg("n_q_heads"), nb::arg("n_kv_heads"), nb::arg("dim_k"), nb::arg("dim_v"),
           nb::arg("items"), nb::arg("k").none(), nb::arg("v").none(), nb::arg("q").none(),
           nb::arg("o").none(), nb::arg("lse").none(), nb::arg("err").none(),
           nb::arg("heads_first"), nb::arg("flags"), nb::arg("mode"), nb::arg("proposal"),
           nb::arg("scale"), nb::arg("eps"), nb::arg("delta"), nb::arg("budget"), nb::arg("seed"),
           nb::arg("deadline_ns"))
      .def("poll", &Queue::poll)
      .def("cancel", &Queue::cancel, nb::arg("flight"))
      .def_prop_ro("n_outstanding", &Queue::n_outstanding);
}

}  // namespace kvm::python
