// SPDX-License-Identifier: Apache-2.0
#include "base/spin.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <thread>

namespace kvm {
namespace {

constexpr uint64_t kMost = CoreShare::kMostPauseNs;
constexpr uint64_t kFirst = CoreShare::kFirstPauseNs;

TEST(CoreShare, PausesDoubleAndShrinkSlowly) {
  CoreShare share;
  EXPECT_FALSE(share.is_contended(0));
  uint64_t now = 1;
  share.note_late(now);
  EXPECT_TRUE(share.is_contended(now + kFirst - 1));
  EXPECT_FALSE(share.is_contended(now + kFirst));
  share.note_late(now);
  EXPECT_TRUE(share.is_contended(now + 2 * kFirst - 1));
  for (int i = 0; i < 40; ++i) {
    share.note_late(now);
  }
  EXPECT_TRUE(share.is_contended(now + kMost - 1));
  EXPECT_FALSE(share.is_contended(now + kMost));
  // One good wait does not forget; many do.
  share.note_in_time();
  now += kMost;
  share.note_late(now);
  EXPECT_TRUE(share.is_contended(now + kMost - 1));
  for (int i = 0; i < 200; ++i) {
    share.note_in_time();
  }
  now += kMost;
  share.note_late(now);
  EXPECT_FALSE(share.is_contended(now + kFirst));
}

TEST(SharedSpin, DoesNotOfferAContendedCore) {
  CoreShare share;
  share.note_late(now_ns() + 1'000'000'000);
  const CoreShare before = share;
  SharedSpin spin(&share);
  int n_looks = 0;
  while (spin.relax()) {
    ASSERT_LT(++n_looks, 1000);
  }
  EXPECT_GT(n_looks, 0) << "a few pauses cost nobody anything";
  spin.finish();
  const uint64_t later = now_ns() + 1'000'000'000;
  EXPECT_EQ(share.is_contended(later), before.is_contended(later));
}

// Two threads on one core, of which one computes.
TEST(SharedSpin, EndsWhereAnotherThreadKeepsTheCore) {
  cpu_set_t before;
  ASSERT_EQ(pthread_getaffinity_np(pthread_self(), sizeof(before), &before), 0);
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(static_cast<size_t>(sched_getcpu()), &one);
  ASSERT_EQ(pthread_setaffinity_np(pthread_self(), sizeof(one), &one), 0);
  std::atomic<bool> stop{false};
  std::thread busy([&] {  // inherits the core
    while (!stop.load(std::memory_order_relaxed)) {
    }
  });
  CoreShare share;
  SharedSpin spin(&share);
  const uint64_t end_ns = now_ns() + 10'000'000'000;
  bool goes_on = true;
  while (goes_on && now_ns() < end_ns) {
    goes_on = spin.relax();
  }
  EXPECT_FALSE(goes_on);
  EXPECT_TRUE(share.is_contended(now_ns()));
  stop.store(true);
  busy.join();
  pthread_setaffinity_np(pthread_self(), sizeof(before), &before);
}

}  // namespace
}  // namespace kvm
