// SPDX-License-Identifier: Apache-2.0
#include "base/prefix_table.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "base/assert.h"

namespace kvm {
namespace {

using Words = std::array<uint64_t, 4>;
static_assert(sizeof(Words) == sizeof(kvm_prefix_hash));

Words words_of(const kvm_prefix_hash& hash) { return std::bit_cast<Words>(hash); }

// A slot's words as they stand; whether they belong together the version says.
bool holds(const PrefixSlot& slot, const Words& words) {
  for (size_t i = 0; i < words.size(); ++i) {
    if (slot.hash[i].load(std::memory_order_acquire) != words[i]) {
      return false;
    }
  }
  return true;
}

// Where the i-th of kPrefixProbes slots is that may hold a hash, in a table of so many.
size_t place_of(const Words& words, uint32_t i, size_t n_slots) {
  const size_t n_buckets = n_slots / kPrefixBucketSlots;
  return (words[i / kPrefixBucketSlots] & (n_buckets - 1)) * kPrefixBucketSlots +
         i % kPrefixBucketSlots;
}

// LIMIT: of tables that libkvm believes in.
constexpr uint64_t kMaxSlots = uint64_t{1} << 32;

}  // namespace

uint64_t prefix_table_bytes(uint64_t n_pages) {
  const uint64_t n_slots = std::bit_ceil(std::max<uint64_t>(n_pages + n_pages / 3, 64));
  return sizeof(PrefixTableHeader) + n_slots * sizeof(PrefixSlot);
}

kvm_prefix_hash hash_in_space(kvm_prefix_hash hash, kvm_space_id space) {
  Words words = words_of(hash);
  words.back() ^= space;
  return std::bit_cast<kvm_prefix_hash>(words);
}

PrefixTableWriter::PrefixTableWriter(std::span<std::byte> memory) {
  const uint64_t n_slots =
      std::bit_floor((memory.size() - sizeof(PrefixTableHeader)) / sizeof(PrefixSlot));
  slots_ = {reinterpret_cast<PrefixSlot*>(memory.data() + sizeof(PrefixTableHeader)), n_slots};
  const PrefixTableHeader header{.magic = kPrefixTableMagic, .n_slots = n_slots, .reserved = {}};
  std::memcpy(memory.data(), &header, sizeof(header));
}

void PrefixTableWriter::write(PrefixSlot* slot, const kvm_prefix_hash& hash,
                              const PrefixPage& page) {
  const uint32_t version = slot->version.load(std::memory_order_relaxed);
  slot->version.store(version + 1, std::memory_order_relaxed);
  // SYNC: each releases the odd version: who sees any of them sees that one, or a later one, after
  // it. No fence, which ThreadSanitizer does not know; these stores cost the same.
  const Words words = words_of(hash);
  for (size_t i = 0; i < words.size(); ++i) {
    slot->hash[i].store(words[i], std::memory_order_release);
  }
  slot->seq.store(page.seq, std::memory_order_release);
  slot->n_pages.store(page.n_pages, std::memory_order_release);
  // SYNC: who sees this version sees all that was written before.
  slot->version.store(version + 2, std::memory_order_release);
}

bool PrefixTableWriter::put(const kvm_prefix_hash& hash, const PrefixPage& page) {
  KVM_ASSERT(page.n_pages != 0);
  const Words words = words_of(hash);
  // In the emptier of the buckets, so that both fill evenly.
  PrefixSlot* free[2] = {};
  uint32_t n_free[2] = {};
  for (uint32_t i = 0; i < kPrefixProbes; ++i) {
    PrefixSlot& slot = slots_[place_of(words, i, slots_.size())];
    const bool is_used = slot.n_pages.load(std::memory_order_relaxed) != 0;
    if (is_used && holds(slot, words)) {
      write(&slot, hash, page);
      return true;
    }
    if (!is_used) {
      free[i / kPrefixBucketSlots] = &slot;
      ++n_free[i / kPrefixBucketSlots];
    }
  }
  PrefixSlot* const chosen = free[n_free[1] > n_free[0] ? 1 : 0];
  if (chosen == nullptr) {
    return false;
  }
  write(chosen, hash, page);
  ++n_used_;
  return true;
}

void PrefixTableWriter::remove(const kvm_prefix_hash& hash) {
  const Words words = words_of(hash);
  for (uint32_t i = 0; i < kPrefixProbes; ++i) {
    PrefixSlot& slot = slots_[place_of(words, i, slots_.size())];
    if (slot.n_pages.load(std::memory_order_relaxed) != 0 && holds(slot, words)) {
      write(&slot, {}, {});
      --n_used_;
      return;
    }
  }
}

std::optional<PrefixTableReader> PrefixTableReader::over(std::span<const std::byte> memory) {
  PrefixTableHeader header;
  if (memory.size() < sizeof(header)) {
    return std::nullopt;
  }
  std::memcpy(&header, memory.data(), sizeof(header));
  if (header.magic != kPrefixTableMagic || !std::has_single_bit(header.n_slots) ||
      header.n_slots < kPrefixBucketSlots || header.n_slots > kMaxSlots ||
      header.n_slots > (memory.size() - sizeof(header)) / sizeof(PrefixSlot)) {
    return std::nullopt;
  }
  return PrefixTableReader(
      {reinterpret_cast<const PrefixSlot*>(memory.data() + sizeof(header)), header.n_slots});
}

std::optional<PrefixPage> PrefixTableReader::look_up(const kvm_prefix_hash& hash) const {
  const Words words = words_of(hash);
  // The second bucket comes from memory while the first is looked at.
  for (uint32_t i = kPrefixBucketSlots; i < kPrefixProbes; ++i) {
    __builtin_prefetch(&slots_[place_of(words, i, slots_.size())]);
  }
  for (uint32_t i = 0; i < kPrefixProbes; ++i) {
    const PrefixSlot& slot = slots_[place_of(words, i, slots_.size())];
    // SYNC: with the writer's last store: what is read from here on is of this version, or later.
    const uint32_t version = slot.version.load(std::memory_order_acquire);
    if ((version & 1) != 0 || !holds(slot, words)) {
      continue;
    }
    // SYNC: each, as those of holds(), acquires the odd version before it: were any of a later
    // version, the load below would see that one.
    const PrefixPage page{.seq = slot.seq.load(std::memory_order_acquire),
                          .n_pages = slot.n_pages.load(std::memory_order_acquire)};
    if (slot.version.load(std::memory_order_relaxed) == version && page.n_pages != 0) {
      return page;
    }
  }
  return std::nullopt;
}

PrefixPage PrefixTableReader::find(kvm_space_id space,
                                   std::span<const kvm_prefix_hash> hashes) const {
  const auto page_at = [&](size_t i) { return look_up(hash_in_space(hashes[i], space)); };
  // Where a page is there, all before it are: those that are there end at [known, unknown).
  size_t known = 0;
  size_t unknown = 1;
  while (unknown <= hashes.size() && page_at(unknown - 1).has_value()) {
    known = unknown;
    unknown = std::min(2 * unknown, std::max(hashes.size(), unknown + 1));
  }
  unknown = std::min(unknown, hashes.size() + 1);
  while (known + 1 < unknown) {
    const size_t middle = known + (unknown - known) / 2;
    (page_at(middle - 1).has_value() ? known : unknown) = middle;
  }
  // Not each can be forked where a policy has dropped what a query there would see.
  for (; known != 0; --known) {
    const std::optional<PrefixPage> page = page_at(known - 1);
    if (page.has_value() && page->seq != 0 && page->n_pages == known) {
      return *page;
    }
  }
  return {};
}

}  // namespace kvm
