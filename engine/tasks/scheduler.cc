// SPDX-License-Identifier: Apache-2.0
#include "engine/tasks/scheduler.h"

#include <fmt/format.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <system_error>

#include "base/assert.h"
#include "base/clock.h"

namespace kvm::engine {
namespace {

constexpr uint64_t pack(uint64_t generation, uint32_t task) { return generation << 32 | task; }
constexpr uint64_t generation_of(uint64_t word) { return word >> 32; }
constexpr uint32_t task_of(uint64_t word) { return static_cast<uint32_t>(word); }

// In the word of a gate.
constexpr uint64_t kHasBegun = uint64_t{JobPlan::kMaxTasks} + 1;
constexpr uint32_t n_open_of(uint64_t gate) { return task_of(gate & ~kHasBegun); }

// The end of the stage that opens when the tasks below n_done have ended.
constexpr uint32_t stage_end(const JobPlan& plan, uint32_t n_done) {
  if (n_done < plan.n_first) {
    return plan.n_first;
  }
  return n_done < plan.n_middle ? plan.n_middle : plan.n_tasks;
}

// A failure leaves the thread where the system puts it.
void pin_to_core(std::thread& thread, uint32_t core) {
  cpu_set_t allowed;
  if (pthread_getaffinity_np(thread.native_handle(), sizeof(allowed), &allowed) != 0) {
    return;
  }
  const auto n_cores = static_cast<uint32_t>(CPU_COUNT(&allowed));
  uint32_t left = n_cores == 0 ? 0 : core % n_cores;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &allowed) && left-- == 0) {
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      pthread_setaffinity_np(thread.native_handle(), sizeof(one), &one);
      return;
    }
  }
}

}  // namespace

Scheduler::Scheduler(uint32_t n_threads, uint64_t spin_ns)
    : n_threads_(n_threads), spin_ns_(spin_ns), threads_(n_threads) {
  KVM_ASSERT(n_threads >= 1);
}

Status Scheduler::start_workers(bool pin_threads) {
  for (uint32_t i = 1; i < n_threads_; ++i) {
    try {
      threads_[i].thread = std::thread([this, i] { work(i); });
    } catch (const std::system_error& error) {
      return {KVM_ERR_LIMIT, fmt::format("the system refuses compute thread {} of {}: {}", i + 1,
                                         n_threads_, error.what())};
    }
    if (pin_threads) {
      pin_to_core(threads_[i].thread, i);
    }
  }
  if (!pin_threads) {
    std::vector<pthread_t> handles;
    for (uint32_t i = 1; i < n_threads_; ++i) {
      handles.push_back(threads_[i].thread.native_handle());
    }
    placement_.start(handles);
    // SYNC: workers that read it see placement_'s table of them.
    places_.store(true, std::memory_order_release);
  }
  return Status::ok();
}

Scheduler::~Scheduler() {
  stop_.store(true, std::memory_order_relaxed);
  announce_tasks(n_threads_);
  for (ThreadState& state : threads_) {
    if (state.thread.joinable()) {
      state.thread.join();
    }
  }
}

JobHandle Scheduler::start(TaskSet* set, const JobPlan& plan) {
  KVM_ASSERT(has_room() && plan.is_valid() && plan.lane < kMaxLanes);
  // Slots are used in a circle, so that the order from the oldest on is nearly that of age.
  const uint64_t turned = std::rotr(free_slots_, static_cast<int>(next_slot_));
  const auto index = (next_slot_ + static_cast<uint32_t>(std::countr_zero(turned))) % kMaxJobs;
  next_slot_ = (index + 1) % kMaxJobs;
  if (n_active_ == 0) {
    oldest_.store(index, std::memory_order_relaxed);
  }
  ++n_active_;
  driver_id_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  if (plan.n_wake != 0) {
    placement_.clear_own_core();
  }
  const uint64_t bit = uint64_t{1} << index;
  KVM_ASSERT((free_slots_ & bit) != 0);
  free_slots_ &= ~bit;

  Slot& slot = slots_[index];
  slot.set = set;
  slot.plan = plan;
  slot.lane.store(plan.lane, std::memory_order_relaxed);
  enter_lane(plan.lane);
  n_gated_ += plan.n_open < plan.n_tasks ? 1 : 0;
  slot.n_done.store(0, std::memory_order_relaxed);
  const uint64_t generation = generation_of(slot.cursor.load(std::memory_order_relaxed)) + 1;
  const uint32_t n_open = std::min(plan.n_open, plan.n_tasks);
  const uint32_t n_ready = std::min(stage_end(plan, 0), n_open);
  // A late open() of an older job may compare and exchange these two words at any time; it expects
  // an older generation.
  slot.gate.store(pack(generation, n_open) | (plan.last_begin() == 0 ? kHasBegun : 0),
                  std::memory_order_relaxed);
  slot.limit.store(pack(generation, n_ready), std::memory_order_relaxed);
  // SYNC: the job's description, limit included, and what the driver prepared for its tasks become
  // visible to the threads that take a task with an acquiring read-modify-write of the cursor.
  slot.cursor.store(pack(generation, 0), std::memory_order_release);
  active_.fetch_or(bit, std::memory_order_relaxed);
  if (n_ready != 0) {
    announce_tasks(plan.n_wake);
  }
  return {index, static_cast<uint32_t>(generation), plan.n_tasks, plan.n_wake, plan.lane};
}

// Touches nothing of the slot but gate and limit, whose generations say whose they are: as soon as
// the last tasks are open, the job may end and the slot belong to another one.
void Scheduler::open(JobHandle job, uint32_t n_open) {
  KVM_ASSERT(job.slot < kMaxJobs);
  Slot& slot = slots_[job.slot];
  const uint32_t n = std::min(n_open, job.n_tasks);
  uint64_t gate = slot.gate.load(std::memory_order_relaxed);
  do {
    if (generation_of(gate) != job.generation || n_open_of(gate) >= n) {
      return;
    }
    // SYNC: what was written for these tasks becomes visible to whoever raises the limit for them:
    // the thread that begins the last stage, or one that opens more. Where the stage has begun,
    // what the stages before wrote becomes visible here.
  } while (!slot.gate.compare_exchange_weak(gate, pack(job.generation, n) | (gate & kHasBegun),
                                            std::memory_order_acq_rel, std::memory_order_relaxed));
  catch_up(job.lane);
  // Who does not raise it leaves the announcement to the one that has raised it as far, or will.
  if ((gate & kHasBegun) == 0 || !raise_limit(&slot, job.generation, n)) {
    return;
  }
  announce_tasks(job.n_wake);
  if (std::this_thread::get_id() != driver_id_.load(std::memory_order_relaxed)) {
    call_wake();
  }
}

// Lets tasks below n_tasks be taken. False: they could be taken before, or the job has ended.
bool Scheduler::raise_limit(Slot* slot, uint64_t generation, uint32_t n_tasks) {
  uint64_t limit = slot->limit.load(std::memory_order_relaxed);
  while (generation_of(limit) == generation && task_of(limit) < n_tasks) {
    // SYNC: everything that the stages before wrote, and what was written before the tasks were
    // opened, becomes visible to those who take them.
    if (slot->limit.compare_exchange_weak(limit, pack(generation, n_tasks),
                                          std::memory_order_release, std::memory_order_relaxed)) {
      return true;
    }
  }
  return false;
}

// Order against those who go to sleep: here tasks become ready, then epoch_ grows, then n_sleeping_
// and driver_sleeps_ are read; there one of these is set, then epoch_ is read. All are sequentially
// consistent, so one of the two sides sees the other.
void Scheduler::announce_tasks(uint32_t n_wake) {
  // SYNC: the ready tasks (active_, cursors, limits, stop_) become visible to those who read the
  // new epoch.
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  const bool wake_workers = n_wake != 0 && n_sleeping_.load(std::memory_order_seq_cst) != 0;
  const bool wake_driver = driver_sleeps_.load(std::memory_order_seq_cst);
  if (!wake_workers && !wake_driver) {
    return;
  }
  const std::lock_guard lock(mutex_);
  const uint32_t n = std::min(n_wake, n_sleeping_.load(std::memory_order_relaxed));
  for (uint32_t i = 0; i < n; ++i) {
    workers_.notify_one();
  }
  driver_.notify_one();
}

// Returns what each lane with jobs has been served at least.
uint64_t Scheduler::least_served() const {
  // A lane that waits at its gates is not served, and holds nobody back.
  uint64_t least = n_gated_ == 0 ? UINT64_MAX : least_ready(kMaxLanes);
  if (least != UINT64_MAX) {
    return least;
  }
  for (const Lane& lane : lanes_) {
    if (lane.n_jobs != 0) {
      least = std::min(least, lane.served.load(std::memory_order_relaxed));
    }
  }
  return least;
}

// Returns what each lane with a ready task has been served at least, but for one of them.
uint64_t Scheduler::least_ready(uint32_t but) const {
  uint64_t least = UINT64_MAX;
  for (uint64_t left = active_.load(std::memory_order_relaxed); left != 0; left &= left - 1) {
    const Slot& slot = slots_[static_cast<size_t>(std::countr_zero(left))];
    const uint32_t lane = slot.lane.load(std::memory_order_relaxed);
    if (lane != but && has_ready_task(slot)) {
      least = std::min(least, lanes_[lane].served.load(std::memory_order_relaxed));
    }
  }
  return least;
}

// What a lane did not use while it waited at a gate is gone, as it is for one that comes back.
void Scheduler::catch_up(uint32_t lane) {
  const uint64_t least = least_ready(lane);
  if (least == UINT64_MAX) {
    return;
  }
  const uint64_t floor = least - std::min(least, kLaneCredit);
  std::atomic<uint64_t>& served = lanes_[lane].served;
  uint64_t before = served.load(std::memory_order_relaxed);
  while (before < floor &&
         !served.compare_exchange_weak(before, floor, std::memory_order_relaxed)) {
  }
}

void Scheduler::enter_lane(uint32_t index) {
  Lane& lane = lanes_[index];
  if (lane.n_jobs == 0) {
    virtual_time_ = n_busy_lanes_ == 0 ? virtual_time_ : std::max(virtual_time_, least_served());
    // Nobody else changes what a lane without jobs was served.
    const uint64_t floor = virtual_time_ - std::min(virtual_time_, kLaneCredit);
    lane.served.store(std::max(lane.served.load(std::memory_order_relaxed), floor),
                      std::memory_order_relaxed);
    ++n_busy_lanes_;
    is_shared_.store(n_busy_lanes_ > 1, std::memory_order_relaxed);
  }
  ++lane.n_jobs;
}

void Scheduler::leave_lane(uint32_t index) {
  KVM_ASSERT(lanes_[index].n_jobs != 0 && n_busy_lanes_ != 0);
  if (lanes_[index].n_jobs == 1) {
    virtual_time_ = std::max(virtual_time_, least_served());
    --n_busy_lanes_;
    is_shared_.store(n_busy_lanes_ > 1, std::memory_order_relaxed);
  }
  --lanes_[index].n_jobs;
}

// Returns what the lane has been served then.
uint64_t Scheduler::add_served(uint32_t lane, uint64_t cost) {
  KVM_ASSERT(lane < kMaxLanes);
  return lanes_[lane].served.fetch_add(cost, std::memory_order_relaxed) + cost;
}

void Scheduler::charge(uint32_t lane, uint64_t cost) {
  const uint64_t served = add_served(lane, cost);
  if (n_busy_lanes_ == 0) {
    virtual_time_ = std::max(virtual_time_, served);
  }
}

bool Scheduler::has_ready_task(const Slot& slot) const {
  const uint64_t cursor = slot.cursor.load(std::memory_order_relaxed);
  const uint64_t limit = slot.limit.load(std::memory_order_relaxed);
  return generation_of(cursor) == generation_of(limit) && task_of(cursor) < task_of(limit);
}

// Takes from the oldest job with a ready task of the lane that was served least.
bool Scheduler::take_fair_task(uint32_t* slot, uint32_t* task) {
  const uint32_t oldest = oldest_.load(std::memory_order_relaxed);
  for (;;) {
    uint64_t left = std::rotr(active_.load(std::memory_order_relaxed), static_cast<int>(oldest));
    uint32_t best = kMaxJobs;
    uint64_t least = UINT64_MAX;
    for (; left != 0; left &= left - 1) {
      const auto index = (oldest + static_cast<uint32_t>(std::countr_zero(left))) % kMaxJobs;
      const uint32_t lane = slots_[index].lane.load(std::memory_order_relaxed);
      const uint64_t served = lanes_[lane].served.load(std::memory_order_relaxed);
      if (served < least && has_ready_task(slots_[index])) {
        least = served;
        best = index;
      }
    }
    if (best == kMaxJobs) {
      return false;
    }
    if (take_task_of(best, task)) {
      *slot = best;
      return true;
    }
  }
}

bool Scheduler::take_task(uint32_t* slot, uint32_t* task) {
  if (is_shared_.load(std::memory_order_relaxed)) {
    return take_fair_task(slot, task);
  }
  const uint32_t oldest = oldest_.load(std::memory_order_relaxed);
  uint64_t left = std::rotr(active_.load(std::memory_order_relaxed), static_cast<int>(oldest));
  for (; left != 0; left &= left - 1) {
    const auto index = (oldest + static_cast<uint32_t>(std::countr_zero(left))) % kMaxJobs;
    if (take_task_of(index, task)) {
      *slot = index;
      return true;
    }
  }
  return false;
}

bool Scheduler::take_task_of(uint32_t index, uint32_t* task) {
  Slot& s = slots_[index];
  // SYNC: pairs with the release in start(): a cursor of this generation brings its limit along.
  uint64_t cursor = s.cursor.load(std::memory_order_acquire);
  for (;;) {
    // SYNC: pairs with the release in run_task(): where a next stage is open, everything that the
    // stages before wrote is visible.
    const uint64_t limit = s.limit.load(std::memory_order_acquire);
    if (generation_of(cursor) != generation_of(limit) || task_of(cursor) >= task_of(limit)) {
      return false;
    }
    // SYNC: acquires the job's description from start(), which later takers read through the
    // release sequence of read-modify-writes.
    if (s.cursor.compare_exchange_weak(cursor, cursor + 1, std::memory_order_acq_rel,
                                       std::memory_order_acquire)) {
      *task = task_of(cursor);
      KVM_ASSERT(*task < s.plan.n_tasks);
      add_served(s.plan.lane, s.plan.cost / s.plan.n_tasks);
      return true;
    }
  }
}

bool Scheduler::run_one(uint32_t thread) {
  uint32_t slot = 0;
  uint32_t task = 0;
  if (!take_task(&slot, &task)) {
    return false;
  }
  run_task(slot, task, thread);
  return true;
}

void Scheduler::run_task(uint32_t index, uint32_t task, uint32_t thread) {
  Slot& slot = slots_[index];
  const JobPlan plan = slot.plan;
  const uint64_t begin_ns = now_ns();
  if (task == 0) {
    slot.begin_ns = begin_ns;
  }
  slot.set->run(task, thread);
  const uint64_t end_ns = now_ns();
  add_busy(thread, end_ns - begin_ns);

  // SYNC: releases what the task wrote and acquires what the tasks that ended before wrote, so that
  // whoever ends a stage passes all of it on. After this line the slot may belong to another job,
  // unless this was the last task of a stage.
  const uint32_t n_done = slot.n_done.fetch_add(1, std::memory_order_acq_rel) + 1;
  KVM_ASSERT(n_done <= plan.n_tasks);
  if (n_done == plan.n_tasks) {
    slot.end_ns = end_ns;
    announce_finished(index);
  } else if ((n_done == plan.n_first || (n_done == plan.n_middle && n_done > plan.n_first)) &&
             begin_stage(&slot, plan, n_done)) {
    announce_tasks(plan.n_wake);
  } else {
    yield_in_time(thread, end_ns - begin_ns);
    return;
  }
  if (thread != 0) {
    call_wake();
  }
  yield_in_time(thread, end_ns - begin_ns);
}

// For the thread that ended the last of the n_done tasks of the stages before. Returns whether
// tasks became ready, which are to be announced.
bool Scheduler::begin_stage(Slot* slot, const JobPlan& plan, uint32_t n_done) {
  const uint64_t generation = generation_of(slot->limit.load(std::memory_order_relaxed));
  if (plan.n_open >= plan.n_tasks || n_done < plan.last_begin()) {
    // SYNC: everything that this stage wrote becomes visible to those who take a task of the next.
    slot->limit.store(pack(generation, stage_end(plan, n_done)), std::memory_order_release);
    return true;
  }
  // SYNC: releases what this stage wrote to the threads that open tasks from now on, and acquires
  // what was written for those that are open. After this line the slot may belong to another job.
  const uint64_t gate = slot->gate.fetch_or(kHasBegun, std::memory_order_acq_rel);
  return raise_limit(slot, generation, n_open_of(gate));
}

void Scheduler::yield_in_time(uint32_t thread, uint64_t ran_ns) {
  threads_[thread].ran_ns += ran_ns;
  if (threads_[thread].ran_ns >= kYieldNs && yields_.load(std::memory_order_relaxed)) {
    threads_[thread].ran_ns = 0;
    std::this_thread::yield();
  }
}

void Scheduler::set_wake(std::function<void()> wake) {
  const std::lock_guard lock(wake_mutex_);
  wake_ = std::move(wake);
}

void Scheduler::call_wake() {
  const std::lock_guard lock(wake_mutex_);
  if (wake_) {
    wake_();
  }
}

void Scheduler::wake_driver() {
  // SYNC: what was left for the driver becomes visible to it when it takes the call; a store would
  // hide what others left that have called as well.
  driver_is_called_.exchange(true, std::memory_order_seq_cst);
  rouse_driver();
  call_wake();
}

void Scheduler::announce_finished(uint32_t slot) {
  // SYNC: the results of all tasks of the job become visible to the driver that reads the bit.
  finished_.fetch_or(uint64_t{1} << slot, std::memory_order_seq_cst);
  rouse_driver();
}

// Order against help_or_sleep(): as in announce_tasks, with finished_ or driver_is_called_ in the
// place of epoch_.
void Scheduler::rouse_driver() {
  if (driver_sleeps_.load(std::memory_order_seq_cst)) {
    const std::lock_guard lock(mutex_);
    driver_.notify_one();
  }
}

bool Scheduler::take_finished(FinishedJob* job) {
  // SYNC: pairs with announce_finished(): all that the job's tasks wrote is visible.
  const uint64_t finished = finished_.load(std::memory_order_acquire);
  if (finished == 0) {
    return false;
  }
  const auto index = static_cast<uint32_t>(std::countr_zero(finished));
  const uint64_t bit = uint64_t{1} << index;
  KVM_ASSERT((free_slots_ & bit) == 0 && n_active_ != 0);
  finished_.fetch_and(~bit, std::memory_order_relaxed);
  const Slot& slot = slots_[index];
  *job = {slot.set, slot.begin_ns, slot.end_ns};
  active_.fetch_and(~bit, std::memory_order_relaxed);
  free_slots_ |= bit;
  --n_active_;
  n_gated_ -= slot.plan.n_open < slot.plan.n_tasks ? 1 : 0;
  leave_lane(slot.plan.lane);
  if (n_active_ != 0 && index == oldest_.load(std::memory_order_relaxed)) {
    const uint64_t turned = std::rotr(~free_slots_, static_cast<int>(index));
    oldest_.store((index + static_cast<uint32_t>(std::countr_zero(turned))) % kMaxJobs,
                  std::memory_order_relaxed);
  }
  return true;
}

void Scheduler::help_or_sleep(uint64_t timeout_ns) {
  help_or_wait(timeout_ns);
  if (driver_is_called_.load(std::memory_order_relaxed)) {
    // SYNC: pairs with wake_driver(): the caller of this looks around next and sees what was left.
    driver_is_called_.exchange(false, std::memory_order_acquire);
  }
}

void Scheduler::help_or_wait(uint64_t timeout_ns) {
  // SYNC: as in work().
  const uint32_t epoch = epoch_.load(std::memory_order_seq_cst);
  const uint64_t begin_ns = now_ns();
  if (is_driver_wanted() || run_one(0) || spin(epoch, std::min(spin_ns_, timeout_ns), 0)) {
    return;
  }
  const uint64_t spun_ns = now_ns() - begin_ns;
  if (timeout_ns <= spun_ns) {
    return;
  }
  std::unique_lock lock(mutex_);
  // SYNC: see announce_tasks() and rouse_driver().
  driver_sleeps_.store(true, std::memory_order_seq_cst);
  // Long timeouts are cut: callers loop, and deadlines far away overflow the clock's type.
  const uint64_t cut_ns = std::min<uint64_t>(timeout_ns - spun_ns, 1'000'000'000u);
  driver_.wait_for(lock, std::chrono::nanoseconds(cut_ns), [this, epoch] {
    return finished_.load(std::memory_order_seq_cst) != 0 ||
           driver_is_called_.load(std::memory_order_seq_cst) ||
           epoch_.load(std::memory_order_seq_cst) != epoch;
  });
  driver_sleeps_.store(false, std::memory_order_relaxed);
}

uint64_t Scheduler::busy_ns() const {
  uint64_t sum = 0;
  for (const ThreadState& state : threads_) {
    sum += state.busy_ns.load(std::memory_order_relaxed);
  }
  return sum;
}

void Scheduler::add_busy(uint32_t thread, uint64_t ns) {
  // One writer per thread number: no read-modify-write is needed.
  std::atomic<uint64_t>& busy = threads_[thread].busy_ns;
  busy.store(busy.load(std::memory_order_relaxed) + ns, std::memory_order_relaxed);
}

void Scheduler::work(uint32_t thread) {
  for (;;) {
    // SYNC: pairs with announce_tasks(): tasks announced before this epoch are seen by run_one,
    // those announced later change the epoch, which spin and sleep notice.
    const uint32_t epoch = epoch_.load(std::memory_order_seq_cst);
    if (stop_.load(std::memory_order_relaxed)) {
      return;
    }
    if (run_one(thread)) {
      continue;
    }
    // SYNC: pairs with start_workers().
    if (places_.load(std::memory_order_acquire)) {
      placement_.note_core(thread);
    }
    if (!spin(epoch, spin_ns_, thread)) {
      sleep(epoch);
    }
  }
}

bool Scheduler::is_driver_wanted() const {
  return has_finished() || driver_is_called_.load(std::memory_order_relaxed);
}

// Whether tasks became ready or, for the driver (thread 0), something else ends its wait.
bool Scheduler::spin(uint32_t seen_epoch, uint64_t spin_ns, uint32_t thread) {
  constexpr uint32_t kLooksPerClock = 16;
  const uint64_t begin_ns = now_ns();
  SharedSpin spin(&threads_[thread].share);
  do {
    for (uint32_t i = 0; i < kLooksPerClock; ++i) {
      if (epoch_.load(std::memory_order_relaxed) != seen_epoch ||
          (thread == 0 && is_driver_wanted())) {
        spin.finish();
        return true;
      }
      if (!spin.relax()) {
        return false;
      }
    }
  } while (now_ns() - begin_ns < spin_ns);
  spin.finish();
  return false;
}

void Scheduler::sleep(uint32_t seen_epoch) {
  std::unique_lock lock(mutex_);
  // SYNC: see announce_tasks().
  n_sleeping_.fetch_add(1, std::memory_order_seq_cst);
  workers_.wait(
      lock, [this, seen_epoch] { return epoch_.load(std::memory_order_seq_cst) != seen_epoch; });
  n_sleeping_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace kvm::engine
