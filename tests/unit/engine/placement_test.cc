// SPDX-License-Identifier: Apache-2.0
#include "engine/tasks/placement.h"

#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/tasks/scheduler.h"

namespace kvm::engine {
namespace {

cpu_set_t cores_of(pthread_t thread) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  EXPECT_EQ(pthread_getaffinity_np(thread, sizeof(cores), &cores), 0);
  return cores;
}

void confine(pthread_t thread, const std::vector<size_t>& cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const size_t core : cores) {
    CPU_SET(core, &set);
  }
  ASSERT_EQ(pthread_setaffinity_np(thread, sizeof(set), &set), 0);
}

// A thread that waits for the end of the test; the test's own gets all its cores back then.
class PlacementTest : public testing::Test {
 protected:
  PlacementTest()
      : before_(cores_of(pthread_self())), thread_([this] {
          std::unique_lock lock(mutex_);
          done_.wait(lock, [this] { return is_done_; });
        }) {
    for (size_t core = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(core, &before_)) {
        cores_.push_back(core);
      }
    }
  }
  ~PlacementTest() override {
    {
      const std::lock_guard lock(mutex_);
      is_done_ = true;
    }
    done_.notify_one();
    thread_.join();
    pthread_setaffinity_np(pthread_self(), sizeof(before_), &before_);
  }

  pthread_t worker() { return thread_.native_handle(); }
  bool may_run_on(size_t core) {
    const cpu_set_t cores = cores_of(worker());
    return CPU_ISSET(core, &cores);
  }

  const cpu_set_t before_;
  std::vector<size_t> cores_;
  std::mutex mutex_;
  std::condition_variable done_;
  bool is_done_ = false;
  std::thread thread_;
};

TEST_F(PlacementTest, TheWorkerIsForbiddenTheDriversCoreAlone) {
  if (cores_.size() < 2 || cores_.size() > Placement::kFewCores) {
    GTEST_SKIP() << cores_.size() << " cores";
  }
  Placement placement;
  placement.start({worker()});
  for (const size_t core : {cores_[0], cores_[1], cores_[0]}) {
    confine(pthread_self(), {core});
    placement.clear_own_core();
    EXPECT_EQ(placement.forbidden(1), static_cast<int>(core));
    for (const size_t other : cores_) {
      EXPECT_EQ(may_run_on(other), other != core) << other;
    }
  }
}

TEST_F(PlacementTest, WhatSomebodyElseAllowsStays) {
  if (cores_.size() < 2 || cores_.size() > Placement::kFewCores) {
    GTEST_SKIP() << cores_.size() << " cores";
  }
  Placement placement;
  placement.start({worker()});
  confine(pthread_self(), {cores_[0]});
  placement.clear_own_core();
  confine(worker(), {cores_[0]});  // as taskset would, while it runs
  confine(pthread_self(), {cores_[1]});
  placement.clear_own_core();
  EXPECT_TRUE(may_run_on(cores_[0]));
  EXPECT_FALSE(may_run_on(cores_[1]));
  // Its only core is not taken from it, and no other given.
  confine(pthread_self(), {cores_[0]});
  placement.clear_own_core();
  EXPECT_TRUE(may_run_on(cores_[0]));
  EXPECT_FALSE(may_run_on(cores_[1]));
}

TEST_F(PlacementTest, NothingIsMovedWhereCoresAreTooFew) {
  confine(worker(), {cores_[0]});
  Placement placement;
  placement.start({worker()});
  confine(pthread_self(), {cores_[0]});
  placement.clear_own_core();
  EXPECT_EQ(placement.forbidden(1), -1);
  EXPECT_TRUE(may_run_on(cores_[0]));
}

// A worker that spins on the core of a driver which computes would wait there for the end of a
// slice, milliseconds later.
TEST_F(PlacementTest, TasksOfASpinningWorkerRunBesideTheDriver) {
  if (cores_.size() < 2 || cores_.size() > Placement::kFewCores) {
    GTEST_SKIP() << cores_.size() << " cores";
  }
  struct Where final : TaskSet {
    void run(uint32_t, uint32_t thread) override {
      if (thread != 0) {
        worker_core = ::sched_getcpu();
      }
    }
    std::atomic<int> worker_core{-1};
  } where;
  Scheduler scheduler(2, 1'000'000);
  ASSERT_TRUE(scheduler.start_workers(false).is_ok());
  for (int round = 0; round < 50; ++round) {
    const size_t core = cores_[static_cast<size_t>(round) % 2];
    confine(pthread_self(), {core});
    where.worker_core = -1;
    scheduler.start(&where, {.n_tasks = 1, .n_wake = 1});
    while (!scheduler.has_finished()) {
      std::this_thread::yield();
    }
    FinishedJob done;
    ASSERT_TRUE(scheduler.take_finished(&done));
    EXPECT_NE(where.worker_core, static_cast<int>(core)) << round;
  }
}

}  // namespace
}  // namespace kvm::engine
