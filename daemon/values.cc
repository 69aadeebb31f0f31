// SPDX-License-Identifier: Apache-2.0
#include "daemon/values.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cmath>

#include "base/size_text.h"

namespace kvm::daemon {
uint64_t Size::resolve(uint64_t whole_bytes) const {
  if (!is_share) {
    return bytes;
  }
  return static_cast<uint64_t>(static_cast<double>(whole_bytes) * percent / 100.0);
}

std::optional<uint64_t> parse_integer(std::string_view text) {
  uint64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) {
    return std::nullopt;
  }
  return value;
}

std::optional<bool> parse_bool(std::string_view text) {
  if (text == "true" || text == "yes" || text == "on" || text == "1") {
    return true;
  }
  if (text == "false" || text == "no" || text == "off" || text == "0") {
    return false;
  }
  return std::nullopt;
}

std::optional<uint32_t> parse_octal(std::string_view text) {
  uint32_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value, 8);
  if (error != std::errc() || stop != end) {
    return std::nullopt;
  }
  return value;
}

std::optional<Size> parse_size(std::string_view text) {
  if (!text.ends_with('%')) {
    const Result<uint64_t> bytes = parse_bytes(text);
    return bytes.is_ok() ? std::optional<Size>(Size{.bytes = bytes.value()}) : std::nullopt;
  }
  text.remove_suffix(1);
  if (text.ends_with(' ')) {
    text.remove_suffix(1);
  }
  double percent = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, percent, std::chars_format::fixed);
  const bool is_share = error == std::errc() && stop == end && percent >= 0 && percent <= 100;
  return is_share && !std::signbit(percent)
             ? std::optional<Size>(Size{.is_share = true, .percent = percent})
             : std::nullopt;
}

std::string format_bytes(uint64_t bytes) {
  constexpr std::array<const char*, 7> kNames = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1023.5 && unit + 1 < kNames.size()) {
    value /= 1024;
    ++unit;
  }
  value = std::round(value * 10) / 10;
  const int digits = value == std::floor(value) || value >= 100 ? 0 : 1;
  return fmt::format("{:.{}f} {}", value, digits, kNames[unit]);
}

}  // namespace kvm::daemon
