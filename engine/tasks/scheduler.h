// SPDX-License-Identifier: Apache-2.0
// Scheduler: runs the tasks of started jobs on worker threads and on the driver.
//
// A job is an array of tasks in up to three stages: no task of a stage begins before every task of
// the one before has ended. Threads take tasks one by one with an atomic cursor, from the oldest
// job that has one ready, so that all threads stay busy to the end of a job and a straggler costs
// one task.
//
// Jobs belong to lanes, one for each client. Where several lanes have jobs, a thread takes the next
// task from the lane that has been served least, by the cost of the tasks taken. A lane that comes
// back counts as served nearly as much as the others: what it did not use is gone, but for
// kLaneCredit.
//
// Where there are several clients, a thread that has run tasks for kYieldNs lets others of the
// machine have its core: whoever was just answered, or just asked, would else wait for the end of
// its slice, some milliseconds. A yield costs a part of the core's share where something else
// always wants it, so a client that is alone is spared it.
//
// Idle workers spin for a while and then sleep; a job says how many sleepers are worth waking. One
// whose core others want sleeps at once (base/spin.h). Before a job is announced, workers are kept
// off the driver's core (engine/tasks/placement.h).
//
// Threads: the driver thread calls everything. TaskSet::run is called on any thread.
// Memory:  fixed: kMaxJobs slots.
#ifndef KVM_ENGINE_TASKS_SCHEDULER_H_
#define KVM_ENGINE_TASKS_SCHEDULER_H_

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/spin.h"
#include "base/status.h"
#include "engine/tasks/placement.h"

namespace kvm::engine {

// A TaskSet is the work of a job.
class TaskSet {
 public:
  virtual ~TaskSet() = default;
  // Runs one task. `thread` is below Scheduler::n_threads(); calls with the same number never
  // overlap, so it may index scratch memory. Must not throw or block.
  virtual void run(uint32_t task, uint32_t thread) = 0;
};

// A JobPlan says how the tasks of a job are cut into stages and what they cost.
struct JobPlan {
  uint32_t n_first = 0;   // tasks [0, n_first) are the first stage
  uint32_t n_tasks = 0;   // of all stages; at least 1
  uint32_t n_wake = 0;    // sleeping workers worth waking
  uint32_t n_middle = 0;  // beyond n_first: tasks [n_first, n_middle) are a stage of their own
  uint64_t cost = 0;      // of all tasks, in bytes of K and V that take as long to read
  uint32_t lane = 0;      // below Scheduler::kMaxLanes

  // Says whether the stages follow each other within the tasks.
  constexpr bool is_valid() const {
    return n_tasks >= 1 && n_first <= n_tasks && n_middle <= n_tasks &&
           (n_middle == 0 || n_first <= n_middle);
  }
};

// A FinishedJob says when the tasks of a job ran.
struct FinishedJob {
  TaskSet* set = nullptr;
  uint64_t begin_ns = 0;  // of the first task
  uint64_t end_ns = 0;    // of the last
};

class Scheduler {
 public:
  static constexpr uint32_t kMaxJobs = 64;
  static constexpr uint32_t kMaxLanes = 64;
  static constexpr uint64_t kYieldNs = 20'000;
  static constexpr uint64_t kLaneCredit = uint64_t{16} << 20;

  // REQUIRES: n_threads >= 1.
  Scheduler(uint32_t n_threads, uint64_t spin_ns);
  // Ends the workers after the tasks that they are running; the others never run.
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // Starts n_threads - 1 workers; without them the driver runs everything. Fails: LIMIT (the system
  // refuses a thread); the scheduler is good for nothing then but its destruction.
  Status start_workers(bool pin_threads);

  uint32_t n_threads() const { return n_threads_; }
  bool has_room() const { return n_active_ < kMaxJobs; }

  // `set` stays alive until take_finished has returned it.
  // REQUIRES: has_room(), plan.is_valid().
  void start(TaskSet* set, const JobPlan& plan);
  // Whether threads yield their cores now and then.
  void set_yielding(bool yields) { yields_.store(yields, std::memory_order_relaxed); }
  // Counts work of a lane that the driver did outside jobs.
  void charge(uint32_t lane, uint64_t cost);
  // Runs one ready task on the calling (driver) thread; false when there is none.
  bool run_one() { return run_one(0); }
  // A job all of whose tasks have ended; false when there is none.
  bool take_finished(FinishedJob* job);
  // True when take_finished has something.
  bool has_finished() const { return finished_.load(std::memory_order_relaxed) != 0; }
  // For a driver with nothing else to do: runs one ready task, or else spins and then sleeps until
  // has_finished(), until a next stage opens, or until timeout_ns has passed.
  void help_or_sleep(uint64_t timeout_ns);
  // Called on worker threads when a job has finished, or when a next stage has opened. When this
  // returns the callback set before is not running and will not be called again.
  void set_wake(std::function<void()> wake);

  // Time that threads have spent in tasks, and adding to it for work done outside jobs.
  uint64_t busy_ns() const;
  void add_busy_ns(uint64_t ns) { add_busy(0, ns); }

 private:
  // INVARIANT: cursor and limit are (generation << 32 | task number). A task may be taken while
  // both have the same generation and cursor < limit. The generation grows with each use of the
  // slot, so a thread that looked at an older use takes nothing from the newer one.
  struct alignas(64) Slot {
    std::atomic<uint64_t> cursor{0};
    std::atomic<uint64_t> limit{0};
    alignas(64) std::atomic<uint32_t> n_done{0};
    // Written by the driver while the slot is free, constant until its last task has ended.
    TaskSet* set = nullptr;
    JobPlan plan;
    std::atomic<uint32_t> lane{0};  // plan.lane, for those who do not know whether it still holds
    uint64_t begin_ns = 0;          // by the thread that takes task 0
    uint64_t end_ns = 0;            // by the thread that ends the last task
  };
  struct alignas(64) ThreadState {
    std::atomic<uint64_t> busy_ns{0};
    uint64_t ran_ns = 0;  // since it has last yielded; its own
    CoreShare share;      // its own
    std::thread thread;
  };

  struct alignas(64) Lane {
    std::atomic<uint64_t> served{0};  // cost of tasks taken
    uint32_t n_jobs = 0;              // driver only
  };

  bool run_one(uint32_t thread);
  bool take_task(uint32_t* slot, uint32_t* task);
  bool take_task_of(uint32_t index, uint32_t* task);
  bool take_fair_task(uint32_t* slot, uint32_t* task);
  bool has_ready_task(const Slot& slot) const;
  uint64_t least_served() const;
  void enter_lane(uint32_t lane);
  void leave_lane(uint32_t lane);
  void run_task(uint32_t slot, uint32_t task, uint32_t thread);
  void announce_tasks(uint32_t n_wake);
  void announce_finished(uint32_t slot);
  void wake_driver(uint32_t thread);
  void yield_in_time(uint32_t thread, uint64_t ran_ns);
  void add_busy(uint32_t thread, uint64_t ns);
  void work(uint32_t thread);
  bool spin(uint32_t seen_epoch, uint64_t spin_ns, uint32_t thread);
  void sleep(uint32_t seen_epoch);

  const uint32_t n_threads_;
  const uint64_t spin_ns_;
  std::array<Slot, kMaxJobs> slots_;
  // Driver only.
  uint64_t free_slots_ = ~uint64_t{0};
  uint32_t n_active_ = 0;
  uint32_t next_slot_ = 0;
  uint32_t n_busy_lanes_ = 0;
  uint64_t virtual_time_ = 0;  // never back: what a lane counts as served that comes back
  std::array<Lane, kMaxLanes> lanes_;
  // Whether more than one lane has jobs.
  std::atomic<bool> is_shared_{false};
  std::atomic<bool> yields_{false};
  // Bit per slot with a job.
  alignas(64) std::atomic<uint64_t> active_{0};
  std::atomic<uint32_t> oldest_{0};  // slot where the search for tasks begins
  // Grows whenever tasks become ready, and at the end.
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<uint32_t> n_sleeping_{0};
  std::atomic<bool> stop_{false};
  // Bit per slot whose job has ended.
  alignas(64) std::atomic<uint64_t> finished_{0};
  std::atomic<bool> driver_sleeps_{false};
  std::mutex wake_mutex_;
  std::function<void()> wake_;  // guarded by wake_mutex_
  std::mutex mutex_;            // guards nothing but the way into and out of sleep
  std::condition_variable workers_;
  std::condition_variable driver_;
  std::vector<ThreadState> threads_;
  Placement placement_;
  std::atomic<bool> places_{false};  // placement_ knows the workers
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_TASKS_SCHEDULER_H_
