// SPDX-License-Identifier: Apache-2.0
// ReadRates say how long a slow tier takes for reads, many of which are in flight at a time. Who
// may choose between all pages in order and some of them that lie apart goes by them.
//
//   in order   bytes / bytes_per_s
//   apart      the same, and alone_ns for each page: what its transfer takes besides its bytes
#ifndef KVM_TIERS_READ_RATES_H_
#define KVM_TIERS_READ_RATES_H_

#include <cstdint>

namespace kvm::tiers {

struct ReadRates {
  // Of an NVMe drive of which nothing was measured yet: below most, so that neither looks free.
  double bytes_per_s = 2e9;
  double alone_ns = 10'000;

  double in_order_ns(uint64_t size_bytes) const {
    return static_cast<double>(size_bytes) / bytes_per_s * 1e9;
  }
  double apart_ns(uint64_t n_pages, uint64_t size_bytes) const {
    return in_order_ns(size_bytes) + static_cast<double>(n_pages) * alone_ns;
  }
};

}  // namespace kvm::tiers

#endif  // KVM_TIERS_READ_RATES_H_
