// SPDX-License-Identifier: Apache-2.0
// Eight clients at once, each with all that kvm.h offers, in a service that has memory for half of
// what they want, while an administrator evicts sequences, throws clients out and changes limits.
// The daemon runs in this process, so a sanitizer sees its threads: this is the test to run under
// ThreadSanitizer. KVM_CROWD_SECONDS sets how long, KVM_SEED what.
#include <gtest/gtest.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "engine/engine.h"
#include "tests/common/environment.h"
#include "tests/integration/crowd_client.h"
#include "tests/unit/daemon/raw_client.h"

namespace kvm::testing {
namespace {

constexpr uint32_t kClients = 8;
constexpr uint64_t kNsPerSecond = 1'000'000'000;
// Within which every deed must have been done, however slow the machine and the sanitizer.
constexpr uint64_t kPatienceSeconds = 200;

std::unique_ptr<engine::Engine> open_engine() {
  engine::EngineOptions options;
  options.n_threads = 3;
  options.host_capacity_bytes = 26ull << 20;
  options.default_quota_bytes = 6ull << 20;
  options.worker_spin_ns = 20'000;
  options.audit_every = 8;
  options.max_spaces = 4 + 4 * kClients;
  return engine::Engine::open(options).value();
}

// Evicts, throws out, lists, and changes limits.
class Administrator {
 public:
  Administrator(const std::string& socket_path, unsigned seed) : random_(seed) {
    kvm_connect_params params{};
    params.struct_size = sizeof(params);
    params.socket_path = socket_path.c_str();
    params.client_name = "administrator";
    params.timeout_ns = 100 * kNsPerSecond;
    check(kvm_connect(&params, &client_));
    spaces_ = register_crowd_spaces(client_);
  }
  ~Administrator() { kvm_client_close(client_); }
  Administrator(const Administrator&) = delete;
  Administrator& operator=(const Administrator&) = delete;

  const std::string& failure() const { return failure_; }

  void do_something() {
    const uint32_t dice = random_() % 32;
    if (dice < 12) {
      evict_some_sequence();
    } else if (dice == 12) {
      evict(KVM_EVICT_SPACE, spaces_[random_() % spaces_.size()], 0);
    } else if (dice < 16) {
      // Its own sequences, of which it has none, when it meets itself.
      const kvm_client_entry entry = some_client();
      const bool is_self = std::string(entry.name) == "administrator";
      evict(KVM_EVICT_CLIENT, entry.client_id, is_self ? 0 : uint32_t{KVM_EVICT_DISCONNECT});
    } else if (dice < 22) {
      set_limits();
    } else {
      look();
    }
  }

  kvm_stats stats() {
    kvm_stats stats{};
    stats.struct_size = sizeof(stats);
    check(kvm_get_stats(client_, &stats));
    return stats;
  }

  void drop_spaces() {
    for (const kvm_space_id space : spaces_) {
      check(kvm_space_drop(client_, space));
    }
  }

 private:
  // NOT_FOUND and STALE: others were faster.
  void check(kvm_status status) {
    if (status != KVM_OK && status != KVM_ERR_NOT_FOUND && status != KVM_ERR_STALE &&
        failure_.empty()) {
      failure_ = std::string(kvm_status_name(status)) + ": " + kvm_last_error();
    }
  }

  void evict(uint32_t what, uint64_t id, uint32_t flags) {
    kvm_evict_params params{};
    params.struct_size = sizeof(params);
    params.what = what;
    params.id = id;
    params.flags = flags;
    check(kvm_evict(client_, &params, nullptr));
  }

  void evict_some_sequence() {
    std::array<kvm_seq_info, 128> infos{};
    infos[0].struct_size = sizeof(infos[0]);
    size_t n = 0;
    check(kvm_seq_list(client_, 0, KVM_LIST_ALL_CLIENTS, infos.data(), infos.size(), &n));
    n = std::min(n, infos.size());
    if (n != 0) {
      evict(KVM_EVICT_SEQ, infos[random_() % n].seq, 0);
    }
  }

  kvm_client_entry some_client() {
    std::array<kvm_client_entry, 2 * kClients> entries{};
    entries[0].struct_size = sizeof(entries[0]);
    size_t n = 0;
    check(kvm_client_list(client_, entries.data(), entries.size(), &n));
    return entries[random_() % std::clamp<size_t>(n, 1, entries.size())];
  }

  void set_limits() {
    kvm_quota_params params{};
    params.struct_size = sizeof(params);
    const bool of_user = random_() % 2 == 0;
    params.whose = of_user ? KVM_QUOTA_USER : KVM_QUOTA_CLIENT;
    params.id = of_user ? ::geteuid() : some_client().client_id;
    params.limits.bytes = of_user ? (12ull + random_() % 20) << 20 : (2ull + random_() % 6) << 20;
    check(kvm_quota_set(client_, &params));
  }

  void look() {
    std::array<kvm_user_entry, 4> users{};
    users[0].struct_size = sizeof(users[0]);
    size_t n = 0;
    std::vector<char> text(1 << 16);
    check(kvm_user_list(client_, users.data(), users.size(), &n));
    check(kvm_get_config_text(client_, text.data(), text.size(), &n));
    check(kvm_get_stats_text(client_, text.data(), text.size(), &n));
    const kvm_stats now = stats();
    if (now.host_used_bytes > now.host_capacity_bytes && failure_.empty()) {
      failure_ = "more memory in use than there may be";
    }
  }

  kvm_client* client_ = nullptr;
  std::vector<kvm_space_id> spaces_;
  std::mt19937 random_;
  std::string failure_;
};

bool has_done_all(const Deeds& deeds) {
  return std::all_of(deeds.begin(), deeds.end(), [](const auto& n) { return n.load() != 0; });
}

// All that was taken has come back.
void expect_empty(Administrator* administrator) {
  const uint64_t deadline = now_ns() + 60 * kNsPerSecond;
  kvm_stats stats = administrator->stats();
  while ((stats.n_clients != 1 || stats.n_sequences != 0 || stats.n_pages != 0 ||
          stats.host_page_bytes != 0) &&
         now_ns() < deadline) {
    ::usleep(1000);
    stats = administrator->stats();
  }
  EXPECT_EQ(stats.n_clients, 1u);
  EXPECT_EQ(stats.n_sequences, 0u);
  EXPECT_EQ(stats.n_pages, 0u);
  EXPECT_EQ(stats.host_page_bytes, 0u);
  EXPECT_EQ(stats.index_bytes, 0u);
  EXPECT_EQ(stats.observed_bytes, 0u);
  EXPECT_EQ(stats.n_protocol_errors, 0u);
  EXPECT_LE(stats.host_peak_bytes, stats.host_capacity_bytes);
}

TEST(Crowd, EachClientGetsItsOwnAnswersWhateverTheOthersDo) {
  spdlog::set_level(spdlog::level::off);
  const uint64_t seconds = number_from_environment("KVM_CROWD_SECONDS", 3);
  const auto seed = static_cast<unsigned>(number_from_environment("KVM_SEED", now_ns() / 1000));
  std::printf("KVM_SEED=%u\n", seed);
  ServerOverrides overrides;
  overrides.max_clients = 2 * kClients;  // Those that leave are still there for a moment.
  overrides.arena_quota_bytes = 64ull << 20;
  overrides.arena_capacity_bytes = 512ull << 20;
  const auto server = run_server(overrides, open_engine());
  const std::string path = socket_path_of(*server);
  Administrator administrator(path, seed);

  Deeds deeds{};
  std::atomic<kvm_seq_id> foreign{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::string failures;
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < kClients; ++i) {
    threads.emplace_back([&, i] {
      CrowdClient client(path, seed + i, &deeds, &foreign);
      while (!stop.load() && client.do_something()) {
      }
      if (!client.failure().empty()) {
        const std::lock_guard lock(mutex);
        failures += client.failure() + "\n";
        stop = true;
      }
    });
  }
  const uint64_t begin = now_ns();
  for (uint64_t passed = 0; !stop.load() && passed < std::max(seconds, kPatienceSeconds);
       passed = (now_ns() - begin) / kNsPerSecond) {
    if (passed >= seconds && has_done_all(deeds)) {
      break;
    }
    administrator.do_something();
    ::usleep(20'000);
  }
  stop = true;
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(failures, "");
  EXPECT_EQ(administrator.failure(), "");
  for (size_t i = 0; i < deeds.size(); ++i) {
    EXPECT_NE(deeds[i].load(), 0u) << deed_name(static_cast<Deed>(i));
    std::printf("  %-18s %llu\n", deed_name(static_cast<Deed>(i)),
                static_cast<unsigned long long>(deeds[i].load()));
  }
  const kvm_stats stats = administrator.stats();
  std::printf(
      "%llu requests, peak %llu of %llu MiB, %llu indexes dropped, %llu pages by policies\n",
      static_cast<unsigned long long>(stats.n_requests),
      static_cast<unsigned long long>(stats.host_peak_bytes >> 20),
      static_cast<unsigned long long>(stats.host_capacity_bytes >> 20),
      static_cast<unsigned long long>(stats.n_index_dropped),
      static_cast<unsigned long long>(stats.n_pages_dropped));
  expect_empty(&administrator);
  administrator.drop_spaces();
  EXPECT_EQ(administrator.failure(), "");
}

}  // namespace
}  // namespace kvm::testing
