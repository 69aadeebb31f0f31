// SPDX-License-Identifier: Apache-2.0
#include "engine/tasks/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <vector>

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

void wait_for(Scheduler& scheduler, uint32_t n_jobs) {
  FinishedJob job;
  for (uint32_t n = 0; n < n_jobs;) {
    if (scheduler.take_finished(&job)) {
      EXPECT_LE(job.begin_ns, job.end_ns);
      ++n;
    } else {
      scheduler.help_or_sleep(UINT64_MAX);
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
  scheduler.start(&other, {.n_tasks = 100, .cost = uint64_t{100} << 20, .lane = 2});
  scheduler.start(&again, {.n_tasks = 100, .cost = uint64_t{100} << 20, .lane = 1});
  for (int i = 0; i < 60; ++i) {
    scheduler.run_one();
  }
  EXPECT_GE(std::count(seen.begin(), seen.end(), 0), 20);
  while (scheduler.run_one()) {
  }
  wait_for(scheduler, 2);
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

}  // namespace
}  // namespace kvm::engine
