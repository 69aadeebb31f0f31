// SPDX-License-Identifier: Apache-2.0
// Histograms of the service: out of Prometheus' text, as kvm_get_stats_text gives it, and of the
// list of clients. Any text may come: what is no line of a series is skipped.
//
// Threads: pure functions.
#ifndef KVM_TOOLS_KVMCTL_SERIES_H_
#define KVM_TOOLS_KVMCTL_SERIES_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "kvm.h"

namespace kvm::tools {

// Name with labels -> value, as the lines stand.
using Series = std::map<std::string, double, std::less<>>;

// A Bucket is one of a histogram.
struct Bucket {
  double bound = 0;
  double below = 0;  // how many are up to it
};

// Those whose names begin with `prefix`.
Series read_series(std::string_view text, std::string_view prefix);

// Of a name with its labels; 0: there is none.
double value_of(const Series& series, const std::string& name);
uint64_t count_of(const Series& series, const std::string& name);

// Buckets whose names with labels are `prefix`, which ends in le=", and a bound; in the order of
// bounds.
std::vector<Bucket> read_buckets(const Series& series, const std::string& prefix);

// The value that `share` of all are below; 0 where there are none. Between the bounds of a bucket
// values count as spread evenly over the logarithm.
double quantile(const std::vector<Bucket>& buckets, double share);

// Durations of all requests but null ones, by kvm_request_duration_seconds.
std::vector<Bucket> read_durations(std::string_view text);
// Returns durations of a client's requests, by kvm_client_entry.n_by_duration.
std::vector<Bucket> client_durations(const kvm_client_entry& client);
// Returns what has been added between two looks at the same histogram.
std::vector<Bucket> added_between(const std::vector<Bucket>& before,
                                  const std::vector<Bucket>& after);

}  // namespace kvm::tools

#endif  // KVM_TOOLS_KVMCTL_SERIES_H_
