// SPDX-License-Identifier: Apache-2.0
#include "base/audit_stats.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <string>

namespace kvm {
namespace {

// One sample of each mode.
template <typename Value>
void write_modes(const char* name, const char* help, const AuditStats& stats, StatsText* out,
                 Value value) {
  for (size_t i = 0; i < AuditStats::kModes; ++i) {
    const std::string labels = std::string("{mode=\"") + AuditStats::kModeNames[i] + "\"}";
    if (i == 0) {
      out->counter(name, help, value(stats.modes[i]), labels.c_str());
    } else {
      out->sample(name, value(stats.modes[i]), labels.c_str());
    }
  }
}

std::string bound_text(size_t bucket) {
  if (bucket >= std::size(kAuditBounds)) {
    return "+Inf";
  }
  char text[32];
  std::snprintf(text, sizeof(text), "%g", kAuditBounds[bucket]);
  return text;
}

void write_histogram(const char* name, const char* mode, const char* kind,
                     const ErrorHistogram& histogram, StatsText* out) {
  const std::string labels = std::string("mode=\"") + mode + "\",kind=\"" + kind + "\"";
  uint64_t below = 0;
  for (size_t i = 0; i < kAuditBuckets; ++i) {
    below += histogram.buckets[i];
    out->sample((std::string(name) + "_bucket").c_str(), below,
                ("{" + labels + ",le=\"" + bound_text(i) + "\"}").c_str());
  }
  out->real_sample((std::string(name) + "_sum").c_str(), histogram.sum,
                   ("{" + labels + "}").c_str());
  out->sample((std::string(name) + "_count").c_str(), histogram.count,
              ("{" + labels + "}").c_str());
}

}  // namespace

void ErrorHistogram::add(double error) {
  const auto* bound = std::lower_bound(std::begin(kAuditBounds), std::end(kAuditBounds), error);
  ++buckets[static_cast<size_t>(bound - std::begin(kAuditBounds))];
  ++count;
  sum += error;
}

void write_audit(const AuditStats& stats, StatsText* out) {
  out->gauge("kvm_audit_every", "One of so many approximate answers is audited; 0: none.",
             stats.every);
  write_modes("kvm_audit_answers_total", "Approximate answers that were computed again exactly.",
              stats, out, [](const AuditedMode& mode) { return mode.n_answers; });
  out->counter("kvm_audit_skipped_total", "Answers that were to be audited and were not.",
               stats.n_busy, "{reason=\"busy\"}");
  out->sample("kvm_audit_skipped_total", stats.n_given_up, "{reason=\"given_up\"}");
  out->sample("kvm_audit_skipped_total", stats.n_unfit, "{reason=\"unfit\"}");
  write_modes("kvm_audit_barred_rows_total", "Audited rows that came with an error bar.", stats,
              out, [](const AuditedMode& mode) { return mode.n_barred; });
  write_modes("kvm_audit_over_rows_total", "Of these, rows whose true error exceeds the bar.",
              stats, out, [](const AuditedMode& mode) { return mode.n_over; });
  out->real_counter("kvm_audit_allowed_over_rows_total",
                    "Of these, rows that may exceed it: the sum of their delta.");
  for (size_t i = 0; i < AuditStats::kModes; ++i) {
    const std::string labels = std::string("{mode=\"") + AuditStats::kModeNames[i] + "\"}";
    out->real_sample("kvm_audit_allowed_over_rows_total", stats.modes[i].allowed_over,
                     labels.c_str());
  }
  out->histogram("kvm_audit_error", "Relative errors of audited rows, true and estimated.");
  for (size_t i = 0; i < AuditStats::kModes; ++i) {
    const AuditedMode& mode = stats.modes[i];
    write_histogram("kvm_audit_error", AuditStats::kModeNames[i], "true", mode.true_error, out);
    write_histogram("kvm_audit_error", AuditStats::kModeNames[i], "estimated", mode.estimated_error,
                    out);
  }
}

}  // namespace kvm
