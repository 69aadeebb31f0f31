// SPDX-License-Identifier: Apache-2.0
// A page on its way to a slow tier or back, with memory of its own that is filled by a mark.
#ifndef KVM_TESTS_COMMON_SLOW_PAGE_H_
#define KVM_TESTS_COMMON_SLOW_PAGE_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/splitmix.h"
#include "tiers/slow_tier.h"

namespace kvm::testing {

// Bytes of which each 512 tell the mark.
inline std::vector<std::byte> marked_bytes(uint32_t mark, uint32_t size_bytes) {
  constexpr uint32_t kStretch = 512;
  static const std::vector<uint64_t> random = [] {
    std::vector<uint64_t> words(1 << 14);
    for (uint64_t& word : words) {
      word = splitmix64(static_cast<uint64_t>(&word - words.data()));
    }
    return words;
  }();
  const uint32_t n_table = static_cast<uint32_t>(random.size() * sizeof(uint64_t));
  std::vector<std::byte> bytes(size_bytes);
  for (uint32_t at = 0; at < size_bytes;) {
    const uint32_t from = (at + 64 * mark) % n_table;
    const uint32_t n = std::min(size_bytes - at, n_table - from);
    std::memcpy(bytes.data() + at, reinterpret_cast<const std::byte*>(random.data()) + from, n);
    at += n;
  }
  for (uint32_t at = 0; at < size_bytes; at += kStretch) {
    std::memcpy(bytes.data() + at, &mark, std::min<size_t>(sizeof(mark), size_bytes - at));
  }
  return bytes;
}

class SlowPage final : public tiers::Transfer {
 public:
  // To be written.
  SlowPage(uint32_t mark, uint32_t size) : bytes(marked_bytes(mark, size)) {
    kind = Kind::kWrite;
    data = bytes.data();
    size_bytes = size;
  }
  // To be read.
  SlowPage(tiers::PlaceId from, uint32_t size) : bytes(size) {
    place = from;
    data = bytes.data();
    size_bytes = size;
  }
  SlowPage(const SlowPage&) = delete;
  SlowPage& operator=(const SlowPage&) = delete;

  void on_done() noexcept override { is_done.store(true, std::memory_order_release); }
  bool holds(uint32_t mark) const {
    return std::memcmp(bytes.data(), marked_bytes(mark, size_bytes).data(), size_bytes) == 0;
  }

  std::vector<std::byte> bytes;
  std::atomic<bool> is_done = false;
};

}  // namespace kvm::testing

#endif  // KVM_TESTS_COMMON_SLOW_PAGE_H_
