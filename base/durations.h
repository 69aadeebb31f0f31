// SPDX-License-Identifier: Apache-2.0
// How long the requests of a client took, counted in buckets a factor of two apart: the same bytes
// for each client, whatever it asks. kvm_client_entry.n_by_duration has them for all to read.
//
// Threads: values.
#ifndef KVM_BASE_DURATIONS_H_
#define KVM_BASE_DURATIONS_H_

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "kvm.h"

namespace kvm {

// LIMIT: from below a microsecond to 4 s, above which a quantile tells no more than "long".
inline constexpr size_t kDurationBuckets = 24;
static_assert(kDurationBuckets * sizeof(uint64_t) == sizeof(kvm_client_entry::n_by_duration));

// Bucket i has what is below 2^i microseconds and in no bucket before; the last has the rest.
using DurationCounts = std::array<uint64_t, kDurationBuckets>;

constexpr size_t duration_bucket(uint64_t ns) {
  return std::min<size_t>(static_cast<size_t>(std::bit_width(ns / 1000)), kDurationBuckets - 1);
}
// What everything in the bucket is below; of the last, what everything in it is not below.
constexpr uint64_t duration_bound_ns(size_t bucket) {
  return uint64_t{1000} << std::min(bucket, kDurationBuckets - 2);
}

}  // namespace kvm

#endif  // KVM_BASE_DURATIONS_H_
