// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/crc32c.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace kvm::tiers {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected
// So much is copied at a time that it is still in the first-level cache when it is summed up.
constexpr size_t kCopyBytes = 6144;

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

// The instruction gives its result three steps later: three stretches are summed up side by side,
// and then put together.
constexpr size_t kStretch = 2048;

// What becomes of a sum when a stretch of zeros follows. It is linear, so four tables do.
class Zeros {
 public:
  Zeros() {
    std::array<uint32_t, 32> of_bit{};
    for (size_t bit = 0; bit < 32; ++bit) {
      uint32_t word = 1u << bit;
      for (size_t i = 0; i < kStretch; ++i) {
        word = (word >> 8) ^ kTable[word & 0xff];
      }
      of_bit[bit] = word;
    }
    for (size_t part = 0; part < 4; ++part) {
      for (size_t value = 0; value < 256; ++value) {
        for (size_t bit = 0; bit < 8; ++bit) {
          tables_[part][value] ^= (value >> bit & 1) != 0 ? of_bit[8 * part + bit] : 0;
        }
      }
    }
  }
  uint32_t after(uint32_t word) const {
    return tables_[0][word & 0xff] ^ tables_[1][word >> 8 & 0xff] ^ tables_[2][word >> 16 & 0xff] ^
           tables_[3][word >> 24];
  }

 private:
  std::array<std::array<uint32_t, 256>, 4> tables_{};
};

__attribute__((target("sse4.2"))) inline uint64_t step(const std::byte* from, uint64_t word) {
  uint64_t next = 0;
  std::memcpy(&next, from, sizeof(next));
  return _mm_crc32_u64(word, next);
}

__attribute__((target("sse4.2"))) uint32_t by_instruction(std::span<const std::byte> bytes,
                                                          uint32_t crc) {
  static const Zeros zeros;
  const std::byte* from = bytes.data();
  size_t n = bytes.size();
  uint64_t word = ~crc;
  for (; n >= 3 * kStretch; from += 3 * kStretch, n -= 3 * kStretch) {
    uint64_t second = 0;
    uint64_t third = 0;
    for (size_t i = 0; i < kStretch; i += 8) {
      word = step(from + i, word);
      second = step(from + kStretch + i, second);
      third = step(from + 2 * kStretch + i, third);
    }
    second ^= zeros.after(static_cast<uint32_t>(word));
    word = third ^ zeros.after(static_cast<uint32_t>(second));
  }
  for (; n >= 8; from += 8, n -= 8) {
    word = step(from, word);
  }
  auto rest = static_cast<uint32_t>(word);
  for (; n != 0; ++from, --n) {
    rest = _mm_crc32_u8(rest, static_cast<uint8_t>(*from));
  }
  return ~rest;
}

bool has_instruction() {
  static const bool has = __builtin_cpu_supports("sse4.2");
  return has;
}

// Past the caches: most of what is copied is next read by a drive, or some time later, and it need
// not be fetched before it is written. On a Zen 3 that makes 11.4 GB/s of a copy with its sum
// instead of 7.4, and 8.9 instead of 7.0 from pages to where a drive takes them.
void copy_past_caches(std::byte* to, const std::byte* from, size_t n) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  std::memcpy(to, from, n);  // sanitizers do not see what follows
#endif
  constexpr size_t kLine = 64;
  const size_t before = std::min(n, (~reinterpret_cast<uintptr_t>(to) + 1) % kLine);
  std::memcpy(to, from, before);
  size_t at = before;
  for (; at + kLine <= n; at += kLine) {
    __m128i line[kLine / sizeof(__m128i)];
    std::memcpy(line, from + at, kLine);
    auto* words = reinterpret_cast<__m128i*>(to + at);
    for (const __m128i part : line) {
      _mm_stream_si128(words++, part);
    }
  }
  std::memcpy(to + at, from + at, n - at);
}

// What was copied is there for whoever hears of it.
void end_copy() { _mm_sfence(); }

#else

void copy_past_caches(std::byte* to, const std::byte* from, size_t n) { std::memcpy(to, from, n); }
void end_copy() {}

#endif

}  // namespace

uint32_t crc32c_by_table(std::span<const std::byte> bytes, uint32_t crc) {
  uint32_t word = ~crc;
  for (const std::byte byte : bytes) {
    word = (word >> 8) ^ kTable[(word ^ static_cast<uint32_t>(byte)) & 0xff];
  }
  return ~word;
}

uint32_t crc32c(std::span<const std::byte> bytes, uint32_t crc) {
#if defined(__x86_64__)
  if (has_instruction()) {
    return by_instruction(bytes, crc);
  }
#endif
  return crc32c_by_table(bytes, crc);
}

uint32_t copy_crc32c(std::byte* to, std::span<const std::byte> from) {
  uint32_t crc = 0;
  while (!from.empty()) {
    const std::span<const std::byte> part = from.first(std::min(kCopyBytes, from.size()));
    copy_past_caches(to, part.data(), part.size());
    crc = crc32c(part, crc);
    to += part.size();
    from = from.subspan(part.size());
  }
  end_copy();
  return crc;
}

}  // namespace kvm::tiers
