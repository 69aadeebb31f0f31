// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/crc32c.h"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace kvm::tiers {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected
// What is copied is still in the first-level cache when it is summed up.
constexpr size_t kCopyBytes = 8192;

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t word = i;
    for (int bit = 0; bit < 8; ++bit) {
      word = (word >> 1) ^ ((word & 1) != 0 ? kPolynomial : 0);
    }
    table[i] = word;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kTable = make_table();

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t by_instruction(std::span<const std::byte> bytes,
                                                          uint32_t crc) {
  const std::byte* at = bytes.data();
  size_t n = bytes.size();
  uint64_t word = ~crc;
  for (; n >= 8; at += 8, n -= 8) {
    uint64_t next = 0;
    std::memcpy(&next, at, 8);
    word = _mm_crc32_u64(word, next);
  }
  auto rest = static_cast<uint32_t>(word);
  for (; n != 0; ++at, --n) {
    rest = _mm_crc32_u8(rest, static_cast<uint8_t>(*at));
  }
  return ~rest;
}
#endif

using Function = uint32_t (*)(std::span<const std::byte>, uint32_t);

Function best() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) {
    return by_instruction;
  }
#endif
  return crc32c_by_table;
}

}  // namespace

uint32_t crc32c_by_table(std::span<const std::byte> bytes, uint32_t crc) {
  uint32_t word = ~crc;
  for (const std::byte byte : bytes) {
    word = (word >> 8) ^ kTable[(word ^ static_cast<uint32_t>(byte)) & 0xff];
  }
  return ~word;
}

uint32_t crc32c(std::span<const std::byte> bytes, uint32_t crc) {
  static const Function function = best();
  return function(bytes, crc);
}

uint32_t copy_crc32c(std::byte* to, std::span<const std::byte> from) {
  uint32_t crc = 0;
  for (size_t done = 0; done < from.size();) {
    const size_t n = std::min(kCopyBytes, from.size() - done);
    std::memcpy(to + done, from.data() + done, n);
    crc = crc32c({to + done, n}, crc);
    done += n;
  }
  return crc;
}

}  // namespace kvm::tiers
