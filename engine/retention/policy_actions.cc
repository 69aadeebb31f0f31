// SPDX-License-Identifier: Apache-2.0
#include "engine/retention/policy_actions.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "base/assert.h"
#include "base/round.h"
#include "base/undo.h"
#include "engine/index/sequence_index.h"
#include "engine/store/kept_tokens.h"
#include "engine/store/mean_entry.h"
#include "engine/store/observations.h"
#include "engine/store/stored_runs.h"

namespace kvm::engine {

using tiers::PageRef;

namespace {

Status check_action(const Sequence* seq, const policies::Action& action) {
  const Space& space = seq->space();
  if (action.layer >= space.n_layers ||
      action.class_index >= space.layers[action.layer].classes.size()) {
    return Status(KVM_ERR_INVALID, fmt::format("there is no head class {} of layer {}",
                                               action.class_index, action.layer));
  }
  const PositionRange range = action.range;
  if (range.begin > range.end || range.end > seq->n_committed) {
    return Status(KVM_ERR_INVALID, fmt::format("an action on [{}, {}); the commit point is {}",
                                               range.begin, range.end, seq->n_committed));
  }
  if (range.begin % kPageTokens != 0 || range.end % kPageTokens != 0) {
    return Status(KVM_ERR_INVALID,
                  fmt::format("an action on [{}, {}); it must be whole pages of {}", range.begin,
                              range.end, kPageTokens));
  }
  return Status::ok();
}

// What pages of a class have to know of the queries.
std::vector<float> balances(const Sequence& seq, uint32_t layer, const tiers::SlabClass& target,
                            const HeadClass& head_class) {
  return target.k().is_balanced ? largest_queries(&seq, layer, head_class.kv_heads)
                                : std::vector<float>();
}

// The other list of a list that pairs; null where it does not.
PageList* partner_list(Sequence* seq, uint32_t layer, uint32_t class_index) {
  const Layer& own = seq->space().layers[layer];
  return own.pairs() ? &seq->layer_lists(own.partner)[class_index] : nullptr;
}

// A Source is a page that is to be encoded anew; of a pair's layer with that of the other.
struct Source {
  PageEntry entry;
  PageEntry shallow;
};

// Of pages of the deeper layer of a pair those that can be merged: both are as they were appended.
void find_partners(const tiers::PageTable& pages, const PageList& shallow,
                   const tiers::SlabClass& target, std::vector<Source>* sources) {
  const auto can_merge = [&](const PageEntry& entry) {
    return entry.count == kPageTokens && pages.slab_class(entry.page) == target.tail();
  };
  if (!sources->empty()) {
    size_t next = 0;
    shallow.for_each_between(
        sources->front().entry.block, uint64_t{sources->back().entry.block} + 1,
        [&](const PageEntry& entry) {
          while (next < sources->size() && (*sources)[next].entry.block < entry.block) {
            ++next;
          }
          if (next < sources->size() && (*sources)[next].entry.block == entry.block &&
              can_merge(entry)) {
            (*sources)[next].shallow = entry;
          }
        });
  }
  std::erase_if(*sources, [&](const Source& source) {
    return source.shallow.page == tiers::kNoPage || !can_merge(source.entry);
  });
}

// Takes pages for a part of a kDemote: as many as read about most_bytes, by the weight of the
// target, and as there is room for, one at least. *end: where the part ends.
Result<Recodings> open_recodings(StoreMemory* memory, Sequence* seq, const policies::Action& action,
                                 uint64_t most_bytes, uint64_t* end) {
  tiers::SlabClass target = seq->space().head_class(action.layer, action.class_index).slab_class;
  target.codec_k = action.codec_k;
  target.codec_v = action.codec_v;
  if (target.page_bytes() > tiers::kExtentBytes) {
    return Status(KVM_ERR_INVALID, fmt::format("a page would have {} bytes; it must fit {}",
                                               target.page_bytes(), tiers::kExtentBytes));
  }
  const tiers::PageTable& pages = memory->pages();
  const HeadClass& head_class = seq->space().head_class(action.layer, action.class_index);
  const bool merges = target.k().is_pair();
  std::vector<Source> sources;
  uint64_t n_bytes = 0;
  *end = action.range.end;
  std::as_const(*seq).layer_lists(action.layer)[action.class_index].for_each_between(
      action.range.begin / kPageTokens, action.range.end / kPageTokens,
      [&](const PageEntry& entry) {
        // What is away stays as it is, and so does what begins behind a cut.
        if (entry.count != kPageTokens || entry.position() >= *end ||
            pages.slab_class(entry.page) == target || !pages.is_in_memory(entry.page)) {
          return;
        }
        sources.push_back({.entry = entry, .shallow = {}});
        n_bytes += pages.page_bytes(entry.page) * (merges ? 2 : 1) * Recodings::weight(target);
        *end = n_bytes >= most_bytes ? entry.end() : *end;
      });
  if (merges) {
    KVM_ASSERT(head_class.side == codecs::PairSide::kDeep);
    find_partners(pages, *partner_list(seq, action.layer, action.class_index), target, &sources);
  }
  Recodings recodings(memory->bank(seq->account), target,
                      balances(*seq, action.layer, target, head_class));
  for (const auto& [entry, shallow] : sources) {
    Status status =
        memory->make_quota_room(seq->account, KvBytes::of(target.page_bytes(), target.stays()),
                                "re-encoding, for a moment");
    if (status.is_ok()) {
      status = merges ? recodings.add_pair(shallow, entry, seq->space().layers[action.layer].pair_t)
                      : recodings.add(entry);
    }
    if (!status.is_ok() && recodings.size() == 0) {
      return status;
    }
    if (!status.is_ok()) {  // the old pages of this part make room for the next
      *end = entry.position();
      break;
    }
  }
  return recodings;
}

// The whole of a kDemote at once, or nothing.
Status demote(StoreMemory* memory, Sequence* seq, const policies::Action& action) {
  uint64_t end = 0;
  KVM_TRY_ASSIGN(Recodings recodings, open_recodings(memory, seq, action, UINT64_MAX, &end));
  if (end < action.range.end) {
    return Status(KVM_ERR_NO_SPACE, fmt::format("there is room to encode the pages up to {} anew, "
                                                "and {} were asked for",
                                                end, action.range.end));
  }
  Workspace scratch;
  if (!recodings.run(0, recodings.n_planes(), &scratch)) {
    return Status::fixed(KVM_ERR_NO_MEMORY, "the machine refused memory for encoding");
  }
  recodings.place(&seq->layer_lists(action.layer)[action.class_index],
                  partner_list(seq, action.layer, action.class_index));
  return Status::ok();
}

// What of a fold or a keep goes: not the pages in whose places others stand.
PositionRange dropped_range(const RetentionSlice::Work& work) {
  const PositionRange range = work.action.range;
  return {range.begin, range.end - uint64_t{work.recodings.size()} * kPageTokens};
}

// Allocates what drop_pages needs, while nothing of the work has happened.
void prepare_drop_pages(StoreMemory* memory, Sequence* seq, const RetentionSlice::Work& work) {
  const PositionRange range = dropped_range(work);
  seq->lists[work.list].prepare_drop(static_cast<uint32_t>(range.begin / kPageTokens),
                                     static_cast<uint32_t>(range.end / kPageTokens),
                                     memory->bank(seq->account));
}

void drop_pages(StoreMemory* memory, Sequence* seq, const RetentionSlice::Work& work) {
  const PositionRange range = dropped_range(work);
  memory->counts().n_pages_dropped += seq->lists[work.list].drop(
      static_cast<uint32_t>(range.begin / kPageTokens),
      static_cast<uint32_t>(range.end / kPageTokens), memory->bank(seq->account));
}

// Returns the mean entry of a list to be changed: a new one where there is none, a copy where it
// is shared.
Result<MeanEntry*> own_mean_entry(StoreMemory* memory, Sequence* seq, uint32_t list,
                                  const tiers::SlabClass& slab_class) {
  if (seq->mean_entries.empty()) {
    seq->mean_entries.resize(seq->space().n_lists);
  }
  std::shared_ptr<MeanEntry>& ref = seq->mean_entries[list];
  if (StoreMemory::is_own(seq->account, ref)) {
    return ref.get();
  }
  MeanEntry own;
  if (ref != nullptr) {
    own = *ref;
  } else {
    own.k.resize(slab_class.dim_k);
    own.v.resize(slab_class.v_in_k ? 0 : slab_class.dim_v);
  }
  KVM_TRY_ASSIGN(ref, memory->make_charged(seq->account, std::move(own)));
  return ref.get();
}

// Returns where the pages begin that a class gives up.
uint64_t first_given_up(const HeadClass& head_class) {
  return round_up(head_class.retention.n_sinks, kPageTokens);
}

// Says which kept tokens of a list a work changes: those that are there, or new ones, in whose
// place close_keep() puts them, with room for n_kept, where there are none or others share them.
Status own_kept_tokens(StoreMemory* memory, Sequence* seq, const HeadClass& head_class,
                       uint32_t n_kept, RetentionSlice::Work* work) {
  if (seq->kept.empty()) {
    seq->kept.resize(seq->space().n_lists);
  }
  const std::shared_ptr<KeptTokens>& ref = seq->kept[work->list];
  if (StoreMemory::is_own(seq->account, ref)) {
    work->kept = ref.get();
    return Status::ok();
  }
  KeptTokens own =
      ref != nullptr
          ? ref->without_rows()
          : KeptTokens(head_class.kept_class(), first_given_up(head_class), n_kept,
                       head_class.retention.merge == KVM_MERGE_COUNTED, head_class.demotes());
  KVM_TRY_ASSIGN(work->new_kept, memory->make_charged(seq->account, std::move(own)));
  work->clones = ref.get();
  work->kept = work->new_kept.get();
  return Status::ok();
}

// The same; `begin`: of a new one.
Result<Masses*> own_masses(StoreMemory* memory, Sequence* seq, uint32_t list, uint64_t begin) {
  if (seq->masses.empty()) {
    seq->masses.resize(seq->space().n_lists);
  }
  MassesRef& ref = seq->masses[list];
  if (!StoreMemory::is_own(seq->account, ref.data) || ref.limit != UINT64_MAX) {
    const KeptTokens* kept = seq->kept_of(list);
    Masses own;
    own.begin = begin;
    if (ref.data != nullptr) {
      own = *ref.data;
      const uint64_t n_held = ref.limit <= own.begin ? 0 : ref.limit - own.begin;
      own.recent.resize(std::min<uint64_t>(own.recent.size(), n_held));
    }
    own.kept.resize(kept == nullptr ? 0 : kept->tokens().size());
    KVM_TRY_ASSIGN(ref.data, memory->make_charged(seq->account, std::move(own)));
    ref.limit = UINT64_MAX;
  }
  return ref.data.get();
}

// To n, with zeros; no change where there are as many.
Status grow_charged(StoreMemory* memory, const Sequence* seq, uint64_t n,
                    std::vector<float>* values) {
  if (n <= values->size()) {
    return Status::ok();
  }
  const uint64_t more_bytes = (n - values->size()) * sizeof(float);
  KVM_TRY(memory->charge(seq->account, more_bytes));
  Undo uncharging([&] { memory->uncharge(seq->account, more_bytes); });
  values->resize(n);
  uncharging.dismiss();
  return Status::ok();
}

Status open_demote(StoreMemory* memory, RetentionSlice* slice, const policies::Action& action,
                   bool* is_cut) {
  Sequence* seq = slice->seq();
  const Layer& layer = seq->space().layers[action.layer];
  RetentionSlice::Work work;
  work.action = action;
  work.list = layer.first_list + action.class_index;
  policies::Action whole = action;
  if (const PageList* other = partner_list(seq, action.layer, action.class_index);
      other != nullptr) {
    // A layer that tokens have left behind is waited for.
    const uint64_t end = other->length() / kPageTokens * kPageTokens;
    whole.range.end = std::clamp(end, action.range.begin, action.range.end);
  }
  constexpr uint64_t kMostBytes = RetentionSlice::kSliceBytes / RetentionSlice::kEncodeWeight;
  KVM_TRY_ASSIGN(work.recodings,
                 open_recodings(memory, seq, whole, kMostBytes, &work.action.range.end));
  *is_cut = work.action.range.end < whole.range.end;
  slice->add_demote(std::move(work), layer.classes[action.class_index].slab_class);
  return Status::ok();
}

Status open_fold(StoreMemory* memory, RetentionSlice* slice, const policies::Action& action,
                 bool* is_cut) {
  Sequence* seq = slice->seq();
  const Layer& layer = seq->space().layers[action.layer];
  const HeadClass& head_class = layer.classes[action.class_index];
  KVM_ASSERT(head_class.retention.kind == KVM_RETAIN_SINKS_RECENT_FOLD);
  RetentionSlice::Work work;
  work.action = action;
  work.list = layer.first_list + action.class_index;
  const uint64_t most = action.range.begin + RetentionSlice::kActionPages * kPageTokens;
  *is_cut = action.range.end > most;
  work.action.range.end = std::min(action.range.end, most);
  collect_between(*memory, seq, action.layer, action.class_index, action.range.begin / kPageTokens,
                  work.action.range.end / kPageTokens, &work.runs);
  prepare_drop_pages(memory, seq, work);
  KVM_TRY(own_mean_entry(memory, seq, work.list, head_class.slab_class).status());
  slice->add_fold(std::move(work), head_class.slab_class);
  return Status::ok();
}

// Takes pages for the tokens of a kKeep that do not stay, kept before or of its range, in position
// order; the piece that chooses says which they are. Fails: NO_SPACE, QUOTA; UNSUPPORTED: rows that
// what is kept cannot hold.
Status add_demoted(StoreMemory* memory, Sequence* seq, const HeadClass& head_class,
                   RetentionSlice::Work* work) {
  const tiers::SlabClass kept_class = head_class.kept_class();
  const auto can_keep = [](const codecs::Codec& own, CodecId stored) {
    return own.id == stored || own.rows_stand_alone();
  };
  for (const KvRun& run : work->runs) {
    if (!can_keep(kept_class.k(), run.k.codec) || !can_keep(kept_class.v(), run.v.codec)) {
      return Status::fixed(KVM_ERR_UNSUPPORTED, "a page has numbers that its codec cannot hold");
    }
  }
  uint64_t n_tokens = work->kept->tokens().size();
  for (const KvRun& run : work->runs) {
    n_tokens += run.n_tokens;
  }
  KVM_ASSERT(n_tokens >= work->positions.size());
  const uint64_t n_going = n_tokens - work->positions.size();
  KVM_ASSERT(n_going % kPageTokens == 0);
  const auto n_pages = static_cast<uint32_t>(n_going / kPageTokens);
  const auto block_end = static_cast<uint32_t>(work->action.range.end / kPageTokens);
  const uint32_t first = block_end - n_pages;
  KVM_ASSERT(first >= work->action.range.begin / kPageTokens);
  const tiers::SlabClass& target = head_class.demoted;
  work->recodings = Recodings(memory->bank(seq->account), target,
                              balances(*seq, work->action.layer, target, head_class));
  for (uint32_t i = 0; i < n_pages; ++i) {
    KVM_TRY(memory->make_quota_room(seq->account, KvBytes::of(target.page_bytes(), target.stays()),
                                    "demoting, for a moment"));
    KVM_TRY(work->recodings.add(first + i));
  }
  seq->lists[work->list].prepare_replace(first, block_end, memory->bank(seq->account));
  return Status::ok();
}

Status open_keep(StoreMemory* memory, RetentionSlice* slice, const policies::Action& action,
                 std::span<const uint64_t> positions) {
  Sequence* seq = slice->seq();
  const Layer& layer = seq->space().layers[action.layer];
  const HeadClass& head_class = layer.classes[action.class_index];
  KVM_ASSERT(head_class.retention.kind == KVM_RETAIN_HEAVY);
  RetentionSlice::Work work;
  work.action = action;
  work.list = layer.first_list + action.class_index;
  KVM_TRY_ASSIGN(Masses * masses, own_masses(memory, seq, work.list, action.range.begin));
  const auto n_kept = static_cast<uint32_t>(
      head_class.kept_capacity(budget_of(*seq, action.layer, action.class_index).n_heavy));
  KVM_TRY(own_kept_tokens(memory, seq, head_class, n_kept, &work));
  KVM_ASSERT(work.kept->end() == action.range.begin && masses->begin == work.kept->end());
  work.masses = masses;
  work.positions = positions;
  work.merges = head_class.retention.merge != KVM_MERGE_NONE && !head_class.demotes();
  collect_between(*memory, seq, action.layer, action.class_index, action.range.begin / kPageTokens,
                  action.range.end / kPageTokens, &work.runs);
  if (head_class.demotes()) {
    KVM_TRY(add_demoted(memory, seq, head_class, &work));
  }
  prepare_drop_pages(memory, seq, work);
  // Room for the masses now, since nothing may fail once rows have been copied.
  KVM_TRY(grow_charged(memory, seq, positions.size(), &masses->kept));
  slice->add_keep(std::move(work), head_class.slab_class);
  return Status::ok();
}

void drop(StoreMemory* memory, Sequence* seq, const policies::Action& action) {
  PageList& list = seq->layer_lists(action.layer)[action.class_index];
  const uint32_t block_begin = static_cast<uint32_t>(action.range.begin / kPageTokens);
  const uint32_t block_end = static_cast<uint32_t>(action.range.end / kPageTokens);
  // What may throw comes first: an index says nothing of pages that are not there.
  list.prepare_drop(block_begin, block_end, memory->bank(seq->account));
  drop_from_index(memory, seq, action);
  memory->counts().n_pages_dropped += list.drop(block_begin, block_end, memory->bank(seq->account));
}

}  // namespace

Status apply_action(StoreMemory* memory, Sequence* seq, const policies::Action& action) {
  KVM_TRY(check_action(seq, action));
  switch (action.kind) {
    case policies::ActionKind::kDrop:
      drop(memory, seq, action);
      return Status::ok();
    case policies::ActionKind::kDemote:
      return demote(memory, seq, action);
    case policies::ActionKind::kFold:
    case policies::ActionKind::kKeep:
    case policies::ActionKind::kMeasure:
      break;
  }
  return Status(KVM_ERR_UNSUPPORTED, fmt::format("action {} has no operator in this service",
                                                 static_cast<uint64_t>(action.kind)));
}

Status open_action(StoreMemory* memory, RetentionSlice* slice, const policies::Action& action,
                   std::span<const uint64_t> positions, bool* is_cut) {
  KVM_TRY(check_action(slice->seq(), action));
  switch (action.kind) {
    case policies::ActionKind::kDrop:
      drop(memory, slice->seq(), action);
      return Status::ok();
    case policies::ActionKind::kDemote:
      return open_demote(memory, slice, action, is_cut);
    case policies::ActionKind::kFold:
      return open_fold(memory, slice, action, is_cut);
    case policies::ActionKind::kKeep:
      return open_keep(memory, slice, action, positions);
    case policies::ActionKind::kMeasure:
      break;
  }
  return Status::ok();
}

void close_demote(Sequence* seq, RetentionSlice::Work* work) {
  work->recodings.place(&seq->lists[work->list],
                        partner_list(seq, work->action.layer, work->action.class_index));
  if (!seq->settled_ends.empty()) {
    uint64_t& settled = seq->settled_ends[work->list];
    settled = std::max(settled, work->action.range.end);
  }
}

void close_fold(StoreMemory* memory, Sequence* seq, RetentionSlice::Work* work) {
  for (size_t i = 1; i < work->sums.size(); ++i) {
    add_rows(work->sums[i], &work->sums[0]);
  }
  if (!work->sums.empty()) {
    fold(work->sums[0], seq->mean_entries[work->list].get());
  }
  drop_pages(memory, seq, *work);
}

void close_keep(StoreMemory* memory, Sequence* seq, RetentionSlice::Work* work) {
  Masses* masses = seq->masses[work->list].data.get();
  const uint64_t end = work->action.range.end;
  memory->uncharge(seq->account, (masses->kept.size() - work->kept_masses.size()) * sizeof(float));
  masses->kept = std::move(work->kept_masses);
  if (work->new_kept != nullptr) {
    seq->kept[work->list] = std::move(work->new_kept);
  }
  work->kept->choose(std::move(work->choice), end);
  if (work->merge != nullptr) {
    work->merge->finish(work->kept);
  }
  const uint64_t n_gone = std::min<uint64_t>(masses->recent.size(), end - masses->begin);
  masses->recent.erase(masses->recent.begin(),
                       masses->recent.begin() + static_cast<ptrdiff_t>(n_gone));
  masses->begin = end;
  memory->uncharge(seq->account, n_gone * sizeof(float));
  work->recodings.place(&seq->lists[work->list]);
  drop_pages(memory, seq, *work);
}

void add_list_masses(StoreMemory* memory, Sequence* seq, uint32_t layer, uint32_t class_index,
                     std::span<const float> sums, uint64_t position, bool is_packed) {
  if (seq->account->is_library) {
    return;  // what is published stays as it is, whoever reads it
  }
  const Layer& own_layer = seq->space().storage(layer);
  const HeadClass& head_class = own_layer.classes[class_index];
  const uint32_t list = own_layer.first_list + class_index;
  const KeptTokens* kept = seq->kept_of(list);
  const uint64_t begin = kept == nullptr ? first_given_up(head_class) : kept->end();
  const Result<Masses*> owned = own_masses(memory, seq, list, begin);
  if (!owned.is_ok()) {
    return;
  }
  Masses* masses = owned.value();
  const uint64_t end = position + sums.size();
  if (!grow_charged(memory, seq, end > begin ? end - begin : 0, &masses->recent).is_ok()) {
    return;
  }
  add_sums(sums, position, kept, is_packed, masses);
}

}  // namespace kvm::engine
