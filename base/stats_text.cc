// SPDX-License-Identifier: Apache-2.0
#include "base/stats_text.h"

#include <cstdio>

namespace kvm {

namespace {

constexpr const char* kDram = "{tier=\"dram\"}";
constexpr uint64_t kNsPerSecond = 1'000'000'000;
constexpr size_t kFractionDigits = 9;

void write_memory(const kvm_stats& stats, StatsText* out) {
  out->gauge("kvm_tier_used_bytes", "Physical memory that holds keys and values.",
             stats.host_used_bytes, kDram);
  out->gauge("kvm_tier_capacity_bytes", "Hard cap of kvm_tier_used_bytes.",
             stats.host_capacity_bytes, kDram);
  out->gauge("kvm_tier_peak_bytes", "Largest value of kvm_tier_used_bytes so far.",
             stats.host_peak_bytes, kDram);
  out->gauge("kvm_tier_page_bytes", "Bytes of pages in use; the rest of used is room in extents.",
             stats.host_page_bytes, kDram);
  out->gauge("kvm_pages", "Pages in use, each counted once.", stats.n_pages);
  out->gauge("kvm_away_pages", "Of these, pages in a slower tier than memory.", stats.n_pages_away);
  out->gauge("kvm_away_bytes", "Bytes of pages in a slower tier than memory.", stats.away_bytes);
  out->gauge("kvm_index_bytes", "Memory of indexes.", stats.index_bytes);
  out->counter("kvm_indexed_blocks_total", "Blocks of 64 keys of a kv head that were indexed.",
               stats.n_index_blocks);
  out->counter("kvm_refused_index_blocks_total", "Blocks that found no memory for their index.",
               stats.n_index_refused);
  out->counter("kvm_dropped_index_blocks_total", "Indexed blocks that made way for pages.",
               stats.n_index_dropped);
  out->gauge("kvm_observed_bytes", "Memory of observed queries and attention sums.",
             stats.observed_bytes);
  out->counter("kvm_dropped_pages_total", "Pages dropped by policies.", stats.n_pages_dropped);
  out->counter("kvm_copied_pages_total", "Pages copied because two sequences shared them.",
               stats.n_pages_copied);
  out->counter("kvm_moved_pages_total", "Pages moved so that emptied memory can be given back.",
               stats.n_pages_moved);
}

void write_requests(const kvm_stats& stats, StatsText* out) {
  out->counter("kvm_requests_total", "Requests completed, by result.",
               stats.n_requests - stats.n_requests_failed, "{result=\"ok\"}");
  out->sample("kvm_requests_total", stats.n_requests_failed, "{result=\"error\"}");
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
  out->counter_seconds("kvm_busy_seconds_total", "Time of all computing threads at work.",
                       stats.busy_ns);
}

}  // namespace

void StatsText::family(const char* name, const char* type, const char* help) {
  text_ += std::string("# HELP ") + name + " " + help + "\n# TYPE " + name + " " + type + "\n";
}

void StatsText::sample(const char* name, uint64_t value, const char* labels) {
  text_ += std::string(name) + labels + " " + std::to_string(value) + "\n";
}

void StatsText::real_sample(const char* name, double value, const char* labels) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", value);
  text_ += std::string(name) + labels + " " + text + "\n";
}

void StatsText::seconds(const char* name, uint64_t value_ns) {
  std::string fraction = std::to_string(value_ns % kNsPerSecond);
  fraction.insert(0, kFractionDigits - fraction.size(), '0');
  text_ += std::string(name) + " " + std::to_string(value_ns / kNsPerSecond) + "." + fraction;
  text_ += '\n';
}

void StatsText::gauge(const char* name, const char* help, uint64_t value, const char* labels) {
  family(name, "gauge", help);
  sample(name, value, labels);
}

void StatsText::counter(const char* name, const char* help, uint64_t value, const char* labels) {
  family(name, "counter", help);
  sample(name, value, labels);
}

void StatsText::gauge_seconds(const char* name, const char* help, uint64_t value_ns) {
  family(name, "gauge", help);
  seconds(name, value_ns);
}

void StatsText::counter_seconds(const char* name, const char* help, uint64_t value_ns) {
  family(name, "counter", help);
  seconds(name, value_ns);
}

void write_stats(const kvm_stats& stats, StatsText* out) {
  out->gauge_seconds("kvm_uptime_seconds", "Time since the start.", stats.uptime_ns);
  out->gauge("kvm_clients", "Clients connected.", stats.n_clients);
  out->counter("kvm_connections_total", "Clients that have connected.", stats.n_clients_total);
  out->counter("kvm_protocol_errors_total", "Clients closed for breaking the protocol.",
               stats.n_protocol_errors);
  out->gauge("kvm_spaces", "Spaces registered.", stats.n_spaces);
  out->gauge("kvm_sequences", "Sequences of all clients.", stats.n_sequences);
  write_memory(stats, out);
  write_requests(stats, out);
}

}  // namespace kvm
