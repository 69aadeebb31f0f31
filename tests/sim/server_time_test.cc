// SPDX-License-Identifier: Apache-2.0
// What kvmd does when a time has come, and not a nanosecond earlier: handshakes, the watchdog, the
// end of a shutdown.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>

#include "base/clock.h"
#include "daemon/server.h"
#include "tests/sim/simulated_clock.h"
#include "tests/unit/daemon/fake_engine.h"
#include "tests/unit/daemon/raw_client.h"

namespace kvm::testing {
namespace {

constexpr uint64_t kRealPatienceNs = 30'000'000'000;
constexpr uint64_t kPeriodNs = 30'000'000'000;
constexpr uint64_t kShutdownNs = 3'600'000'000'000;

class ServerTime : public ::testing::Test {
 protected:
  void SetUp() override {
    char folder[] = "/tmp/kvmd-time-XXXXXX";
    folder_ = ::mkdtemp(folder);
    daemon::ServerOptions options;
    options.socket_path = folder_ + "/kvmd.sock";
    options.clock = &clock_;
    options.watchdog_period_ns = kPeriodNs;
    options.on_watchdog = [this] { ++n_watchdogs_; };
    options.on_stopping = [this] { is_stopping_ = true; };
    options.shutdown_timeout_ns = kShutdownNs;
    options.spin_max_ns = 0;
    server_ = std::make_unique<daemon::Server>(&engine_, options);
    ASSERT_TRUE(server_->start().is_ok());
    thread_ = std::thread([this] {
      server_->run();
      has_ended_ = true;
    });
    witness_ = std::make_unique<RawClient>(path());
    ASSERT_TRUE(witness_->hello().is_ok());
  }
  void TearDown() override {
    server_->request_stop();
    while (!has_ended_) {
      clock_.advance(kShutdownNs);
      ::usleep(100);
    }
    thread_.join();
    server_.reset();
    std::filesystem::remove_all(folder_);
  }

  std::string path() const { return folder_ + "/kvmd.sock"; }
  // After this the dispatcher has looked at its timers with the time of now.
  void settle() {
    ASSERT_TRUE(witness_->stats().is_ok());
    ASSERT_TRUE(witness_->stats().is_ok());
  }
  // A request that the fake engine never finishes by itself.
  void submit_endless(RawQueue* queue, const RawArena& arena) {
    ipc::ReadBlock read{};
    read.seq = 1;
    std::memcpy(arena.memory.data(), &read, sizeof(read));
    ipc::RequestEntry entry{};
    entry.opcode = static_cast<uint8_t>(ipc::Opcode::kRead);
    entry.version = ipc::kBlockVersion;
    entry.region = arena.region;
    entry.block_length = sizeof(read);
    entry.result_region = arena.region;
    entry.result_offset = 1024;
    witness_->submit(queue, entry);
  }
  // Whether it becomes true while real time passes.
  template <typename Condition>
  static bool comes_true(Condition condition) {
    const uint64_t deadline = now_ns() + kRealPatienceNs;
    while (!condition() && now_ns() < deadline) {
      ::usleep(100);
    }
    return condition();
  }

  SimulatedClock clock_;
  FakeEngine engine_{engine::EngineOptions{}};
  std::string folder_;
  std::unique_ptr<daemon::Server> server_;
  std::thread thread_;
  std::unique_ptr<RawClient> witness_;
  std::atomic<uint64_t> n_watchdogs_{0};
  std::atomic<bool> is_stopping_{false};
  std::atomic<bool> has_ended_{false};
};

TEST_F(ServerTime, WhoSaysNoHelloIsClosedAtTheDeadline) {
  RawClient slow(path());
  RawClient silent(path());
  // Connections are accepted in their order: both were, before one that came later.
  RawClient later(path());
  ASSERT_TRUE(later.hello().is_ok());
  clock_.advance(daemon::kHandshakeTimeoutNs - 1);
  settle();
  EXPECT_TRUE(slow.hello().is_ok()) << "in the last nanosecond";
  clock_.advance(1);
  EXPECT_TRUE(silent.is_closed_by_daemon());
  EXPECT_TRUE(slow.stats().is_ok()) << "it has said Hello";
}

TEST_F(ServerTime, WatchdogOnceAPeriodThoughNothingElseHappens) {
  ASSERT_TRUE(comes_true([this] { return n_watchdogs_ == 1; })) << "at the start";
  for (uint64_t n = 2; n < 20; ++n) {
    clock_.advance(kPeriodNs - 1);
    settle();
    ASSERT_EQ(n_watchdogs_, n - 1);
    clock_.advance(1);
    ASSERT_TRUE(comes_true([&] { return n_watchdogs_ == n; })) << "asleep, and not woken";
  }
}

// A system that was suspended: one call, not one for each period that was missed.
TEST_F(ServerTime, WatchdogAfterALeap) {
  ASSERT_TRUE(comes_true([this] { return n_watchdogs_ == 1; }));
  clock_.advance(1000 * kPeriodNs);
  ASSERT_TRUE(comes_true([this] { return n_watchdogs_ == 2; }));
  settle();
  EXPECT_EQ(n_watchdogs_, 2u);
}

// A job that ends just before the dispatcher sleeps leaves its request something to do. Whichever
// poll() finds that, one before it spins or the last on its way to sleep, it is done.
TEST_F(ServerTime, WhatIsLeftToDoIsDoneBeforeSleeping) {
  RawQueue queue = witness_->create_queue().value();
  RawArena arena = witness_->create_arena(8192).value();
  for (uint32_t n_polls = 1; n_polls <= 12; ++n_polls) {
    ::usleep(20'000);  // it sleeps
    engine_.begin_job(n_polls);
    submit_endless(&queue, arena);
    ::usleep(50'000);
    engine_.end_job();
    ASSERT_TRUE(comes_true([this] { return engine_.is_job_done(); })) << n_polls;
  }
}

TEST_F(ServerTime, ShutdownWaitsForARequestAsLongAsItMayAndNoLonger) {
  RawQueue queue = witness_->create_queue().value();
  RawArena arena = witness_->create_arena(8192).value();
  submit_endless(&queue, arena);
  ASSERT_TRUE(witness_->nop(&queue).is_ok()) << "so the request before it was taken";
  server_->request_stop();
  ASSERT_TRUE(comes_true([this] { return is_stopping_.load(); }));
  ::usleep(20'000);  // in which no simulated time passes
  EXPECT_FALSE(has_ended_);
  clock_.advance(kShutdownNs / 2);
  ::usleep(20'000);
  EXPECT_FALSE(has_ended_);
  clock_.advance(kShutdownNs);
  EXPECT_TRUE(comes_true([this] { return has_ended_.load(); }));
  EXPECT_TRUE(witness_->is_closed_by_daemon());
}

}  // namespace
}  // namespace kvm::testing
