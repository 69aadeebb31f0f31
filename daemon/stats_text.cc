// SPDX-License-Identifier: Apache-2.0
#include "daemon/stats_text.h"

#include <fmt/format.h>

#include <iterator>

#include "daemon/clock.h"

namespace kvm::daemon {
namespace {

class Writer {
 public:
  void family(const char* name, const char* type, const char* help) {
    fmt::format_to(std::back_inserter(text_), "# HELP {} {}\n# TYPE {} {}\n", name, help, name,
                   type);
  }
  void sample(const char* name, const char* labels, uint64_t value) {
    fmt::format_to(std::back_inserter(text_), "{}{} {}\n", name, labels, value);
  }
  void gauge(const char* name, const char* help, uint64_t value, const char* labels = "") {
    family(name, "gauge", help);
    sample(name, labels, value);
  }
  void counter(const char* name, const char* help, uint64_t value, const char* labels = "") {
    family(name, "counter", help);
    sample(name, labels, value);
  }
  // A time in seconds, from nanoseconds.
  void seconds(const char* name, const char* type, const char* help, uint64_t value_ns) {
    family(name, type, help);
    fmt::format_to(std::back_inserter(text_), "{} {}.{:09}\n", name, value_ns / 1'000'000'000u,
                   value_ns % 1'000'000'000u);
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

constexpr const char* kDram = "{tier=\"dram\"}";

void write_memory(Writer* out, const kvm_stats& stats) {
  out->gauge("kvm_tier_used_bytes", "Physical memory that holds keys and values.",
             stats.host_used_bytes, kDram);
  out->gauge("kvm_tier_capacity_bytes", "Hard cap of kvm_tier_used_bytes.",
             stats.host_capacity_bytes, kDram);
  out->gauge("kvm_tier_peak_bytes", "Largest value of kvm_tier_used_bytes so far.",
             stats.host_peak_bytes, kDram);
  out->gauge("kvm_tier_page_bytes", "Bytes of pages in use; the rest of used is room in extents.",
             stats.host_page_bytes, kDram);
  out->gauge("kvm_pages", "Pages in use, each counted once.", stats.n_pages);
  out->gauge("kvm_index_bytes", "Memory of indexes.", stats.index_bytes);
  out->gauge("kvm_observed_bytes", "Memory of observed queries and attention sums.",
             stats.observed_bytes);
  out->counter("kvm_dropped_pages_total", "Pages dropped by policies.", stats.n_pages_dropped);
  out->counter("kvm_copied_pages_total", "Pages copied because two sequences shared them.",
               stats.n_pages_copied);
}

void write_requests(Writer* out, const kvm_stats& stats) {
  out->family("kvm_requests_total", "counter", "Requests completed, by result.");
  out->sample("kvm_requests_total", "{result=\"ok\"}", stats.n_requests - stats.n_requests_failed);
  out->sample("kvm_requests_total", "{result=\"error\"}", stats.n_requests_failed);
  out->counter("kvm_appended_tokens_total", "Tokens appended, counted in each layer.",
               stats.n_tokens_appended);
  out->counter("kvm_appended_bytes_total", "Bytes of keys and values appended.",
               stats.bytes_appended);
  out->counter("kvm_attended_rows_total", "Query rows attended, counted in each layer.",
               stats.n_rows_attended);
  out->counter("kvm_keys_present_total", "Keys visible to attention requests.", stats.keys_present);
  out->counter("kvm_keys_read_total", "Of these, keys that were read.", stats.keys_read);
  out->counter("kvm_read_bytes_total", "Bytes of keys and values that attention read.",
               stats.bytes_read);
  out->seconds("kvm_busy_seconds_total", "counter", "Time of all computing threads at work.",
               stats.busy_ns);
}

}  // namespace

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

std::string stats_text(const Service& service) {
  const kvm_stats stats = service_stats(service);
  Writer out;
  const std::string build =
      fmt::format("{{version=\"{}.{}.{}\",isa=\"{}\"}}", KVM_VERSION_MAJOR, KVM_VERSION_MINOR,
                  KVM_VERSION_PATCH, service.engine->isa());
  out.gauge("kvm_build_info", "Always 1; its labels tell what runs.", 1, build.c_str());
  out.seconds("kvm_uptime_seconds", "gauge", "Time since the start.", stats.uptime_ns);
  out.gauge("kvm_threads", "Threads that compute.", service.engine->n_threads());
  out.gauge("kvm_clients", "Clients connected.", stats.n_clients);
  out.counter("kvm_connections_total", "Clients that have connected.", stats.n_clients_total);
  out.counter("kvm_protocol_errors_total", "Clients closed for breaking the protocol.",
              stats.n_protocol_errors);
  out.gauge("kvm_queues", "Queues of all clients.", service.n_queues);
  out.gauge("kvm_arena_bytes", "Memory of arenas of all clients.", service.arena_bytes);
  out.gauge("kvm_arena_capacity_bytes", "Hard cap of kvm_arena_bytes.",
            service.limits.arena_capacity_bytes);
  out.gauge("kvm_spaces", "Spaces registered.", stats.n_spaces);
  out.gauge("kvm_sequences", "Sequences of all clients.", stats.n_sequences);
  write_memory(&out, stats);
  write_requests(&out, stats);
  out.counter("kvm_dispatcher_sleeps_total", "Times the dispatcher has slept.", service.n_sleeps);
  out.counter("kvm_eventfd_notifications_total", "Completion eventfds written.",
              service.n_notifications);
  return out.take();
}

}  // namespace kvm::daemon
