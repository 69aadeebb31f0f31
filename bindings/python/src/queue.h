// SPDX-License-Identifier: Apache-2.0
// A Queue takes requests and keeps what they use alive until their completions are taken.
//
// Any thread may use it: calls take turns, and whoever waits takes the completions of all. `mutex_`
// is held without the GIL only, and never while Python runs: a handler of a signal, or a finaliser,
// may use the queue.
#ifndef KVM_BINDINGS_PYTHON_SRC_QUEUE_H_
#define KVM_BINDINGS_PYTHON_SRC_QUEUE_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include <nanobind/nanobind.h>
#include "bindings/python/src/client.h"
#include "bindings/python/src/step.h"
#include "kvm.h"

namespace kvm::python {

// A Flight is a request on its way.
struct Flight {
  std::shared_ptr<Request> request;  // until it is done
  uint64_t id = 0;
  std::atomic<bool> is_done{false};
  // Once it is done:
  kvm_completion completion{};
  std::string message;
};

class Queue {
 public:
  using Done = std::vector<std::shared_ptr<Request>>;  // to be let go with the GIL

  Queue(std::shared_ptr<Client> client, uint32_t n_entries, uint64_t spin_ns);
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  // REQUIRES of all: the GIL.
  int fd();
  void close();
  // Stages a request and lets the service see it, unless the caller submits later.
  std::shared_ptr<Flight> start(const std::shared_ptr<Request>& request, bool submits);
  // Lets it see all that is staged; costs nothing where nothing is.
  void submit();
  // Submits what is staged, and waits until `flight` is done, or timeout_ns have passed: false.
  bool wait(Flight* flight, uint64_t timeout_ns);
  // Starts a request and waits for it, with one round without the GIL where it is soon done. Throws
  // what became of it.
  std::shared_ptr<Flight> run(const std::shared_ptr<Request>& request);
  // Takes what is there.
  void poll();
  void cancel(const Flight& flight);
  size_t n_outstanding();
  // Gives the kvm_queue back, and cancels what is outstanding. REQUIRES: not the GIL.
  void end(Done* done);

 private:
  // Stages it, and submits it then where asked. False: there is no room until others are done.
  // Throws StatusError. REQUIRES: mutex_ is held, not the GIL.
  bool try_start(const std::shared_ptr<Flight>& flight, bool submits);
  kvm_status stage(Flight* flight);
  // REQUIRES: mutex_ is held, not the GIL; the queue is not closed.
  void publish();
  // Takes up to what n_min and timeout_ns say. REQUIRES: mutex_ is held, not the GIL.
  void take(uint32_t n_min, uint64_t timeout_ns, Done* done);
  void wake_waiters();
  void finish(const kvm_completion& completion, Done* done);
  void finish_all(kvm_status status, const std::string& message, Done* done);
  // Whether this thread may touch the queue: not in a child.
  void check_process() const;
  std::shared_ptr<Flight> make_flight(const std::shared_ptr<Request>& request) const;
  // Runs f without the GIL, as the one that uses the queue. A wait makes way within 10 ms.
  template <typename F>
  void alone(const F& f);

  std::shared_ptr<Client> client_;
  kvm_queue* queue_ = nullptr;
  std::mutex mutex_;
  uint64_t n_started_ = 0;
  std::atomic<bool> has_staged_{false};  // requests that are not submitted
  using Flights = std::unordered_map<uint64_t, std::shared_ptr<Flight>>;
  std::unique_ptr<Flights> flights_ = std::make_unique<Flights>();
  // Threads that wait while another takes completions: they are woken when it has taken some, and
  // when it stops.
  std::mutex turn_mutex_;
  std::condition_variable turn_;
  std::atomic<uint32_t> n_sleeping_{0};
  std::atomic<uint32_t> n_wanting_{0};  // threads that want the mutex for a moment
  uint32_t generation_ = fork_generation();
};

void register_queue(nanobind::module_& module);

}  // namespace kvm::python

#endif  // KVM_BINDINGS_PYTHON_SRC_QUEUE_H_
