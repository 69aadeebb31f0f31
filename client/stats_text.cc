// SPDX-License-Identifier: Apache-2.0
#include "client/stats_text.h"

#include <cstdint>

namespace kvm::client {

namespace {

struct Metric {
  const char* name;
  const char* type;
  const char* help;
  uint64_t value;
};

}  // namespace

const char* status_name(kvm_status status) {
#define KVM_STATUS_CASE(name) \
  case name:                  \
    return #name
  switch (status) {
    KVM_STATUS_CASE(KVM_OK);
    KVM_STATUS_CASE(KVM_ERR_INVALID);
    KVM_STATUS_CASE(KVM_ERR_NOT_FOUND);
    KVM_STATUS_CASE(KVM_ERR_EXISTS);
    KVM_STATUS_CASE(KVM_ERR_AGAIN);
    KVM_STATUS_CASE(KVM_ERR_TIMEOUT);
    KVM_STATUS_CASE(KVM_ERR_BUSY);
    KVM_STATUS_CASE(KVM_ERR_HOLE);
    KVM_STATUS_CASE(KVM_ERR_PARTIAL);
    KVM_STATUS_CASE(KVM_ERR_STALE);
    KVM_STATUS_CASE(KVM_ERR_NO_MEMORY);
    KVM_STATUS_CASE(KVM_ERR_NO_SPACE);
    KVM_STATUS_CASE(KVM_ERR_QUOTA);
    KVM_STATUS_CASE(KVM_ERR_LIMIT);
    KVM_STATUS_CASE(KVM_ERR_IO);
    KVM_STATUS_CASE(KVM_ERR_CORRUPT);
    KVM_STATUS_CASE(KVM_ERR_LOST);
    KVM_STATUS_CASE(KVM_ERR_DISCONNECTED);
    KVM_STATUS_CASE(KVM_ERR_PROTOCOL);
    KVM_STATUS_CASE(KVM_ERR_VERSION);
    KVM_STATUS_CASE(KVM_ERR_PERMISSION);
    KVM_STATUS_CASE(KVM_ERR_FORKED);
    KVM_STATUS_CASE(KVM_ERR_UNSUPPORTED);
    KVM_STATUS_CASE(KVM_ERR_DEVICE);
    KVM_STATUS_CASE(KVM_ERR_CANCELLED);
    KVM_STATUS_CASE(KVM_ERR_DEADLINE);
    KVM_STATUS_CASE(KVM_ERR_ACCURACY);
    KVM_STATUS_CASE(KVM_ERR_INTERNAL);
    default:
      return "KVM_ERR_UNKNOWN";
  }
#undef KVM_STATUS_CASE
}

std::string stats_text(const kvm_stats& s) {
  const Metric metrics[] = {
      {"kvm_clients", "gauge", "Connected clients.", s.n_clients},
      {"kvm_uptime_nanoseconds", "gauge", "Time since the start of the service.", s.uptime_ns},
      {"kvm_spaces", "gauge", "Registered spaces.", s.n_spaces},
      {"kvm_sequences", "gauge", "Sequences of all clients.", s.n_sequences},
      {"kvm_pages", "gauge", "Pages in use, each counted once.", s.n_pages},
      {"kvm_host_used_bytes", "gauge", "Physical KV memory in use.", s.host_used_bytes},
      {"kvm_host_capacity_bytes", "gauge", "Cap of KV memory.", s.host_capacity_bytes},
      {"kvm_host_peak_bytes", "gauge", "Largest KV memory so far.", s.host_peak_bytes},
      {"kvm_host_page_bytes", "gauge", "KV memory in pages in use.", s.host_page_bytes},
      {"kvm_index_bytes", "gauge", "Memory of indexes.", s.index_bytes},
      {"kvm_observed_bytes", "gauge", "Memory kept from observations.", s.observed_bytes},
      {"kvm_requests_total", "counter", "Requests completed.", s.n_requests},
      {"kvm_requests_failed_total", "counter", "Requests that failed.", s.n_requests_failed},
      {"kvm_tokens_appended_total", "counter", "Tokens appended, per layer.", s.n_tokens_appended},
      {"kvm_rows_attended_total", "counter", "Query rows attended, per layer.", s.n_rows_attended},
      {"kvm_keys_present_total", "counter", "Keys visible to requests.", s.keys_present},
      {"kvm_keys_read_total", "counter", "Keys read for them.", s.keys_read},
      {"kvm_bytes_read_total", "counter", "Bytes of K and V read.", s.bytes_read},
      {"kvm_bytes_appended_total", "counter", "Bytes of K and V appended.", s.bytes_appended},
      {"kvm_pages_dropped_total", "counter", "Pages dropped by policies.", s.n_pages_dropped},
      {"kvm_pages_copied_total", "counter", "Pages copied on write.", s.n_pages_copied},
      {"kvm_clients_total", "counter", "Connections since the start.", s.n_clients_total},
      {"kvm_protocol_errors_total", "counter", "Clients closed for breaking the protocol.",
       s.n_protocol_errors},
      {"kvm_busy_nanoseconds_total", "counter", "Busy time of all compute threads.", s.busy_ns},
  };
  std::string text;
  for (const Metric& metric : metrics) {
    const std::string name = metric.name;
    text += "# HELP " + name + " " + metric.help + "\n# TYPE " + name + " " + metric.type + "\n" +
            name + " " + std::to_string(metric.value) + "\n";
  }
  return text;
}

}  // namespace kvm::client
