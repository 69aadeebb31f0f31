// SPDX-License-Identifier: Apache-2.0
// SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
#ifndef KVM_BASE_SPLITMIX_H_
#define KVM_BASE_SPLITMIX_H_

#include <cstdint>

namespace kvm {

// From state to state.
inline constexpr uint64_t kSplitMixStep = 0x9e3779b97f4a7c15;

// The finaliser: a bijection that makes a random number of a state.
constexpr uint64_t splitmix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace kvm

#endif  // KVM_BASE_SPLITMIX_H_
