// SPDX-License-Identifier: Apache-2.0
// death: how long the others feel that a process was killed.
//
//   daemon_killed   from SIGKILL of a daemon that holds much to the return of a call that waits
//   client_killed   from SIGKILL of a client to the return of its sequences and quota, and of the
//                   memory that it had mapped and stored; and what a client beside it notices
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "bench/daemon_child.h"
#include "bench/harness.h"
#include "bench/wall_client.h"
#include "kvm.h"

namespace kvm::bench {

namespace {

constexpr uint64_t kResidentBytes = 12ull << 30;
constexpr uint64_t kMappedBytes = 1ull << 30;
constexpr uint32_t kDefaultRuns = 100;
constexpr uint64_t kLongTokens = 65536;  // 256 MiB
constexpr uint32_t kInFlight = 32;

double to_ms(double seconds) { return seconds * 1e3; }

// Shared memory of the service that this process still maps.
uint64_t mapped_service_bytes() {
  std::ifstream maps("/proc/self/maps");
  uint64_t total = 0;
  for (std::string line; std::getline(maps, line);) {
    unsigned long long begin = 0;
    unsigned long long end = 0;
    if (line.find("memfd:kvm") != std::string::npos &&
        std::sscanf(line.c_str(), "%llx-%llx", &begin, &end) == 2) {
      total += end - begin;
    }
  }
  return total;
}

// --- daemon_killed ------------------------------------------------------------------------------

// Waits in the way of this run until the daemon is gone: for asynchronous requests, in one call, or
// null requests, one after the other. Returns the time of the return.
double wait_for_the_end(WallClient* client, const std::vector<kvm_seq_id>& seqs, uint32_t run) {
  if (run % 2 == 1) {
    while (client->attend(seqs[0]) == KVM_OK) {
    }
    return now_s();
  }
  for (uint32_t i = 0; i < kInFlight; ++i) {
    client->attend_later(seqs[i % seqs.size()], i);
  }
  require_ok(kvm_submit(client->queue()), "submit");
  std::vector<kvm_completion> done(kInFlight);
  for (uint64_t number = 0;;) {
    const int32_t n = kvm_wait(client->queue(), done.data(), kInFlight, 1, UINT64_MAX);
    const double now = now_s();
    for (int32_t i = 0; i < n; ++i) {
      if (done[static_cast<size_t>(i)].status == KVM_ERR_DISCONNECTED) {
        return now;
      }
    }
    require_ok(n < 0 ? n : KVM_OK, "wait");
    for (int32_t i = 0; i < n; ++i, ++number) {
      client->attend_later(seqs[number % seqs.size()], number);
    }
    if (kvm_submit(client->queue()) != KVM_OK) {
      return now_s();
    }
  }
}

uint64_t resident_bytes(const Options& options) {
  const uint64_t room =
      memory_budget_bytes(options) - std::min(memory_budget_bytes(options), uint64_t{1} << 30);
  return std::min(kResidentBytes, room) / (kLongTokens * WallClient::kTokenBytes) * kLongTokens *
         WallClient::kTokenBytes;
}

void add_daemon_killed(const Options& options, uint32_t runs, Report* report) {
  const uint64_t resident = resident_bytes(options);
  const uint32_t threads = thread_count(options);
  std::vector<double> times;
  uint64_t leaked = 0;
  uint64_t random = 0x9e3779b97f4a7c15;
  for (uint32_t run = 0; run < runs; ++run) {
    DaemonChild daemon(threads, resident + (512ull << 20));
    double returned = 0;
    double killed = 0;
    {
      WallClient client(daemon.socket_path(), run % 4 < 2 ? 0 : 50'000);
      std::vector<kvm_seq_id> seqs;
      for (uint64_t at = 0; at < resident; at += kLongTokens * WallClient::kTokenBytes) {
        seqs.push_back(client.add_sequence(kLongTokens));
      }
      random = random * 6364136223846793005ull + 1442695040888963407ull;
      const auto delay_us = static_cast<useconds_t>(20'000 + (random >> 40) % 50'000);
      std::thread killer([&] {
        usleep(delay_us);
        killed = now_s();
        daemon.kill();
      });
      returned = wait_for_the_end(&client, seqs, run);
      killer.join();
    }
    times.push_back(returned - killed);
    usleep(run == 0 ? 1'000'000 : 0);
    leaked = std::max(leaked, mapped_service_bytes());
  }
  report->add({{"case", "daemon_killed"},
               {"runs", runs},
               {"resident_gib", static_cast<double>(resident) / (1ull << 30)},
               {"p50_ms", to_ms(median(times))},
               {"p99_ms", to_ms(percentile(times, 0.99))},
               {"max_ms", to_ms(percentile(times, 1))},
               {"leaked_bytes", leaked}});
  if (resident < kResidentBytes) {
    report->note(fmt::format("the daemon held {:.1f} GiB: this machine has no more free",
                             static_cast<double>(resident) / (1ull << 30)));
  }
}

// --- client_killed ------------------------------------------------------------------------------

// A client that attends all the time, and remembers how long each took.
class Victim {
 public:
  explicit Victim(const std::string& socket)
      : client_(socket, 0), seq_(client_.add_sequence(2048)), thread_([this] { run(); }) {}
  ~Victim() {
    stop_.store(true);
    thread_.join();
  }
  Victim(const Victim&) = delete;
  Victim& operator=(const Victim&) = delete;

  // From here on what is measured goes to this list, or nowhere. REQUIRES: it lives until the next
  // call has returned.
  void record(std::vector<double>* to) {
    next_.store(to);
    while (current_.load() != to) {
      usleep(100);
    }
  }

 private:
  void run() {
    while (!stop_.load()) {
      std::vector<double>* to = next_.load();
      current_.store(to);
      const double begin = now_s();
      require_ok(client_.attend(seq_), "the victim's attend");
      if (to != nullptr) {
        to->push_back(now_s() - begin);
      }
      usleep(500);
    }
  }

  WallClient client_;
  kvm_seq_id seq_;
  std::atomic<bool> stop_{false};
  std::atomic<std::vector<double>*> next_{nullptr};
  std::atomic<std::vector<double>*> current_{nullptr};
  std::thread thread_;
};

struct Holdings {
  uint64_t n_clients = 0;
  uint64_t n_sequences = 0;
  uint64_t page_bytes = 0;
  uint64_t used_bytes = 0;
  uint64_t arena_bytes = 0;

  uint64_t beyond(const Holdings& base) const {
    const auto more = [](uint64_t now, uint64_t before) { return now > before ? now - before : 0; };
    return more(used_bytes, base.used_bytes) + more(arena_bytes, base.arena_bytes);
  }
};

Holdings look(const WallClient& observer) {
  const kvm_stats stats = observer.stats();
  return {stats.n_clients, stats.n_sequences, stats.host_page_bytes, stats.host_used_bytes,
          observer.metric("kvm_arena_bytes")};
}

// 1 GiB of arenas, 256 MiB of tokens in 64 sequences, requests in flight all the time.
[[noreturn]] void hold_and_attend(const std::string& socket, const std::function<void()>& ready) {
  WallClient client(socket, 0);
  client.add_arena(kMappedBytes - 2 * WallClient::kBlock * WallClient::kTokenBytes);
  std::vector<kvm_seq_id> seqs;
  for (uint32_t i = 0; i < 64; ++i) {
    seqs.push_back(client.add_sequence(1024));
  }
  std::vector<kvm_completion> done(kInFlight);
  for (uint64_t number = 0;; ++number) {
    client.attend_later(seqs[number % seqs.size()], number);
    require_ok(kvm_submit(client.queue()), "submit");
    if (number + 1 == kInFlight) {
      ready();
    }
    if (number + 1 >= kInFlight) {
      (void)kvm_wait(client.queue(), done.data(), 1, 1, UINT64_MAX);
    }
  }
}

struct ClientDeaths {
  std::vector<double> quota_s, bytes_s, alone_s, beside_s;
  uint64_t leaked = 0;
};

void kill_one(const DaemonChild& daemon, const WallClient& observer, Victim* victim, bool counts,
              ClientDeaths* out) {
  constexpr double kLimit = 1;
  const Holdings base = look(observer);
  std::vector<double> alone, beside;
  victim->record(&alone);
  for (const double end = now_s() + 0.3; now_s() < end;) {
    (void)look(observer);
    usleep(200);
  }
  victim->record(nullptr);
  ClientProcess offender(
      [&](const std::function<void()>& ready) { hold_and_attend(daemon.socket_path(), ready); });
  usleep(20'000);
  victim->record(&beside);
  const double begin = now_s();
  offender.kill();
  double quota_s = 0;
  double bytes_s = 0;
  uint64_t left = 0;
  while (now_s() - begin < kLimit && (quota_s == 0 || bytes_s == 0)) {
    const Holdings now = look(observer);
    const double at = now_s() - begin;
    if (quota_s == 0 && now.n_sequences == base.n_sequences && now.n_clients == base.n_clients) {
      quota_s = at;
    }
    left = now.beyond(base);
    if (bytes_s == 0 && left == 0 && now.page_bytes == base.page_bytes) {
      bytes_s = at;
    }
    usleep(200);
  }
  usleep(now_s() - begin < 0.3 ? 300'000 : 0);
  victim->record(nullptr);
  if (counts) {
    out->quota_s.push_back(quota_s == 0 ? kLimit : quota_s);
    out->bytes_s.push_back(bytes_s == 0 ? kLimit : bytes_s);
    out->leaked = std::max(out->leaked, bytes_s == 0 ? left : 0);
    out->alone_s.insert(out->alone_s.end(), alone.begin(), alone.end());
    out->beside_s.insert(out->beside_s.end(), beside.begin(), beside.end());
  }
}

void add_client_killed(const Options& options, uint32_t runs, Report* report) {
  const uint32_t threads = thread_count(options);
  DaemonChild daemon(threads, 2ull << 30);
  WallClient observer(daemon.socket_path(), 0);
  Victim victim(daemon.socket_path());
  ClientDeaths deaths;
  // The first one leaves extents behind that the pool keeps for whoever appends next.
  for (uint32_t run = 0; run < runs + 1; ++run) {
    kill_one(daemon, observer, &victim, run > 0, &deaths);
  }
  const double alone_p99 = percentile(deaths.alone_s, 0.99);
  const double beside_p99 = percentile(deaths.beside_s, 0.99);
  report->add({{"case", "client_killed"},
               {"runs", runs},
               {"mapped_gib", static_cast<double>(kMappedBytes) / (1ull << 30)},
               {"p50_ms", to_ms(median(deaths.quota_s))},
               {"p99_ms", to_ms(percentile(deaths.quota_s, 0.99))},
               {"max_ms", to_ms(percentile(deaths.quota_s, 1))},
               {"bytes_p50_ms", to_ms(median(deaths.bytes_s))},
               {"bytes_p99_ms", to_ms(percentile(deaths.bytes_s, 0.99))},
               {"bytes_max_ms", to_ms(percentile(deaths.bytes_s, 1))},
               {"leaked_bytes", deaths.leaked},
               {"others_alone_p99_ms", to_ms(alone_p99)},
               {"others_p99_ms", to_ms(beside_p99)},
               {"others_ratio", beside_p99 / alone_p99}});
}

}  // namespace

int run_death(const Options& options) {
  Report report("death", options);
  report.hide({"mapped_gib", "resident_gib"});
  const uint32_t runs = options.runs != 0 ? options.runs : options.quick ? 3 : kDefaultRuns;
  const auto wants = [&](const char* name) {
    return options.modes.empty() ||
           std::find(options.modes.begin(), options.modes.end(), name) != options.modes.end();
  };
  if (wants("client_killed")) {
    add_client_killed(options, runs, &report);
  }
  if (wants("daemon_killed")) {
    add_daemon_killed(options, runs, &report);
  }
  report.note(
      "p50, p99, max: of daemon_killed until the waiting call returns; of client_killed until "
      "sequences and quota are back, bytes_*: until all memory is");
  return report.finish();
}

}  // namespace kvm::bench
