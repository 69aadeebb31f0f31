// SPDX-License-Identifier: Apache-2.0
#include "daemon/request_stats.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

namespace kvm::daemon {
namespace {

constexpr const char* kDuration = "kvm_request_duration_seconds";

void write_duration(const char* verb, const DurationHistogram& histogram, StatsText* out) {
  const std::string bucket = fmt::format("{}_bucket", kDuration);
  uint64_t below = 0;
  for (size_t i = 0; i < histogram.buckets.size(); ++i) {
    below += histogram.buckets[i];
    const std::string bound =
        i < kDurationBoundsNs.size()
            ? fmt::format("{:g}", static_cast<double>(kDurationBoundsNs[i]) * 1e-9)
            : "+Inf";
    out->sample(bucket.c_str(), below,
                fmt::format("{{verb=\"{}\",le=\"{}\"}}", verb, bound).c_str());
  }
  const std::string labels = fmt::format("{{verb=\"{}\"}}", verb);
  out->real_sample(fmt::format("{}_sum", kDuration).c_str(),
                   static_cast<double>(histogram.sum_ns) * 1e-9, labels.c_str());
  out->sample(fmt::format("{}_count", kDuration).c_str(), below, labels.c_str());
}

void write_modes(const char* name, const char* help, const RequestStats& stats,
                 uint64_t AttendModeStats::*value, StatsText* out) {
  for (size_t i = 0; i < kAttendModeNames.size(); ++i) {
    const std::string labels = fmt::format("{{mode=\"{}\"}}", kAttendModeNames[i]);
    if (i == 0) {
      out->counter(name, help, stats.modes[i].*value, labels.c_str());
    } else {
      out->sample(name, stats.modes[i].*value, labels.c_str());
    }
  }
}

}  // namespace

void DurationHistogram::add(uint64_t ns) {
  const auto* bound = std::lower_bound(kDurationBoundsNs.begin(), kDurationBoundsNs.end(), ns);
  ++buckets[static_cast<size_t>(bound - kDurationBoundsNs.begin())];
  sum_ns += ns;
}

void RequestStats::add(RequestVerb verb, const RequestResult& result) {
  durations[static_cast<size_t>(verb)].add(result.service_ns);
  const bool attends = verb == RequestVerb::kAttend || verb == RequestVerb::kStep;
  const size_t mode = result.mode - KVM_MODE_EXACT;
  if (attends && result.status.is_ok() && mode < modes.size()) {
    ++modes[mode].n_requests;
    modes[mode].keys_present += result.keys_present;
    modes[mode].keys_read += result.keys_read;
    n_not_finite += result.n_not_finite;
  }
}

void write_requests(const RequestStats& stats, StatsText* out) {
  out->histogram(kDuration, "Time from a request's acceptance to its completion.");
  for (size_t i = 0; i < kRequestVerbNames.size(); ++i) {
    write_duration(kRequestVerbNames[i], stats.durations[i], out);
  }
  write_modes("kvm_attend_requests_total", "Requests that attended, by the mode most rows had.",
              stats, &AttendModeStats::n_requests, out);
  write_modes("kvm_attend_keys_present_total", "Keys visible to these requests.", stats,
              &AttendModeStats::keys_present, out);
  write_modes("kvm_attend_keys_read_total", "Of these, keys that were read.", stats,
              &AttendModeStats::keys_read, out);
  out->counter("kvm_attend_not_finite_rows_total",
               "Rows of q heads answered NaN: a query, key or value was not finite.",
               stats.n_not_finite);
}

}  // namespace kvm::daemon
