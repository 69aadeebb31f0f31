// SPDX-License-Identifier: Apache-2.0
// StoreMemory: the memory of a store and who pays for it: the pages and their frames, the budget,
// the accounts of clients and their quotas. Makes room: what can be done without goes before
// anything is refused.
//
// Threads: the driver thread.
#ifndef KVM_ENGINE_STORE_STORE_MEMORY_H_
#define KVM_ENGINE_STORE_STORE_MEMORY_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/assert.h"
#include "base/status.h"
#include "base/undo.h"
#include "engine/store/account.h"
#include "engine/store/layer_index.h"
#include "engine/store/page_list.h"
#include "engine/store/quota.h"
#include "engine/store/table_memory.h"
#include "kvm.h"
#include "tiers/budget.h"
#include "tiers/host/host_pool.h"
#include "tiers/host/memory_ahead.h"
#include "tiers/host/ring_memory.h"
#include "tiers/page_table.h"

namespace kvm::engine {

struct StoreOptions;

// StoreCounts count since the store was opened.
struct StoreCounts {
  uint64_t n_tokens_appended = 0;
  uint64_t bytes_appended = 0;
  uint64_t n_pages_dropped = 0;
  uint64_t n_pages_copied = 0;
  uint64_t n_pages_moved = 0;
};

class StoreMemory final : private PageRelief {
 public:
  using Accounts = std::unordered_map<ClientId, std::unique_ptr<Account>>;

  explicit StoreMemory(const StoreOptions& options);
  ~StoreMemory() = default;
  StoreMemory(const StoreMemory&) = delete;
  StoreMemory& operator=(const StoreMemory&) = delete;

  // Ids start at 1 and are never reused. Pointers hold as long as anything is charged to the
  // account, and until leave() at least.
  Account* open(const ClientSpec& spec, const Amounts& limits);
  // The library of the user whose account this is: opened, where there is none. limits: its own.
  Account* library_of(const Account* account, const Amounts& limits);
  // The same by the user.
  Account* library_of_user(uint32_t uid, const Amounts& limits);
  // The client is gone. REQUIRES: it has no sequences.
  void leave(Account* account);
  // Accounts of a tenant's clients that are gone. O(those of all).
  size_t n_gone(const QuotaAccount* tenant);
  Account* find(ClientId client) const;  // null: unknown, or gone
  const Accounts& accounts() const { return accounts_; }
  QuotaBook& quotas() { return quotas_; }

  tiers::PageTable& pages() { return pages_; }
  const tiers::PageTable& pages() const { return pages_; }
  PageBank bank(Account* account) { return PageBank(&pages_, &payers_, account, this); }
  IndexBank index_bank(Account* account) {
    return IndexBank(&pages_, &pool_, &budget_, &reclaimer_, &index_totals_, &payers_, account);
  }
  // For PageMoves (engine/run/page_moves.h).
  std::optional<tiers::HostPool::ExtentRef> close_thin_extent() {
    return pool_.close_thin_extent();
  }
  void reopen(tiers::HostPool::ExtentRef extent) { pool_.reopen(extent); }
  // Opens an extent again that pages still lie in.
  void reopen_unless_left(tiers::HostPool::ExtentRef extent) {
    if (pages_.has_pages(extent)) {
      pool_.reopen(extent);
    }
  }
  // What pages of the slow tier pass through.
  tiers::RingMemory& rings() { return rings_; }
  const tiers::RingMemory& rings() const { return rings_; }
  // Makes it so large. Fails: as RingMemory::grow_to.
  Status grow_rings(uint64_t size_bytes);
  // As PageTable::begin_fetch; makes room.
  Result<tiers::PageTable::Move> begin_fetch(tiers::PageRef page);
  void release(tiers::PageRef page) { PageBank::release_page(&pages_, payers_, page); }

  // That the quotas have room for `need`, if need be without indexes. Fails: QUOTA.
  Status make_quota_room(Account* account, const KvBytes& need, std::string_view what);
  // For memory beside pages: observations, and what lists hold on the heap.
  // Fails: QUOTA, NO_SPACE; nothing is charged then.
  Status charge(Account* account, uint64_t size_bytes);
  void uncharge(Account* account, uint64_t size_bytes);
  // What make_charged made of memory beside pages, and who pays for it.
  template <typename T>
  struct ChargedDelete {
    StoreMemory* memory;
    Account* account;
    void operator()(T* gone) const {
      memory->uncharge(account, gone->size_bytes());
      --account->n_named;
      delete gone;
    }
  };
  template <typename T>
  static Account*& payer(const std::shared_ptr<T>& charged) {
    auto* deleter = std::get_deleter<ChargedDelete<T>>(charged);
    KVM_ASSERT(deleter != nullptr);
    return deleter->account;
  }
  // Whether `charged` is there, and this account's alone: what is added to it, or taken from it,
  // may be charged to the account.
  template <typename T>
  static bool is_own(const Account* account, const std::shared_ptr<T>& charged) {
    return charged.use_count() == 1 && payer(charged) == account;
  }
  // `taker` pays for it from now on, if `giver` did.
  template <typename T>
  static void pass_charged(const std::shared_ptr<T>& charged, Account* giver, Account* taker) {
    if (charged != nullptr && payer(charged) == giver) {
      giver->quota->pass_to(taker->quota, KvBytes::that_stay(charged->size_bytes()));
      --giver->n_named;
      ++taker->n_named;
      payer(charged) = taker;
    }
  }
  // Charged until the last reference goes, with what size_bytes() says then. Throws std::bad_alloc:
  // nothing is charged.
  template <typename T>
  Result<std::shared_ptr<T>> make_charged(Account* account, T&& made) {
    const uint64_t made_bytes = made.size_bytes();
    KVM_TRY(charge(account, made_bytes));
    Undo uncharging([&] { uncharge(account, made_bytes); });
    T* charged = new T(std::move(made));
    uncharging.dismiss();  // what follows is for the deleter, even where it throws
    ++account->n_named;
    return std::shared_ptr<T>(charged, ChargedDelete<T>{this, account});
  }

  // Gives emptied memory back to the operating system: a little, in passing; some, after much was
  // released; what Store::housekeep promises, and whether more remains.
  void trim_in_passing();
  void trim_after_free();
  bool housekeep();

  StoreCounts& counts() { return counts_; }
  // Adds what Store::add_stats says of memory.
  void add_stats(kvm_stats* stats) const;
  // For store_check.h.
  uint64_t charged_bytes() const { return charged_bytes_; }
  const IndexTotals& index_totals() const { return index_totals_; }
  uint64_t capacity_bytes() const { return budget_.capacity_bytes(); }
  uint64_t used_bytes() const { return budget_.used_bytes(); }
  // Of the capacity, cached extents included.
  uint64_t free_bytes() const { return budget_.free_bytes() + pool_.cached_bytes(); }
  uint64_t extent_bytes() const { return pool_.extent_bytes(); }
  // Of the capacity, what is in use when the readers of left frames have ended: room within begun
  // extents is free.
  uint64_t needed_bytes() const {
    const uint64_t whole = budget_.used_bytes() - pool_.extent_bytes() + pool_.share_bytes();
    return whole - std::min(whole, pages_.left_bytes());
  }
  // While it is set, nothing that needs room takes it from indexes.
  void set_keeps_indexes(bool keeps_indexes) { keeps_indexes_ = keeps_indexes; }
  const Account& page_payer(tiers::PageRef page) const { return payers_.at(pages_.payer(page)); }
  uint64_t unreclaimed_bytes() const { return reclaimer_.size_bytes(); }

 private:
  // Memory that nothing is lost without, a bit of it: tables that are not needed any more, or else
  // the index that was used longest ago.
  bool relieve() override;
  Account* add(QuotaAccount* quota);
  // Closes accounts of clients that are gone, and libraries, where nothing is charged to them.
  void close_unused();
  // The client of a tenant whose index was used longest ago; null: none may go.
  // tenant == nullptr: of all.
  Account* oldest_index(const QuotaAccount* tenant);

  tiers::MemoryBudget budget_;
  tiers::MemoryAhead page_memory_{tiers::system_page_memory()};
  tiers::HostPool pool_;
  tiers::PageTable pages_;
  tiers::RingMemory rings_{&budget_};
  TableReclaimer reclaimer_;
  QuotaBook quotas_;
  Accounts accounts_;
  std::vector<Account*> lingering_;  // of clients that are gone, and libraries
  Payers payers_;
  ClientId next_client_ = 1;
  uint64_t charged_bytes_ = 0;  // by charge()
  bool keeps_indexes_ = false;
  IndexTotals index_totals_;
  StoreCounts counts_;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_STORE_MEMORY_H_
