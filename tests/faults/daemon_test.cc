// SPDX-License-Identifier: Apache-2.0
// A daemon and its client in one process under refusals of every kind: of the client's own calls,
// of those of the daemon's threads while it serves, and of all between its start and its end.
#include <gtest/gtest.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <new>
#include <string>
#include <system_error>
#include <thread>

#include "base/clock.h"
#include "daemon/server.h"
#include "engine/engine.h"
#include "tests/faults/faults.h"
#include "tests/faults/life.h"
#include "tests/faults/loop.h"

namespace kvm::testing {
namespace {

constexpr uint64_t kPatienceNs = 60'000'000'000;
// Of a client: where a daemon may be kept from accepting it, and where it must hear an answer.
constexpr uint64_t kShortTimeoutNs = 2'000'000'000;
constexpr uint64_t kTimeoutNs = 30'000'000'000;

std::string make_folder() {
  char name[] = "/tmp/kvm-faults-XXXXXX";
  return ::mkdtemp(name);
}

class TestedDaemon {
 public:
  explicit TestedDaemon(std::string folder) : folder_(std::move(folder)) {}
  ~TestedDaemon() { stop(); }

  // As kvmd starts: an exception that leaves here would end it with a message.
  Status start() {
    engine::EngineOptions options;
    options.n_threads = 3;
    options.host_capacity_bytes = 64 << 20;
    options.cost_model = "exact_bf16=13.5,exact_int8=8,scan=1.5,gather=28,start=40000";
    KVM_TRY_ASSIGN(engine_, engine::Engine::open(options));
    daemon::ServerOptions server;
    server.socket_path = socket_path();
    server.spin_max_ns = 20'000;
    server_ = std::make_unique<daemon::Server>(engine_.get(), server);
    KVM_TRY(server_->start());
    thread_ = std::thread([this] { server_->run(); });
    return Status::ok();
  }

  void stop() {
    if (thread_.joinable()) {
      server_->request_stop();
      thread_.join();
    }
    server_.reset();
    engine_.reset();
  }

  std::string socket_path() const { return folder_ + "/kvmd.sock"; }

 private:
  std::string folder_;
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<daemon::Server> server_;
  std::thread thread_;
};

kvm_status connect_at(const std::string& path, uint64_t timeout_ns, kvm_client** out) {
  kvm_connect_params params{};
  params.struct_size = sizeof(params);
  params.socket_path = path.c_str();
  params.client_name = "faults";
  params.timeout_ns = timeout_ns;
  return kvm_connect(&params, out);
}

// Until a client that comes now finds the daemon as if it were the first; "" or what it finds.
std::string wait_until_settled(const std::string& path) {
  const uint64_t deadline = now_ns() + kPatienceNs;
  kvm_client* client = nullptr;
  if (connect_at(path, kTimeoutNs, &client) != KVM_OK) {
    return std::string("no new client: ") + kvm_last_error();
  }
  std::string left;
  do {
    kvm_stats stats{};
    stats.struct_size = sizeof(stats);
    const kvm_status status = kvm_get_stats(client, &stats);
    left = status != KVM_OK ? kvm_last_error()
           : stats.n_clients == 1 && stats.n_sequences == 0 && stats.host_page_bytes == 0
               ? ""
               : std::to_string(stats.n_clients - 1) + " clients, " +
                     std::to_string(stats.n_sequences) + " sequences, " +
                     std::to_string(stats.host_page_bytes) + " bytes of pages are left";
  } while (!left.empty() && now_ns() < deadline);
  kvm_client_close(client);
  return left;
}

std::string name_of_case(const ::testing::TestParamInfo<std::tuple<Refused, Until>>& test) {
  return std::string(name_of(std::get<0>(test.param))) +
         (std::get<1>(test.param) == Until::kOnce ? "Once" : "ForEver");
}

class DaemonFaults : public ::testing::TestWithParam<std::tuple<Refused, Until>> {
 protected:
  void SetUp() override {
    spdlog::set_level(spdlog::level::off);
    folder_ = make_folder();
    loop_.what = std::get<0>(GetParam());
    loop_.until = std::get<1>(GetParam());
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // Lives of clients, one after the other, of one daemon.
  void serve(Of whose, std::vector<kvm_status> allowed) {
    loop_.whose = whose;
    loop_.allowed = std::move(allowed);
    const Held before = held_around_a_daemon();
    {
      TestedDaemon daemon(folder_);
      ASSERT_TRUE(daemon.start().is_ok());
      const std::string path = daemon.socket_path();
      const Life::Open open = [&](kvm_client** out) { return connect_at(path, timeout_ns(), out); };
      Life clean(open, false);
      clean.live();
      ASSERT_TRUE(clean.is_complete()) << kvm_last_error();
      const Attempt attempt = [&](Until until) {
        Life life(open, until == Until::kOnce);
        life.live();
        return judge(clean, life, until);
      };
      run_loop(loop_, attempt, [&path] { return wait_until_settled(path); });
    }
    EXPECT_EQ(held(), before);
  }

  uint64_t timeout_ns() const {
    return loop_.what == Refused::kDescriptor && loop_.until == Until::kForEver ? kShortTimeoutNs
                                                                                : kTimeoutNs;
  }

  static Outcome judge(const Life& clean, const Life& life, Until until) {
    Outcome outcome = life.outcome();
    outcome.complain(compare(clean.answers(), life.answers()).c_str());
    const bool is_lost =
        !outcome.failures().empty() && outcome.failures().back() == KVM_ERR_DISCONNECTED;
    if (until == Until::kOnce && !life.is_complete() && !is_lost) {
      outcome.complain("the life did not come to its end");
    }
    return outcome;
  }

  // What this process holds with no daemon in it, after one has been here.
  Held held_around_a_daemon() const {
    for (int i = 0; i < 2; ++i) {
      TestedDaemon daemon(folder_);
      EXPECT_TRUE(daemon.start().is_ok());
      const std::string path = daemon.socket_path();
      Life life([&path](kvm_client** out) { return connect_at(path, kTimeoutNs, out); }, false);
      life.live();
    }
    return held();
  }

  std::string folder_;
  Loop loop_;
};

using ClientSide = DaemonFaults;
TEST_P(ClientSide, EachCallRefused) {
  switch (loop_.what) {
    case Refused::kFutex:
      return serve(Of::kThisThread, {});
    case Refused::kDescriptor:
      return serve(Of::kThisThread, {KVM_ERR_LIMIT});
    default:
      return serve(Of::kThisThread, {KVM_ERR_NO_MEMORY});
  }
}

INSTANTIATE_TEST_SUITE_P(All, ClientSide,
                         ::testing::Combine(::testing::Values(Refused::kMapping,
                                                              Refused::kDescriptor, Refused::kFutex,
                                                              Refused::kAllocation),
                                            ::testing::Values(Until::kOnce, Until::kForEver)),
                         name_of_case);

using DaemonSide = DaemonFaults;
TEST_P(DaemonSide, EachCallRefused) {
  switch (loop_.what) {
    case Refused::kFutex:
      return serve(Of::kOtherThreads, {});
    // A connection that cannot be watched is closed; one that cannot be accepted waits.
    case Refused::kDescriptor:
      loop_.until == Until::kOnce
          ? serve(Of::kOtherThreads, {KVM_ERR_LIMIT, KVM_ERR_DISCONNECTED})
          : serve(Of::kOtherThreads, {KVM_ERR_LIMIT, KVM_ERR_DISCONNECTED, KVM_ERR_TIMEOUT});
      return;
    default:
      return serve(Of::kOtherThreads, {KVM_ERR_NO_MEMORY, KVM_ERR_DISCONNECTED});
  }
}

INSTANTIATE_TEST_SUITE_P(All, DaemonSide,
                         ::testing::Combine(::testing::Values(Refused::kMapping, Refused::kMemfd,
                                                              Refused::kDescriptor, Refused::kFutex,
                                                              Refused::kAllocation),
                                            ::testing::Values(Until::kOnce, Until::kForEver)),
                         name_of_case);

// As kvmd's main does.
kvm_status start(TestedDaemon* daemon) {
  try {
    return daemon->start().code();
  } catch (const std::bad_alloc&) {
    return KVM_ERR_NO_MEMORY;
  } catch (const std::system_error&) {
    return KVM_ERR_LIMIT;  // of this test's own thread
  }
}

// From the daemon's start to its end, with a client in between: whoever is refused what he needs to
// begin with says so, and nothing of him is left.
using StartAndStop = DaemonFaults;
TEST_P(StartAndStop, EachCallRefused) {
  loop_.whose = Of::kAnyThread;
  loop_.allowed = {KVM_ERR_LIMIT, KVM_ERR_NO_MEMORY, KVM_ERR_DISCONNECTED};
  if (loop_.what == Refused::kDescriptor && loop_.until == Until::kForEver) {
    loop_.allowed.push_back(KVM_ERR_TIMEOUT);
  }
  const Held before = held_around_a_daemon();
  const Attempt attempt = [this](Until) {
    Outcome outcome;
    TestedDaemon daemon(folder_);
    const std::string path = daemon.socket_path();
    const InProduct in_product;
    const kvm_status started = start(&daemon);
    if (started != KVM_OK) {
      outcome.add_failure(started);
      return outcome;
    }
    kvm_client* client = nullptr;
    const kvm_status connected = connect_at(path, timeout_ns(), &client);
    if (connected != KVM_OK) {
      outcome.add_failure(connected);
    }
    kvm_client_close(client);
    daemon.stop();
    return outcome;
  };
  run_loop(loop_, attempt,
           [&before] { return held() == before ? "" : "something is left of the daemon"; });
}

INSTANTIATE_TEST_SUITE_P(
    All, StartAndStop,
    ::testing::Combine(::testing::Values(Refused::kMapping, Refused::kDescriptor, Refused::kThread,
                                         Refused::kAllocation),
                       ::testing::Values(Until::kOnce, Until::kForEver)),
    name_of_case);

}  // namespace
}  // namespace kvm::testing
