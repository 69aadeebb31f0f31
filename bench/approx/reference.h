// SPDX-License-Identifier: Apache-2.0
// Attention in fp64 on the stored values, over all keys or some: what errors are measured against.
//
// Threads: pure functions.
#ifndef KVM_BENCH_APPROX_REFERENCE_H_
#define KVM_BENCH_APPROX_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "bench/approx/data.h"

namespace kvm::bench {

// Logits of one query set over the tokens that it sees: [group][n].
struct Logits {
  uint64_t n = 0;
  std::vector<double> values;
  std::span<const double> of(uint32_t g) const { return {values.data() + g * n, n}; }
};
Logits compute_logits(const HeadData& head, uint32_t set);

// A state, as attention returns it: o [group][dim], lse [group].
struct Answer {
  std::vector<double> o;
  std::vector<double> lse;
};
Answer attend_all(const HeadData& head, const Logits& logits);

// One head of the group over some keys: writes o [dim], returns lse. log_weights: empty, or one for
// each id, added to the logits. No keys: 0 and minus infinity.
double attend_some(const HeadData& head, std::span<const double> logits,
                   std::span<const uint64_t> ids, std::span<const double> log_weights, double* o);

// |a - b| / |b| over dim numbers.
template <typename T>
double relative_error(const T* a, const double* b, uint32_t dim) {
  double difference = 0;
  double norm = 0;
  for (uint32_t j = 0; j < dim; ++j) {
    difference += (a[j] - b[j]) * (a[j] - b[j]);
    norm += b[j] * b[j];
  }
  return std::sqrt(difference / std::max(norm, 1e-300));
}

}  // namespace kvm::bench

#endif  // KVM_BENCH_APPROX_REFERENCE_H_
