// SPDX-License-Identifier: Apache-2.0
// A client that is killed at each of its stores to shared memory, and a daemon that is killed at
// each named point: the other side goes on, gets everything back, and nobody hangs.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/kill_point.h"
#include "tests/common/temporary_directory.h"
#include "tests/crash/life.h"
#include "tests/integration/abi_rig.h"

namespace kvm::testing {
namespace {

constexpr int kLived = 0;
constexpr int kDisconnected = 3;
constexpr int kFailed = 4;

// A process that lives n_lives lives, or until the daemon is gone, and says how it went.
pid_t start_client(const std::string& socket_path, uint64_t kill_at_store, uint32_t n_lives) {
  const pid_t child = ::fork();
  if (child != 0) {
    return child;
  }
  ::setenv("KVM_KILL_AT_STORE", std::to_string(kill_at_store).c_str(), 1);
  for (uint32_t i = 0; i < n_lives; ++i) {
    std::string what;
    const kvm_status status = live(socket_path, &what);
    if (status == KVM_ERR_DISCONNECTED) {
      ::_exit(kDisconnected);
    }
    if (status != KVM_OK) {
      std::fprintf(stderr, "client: %s\n", what.c_str());
      ::_exit(kFailed);
    }
  }
  ::_exit(kLived);
}

struct Held {
  uint64_t n_clients = 0;
  uint64_t n_sequences = 0;
  uint64_t bytes = 0;

  bool operator==(const Held&) const = default;
};

Held held_by(Witness* witness) {
  const kvm_stats stats = witness->stats();
  return {stats.n_clients, stats.n_sequences, stats.host_page_bytes};
}

TEST(Crash, ClientKilledAtEachOfItsStores) {
  Daemon daemon;
  ASSERT_FALSE(HasFatalFailure());
  Witness witness(daemon.socket_path());
  const std::vector<float> expected = witness.attend();
  const Held before = held_by(&witness);
  ASSERT_EQ(witness.failure(), "");
  uint64_t slowest_ns = 0;
  uint64_t n_stores = 0;
  for (bool lived = false; !lived; ++n_stores) {
    const int status = wait_for_end(start_client(daemon.socket_path(), n_stores + 1, 1));
    const uint64_t dead_ns = now_ns();
    lived = WIFEXITED(status) && WEXITSTATUS(status) == kLived;
    ASSERT_TRUE(lived || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL))
        << "store " << n_stores + 1 << ", status " << status;
    Held now = held_by(&witness);
    while (now != before && now_ns() < dead_ns + kPatienceNs) {
      ::usleep(200);
      now = held_by(&witness);
    }
    ASSERT_EQ(now.n_clients, before.n_clients) << "store " << n_stores + 1;
    ASSERT_EQ(now.n_sequences, before.n_sequences) << "store " << n_stores + 1;
    ASSERT_EQ(now.bytes, before.bytes) << "store " << n_stores + 1;
    slowest_ns = std::max(slowest_ns, now_ns() - dead_ns);
    ASSERT_EQ(witness.attend(), expected) << "store " << n_stores + 1;
  }
  EXPECT_EQ(witness.failure(), "");
  std::printf("killed at each of %llu stores; all was back after %.1f ms at most\n",
              static_cast<unsigned long long>(n_stores - 1), static_cast<double>(slowest_ns) / 1e6);
  // Block, entry, tail and head of six requests at least; how often a wait sleeps is chance.
  EXPECT_GE(n_stores, 24u);
}

TEST(Crash, DaemonKilledAtEachPoint) {
  for (const std::string_view point : kKillPoints) {
    if (point.starts_with("device")) {
      continue;  // tests/gpu/device_crash_test.cc
    }
    SCOPED_TRACE(std::string(point));
    ::setenv("KVM_KILL_POINT", std::string(point).c_str(), 1);
    const TemporaryDirectory folder;
    std::vector<std::string> disk;
    if (point.starts_with("disk/")) {
      disk = {"--disk-directories", folder.path(), "--disk-capacity", "64MiB"};
    }
    Daemon daemon(disk);
    ::unsetenv("KVM_KILL_POINT");
    ASSERT_FALSE(HasFatalFailure());
    // Until the daemon dies; two, so that one may wait for an answer while the other is cut off.
    const pid_t first = start_client(daemon.socket_path(), 0, 1'000'000);
    const pid_t second = start_client(daemon.socket_path(), 0, 1'000'000);
    if (point == "daemon/stopping") {
      ::usleep(100'000);
      ::kill(daemon.pid(), SIGTERM);
    }
    for (const pid_t client : {first, second}) {
      const int status = wait_for_end(client);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kDisconnected)
          << "a client hangs, or got another answer: " << status;
    }
    const int status = wait_for_end(daemon.give_up_pid());
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
        << "the point was not reached: " << status;
  }
}

}  // namespace
}  // namespace kvm::testing
