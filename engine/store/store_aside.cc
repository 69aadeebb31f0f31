// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "base/undo.h"
#include "engine/store/store.h"

namespace kvm::engine {

Aside* Store::add_aside(std::unique_ptr<Sequence>&& seq, bool is_loaded) {
  Aside& added = *asides_.emplace_back(std::make_unique<Aside>());
  added.seq = std::move(seq);
  added.is_loaded = is_loaded;
  ++added.seq->record->n_sequences;
  if (is_loaded) {
    added.seq->account->quota->charge(Resource::kSequences, 1);
  } else {
    ++added.seq->account->n_named;
  }
  return &added;
}

Result<Aside*> Store::fork_aside(const Sequence* parent) {
  Account* library = parent->account->is_library
                         ? parent->account
                         : memory_.library_of(parent->account, library_limits());
  std::unique_ptr<Sequence> child = make_seq(library, parent->record, parent->flags);
  Undo clearing([&] { clear_seq(child.get()); });
  const PageBank bank = memory_.bank(library);
  for (size_t i = 0; i < parent->lists.size(); ++i) {
    child->lists[i].share(parent->lists[i], parent->lists[i].length(), bank);
  }
  child->n_committed = parent->n_committed;
  child->next_commits = parent->next_commits;
  child->settled_ends = parent->settled_ends;
  child->due_events = parent->due_events;
  child->prompt_end = parent->prompt_end;
  child->budgets = parent->budgets;
  child->observed = parent->observed;
  child->mean_entries = parent->mean_entries;
  child->kept = parent->kept;
  child->masses = parent->masses;
  asides_.reserve(asides_.size() + 1);
  Aside* added = add_aside(std::move(child), false);
  clearing.dismiss();
  return added;
}

Result<Aside*> Store::begin_aside(ClientId client, kvm_space_id space, const KvBytes& page_bytes) {
  Account* account = memory_.find(client);
  KVM_ASSERT(account != nullptr);
  KVM_TRY_ASSIGN(SpaceRecord * record, record_for(client, space));
  KVM_TRY(check_limits(account, "a sequence that is loaded"));
  KVM_TRY(memory_.make_quota_room(account, page_bytes, "a sequence that is loaded"));
  std::unique_ptr<Sequence> seq = make_seq(account, record, 0);
  asides_.reserve(asides_.size() + 1);
  Aside* added = add_aside(std::move(seq), true);
  added->expected_bytes = page_bytes;
  account->quota->charge(page_bytes);
  return added;
}

Status Store::restore_page(Aside* aside, uint32_t list, const tiers::SlabClass& slab_class,
                           tiers::PlaceId place, PageEntry entry) {
  const KvBytes page_bytes = KvBytes::of(slab_class.page_bytes(), slab_class.stays());
  KVM_ASSERT(aside->is_loaded && aside->expected_bytes.covers(page_bytes));
  const PageBank bank = memory_.bank(aside->seq->account);
  PageList& to = aside->seq->lists[list];
  to.expect_entry(bank);
  KVM_TRY_ASSIGN(entry.page, memory_.pages().adopt(slab_class, aside->seq->account->payer, place));
  aside->expected_bytes -= page_bytes;
  to.restore(entry, bank);
  return Status::ok();
}

void Store::forget_aside(Aside* aside) {
  const auto found = std::find_if(asides_.begin(), asides_.end(),
                                  [aside](const auto& one) { return one.get() == aside; });
  KVM_ASSERT(found != asides_.end());
  asides_.erase(found);
}

kvm_seq_id Store::admit_aside(Aside* aside) {
  KVM_ASSERT(aside->is_loaded && aside->expected_bytes == KvBytes{});
  Sequence* seq = aside->seq.get();
  seq->id = sequences_.insert(std::move(aside->seq));
  forget_aside(aside);
  return seq->id;
}

bool Store::free_aside_part(Aside* aside, uint64_t max_pages) {
  Sequence* seq = aside->seq.get();
  uint64_t n_given = 0;
  if (!give_up_some(&memory_, seq, max_pages, &n_given)) {
    return false;
  }
  clear_seq(seq);
  Account* account = seq->account;
  --seq->record->n_sequences;
  if (aside->is_loaded) {
    account->quota->give_back(Resource::kSequences, 1);
    account->quota->give_back(aside->expected_bytes);
  } else {
    --account->n_named;
  }
  forget_aside(aside);
  memory_.trim_after_free();
  return true;
}

}  // namespace kvm::engine
