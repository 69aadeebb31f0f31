// SPDX-License-Identifier: Apache-2.0
#include "tools/kvmctl/values.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <charconv>
#include <ctime>
#include <system_error>

namespace kvm::tools {

std::string id_text(uint64_t id) { return fmt::format("{:#x}", id); }

std::string time_text(uint64_t ns) {
  const auto seconds = static_cast<std::time_t>(ns / 1'000'000'000);
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(seconds));
}

Result<uint64_t> parse_id(std::string_view text) {
  const bool is_hexadecimal = text.starts_with("0x") || text.starts_with("0X");
  const std::string_view digits = text.substr(is_hexadecimal ? 2 : 0);
  const char* end = digits.data() + digits.size();
  uint64_t id = 0;
  const auto [stop, error] = std::from_chars(digits.data(), end, id, is_hexadecimal ? 16 : 10);
  if (error == std::errc() && stop == end) {
    return id;
  }
  const bool lacks_prefix = !is_hexadecimal && !text.empty() && text.size() <= 16 &&
                            text.find_first_not_of("0123456789abcdefABCDEF") == text.npos;
  return Status(KVM_ERR_INVALID,
                fmt::format("'{}' is no id; allowed are 0x1f, as kvmctl prints it, and decimal "
                            "numbers, below 2^64{}",
                            text, lacks_prefix ? fmt::format("; did you mean 0x{}?", text) : ""));
}

Result<double> parse_seconds(std::string_view text, double min, double max) {
  const char* end = text.data() + text.size();
  double seconds = 0;
  const auto [stop, error] = std::from_chars(text.data(), end, seconds, std::chars_format::fixed);
  // NaN is in no range.
  if (error == std::errc() && stop == end && seconds >= min && seconds <= max) {
    return seconds;
  }
  return Status(KVM_ERR_INVALID,
                fmt::format("'{}' is no time; allowed are {} to {} seconds", text, min, max));
}

}  // namespace kvm::tools
