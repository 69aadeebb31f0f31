// SPDX-License-Identifier: Apache-2.0
// Values as kvmctl's users read and write them.
//
// Ids of sequences, clients and spaces are printed as 0x1f, in tables and in JSON (as texts: JSON's
// readers have doubles). An id on the command line is hexadecimal behind 0x, and decimal otherwise;
// hexadecimal digits without 0x are refused, for "10" could be either.
//
// Threads: pure functions.
#ifndef KVM_TOOLS_KVMCTL_VALUES_H_
#define KVM_TOOLS_KVMCTL_VALUES_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace kvm::tools {

std::string id_text(uint64_t id);
// Of nanoseconds since 1970: the time of day, in UTC.
std::string time_text(uint64_t ns);
// Fails: INVALID, with a sentence that names the text and what is allowed.
Result<uint64_t> parse_id(std::string_view text);

// "1.5", no exponent. Fails: INVALID, likewise; so do nan, inf and what lies outside of the range.
Result<double> parse_seconds(std::string_view text, double min, double max);

}  // namespace kvm::tools

#endif  // KVM_TOOLS_KVMCTL_VALUES_H_
