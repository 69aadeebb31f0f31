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
  // REQUIRES: all sequences have been added. Aborts on the first thing that disagrees.
  void compare();

 private:
  using Payer = const Account*;
  struct Charge {
    uint64_t size_bytes = 0;
    Payer payer = nullptr;
  };

  void add_references(const PageList& list);
  void add_pages(const PageList& list, Payer payer);
  void add_beside(const Sequence& seq);
  void add_index(const LayerIndex& index, Payer payer);
  void add_head_index(const HeadIndex& head, Payer payer);
  void compare_references() const;
  void compare_accounts();

  const StoreMemory& memory_;
  const tiers::PageTable& table_;
  std::unordered_map<PageRef, uint32_t> page_refs_;
  std::unordered_map<const Root*, uint32_t> root_refs_;
  std::unordered_map<const Segment*, uint32_t> segment_refs_;
  std::unordered_map<Payer, uint64_t> n_sequences_;
  // Whose sequences refer to a page: one of them pays for it. Other memory counts by its address.
  std::unordered_map<Payer, std::unordered_set<PageRef>> pages_;
  std::unordered_map<const void*, Charge> beside_;
  std::unordered_map<const LayerIndex*, Payer> indexes_;
  std::unordered_map<const void*, Charge> index_memory_;
  std::unordered_set<PageRef> index_pages_;
};

void Recount::add(const Sequence& seq) {
  ++n_sequences_[seq.account];
  for (const PageList& list : seq.lists) {
    add_references(list);
    add_pages(list, seq.account);
  }
  add_beside(seq);
  for (const IndexRef& ref : seq.indexes) {
    if (ref.data != nullptr) {
      indexes_[ref.data.get()] = seq.account;
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

void Recount::add_pages(const PageList& list, Payer payer) {
  std::unordered_set<PageRef>& pages = pages_[payer];
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
  const auto add_one = [&](const auto* memory) {
    if (memory != nullptr) {
      beside_[memory] = {memory->size_bytes(), seq.account};
    }
  };
  for (const ObservedRef& ref : seq.observed) {
    add_one(ref.data.get());
  }
  for (const std::shared_ptr<MeanEntry>& ref : seq.mean_entries) {
    add_one(ref.get());
  }
  for (const std::shared_ptr<KeptTokens>& ref : seq.kept) {
    add_one(ref.get());
  }
  for (const MassesRef& ref : seq.masses) {
    add_one(ref.data.get());
  }
}

void Recount::add_index(const LayerIndex& index, Payer payer) {
  for (const HeadIndex& head : index.heads) {
    add_head_index(head, payer);
  }
}

void Recount::add_head_index(const HeadIndex& head, Payer payer) {
  for (const IndexPage& page : head.pages) {
    KVM_ASSERT(page.page != kNoPage || page.blocks == 0);
    if (page.page != kNoPage) {
      ++page_refs_[page.page];
      pages_[payer].insert(page.page);
      index_pages_.insert(page.page);
    }
  }
  for (const IndexFramePtr& frame : head.frames) {
    if (frame != nullptr) {
      index_memory_[frame.get()] = {frame->memory.size_bytes(), payer};
    }
  }
  for (const IndexTablesPtr& tables : head.tables) {
    index_memory_[tables.get()] = {tables->tables.size_bytes(), payer};
  }
}

void Recount::compare() {
  for (const auto& [index, payer] : indexes_) {
    add_index(*index, payer);
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
  std::unordered_map<Payer, uint64_t> account_bytes;
  std::unordered_map<Payer, uint64_t> index_bytes;
  std::unordered_map<const QuotaAccount*, uint64_t> tenant_bytes;
  uint64_t index_page_bytes = 0;
  uint64_t charged_bytes = 0;
  for (const auto& [page, n_refs] : page_refs_) {
    const Payer payer = &memory_.payer(page);
    KVM_ASSERT(pages_[payer].contains(page));
    account_bytes[payer] += table_.page_bytes(page);
    if (index_pages_.contains(page)) {
      index_bytes[payer] += table_.page_bytes(page);
      index_page_bytes += table_.page_bytes(page);
    }
  }
  for (const auto& [memory, charge] : beside_) {
    account_bytes[charge.payer] += charge.size_bytes;
    charged_bytes += charge.size_bytes;
  }
  for (const auto& [memory, charge] : index_memory_) {
    account_bytes[charge.payer] += charge.size_bytes;
    index_bytes[charge.payer] += charge.size_bytes;
  }
  for (const auto& [client, account] : memory_.accounts()) {
    KVM_ASSERT(account->quota->used(Resource::kBytes) == account_bytes[account.get()]);
    KVM_ASSERT(account->quota->used(Resource::kSequences) == n_sequences_[account.get()]);
    KVM_ASSERT(account->indexes.bytes == index_bytes[account.get()]);
    tenant_bytes[account->quota->tenant()] += account_bytes[account.get()];
  }
  for (const auto& [tenant, tenant_total] : tenant_bytes) {
    KVM_ASSERT(tenant->used(Resource::kBytes) == tenant_total);
  }
  const IndexTotals& totals = memory_.index_totals();
  KVM_ASSERT(index_pages_.size() == totals.n_pages);
  KVM_ASSERT(index_page_bytes == totals.page_bytes);
  KVM_ASSERT(charged_bytes == memory_.charged_bytes());
  KVM_ASSERT(memory_.used_bytes() == memory_.extent_bytes() + charged_bytes + totals.charged_bytes +
                                         memory_.unreclaimed_bytes());
}

}  // namespace

void check_store(const StoreMemory& memory, const IdTable<Sequence>& sequences) {
  memory.pages().check_accounts();
  Recount recount(memory);
  sequences.for_each([&](uint64_t, const Sequence& seq) { recount.add(seq); });
  recount.compare();
}

}  // namespace kvm::engine
