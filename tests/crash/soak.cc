// SPDX-License-Identifier: Apache-2.0
// soak SECONDS [KILL_EVERY_SECONDS]: a kvmd of its own under mixed load at 70 % of its capacity,
// with a client killed now and then. Looks at the daemon's memory (that of the process, less what
// holds keys and values by its own account) and descriptors, and fails where memory keeps growing
// after a fifth of the time, or descriptors do not come back.
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/clock.h"
#include "kvm.h"
#include "tests/crash/life.h"
#include "tests/integration/abi_rig.h"

namespace kvm::testing {
namespace {

constexpr uint32_t kClients = 4;
constexpr uint64_t kCapacityBytes = 256ull << 20;  // of Daemon
constexpr double kMiB = 1 << 20;
constexpr uint64_t kNsPerSecond = 1'000'000'000;

uint64_t anonymous_bytes(pid_t pid) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  for (std::string word; status >> word;) {
    if (word == "RssAnon:") {
      uint64_t kilobytes = 0;
      status >> kilobytes;
      return kilobytes << 10;
    }
  }
  return 0;
}

uint64_t count_descriptors(pid_t pid) {
  const std::filesystem::directory_iterator all("/proc/" + std::to_string(pid) + "/fd");
  return static_cast<uint64_t>(std::distance(begin(all), end(all)));
}

// A load client: sequences of random lengths, in all about its share of 70 % of the capacity.
[[noreturn]] void load(const std::string& socket_path, unsigned seed) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  Loader loader(socket_path, seed, kCapacityBytes * 7 / 10 / kClients);
  while (loader.do_something()) {
  }
  std::fprintf(stderr, "load client: %s\n", loader.failure().c_str());
  ::_exit(1);
}

pid_t start_load(const std::string& socket_path, unsigned seed) {
  const pid_t child = ::fork();
  if (child == 0) {
    load(socket_path, seed);
  }
  return child;
}

struct Sample {
  double hours = 0;
  double mib = 0;
};

// Of the line with the least squares.
double slope_of(const std::vector<Sample>& samples) {
  double n = 0, x = 0, y = 0, xx = 0, xy = 0;
  for (const Sample& sample : samples) {
    n += 1;
    x += sample.hours;
    y += sample.mib;
    xx += sample.hours * sample.hours;
    xy += sample.hours * sample.mib;
  }
  const double spread = n * xx - x * x;
  return spread <= 0 ? 0 : (n * xy - x * y) / spread;
}

int soak(uint64_t seconds, uint64_t kill_every) {
  Daemon daemon;
  Witness witness(daemon.socket_path());
  const uint64_t descriptors_before = count_descriptors(daemon.pid());
  std::array<pid_t, kClients> clients{};
  unsigned seed = 1;
  for (pid_t& client : clients) {
    client = start_load(daemon.socket_path(), ++seed);
  }
  const uint64_t begin = now_ns();
  uint64_t last_kill = 0;
  uint64_t descriptors_least = UINT64_MAX;
  uint64_t descriptors_most = 0;
  uint64_t used_most = 0;
  bool failed = false;
  std::vector<Sample> samples;
  for (uint64_t passed = 0; passed < seconds && !failed;
       passed = (now_ns() - begin) / kNsPerSecond) {
    ::sleep(1);
    if (passed - last_kill >= kill_every) {
      last_kill = passed;
      pid_t& client = clients[seed % kClients];
      ::kill(client, SIGKILL);
      ::waitpid(client, nullptr, 0);
      client = start_load(daemon.socket_path(), ++seed);
    }
    for (const pid_t client : clients) {
      failed |= ::waitpid(client, nullptr, WNOHANG) != 0;
    }
    const uint64_t used = witness.stats().host_used_bytes;
    used_most = std::max(used_most, used);
    if (passed >= seconds / 5) {
      const uint64_t held = anonymous_bytes(daemon.pid());
      samples.push_back({static_cast<double>(passed) / 3600,
                         (static_cast<double>(held) - static_cast<double>(used)) / kMiB});
      const uint64_t descriptors = count_descriptors(daemon.pid());
      descriptors_least = std::min(descriptors_least, descriptors);
      descriptors_most = std::max(descriptors_most, descriptors);
    }
  }
  for (const pid_t client : clients) {
    ::kill(client, SIGKILL);
    ::waitpid(client, nullptr, 0);
  }
  const uint64_t deadline = now_ns() + 30 * kNsPerSecond;
  while (count_descriptors(daemon.pid()) != descriptors_before && now_ns() < deadline) {
    ::usleep(10'000);
  }
  const uint64_t descriptors_after = count_descriptors(daemon.pid());
  const double slope = slope_of(samples);
  const auto by_mib = [](const Sample& a, const Sample& b) { return a.mib < b.mib; };
  const auto [least, most] = std::minmax_element(samples.begin(), samples.end(), by_mib);
  // A shorter run cannot tell so little from the comings and goings of an extent of 2 MiB, and one
  // of less than 5 minutes nothing.
  const double allowed = seconds >= 1800  ? 1
                         : seconds >= 300 ? 2 * 3600 / static_cast<double>(seconds)
                                          : 1e9;
  std::printf(
      "slope %.2f MiB/h (at most %.2f allowed in %llu s), overhead %.1f to %.1f MiB, largest use "
      "%.0f %% of the capacity, descriptors %llu to %llu, %llu before and %llu after\n",
      slope, allowed, static_cast<unsigned long long>(seconds), samples.empty() ? 0 : least->mib,
      samples.empty() ? 0 : most->mib,
      100 * static_cast<double>(used_most) / static_cast<double>(kCapacityBytes),
      static_cast<unsigned long long>(descriptors_least),
      static_cast<unsigned long long>(descriptors_most),
      static_cast<unsigned long long>(descriptors_before),
      static_cast<unsigned long long>(descriptors_after));
  failed |=
      !witness.failure().empty() || slope > allowed || descriptors_after != descriptors_before;
  return failed ? 1 : 0;
}

}  // namespace
}  // namespace kvm::testing

int main(int argc, char** argv) {
  const uint64_t seconds = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 60;
  const uint64_t kill_every = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 60;
  return kvm::testing::soak(seconds, kill_every);
}
