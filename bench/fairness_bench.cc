// SPDX-License-Identifier: Apache-2.0
// fairness: what a light client waits beside one that asks for all it can get. Windows with and
// without the other one alternate.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "bench/daemon_child.h"
#include "bench/harness.h"
#include "bench/wall_client.h"
#include "kvm.h"

namespace kvm::bench {

namespace {

constexpr uint32_t kHeavyInFlight = 64;
constexpr uint64_t kHeavyTokens = 32768;  // 128 MiB an attend
constexpr uint32_t kHeavySequences = 4;
constexpr useconds_t kPauseUs = 1000;  // between two calls of the light client

[[noreturn]] void saturate(const std::string& socket, const std::function<void()>& ready) {
  WallClient client(socket, 0);
  std::vector<kvm_seq_id> seqs;
  for (uint32_t i = 0; i < kHeavySequences; ++i) {
    seqs.push_back(client.add_sequence(kHeavyTokens));
  }
  std::vector<kvm_completion> done(kHeavyInFlight);
  for (uint64_t number = 0;; ++number) {
    client.attend_later(seqs[number % seqs.size()], number);
    require_ok(kvm_submit(client.queue()), "submit");
    if (number + 1 == kHeavyInFlight) {
      ready();
    }
    if (number + 1 >= kHeavyInFlight) {
      (void)kvm_wait(client.queue(), done.data(), 1, 1, UINT64_MAX);
    }
  }
}

struct Light {
  const char* name;
  std::function<void()> call;
  std::vector<double> alone_s, beside_s;
};

void measure(Light* light, uint32_t calls, std::vector<double>* to) {
  for (uint32_t i = 0; i < calls + calls / 10; ++i) {
    usleep(kPauseUs);
    const double begin = now_s();
    light->call();
    if (i >= calls / 10) {
      to->push_back(now_s() - begin);
    }
  }
}

}  // namespace

int run_fairness(const Options& options) {
  Report report("fairness", options);
  const uint32_t rounds = options.quick ? 1 : 4;
  const uint32_t calls = options.quick ? 50 : 400;
  DaemonChild daemon(thread_count(options), 2ull << 30);
  WallClient client(daemon.socket_path(), 50'000);
  const kvm_seq_id long_seq = client.add_sequence(8192);
  const kvm_seq_id seq = client.add_sequence(2048);
  const kvm_seq_id short_seq = client.add_sequence(64);
  std::vector<Light> lights;
  const auto attend = [&client](kvm_seq_id of) {
    return [&client, of] { require_ok(client.attend(of), "attend"); };
  };
  lights.push_back({"attend_8192", attend(long_seq), {}, {}});
  lights.push_back({"attend_2048", attend(seq), {}, {}});
  lights.push_back({"attend_64", attend(short_seq), {}, {}});
  lights.push_back({"null",
                    [&client] { require_ok(kvm_client_ping(client.client(), nullptr), "ping"); },
                    {},
                    {}});
  for (uint32_t round = 0; round < rounds; ++round) {
    for (Light& light : lights) {
      measure(&light, calls, &light.alone_s);
    }
    ClientProcess heavy(
        [&](const std::function<void()>& ready) { saturate(daemon.socket_path(), ready); });
    for (Light& light : lights) {
      measure(&light, calls, &light.beside_s);
    }
  }
  for (const Light& light : lights) {
    const double alone = percentile(light.alone_s, 0.99);
    const double beside = percentile(light.beside_s, 0.99);
    report.add({{"case", light.name},
                {"calls", light.beside_s.size()},
                {"alone_p50_us", median(light.alone_s) * 1e6},
                {"alone_p99_us", alone * 1e6},
                {"beside_p50_us", median(light.beside_s) * 1e6},
                {"beside_p99_us", beside * 1e6},
                {"p99_ratio", beside / alone}});
  }
  report.note(
      fmt::format("a call every {} us, alone and beside a client that keeps {} attends of "
                  "{} tokens in flight",
                  kPauseUs, kHeavyInFlight, kHeavyTokens));
  return report.finish();
}

}  // namespace kvm::bench
