// SPDX-License-Identifier: Apache-2.0
// Placement: keeps workers off the core that the driver runs on.
//
// The system likes to wake a thread on the core of the one that wakes it. Two threads that spin and
// yield then hand that core back and forth, and none of them looks idle enough to be moved: when
// tasks come, the driver computes and the worker waits for the end of its slice, so that two
// threads take as long as one, for hundreds of steps (docs/same_cores.md has the figures).
//
// So before tasks are announced, workers on the driver's core are forbidden it, which moves them.
// One core is forbidden at most, and only to as many workers as there are other cores; what else
// the user, or taskset while it runs, has allowed stays as it is. A system that refuses is left
// alone.
//
// Threads: note_core a worker, for itself; the rest the driver.
#ifndef KVM_ENGINE_TASKS_PLACEMENT_H_
#define KVM_ENGINE_TASKS_PLACEMENT_H_

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace kvm::engine {

class Placement {
 public:
  // LIMIT: on machines with so few cores all workers keep off the driver's, asleep or not: with
  // the client's thread awake there is no idle core that the system would choose. Elsewhere only
  // those that were seen there, because forbidding it takes a microsecond for each.
  static constexpr uint32_t kFewCores = 8;

  // `threads`: the workers', [n_threads - 1]. Nothing is moved where they have too few cores.
  void start(const std::vector<pthread_t>& threads);
  // The calling worker (from 1) runs here.
  void note_core(uint32_t worker) {
    Worker& own = workers_[worker - 1];
    const int core = ::sched_getcpu();
    if (own.core.load(std::memory_order_relaxed) != core) {
      own.core.store(core, std::memory_order_relaxed);
    }
  }
  // Before workers are to have tasks.
  void clear_own_core() {
    if (is_on_) {
      clear(::sched_getcpu());
    }
  }
  // The core that a worker (from 1) was forbidden last; -1: none.
  int forbidden(uint32_t worker) const { return workers_[worker - 1].forbidden; }

 private:
  struct Worker {
    std::atomic<int> core{-1};
    // Driver only.
    pthread_t thread{};
    int forbidden = -1;
    bool was_allowed = false;  // the forbidden core
    cpu_set_t allowed{};       // as we set it
  };

  void clear(int core);
  bool forbid(Worker* worker, int core);

  std::vector<Worker> workers_;
  bool is_on_ = false;
  bool has_few_cores_ = false;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_TASKS_PLACEMENT_H_
