// SPDX-License-Identifier: Apache-2.0
// The findings of audits of approximate answers, and their series for monitoring
// (base/stats_text.h).
// docs/operations.md lists the series.
//
// Threads: values.
#ifndef KVM_BASE_AUDIT_STATS_H_
#define KVM_BASE_AUDIT_STATS_H_

#include <array>
#include <cstdint>

#include "base/stats_text.h"

namespace kvm {

// Relative errors of o up to kAuditBounds[i], and above the one before; the last: the rest.
inline constexpr double kAuditBounds[] = {0.0001, 0.00015, 0.0002, 0.0003, 0.0005, 0.0007, 0.001,
                                          0.0015, 0.002,   0.003,  0.005,  0.007,  0.01,   0.015,
                                          0.02,   0.03,    0.05,   0.07,   0.1,    0.15,   0.2,
                                          0.3,    0.5,     0.7,    1};
inline constexpr size_t kAuditBuckets = sizeof(kAuditBounds) / sizeof(kAuditBounds[0]) + 1;

struct ErrorHistogram {
  std::array<uint64_t, kAuditBuckets> buckets{};
  uint64_t count = 0;
  double sum = 0;

  void add(double error);
};

// Rows, here and below: (query row, q head).
struct AuditedMode {
  uint64_t n_answers = 0;
  uint64_t n_barred = 0;    // rows that came with an error bar
  uint64_t n_over = 0;      // of them, those whose true error was larger
  double allowed_over = 0;  // sum of delta over rows with a bar: what n_over should not exceed
  ErrorHistogram true_error;
  ErrorHistogram estimated_error;  // of rows with a bar
};

struct AuditStats {
  static constexpr size_t kModes = 3;
  static constexpr const char* kModeNames[kModes] = {"topk", "sampled", "verified"};

  uint64_t every = 0;       // one of so many answers is audited; 0: none
  uint64_t n_busy = 0;      // answers that were due and found the queue full
  uint64_t n_given_up = 0;  // audits that made way: their memory was wanted, or their client left
  uint64_t n_unfit = 0;     // answers that cannot be computed again (log weights)
  std::array<AuditedMode, kModes> modes{};
};

void write_audit(const AuditStats& stats, StatsText* out);

}  // namespace kvm

#endif  // KVM_BASE_AUDIT_STATS_H_
