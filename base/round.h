// SPDX-License-Identifier: Apache-2.0
// Whole units of a number. REQUIRES: unit > 0, and the result fits.
#ifndef KVM_BASE_ROUND_H_
#define KVM_BASE_ROUND_H_

#include <cstdint>

namespace kvm {

constexpr uint64_t div_up(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit; }
constexpr uint64_t round_up(uint64_t n, uint64_t unit) { return div_up(n, unit) * unit; }

}  // namespace kvm

#endif  // KVM_BASE_ROUND_H_
