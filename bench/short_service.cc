// SPDX-License-Identifier: Apache-2.0
#include "bench/short_service.h"

#include <algorithm>
#include <fstream>
#include <string>

#include "bench/service_client.h"
#include "bench/timing.h"

namespace kvm::bench {

namespace {

uint64_t pool_bytes(uint64_t tokens) { return tokens * WallClient::kTokenBytes + (256ull << 20); }

kvm_client* open_embedded(uint32_t threads, uint32_t tokens) {
  kvm_embedded_params params{};
  params.struct_size = sizeof(params);
  params.n_threads = threads;
  params.host_capacity_bytes = pool_bytes(tokens);
  kvm_client* client = nullptr;
  require_ok(kvm_open_embedded(&params, &client), "engine in this process");
  return client;
}

// Of /proc/stat: the time stolen from all processors, and all of their time.
struct Ticks {
  double stolen = 0;
  double all = 0;
};
Ticks read_ticks() {
  std::ifstream in("/proc/stat");
  std::string cpu;
  in >> cpu;
  Ticks ticks;
  // user, nice, system, idle, iowait, irq, softirq, steal; guests are in user already.
  for (int i = 0; i < 8; ++i) {
    double value = 0;
    in >> value;
    ticks.all += value;
    ticks.stolen = value;
  }
  return ticks;
}

double median_of(const std::vector<StepTime>& steps, double StepTime::*part) {
  std::vector<double> values;
  for (const StepTime& step : steps) {
    values.push_back(step.*part);
  }
  return median(std::move(values));
}

}  // namespace

const char* where_name(Where where) { return where == Where::kDaemon ? "daemon" : "embedded"; }

ShortService::ShortService(Where where, uint32_t threads, uint32_t tokens, const DaemonSpin& spin,
                           uint64_t spin_ns) {
  if (where == Where::kDaemon) {
    daemon_ = std::make_unique<DaemonChild>(threads, pool_bytes(tokens), spin);
    client_ = std::make_unique<WallClient>(daemon_->socket_path(), spin_ns);
  } else {
    client_ = std::make_unique<WallClient>(open_embedded(threads, tokens), spin_ns);
  }
  seq_ = client_->add_sequence(tokens);
  busy_ns_ = client_->stats().busy_ns;
}

ShortService::~ShortService() {
  client_.reset();
  daemon_.reset();
}

StepTime ShortService::step() {
  kvm_step_stats stats{};
  stats.struct_size = sizeof(stats);
  const double begin = now_s();
  require_ok(client_->attend(seq_, &stats), "attend");
  const double took = now_s() - begin;
  const double service = std::min(took, static_cast<double>(stats.service_ns) * 1e-9);
  const double compute = std::min(service, static_cast<double>(stats.compute_ns) * 1e-9);
  StepTime step{.outside = took - service, .waiting = service - compute, .computing = compute};
  if (daemon_ == nullptr && compute > 0) {
    const uint64_t busy_ns = client_->stats().busy_ns;
    step.threads = static_cast<double>(busy_ns - busy_ns_) * 1e-9 / compute;
    busy_ns_ = busy_ns;
  }
  return step;
}

void StealMeter::begin() {
  const Ticks ticks = read_ticks();
  begin_stolen_ = ticks.stolen;
  begin_all_ = ticks.all;
}

void StealMeter::end() {
  const Ticks ticks = read_ticks();
  stolen_ += ticks.stolen - begin_stolen_;
  all_ += ticks.all - begin_all_;
}

StepTime excess_of_slow(const std::vector<StepTime>& steps) {
  const double limit = percentile(totals(steps), 0.9);
  std::vector<StepTime> slow;
  std::copy_if(steps.begin(), steps.end(), std::back_inserter(slow),
               [limit](const StepTime& step) { return step.total() >= limit; });
  const auto excess = [&](double StepTime::*part) {
    return median_of(slow, part) - median_of(steps, part);
  };
  return {.outside = excess(&StepTime::outside),
          .waiting = excess(&StepTime::waiting),
          .computing = excess(&StepTime::computing),
          .threads = median_of(slow, &StepTime::threads)};
}

std::vector<double> totals(const std::vector<StepTime>& steps) {
  std::vector<double> out;
  for (const StepTime& step : steps) {
    out.push_back(step.total());
  }
  return out;
}

}  // namespace kvm::bench
