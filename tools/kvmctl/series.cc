// SPDX-License-Identifier: Apache-2.0
#include "tools/kvmctl/series.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <limits>

#include "base/durations.h"

namespace kvm::tools {

Series read_series(std::string_view text, std::string_view prefix) {
  Series series;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const size_t space = line.rfind(' ');
    if (line.starts_with(prefix) && space != std::string_view::npos) {
      series.emplace(line.substr(0, space),
                     std::strtod(std::string(line.substr(space + 1)).c_str(), nullptr));
    }
  }
  return series;
}

double value_of(const Series& series, const std::string& name) {
  const auto found = series.find(name);
  return found == series.end() ? 0 : found->second;
}

uint64_t count_of(const Series& series, const std::string& name) {
  // Any text may stand there: what is no count is taken as the nearest one.
  constexpr double kMost = 0x1p63;
  const double value = value_of(series, name);
  return value > 0 ? static_cast<uint64_t>(std::min(value, kMost)) : 0;
}

std::vector<Bucket> read_buckets(const Series& series, const std::string& prefix) {
  std::map<double, double> sorted;
  for (auto it = series.lower_bound(prefix); it != series.end() && it->first.starts_with(prefix);
       ++it) {
    const std::string text = it->first.substr(prefix.size());
    const double bound = text.starts_with('+') ? std::numeric_limits<double>::infinity()
                                               : std::strtod(text.c_str(), nullptr);
    if (!std::isnan(bound)) {  // which has no place in an order
      sorted[bound] = it->second;
    }
  }
  std::vector<Bucket> buckets;
  for (const auto& [bound, below] : sorted) {
    buckets.push_back({bound, below});
  }
  return buckets;
}

double quantile(const std::vector<Bucket>& buckets, double share) {
  if (buckets.empty() || !(buckets.back().below > 0)) {
    return 0;
  }
  const double rank = share * buckets.back().below;
  Bucket before;
  for (const Bucket& bucket : buckets) {
    if (bucket.below >= rank && bucket.below > before.below) {
      const double part = (rank - before.below) / (bucket.below - before.below);
      if (std::isinf(bucket.bound)) {
        return before.bound;  // at least
      }
      return before.bound == 0 ? bucket.bound * part
                               : before.bound * std::pow(bucket.bound / before.bound, part);
    }
    before = bucket;
  }
  return before.bound;
}

std::vector<Bucket> read_durations(std::string_view text) {
  const Series series = read_series(text, "kvm_request_duration_seconds_bucket{");
  std::vector<Bucket> sum;
  for (const char* verb : {"append", "attend", "step", "read", "observe", "sequence"}) {
    const std::vector<Bucket> one = read_buckets(
        series, "kvm_request_duration_seconds_bucket{verb=\"" + std::string(verb) + "\",le=\"");
    sum.resize(std::max(sum.size(), one.size()));
    for (size_t i = 0; i < one.size(); ++i) {
      sum[i].bound = one[i].bound;
      sum[i].below += one[i].below;
    }
  }
  return sum;
}

std::vector<Bucket> client_durations(const kvm_client_entry& client) {
  std::vector<Bucket> buckets;
  double below = 0;
  for (size_t i = 0; i < kDurationBuckets; ++i) {
    below += static_cast<double>(client.n_by_duration[i]);
    const bool is_last = i + 1 == kDurationBuckets;
    buckets.push_back({is_last ? std::numeric_limits<double>::infinity()
                               : static_cast<double>(duration_bound_ns(i)) * 1e-9,
                       below});
  }
  return buckets;
}

std::vector<Bucket> added_between(const std::vector<Bucket>& before,
                                  const std::vector<Bucket>& after) {
  std::vector<Bucket> added = after;
  for (size_t i = 0; i < std::min(before.size(), after.size()); ++i) {
    added[i].below -= before[i].below;
  }
  return added;
}

}  // namespace kvm::tools
