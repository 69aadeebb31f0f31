// SPDX-License-Identifier: Apache-2.0
// Account: what a client has in a store, and the numbers by which pages name who pays for them.
//
// Three kinds of accounts pay: those of clients; those of clients that are gone, as long as what
// they paid for lives on in a sequence of somebody else; and the library of a user, by which the
// service itself owns what was published.
//
// Threads: the driver thread.
#ifndef KVM_ENGINE_STORE_ACCOUNT_H_
#define KVM_ENGINE_STORE_ACCOUNT_H_

#include <cstdint>
#include <list>
#include <vector>

#include "base/assert.h"
#include "base/reserve.h"
#include "engine/store/quota.h"
#include "kvm.h"
#include "tiers/page_table.h"

namespace kvm::engine {

struct LayerIndex;

// IndexUses are the indexes of one client by their last use.
class IndexUses {
 public:
  // Makes `index` the one that was used last.
  void touch(LayerIndex* index);
  void remove(LayerIndex* index);
  // Moves an index of another client here, as the one that was used last. Throws nothing.
  void take_over(LayerIndex* index, IndexUses* from);
  // When the index was used that goes first; UINT64_MAX: none may go.
  uint64_t oldest_use() const;
  // Empties it. False: none may go.
  bool drop_oldest();

  uint64_t bytes = 0;  // of all, as charged to the client

 private:
  std::list<LayerIndex*>::const_iterator find_oldest() const;

  std::list<LayerIndex*> order_;  // that hold anything, the longest unused first
};

struct Account {
  ClientId client = 0;
  tiers::PayerId payer{};  // its number in Payers
  QuotaAccount* quota = nullptr;
  IndexUses indexes;
  uint64_t n_named = 0;       // by how many indexes, Givings, and things charged on the heap
  kvm_seq_id next_freed = 0;  // where Store::free_some goes on
  bool is_library = false;
  bool has_left = false;  // the client

  // Whether nothing names it any more.
  bool is_unused() const {
    return n_named == 0 && quota->used(Resource::kBytes) == 0 &&
           quota->used(Resource::kSequences) == 0 && quota->used(Resource::kSnapshotBytes) == 0 &&
           quota->expected(Resource::kBytes) == 0;
  }
};

// Payers are the accounts that pages may name. Bytes of a page are added to an account when it is
// allocated, and come off the account that its record names when its last reference goes, whoever
// lets go of that.
class Payers {
 public:
  // Gives the account its number. Throws std::bad_alloc: nothing has changed.
  void add(Account* account) {
    reserve_growing(free_, accounts_.size() + 1);
    if (free_.empty()) {
      accounts_.push_back(account);
      account->payer = static_cast<tiers::PayerId>(accounts_.size() - 1);
    } else {
      account->payer = static_cast<tiers::PayerId>(free_.back());
      free_.pop_back();
      accounts_[static_cast<uint32_t>(account->payer)] = account;
    }
  }
  // REQUIRES: no page names it any more. Throws nothing.
  void remove(tiers::PayerId payer) {
    accounts_[static_cast<uint32_t>(payer)] = nullptr;
    free_.push_back(static_cast<uint32_t>(payer));
  }
  Account& at(tiers::PayerId payer) const {
    Account* account = accounts_[static_cast<uint32_t>(payer)];
    KVM_ASSERT(account != nullptr);
    return *account;
  }

 private:
  std::vector<Account*> accounts_;  // null: the number is free
  std::vector<uint32_t> free_;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_ACCOUNT_H_
