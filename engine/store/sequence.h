// SPDX-License-Identifier: Apache-2.0
// Sequence and SpaceRecord: what a store keeps of each, for the files behind engine/store/store.h.
//
// Threads: the driver thread.
#ifndef KVM_ENGINE_STORE_SEQUENCE_H_
#define KVM_ENGINE_STORE_SEQUENCE_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "engine/space/space.h"
#include "engine/store/kept_tokens.h"
#include "engine/store/layer_index.h"
#include "engine/store/leaving_order.h"
#include "engine/store/mean_entry.h"
#include "engine/store/observed.h"
#include "engine/store/page_list.h"
#include "engine/store/store_memory.h"
#include "kvm.h"
#include "policies/policy.h"

namespace kvm::engine {

// Governed are the lists of a space that one policy decides about.
struct Governed {
  const policies::Policy* policy = nullptr;
  struct Member {
    uint32_t layer;
    uint32_t class_index;
  };
  std::vector<Member> members;
};

struct SpaceRecord {
  kvm_space_id id = 0;
  uint32_t uid = kEverybody;  // whose it is
  std::shared_ptr<const Space> space;
  std::vector<Governed> governed;
  uint64_t n_sequences = 0;
};

// An ObservedRef refers to observations of one layer, perhaps shared, of which positions below
// `limit` hold.
struct ObservedRef {
  std::shared_ptr<Observed> data;
  uint64_t limit = UINT64_MAX;
};

// A MassesRef refers likewise to masses of one list.
struct MassesRef {
  std::shared_ptr<Masses> data;
  uint64_t limit = UINT64_MAX;
};

// A Giving is how far a sequence has come on its way to another account (store_give.cc).
struct Giving {
  Account* giver = nullptr;
  Account* taker = nullptr;
  bool is_taken = false;  // the sequence is the taker's; what it holds follows
  KvBytes expected_bytes;
  // The next pages to look at, then the next layer's index.
  size_t list = 0;
  uint64_t block = 0;
  uint32_t layer = 0;
};

struct Sequence {
  kvm_seq_id id = 0;
  Account* account = nullptr;
  SpaceRecord* record = nullptr;
  uint32_t flags = 0;
  uint64_t n_committed = 0;
  std::vector<PageList> lists;  // [Space::n_lists]
  // Per Governed of the space: the commit point at which the policy wants to be asked again.
  std::vector<uint64_t> next_commits;
  // [Space::n_lists], or empty: no list settles. Full pages at positions before it are stored as
  // their class says, or cannot be. Of a pair the deeper layer's lists speak for both.
  std::vector<uint64_t> settled_ends;
  policies::EventSet due_events = 0;  // that policies have not been asked about
  // Where heads wait for the prompt's end: where it is (UINT64_MAX: not known), and, where budgets
  // are shared out, what each list keeps once it is committed [Space::n_lists]; else empty.
  uint64_t prompt_end = UINT64_MAX;
  std::vector<policies::Budget> budgets;
  std::vector<ObservedRef> observed;  // empty, or [n_layers]
  std::vector<IndexRef> indexes;      // [n_layers], or empty: the space has none
  // [Space::n_lists], or empty: nothing has been folded.
  std::vector<std::shared_ptr<MeanEntry>> mean_entries;
  // Likewise of lists that choose tokens.
  std::vector<std::shared_ptr<KeptTokens>> kept;
  std::vector<MassesRef> masses;
  std::unique_ptr<Giving> giving;  // null: it stays
  Residence residence;             // of engines with a slow tier

  const Space& space() const { return *record->space; }
  // What a list has kept of pages that it gave up; null: nothing.
  const KeptTokens* kept_of(size_t list) const { return kept.empty() ? nullptr : kept[list].get(); }
  // The lists of an OWN layer.
  std::span<PageList> layer_lists(uint32_t layer) {
    const Layer& own = space().layers[layer];
    return {lists.data() + own.first_list, own.classes.size()};
  }
  std::span<const PageList> layer_lists(uint32_t layer) const {
    const Layer& own = space().layers[layer];
    return {lists.data() + own.first_list, own.classes.size()};
  }
  // The lists that hold the tokens of a layer: those of its storage layer, none where it is ABSENT.
  std::span<const PageList> stored_lists(uint32_t layer) const {
    return layer_lists(space().layers[layer].storage_layer);
  }
};

// An empty one. Throws std::bad_alloc.
std::unique_ptr<Sequence> make_seq(Account* account, SpaceRecord* record, uint32_t flags);

// Forgets a Giving, wherever it stands.
void end_giving(Sequence* seq);

inline void note(Sequence* seq, policies::Event event) {
  seq->due_events |= policies::event_bit(event);
}
// Calls visit(pointer) for what the sequence has on the heap beside its lists, each made by
// StoreMemory::make_charged, or null.
template <typename Visit>
void visit_charged(const Sequence& seq, Visit visit) {
  for (const ObservedRef& ref : seq.observed) {
    visit(ref.data);
  }
  for (const std::shared_ptr<MeanEntry>& ref : seq.mean_entries) {
    visit(ref);
  }
  for (const std::shared_ptr<KeptTokens>& ref : seq.kept) {
    visit(ref);
  }
  for (const MassesRef& ref : seq.masses) {
    visit(ref.data);
  }
}
// Moves the commit point, forwards only.
void advance_commit(Sequence* seq, uint64_t n_tokens);
// The prompt ends with the first n_tokens, unless it did before.
void end_prompt(Sequence* seq, uint64_t n_tokens);
// Of a sequence that is cut to n_tokens: another prompt's end is waited for where this one's is
// gone and nothing has been given up for it. REQUIRES: the lists have been cut.
void cut_prompt(Sequence* seq, uint64_t n_tokens);
// What a list keeps; while it awaits its share, what its class says.
policies::Budget budget_of(const Sequence& seq, uint32_t layer, uint32_t class_index);
bool awaits_share(const Sequence& seq, const Retention& retention);

// The end of the last full page of n_tokens is as far as pages can be settled.
void cut_settled(Sequence* seq, uint64_t n_tokens);

// Gives up pages of a sequence that is freed until *n_given, which counts them, has reached
// max_pages. True when it holds nothing any more; until then it is one that is shorter than it was.
bool give_up_some(StoreMemory* memory, Sequence* seq, uint64_t max_pages, uint64_t* n_given);

// One Governed per policy object that has anything to decide; of settle() two, around the others:
// what others read has been settled, and what they drop need not be.
std::vector<Governed> find_governed(const Space& space);

uint64_t shortest_layer(const Sequence* seq);
uint64_t longest_layer(const Sequence* seq);
// As Store::length.
uint64_t layer_length(const Sequence* seq, uint32_t layer);

// INVALID: beyond the space, or ABSENT.
Status check_layer(const Sequence* seq, uint32_t layer);

// Forget what was folded and kept of tokens from n_tokens on. Cuts that would need a part of it are
// refused before (check_cut); who cuts before all of it has nothing of it left.
void cut_mean_entries(Sequence* seq, uint64_t n_tokens);
void cut_kept_tokens(Sequence* seq, uint64_t n_tokens);
// Makes the parent's indexes such that a fork of n_tokens may share them, whatever is built of them
// by then. No index is built.
void prepare_index_fork(StoreMemory* memory, Sequence* parent, uint64_t n_tokens);
// What the index of the first n_tokens covers stays. Throws nothing; it is no use of the index.
void cut_indexes(Sequence* seq, uint64_t n_tokens);
// Keeps the index of a layer from making way. REQUIRES: the pin is gone before anything changes the
// sequence.
IndexPin pin_layer_index(const Sequence* seq, uint32_t layer);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_SEQUENCE_H_
