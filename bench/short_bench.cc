// SPDX-License-Identifier: Apache-2.0
// short: steps that take less than a millisecond, where waking threads counts: alone after pauses,
// and beside an engine that keeps every core busy between its steps.
//
// Alone: steps on all threads and on one are measured in turn, and the read-only kernels beside
// them on the same pages. What reading gains by more threads is what a step can gain.
//
// Beside: the client is an engine like those built on OpenMP. A token is a row of layers; a layer
// is some parallel regions on one thread per core, whose threads spin at the barrier (as libgomp's
// do with OMP_WAIT_POLICY=active, and for milliseconds by default), and one step of kvm. Settings
// of spinning take turns, and the default is judged by the best of them.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/machine.h"
#include "bench/daemon_child.h"
#include "bench/harness.h"
#include "bench/wall_client.h"
#include "kvm.h"

namespace kvm::bench {

namespace {

constexpr uint32_t kTokens[] = {4096, 8192, 16384};
constexpr uint32_t kGapsUs[] = {0, 300, 2000};
constexpr double kMaxOverIdeal = 1.2;
constexpr double kMaxP90 = 1.3;
constexpr double kMinKept = 0.7;

uint64_t pool_bytes(uint64_t tokens) { return tokens * WallClient::kTokenBytes + (256ull << 20); }

// A daemon and a client with one sequence.
struct Service {
  Service(uint32_t threads, uint32_t tokens, const DaemonSpin& spin, uint64_t client_spin_ns)
      : daemon(threads, pool_bytes(tokens), spin),
        client(daemon.socket_path(), client_spin_ns),
        seq(client.add_sequence(tokens)) {}

  double step_seconds() {
    const double begin = now_s();
    require_ok(client.attend(seq), "attend");
    return now_s() - begin;
  }

  DaemonChild daemon;
  WallClient client;
  kvm_seq_id seq;
};

void measure(Service* service, uint32_t gap_us, uint32_t calls, std::vector<double>* seconds) {
  for (uint32_t i = 0; i < calls + calls / 10; ++i) {
    if (gap_us != 0) {
      usleep(gap_us);
    }
    const double took = service->step_seconds();
    if (i >= calls / 10) {
      seconds->push_back(took);
    }
  }
}

std::string verdict(bool passes) { return passes ? "pass" : "FAIL"; }

void run_alone(uint32_t tokens, const Options& options, Report* report) {
  const uint32_t threads = thread_count(options);
  const uint32_t rounds = options.quick ? 1 : options.repeats;
  const uint32_t calls = options.quick ? 20 : 100;
  Service wide(threads, tokens, {}, 0);
  Service narrow(1, tokens, {}, 0);
  struct Row {
    uint32_t gap_us;
    std::vector<double> wide_s, narrow_s;
  };
  std::vector<Row> rows;
  for (const uint32_t gap_us : kGapsUs) {
    rows.push_back({gap_us, {}, {}});
  }
  for (uint32_t round = 0; round < rounds; ++round) {
    for (Row& row : rows) {
      measure(&wide, row.gap_us, calls, &row.wide_s);
      measure(&narrow, row.gap_us, calls, &row.narrow_s);
    }
    for (uint32_t i = 0; i < 3; ++i) {
      wide.daemon.run_ceiling(wide.seq, 0);
      narrow.daemon.run_ceiling(narrow.seq, 0);
    }
  }
  const double reads_speedup =
      wide.daemon.ceiling_bytes_per_s() / narrow.daemon.ceiling_bytes_per_s();
  for (const Row& row : rows) {
    const double p50 = median(row.wide_s);
    const double p90 = percentile(row.wide_s, 0.9);
    const double ideal = median(row.narrow_s) / reads_speedup;
    report->add({{"tokens", tokens},
                 {"gap_us", row.gap_us},
                 {"beside", "none"},
                 {"threads", threads},
                 {"p50_ms", p50 * 1e3},
                 {"p90_ms", p90 * 1e3},
                 {"one_thread_ms", median(row.narrow_s) * 1e3},
                 {"reads_speedup", reads_speedup},
                 {"over_ideal", p50 / ideal},
                 {"p90_ratio", p90 / p50}});
    report->note(fmt::format(
        "{:5} tokens, gap {:4} us: p50 is {:.2f} of one thread's / reads_speedup (<= {}): {}; "
        "p90 is {:.2f} of p50 (<= {}): {}",
        tokens, row.gap_us, p50 / ideal, kMaxOverIdeal, verdict(p50 <= kMaxOverIdeal * ideal),
        p90 / p50, kMaxP90, verdict(p90 <= kMaxP90 * p50)));
  }
}

// --- Beside an engine ---------------------------------------------------------------------------

// Threads that run parallel regions as libgomp does with OMP_WAIT_POLICY=active: who has nothing
// to do looks for work without pausing for anybody.
class BusyTeam {
 public:
  explicit BusyTeam(uint32_t n_threads) : n_threads_(n_threads) {
    for (uint32_t i = 1; i < n_threads; ++i) {
      threads_.emplace_back([this] { serve(); });
    }
  }
  ~BusyTeam() {
    stop_.store(true);
    round_.fetch_add(1);
    for (std::thread& thread : threads_) {
      thread.join();
    }
  }
  BusyTeam(const BusyTeam&) = delete;
  BusyTeam& operator=(const BusyTeam&) = delete;

  // The same number of rounds of arithmetic on every thread.
  void run(uint64_t rounds) {
    rounds_ = rounds;
    n_done_.store(0, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
    compute(rounds);
    while (n_done_.load(std::memory_order_acquire) + 1 < n_threads_) {
      pause();
    }
  }

 private:
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  static void compute(uint64_t rounds) {
    double x = 1;
    for (uint64_t i = 0; i < rounds; ++i) {
      x = x * 1.0000001 + 1e-9;
    }
    volatile double sink = x;
    (void)sink;
  }

  void serve() {
    uint64_t seen = 0;
    for (;;) {
      while (round_.load(std::memory_order_acquire) == seen) {
        pause();
      }
      ++seen;
      if (stop_.load(std::memory_order_relaxed)) {
        return;
      }
      compute(rounds_);
      n_done_.fetch_add(1, std::memory_order_acq_rel);
    }
  }

  const uint32_t n_threads_;
  uint64_t rounds_ = 0;
  std::atomic<uint64_t> round_{0};
  std::atomic<uint32_t> n_done_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

// An engine's token: kLayers times kRegions regions of about kRegionUs, and a step.
constexpr uint32_t kLayers = 8;
constexpr uint32_t kRegions = 4;
constexpr double kRegionUs = 200;

class BusyEngine {
 public:
  explicit BusyEngine(uint32_t n_threads) : team_(n_threads) {
    constexpr uint64_t kProbe = 1'000'000;
    std::vector<double> seconds;
    for (int i = 0; i < 9; ++i) {
      const double begin = now_s();
      team_.run(kProbe);
      seconds.push_back(now_s() - begin);
    }
    rounds_ = static_cast<uint64_t>(static_cast<double>(kProbe) * kRegionUs * 1e-6 /
                                    *std::min_element(seconds.begin(), seconds.end()));
  }

  // Returns the token's seconds; the steps' are added to `steps_s`. Without a service: the engine
  // alone.
  double token(Service* service, uint32_t gap_us, std::vector<double>* steps_s) {
    const double begin = now_s();
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      for (uint32_t region = 0; region < kRegions; ++region) {
        team_.run(rounds_);
      }
      if (gap_us != 0) {
        usleep(gap_us);
      }
      if (service != nullptr) {
        steps_s->push_back(service->step_seconds());
      }
    }
    return now_s() - begin;
  }

 private:
  BusyTeam team_;
  uint64_t rounds_ = 0;
};

struct Setting {
  std::string name;
  uint64_t client_ns;  // as kvm_queue_params takes it
  DaemonSpin daemon;
};

// The first is the default.
std::vector<Setting> settings() {
  return {{"default", 0, {}},
          {"no_spin", 1, {0, 0}},
          {"client_50", 0, {0, 0}},
          {"dispatcher_200", 1, {200'000, 0}},
          {"workers_200", 1, {0, 200'000}},
          {"all_2000", 2'000'000, {2'000'000, 2'000'000}}};
}

void run_beside(uint32_t tokens, const Options& options, Report* report) {
  const uint32_t threads = thread_count(options);
  const uint32_t rounds = options.quick ? 1 : options.repeats;
  const uint32_t n_tokens = options.quick ? 2 : 6;
  const std::vector<Setting> all = settings();
  struct Run {
    std::unique_ptr<Service> service;
    std::vector<double> token_s, step_s;
  };
  for (const uint32_t gap_us : kGapsUs) {
    std::vector<Run> runs;
    for (const Setting& setting : all) {
      runs.push_back(
          {std::make_unique<Service>(threads, tokens, setting.daemon, setting.client_ns), {}, {}});
    }
    std::vector<double> alone_s;
    std::vector<double> ignored;
    std::vector<double> narrow_s;
    {
      Service narrow(1, tokens, {}, 0);
      BusyEngine engine(usable_cores());
      for (uint32_t round = 0; round < rounds; ++round) {
        alone_s.push_back(engine.token(nullptr, gap_us, nullptr));
        for (Run& run : runs) {
          engine.token(run.service.get(), gap_us, &ignored);
          for (uint32_t i = 0; i < n_tokens; ++i) {
            run.token_s.push_back(engine.token(run.service.get(), gap_us, &run.step_s));
          }
        }
        for (uint32_t i = 0; i < n_tokens; ++i) {
          engine.token(&narrow, gap_us, &narrow_s);
        }
      }
    }
    size_t best = 0;
    for (size_t i = 1; i < runs.size(); ++i) {
      best = median(runs[i].token_s) < median(runs[best].token_s) ? i : best;
    }
    for (size_t i = 0; i < runs.size(); ++i) {
      const Run& run = runs[i];
      const double kept = median(runs[best].token_s) / median(run.token_s);
      report->add({{"tokens", tokens},
                   {"gap_us", gap_us},
                   {"beside", "engine"},
                   {"threads", threads},
                   {"p50_ms", median(run.step_s) * 1e3},
                   {"p90_ms", percentile(run.step_s, 0.9) * 1e3},
                   {"one_thread_ms", median(narrow_s) * 1e3},
                   {"setting", all[i].name},
                   {"tokens_per_s", 1 / median(run.token_s)},
                   {"alone_per_s", 1 / median(alone_s)},
                   {"of_best", kept}});
      if (i == 0) {
        report->note(fmt::format(
            "{:5} tokens, gap {:4} us, beside an engine: {:.1f} tokens/s by default, {:.2f} of the "
            "best ({}; >= {}): {}",
            tokens, gap_us, 1 / median(run.token_s), kept, all[best].name, kMinKept,
            verdict(kept >= kMinKept)));
      }
    }
    // Children hold the pipes of those that were forked before them: the last ends first.
    while (!runs.empty()) {
      runs.pop_back();
    }
  }
}

}  // namespace

int run_short(const Options& options) {
  Report report("short", options);
  std::vector<uint32_t> lengths(std::begin(kTokens), std::end(kTokens));
  if (!options.tokens.empty()) {
    lengths = options.tokens;
  }
  const auto wants = [&](const char* what) {
    return options.modes.empty() ||
           std::find(options.modes.begin(), options.modes.end(), what) != options.modes.end();
  };
  for (const uint32_t tokens : lengths) {
    if (wants("none")) {
      run_alone(tokens, options, &report);
    }
  }
  for (const uint32_t tokens : lengths) {
    if (wants("engine")) {
      run_beside(tokens, options, &report);
    }
  }
  report.note(
      fmt::format("a token of the engine: {} layers of {} parallel regions of {} us on {} "
                  "spinning threads, and a step each",
                  kLayers, kRegions, kRegionUs, usable_cores()));
  return report.finish();
}

}  // namespace kvm::bench
