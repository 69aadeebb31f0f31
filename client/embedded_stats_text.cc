// SPDX-License-Identifier: Apache-2.0
#include "client/embedded_stats_text.h"

#include <cinttypes>
#include <cstdint>
#include <cstdio>

namespace kvm::client {

namespace {

struct Series {
  const char* name;
  const char* type;
  const char* help;
  const char* labels;
  uint64_t value;
  bool is_time;  // nanoseconds, written in seconds
};

constexpr const char* kDram = "{tier=\"dram\"}";
constexpr const char* kGauge = "gauge";
constexpr const char* kCounter = "counter";

void write(const Series& series, bool with_family, std::string* text) {
  if (with_family) {
    *text += std::string("# HELP ") + series.name + " " + series.help + "\n# TYPE " + series.name +
             " " + series.type + "\n";
  }
  char value[40];
  if (series.is_time) {
    std::snprintf(value, sizeof(value), "%" PRIu64 ".%09" PRIu64, series.value / 1'000'000'000u,
                  series.value % 1'000'000'000u);
  } else {
    std::snprintf(value, sizeof(value), "%" PRIu64, series.value);
  }
  *text += std::string(series.name) + series.labels + " " + value + "\n";
}

}  // namespace

std::string embedded_stats_text(const kvm_stats& s) {
  const uint64_t n_ok = s.n_requests - s.n_requests_failed;
  const Series all[] = {
      {"kvm_uptime_seconds", kGauge, "Time since the start.", "", s.uptime_ns, true},
      {"kvm_clients", kGauge, "Clients connected.", "", s.n_clients, false},
      {"kvm_spaces", kGauge, "Spaces registered.", "", s.n_spaces, false},
      {"kvm_sequences", kGauge, "Sequences of all clients.", "", s.n_sequences, false},
      {"kvm_tier_used_bytes", kGauge, "Physical memory that holds keys and values.", kDram,
       s.host_used_bytes, false},
      {"kvm_tier_capacity_bytes", kGauge, "Hard cap of kvm_tier_used_bytes.", kDram,
       s.host_capacity_bytes, false},
      {"kvm_tier_peak_bytes", kGauge, "Largest value of kvm_tier_used_bytes so far.", kDram,
       s.host_peak_bytes, false},
      {"kvm_tier_page_bytes", kGauge, "Bytes of pages in use; the rest of used is room in extents.",
       kDram, s.host_page_bytes, false},
      {"kvm_pages", kGauge, "Pages in use, each counted once.", "", s.n_pages, false},
      {"kvm_index_bytes", kGauge, "Memory of indexes.", "", s.index_bytes, false},
      {"kvm_observed_bytes", kGauge, "Memory of observed queries and attention sums.", "",
       s.observed_bytes, false},
      {"kvm_dropped_pages_total", kCounter, "Pages dropped by policies.", "", s.n_pages_dropped,
       false},
      {"kvm_copied_pages_total", kCounter, "Pages copied because two sequences shared them.", "",
       s.n_pages_copied, false},
      {"kvm_requests_total", kCounter, "Requests completed, by result.", "{result=\"ok\"}", n_ok,
       false},
      {"kvm_requests_total", kCounter, "", "{result=\"error\"}", s.n_requests_failed, false},
      {"kvm_appended_tokens_total", kCounter, "Tokens appended, counted in each layer.", "",
       s.n_tokens_appended, false},
      {"kvm_appended_bytes_total", kCounter, "Bytes of keys and values appended.", "",
       s.bytes_appended, false},
      {"kvm_attended_rows_total", kCounter, "Query rows attended, counted in each layer.", "",
       s.n_rows_attended, false},
      {"kvm_keys_present_total", kCounter, "Keys visible to attention requests.", "",
       s.keys_present, false},
      {"kvm_keys_read_total", kCounter, "Of these, keys that were read.", "", s.keys_read, false},
      {"kvm_read_bytes_total", kCounter, "Bytes of keys and values that attention read.", "",
       s.bytes_read, false},
      {"kvm_busy_seconds_total", kCounter, "Time of all computing threads at work.", "", s.busy_ns,
       true},
  };
  std::string text;
  for (const Series& series : all) {
    write(series, series.help[0] != '\0', &text);
  }
  return text;
}

}  // namespace kvm::client
