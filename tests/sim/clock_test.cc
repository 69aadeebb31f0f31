// SPDX-License-Identifier: Apache-2.0
// What every Clock must hold to, over the real one and the simulated one.
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "base/clock.h"
#include "tests/sim/simulated_clock.h"

namespace kvm::testing {
namespace {

// How time passes on each.
struct RealTime {
  SystemClock clock;
  void pass(uint64_t ns) const { std::this_thread::sleep_for(std::chrono::nanoseconds(ns)); }
};
struct SimulatedTime {
  SimulatedClock clock;
  void pass(uint64_t ns) { clock.advance(ns); }
};

constexpr uint64_t kShortNs = 2'000'000;
constexpr uint64_t kLongNs = 3'600'000'000'000;

template <typename Time>
class ClockConformance : public ::testing::Test {
 protected:
  Time time_;
};
using Times = ::testing::Types<RealTime, SimulatedTime>;
TYPED_TEST_SUITE(ClockConformance, Times);

TYPED_TEST(ClockConformance, NeverGoesBack) {
  const Clock& clock = this->time_.clock;
  uint64_t last = clock.now_ns();
  EXPECT_GT(last, 0u);
  for (int i = 0; i < 1000; ++i) {
    const uint64_t now = clock.now_ns();
    ASSERT_GE(now, last);
    last = now;
  }
}

TYPED_TEST(ClockConformance, WhatPassesIsSeen) {
  const Clock& clock = this->time_.clock;
  const uint64_t begin = clock.now_ns();
  this->time_.pass(kShortNs);
  EXPECT_GE(clock.now_ns(), begin + kShortNs);
}

TYPED_TEST(ClockConformance, PatienceEndsWithTheDeadline) {
  const Clock& clock = this->time_.clock;
  const uint64_t deadline = clock.now_ns() + kShortNs;
  this->time_.pass(kShortNs);
  EXPECT_EQ(clock.patience_ns(deadline), 0u);
  EXPECT_EQ(clock.patience_ns(0), 0u);
  EXPECT_GT(clock.patience_ns(clock.now_ns() + kLongNs), kLongNs / 2);
  EXPECT_EQ(clock.patience_ns(UINT64_MAX), UINT64_MAX);
}

// Who blocks as long as his patience, and asks again when he is woken, is awake at his deadline.
TYPED_TEST(ClockConformance, WhoWaitsWakesUp) {
  Clock& clock = this->time_.clock;
  std::mutex mutex;
  std::condition_variable changed;
  bool waits = false;
  uint64_t n_wakes = 0;
  clock.set_wake([&] {
    const std::lock_guard lock(mutex);
    ++n_wakes;
    changed.notify_all();
  });
  const uint64_t deadline = clock.now_ns() + kShortNs;
  uint64_t woken_ns = 0;
  std::thread waiter([&] {
    std::unique_lock lock(mutex);
    waits = true;
    changed.notify_all();
    for (uint64_t patience = clock.patience_ns(deadline); patience != 0;
         patience = clock.patience_ns(deadline)) {
      const uint64_t seen = n_wakes;
      const auto woken = [&] { return n_wakes != seen; };
      if (patience == UINT64_MAX) {
        changed.wait(lock, woken);
      } else {
        changed.wait_for(lock, std::chrono::nanoseconds(patience), woken);
      }
    }
    woken_ns = clock.now_ns();
  });
  {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return waits; });
  }
  this->time_.pass(kShortNs / 2);
  this->time_.pass(kShortNs / 2);
  waiter.join();
  EXPECT_GE(woken_ns, deadline);
  clock.set_wake({});
  const uint64_t before = n_wakes;
  this->time_.pass(kShortNs);
  EXPECT_EQ(n_wakes, before) << "woken though it was taken back";
}

}  // namespace
}  // namespace kvm::testing
