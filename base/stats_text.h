// SPDX-License-Identifier: Apache-2.0
// Counters in Prometheus' text format: prefix kvm_, base units, every series present from the
// start. docs/operations.md lists them.
//
// Threads: values.
#ifndef KVM_BASE_STATS_TEXT_H_
#define KVM_BASE_STATS_TEXT_H_

#include <cstdint>
#include <string>
#include <utility>

#include "kvm.h"

namespace kvm {

// A text under construction. Names, help and labels ("{tier=\"dram\"}", or "") are used as they
// are.
class StatsText {
 public:
  void gauge(const char* name, const char* help, uint64_t value, const char* labels = "");
  void counter(const char* name, const char* help, uint64_t value, const char* labels = "");
  // Times in seconds, from nanoseconds.
  void gauge_seconds(const char* name, const char* help, uint64_t value_ns);
  void counter_seconds(const char* name, const char* help, uint64_t value_ns);
  // Another sample of the series written last.
  void sample(const char* name, uint64_t value, const char* labels);
  // Begins a series whose samples follow: a counter that is no whole number, or a histogram, whose
  // samples have the name with _bucket, _sum and _count.
  void real_counter(const char* name, const char* help) { family(name, "counter", help); }
  void histogram(const char* name, const char* help) { family(name, "histogram", help); }
  void real_sample(const char* name, double value, const char* labels);

  std::string take() { return std::move(text_); }

 private:
  void family(const char* name, const char* type, const char* help);
  void seconds(const char* name, uint64_t value_ns);

  std::string text_;
};

// The series of kvm_stats, which a daemon and an engine in the caller's process share.
void write_stats(const kvm_stats& stats, StatsText* out);

}  // namespace kvm

#endif  // KVM_BASE_STATS_TEXT_H_
