// SPDX-License-Identifier: Apache-2.0
#include "daemon/stats_text.h"

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "base/clock.h"
#include "base/machine.h"
#include "base/stats_text.h"
#include "engine/space/refusal.h"
#include "ipc/validate.h"

namespace kvm::daemon {

kvm_stats service_stats(const Service& service) {
  kvm_stats stats = service.engine->stats();
  stats.struct_size = sizeof(stats);
  stats.n_clients = static_cast<uint32_t>(service.n_clients);
  stats.n_clients_total = service.n_clients_total;
  stats.n_protocol_errors = service.n_protocol_errors;
  stats.n_requests += service.n_immediate;
  stats.n_requests_failed += service.n_immediate_failed;
  stats.uptime_ns = now_ns() - service.start_ns;
  return stats;
}

uint64_t staying_bytes(const engine::QuotaBook& quotas) {
  uint64_t size_bytes = 0;
  for (const engine::TenantUsage& tenant : quotas.tenants()) {
    size_bytes += tenant.used[engine::Resource::kMemoryBytes];
  }
  return size_bytes;
}

StatsSnapshot take_snapshot(const Service& service) {
  const std::span<const uint64_t> refusals = service.engine->refusals();
  return {.stats = service_stats(service),
          .audit = service.engine->audit_stats(),
          .requests = service.requests,
          .rejects = service.n_rejects,
          .refusals = {refusals.begin(), refusals.end()},
          .movement = service.engine->movement_stats(),
          .disk = service.disk == nullptr ? tiers::DiskTierStats() : service.disk->stats(),
          .disk_live_bytes = service.disk == nullptr ? 0 : service.disk->used_bytes(),
          .ring_bytes = service.ring_bytes ? service.ring_bytes() : 0,
          .saved = service.engine->snapshot_stats(),
          .prefixes = service.engine->prefix_stats(),
          .staying_bytes = staying_bytes(service.engine->quotas()),
          .cost_model = service.engine->cost_model(),
          .isa = service.engine->isa(),
          .n_threads = service.engine->n_threads(),
          .n_queues = service.n_queues,
          .arena_bytes = service.arena_bytes,
          .arena_capacity_bytes = service.limits.arena_capacity_bytes,
          .n_sleeps = service.n_sleeps,
          .n_notifications = service.n_notifications,
          .devices = service.devices == nullptr ? std::vector<DeviceFigures>()
                                                : service.devices->figures(),
          .device_host_bytes = service.devices == nullptr ? 0 : service.devices->host_used_bytes(),
          .device_host_capacity_bytes =
              service.devices == nullptr ? 0 : service.devices->host_capacity_bytes()};
}

namespace {

// A counter for each reason of a list; reason 0 is none.
void write_reasons(const char* name, const char* help, std::span<const uint64_t> counts,
                   const std::function<const char*(size_t)>& reason_name, StatsText* out) {
  for (size_t i = 1; i < counts.size(); ++i) {
    const std::string labels = fmt::format("{{reason=\"{}\"}}", reason_name(i));
    i == 1 ? out->counter(name, help, counts[i], labels.c_str())
           : out->sample(name, counts[i], labels.c_str());
  }
}

void write_refusals(const StatsSnapshot& snapshot, StatsText* out) {
  write_reasons(
      "kvm_rejected_requests_total", "Requests for which a client was closed, by reason.",
      snapshot.rejects, [](size_t i) { return ipc::reject_name(static_cast<ipc::Reject>(i)); },
      out);
  write_reasons(
      "kvm_refused_requests_total", "Requests refused for what they ask by themselves, by reason.",
      snapshot.refusals, [](size_t i) { return engine::kRefusalNames[i]; }, out);
}

void write_disk(const StatsSnapshot& snapshot, StatsText* out) {
  const tiers::DiskTierStats& disk = snapshot.disk;
  const engine::MovementStats& moved = snapshot.movement;
  const bool is_there = disk.capacity_bytes != 0;
  out->gauge("kvm_disk_info", "1 where there is a disk; its label tells how it is used.", is_there,
             fmt::format("{{backend=\"{}\"}}", is_there ? disk.backend : "none").c_str());
  out->gauge("kvm_disk_direct", "1 once files are written, and that past the page cache.",
             is_there && disk.n_disk_writes != 0 && disk.is_direct);
  out->gauge("kvm_disk_capacity_bytes", "Hard cap of kvm_disk_used_bytes.", disk.capacity_bytes);
  out->gauge("kvm_disk_used_bytes", "Files of pages, in physical bytes.", disk.physical_bytes);
  out->gauge("kvm_disk_live_bytes", "Of these, pages that are in use.", snapshot.disk_live_bytes);
  out->gauge("kvm_disk_directories", "Directories of files.", disk.n_directories);
  out->gauge("kvm_disk_passed_over_directories",
             "Of these, those that have refused a file or failed a write in the last seconds.",
             disk.n_passed_over);
  out->gauge("kvm_disk_written_today_bytes", "What counts against disk.daily_writes.",
             disk.written_today_bytes);
  out->counter("kvm_disk_read_bytes_total", "Bytes read from files.", disk.disk_read_bytes);
  out->counter("kvm_disk_written_bytes_total", "Bytes written to files.", disk.disk_written_bytes);
  out->counter("kvm_disk_compacted_bytes_total", "Bytes of pages that were moved between files.",
               disk.moved_bytes);
  out->counter("kvm_disk_corrupt_pages_total", "Pages that were not what had been written.",
               disk.n_corrupt);
  out->counter("kvm_disk_io_errors_total", "Transfers that failed.", disk.n_io_errors);
  out->counter("kvm_disk_refused_writes_total", "Pages for which there was no room.",
               disk.n_no_space);
  out->gauge("kvm_staying_bytes", "Keys, values, indexes and what was observed that no disk takes.",
             snapshot.staying_bytes);
  out->gauge("kvm_ring_bytes",
             "Memory set aside, beside what holds keys and values, for pages on disk to pass "
             "through.",
             snapshot.ring_bytes);
  out->counter("kvm_sent_pages_total", "Pages that left memory.", moved.n_pages_sent);
  out->counter("kvm_sent_bytes_total", "Their bytes.", moved.bytes_sent);
  out->counter("kvm_returned_pages_total", "Pages that came back to memory.", moved.n_pages_back);
  out->counter("kvm_returned_bytes_total", "Their bytes.", moved.bytes_back);
  out->counter("kvm_failed_moves_total", "Pages that failed to leave or to come back.",
               moved.n_failed);
  out->counter("kvm_waiting_appends_total", "Appends that waited for room in memory.",
               moved.n_appends_waited);
}

// A counter for each end that a save or a load may have.
void write_ends(const char* name, const char* help, std::span<const uint64_t> counts,
                StatsText* out) {
  for (size_t i = 0; i < counts.size(); ++i) {
    const std::string labels = fmt::format("{{result=\"{}\"}}", engine::kSnapshotEndNames[i]);
    i == 0 ? out->counter(name, help, counts[i], labels.c_str())
           : out->sample(name, counts[i], labels.c_str());
  }
}

void write_saved(const engine::SnapshotStats& saved, StatsText* out) {
  out->gauge("kvm_snapshots", "Sequences that are saved.", saved.n_snapshots);
  out->gauge("kvm_snapshot_bytes", "Of these, each whole: what users are charged for them.",
             saved.bytes);
  out->counter("kvm_snapshots_lost_total",
               "Snapshots that were not whole any more when kvmd started.", saved.n_lost);
  write_ends("kvm_saves_total", "Saves that have begun and ended, by result.", saved.n_saves, out);
  write_ends("kvm_loads_total", "Loads that have begun and ended, by result.", saved.n_loads, out);
  out->gauge("kvm_saves_running", "Saves that are under way.", saved.n_saving);
  out->gauge("kvm_loads_running", "Loads that are under way.", saved.n_loading);
  out->gauge("kvm_saving_pages", "Pages of the saves that are under way.", saved.n_pages_saved,
             "{state=\"on_disk\"}");
  out->sample("kvm_saving_pages", saved.n_pages_to_save, "{state=\"to_go\"}");
  out->counter("kvm_saved_bytes_total", "Bytes of pages that saves have written to disk.",
               saved.bytes_written);
}

void write_prefixes(const engine::PrefixStats& prefixes, StatsText* out) {
  out->gauge("kvm_prefixes", "Published sequences that are found by their tokens.",
             prefixes.n_prefixes);
  out->gauge("kvm_prefix_pages", "Pages of 64 tokens of these, each once for a user.",
             prefixes.n_pages);
  out->gauge("kvm_prefix_hidden_pages",
             "Of these, pages for which their part of a user's table had no room.",
             prefixes.n_pages_hidden);
  out->gauge("kvm_prefix_table_bytes", "Memory of the tables in which clients look for prefixes.",
             prefixes.table_bytes);
  out->counter("kvm_prefixes_published_total", "Prefixes that were published.",
               prefixes.n_published);
  out->counter("kvm_prefix_forks_total", "Forks of prefixes.", prefixes.n_forked);
  out->counter("kvm_prefixes_expired_total",
               "Prefixes that were freed since nobody had forked them for as long as they were to "
               "be kept.",
               prefixes.n_expired);
  out->counter("kvm_prefix_weighed_total",
               "Prefixes that were found and weighed against computing them, by what was sooner.",
               prefixes.n_faster, "{sooner=\"read\"}");
  out->sample("kvm_prefix_weighed_total", prefixes.n_slower, "{sooner=\"computed\"}");
  out->gauge("kvm_prefixes_saved", "Prefixes with a snapshot, which outlive kvmd.",
             prefixes.n_saved);
  out->gauge("kvm_prefixes_waiting",
             "Snapshots of prefixes that are loaded once their space is registered.",
             prefixes.n_waiting);
  out->counter("kvm_prefixes_restored_total",
               "Prefixes of a kvmd before that were published again.", prefixes.n_restored);
  out->counter("kvm_prefix_failures_total",
               "Prefixes that could not be saved, which end with kvmd, or not be loaded.",
               prefixes.n_failed_saves, "{verb=\"save\"}");
  out->sample("kvm_prefix_failures_total", prefixes.n_failed_loads, "{verb=\"load\"}");
}

void write_devices(const StatsSnapshot& snapshot, StatsText* out) {
  const auto family = [&](const char* name, const char* help, uint64_t DeviceFigures::*figure) {
    for (size_t i = 0; i < snapshot.devices.size(); ++i) {
      const DeviceFigures& of = snapshot.devices[i];
      const std::string labels = fmt::format("{{device=\"{}\"}}", of.ordinal);
      i == 0 ? out->gauge(name, help, of.*figure, labels.c_str())
             : out->sample(name, of.*figure, labels.c_str());
    }
  };
  family("kvm_device_pool_bytes", "Hard cap of kvm_device_used_bytes.", &DeviceFigures::pool_bytes);
  family("kvm_device_used_bytes", "Device memory that is mapped for pages of clients.",
         &DeviceFigures::used_bytes);
  family("kvm_device_clients", "Clients that run on the device with memory of kvmd.",
         &DeviceFigures::n_clients);
  if (!snapshot.devices.empty()) {
    out->gauge("kvm_device_host_bytes", "Page-locked memory for sequences of devices.",
               snapshot.device_host_bytes);
    out->gauge("kvm_device_host_capacity_bytes", "Hard cap of kvm_device_host_bytes.",
               snapshot.device_host_capacity_bytes);
  }
}

}  // namespace

std::string stats_text(const StatsSnapshot& snapshot) {
  StatsText out;
  const std::string build = fmt::format("{{version=\"{}.{}.{}\",isa=\"{}\"}}", KVM_VERSION_MAJOR,
                                        KVM_VERSION_MINOR, KVM_VERSION_PATCH, snapshot.isa);
  out.gauge("kvm_build_info", "Always 1; its labels tell what runs.", 1, build.c_str());
  out.gauge("kvm_huge_pages_info", "Always 1; its label tells whether kvmd gets huge pages.", 1,
            fmt::format("{{setting=\"{}\"}}", huge_page_setting()).c_str());
  out.gauge("kvm_threads", "Threads that compute.", snapshot.n_threads);
  write_stats(snapshot.stats, &out);
  write_requests(snapshot.requests, &out);
  write_disk(snapshot, &out);
  write_saved(snapshot.saved, &out);
  write_prefixes(snapshot.prefixes, &out);
  write_devices(snapshot, &out);
  write_audit(snapshot.audit, &out);
  out.gauge("kvm_cost_model_info", "1 when it is known; its label is the option cost_model.",
            snapshot.cost_model.empty() ? 0 : 1,
            fmt::format("{{rates=\"{}\"}}", snapshot.cost_model).c_str());
  out.gauge("kvm_queues", "Queues of all clients.", snapshot.n_queues);
  out.gauge("kvm_arena_bytes", "Memory of arenas of all clients.", snapshot.arena_bytes);
  out.gauge("kvm_arena_capacity_bytes", "Hard cap of kvm_arena_bytes.",
            snapshot.arena_capacity_bytes);
  write_refusals(snapshot, &out);
  out.counter("kvm_dispatcher_sleeps_total", "Times the dispatcher has slept.", snapshot.n_sleeps);
  out.counter("kvm_eventfd_notifications_total", "Completion eventfds written.",
              snapshot.n_notifications);
  return out.take();
}

}  // namespace kvm::daemon
