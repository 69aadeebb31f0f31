// SPDX-License-Identifier: Apache-2.0
// Scheduler: runs the tasks of started jobs on worker threads and on the driver.
//
// A job is an array of tasks in up to three stages: no task of a stage begins before every task of
// the one before has ended. Threads take tasks one by one with an atomic cursor, from the oldest
// job that has one ready, so that all threads stay busy to the end of a job and a straggler costs
// one task.
//
// The last stage may have a gate, where what its tasks need comes piece by piece from elsewhere: of
// its tasks, only those below the gate may begin, and open() moves the gate up. A job that waits at
// its gate holds its slot and no thread.
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
// Threads: the driver thread calls everything; open() and wake_driver() are for any thread.
//          TaskSet::run is called on the driver and on workers.
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
  // LIMIT: beyond the number of a task, the word of a gate holds one bit.
  static constexpr uint32_t kMaxTasks = UINT32_MAX >> 1;

  uint32_t n_first = 0;   // tasks [0, n_first) are the first stage
  uint32_t n_tasks = 0;   // of all stages; at least 1, at most kMaxTasks
  uint32_t n_wake = 0;    // sleeping workers worth waking
  uint32_t n_middle = 0;  // beyond n_first: tasks [n_first, n_middle) are a stage of their own
  uint64_t cost = 0;      // of all tasks, in bytes of K and V that take as long to read
  uint32_t lane = 0;      // below Scheduler::kMaxLanes
  // Tasks of the last stage from n_open on wait for Scheduler::open(); n_tasks or more: none does.
  uint32_t n_open = UINT32_MAX;

  // The first task of the last stage.
  constexpr uint32_t last_begin() const { return n_middle == 0 ? n_first : n_middle; }
  // Says whether the stages follow each other within the tasks, and the gate is in the last one.
  constexpr bool is_valid() const {
    return n_tasks >= 1 && n_tasks <= kMaxTasks && n_first <= n_tasks && n_middle <= n_tasks &&
           (n_middle == 0 || n_first <= n_middle) && n_open >= last_begin();
  }
};

// A JobHandle names a started job for Scheduler::open(). It stays good after the job has ended, and
// names no other job then (LIMIT: until its slot has had 2^32 more).
struct JobHandle {
  uint32_t slot = 0;
  uint32_t generation = 0;  // of the slot's uses
  uint32_t n_tasks = 0;     // as planned, like n_wake
  uint32_t n_wake = 0;
  uint32_t lane = 0;
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
  // Ends the workers after the tasks that they are running; the others never run, open or not.
  // REQUIRES: other threads have returned from open() and wake_driver(), and call neither again.
  // That take_finished has returned a job does not say that the open() of its last tasks is over.
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // Starts n_threads - 1 workers; without them the driver runs everything. Fails: LIMIT (the system
  // refuses a thread); the scheduler is good for nothing then but its destruction.
  Status start_workers(bool pin_threads);

  uint32_t n_threads() const { return n_threads_; }
  // For n more jobs.
  bool has_room(uint32_t n = 1) const { return n_active_ + n <= kMaxJobs; }

  // `set` stays alive until take_finished has returned it. Tasks may run before this returns: one
  // that needs the handle has to wait for it, or to be opened by the thread that has stored it.
  // REQUIRES: has_room(), plan.is_valid().
  JobHandle start(TaskSet* set, const JobPlan& plan);
  // Lets the tasks below n_open begin as soon as their stage does; n_tasks or more: all. What the
  // caller wrote before is visible to those that this call opens. Any thread, also within a task,
  // and several at once: the greatest n_open counts. A call that opens nothing new changes nothing,
  // also when the job has ended and its slot has another one.
  // REQUIRES: start() has returned `job`, and that happened before this call.
  void open(JobHandle job, uint32_t n_open);
  // Whether threads yield their cores now and then.
  void set_yielding(bool yields) { yields_.store(yields, std::memory_order_relaxed); }
  // Counts work of a lane that the driver did outside jobs. Where no lane has jobs it is what all
  // count from, as with jobs of a lane that is alone: others begin no further behind.
  void charge(uint32_t lane, uint64_t cost);
  // Runs one ready task on the calling (driver) thread; false when there is none.
  bool run_one() { return run_one(0); }
  // A job all of whose tasks have ended; false when there is none.
  bool take_finished(FinishedJob* job);
  // True when take_finished has something.
  bool has_finished() const { return finished_.load(std::memory_order_relaxed) != 0; }
  // For a driver with nothing else to do: runs one ready task, or else spins and then sleeps until
  // has_finished(), until tasks become ready, until wake_driver(), or until timeout_ns has passed.
  void help_or_sleep(uint64_t timeout_ns);
  // Makes the driver look around, after something was left for it: ends its help_or_sleep, or the
  // next one if it is in none, and calls what set_wake was given. What the caller wrote before is
  // visible to the driver then. Any thread.
  void wake_driver();
  // Called on other threads than the driver (which is who last called start()) when a job has
  // finished, when a next stage or open() has made tasks ready, and by wake_driver(). It must not
  // call the scheduler. When this returns the callback set before is not running and will not be
  // called again.
  void set_wake(std::function<void()> wake);

  // Time that threads have spent in tasks, and adding to it for work done outside jobs.
  uint64_t busy_ns() const;
  void add_busy_ns(uint64_t ns) { add_busy(0, ns); }

 private:
  // INVARIANT: cursor and limit are (generation << 32 | task number), and only grow. A task may be
  // taken while both have the same generation and cursor < limit. The generation grows with each
  // use of the slot, so a thread that looked at an older use takes nothing from the newer one, and
  // opens nothing of it.
  struct alignas(64) Slot {
    std::atomic<uint64_t> cursor{0};
    std::atomic<uint64_t> limit{0};
    // (generation << 32 | whether the last stage has begun << 31 | tasks that are open). One word,
    // so that of the thread that ends the stage before and one that opens tasks, the later sees
    // what the earlier did, and raises the limit.
    std::atomic<uint64_t> gate{0};
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
  uint64_t add_served(uint32_t lane, uint64_t cost);
  uint64_t least_served() const;
  uint64_t least_ready(uint32_t but) const;
  void catch_up(uint32_t lane);
  void enter_lane(uint32_t lane);
  void leave_lane(uint32_t lane);
  void run_task(uint32_t slot, uint32_t task, uint32_t thread);
  static bool begin_stage(Slot* slot, const JobPlan& plan, uint32_t n_done);
  static bool raise_limit(Slot* slot, uint64_t generation, uint32_t n_tasks);
  void announce_tasks(uint32_t n_wake);
  void announce_finished(uint32_t slot);
  void rouse_driver();
  void call_wake();
  void yield_in_time(uint32_t thread, uint64_t ran_ns);
  void add_busy(uint32_t thread, uint64_t ns);
  void work(uint32_t thread);
  void help_or_wait(uint64_t timeout_ns);
  bool is_driver_wanted() const;
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
  uint32_t n_gated_ = 0;       // active jobs that began with tasks behind a gate
  uint64_t virtual_time_ = 0;  // never back: what a lane counts as served that comes back
  std::array<Lane, kMaxLanes> lanes_;
  // Whether more than one lane has jobs.
  std::atomic<bool> is_shared_{false};
  std::atomic<bool> yields_{false};
  // Bit per slot with a job.
  alignas(64) std::atomic<uint64_t> active_{0};
  std::atomic<uint32_t> oldest_{0};  // slot where the search for tasks begins
  std::atomic<std::thread::id> driver_id_;
  // Grows whenever tasks become ready, and at the end.
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<uint32_t> n_sleeping_{0};
  std::atomic<bool> stop_{false};
  // Bit per slot whose job has ended.
  alignas(64) std::atomic<uint64_t> finished_{0};
  std::atomic<bool> driver_sleeps_{false};
  std::atomic<bool> driver_is_called_{false};  // by wake_driver(), until help_or_sleep ends
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
