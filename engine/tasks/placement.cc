// SPDX-License-Identifier: Apache-2.0
#include "engine/tasks/placement.h"

namespace kvm::engine {

void Placement::start(const std::vector<pthread_t>& threads) {
  workers_ = std::vector<Worker>(threads.size());
  if (threads.empty()) {
    return;
  }
  cpu_set_t allowed;
  if (pthread_getaffinity_np(threads[0], sizeof(allowed), &allowed) != 0) {
    return;
  }
  const auto n_cores = static_cast<uint32_t>(CPU_COUNT(&allowed));
  for (size_t i = 0; i < threads.size(); ++i) {
    workers_[i].thread = threads[i];
  }
  has_few_cores_ = n_cores <= kFewCores;
  is_on_ = threads.size() < n_cores;
}

void Placement::clear(int core) {
  for (Worker& worker : workers_) {
    const bool may_share = has_few_cores_ || worker.core.load(std::memory_order_relaxed) == core;
    if (worker.forbidden != core && may_share && !forbid(&worker, core)) {
      is_on_ = false;
      return;
    }
  }
}

// False: the system refuses.
bool Placement::forbid(Worker* worker, int core) {
  cpu_set_t allowed;
  if (core < 0 || core >= CPU_SETSIZE ||
      pthread_getaffinity_np(worker->thread, sizeof(allowed), &allowed) != 0) {
    return false;
  }
  // Where somebody else has set it since, that is what is allowed.
  if (worker->was_allowed && CPU_EQUAL(&allowed, &worker->allowed)) {
    CPU_SET(static_cast<size_t>(worker->forbidden), &allowed);
  }
  worker->forbidden = core;
  worker->was_allowed = CPU_ISSET(static_cast<size_t>(core), &allowed) && CPU_COUNT(&allowed) > 1;
  if (worker->was_allowed) {
    CPU_CLR(static_cast<size_t>(core), &allowed);
  }
  worker->allowed = allowed;
  return pthread_setaffinity_np(worker->thread, sizeof(allowed), &allowed) == 0;
}

}  // namespace kvm::engine
