// SPDX-License-Identifier: Apache-2.0
// The table of prefixes: what is put is found, by the rules of its slots, and whoever reads while
// it is written sees what was there before or after.
#include "base/prefix_table.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <thread>
#include <vector>

namespace kvm {
namespace {

class Table {
 public:
  explicit Table(uint64_t n_pages)
      : slots_(prefix_table_bytes(n_pages) / sizeof(PrefixSlot)), writer(memory()) {}

  std::span<std::byte> memory() { return std::as_writable_bytes(std::span(slots_)); }
  PrefixTableReader reader() { return *PrefixTableReader::over(memory()); }

 private:
  std::vector<PrefixSlot> slots_;

 public:
  PrefixTableWriter writer;
};

// The i-th hash of a chain, which says what it is.
kvm_prefix_hash hash_of(uint64_t chain, uint64_t i) {
  std::mt19937_64 random(chain << 32 | i);
  kvm_prefix_hash hash;
  for (size_t word = 0; word < 4; ++word) {
    const uint64_t value = random();
    std::memcpy(hash.bytes + 8 * word, &value, sizeof(value));
  }
  return hash;
}

std::vector<kvm_prefix_hash> chain_of(uint64_t chain, size_t n) {
  std::vector<kvm_prefix_hash> hashes;
  for (size_t i = 0; i < n; ++i) {
    hashes.push_back(hash_of(chain, i));
  }
  return hashes;
}

TEST(PrefixTable, FindsTheLongestThatCanBeForked) {
  Table table(1000);
  const std::vector<kvm_prefix_hash> hashes = chain_of(1, 100);
  EXPECT_EQ(table.reader().find(0, hashes).n_pages, 0u);
  EXPECT_EQ(table.reader().find(0, {}).n_pages, 0u);
  for (uint32_t n = 1; n <= 100; ++n) {
    // Every third page cannot be forked behind.
    ASSERT_TRUE(table.writer.put(hashes[n - 1], {.seq = n % 3 == 0 ? 0u : 7u, .n_pages = n}));
    for (const uint32_t asked : {n, n + 1, 100u}) {
      const PrefixPage found =
          table.reader().find(0, std::span(hashes).first(std::min(asked, 100u)));
      EXPECT_EQ(found.n_pages, n % 3 == 0 ? n - 1 : n) << asked;
      EXPECT_EQ(found.seq, 7u);
    }
    EXPECT_EQ(table.reader().find(0, std::span(hashes).first(n / 2)).n_pages,
              n / 2 % 3 == 0 ? (n / 2 == 0 ? 0 : n / 2 - 1) : n / 2);
  }
  EXPECT_EQ(table.reader().find(5, hashes).n_pages, 0u) << "of another space";
  for (uint32_t n = 100; n > 0; --n) {
    table.writer.remove(hashes[n - 1]);
    EXPECT_FALSE(table.reader().look_up(hashes[n - 1]).has_value());
    EXPECT_EQ(table.writer.n_used(), n - 1);
  }
  EXPECT_EQ(table.reader().find(0, hashes).n_pages, 0u);
}

// Against a map, with removals, up to a table that is as full as it may be.
TEST(PrefixTable, HoldsWhatAMapWould) {
  Table table(3000);
  const PrefixTableReader reader = table.reader();
  std::map<uint64_t, PrefixPage> expected;
  std::mt19937_64 random(3);
  uint64_t n_refused = 0;
  for (uint32_t step = 0; step < 40'000; ++step) {
    const uint64_t which = random() % 3000;
    if (random() % 3 == 0) {
      table.writer.remove(hash_of(2, which));
      expected.erase(which);
    } else {
      const PrefixPage page{.seq = random(), .n_pages = 1 + static_cast<uint32_t>(random() % 99)};
      if (table.writer.put(hash_of(2, which), page)) {
        expected[which] = page;
      } else {
        ++n_refused;
        EXPECT_FALSE(expected.contains(which));
      }
    }
    EXPECT_EQ(table.writer.n_used(), expected.size());
  }
  for (uint64_t which = 0; which < 3000; ++which) {
    const std::optional<PrefixPage> found = reader.look_up(hash_of(2, which));
    const auto it = expected.find(which);
    ASSERT_EQ(found.has_value(), it != expected.end());
    if (found.has_value()) {
      EXPECT_EQ(found->seq, it->second.seq);
      EXPECT_EQ(found->n_pages, it->second.n_pages);
    }
  }
  EXPECT_EQ(n_refused, 0u);
}

TEST(PrefixTable, WithoutRoomRefusesAndKeepsTheRest) {
  Table table(48);  // 64 slots
  uint32_t n_put = 0;
  for (uint32_t i = 0; i < 200; ++i) {
    n_put += table.writer.put(hash_of(4, i), {.seq = i + 1, .n_pages = 1}) ? 1 : 0;
  }
  EXPECT_EQ(table.writer.n_used(), n_put);
  EXPECT_GT(n_put, 50u);
  EXPECT_LE(n_put, 64u);
  uint32_t n_found = 0;
  for (uint32_t i = 0; i < 200; ++i) {
    const std::optional<PrefixPage> found = table.reader().look_up(hash_of(4, i));
    n_found += found.has_value() ? 1 : 0;
    EXPECT_TRUE(!found.has_value() || found->seq == i + 1);
  }
  EXPECT_EQ(n_found, n_put);
}

TEST(PrefixTable, IsNotReadWhereThereIsNone) {
  Table table(48);
  const std::span<std::byte> memory = table.memory();
  EXPECT_TRUE(PrefixTableReader::over(memory).has_value());
  EXPECT_FALSE(PrefixTableReader::over(memory.first(63)).has_value());
  EXPECT_FALSE(PrefixTableReader::over(memory.first(memory.size() - 64)).has_value());
  PrefixTableHeader header;
  std::memcpy(&header, memory.data(), sizeof(header));
  for (const uint64_t n_slots : {uint64_t{0}, uint64_t{48}, uint64_t{128}, UINT64_MAX}) {
    PrefixTableHeader other = header;
    other.n_slots = n_slots;
    std::memcpy(memory.data(), &other, sizeof(other));
    EXPECT_FALSE(PrefixTableReader::over(memory).has_value()) << n_slots;
  }
  header.magic ^= 1;
  std::memcpy(memory.data(), &header, sizeof(header));
  EXPECT_FALSE(PrefixTableReader::over(memory).has_value());
}

// Pages of two chains come and go in the same slots. What is found is always of the hash that was
// asked for.
TEST(PrefixTable, IsReadWhileItIsWritten) {
  Table table(48);
  std::atomic<bool> is_over = false;
  std::atomic<uint64_t> n_found = 0;
  std::vector<kvm_prefix_hash> hashes;
  for (uint64_t i = 0; i < 40; ++i) {
    hashes.push_back(hash_of(5, i));
  }
  const auto read = [&] {
    const PrefixTableReader reader = table.reader();
    std::mt19937_64 random(6);
    while (!is_over.load(std::memory_order_relaxed)) {
      const uint64_t i = random() % hashes.size();
      const std::optional<PrefixPage> found = reader.look_up(hashes[i]);
      if (found.has_value()) {
        // Each page is put with numbers that say whose it is, and agree.
        EXPECT_EQ(found->seq % hashes.size(), i);
        EXPECT_EQ(found->seq / hashes.size() % 1000 + 1, found->n_pages);
        n_found.fetch_add(1, std::memory_order_relaxed);
      }
    }
  };
  std::thread one(read);
  std::thread two(read);
  std::mt19937_64 random(7);
  for (uint32_t step = 0; step < 200'000 || n_found.load() < 1000; ++step) {
    const uint64_t i = random() % hashes.size();
    if (random() % 2 == 0) {
      table.writer.remove(hashes[i]);
    } else {
      const uint64_t round = random() % 1'000'000;
      (void)table.writer.put(hashes[i], {.seq = round * hashes.size() + i,
                                         .n_pages = static_cast<uint32_t>(round % 1000 + 1)});
    }
  }
  is_over.store(true);
  one.join();
  two.join();
}

}  // namespace
}  // namespace kvm
