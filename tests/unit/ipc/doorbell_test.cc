// SPDX-License-Identifier: Apache-2.0
// The doorbell wakes by edges alone, whatever a client does to the shared eventfd.
#include "ipc/doorbell.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <unistd.h>

namespace kvm::ipc {
namespace {

class Doorbell : public ::testing::Test {
 protected:
  void SetUp() override {
    epoll_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
    bell_ = make_doorbell().value();
    ASSERT_TRUE(watch_doorbell(epoll_, bell_, 42).is_ok());
  }
  // Events that are there now.
  int events() {
    epoll_event event{};
    const int n = ::epoll_wait(epoll_.get(), &event, 1, 0);
    if (n == 1) {
      EXPECT_EQ(event.data.u64, 42u);
    }
    return n;
  }
  Fd epoll_, bell_;
};

TEST_F(Doorbell, EachRingIsAnEdgeThoughNobodyReads) {
  EXPECT_EQ(events(), 0);
  for (int i = 0; i < 100; ++i) {
    ring_doorbell(bell_);
    EXPECT_EQ(events(), 1) << i;
    EXPECT_EQ(events(), 0) << i;
  }
}

TEST_F(Doorbell, RingsBeforeALookAreOneEvent) {
  ring_doorbell(bell_);
  ring_doorbell(bell_);
  EXPECT_EQ(events(), 1);
  EXPECT_EQ(events(), 0);
}

TEST_F(Doorbell, ClientThatEmptiesOrFillsItHarmsNobody) {
  uint64_t count = 0;
  ring_doorbell(bell_);
  ASSERT_EQ(::read(bell_.get(), &count, sizeof(count)), 8);
  ring_doorbell(bell_);
  EXPECT_EQ(events(), 1);
  // Full, and blocking: a write of the daemon would now hang. It makes none.
  ASSERT_EQ(::fcntl(bell_.get(), F_SETFL, 0), 0);
  count = UINT64_MAX - 2;
  ASSERT_EQ(::read(bell_.get(), &count, sizeof(count)), 8);
  count = UINT64_MAX - 1;
  ASSERT_EQ(::write(bell_.get(), &count, sizeof(count)), 8);
  EXPECT_EQ(events(), 1);
  EXPECT_EQ(events(), 0);
}

}  // namespace
}  // namespace kvm::ipc
