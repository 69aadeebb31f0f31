// SPDX-License-Identifier: Apache-2.0
// kvmctl top: what the service does at the moment, from the differences of its counters.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/counted.h"
#include "tools/kvmctl/answer.h"
#include "tools/kvmctl/cli.h"
#include "tools/kvmctl/layout.h"
#include "tools/kvmctl/series.h"
#include "tools/kvmctl/values.h"

namespace kvm::tools {
namespace {

constexpr const char* kClearScreen = "\033[H\033[J";

struct TopOptions {
  double interval_s = 2;
  bool once = false;
  uint32_t count = 0;  // 0: until it is stopped
};

// Rates are what happened between two looks, for each second.
struct Rates {
  double requests = 0;
  double failed = 0;
  double tokens = 0;
  double rows = 0;
  double keys = 0;
  double read_bytes = 0;
  double busy_share = 0;  // of the computing threads
  double read_share = 0;  // keys read of keys present
  double p50_s = 0;       // durations of requests; 0 where there were none
  double p99_s = 0;
};

Rates rates_between(const kvm_stats& a, const kvm_stats& b, uint32_t n_threads,
                    const std::vector<Bucket>& durations) {
  const double seconds = static_cast<double>(b.uptime_ns - a.uptime_ns) * 1e-9;
  const auto rate = [&](uint64_t kvm_stats::*member) {
    return seconds > 0 ? static_cast<double>(b.*member - a.*member) / seconds : 0;
  };
  Rates out;
  out.requests = rate(&kvm_stats::n_requests);
  out.failed = rate(&kvm_stats::n_requests_failed);
  out.tokens = rate(&kvm_stats::n_tokens_appended);
  out.rows = rate(&kvm_stats::n_rows_attended);
  out.keys = rate(&kvm_stats::keys_read);
  out.read_bytes = rate(&kvm_stats::bytes_read);
  out.busy_share = rate(&kvm_stats::busy_ns) * 1e-9 / std::max(1u, n_threads);
  const double present = rate(&kvm_stats::keys_present);
  out.read_share = present > 0 ? out.keys / present : 0;
  out.p50_s = quantile(durations, 0.5);
  out.p99_s = quantile(durations, 0.99);
  return out;
}

std::string duration_text(double seconds) {
  if (seconds == 0) {
    return "-";
  }
  return seconds < 1e-3 ? fmt::format("{:.3g} us", seconds * 1e6)
         : seconds < 1  ? fmt::format("{:.3g} ms", seconds * 1e3)
                        : fmt::format("{:.3g} s", seconds);
}

std::string count_text(double value) {
  const char* units[] = {"", " k", " M", " G"};
  size_t unit = 0;
  while (value >= 10'000 && unit + 1 < std::size(units)) {
    value /= 1000;
    ++unit;
  }
  return fmt::format("{:.{}f}{}", value, value < 10 && value > 0 ? 1 : 0, units[unit]);
}

Json rates_json(const kvm_stats& stats, const Rates& rates) {
  return {{"uptime_seconds", static_cast<double>(stats.uptime_ns) * 1e-9},
          {"clients", stats.n_clients},
          {"sequences", stats.n_sequences},
          {"host_used_bytes", stats.host_used_bytes},
          {"host_capacity_bytes", stats.host_capacity_bytes},
          {"index_bytes", stats.index_bytes},
          {"requests_per_second", rates.requests},
          {"failed_requests_per_second", rates.failed},
          {"request_p50_seconds", rates.p50_s},
          {"request_p99_seconds", rates.p99_s},
          {"tokens_appended_per_second", rates.tokens},
          {"rows_attended_per_second", rates.rows},
          {"keys_read_per_second", rates.keys},
          {"bytes_read_per_second", rates.read_bytes},
          {"read_share", rates.read_share},
          {"busy_share", rates.busy_share}};
}

std::string rates_text(const kvm_client_info& info, const kvm_stats& stats, const Rates& rates,
                       size_t width) {
  const double used = stats.host_capacity_bytes == 0
                          ? 0
                          : static_cast<double>(stats.host_used_bytes) /
                                static_cast<double>(stats.host_capacity_bytes);
  return fitted_lines(
      {{"kvmd",
        {info.server_version, fmt::format("process {}", info.server_pid),
         fmt::format("up {:.0f} s", static_cast<double>(stats.uptime_ns) * 1e-9),
         counted(stats.n_clients, "client"), counted(stats.n_sequences, "sequence")}},
       {"memory",
        {fmt::format("{} of {} ({})", bytes_text(stats.host_used_bytes),
                     bytes_text(stats.host_capacity_bytes), percent_text(used)),
         fmt::format("indexes {}", bytes_text(stats.index_bytes))}},
       {"compute",
        {fmt::format("{} of {}", percent_text(rates.busy_share),
                     counted(info.n_threads, "thread"))}},
       {"requests",
        {fmt::format("{}/s", count_text(rates.requests)),
         fmt::format("{} failed/s", count_text(rates.failed)),
         fmt::format("p50 {}", duration_text(rates.p50_s)),
         fmt::format("p99 {}", duration_text(rates.p99_s))}},
       {"appended", {fmt::format("{} tokens x layers/s", count_text(rates.tokens))}},
       {"attended",
        {fmt::format("{} rows x layers/s", count_text(rates.rows)),
         fmt::format("{} keys/s ({} of those there)", count_text(rates.keys),
                     percent_text(rates.read_share)),
         fmt::format("{}/s", bytes_text(static_cast<uint64_t>(rates.read_bytes)))}}},
      width);
}

// A Look is all that top reads at once.
struct Look {
  kvm_stats stats{};
  std::vector<Bucket> durations;
  std::vector<kvm_client_entry> clients;  // none for a user who may not see them
};

Look look_at(const Connection& connection) {
  Look look;
  look.stats = connection.stats();
  look.durations = read_durations(text_of(connection.get(), kvm_get_stats_text, "metrics"));
  kvm_client_entry probe{};
  probe.struct_size = sizeof(probe);
  size_t count = 0;
  if (kvm_client_list(connection.get(), &probe, 1, &count) == KVM_OK) {
    look.clients = list_all_clients(connection.get());
  }
  return look;
}

struct ClientRate {
  kvm_client_entry client{};
  double requests = 0;  // a second
  double p50_s = 0;     // of the interval's, as in Rates
  double p99_s = 0;
};

// Lists clients: those that ask most first, then those that hold most. All requests of a new one
// are of this interval.
std::vector<ClientRate> client_rates(const Look& before, const Look& now) {
  const double seconds = static_cast<double>(now.stats.uptime_ns - before.stats.uptime_ns) * 1e-9;
  std::vector<ClientRate> rates;
  for (const kvm_client_entry& client : now.clients) {
    const auto old = std::find_if(
        before.clients.begin(), before.clients.end(),
        [&](const kvm_client_entry& entry) { return entry.client_id == client.client_id; });
    const kvm_client_entry nothing{};
    const kvm_client_entry& from = old == before.clients.end() ? nothing : *old;
    const uint64_t n = client.n_requests - from.n_requests;
    const std::vector<Bucket> durations =
        added_between(client_durations(from), client_durations(client));
    rates.push_back({.client = client,
                     .requests = seconds > 0 ? static_cast<double>(n) / seconds : 0,
                     .p50_s = quantile(durations, 0.5),
                     .p99_s = quantile(durations, 0.99)});
  }
  std::stable_sort(rates.begin(), rates.end(), [](const ClientRate& a, const ClientRate& b) {
    return std::pair(a.requests, a.client.used.bytes) > std::pair(b.requests, b.client.used.bytes);
  });
  return rates;
}

std::string clients_text(const std::vector<ClientRate>& rates, size_t width) {
  constexpr size_t kShown = 12;
  if (rates.empty()) {
    return "";
  }
  std::vector<std::vector<std::string>> rows;
  for (size_t i = 0; i < std::min(rates.size(), kShown); ++i) {
    const kvm_client_entry& client = rates[i].client;
    rows.push_back({id_text(client.client_id), client.name,
                    fmt::format("{}/s", count_text(rates[i].requests)),
                    duration_text(rates[i].p50_s), duration_text(rates[i].p99_s),
                    std::to_string(client.used.requests), bytes_text(client.used.bytes),
                    std::to_string(client.used.sequences), std::to_string(client.n_refused),
                    std::to_string(client.pid), user_name(client.uid),
                    bytes_text(client.used.arena_bytes), std::to_string(client.used.queues)});
  }
  return "\n" + fitted_table({{"CLIENT", 12},
                              {"NAME", 10},
                              {"REQUESTS", 11},
                              {"P50", 8},
                              {"P99", 9},
                              {"IN FLIGHT", 3},
                              {"BYTES", 7},
                              {"SEQUENCES", 6},
                              {"REFUSED", 5},
                              {"PROCESS", 4},
                              {"USER", 2},
                              {"ARENA MEMORY", 1},
                              {"QUEUES", 0}},
                             rows, width);
}

Json top_json(const Look& look, const Rates& rates, const std::vector<ClientRate>& clients) {
  Json out = rates_json(look.stats, rates);
  out["by_client"] = Json::array();
  for (const ClientRate& rate : clients) {
    out["by_client"].push_back({{"id", id_text(rate.client.client_id)},
                                {"name", rate.client.name},
                                {"requests_per_second", rate.requests},
                                {"request_p50_seconds", rate.p50_s},
                                {"request_p99_seconds", rate.p99_s},
                                {"bytes", rate.client.used.bytes}});
  }
  return out;
}

int run_top(const Common& common, const TopOptions& options) {
  const Connection connection(common);
  const kvm_client_info info = connection.info();
  const bool live = ::isatty(STDOUT_FILENO) != 0 && !options.once && !common.json;
  const uint32_t count = options.once ? 1 : options.count;
  Look before = look_at(connection);
  for (uint32_t i = 0; count == 0 || i < count; ++i) {
    std::this_thread::sleep_for(std::chrono::duration<double>(options.interval_s));
    const Look now = look_at(connection);
    const Rates rates = rates_between(before.stats, now.stats, info.n_threads,
                                      added_between(before.durations, now.durations));
    const std::vector<ClientRate> clients = client_rates(before, now);
    before = now;
    if (common.json) {
      // A line each, so that a reader can follow. Names of clients may be any bytes.
      fmt::print(
          "{}\n",
          top_json(now, rates, clients).dump(-1, ' ', false, Json::error_handler_t::replace));
    } else {
      const size_t width = terminal_columns();  // it may have changed
      fmt::print("{}{}{}{}", live ? kClearScreen : "", !live && i > 0 ? "\n" : "",
                 rates_text(info, now.stats, rates, width), clients_text(clients, width));
    }
    flush_answer();
  }
  return kExitOk;
}

}  // namespace

void add_top_command(Cli* cli) {
  const auto options = std::make_shared<TopOptions>();
  CLI::App* top = cli->add("top", "what the service does at the moment; Ctrl-C ends it",
                           [options](const Common& common) { return run_top(common, *options); });
  top->add_option("-i,--interval", options->interval_s, "seconds between two looks")
      ->type_name("SECONDS")
      ->check(seconds_between(0.05, 3600))
      ->capture_default_str();
  top->add_option("-n,--count", options->count, "looks; 0: until it is stopped")
      ->type_name("N")
      ->capture_default_str();
  top->add_flag("--once", options->once, "one look, after one interval");
}

}  // namespace kvm::tools
