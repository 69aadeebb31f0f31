// SPDX-License-Identifier: Apache-2.0
// Numbers with what they count, for sentences.
//
// Threads: a pure function.
#ifndef KVM_BASE_COUNTED_H_
#define KVM_BASE_COUNTED_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace kvm {

// "1 token", "2 tokens".
inline std::string counted(uint64_t n, std::string_view noun) {
  return std::to_string(n) + ' ' + std::string(noun) + (n == 1 ? "" : "s");
}

}  // namespace kvm

#endif  // KVM_BASE_COUNTED_H_
