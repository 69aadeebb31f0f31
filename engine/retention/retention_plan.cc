// SPDX-License-Identifier: Apache-2.0
#include "engine/retention/retention_plan.h"

#include <algorithm>
#include <cstdint>
#include <new>
#include <span>
#include <vector>

#include "engine/retention/policy_actions.h"
#include "engine/store/observations.h"
#include "policies/policy.h"
#include "tiers/page_table.h"

namespace kvm::engine {
namespace {

// A policy that keeps asking for more is cut off here, until the next event.
constexpr int kMaxPolicyRounds = 1024;

// The pages of a list as ranges of one encoding.
std::vector<policies::StoredRange> stored_ranges(const PageList& list,
                                                 const tiers::PageTable& pages, uint64_t* n_pages) {
  std::vector<policies::StoredRange> ranges;
  list.for_each([&](const PageEntry& entry, bool) {
    ++*n_pages;
    const tiers::SlabClass& slab_class = pages.slab_class(entry.page);
    if (!ranges.empty() && ranges.back().positions.end == entry.position() &&
        ranges.back().codec_k == slab_class.codec_k &&
        ranges.back().codec_v == slab_class.codec_v) {
      ranges.back().positions.end = entry.end();
      return;
    }
    ranges.push_back({.positions = {entry.position(), entry.end()},
                      .codec_k = slab_class.codec_k,
                      .codec_v = slab_class.codec_v});
  });
  return ranges;
}

// Returns what a list that chooses tokens has kept. Their masses, and those of stored tokens, go
// to the view.
std::vector<policies::KeptToken> kept_tokens(const Sequence& seq, uint32_t list,
                                             policies::ListView* view) {
  const KeptTokens* kept = seq.kept_of(list);
  std::vector<policies::KeptToken> tokens(kept == nullptr ? 0 : kept->tokens().size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    tokens[i].position = kept->tokens()[i].position;
  }
  view->chosen_end = kept == nullptr ? 0 : kept->end();
  if (seq.masses.empty() || seq.masses[list].data == nullptr) {
    return tokens;
  }
  const MassesRef& ref = seq.masses[list];
  for (size_t i = 0; i < tokens.size(); ++i) {
    tokens[i].mass = ref.data->kept[i];
  }
  const uint64_t n_held = ref.limit <= ref.data->begin ? 0 : ref.limit - ref.data->begin;
  view->mass_begin = ref.data->begin;
  view->masses = {ref.data->recent.data(), std::min<uint64_t>(ref.data->recent.size(), n_held)};
  return tokens;
}

// Returns how many pages the list has, those that its kept tokens would take included.
uint64_t show_list(const StoreMemory& memory, const Sequence& seq, uint32_t layer,
                   uint32_t class_index, std::vector<policies::StoredRange>* stored,
                   std::vector<policies::KeptToken>* kept, policies::ListView* view) {
  const Layer& own = seq.space().layers[layer];
  const HeadClass& head_class = own.classes[class_index];
  const PageList& list = seq.layer_lists(layer)[class_index];
  const ObservedView seen = observed_view(&seq, layer);
  uint64_t n_pages = 0;
  view->layer = layer;
  view->class_index = class_index;
  view->length = list.length();
  *stored = stored_ranges(list, memory.pages(), &n_pages);
  view->stored = *stored;
  view->codec_k = head_class.slab_class.codec_k;
  view->codec_v = head_class.slab_class.codec_v;
  view->settled_end = seq.settled_ends.empty() ? 0 : seq.settled_ends[own.first_list + class_index];
  view->n_sinks = head_class.retention.n_sinks;
  const policies::Budget budget = budget_of(seq, layer, class_index);
  view->n_recent = budget.n_recent;
  view->slack = head_class.retention.slack;
  view->n_heavy = head_class.kept_capacity(budget.n_heavy);
  view->awaits_share = awaits_share(seq, head_class.retention);
  view->prompt_end = seq.prompt_end;
  view->merges = head_class.retention.merge != KVM_MERGE_NONE && !head_class.demotes();
  view->demotes = head_class.demotes();
  *kept = kept_tokens(seq, own.first_list + class_index, view);
  view->kept = *kept;
  view->kv_heads = head_class.kv_heads;
  view->n_kv_heads = own.n_kv_heads;
  view->column_sums = seen.column_sums;
  view->n_columns = seen.n_columns;
  return n_pages + kept->size() / kPageTokens;
}

// False: the machine refused memory, and what is left of the work is for another time.
bool close_work(StoreMemory* memory, Sequence* seq, RetentionSlice::Work* work) {
  if (work->has_failed) {
    return false;
  }
  switch (work->action.kind) {
    case policies::ActionKind::kDrop:
    case policies::ActionKind::kMeasure:
      break;
    case policies::ActionKind::kDemote:
      try {
        close_demote(seq, work);
      } catch (const std::bad_alloc&) {
        return false;
      }
      break;
    case policies::ActionKind::kFold:
      close_fold(memory, seq, work);
      break;
    case policies::ActionKind::kKeep:
      close_keep(memory, seq, work);
      break;
  }
  return true;
}

// After the last list has been measured. Throws std::bad_alloc: no list has its share.
void share_out(const Governed& governed, std::span<const RetentionCursor::Measure> measures,
               Sequence* seq) {
  const Space& space = seq->space();
  std::vector<policies::Measured> lists(measures.size());
  for (size_t i = 0; i < lists.size(); ++i) {
    const Governed::Member& member = governed.members[i];
    const Retention& retention = space.head_class(member.layer, member.class_index).retention;
    lists[i] = {.layer = member.layer,
                .shares_budget = retention.budgets != KVM_BUDGETS_EQUAL,
                .measure = measures[i].moments.variance(),
                .budget = budget_of(*seq, member.layer, member.class_index)};
  }
  governed.policy->share_out(lists);
  std::vector<policies::Budget> budgets;
  budgets.reserve(space.n_lists);
  for (uint32_t layer = 0; layer < space.n_layers; ++layer) {
    for (uint32_t i = 0; i < space.layers[layer].classes.size(); ++i) {
      budgets.push_back(budget_of(*seq, layer, i));
    }
  }
  for (size_t i = 0; i < lists.size(); ++i) {
    const Governed::Member& member = governed.members[i];
    budgets[space.layers[member.layer].first_list + member.class_index] = lists[i].budget;
  }
  seq->budgets = std::move(budgets);
}

// Says whether a policy is to be asked about an event.
bool is_due(const Sequence& seq, size_t governed, uint32_t event) {
  const policies::EventSet bit = 1u << event;
  const bool waits = event == static_cast<uint32_t>(policies::Event::kCommitted) &&
                     seq.n_committed < seq.next_commits[governed];
  return (seq.due_events & seq.record->governed[governed].policy->events() & bit) != 0 && !waits;
}

// REQUIRES: cursor->measures has room for all members.
void note_measures(const RetentionSlice::Group& group, RetentionCursor* cursor) {
  for (uint32_t i = 0; i < group.actions.n_actions; ++i) {
    const policies::Action& action = group.actions.actions[i];
    if (action.kind == policies::ActionKind::kMeasure) {
      RetentionCursor::Measure& measure = cursor->measures[group.first_member];
      measure.moments.add(action.moments);
      measure.end = action.range.end;
    }
  }
}

}  // namespace

bool is_retention_due(const Sequence* seq) {
  for (size_t i = 0; i < seq->record->governed.size(); ++i) {
    for (uint32_t event = 0; event < policies::kEvents; ++event) {
      if (is_due(*seq, i, event)) {
        return true;
      }
    }
  }
  return false;
}

std::unique_ptr<RetentionSlice> plan_retention(const StoreMemory& memory, Sequence* seq,
                                               RetentionCursor* cursor) {
  const std::vector<Governed>& all = seq->record->governed;
  for (; cursor->event < policies::kEvents; *cursor = {.event = cursor->event + 1}) {
    for (; cursor->governed < all.size();
         *cursor = {.event = cursor->event, .governed = cursor->governed + 1}) {
      if (!is_due(*seq, cursor->governed, cursor->event)) {
        continue;
      }
      const Governed& governed = all[cursor->governed];
      const auto n_members = static_cast<uint32_t>(governed.members.size());
      const bool ends_prompt = cursor->event == static_cast<uint32_t>(policies::Event::kPromptEnd);
      if (cursor->member == n_members) {
        if (ends_prompt) {
          share_out(governed, cursor->measures, seq);
        }
        seq->next_commits[cursor->governed] = ends_prompt ? 0 : cursor->next_commit;
        continue;
      }
      if (ends_prompt) {
        cursor->measures.resize(n_members);
      }
      auto slice = std::make_unique<RetentionSlice>(
          seq, governed.policy, static_cast<policies::Event>(cursor->event), seq->n_committed);
      std::vector<RetentionSlice::Group>& groups = slice->groups();
      groups.reserve(std::min<size_t>(RetentionSlice::kMaxGroups, n_members - cursor->member));
      uint64_t n_pages = 0;
      for (uint32_t at = cursor->member; at < n_members &&
                                         groups.size() < RetentionSlice::kMaxGroups &&
                                         n_pages < RetentionSlice::kSlicePages;) {
        const uint32_t n = governed.policy->decides_by_list() ? 1 : n_members - at;
        RetentionSlice::Group& group = groups.emplace_back();
        group.first_member = at;
        group.stored.resize(n);
        group.kept.resize(n);
        group.lists.resize(n);
        for (uint32_t i = 0; i < n; ++i, ++at) {
          n_pages +=
              show_list(memory, *seq, governed.members[at].layer, governed.members[at].class_index,
                        &group.stored[i], &group.kept[i], &group.lists[i]);
          group.lists[i].measured_end = ends_prompt ? cursor->measures[at].end : 0;
        }
      }
      slice->set_pages(n_pages);
      return slice;
    }
  }
  seq->due_events = 0;
  return nullptr;
}

// Begins the actions of a slice. One that cannot be done (no room to demote, say) is left out: the
// policy sees that in the next view.
void open_retention(StoreMemory* memory, RetentionSlice* slice) {
  for (uint32_t g = 0; g < slice->n_groups(); ++g) {
    RetentionSlice::Group& group = slice->groups()[g];
    for (uint32_t i = 0; i < group.actions.n_actions && !group.is_cut; ++i) {
      if (group.actions.actions[i].kind == policies::ActionKind::kMeasure) {
        continue;  // nothing of the sequence changes
      }
      if (slice->bytes() >= RetentionSlice::kSliceBytes) {
        group.is_cut = true;
        break;
      }
      const policies::Action& action = group.actions.actions[i];
      const Status status = open_action(
          memory, slice, action,
          std::span(group.actions.kept).subspan(action.first_kept, action.n_kept), &group.is_cut);
      group.is_cut = group.is_cut && status.is_ok();
      group.actions.more = group.actions.more && status.is_ok();  // it would ask for the same
    }
  }
}

void close_retention(StoreMemory* memory, RetentionSlice* slice, RetentionCursor* cursor) {
  for (RetentionSlice::Work& work : slice->works()) {
    if (!close_work(memory, slice->seq(), &work)) {
      // Nothing would change by trying again at once.
      slice->give_up(work);
    }
  }
  // Those behind one that goes on have been measured, too, and need not be again.
  for (const RetentionSlice::Group& group : slice->groups()) {
    note_measures(group, cursor);
  }
  for (const RetentionSlice::Group& group : slice->groups()) {
    cursor->member = group.first_member;
    const bool goes_on = group.actions.more && ++cursor->n_rounds < kMaxPolicyRounds;
    if (group.is_cut || goes_on) {
      return;
    }
    cursor->n_rounds = 0;
    cursor->next_commit = std::min(cursor->next_commit, group.actions.next_commit);
    cursor->member += static_cast<uint32_t>(group.lists.size());
  }
}

}  // namespace kvm::engine
