// SPDX-License-Identifier: Apache-2.0
// LayerIndex: what is kept beside the keys of one (sequence, storage layer) for approximate modes,
// shared copy-on-write with forks. docs/adr/0005-index-storage.md has the reasons.
//
//   sketches   codes of 64 keys a block, 32 blocks a page of the pool, page i with the blocks
//              [32 i, 32 i + 32). One frame for each run of 8,192 tokens, made from
//                run 0       the first min_tokens tokens but the sinks
//                run r > 0   the tokens of run r - 1
//   hashes     tables of runs of 65,536 keys, as many as fit, and of what is left in powers of two
//              down to about min_tokens; immutable, each made anew when its run changes
//
// An index of a sequence of n tokens covers the blocks that end at or before n - 64, from the
// length min_tokens + 64 on: so appends of up to 64 tokens never outrun it, and what it holds is a
// function of the stored tokens (and of the queries observed when a frame is made) alone, not of
// how they were appended. What finds no memory is not indexed, and is read exactly.
//
// Forks share one before it is built, too: whoever needs blocks that all of them have builds these
// for all (`limit` says how far a sequence agrees with it). One at a time: BuildClaim.
//
// An index makes way: where a page or a client's quota has no room left, the index that was used
// longest ago goes, whole (IndexUses::drop_oldest), unless somebody reads or builds it (IndexPin).
//
// Threads: the driver thread, but for build tasks (engine/index/index_work.h).
// Memory: pages, frames and tables are charged to the pool's budget and the client's account.
#ifndef KVM_ENGINE_STORE_LAYER_INDEX_H_
#define KVM_ENGINE_STORE_LAYER_INDEX_H_

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "attention/sampled/approx.h"
#include "base/assert.h"
#include "engine/space/space.h"
#include "engine/store/account.h"
#include "engine/store/table_memory.h"
#include "hash_index/sketch/sketch.h"
#include "tiers/budget.h"
#include "tiers/host/host_pool.h"
#include "tiers/page_table.h"

namespace kvm::engine {

inline constexpr uint32_t kIndexPageBlocks = 32;
inline constexpr uint32_t kFrameBlocks = 128;
inline constexpr uint32_t kUnsettledTokens = 64;  // at the end of a sequence: not indexed

// Blocks that the index of a sequence of `length` tokens covers.
constexpr uint64_t indexable_blocks(uint64_t length) {
  return length < kUnsettledTokens ? 0 : (length - kUnsettledTokens) / kPageTokens;
}

// IndexTotals are sums over all indexes of a store.
struct IndexTotals {
  uint64_t n_pages = 0;
  uint64_t page_bytes = 0;
  uint64_t charged_bytes = 0;  // frames and tables
  uint64_t n_blocks = 0;       // ever indexed, per head
  uint64_t n_refused = 0;      // each once
  uint64_t n_dropped = 0;      // that made way
  uint64_t n_uses = 0;         // the clock of LayerIndex::last_use

  uint64_t bytes() const { return page_bytes + charged_bytes; }
};

// An IndexBank is where the memory of one client's indexes comes from and goes back to. A copy is
// as good.
class IndexBank {
 public:
  IndexBank(tiers::PageTable* pages, tiers::HostPool* pool, tiers::MemoryBudget* budget,
            TableReclaimer* reclaimer, IndexTotals* totals, const Payers* payers, Account* account)
      : pages_(pages),
        pool_(pool),
        budget_(budget),
        reclaimer_(reclaimer),
        totals_(totals),
        payers_(payers),
        account_(account) {}

  // kNoPage where the quota, the capacity or the machine refuses.
  tiers::PageRef allocate(uint64_t page_bytes) const;
  void add_ref(tiers::PageRef page) const { pages_->add_ref(page); }
  void release(tiers::PageRef page) const;
  // False, and nothing charged, where the quota or the capacity refuses.
  [[nodiscard]] bool charge(uint64_t size_bytes) const;
  void uncharge(uint64_t size_bytes) const;
  // Of size_bytes that were charged and are mapped: the client is charged no more; the capacity
  // when they are unmapped, which is put off.
  void reclaim(std::byte* data, uint64_t size_bytes) const;
  // Returns what could be charged now.
  uint64_t room_bytes() const;
  // What `payer` was charged for a page, or for memory of size_bytes, is charged to this client.
  // REQUIRES: it is of the same tenant.
  void take_over(tiers::PageRef page) const;
  void take_over(const IndexBank& payer, uint64_t size_bytes) const;
  const tiers::PageTable& pages() const { return *pages_; }
  IndexTotals& totals() const { return *totals_; }
  Account* account() const { return account_; }
  IndexUses& uses() const { return account_->indexes; }

 private:
  bool fits_quota(uint64_t size_bytes) const {
    return size_bytes <= account_->quota->room().staying;
  }
  // Adds bytes to the account, and to the sums of its indexes.
  void add_bytes(uint64_t size_bytes) const;
  static void take_bytes(Account* account, uint64_t size_bytes);

  tiers::PageTable* pages_;
  tiers::HostPool* pool_;
  tiers::MemoryBudget* budget_;
  TableReclaimer* reclaimer_;
  IndexTotals* totals_;
  const Payers* payers_;
  Account* account_;
};

// ChargedMemory is memory on the heap that is charged as long as it lives.
class ChargedMemory {
 public:
  // REQUIRES: size_bytes are charged already.
  ChargedMemory(const IndexBank& bank, uint64_t size_bytes)
      : bank_(bank), size_bytes_(size_bytes) {}
  ~ChargedMemory() { bank_.uncharge(size_bytes_); }
  ChargedMemory(const ChargedMemory&) = delete;
  ChargedMemory& operator=(const ChargedMemory&) = delete;
  uint64_t size_bytes() const { return size_bytes_; }
  // REQUIRES: size_bytes <= size_bytes(). The rest is charged no more.
  void shrink(uint64_t size_bytes) {
    bank_.uncharge(size_bytes_ - size_bytes);
    size_bytes_ = size_bytes;
  }
  Account* payer() const { return bank_.account(); }
  // `taker` pays from now on. Who pays is the driver's affair; nothing that others read changes.
  void pass_to(const IndexBank& taker) const {
    taker.take_over(bank_, size_bytes_);
    bank_ = taker;
  }

 private:
  mutable IndexBank bank_;
  uint64_t size_bytes_;
};

// TableMemory is that of hash tables: mapped, and unmapped bit by bit, some time after it is not
// needed.
class TableMemory {
 public:
  // `data`: table_map_bytes(...) from map_tables, charged already.
  TableMemory(const IndexBank& bank, std::byte* data, uint64_t size_bytes)
      : bank_(bank), data_(data), size_bytes_(size_bytes) {}
  ~TableMemory() { bank_.reclaim(data_, size_bytes_); }
  TableMemory(const TableMemory&) = delete;
  TableMemory& operator=(const TableMemory&) = delete;
  std::byte* data() const { return data_; }
  uint64_t size_bytes() const { return size_bytes_; }
  Account* payer() const { return bank_.account(); }
  // As ChargedMemory has it.
  void pass_to(const IndexBank& taker) const {
    taker.take_over(bank_, size_bytes_);
    bank_ = taker;
  }

 private:
  mutable IndexBank bank_;
  std::byte* data_;
  uint64_t size_bytes_;
};

struct IndexFrame {
  hash_index::FramePtr frame;
  ChargedMemory memory;
};
using IndexFramePtr = std::shared_ptr<const IndexFrame>;

// A HashRun is consecutive keys with hash tables of their own.
struct HashRun {
  uint64_t position = 0;
  uint32_t n_keys = 0;

  uint64_t end() const { return position + n_keys; }
  bool operator==(const HashRun&) const = default;
};
struct IndexTables {
  HashRun run;
  std::vector<float> center;  // [dim_k], at the end of the tables' charge
  TableMemory tables;
};
using IndexTablesPtr = std::shared_ptr<const IndexTables>;

// REQUIRES: min_tokens >= kMinIndexTokens. The runs of the first n_tokens of a sequence.
std::vector<HashRun> hash_runs(uint64_t n_tokens, uint32_t min_tokens);

struct IndexPage {
  tiers::PageRef page = tiers::kNoPage;
  uint32_t blocks = 0;  // bit b: block kIndexPageBlocks * (number of the page) + b is there
};

struct HeadIndex {
  uint64_t n_blocks = 0;  // dealt with: those below are there, or will not be
  // After memory was refused, or the index made way: not before so many are to be dealt with.
  uint64_t retry_at = 0;
  uint64_t n_refused = 0;  // blocks below are counted where they were refused
  std::vector<IndexPage> pages;
  std::vector<IndexFramePtr> frames;   // [run]; null: none
  std::vector<IndexTablesPtr> tables;  // ascending and disjoint
};

// A LayerIndex is the indexes of a layer's heads. make_index alone makes one.
struct LayerIndex {
  explicit LayerIndex(const IndexBank& of_client) : bank(of_client) { ++bank.account()->n_named; }
  ~LayerIndex() { --bank.account()->n_named; }
  LayerIndex(const LayerIndex&) = delete;
  LayerIndex& operator=(const LayerIndex&) = delete;

  std::vector<HeadIndex> heads;  // [kv heads of the layer]
  IndexBank bank;
  uint64_t gone_bytes = 0;  // of what it had when it made way
  // Kept by IndexUses, IndexPin and BuildClaim.
  bool is_claimed = false;
  uint32_t n_pins = 0;
  uint64_t last_use = 0;
  std::list<LayerIndex*>::iterator place;
  bool is_listed = false;

  // Gives everything back, for every sequence that refers to it.
  void make_way();
  // Whether a head that waits for memory need not: there is twice as much as the index had.
  bool has_room_again() const { return gone_bytes != 0 && bank.room_bytes() / 2 >= gone_bytes; }

  // Keeps what the index of a sequence with `n_blocks` blocks to cover has. configs: [kv heads].
  void cut(uint64_t n_blocks, std::span<const IndexConfig> configs);
  // Forgets the blocks [block_begin, block_end) of a head.
  void drop(uint32_t head, uint64_t block_begin, uint64_t block_end);
  uint64_t size_bytes() const;
  // The part of it that `account` pays for.
  uint64_t size_bytes_of(const Account* account) const;
  // It makes way as one of `of_client`'s from now on, which pays for what is added.
  void list_under(const IndexBank& of_client);
  // The same, and `taker` pays for all that `giver` paid for.
  // REQUIRES: they have the same tenant; nobody builds or reads it.
  void pass_to(const IndexBank& taker, const Account* giver);
};

// An IndexRef refers to an index, perhaps shared, of which the blocks below `limit` hold. What is
// not there yet may be added to it.
struct IndexRef {
  std::shared_ptr<LayerIndex> data;
  uint64_t limit = UINT64_MAX;
};

// An IndexPin keeps an index from making way, and counts as a use of it. REQUIRES: it lives longer.
class IndexPin {
 public:
  IndexPin() = default;
  explicit IndexPin(LayerIndex* index) : index_(index) {
    if (index_ != nullptr) {
      index_->bank.uses().touch(index_);  // may find no memory
      ++index_->n_pins;
    }
  }
  IndexPin(IndexPin&& other) noexcept : index_(std::exchange(other.index_, nullptr)) {}
  IndexPin& operator=(IndexPin&& other) noexcept {
    std::swap(index_, other.index_);
    return *this;
  }
  ~IndexPin() {
    if (index_ != nullptr) {
      --index_->n_pins;
    }
  }

 private:
  LayerIndex* index_ = nullptr;
};

// A BuildClaim keeps all but one from building an index. REQUIRES: the index lives longer, and is
// not claimed.
class BuildClaim {
 public:
  BuildClaim() = default;
  explicit BuildClaim(LayerIndex* index) : index_(index) {
    if (index_ != nullptr) {
      KVM_ASSERT(!index_->is_claimed);
      index_->is_claimed = true;
    }
  }
  BuildClaim(BuildClaim&& other) noexcept : index_(std::exchange(other.index_, nullptr)) {}
  BuildClaim& operator=(BuildClaim&& other) noexcept {
    std::swap(index_, other.index_);
    return *this;
  }
  ~BuildClaim() {
    if (index_ != nullptr) {
      index_->is_claimed = false;
    }
  }

 private:
  LayerIndex* index_ = nullptr;
};

// An empty index that gives its memory back by itself.
std::shared_ptr<LayerIndex> make_index(size_t n_heads, const IndexBank& bank);
// The index of `ref` for changing: made, unshared and cut to its limit first. Of one that is being
// built the copy has whole pages only.
LayerIndex* own_index(IndexRef* ref, std::span<const IndexConfig> configs, const IndexBank& bank);
// Blocks of a head that a reference's index has dealt with.
// REQUIRES here and below: config is that of the head.
uint64_t blocks_dealt_with(const IndexRef& ref, uint32_t head, const IndexConfig& config);

// Both append what a head has of the first n_blocks blocks, in the terms of attention. Pointers
// hold as long as the index is not changed.
void collect_sketches(const IndexRef& ref, uint32_t head, const IndexConfig& config,
                      uint64_t n_blocks, uint32_t dim_k, std::vector<attention::SketchedRun>* out);
void collect_hashes(const IndexRef& ref, uint32_t head, const IndexConfig& config,
                    uint64_t n_blocks, std::vector<attention::HashedRun>* out);

// Mixes numbers into one from which each can no longer be told.
uint64_t mix_seed(uint64_t seed, uint64_t a, uint64_t b);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_LAYER_INDEX_H_
