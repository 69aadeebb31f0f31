// SPDX-License-Identifier: Apache-2.0
// StoreMemory: the memory of a store and who pays for it: the pool of pages, the budget, the
// accounts of clients and their quotas. Makes room: what can be done without goes before anything
// is refused.
//
// Threads: the driver thread.
#ifndef KVM_ENGINE_STORE_STORE_MEMORY_H_
#define KVM_ENGINE_STORE_STORE_MEMORY_H_

#include <cstdint>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/status.h"
#include "base/undo.h"
#include "engine/store/layer_index.h"
#include "engine/store/page_list.h"
#include "engine/store/quota.h"
#include "engine/store/table_memory.h"
#include "kvm.h"
#include "tiers/budget.h"
#include "tiers/host/host_pool.h"

namespace kvm::engine {

struct StoreOptions;

struct Account {
  ClientId client = 0;
  QuotaAccount* quota = nullptr;
  IndexUses indexes;
  kvm_seq_id next_freed = 0;  // where Store::free_some goes on
};

// StoreCounts count since the store was opened.
struct StoreCounts {
  uint64_t n_tokens_appended = 0;
  uint64_t bytes_appended = 0;
  uint64_t n_pages_dropped = 0;
  uint64_t n_pages_copied = 0;
};

class StoreMemory final : private PageRelief {
 public:
  using Accounts = std::unordered_map<ClientId, std::unique_ptr<Account>>;

  explicit StoreMemory(const StoreOptions& options);
  ~StoreMemory() = default;
  StoreMemory(const StoreMemory&) = delete;
  StoreMemory& operator=(const StoreMemory&) = delete;

  // Ids start at 1 and are never reused. Pointers hold until close().
  Account* open(const ClientSpec& spec, const Amounts& limits);
  // REQUIRES: nothing is charged to it any more.
  void close(Account* account);
  Account* find(ClientId client) const;  // null: unknown
  const Accounts& accounts() const { return accounts_; }
  QuotaBook& quotas() { return quotas_; }

  tiers::HostPool& pool() { return pool_; }
  const tiers::HostPool& pool() const { return pool_; }
  PageBank bank(Account* account) { return PageBank(&pool_, account->quota, this); }
  IndexBank index_bank(Account* account) {
    return IndexBank(&pool_, &budget_, &reclaimer_, &index_totals_, &account->indexes,
                     account->quota);
  }
  // Takes a reference of a page off, and its bytes off the account with the last.
  void release(Account* account, tiers::PageRef page);

  // That the quotas have room for `need` bytes, if need be without indexes. Fails: QUOTA.
  Status make_quota_room(Account* account, uint64_t need, std::string_view what);
  // For memory beside pages: observations, and what lists hold on the heap.
  // Fails: QUOTA, NO_SPACE; nothing is charged then.
  Status charge(Account* account, uint64_t size_bytes);
  void uncharge(Account* account, uint64_t size_bytes);
  // Charged until the last reference goes, with what size_bytes() says then. Throws std::bad_alloc:
  // nothing is charged.
  template <typename T>
  Result<std::shared_ptr<T>> make_charged(Account* account, T&& made) {
    const uint64_t made_bytes = made.size_bytes();
    KVM_TRY(charge(account, made_bytes));
    Undo uncharging([&] { uncharge(account, made_bytes); });
    T* charged = new T(std::move(made));
    uncharging.dismiss();  // what follows is for the deleter, even where it throws
    return std::shared_ptr<T>(charged, [this, account](T* gone) {
      uncharge(account, gone->size_bytes());
      delete gone;
    });
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
  uint64_t used_bytes() const { return budget_.used_bytes(); }
  uint64_t unreclaimed_bytes() const { return reclaimer_.size_bytes(); }

 private:
  // Memory that nothing is lost without, a bit of it: tables that are not needed any more, or else
  // the index that was used longest ago.
  bool relieve() override;
  // The client of a tenant whose index was used longest ago; null: none may go.
  // tenant == nullptr: of all.
  Account* oldest_index(const QuotaAccount* tenant);

  tiers::MemoryBudget budget_;
  tiers::HostPool pool_;
  TableReclaimer reclaimer_;
  QuotaBook quotas_;
  Accounts accounts_;
  ClientId next_client_ = 1;
  uint64_t charged_bytes_ = 0;  // by charge()
  IndexTotals index_totals_;
  StoreCounts counts_;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_STORE_MEMORY_H_
