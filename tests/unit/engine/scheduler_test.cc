// SPDX-License-Identifier: Apache-2.0
#include "engine/tasks/scheduler.h"

#include <gtest/gtest.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "base/clock.h"

namespace kvm::engine {
namespace {

// Counts how often each task ran, that no second-stage task ran early, and that no two tasks ran on
// the same thread number at once.
class Recorder final : public TaskSet {
 public:
  Recorder(uint32_t n_first, uint32_t n_tasks, uint32_t n_threads)
      : n_first_(n_first), data_(n_first), runs_(n_tasks), busy_(n_threads) {}

  void run(uint32_t task, uint32_t thread) override {
    if (busy_[thread].exchange(true)) {
      failed_ = true;
    }
    if (task < n_first_) {
      data_[task] = task + 1;  // plain memory: ThreadSanitizer checks the barrier
    } else {
      for (uint32_t i = 0; i < n_first_; ++i) {
        if (data_[i] != i + 1) {
          failed_ = true;
        }
      }
    }
    ++runs_[task];  // plain: a task that ran twice is a race or a wrong count
    busy_[thread] = false;
  }

  bool good() const {
    for (uint32_t n : runs_) {
      if (n != 1) {
        return false;
      }
    }
    return !failed_;
  }

 private:
  uint32_t n_first_;
  std::vector<uint32_t> data_;
  std::vector<uint32_t> runs_;
  std::vector<std::atomic<bool>> busy_;
  std::atomic<bool> failed_ = false;
};

// One wait of the driver. Its timeout is cut at a second, which is over only where nobody has woken
// it.
void help(Scheduler& scheduler) {
  const uint64_t begin_ns = now_ns();
  scheduler.help_or_sleep(UINT64_MAX);
  EXPECT_LT(now_ns() - begin_ns, 1'000'000'000u) << "a wake was lost";
}

void wait_for(Scheduler& scheduler, uint32_t n_jobs) {
  FinishedJob job;
  for (uint32_t n = 0; n < n_jobs;) {
    if (scheduler.take_finished(&job)) {
      EXPECT_LE(job.begin_ns, job.end_ns);
      ++n;
    } else {
      help(scheduler);
    }
  }
}

TEST(Scheduler, OneThreadRunsTasksInOrder) {
  struct Order final : TaskSet {
    void run(uint32_t task, uint32_t thread) override {
      EXPECT_EQ(thread, 0u);
      seen.push_back(task);
    }
    std::vector<uint32_t> seen;
  } order;
  Scheduler scheduler(1, 0);
  EXPECT_FALSE(scheduler.run_one());
  scheduler.start(&order, {.n_first = 2, .n_tasks = 5, .n_wake = 4});
  FinishedJob job;
  for (int i = 0; i < 5; ++i) {
    EXPECT_FALSE(scheduler.take_finished(&job));
    EXPECT_TRUE(scheduler.run_one());
  }
  EXPECT_FALSE(scheduler.run_one());
  ASSERT_TRUE(scheduler.take_finished(&job));
  EXPECT_EQ(job.set, &order);
  EXPECT_EQ(order.seen, (std::vector<uint32_t>{0, 1, 2, 3, 4}));
  EXPECT_FALSE(scheduler.take_finished(&job));
}

// Which job each task was of, in the order of running.
struct Log final : TaskSet {
  explicit Log(std::vector<int>* to, int which) : to_(to), which_(which) {}
  void run(uint32_t, uint32_t) override { to_->push_back(which_); }
  std::vector<int>* to_;
  int which_;
};

TEST(Scheduler, OldestJobFirst) {
  std::vector<int> seen;
  Scheduler scheduler(1, 0);
  Log a(&seen, 0);
  Log b(&seen, 1);
  scheduler.start(&a, {.n_first = 0, .n_tasks = 2, .n_wake = 0});
  scheduler.start(&b, {.n_first = 0, .n_tasks = 2, .n_wake = 0});
  while (scheduler.run_one()) {
  }
  EXPECT_EQ(seen, (std::vector<int>{0, 0, 1, 1}));
  wait_for(scheduler, 2);
}

// A lane that comes while another one is busy is served at once, and then as much as the other.
TEST(Scheduler, LanesShareByCost) {
  constexpr uint64_t kMiB = 1 << 20;
  constexpr uint32_t kCredit = Scheduler::kLaneCredit / kMiB;
  std::vector<int> seen;
  Scheduler scheduler(1, 0);
  Log heavy(&seen, 0);
  Log light(&seen, 1);
  Log lighter(&seen, 2);
  // Tasks of 2 MiB against tasks of 1 MiB.
  scheduler.start(&heavy, {.n_tasks = 1000, .cost = 2000 * kMiB, .lane = 5});
  for (int i = 0; i < 100; ++i) {
    scheduler.run_one();
  }
  seen.clear();
  scheduler.start(&light, {.n_tasks = 200, .cost = 200 * kMiB, .lane = 7});
  for (uint32_t i = 0; i < kCredit; ++i) {
    scheduler.run_one();
  }
  EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), kCredit) << "what it may catch up with";
  seen.clear();
  for (int i = 0; i < 90; ++i) {
    scheduler.run_one();
  }
  EXPECT_NEAR(static_cast<double>(std::count(seen.begin(), seen.end(), 1)), 60, 1);
  // A third one is not served more for having been away for longer, nor is the first one punished
  // for what it had while it was alone.
  scheduler.start(&lighter, {.n_tasks = 200, .cost = 200 * kMiB, .lane = 0});
  seen.clear();
  for (uint32_t i = 0; i < kCredit + 5 * 10; ++i) {
    scheduler.run_one();
  }
  EXPECT_NEAR(static_cast<double>(std::count(seen.begin(), seen.end(), 2)), kCredit + 20, 1);
  EXPECT_NEAR(static_cast<double>(std::count(seen.begin(), seen.end(), 0)), 10, 1);
  while (scheduler.run_one()) {
  }
  wait_for(scheduler, 3);
}

// Lane 1, which logs 0, gets its share beside lane 2, though that comes first.
void expect_its_share(Scheduler* scheduler, Log* own, Log* other, std::vector<int>* seen) {
  scheduler->start(other, {.n_tasks = 100, .cost = uint64_t{100} << 20, .lane = 2});
  scheduler->start(own, {.n_tasks = 100, .cost = uint64_t{100} << 20, .lane = 1});
  for (int i = 0; i < 60; ++i) {
    scheduler->run_one();
  }
  EXPECT_GE(std::count(seen->begin(), seen->end(), 0), 20);
  while (scheduler->run_one()) {
  }
  wait_for(*scheduler, 2);
}

// A lane that had everything while nobody else wanted it owes nobody anything later.
TEST(Scheduler, ALaneThatWasAloneIsNotStarved) {
  std::vector<int> seen;
  Scheduler scheduler(1, 0);
  Log first(&seen, 0);
  Log again(&seen, 0);
  Log other(&seen, 1);
  scheduler.start(&first, {.n_tasks = 100, .cost = uint64_t{100} << 30, .lane = 1});
  while (scheduler.run_one()) {
  }
  wait_for(scheduler, 1);
  seen.clear();
  expect_its_share(&scheduler, &again, &other, &seen);
}

// The same where the driver did its work outside jobs: who comes later begins no further behind.
TEST(Scheduler, WorkOutsideJobsIsNoDebtWhereNobodyElseWantedIt) {
  std::vector<int> seen;
  Scheduler scheduler(1, 0);
  Log first(&seen, 0);
  Log other(&seen, 1);
  for (int i = 0; i < 1000; ++i) {
    scheduler.charge(1, uint64_t{100} << 20);
  }
  expect_its_share(&scheduler, &first, &other, &seen);
}

// One that waits at a gate while others are served catches up with the credit alone, and holds back
// nobody who comes meanwhile.
TEST(Scheduler, ALaneThatWaitsAtItsGateCatchesUpNoFurther) {
  constexpr uint64_t kMiB = 1 << 20;
  constexpr uint32_t kCredit = Scheduler::kLaneCredit / kMiB;
  std::vector<int> seen;
  Scheduler scheduler(1, 0);
  Log waiting(&seen, 0);
  Log busy(&seen, 1);
  Log late(&seen, 2);
  const JobHandle gated =
      scheduler.start(&waiting, {.n_tasks = 400, .cost = 400 * kMiB, .lane = 1, .n_open = 0});
  scheduler.start(&busy, {.n_tasks = 1000, .cost = 1000 * kMiB, .lane = 2});
  for (int i = 0; i < 400; ++i) {
    scheduler.run_one();
  }
  seen.clear();
  scheduler.start(&late, {.n_tasks = 200, .cost = 200 * kMiB, .lane = 3});
  for (uint32_t i = 0; i < kCredit + 20; ++i) {
    scheduler.run_one();
  }
  EXPECT_NEAR(static_cast<double>(std::count(seen.begin(), seen.end(), 2)), kCredit + 10, 1);
  scheduler.open(gated, UINT32_MAX);
  seen.clear();
  for (uint32_t i = 0; i < kCredit + 30; ++i) {
    scheduler.run_one();
  }
  EXPECT_NEAR(static_cast<double>(std::count(seen.begin(), seen.end(), 0)), kCredit + 10, 1);
  while (scheduler.run_one()) {
  }
  wait_for(scheduler, 3);
}

TEST(Scheduler, EveryTaskRunsOnceAndStagesKeepApart) {
  for (const uint32_t n_threads : {1u, 2u, 4u}) {
    for (const uint64_t spin_ns : {0u, 100'000u}) {
      Scheduler scheduler(n_threads, spin_ns);
      ASSERT_TRUE(scheduler.start_workers(false).is_ok());
      std::mt19937 random(n_threads);
      std::vector<std::unique_ptr<Recorder>> jobs;
      uint32_t n_open = 0;
      for (int round = 0; round < 400; ++round) {
        const uint32_t n_tasks = 1 + static_cast<uint32_t>(random() % 40);
        const bool one_stage = random() % 3 == 0;
        const uint32_t n_first = one_stage ? 0 : static_cast<uint32_t>(random() % (n_tasks + 1));
        jobs.push_back(std::make_unique<Recorder>(n_first, n_tasks, n_threads));
        scheduler.start(jobs.back().get(), {.n_first = n_first,
                                            .n_tasks = n_tasks,
                                            .n_wake = static_cast<uint32_t>(random() % 4),
                                            .cost = random() % (uint64_t{64} << 20),
                                            .lane = static_cast<uint32_t>(random() % 3)});
        ++n_open;
        if (!scheduler.has_room() || random() % 4 == 0) {
          wait_for(scheduler, n_open);
          n_open = 0;
        }
      }
      wait_for(scheduler, n_open);
      for (const auto& job : jobs) {
        EXPECT_TRUE(job->good()) << n_threads << " threads, spinning " << spin_ns;
      }
    }
  }
}

TEST(Scheduler, SlotsAreReusedUnderLoad) {
  Scheduler scheduler(3, 1000);
  ASSERT_TRUE(scheduler.start_workers(false).is_ok());
  std::vector<std::unique_ptr<Recorder>> jobs;
  FinishedJob done;
  uint32_t n_done = 0;
  for (int i = 0; i < 5000; ++i) {
    while (!scheduler.has_room()) {
      if (scheduler.take_finished(&done)) {
        ++n_done;
      } else {
        scheduler.help_or_sleep(UINT64_MAX);
      }
    }
    jobs.push_back(std::make_unique<Recorder>(1, 3, 3));
    scheduler.start(jobs.back().get(), {1, 3, 2});
  }
  wait_for(scheduler, static_cast<uint32_t>(jobs.size()) - n_done);
  for (const auto& job : jobs) {
    EXPECT_TRUE(job->good());
  }
  EXPECT_GT(scheduler.busy_ns(), 0u);
}

TEST(Scheduler, WorkersAloneFinishAndCallWake) {
  Scheduler scheduler(2, 0);
  ASSERT_TRUE(scheduler.start_workers(false).is_ok());
  std::atomic<int> n_wakes = 0;
  scheduler.set_wake([&] { ++n_wakes; });
  Recorder job(1, 2, 2);
  scheduler.start(&job, {1, 2, 1});
  while (!scheduler.has_finished()) {
    std::this_thread::yield();
  }
  FinishedJob done;
  ASSERT_TRUE(scheduler.take_finished(&done));
  EXPECT_TRUE(job.good());
  while (n_wakes == 0) {
    std::this_thread::yield();
  }
}

TEST(Scheduler, IdleDriverReturnsAfterTheTimeout) {
  Scheduler scheduler(2, 1000);
  ASSERT_TRUE(scheduler.start_workers(false).is_ok());
  scheduler.help_or_sleep(0);
  scheduler.help_or_sleep(2'000'000);
  EXPECT_FALSE(scheduler.has_finished());
}

TEST(Scheduler, EndsWithTasksLeft) {
  struct Nothing final : TaskSet {
    void run(uint32_t, uint32_t) override {}
  } nothing;
  Scheduler scheduler(2, 0);
  ASSERT_TRUE(scheduler.start_workers(false).is_ok());
  scheduler.start(&nothing, {.n_first = 1, .n_tasks = 1000, .n_wake = 0});
}

// --- Gates --------------------------------------------------------------------------------------

// A job whose last stage the test opens. Checks that each task runs once, after the stages before
// it and after it was opened.
class GatedJob : public TaskSet {
 public:
  // `has_gifts`: one thread opens all tasks, with give(), and they check that they see its gifts.
  GatedJob(Scheduler* scheduler, const JobPlan& plan, bool has_gifts = false)
      : scheduler_(scheduler),
        plan_(plan),
        has_gifts_(has_gifts),
        n_open_(std::min(plan.n_open, plan.n_tasks)),
        n_given_(std::min(plan.n_open, plan.n_tasks)),
        gifts_(plan.n_tasks),
        runs_(plan.n_tasks) {}

  void start() { handle_ = scheduler_->start(this, plan_); }

  void open(uint32_t n_open) {
    uint32_t seen = n_open_.load();
    while (seen < n_open && !n_open_.compare_exchange_weak(seen, n_open)) {
    }
    scheduler_->open(handle_, n_open);
  }

  void give(uint32_t n_open) {
    for (; n_given_ < std::min(n_open, plan_.n_tasks); ++n_given_) {
      gifts_[n_given_] = n_given_ + 1;  // plain memory: ThreadSanitizer checks the gate
    }
    open(n_open);
  }

  void run(uint32_t task, uint32_t) override {
    const bool is_last_stage = task >= plan_.last_begin();
    if (is_last_stage && task >= n_open_.load()) {
      failed_ = true;
    }
    if (has_gifts_ && task >= plan_.n_open && gifts_[task] != task + 1) {
      failed_ = true;
    }
    uint32_t n_before = is_last_stage ? plan_.last_begin() : plan_.n_first;
    n_before = task < plan_.n_first ? 0 : n_before;
    for (uint32_t i = 0; i < n_before; ++i) {
      if (runs_[i] != 1) {
        failed_ = true;
      }
    }
    ++runs_[task];
  }

  const JobPlan& plan() const { return plan_; }
  // Once the job has ended, or while no other thread runs its tasks.
  uint32_t n_run() const {
    return static_cast<uint32_t>(std::count(runs_.begin(), runs_.end(), 1u));
  }
  bool good() const { return !failed_ && n_run() == plan_.n_tasks; }

 private:
  Scheduler* scheduler_;
  const JobPlan plan_;
  const bool has_gifts_;
  JobHandle handle_;
  std::atomic<uint32_t> n_open_;  // the greatest number that open() was called with
  uint32_t n_given_;
  std::vector<uint32_t> gifts_;
  std::vector<uint32_t> runs_;
  std::atomic<bool> failed_ = false;
};

uint32_t run_all_ready(Scheduler& scheduler) {
  uint32_t n = 0;
  while (scheduler.run_one()) {
    ++n;
  }
  return n;
}

template <typename Work>
void on_another_thread(Work work) {
  std::thread(work).join();
}

TEST(Scheduler, AGateIsInTheLastStage) {
  EXPECT_TRUE((JobPlan{.n_tasks = 4, .n_open = 0}.is_valid()));
  EXPECT_TRUE((JobPlan{.n_first = 2, .n_tasks = 4, .n_open = 2}.is_valid()));
  EXPECT_FALSE((JobPlan{.n_first = 2, .n_tasks = 4, .n_open = 1}.is_valid()));
  EXPECT_TRUE((JobPlan{.n_first = 1, .n_tasks = 4, .n_middle = 3, .n_open = 3}.is_valid()));
  EXPECT_FALSE((JobPlan{.n_first = 1, .n_tasks = 4, .n_middle = 3, .n_open = 2}.is_valid()));
  EXPECT_TRUE((JobPlan{.n_tasks = JobPlan::kMaxTasks}.is_valid()));
  EXPECT_FALSE((JobPlan{.n_tasks = JobPlan::kMaxTasks + 1}.is_valid()));
}

TEST(Scheduler, OnlyOpenTasksRun) {
  Scheduler scheduler(1, 0);
  GatedJob closed(&scheduler, {.n_tasks = 5, .n_open = 0});
  closed.start();
  EXPECT_EQ(run_all_ready(scheduler), 0u);
  Recorder other(1, 3, 1);
  scheduler.start(&other, {.n_first = 1, .n_tasks = 3});
  EXPECT_EQ(run_all_ready(scheduler), 3u);
  wait_for(scheduler, 1);
  closed.open(2);
  EXPECT_EQ(run_all_ready(scheduler), 2u);
  closed.open(1);
  closed.open(2);
  EXPECT_EQ(run_all_ready(scheduler), 0u);
  closed.open(3);
  closed.open(4);
  EXPECT_EQ(run_all_ready(scheduler), 2u);
  EXPECT_FALSE(scheduler.has_finished());
  closed.open(UINT32_MAX);
  EXPECT_EQ(run_all_ready(scheduler), 1u);
  wait_for(scheduler, 1);
  EXPECT_TRUE(closed.good());

  GatedJob ajar(&scheduler, {.n_tasks = 5, .n_open = 3});
  ajar.start();
  EXPECT_EQ(run_all_ready(scheduler), 3u);
  ajar.open(5);
  EXPECT_EQ(run_all_ready(scheduler), 2u);
  wait_for(scheduler, 1);
  EXPECT_TRUE(ajar.good());
}

TEST(Scheduler, AGateOpensBeforeOrAfterItsStage) {
  Scheduler scheduler(1, 0);
  for (const uint32_t n_middle : {0u, 2u, 4u}) {
    const uint32_t begin = std::max(2u, n_middle);
    for (uint32_t n_before = 0; n_before <= begin; ++n_before) {
      GatedJob job(&scheduler,
                   {.n_first = 2, .n_tasks = begin + 4, .n_middle = n_middle, .n_open = begin});
      job.start();
      for (uint32_t i = 0; i < n_before; ++i) {
        EXPECT_TRUE(scheduler.run_one());
      }
      job.open(begin + 1);
      job.open(begin + 3);
      EXPECT_EQ(run_all_ready(scheduler), begin + 3 - n_before);
      job.open(begin + 4);
      EXPECT_EQ(run_all_ready(scheduler), 1u);
      wait_for(scheduler, 1);
      EXPECT_TRUE(job.good());
    }
  }
}

TEST(Scheduler, AHandleOpensNothingOfALaterJob) {
  Scheduler scheduler(1, 0);
  GatedJob first(&scheduler, {.n_tasks = 3, .n_open = 1});
  first.start();
  first.open(3);
  run_all_ready(scheduler);
  wait_for(scheduler, 1);
  std::vector<std::unique_ptr<GatedJob>> later;
  while (scheduler.has_room()) {  // in all slots
    later.push_back(
        std::make_unique<GatedJob>(&scheduler, JobPlan{.n_first = 1, .n_tasks = 3, .n_open = 1}));
    later.back()->start();
  }
  first.open(2);
  first.open(UINT32_MAX);
  EXPECT_EQ(run_all_ready(scheduler), later.size()) << "the first stages";
  first.open(UINT32_MAX);
  EXPECT_EQ(run_all_ready(scheduler), 0u);
  for (const auto& job : later) {
    job->open(3);
  }
  run_all_ready(scheduler);
  wait_for(scheduler, static_cast<uint32_t>(later.size()));
  for (const auto& job : later) {
    EXPECT_TRUE(job->good());
  }
}

uint64_t cpu_ns() {
  timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(time.tv_nsec);
}

TEST(Scheduler, AJobAtItsGateHoldsNoThread) {
  constexpr uint64_t kWaitNs = 50'000'000;
  Scheduler scheduler(3, 0);
  ASSERT_TRUE(scheduler.start_workers(false).is_ok());
  GatedJob closed(&scheduler, {.n_tasks = 4, .n_wake = 2, .n_open = 0});
  GatedJob first_stage(&scheduler, {.n_first = 2, .n_tasks = 4, .n_wake = 2, .n_open = 2});
  closed.start();
  first_stage.start();
  std::vector<std::unique_ptr<Recorder>> others;
  for (int i = 0; i < 20; ++i) {
    others.push_back(std::make_unique<Recorder>(2, 6, 3));
    scheduler.start(others.back().get(), {.n_first = 2, .n_tasks = 6, .n_wake = 2});
  }
  wait_for(scheduler, static_cast<uint32_t>(others.size()));
  for (const auto& job : others) {
    EXPECT_TRUE(job->good());
  }
  scheduler.help_or_sleep(5'000'000);  // a late first stage, and the workers' way to sleep
  scheduler.help_or_sleep(5'000'000);
  const uint64_t begin_ns = cpu_ns();
  scheduler.help_or_sleep(kWaitNs);
  EXPECT_LT(cpu_ns() - begin_ns, kWaitNs / 2);
  EXPECT_FALSE(scheduler.has_finished());
  closed.open(4);
  first_stage.open(4);
  wait_for(scheduler, 2);
  EXPECT_TRUE(closed.good());
  EXPECT_TRUE(first_stage.good());
}

TEST(Scheduler, OpeningWakesTheSleepingDriver) {
  for (const uint64_t spin_ns : {0u, 20'000'000u}) {
    Scheduler scheduler(1, spin_ns);
    GatedJob job(&scheduler, {.n_tasks = 6, .n_open = 0}, true);
    job.start();
    std::thread opener([&] {
      for (uint32_t n = 1; n <= 6; ++n) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        job.give(n);
      }
    });
    wait_for(scheduler, 1);
    opener.join();
    EXPECT_TRUE(job.good());
  }
}

// Spends up to some microseconds.
void dawdle(std::mt19937& random) {
  const auto n = static_cast<uint32_t>(random() % (random() % 4 == 0 ? 4000 : 100));
  for (uint32_t i = 0; i < n; ++i) {
    std::atomic_signal_fence(std::memory_order_seq_cst);  // keeps the loop
  }
}

TEST(Scheduler, TheDriverMissesNoCall) {
  Scheduler scheduler(1, 0);
  // A call before the wait ends it, and only that one.
  on_another_thread([&] { scheduler.wake_driver(); });
  scheduler.wake_driver();
  help(scheduler);
  const uint64_t begin_ns = now_ns();
  scheduler.help_or_sleep(2'000'000);
  EXPECT_GE(now_ns() - begin_ns, 2'000'000u);

  constexpr uint32_t kCalls = 6000;
  uint32_t mail = 0;  // plain memory: ThreadSanitizer checks the call
  std::atomic<uint32_t> n_taken = 0;
  std::thread caller([&] {
    std::mt19937 random(1);
    for (uint32_t i = 1; i <= kCalls; ++i) {
      dawdle(random);
      mail = i;
      scheduler.wake_driver();
      while (n_taken.load() < i) {
        std::this_thread::yield();
      }
    }
  });
  std::mt19937 random(2);
  for (uint32_t i = 1; i <= kCalls; ++i) {
    dawdle(random);
    help(scheduler);
    EXPECT_EQ(mail, i);
    n_taken = i;
  }
  caller.join();
}

TEST(Scheduler, OtherThreadsCallWake) {
  Scheduler scheduler(1, 0);
  std::atomic<int> n_wakes = 0;
  scheduler.set_wake([&] { ++n_wakes; });
  GatedJob job(&scheduler, {.n_first = 1, .n_tasks = 4, .n_open = 1});
  job.start();
  on_another_thread([&] { job.open(2); });
  EXPECT_EQ(n_wakes, 0) << "its stage has not begun";
  EXPECT_EQ(run_all_ready(scheduler), 2u);
  job.open(3);
  EXPECT_EQ(n_wakes, 0) << "the driver needs no waking";
  on_another_thread([&] { job.open(3); });
  EXPECT_EQ(n_wakes, 0) << "nothing new";
  on_another_thread([&] { job.open(4); });
  EXPECT_EQ(n_wakes, 1);
  on_another_thread([&] { scheduler.wake_driver(); });
  EXPECT_EQ(n_wakes, 2);
  wait_for(scheduler, 1);
  EXPECT_TRUE(job.good());
  on_another_thread([&] { job.open(4); });
  EXPECT_EQ(n_wakes, 2);
}

JobPlan random_plan(std::mt19937& random) {
  const auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  JobPlan plan;
  plan.n_first = below(3);
  plan.n_middle = below(2) == 0 ? 0 : plan.n_first + below(3);
  plan.n_tasks = plan.last_begin() + 1 + below(6);
  plan.n_wake = below(4);
  plan.cost = below(64u << 20);
  plan.lane = below(3);
  plan.n_open = plan.last_begin() + below(plan.n_tasks - plan.last_begin() + 1);
  return plan;
}

// Runs the jobs one after the other, at most n_at_once at a time, while n_openers threads call
// `open` for each in turn.
template <typename Open>
void run_gated(Scheduler& scheduler, const std::vector<std::unique_ptr<GatedJob>>& jobs,
               uint32_t n_at_once, uint32_t n_openers, Open open) {
  std::atomic<size_t> n_started = 0;
  std::vector<std::thread> openers;
  for (uint32_t k = 0; k < n_openers; ++k) {
    openers.emplace_back([&, k] {
      std::mt19937 random(k + 1);
      for (size_t i = 0; i < jobs.size(); ++i) {
        while (n_started.load() <= i) {
          std::this_thread::yield();
        }
        dawdle(random);
        open(*jobs[i], random);
      }
    });
  }
  uint32_t n_running = 0;
  for (const auto& job : jobs) {
    if (n_running == n_at_once) {
      wait_for(scheduler, 1);
      --n_running;
    }
    job->start();
    ++n_running;
    ++n_started;
  }
  wait_for(scheduler, n_running);
  for (std::thread& opener : openers) {
    opener.join();
  }
  for (const auto& job : jobs) {
    EXPECT_TRUE(job->good());
  }
}

TEST(Scheduler, AnotherThreadOpensTheTasks) {
  for (const uint32_t n_threads : {1u, 3u}) {
    for (const uint64_t spin_ns : {0u, 20'000u}) {
      // One at a time, so that the end of the stages before meets the opener.
      for (const uint32_t n_at_once : {1u, 16u}) {
        Scheduler scheduler(n_threads, spin_ns);
        ASSERT_TRUE(scheduler.start_workers(false).is_ok());
        std::mt19937 random(n_threads + n_at_once);
        std::vector<std::unique_ptr<GatedJob>> jobs;
        for (int i = 0; i < 3000; ++i) {
          jobs.push_back(std::make_unique<GatedJob>(&scheduler, random_plan(random), true));
        }
        run_gated(scheduler, jobs, n_at_once, 1, [](GatedJob& job, std::mt19937& r) {
          for (uint32_t n = job.plan().n_open; n < job.plan().n_tasks;) {
            n += 1 + static_cast<uint32_t>(r() % 3);
            job.give(n);
            dawdle(r);
          }
        });
      }
    }
  }
}

// Openers that lag behind open jobs that have ended, in slots that others have.
TEST(Scheduler, SeveralThreadsOpenTasksAtOnce) {
  for (const uint32_t n_at_once : {2u, 64u}) {
    Scheduler scheduler(2, 1000);
    ASSERT_TRUE(scheduler.start_workers(false).is_ok());
    std::mt19937 random(n_at_once);
    std::vector<std::unique_ptr<GatedJob>> jobs;
    for (int i = 0; i < 6000; ++i) {
      jobs.push_back(std::make_unique<GatedJob>(&scheduler, random_plan(random)));
    }
    run_gated(scheduler, jobs, n_at_once, 3, [](GatedJob& job, std::mt19937& r) {
      for (uint32_t n = static_cast<uint32_t>(r() % 4); n > 0; --n) {
        job.open(static_cast<uint32_t>(r() % (job.plan().n_tasks + 1)));
        dawdle(r);
      }
      job.open(r() % 2 == 0 ? job.plan().n_tasks : UINT32_MAX);
    });
  }
}

TEST(Scheduler, TasksOpenTasks) {
  struct Fan final : GatedJob {
    Fan(Scheduler* scheduler, const JobPlan& plan, uint32_t width)
        : GatedJob(scheduler, plan), width_(width) {}
    void run(uint32_t task, uint32_t thread) override {
      GatedJob::run(task, thread);
      if (task >= plan().last_begin()) {
        open(width_ * (task + 1) + 1);
      }
    }
    uint32_t width_;
  };
  Scheduler scheduler(3, 1000);
  ASSERT_TRUE(scheduler.start_workers(false).is_ok());
  std::mt19937 random(1);
  for (int i = 0; i < 5000; ++i) {
    const auto n_first = static_cast<uint32_t>(random() % 3);
    Fan job(&scheduler,
            {.n_first = n_first, .n_tasks = n_first + 12, .n_wake = 2, .n_open = n_first},
            1 + static_cast<uint32_t>(random() % 2));
    job.start();
    job.open(n_first + 1);
    wait_for(scheduler, 1);
    EXPECT_TRUE(job.good());
  }
}

TEST(Scheduler, EndsWithTasksThatWereNeverOpened) {
  auto scheduler = std::make_unique<Scheduler>(2, 0);
  GatedJob closed(scheduler.get(), {.n_tasks = 3, .n_wake = 1, .n_open = 0});
  GatedJob ajar(scheduler.get(), {.n_first = 2, .n_tasks = 6, .n_wake = 1, .n_open = 4});
  ASSERT_TRUE(scheduler->start_workers(false).is_ok());
  closed.start();
  ajar.start();
  scheduler.reset();
  EXPECT_EQ(closed.n_run(), 0u);
  EXPECT_LE(ajar.n_run(), 4u);
}

}  // namespace
}  // namespace kvm::engine
