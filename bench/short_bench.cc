// SPDX-License-Identifier: Apache-2.0
// short: steps that take less than a millisecond, where waking threads counts: alone after pauses,
// and beside an engine that keeps every core busy between its steps.
//
// Each for a daemon and for an engine in the process of its caller.
//
// Alone: steps on all threads and on one are measured in turn, and the read-only kernels beside
// them, on the daemon's pages. What reading gains by more threads is what a step can gain. Slow
// steps may be the machine's: a row says by how much each part of the slowest tenth of the steps
// exceeds the usual, how many threads computed in these, which share of the machine's time its host
// gave to others, and p90 over p50 of the read-only kernels, which wait for nobody.
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
#include "bench/harness.h"
#include "bench/short_service.h"

namespace kvm::bench {

namespace {

constexpr uint32_t kTokens[] = {4096, 8192, 16384};
constexpr uint32_t kGapsUs[] = {0, 300, 2000};
constexpr double kMaxOverIdeal = 1.2;
constexpr double kMaxP90 = 1.3;
constexpr double kMinKept = 0.7;

constexpr Where kWheres[] = {Where::kDaemon, Where::kEmbedded};

void measure(ShortService* service, uint32_t gap_us, uint32_t calls, std::vector<StepTime>* steps) {
  for (uint32_t i = 0; i < calls + calls / 10; ++i) {
    if (gap_us != 0) {
      usleep(gap_us);
    }
    const StepTime step = service->step();
    if (i >= calls / 10) {
      steps->push_back(step);
    }
  }
}

std::string verdict(bool passes) { return passes ? "pass" : "FAIL"; }

struct AloneRow {
  Where where;
  uint32_t gap_us;
  std::vector<StepTime> wide, narrow;
  StealMeter steal;
};

void add_alone(const AloneRow& row, uint32_t tokens, uint32_t threads, double reads_speedup,
               double reads_p90_ratio, Report* report) {
  const double p50 = median(totals(row.wide));
  const double p90 = percentile(totals(row.wide), 0.9);
  const double one_thread = median(totals(row.narrow));
  const double ideal = one_thread / reads_speedup;
  const StepTime excess = excess_of_slow(row.wide);
  report->add(
      {{"where", where_name(row.where)},
       {"tokens", tokens},
       {"gap_us", row.gap_us},
       {"beside", "none"},
       {"threads", threads},
       {"p50_ms", p50 * 1e3},
       {"p90_ms", p90 * 1e3},
       {"one_thread_ms", one_thread * 1e3},
       {"reads_speedup", reads_speedup},
       {"over_ideal", p50 / ideal},
       {"p90_ratio", p90 / p50},
       {"reads_p90_ratio", reads_p90_ratio},
       {"steal_share", row.steal.share()},
       {"slow_outside_ms", excess.outside * 1e3},
       {"slow_waiting_ms", excess.waiting * 1e3},
       {"slow_computing_ms", excess.computing * 1e3},
       {"slow_threads", row.where == Where::kEmbedded ? nlohmann::json(excess.threads) : nullptr}});
  report->note(fmt::format(
      "{}, {:5} tokens, gap {:4} us: p50 is {:.2f} of one thread's / reads_speedup (<= {}): {}; "
      "p90 is {:.2f} of p50 (<= {}): {}",
      where_name(row.where), tokens, row.gap_us, p50 / ideal, kMaxOverIdeal,
      verdict(p50 <= kMaxOverIdeal * ideal), p90 / p50, kMaxP90, verdict(p90 <= kMaxP90 * p50)));
  report->note(fmt::format(
      "    the slowest tenth, beyond the usual: {:.3f} ms outside, {:.3f} waiting, {:.3f} "
      "computing{}; {:.1f} % of the machine's time stolen",
      excess.outside * 1e3, excess.waiting * 1e3, excess.computing * 1e3,
      row.where == Where::kEmbedded ? fmt::format(" on {:.2f} threads", excess.threads) : "",
      row.steal.share() * 100));
}

void run_alone(uint32_t tokens, const Options& options, Report* report) {
  const uint32_t threads = thread_count(options);
  const uint32_t rounds = options.quick ? 1 : options.repeats;
  const uint32_t calls = options.quick ? 20 : 100;
  // Daemons first: what this process holds by then, their processes hold as well.
  std::vector<std::unique_ptr<ShortService>> wide, narrow;
  for (const Where where : kWheres) {
    wide.push_back(std::make_unique<ShortService>(where, threads, tokens, DaemonSpin{}, 0));
    narrow.push_back(std::make_unique<ShortService>(where, 1, tokens, DaemonSpin{}, 0));
  }
  std::vector<AloneRow> rows;
  for (const Where where : kWheres) {
    for (const uint32_t gap_us : kGapsUs) {
      rows.push_back({where, gap_us, {}, {}, {}});
    }
  }
  for (uint32_t round = 0; round < rounds; ++round) {
    for (AloneRow& row : rows) {
      const auto at = static_cast<size_t>(row.where);
      row.steal.begin();
      measure(wide[at].get(), row.gap_us, calls, &row.wide);
      row.steal.end();
      measure(narrow[at].get(), row.gap_us, calls, &row.narrow);
      for (uint32_t i = 0; i < 2; ++i) {
        wide[0]->run_ceiling();
        narrow[0]->run_ceiling();
      }
    }
  }
  const double reads_p90_ratio = wide[0]->daemon().ceiling_p90_ratio();
  const double reads_speedup =
      wide[0]->daemon().ceiling_bytes_per_s() / narrow[0]->daemon().ceiling_bytes_per_s();
  for (const AloneRow& row : rows) {
    add_alone(row, tokens, threads, reads_speedup, reads_p90_ratio, report);
  }
  report->note(fmt::format(
      "{:5} tokens: the read-only kernels gain {:.2f} by {} threads; their p90 is {:.2f} of p50",
      tokens, reads_speedup, threads, reads_p90_ratio));
  // Later children hold the pipes of earlier ones, which end when these are closed.
  narrow[0].reset();
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
  double token(ShortService* service, uint32_t gap_us, std::vector<double>* steps_s) {
    const double begin = now_s();
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      for (uint32_t region = 0; region < kRegions; ++region) {
        team_.run(rounds_);
      }
      if (gap_us != 0) {
        usleep(gap_us);
      }
      if (service != nullptr) {
        steps_s->push_back(service->step().total());
      }
    }
    return now_s() - begin;
  }

 private:
  BusyTeam team_;
  uint64_t rounds_ = 0;
};

struct Setting {
  Where where;
  std::string name;
  uint64_t client_ns;  // as kvm_queue_params takes it
  DaemonSpin daemon;
};

// The defaults, and what a daemon can be set to: how long kvm spins in the engine's own process
// cannot be set.
std::vector<Setting> settings() {
  return {{Where::kDaemon, "default", 0, {}},
          {Where::kDaemon, "no_spin", 1, {0, 0}},
          {Where::kDaemon, "client_50", 0, {0, 0}},
          {Where::kDaemon, "dispatcher_200", 1, {200'000, 0}},
          {Where::kDaemon, "workers_200", 1, {0, 200'000}},
          {Where::kDaemon, "all_2000", 2'000'000, {2'000'000, 2'000'000}},
          {Where::kEmbedded, "default", 0, {}}};
}

struct BesideRun {
  Setting setting;
  std::unique_ptr<ShortService> service, narrow;  // narrow: of defaults
  std::vector<double> token_s, step_s, narrow_s;
  StealMeter steal;
};

std::vector<BesideRun> beside_runs(uint32_t tokens, uint32_t threads) {
  std::vector<BesideRun> runs;
  for (const Setting& setting : settings()) {
    BesideRun run{setting, {}, {}, {}, {}, {}, {}};
    run.service = std::make_unique<ShortService>(setting.where, threads, tokens, setting.daemon,
                                                 setting.client_ns);
    if (setting.name == "default") {
      run.narrow = std::make_unique<ShortService>(setting.where, 1, tokens, setting.daemon, 0);
    }
    runs.push_back(std::move(run));
  }
  return runs;
}

void measure_beside(std::vector<BesideRun>* runs, uint32_t gap_us, const Options& options,
                    std::vector<double>* alone_s) {
  const uint32_t rounds = options.quick ? 1 : options.repeats;
  const uint32_t n_tokens = options.quick ? 2 : 6;
  std::vector<double> ignored;
  BusyEngine engine(usable_cores());
  for (uint32_t round = 0; round < rounds; ++round) {
    alone_s->push_back(engine.token(nullptr, gap_us, nullptr));
    for (BesideRun& run : *runs) {
      engine.token(run.service.get(), gap_us, &ignored);
      run.steal.begin();
      for (uint32_t i = 0; i < n_tokens; ++i) {
        run.token_s.push_back(engine.token(run.service.get(), gap_us, &run.step_s));
      }
      run.steal.end();
      for (uint32_t i = 0; i < n_tokens && run.narrow != nullptr; ++i) {
        engine.token(run.narrow.get(), gap_us, &run.narrow_s);
      }
    }
  }
}

void run_beside(uint32_t tokens, uint32_t gap_us, const Options& options, Report* report) {
  const uint32_t threads = thread_count(options);
  std::vector<BesideRun> runs = beside_runs(tokens, threads);
  std::vector<double> alone_s;
  measure_beside(&runs, gap_us, options, &alone_s);
  const BesideRun& best = *std::min_element(
      runs.begin(), runs.end(),
      [](const BesideRun& a, const BesideRun& b) { return median(a.token_s) < median(b.token_s); });
  std::vector<double> narrow_s;
  for (const BesideRun& run : runs) {
    const double kept = median(best.token_s) / median(run.token_s);
    narrow_s = run.narrow == nullptr ? narrow_s : run.narrow_s;
    report->add({{"where", where_name(run.setting.where)},
                 {"tokens", tokens},
                 {"gap_us", gap_us},
                 {"beside", "engine"},
                 {"threads", threads},
                 {"p50_ms", median(run.step_s) * 1e3},
                 {"p90_ms", percentile(run.step_s, 0.9) * 1e3},
                 {"one_thread_ms", median(narrow_s) * 1e3},
                 {"steal_share", run.steal.share()},
                 {"setting", run.setting.name},
                 {"tokens_per_s", 1 / median(run.token_s)},
                 {"alone_per_s", 1 / median(alone_s)},
                 {"of_best", kept}});
    if (run.setting.name == "default") {
      report->note(fmt::format(
          "{}, {:5} tokens, gap {:4} us, beside an engine: {:.1f} tokens/s by default, {:.2f} of "
          "the best ({} {}; >= {}): {}",
          where_name(run.setting.where), tokens, gap_us, 1 / median(run.token_s), kept,
          where_name(best.setting.where), best.setting.name, kMinKept, verdict(kept >= kMinKept)));
    }
  }
  // Children hold the pipes of those that were forked before them: the last ends first.
  while (!runs.empty()) {
    runs.back().narrow.reset();
    runs.pop_back();
  }
}

}  // namespace

int run_short(const Options& options) {
  Report report("short", options);
  report.hide({"threads", "reads_speedup", "slow_outside_ms", "slow_waiting_ms",
               "slow_computing_ms", "reads_p90_ratio", "slow_threads"});
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
    for (const uint32_t gap_us : kGapsUs) {
      if (wants("engine") && (gap_us == 0 || !options.quick)) {
        run_beside(tokens, gap_us, options, &report);
      }
    }
  }
  report.note(
      fmt::format("a token of the engine: {} layers of {} parallel regions of {} us on {} "
                  "spinning threads, and a step each",
                  kLayers, kRegions, kRegionUs, usable_cores()));
  return report.finish();
}

}  // namespace kvm::bench
