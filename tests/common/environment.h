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

}  // namespace kvm::testing

#endif  // KVM_TESTS_COMMON_ENVIRONMENT_H_
