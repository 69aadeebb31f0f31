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
#include <vector>

#include "tools/kvmctl/answer.h"
#include "tools/kvmctl/cli.h"

namespace kvm::tools {
namespace {

constexpr const char* kClearScreen = "\033[H\033[J";

struct TopOptions {
  double interval_s = 2;
  bool once = false;
  uint32_t count = 0;  // 0: until it is stopped
};

// What happened between two looks, a second.
struct Rates {
  double requests = 0;
  double failed = 0;
  double tokens = 0;
  double rows = 0;
  double keys = 0;
  double read_bytes = 0;
  double busy_share = 0;  // of the computing threads
  double read_share = 0;  // keys read of keys present
};

Rates rates_between(const kvm_stats& a, const kvm_stats& b, uint32_t n_threads) {
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
  return out;
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
          {"tokens_appended_per_second", rates.tokens},
          {"rows_attended_per_second", rates.rows},
          {"keys_read_per_second", rates.keys},
          {"bytes_read_per_second", rates.read_bytes},
          {"read_share", rates.read_share},
          {"busy_share", rates.busy_share}};
}

std::string rates_text(const kvm_client_info& info, const kvm_stats& stats, const Rates& rates) {
  const double used = stats.host_capacity_bytes == 0
                          ? 0
                          : static_cast<double>(stats.host_used_bytes) /
                                static_cast<double>(stats.host_capacity_bytes);
  return table_text(
      {{"kvmd",
        fmt::format("{}, process {}, up {:.0f} s, {} clients, {} sequences", info.server_version,
                    info.server_pid, static_cast<double>(stats.uptime_ns) * 1e-9, stats.n_clients,
                    stats.n_sequences)},
       {"memory", fmt::format("{} of {} ({}), indexes {}", bytes_text(stats.host_used_bytes),
                              bytes_text(stats.host_capacity_bytes), percent_text(used),
                              bytes_text(stats.index_bytes))},
       {"compute", fmt::format("{} of {} threads", percent_text(rates.busy_share), info.n_threads)},
       {"requests",
        fmt::format("{}/s, {} failed/s", count_text(rates.requests), count_text(rates.failed))},
       {"appended", fmt::format("{} tokens x layers/s", count_text(rates.tokens))},
       {"attended",
        fmt::format("{} rows x layers/s, {} keys/s ({} of those there), {}/s",
                    count_text(rates.rows), count_text(rates.keys), percent_text(rates.read_share),
                    bytes_text(static_cast<uint64_t>(rates.read_bytes)))}});
}

// Those that hold most; nothing for a user who may not see them.
std::string clients_text(kvm_client* client) {
  constexpr size_t kShown = 12;
  kvm_client_entry probe{};
  probe.struct_size = sizeof(probe);
  size_t count = 0;
  if (kvm_client_list(client, &probe, 1, &count) != KVM_OK) {
    return "";
  }
  std::vector<std::vector<std::string>> rows = client_rows(list_all_clients(client));
  rows.resize(std::min(rows.size(), kShown + 1));
  return "\n" + table_text(rows);
}

int run_top(const Common& common, const TopOptions& options) {
  const Connection connection(common);
  const kvm_client_info info = connection.info();
  const bool live = ::isatty(STDOUT_FILENO) != 0 && !options.once && !common.json;
  const uint32_t count = options.once ? 1 : options.count;
  kvm_stats before = connection.stats();
  for (uint32_t i = 0; count == 0 || i < count; ++i) {
    std::this_thread::sleep_for(std::chrono::duration<double>(options.interval_s));
    const kvm_stats now = connection.stats();
    const Rates rates = rates_between(before, now, info.n_threads);
    before = now;
    if (common.json) {
      // A line each, so that a reader can follow.
      fmt::print("{}\n", rates_json(now, rates).dump());
    } else {
      fmt::print("{}{}{}{}", live ? kClearScreen : "", !live && i > 0 ? "\n" : "",
                 rates_text(info, now, rates), clients_text(connection.get()));
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
      ->check(CLI::Range(0.05, 3600.0))
      ->capture_default_str();
  top->add_option("-n,--count", options->count, "looks; 0: until it is stopped")
      ->type_name("N")
      ->capture_default_str();
  top->add_flag("--once", options->once, "one look, after one interval");
}

}  // namespace kvm::tools
