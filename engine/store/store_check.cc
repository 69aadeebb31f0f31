// SPDX-License-Identifier: Apache-2.0
#include "engine/store/store_check.h"

#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/assert.h"

namespace kvm::engine {

using tiers::kNoPage;
using tiers::PageRef;

namespace {

// Everything that sequences refer to, counted from them alone.
class Recount {
 public:
  explicit Recount(const StoreMemory& memory) : memory_(memory), table_(memory.pages()) {}

  void add(const Sequence& seq);
  void add(const Aside& aside);
  // REQUIRES: all sequences have been added. Aborts on the first thing that disagrees.
  void compare();

 private:
  using Payer = const Account*;
  struct Charge {
    uint64_t size_bytes = 0;
    Payer payer = nullptr;
  };

  // A tenant: whose sequences refer to a page. One of its accounts pays for it.
  using Tenant = const QuotaAccount*;

  void add_holdings(const Sequence& seq);
  void add_references(const PageList& list);
  void add_pages(const PageList& list, Tenant tenant);
  void add_beside(const Sequence& seq);
  void add_index(const LayerIndex& index, Tenant tenant);
  void add_head_index(const HeadIndex& head, Tenant tenant);
  void compare_references() const;
  void compare_accounts();

  const StoreMemory& memory_;
  const tiers::PageTable& table_;
  std::unordered_map<PageRef, uint32_t> page_refs_;
  std::unordered_map<const Root*, uint32_t> root_refs_;
  std::unordered_map<const Segment*, uint32_t> segment_refs_;
  std::unordered_map<Payer, uint64_t> n_sequences_;
  std::unordered_map<Tenant, std::unordered_set<PageRef>> pages_;
  std::unordered_map<const void*, Charge> beside_;  // by its address
  std::unordered_map<const LayerIndex*, Tenant> indexes_;
  std::unordered_map<Payer, uint64_t> n_named_;
  std::unordered_map<Payer, KvBytes> expected_bytes_;  // of asides
  std::unordered_map<const void*, Charge> index_memory_;
  std::unordered_set<PageRef> index_pages_;
};

void Recount::add(const Sequence& seq) {
  ++n_sequences_[seq.account];
  add_holdings(seq);
}

void Recount::add(const Aside& aside) {
  const Payer account = aside.seq->account;
  ++(aside.is_loaded ? n_sequences_ : n_named_)[account];
  expected_bytes_[account] += aside.expected_bytes;
  add_holdings(*aside.seq);
}

void Recount::add_holdings(const Sequence& seq) {
  if (seq.giving != nullptr) {
    ++n_named_[seq.giving->giver];
    ++n_named_[seq.giving->taker];
  }
  const Tenant tenant = seq.account->quota->tenant();
  for (const PageList& list : seq.lists) {
    add_references(list);
    add_pages(list, tenant);
  }
  add_beside(seq);
  for (const IndexRef& ref : seq.indexes) {
    if (ref.data != nullptr) {
      indexes_[ref.data.get()] = tenant;
    }
  }
}

void Recount::add_references(const PageList& list) {
  if (list.root() != nullptr && ++root_refs_[list.root()] == 1) {
    for (const Segment* segment : list.root()->segments) {
      KVM_ASSERT(!segment->entries.empty() && segment->entries.size() <= kSegmentEntries);
      if (++segment_refs_[segment] > 1) {
        continue;
      }
      for (const PageEntry& entry : segment->entries) {
        ++page_refs_[entry.page];
      }
    }
  }
  for (const PageRef page : {list.tail().page, list.pending_tail()}) {
    page_refs_[page] += page != kNoPage ? 1 : 0;
  }
  for (const PageRef page : list.pending()) {
    ++page_refs_[page];
  }
}

void Recount::add_pages(const PageList& list, Tenant tenant) {
  std::unordered_set<PageRef>& pages = pages_[tenant];
  uint64_t n_stored = 0;
  uint64_t position = 0;
  list.for_each([&](const PageEntry& entry, bool) {
    KVM_ASSERT(entry.count > 0 && entry.position() >= position);
    position = entry.end();
    n_stored += entry.count;
    pages.insert(entry.page);
  });
  KVM_ASSERT(n_stored + list.n_dropped() == list.reserved_length());
  if (list.pending_tail() != kNoPage && list.tail().page != kNoPage) {
    pages.insert(list.tail().page);
  }
}

void Recount::add_beside(const Sequence& seq) {
  visit_charged(seq, [&](const auto& memory) {
    if (memory != nullptr) {
      const Payer payer = StoreMemory::payer(memory);
      KVM_ASSERT(payer->quota->tenant() == seq.account->quota->tenant());
      const bool is_new = beside_.insert({memory.get(), {memory->size_bytes(), payer}}).second;
      n_named_[payer] += is_new ? 1 : 0;
    }
  });
}

void Recount::add_index(const LayerIndex& index, Tenant tenant) {
  ++n_named_[index.bank.account()];
  for (const HeadIndex& head : index.heads) {
    add_head_index(head, tenant);
  }
}

void Recount::add_head_index(const HeadIndex& head, Tenant tenant) {
  for (const IndexPage& page : head.pages) {
    KVM_ASSERT(page.page != kNoPage || page.blocks == 0);
    if (page.page != kNoPage) {
      ++page_refs_[page.page];
      pages_[tenant].insert(page.page);
      index_pages_.insert(page.page);
    }
  }
  for (const IndexFramePtr& frame : head.frames) {
    if (frame != nullptr) {
      KVM_ASSERT(frame->memory.payer()->quota->tenant() == tenant);
      index_memory_[frame.get()] = {frame->memory.size_bytes(), frame->memory.payer()};
    }
  }
  for (const IndexTablesPtr& tables : head.tables) {
    KVM_ASSERT(tables->tables.payer()->quota->tenant() == tenant);
    index_memory_[tables.get()] = {tables->tables.size_bytes(), tables->tables.payer()};
  }
}

void Recount::compare() {
  for (const auto& [index, tenant] : indexes_) {
    add_index(*index, tenant);
  }
  page_refs_.erase(kNoPage);
  compare_references();
  compare_accounts();
}

void Recount::compare_references() const {
  KVM_ASSERT(page_refs_.size() == table_.n_pages());
  for (const auto& [page, n_refs] : page_refs_) {
    KVM_ASSERT(table_.n_refs(page) == n_refs);
  }
  for (const auto& [root, n_refs] : root_refs_) {
    KVM_ASSERT(root->n_refs == n_refs);
  }
  for (const auto& [segment, n_refs] : segment_refs_) {
    KVM_ASSERT(segment->n_refs == n_refs);
  }
}

void Recount::compare_accounts() {
  std::unordered_map<Payer, KvBytes> account_bytes = expected_bytes_;
  std::unordered_map<Payer, uint64_t> index_bytes;
  std::unordered_map<const QuotaAccount*, KvBytes> tenant_bytes;
  uint64_t index_page_bytes = 0;
  uint64_t charged_bytes = 0;
  for (const auto& [page, n_refs] : page_refs_) {
    const Payer payer = &memory_.page_payer(page);
    KVM_ASSERT(pages_[payer->quota->tenant()].contains(page));
    account_bytes[payer] += PageBank::bytes_of(table_, page);
    if (index_pages_.contains(page)) {
      index_bytes[payer] += table_.page_bytes(page);
      index_page_bytes += table_.page_bytes(page);
    }
  }
  for (const auto& [memory, charge] : beside_) {
    account_bytes[charge.payer] += KvBytes::that_stay(charge.size_bytes);
    charged_bytes += charge.size_bytes;
  }
  for (const auto& [memory, charge] : index_memory_) {
    account_bytes[charge.payer] += KvBytes::that_stay(charge.size_bytes);
    index_bytes[charge.payer] += charge.size_bytes;
  }
  for (const auto& [client, account] : memory_.accounts()) {
    KVM_ASSERT(account->quota->used_bytes() == account_bytes[account.get()]);
    KVM_ASSERT(account->quota->used(Resource::kSequences) == n_sequences_[account.get()]);
    KVM_ASSERT(account->indexes.bytes == index_bytes[account.get()]);
    KVM_ASSERT(account->n_named == n_named_[account.get()]);
    tenant_bytes[account->quota->tenant()] += account_bytes[account.get()];
  }
  for (const auto& [tenant, tenant_total] : tenant_bytes) {
    KVM_ASSERT(tenant->used_bytes() == tenant_total);
  }
  const IndexTotals& totals = memory_.index_totals();
  KVM_ASSERT(index_pages_.size() == totals.n_pages);
  KVM_ASSERT(index_page_bytes == totals.page_bytes);
  KVM_ASSERT(charged_bytes == memory_.charged_bytes());
  KVM_ASSERT(memory_.used_bytes() == memory_.extent_bytes() + charged_bytes + totals.charged_bytes +
                                         memory_.unreclaimed_bytes() +
                                         memory_.rings().size_bytes());
}

}  // namespace

void check_store(const StoreMemory& memory, const IdTable<Sequence>& sequences,
                 std::span<const std::unique_ptr<Aside>> asides) {
  memory.pages().check_accounts();
  Recount recount(memory);
  sequences.for_each([&](uint64_t, const Sequence& seq) { recount.add(seq); });
  for (const std::unique_ptr<Aside>& aside : asides) {
    recount.add(*aside);
  }
  recount.compare();
}

}  // namespace kvm::engine
