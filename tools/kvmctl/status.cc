// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/counted.h"
#include "tools/kvmctl/cli.h"
#include "tools/kvmctl/series.h"

namespace kvm::tools {
namespace {

// What lies on the disk; none: kvmd has no directory.
struct Disk {
  uint64_t capacity_bytes = 0;
  uint64_t used_bytes = 0;
  uint64_t live_bytes = 0;
  uint64_t read_bytes = 0;
  uint64_t written_bytes = 0;
  uint64_t n_errors = 0;
  uint64_t n_passed_over = 0;
  uint64_t n_sent = 0;
  uint64_t n_returned = 0;
  uint64_t ring_bytes = 0;
  uint64_t n_snapshots = 0;
  uint64_t n_prefixes = 0;  // of these
  uint64_t snapshot_bytes = 0;
  // Under way, and the pages of these saves.
  uint64_t n_saving = 0;
  uint64_t n_loading = 0;
  uint64_t n_pages_saved = 0;
  uint64_t n_pages_to_save = 0;
};

Disk disk_of(kvm_client* client) {
  const std::string text = text_of(client, kvm_get_stats_text, "metrics");
  const Series series = read_series(text, "kvm_");
  return {.capacity_bytes = count_of(series, "kvm_disk_capacity_bytes"),
          .used_bytes = count_of(series, "kvm_disk_used_bytes"),
          .live_bytes = count_of(series, "kvm_disk_live_bytes"),
          .read_bytes = count_of(series, "kvm_disk_read_bytes_total"),
          .written_bytes = count_of(series, "kvm_disk_written_bytes_total"),
          .n_errors = count_of(series, "kvm_disk_corrupt_pages_total") +
                      count_of(series, "kvm_disk_io_errors_total"),
          .n_passed_over = count_of(series, "kvm_disk_passed_over_directories"),
          .n_sent = count_of(series, "kvm_sent_pages_total"),
          .n_returned = count_of(series, "kvm_returned_pages_total"),
          .ring_bytes = count_of(series, "kvm_ring_bytes"),
          .n_snapshots = count_of(series, "kvm_snapshots"),
          .n_prefixes =
              count_of(series, "kvm_prefixes_saved") + count_of(series, "kvm_prefixes_waiting"),
          .snapshot_bytes = count_of(series, "kvm_snapshot_bytes"),
          .n_saving = count_of(series, "kvm_saves_running"),
          .n_loading = count_of(series, "kvm_loads_running"),
          .n_pages_saved = count_of(series, "kvm_saving_pages{state=\"on_disk\"}"),
          .n_pages_to_save = count_of(series, "kvm_saving_pages{state=\"to_go\"}")};
}

std::string disk_text(const Disk& disk) {
  return disk.capacity_bytes == 0
             ? "none (disk.directories)"
             : fmt::format(
                   "{} of {} used, {} in pages, {} read, {} written, {}{}; {} pages sent, {} "
                   "came back",
                   bytes_text(disk.used_bytes), bytes_text(disk.capacity_bytes),
                   bytes_text(disk.live_bytes), bytes_text(disk.read_bytes),
                   bytes_text(disk.written_bytes), counted(disk.n_errors, "error"),
                   disk.n_passed_over == 0
                       ? std::string()
                       : fmt::format(", {} passed over", counted(disk.n_passed_over, "drive")),
                   disk.n_sent, disk.n_returned);
}

// Prefixes that come or go may be counted as both for a moment.
std::string snapshots_text(const Disk& disk) {
  const uint64_t n_prefixes = std::min(disk.n_prefixes, disk.n_snapshots);
  std::string text = fmt::format(
      "{}{}, {}", disk.n_snapshots - n_prefixes,
      n_prefixes == 0 ? std::string() : fmt::format(" and {} of kept prefixes", n_prefixes),
      bytes_text(disk.snapshot_bytes));
  if (disk.n_saving != 0) {
    text +=
        fmt::format("; {} under way, {} of {} pages on the disk", counted(disk.n_saving, "save"),
                    disk.n_pages_saved, disk.n_pages_saved + disk.n_pages_to_save);
  }
  if (disk.n_loading != 0) {
    text += fmt::format("; {} under way", counted(disk.n_loading, "load"));
  }
  return text;
}

int run_status(const Common& common) {
  const Connection connection(common);
  const kvm_client_info info = connection.info();
  const kvm_stats stats = connection.stats();
  const Disk disk = disk_of(connection.get());
  const double uptime_s = static_cast<double>(stats.uptime_ns) * 1e-9;
  if (common.json) {
    print_json({{"version", info.server_version},
                {"pid", info.server_pid},
                {"epoch", info.epoch},
                {"isa", info.isa},
                {"threads", info.n_threads},
                {"uptime_seconds", uptime_s},
                {"clients", stats.n_clients},
                {"spaces", stats.n_spaces},
                {"sequences", stats.n_sequences},
                {"pages", stats.n_pages},
                {"host_used_bytes", stats.host_used_bytes},
                {"host_page_bytes", stats.host_page_bytes},
                {"host_peak_bytes", stats.host_peak_bytes},
                {"host_capacity_bytes", stats.host_capacity_bytes},
                {"ring_bytes", disk.ring_bytes},
                {"requests", stats.n_requests},
                {"requests_failed", stats.n_requests_failed},
                {"tokens_appended", stats.n_tokens_appended},
                {"rows_attended", stats.n_rows_attended},
                {"keys_present", stats.keys_present},
                {"keys_read", stats.keys_read},
                {"bytes_read", stats.bytes_read},
                {"bytes_appended", stats.bytes_appended},
                {"pages_dropped", stats.n_pages_dropped},
                {"pages_copied", stats.n_pages_copied},
                {"pages_moved", stats.n_pages_moved},
                {"pages_away", stats.n_pages_away},
                {"away_bytes", stats.away_bytes},
                {"disk_capacity_bytes", disk.capacity_bytes},
                {"disk_used_bytes", disk.used_bytes},
                {"disk_live_bytes", disk.live_bytes},
                {"disk_read_bytes", disk.read_bytes},
                {"disk_written_bytes", disk.written_bytes},
                {"disk_errors", disk.n_errors},
                {"disk_passed_over_directories", disk.n_passed_over},
                {"pages_sent", disk.n_sent},
                {"pages_returned", disk.n_returned},
                {"snapshots", disk.n_snapshots},
                {"snapshots_of_prefixes", disk.n_prefixes},
                {"snapshot_bytes", disk.snapshot_bytes},
                {"saves_running", disk.n_saving},
                {"loads_running", disk.n_loading},
                {"saving_pages_on_disk", disk.n_pages_saved},
                {"saving_pages_to_go", disk.n_pages_to_save},
                {"index_bytes", stats.index_bytes},
                {"index_blocks", stats.n_index_blocks},
                {"index_blocks_refused", stats.n_index_refused},
                {"index_blocks_dropped", stats.n_index_dropped},
                {"clients_total", stats.n_clients_total},
                {"protocol_errors", stats.n_protocol_errors},
                {"busy_seconds", static_cast<double>(stats.busy_ns) * 1e-9}});
    return kExitOk;
  }
  print_table(
      {{"daemon", fmt::format("kvmd {}, process {}, up {:.0f} s", info.server_version,
                              info.server_pid, uptime_s)},
       {"compute", fmt::format("{}, {} kernels, busy {:.1f} s", counted(info.n_threads, "thread"),
                               info.isa, static_cast<double>(stats.busy_ns) * 1e-9)},
       {"clients",
        fmt::format("{} connected, {} since the start, {}", stats.n_clients, stats.n_clients_total,
                    counted(stats.n_protocol_errors, "protocol error"))},
       {"sequences", fmt::format("{} in {}", stats.n_sequences, counted(stats.n_spaces, "space"))},
       {"host memory",
        fmt::format("{} of {} used, {} in pages, {} at most so far{}",
                    bytes_text(stats.host_used_bytes), bytes_text(stats.host_capacity_bytes),
                    bytes_text(stats.host_page_bytes), bytes_text(stats.host_peak_bytes),
                    disk.ring_bytes == 0
                        ? std::string()
                        : fmt::format("; {} more set aside for pages on disk to pass through",
                                      bytes_text(disk.ring_bytes)))},
       {"pages", fmt::format("{} in use, {} away, {} copied on write, {} dropped by policies, "
                             "{} moved",
                             stats.n_pages, stats.n_pages_away, stats.n_pages_copied,
                             stats.n_pages_dropped, stats.n_pages_moved)},
       {"disk", disk_text(disk)},
       {"snapshots", snapshots_text(disk)},
       {"indexes", fmt::format("{}, {} made, {} refused, {} dropped", bytes_text(stats.index_bytes),
                               counted(stats.n_index_blocks, "block"), stats.n_index_refused,
                               stats.n_index_dropped)},
       {"requests", fmt::format("{} done, {} failed", stats.n_requests, stats.n_requests_failed)},
       {"appended", fmt::format("{} x layers, {}", counted(stats.n_tokens_appended, "token"),
                                bytes_text(stats.bytes_appended))},
       {"attended", fmt::format("{} x layers, {} of {}, {}", counted(stats.n_rows_attended, "row"),
                                stats.keys_read, counted(stats.keys_present, "key"),
                                bytes_text(stats.bytes_read))}});
  return kExitOk;
}

int run_ping(const Common& common, uint32_t count) {
  const Connection connection(common);
  std::vector<double> us;
  for (uint32_t i = 0; i < count; ++i) {
    uint64_t ns = 0;
    check(kvm_client_ping(connection.get(), &ns), "ping");
    us.push_back(static_cast<double>(ns) * 1e-3);
    if (!common.json) {
      fmt::print("answer {} in {:.1f} us\n", i + 1, us.back());
    }
  }
  std::sort(us.begin(), us.end());
  if (common.json) {
    print_json({{"count", count},
                {"min_us", us.front()},
                {"median_us", us[us.size() / 2]},
                {"max_us", us.back()}});
  } else {
    fmt::print("{}: at least {:.1f}, median {:.1f}, at most {:.1f} us\n", counted(count, "answer"),
               us.front(), us[us.size() / 2], us.back());
  }
  return kExitOk;
}

int run_metrics(const Common& common) {
  const Connection connection(common);
  const std::string text = text_of(connection.get(), kvm_get_stats_text, "metrics");
  if (common.json) {
    print_json({{"content_type", "text/plain; version=0.0.4"}, {"text", text}});
  } else {
    fmt::print("{}", text);
  }
  return kExitOk;
}

}  // namespace

void add_status_commands(Cli* cli) {
  cli->add("status", "memory, sequences, requests and what was computed", run_status);
  const auto count = std::make_shared<uint32_t>(5);
  cli->add("ping", "round trips of a null request",
           [count](const Common& common) { return run_ping(common, *count); })
      ->add_option("-c,--count", *count, "how many")
      ->type_name("N")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  cli->add("metrics", "all counters, as Prometheus' text", run_metrics);
}

}  // namespace kvm::tools
