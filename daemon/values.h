// SPDX-License-Identifier: Apache-2.0
// Values of options as people write them: numbers, sizes, switches, names.
//
// Threads: pure functions.  Fails: std::nullopt when the text is not exactly one such value.
#ifndef KVM_DAEMON_VALUES_H_
#define KVM_DAEMON_VALUES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kvm::daemon {

// A Size is an amount of memory: bytes, or a share of something that is known only on the machine.
struct Size {
  bool is_share = false;
  double percent = 0;  // with is_share
  uint64_t bytes = 0;  // otherwise

  // The amount in bytes when the whole is `whole_bytes`.
  uint64_t resolve(uint64_t whole_bytes) const;
};

// "17". Decimal digits only.
std::optional<uint64_t> parse_integer(std::string_view text);
// "true", "false", also "yes", "no", "on", "off", "1", "0".
std::optional<bool> parse_bool(std::string_view text);
// "0660": octal digits.
std::optional<uint32_t> parse_octal(std::string_view text);
// Parses what parse_bytes (base/size_text.h) takes, or a share: "60%". LIMIT: 0 to 100 %.
std::optional<Size> parse_size(std::string_view text);

// "12.5 GiB": three digits at most, binary units. For people, not for parsing.
std::string format_bytes(uint64_t bytes);

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_VALUES_H_
