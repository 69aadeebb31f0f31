// SPDX-License-Identifier: Apache-2.0
// The hashes of a user's prefixes, in memory that the service writes and its clients read, without
// a lock and without asking.
//
//   header (64 bytes) | slot[n_slots], 64 bytes each, a power of two of them
//
// A hash lies in one of two buckets of 8 slots, which its first two words name. A slot is written
// between two steps of its version, odd meanwhile; whoever reads it without seeing the same
// even version before and after has read nothing. What stands there is a hint: the service decides
// when the sequence is forked.
//
// Threads: one writer; any readers, in any process.
#ifndef KVM_BASE_PREFIX_TABLE_H_
#define KVM_BASE_PREFIX_TABLE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "kvm.h"

namespace kvm {

// WIRE: all of this, between a kvmd and libkvm of other versions.
inline constexpr uint64_t kPrefixTableMagic = 0x3058494645525056;  // "VPREFIX0"
inline constexpr uint32_t kPrefixBucketSlots = 8;
inline constexpr uint32_t kPrefixProbes = 2 * kPrefixBucketSlots;

struct PrefixTableHeader {
  uint64_t magic;
  uint64_t n_slots;
  uint64_t reserved[6];
};
static_assert(sizeof(PrefixTableHeader) == 64);

struct PrefixSlot {
  std::atomic<uint32_t> version;
  std::atomic<uint32_t> n_pages;  // with the one of this hash; 0: the slot is empty
  std::atomic<uint64_t> seq;      // 0: it cannot be forked here
  std::atomic<uint64_t> hash[4];
  uint64_t reserved[2];
};
static_assert(sizeof(PrefixSlot) == 64 && std::atomic<uint64_t>::is_always_lock_free &&
              std::atomic<uint32_t>::is_always_lock_free);

// Of a page that some prefix has.
struct PrefixPage {
  kvm_seq_id seq = 0;    // of a sequence that can be forked behind it; 0: none can
  uint32_t n_pages = 0;  // of the prefix that ends with it
};

// What a prefix costs whoever takes it.
struct PrefixWeight {
  bool is_faster = true;  // than to compute it
  uint64_t read_ns = 0;   // for what of it lies on the disk
};

// What a table takes of which pages are to be found, some more than n_pages: a power of two.
uint64_t prefix_table_bytes(uint64_t n_pages);

// What a hash is found by in a space: sequences of one cannot be used in another. The same again
// gives the hash back.
kvm_prefix_hash hash_in_space(kvm_prefix_hash hash, kvm_space_id space);

class PrefixTableWriter {
 public:
  // memory: zeroes, of prefix_table_bytes(); stays. Says in it that there is a table.
  explicit PrefixTableWriter(std::span<std::byte> memory);

  // Sets what is found under a hash. False: there is no room where it could be, which is rare in a
  // table that is filled to three quarters.
  bool put(const kvm_prefix_hash& hash, const PrefixPage& page);
  void remove(const kvm_prefix_hash& hash);
  uint64_t n_used() const { return n_used_; }

 private:
  static void write(PrefixSlot* slot, const kvm_prefix_hash& hash, const PrefixPage& page);

  std::span<PrefixSlot> slots_;
  uint64_t n_used_ = 0;
};

class PrefixTableReader {
 public:
  // Nullopt: the memory holds no table that is as large as it says.
  static std::optional<PrefixTableReader> over(std::span<const std::byte> memory);

  // The longest prefix of these hashes that can be forked. Its n_pages is 0 where there is none:
  // that costs one look.
  PrefixPage find(kvm_space_id space, std::span<const kvm_prefix_hash> hashes) const;
  // hash: in its space. Nullopt: it is not there, or was being written.
  std::optional<PrefixPage> look_up(const kvm_prefix_hash& hash) const;

 private:
  explicit PrefixTableReader(std::span<const PrefixSlot> slots) : slots_(slots) {}

  std::span<const PrefixSlot> slots_;
};

}  // namespace kvm

#endif  // KVM_BASE_PREFIX_TABLE_H_
