// SPDX-License-Identifier: Apache-2.0
// What the environment says of how much a test does.
#ifndef KVM_TESTS_COMMON_ENVIRONMENT_H_
#define KVM_TESTS_COMMON_ENVIRONMENT_H_

#include <cstdint>
#include <cstdlib>

namespace kvm::testing {

inline uint64_t number_from_environment(const char* name, uint64_t fallback) {
  const char* text = std::getenv(name);
  return text == nullptr ? fallback : std::strtoull(text, nullptr, 10);
}

// How much of a volume (seeds, rounds, heads) a test takes: less by day, all of it where
// KVM_NIGHTLY is set, as `./dev nightly volume` does for the tests labelled so.
inline uint64_t by_day(uint64_t amount, uint64_t at_night) {
  return std::getenv("KVM_NIGHTLY") == nullptr ? amount : at_night;
}

}  // namespace kvm::testing

#endif  // KVM_TESTS_COMMON_ENVIRONMENT_H_
