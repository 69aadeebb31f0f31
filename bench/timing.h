// SPDX-License-Identifier: Apache-2.0
// The clock and the order statistics of every benchmark.
#ifndef KVM_BENCH_TIMING_H_
#define KVM_BENCH_TIMING_H_

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

namespace kvm::bench {

inline double now_s() {
  const auto since_epoch = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(since_epoch).count();
}

// 0 of nothing, here and below.
inline double median(std::vector<double> values) {
  if (values.empty()) {
    return 0;
  }
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

// p from 0 to 1; the nearest value.
inline double percentile(std::vector<double> values, double p) {
  if (values.empty()) {
    return 0;
  }
  const auto index = static_cast<size_t>(p * static_cast<double>(values.size() - 1) + 0.5);
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(index),
                   values.end());
  return values[index];
}

}  // namespace kvm::bench

#endif  // KVM_BENCH_TIMING_H_
