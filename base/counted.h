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

// "layer 7", "layers 7 to 9": what has the n numbers from `first`; of no numbers it names `first`.
inline std::string numbered(uint64_t first, uint64_t n, std::string_view noun) {
  if (n <= 1) {
    return std::string(noun) + ' ' + std::to_string(first);
  }
  return std::string(noun) + "s " + std::to_string(first) + " to " + std::to_string(first + n - 1);
}

}  // namespace kvm

#endif  // KVM_BASE_COUNTED_H_
