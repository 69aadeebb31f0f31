// SPDX-License-Identifier: Apache-2.0
#include "base/size_text.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <string>
#include <system_error>

namespace kvm {
namespace {

struct Unit {
  std::string_view name;
  uint64_t bytes;
};
constexpr Unit kUnits[] = {
    {"", 1},
    {"B", 1},
    {"KiB", 1ull << 10},
    {"MiB", 1ull << 20},
    {"GiB", 1ull << 30},
    {"TiB", 1ull << 40},
    {"PiB", 1ull << 50},
    {"EiB", 1ull << 60},
    {"kB", 1'000},
    {"MB", 1'000'000},
    {"GB", 1'000'000'000},
    {"TB", 1'000'000'000'000},
    {"PB", 1'000'000'000'000'000},
    {"EB", 1'000'000'000'000'000'000},
};

// The digits at the begin, which are removed from it.
std::string_view take_digits(std::string_view* text) {
  size_t n = 0;
  while (n < text->size() && (*text)[n] >= '0' && (*text)[n] <= '9') {
    ++n;
  }
  const std::string_view digits = text->substr(0, n);
  text->remove_prefix(n);
  return digits;
}

// 0.digits
double fraction_of(std::string_view digits) {
  double value = 0;
  for (size_t i = digits.size(); i-- > 0;) {
    value = (value + (digits[i] - '0')) / 10;
  }
  return value;
}

Status no_size(std::string_view text) {
  return Status(KVM_ERR_INVALID,
                std::string("'").append(text) +
                    "' is no size; allowed is a number such as 20 or 1.5 with a unit: B, KiB, MiB, "
                    "GiB, TiB, PiB, EiB, kB, MB, GB, TB, PB, EB, or none for bytes");
}

Status too_large(std::string_view text) {
  return Status(KVM_ERR_INVALID, std::string("'").append(text) +
                                     "' is too large for a size; allowed are sizes below 8EiB");
}

}  // namespace

Result<uint64_t> parse_bytes(std::string_view text) {
  std::string_view rest = text;
  const std::string_view digits = take_digits(&rest);
  std::string_view decimals;
  if (rest.starts_with('.')) {
    rest.remove_prefix(1);
    decimals = take_digits(&rest);
    if (decimals.empty()) {
      return no_size(text);
    }
  }
  if (rest.size() > 1 && rest.front() == ' ') {
    rest.remove_prefix(1);
  }
  const auto* const unit = std::find_if(std::begin(kUnits), std::end(kUnits),
                                        [&](const Unit& known) { return known.name == rest; });
  if (digits.empty() || unit == std::end(kUnits)) {
    return no_size(text);
  }
  uint64_t whole = 0;
  const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), whole);
  if (parsed.ec != std::errc() || whole > kMaxTextBytes / unit->bytes) {
    return too_large(text);
  }
  const auto part =
      static_cast<uint64_t>(std::llround(fraction_of(decimals) * static_cast<double>(unit->bytes)));
  const uint64_t bytes = whole * unit->bytes + part;
  return bytes > kMaxTextBytes ? Result<uint64_t>(too_large(text)) : Result<uint64_t>(bytes);
}

}  // namespace kvm
