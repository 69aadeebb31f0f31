// SPDX-License-Identifier: Apache-2.0
// Device memory of kvmd, and either side killed: at each named point, and whenever. The client's
// streams come to their end and its calls answer DISCONNECTED; kvmd has everything back and serves
// the next one. KVM_NIGHTLY=1 kills a thousand clients.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/kill_point.h"
#include "base/splitmix.h"
#include "kvm_cuda.h"
#include "tests/gpu/device_rig.h"
#include "tests/integration/abi_rig.h"

namespace kvm::device::testing {
namespace {

constexpr int kLived = 0, kDisconnected = 3, kFailed = 4;
constexpr uint64_t kPoolBytes = 8 << 20, kHostBytes = 16 << 20;

using kvm::testing::Daemon;
using kvm::testing::kPatienceNs;
using kvm::testing::wait_for_end;

std::vector<std::string> daemon_arguments() {
  return {"--device-pool",   std::to_string(kPoolBytes),
          "--device-host",   "64MiB",
          "--threads",       "1",
          "--host-capacity", "16MiB"};
}

// One engine's life, of a process of its own: everything that asks something of kvmd.
class Life {
 public:
  explicit Life(const std::string& socket_path) : socket_path_(socket_path) {}

  // The first status that is not OK.
  kvm_status live() {
    const kvm_status status = try_to_live();
    // Whatever waits for kvmd has to come to its end.
    if (client_ != nullptr) {
      last_driver->settle();
    }
    kvm_cuda_batch_destroy(batch_);
    kvm_client_close(client_);
    return status;
  }

 private:
  kvm_status step(kvm_seq_id seq, uint32_t n_append) {
    kvm_cuda_item item{};
    item.seq = seq;
    item.n_append = n_append;
    item.n_query = 1;
    return kvm_cuda_update(batch_, &item, 1, nullptr);
  }
  kvm_status try_to_live();

  const std::string& socket_path_;
  kvm_client* client_ = nullptr;
  kvm_cuda_batch* batch_ = nullptr;
};

#define LIVE(call)                         \
  do {                                     \
    const kvm_status live_status = (call); \
    if (live_status != KVM_OK) {           \
      return live_status;                  \
    }                                      \
  } while (false)

kvm_status Life::try_to_live() {
  next_options = {};
  next_options.runs_by_itself = true;
  next_options.emulate = false;
  next_options.at_end = [](const FakeDriver& driver) {
    const std::string wrong = driver.complaints() + driver.leftovers();
    if (!wrong.empty()) {
      std::fprintf(stderr, "the client's device: %s\n", wrong.c_str());
      ::_exit(kFailed);
    }
  };
  kvm_connect_params server{};
  server.struct_size = sizeof server;
  server.socket_path = socket_path_.c_str();
  server.timeout_ns = kPatienceNs;
  kvm_cuda_params params{};
  params.struct_size = sizeof params;
  params.host_bytes = kHostBytes;
  params.server = &server;
  LIVE(kvm_cuda_open(&params, &client_));
  kvm_space_params space{};
  space.struct_size = sizeof space;
  space.name = "model";
  space.n_layers = 2;
  space.n_q_heads = 4;
  space.n_kv_heads = 2;
  space.head_dim_k = 64;
  space.codec = KVM_CODEC_BF16;
  kvm_space_id space_id = 0;
  LIVE(kvm_space_register(client_, &space, &space_id));
  kvm_cuda_batch_params batch{};
  batch.struct_size = sizeof batch;
  batch.space = space_id;
  batch.max_items = 4;
  batch.max_append = 1024;
  batch.max_tokens = 4096;
  LIVE(kvm_cuda_batch_create(client_, &batch, &batch_));
  kvm_seq_id first = 0, second = 0, child = 0;
  LIVE(kvm_seq_create(client_, space_id, nullptr, &first));
  LIVE(kvm_seq_create(client_, space_id, nullptr, &second));
  LIVE(step(first, 1000));
  LIVE(step(second, 300));
  LIVE(kvm_seq_fork(client_, first, 990, &child));
  LIVE(step(child, 10));  // copies a page
  LIVE(kvm_seq_truncate(client_, child, 980));
  LIVE(kvm_cuda_spill(client_, second, nullptr));
  LIVE(step(child, 700));
  LIVE(kvm_cuda_fetch(client_, second, nullptr));
  LIVE(step(second, 5));
  LIVE(kvm_seq_free(client_, first));
  LIVE(step(child, 64));
  LIVE(kvm_cuda_spill(client_, child, nullptr));
  LIVE(kvm_cuda_fetch(client_, child, nullptr));
  LIVE(kvm_seq_free(client_, child));
  return step(second, 1);
}

#undef LIVE

// A process that lives lives until the server is gone, or n_lives of them.
pid_t start_client(const std::string& socket_path, std::string_view kill_point, uint32_t n_lives) {
  (void)std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child != 0) {
    return child;
  }
  ::setenv("KVM_KILL_POINT", std::string(kill_point).c_str(), 1);
  for (uint32_t i = 0; i < n_lives; ++i) {
    const kvm_status status = Life(socket_path).live();
    if (status == KVM_ERR_DISCONNECTED) {
      ::_exit(kDisconnected);
    }
    if (status != KVM_OK) {
      std::fprintf(stderr, "client: %d %s\n", status, kvm_last_error());
      ::_exit(kFailed);
    }
  }
  ::_exit(kLived);
}

uint64_t figure_of(const std::string& text, const std::string& name) {
  const size_t at = text.find("\n" + name);
  EXPECT_NE(at, std::string::npos) << name;
  return at == std::string::npos ? 0 : std::stoull(text.substr(text.find(' ', at) + 1));
}

// Whether kvmd has everything back, soon.
bool is_all_back(const Daemon& daemon) {
  kvm_client* const client = kvm::testing::connect_to_daemon(daemon, "witness");
  const uint64_t deadline = now_ns() + kPatienceNs;
  bool is_back = false;
  while (!is_back && now_ns() < deadline) {
    std::string text(1 << 20, '\0');
    size_t size = 0;
    EXPECT_EQ(kvm_get_stats_text(client, text.data(), text.size(), &size), KVM_OK)
        << kvm_last_error();
    is_back = figure_of(text, "kvm_device_used_bytes{") == 0 &&
              figure_of(text, "kvm_device_clients{") == 0 &&
              figure_of(text, "kvm_device_host_bytes") == 0;
    ::usleep(is_back ? 0 : 1000);
  }
  kvm_client_close(client);
  return is_back;
}

void expect_lives(const Daemon& daemon) {
  const int status = wait_for_end(start_client(daemon.socket_path(), "", 1));
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kLived) << status;
}

void expect_good_end(Daemon* daemon) {
  std::string log;
  const int status = daemon->stop(&log);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status << ": " << log;
}

TEST(DeviceCrash, ClientKilledAtEachPoint) {
  Daemon daemon(daemon_arguments(), "kvmd_on_fake");
  ASSERT_FALSE(HasFatalFailure());
  for (const std::string_view point : kKillPoints) {
    if (!point.starts_with("device_client/")) {
      continue;
    }
    SCOPED_TRACE(std::string(point));
    const int status = wait_for_end(start_client(daemon.socket_path(), point, 1));
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
        << "the point was not reached: " << status;
    EXPECT_TRUE(is_all_back(daemon));
    expect_lives(daemon);
  }
  EXPECT_TRUE(is_all_back(daemon));
  expect_good_end(&daemon);
}

TEST(DeviceCrash, DaemonKilledAtEachPoint) {
  for (const std::string_view point : kKillPoints) {
    if (!point.starts_with("device/")) {
      continue;
    }
    SCOPED_TRACE(std::string(point));
    ::setenv("KVM_KILL_POINT", std::string(point).c_str(), 1);
    Daemon daemon(daemon_arguments(), "kvmd_on_fake");
    ::unsetenv("KVM_KILL_POINT");
    ASSERT_FALSE(HasFatalFailure());
    const int status = wait_for_end(start_client(daemon.socket_path(), "", 1));
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kDisconnected)
        << "the client hangs, or got another answer: " << status;
    const int end = wait_for_end(daemon.give_up_pid());
    EXPECT_TRUE(WIFSIGNALED(end) && WTERMSIG(end) == SIGKILL)
        << "the point was not reached: " << end;
  }
}

TEST(DeviceCrash, ClientsKilledWhenever) {
  const uint32_t n_kills = std::getenv("KVM_NIGHTLY") != nullptr ? 1000 : 20;
  Daemon daemon(daemon_arguments(), "kvmd_on_fake");
  ASSERT_FALSE(HasFatalFailure());
  const uint64_t begin = now_ns();
  expect_lives(daemon);
  const uint64_t life_us = (now_ns() - begin) / 1000;
  for (uint32_t i = 0; i < n_kills; ++i) {
    const pid_t child = start_client(daemon.socket_path(), "", 1);
    ::usleep(static_cast<useconds_t>(splitmix64(i) % (life_us + 1)));
    ::kill(child, SIGKILL);
    (void)wait_for_end(child);
    ASSERT_TRUE(is_all_back(daemon)) << "kill " << i;
  }
  expect_lives(daemon);
  EXPECT_TRUE(is_all_back(daemon));
  expect_good_end(&daemon);
}

TEST(DeviceCrash, DaemonKilledWhenever) {
  const uint32_t n_kills = std::getenv("KVM_NIGHTLY") != nullptr ? 100 : 5;
  for (uint32_t i = 0; i < n_kills; ++i) {
    Daemon daemon(daemon_arguments(), "kvmd_on_fake");
    ASSERT_FALSE(HasFatalFailure());
    const pid_t child = start_client(daemon.socket_path(), "", 1'000'000);
    ::usleep(static_cast<useconds_t>(50'000 + splitmix64(i) % 400'000));
    daemon.kill_hard();
    const int status = wait_for_end(child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kDisconnected)
        << "the client hangs, or got another answer: " << status;
  }
}

// Copies between a device and host memory that one kvmd has both end with it.
TEST(DeviceCrash, DaemonKilledBesideABridge) {
  const uint32_t n_kills = std::getenv("KVM_NIGHTLY") != nullptr ? 100 : 5;
  for (uint32_t i = 0; i < n_kills; ++i) {
    Daemon daemon(daemon_arguments(), "kvmd_on_fake");
    ASSERT_FALSE(HasFatalFailure());
    next_options = {};
    next_options.runs_by_itself = true;
    next_options.at_end = [](const FakeDriver& driver) {
      EXPECT_EQ(driver.complaints(), "");
      EXPECT_EQ(driver.leftovers(), "");
    };
    kvm_connect_params server{};
    server.struct_size = sizeof server;
    server.socket_path = daemon.socket_path().c_str();
    server.timeout_ns = kPatienceNs;
    kvm_cuda_params params{};
    params.struct_size = sizeof params;
    params.server = &server;
    kvm_client *device = nullptr, *host = nullptr;
    ASSERT_EQ(kvm_cuda_open(&params, &device), KVM_OK) << kvm_last_error();
    ASSERT_EQ(kvm_connect(&server, &host), KVM_OK) << kvm_last_error();
    kvm_cuda_bridge_params between{};
    between.struct_size = sizeof between;
    between.host = host;
    between.host_space = register_space(host, {});
    between.space = register_space(device, {});
    between.max_tokens = 1024;
    between.staging_bytes = 256 << 10;
    kvm_cuda_bridge* bridge = nullptr;
    ASSERT_EQ(kvm_cuda_bridge_create(device, &between, &bridge), KVM_OK) << kvm_last_error();

    kvm_cuda_batch_params sizes{};
    sizes.struct_size = sizeof sizes;
    sizes.space = between.space;
    sizes.max_items = 1;
    sizes.max_append = 1024;
    sizes.max_tokens = 1024;
    kvm_cuda_batch* batch = nullptr;
    ASSERT_EQ(kvm_cuda_batch_create(device, &sizes, &batch), KVM_OK) << kvm_last_error();
    kvm_cuda_item item{};
    item.n_append = 700;
    ASSERT_EQ(kvm_seq_create(device, between.space, nullptr, &item.seq), KVM_OK);
    ASSERT_EQ(kvm_cuda_update(batch, &item, 1, nullptr), KVM_OK) << kvm_last_error();

    std::thread killer([&] {
      ::usleep(static_cast<useconds_t>(splitmix64(i) % 100'000));
      daemon.kill_hard();
    });
    kvm_status status = KVM_OK;
    kvm_seq_id there = 0;
    for (bool is_store = true; status == KVM_OK; is_store = !is_store) {
      kvm_cuda_copy_params copy{};
      copy.struct_size = sizeof copy;
      copy.source = is_store ? item.seq : there;
      copy.end = KVM_POSITION_END;
      kvm_seq_id made = 0;
      status = is_store ? kvm_cuda_store(bridge, &copy, nullptr, &made)
                        : kvm_cuda_load(bridge, &copy, nullptr, &made);
      if (status == KVM_OK && is_store) {
        there = made;
      } else if (status == KVM_OK) {
        status = kvm_seq_free(device, made);
        status = status == KVM_OK ? kvm_seq_free(host, there) : status;
      }
    }
    EXPECT_EQ(status, KVM_ERR_DISCONNECTED) << kvm_last_error();
    killer.join();
    kvm_cuda_bridge_destroy(bridge);
    last_driver->settle();
    kvm_cuda_batch_destroy(batch);
    kvm_client_close(host);
    kvm_client_close(device);
  }
}

// A client that is stopped is nobody else's concern, and neither is one that is stopped and killed.
TEST(DeviceCrash, StoppedClientHindersNobody) {
  Daemon daemon({"--device-pool", std::to_string(2 * kPoolBytes), "--device-quota", "50%",
                 "--device-host", "64MiB", "--threads", "1", "--host-capacity", "16MiB"},
                "kvmd_on_fake");
  ASSERT_FALSE(HasFatalFailure());
  const pid_t stopped = start_client(daemon.socket_path(), "", 1'000'000);
  ::usleep(100'000);
  ::kill(stopped, SIGSTOP);
  expect_lives(daemon);
  expect_lives(daemon);
  ::kill(stopped, SIGKILL);
  (void)wait_for_end(stopped);
  EXPECT_TRUE(is_all_back(daemon));
  expect_good_end(&daemon);
}

}  // namespace
}  // namespace kvm::device::testing
