// SPDX-License-Identifier: Apache-2.0
// Amounts of memory as people write them, the same for kvmd's options and for kvmctl.
//
// Threads: a pure function.
#ifndef KVM_BASE_SIZE_TEXT_H_
#define KVM_BASE_SIZE_TEXT_H_

#include <cstdint>
#include <string_view>

#include "base/status.h"

namespace kvm {

// LIMIT: an amount of memory fits into a signed number of 64 bits, which system calls take.
inline constexpr uint64_t kMaxTextBytes = (1ull << 63) - 1;

// "4096", "1.5GiB", "64 MB": digits, perhaps a fraction, perhaps a space, and a unit: B, KiB to EiB
// (powers of 1024), kB to EB (powers of 1000), none for bytes. Rounded to the nearest byte.
// Fails: INVALID, with a sentence that names the text and what is allowed.
Result<uint64_t> parse_bytes(std::string_view text);

}  // namespace kvm

#endif  // KVM_BASE_SIZE_TEXT_H_
