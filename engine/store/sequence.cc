// SPDX-License-Identifier: Apache-2.0
#include "engine/store/sequence.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/counted.h"
#include "base/round.h"
#include "policies/heavy.h"
#include "policies/prompt.h"
#include "policies/settle.h"
#include "policies/sinks_recent.h"

namespace kvm::engine {
namespace {

// Lists that settle: those whose policy reads rows, or the others.
void add_settled(const Space& space, bool is_read, std::vector<Governed>* governed) {
  Governed settled = {.policy = &policies::settle(), .members = {}};
  for (uint32_t layer = 0; layer < space.n_layers; ++layer) {
    const std::vector<HeadClass>& classes = space.layers[layer].classes;
    for (uint32_t i = 0; i < classes.size(); ++i) {
      // The deeper layer settles both of a pair.
      if (classes[i].settles() && classes[i].retention.is_per_head() == is_read &&
          classes[i].side != codecs::PairSide::kShallow) {
        settled.members.push_back({layer, i});
      }
    }
  }
  if (!settled.members.empty()) {
    governed->push_back(std::move(settled));
  }
}

const policies::Policy& policy_of(const Retention& retention) {
  switch (retention.kind) {
    case KVM_RETAIN_SINKS_RECENT:
      return policies::sinks_recent();
    case KVM_RETAIN_SINKS_RECENT_FOLD:
      return policies::sinks_recent_fold();
    case KVM_RETAIN_HEAVY:
      return policies::heavy();
    case KVM_RETAIN_PROMPT:
      return policies::prompt();
    default:
      return policies::full();
  }
}

// Whether a list that has a share has given anything up.
bool has_given_up_shares(const Sequence& seq) {
  for (const Layer& layer : seq.space().layers) {
    for (uint32_t i = 0; i < layer.classes.size(); ++i) {
      if (layer.classes[i].retention.budgets != KVM_BUDGETS_EQUAL &&
          seq.lists[layer.first_list + i].n_dropped() != 0) {
        return true;
      }
    }
  }
  return false;
}

// Policies that share out budgets hear of it once the prompt is committed, and once only.
void note_prompt_end(Sequence* seq) {
  if (seq->space().shares_budgets && seq->prompt_end <= seq->n_committed && seq->budgets.empty()) {
    note(seq, policies::Event::kPromptEnd);
    note(seq, policies::Event::kCommitted);  // they may act now
  }
}

}  // namespace

void advance_commit(Sequence* seq, uint64_t n_tokens) {
  if (n_tokens > seq->n_committed) {
    if (n_tokens == seq->n_committed + 1 && seq->n_committed != 0) {
      end_prompt(seq, seq->n_committed);
    }
    seq->n_committed = n_tokens;
    note(seq, policies::Event::kCommitted);
    note_prompt_end(seq);
  }
}

void end_prompt(Sequence* seq, uint64_t n_tokens) {
  if (seq->space().awaits_prompt && seq->prompt_end == UINT64_MAX) {
    seq->prompt_end = n_tokens;
    // Whoever waits for the end asked for no commit before it.
    std::fill(seq->next_commits.begin(), seq->next_commits.end(), 0);
    note_prompt_end(seq);
  }
}

void cut_prompt(Sequence* seq, uint64_t n_tokens) {
  if (n_tokens < seq->prompt_end && (seq->budgets.empty() || !has_given_up_shares(*seq))) {
    seq->prompt_end = UINT64_MAX;
    seq->budgets.clear();
    seq->due_events &= ~policies::event_bit(policies::Event::kPromptEnd);
  }
}

bool awaits_share(const Sequence& seq, const Retention& retention) {
  return retention.budgets != KVM_BUDGETS_EQUAL && seq.budgets.empty();
}

policies::Budget budget_of(const Sequence& seq, uint32_t layer, uint32_t class_index) {
  const Layer& own = seq.space().layers[layer];
  if (!seq.budgets.empty()) {
    return seq.budgets[own.first_list + class_index];
  }
  const Retention& retention = own.classes[class_index].retention;
  return {retention.n_recent, retention.n_heavy};
}

void cut_settled(Sequence* seq, uint64_t n_tokens) {
  for (uint64_t& end : seq->settled_ends) {
    end = std::min(end, n_tokens / kPageTokens * kPageTokens);
  }
}

std::vector<Governed> find_governed(const Space& space) {
  std::vector<Governed> governed;
  // What they read has been settled, so that it does not matter in which requests tokens came.
  add_settled(space, true, &governed);
  for (uint32_t layer = 0; layer < space.n_layers; ++layer) {
    const std::vector<HeadClass>& classes = space.layers[layer].classes;
    for (uint32_t i = 0; i < classes.size(); ++i) {
      const policies::Policy* policy = &policy_of(classes[i].retention);
      if (policy->events() == 0) {
        continue;
      }
      auto it = std::find_if(governed.begin(), governed.end(),
                             [policy](const Governed& g) { return g.policy == policy; });
      if (it == governed.end()) {
        it = governed.insert(it, {.policy = policy, .members = {}});
      }
      it->members.push_back({layer, i});
    }
  }
  add_settled(space, false, &governed);
  return governed;
}

uint64_t shortest_layer(const Sequence* seq) {
  uint64_t shortest = UINT64_MAX;
  for (const PageList& list : seq->lists) {
    shortest = std::min(shortest, list.length());
  }
  return shortest;
}

uint64_t longest_layer(const Sequence* seq) {
  uint64_t longest = 0;
  for (const PageList& list : seq->lists) {
    longest = std::max(longest, list.length());
  }
  return longest;
}

uint64_t layer_length(const Sequence* seq, uint32_t layer) {
  const std::span<const PageList> lists = seq->stored_lists(layer);
  return lists.empty() ? 0 : lists[0].length();
}

Status check_layer(const Sequence* seq, uint32_t layer) {
  const Space& space = seq->space();
  if (layer >= space.n_layers) {
    return Status(KVM_ERR_INVALID, fmt::format("layer {} is beyond the space's {}", layer,
                                               counted(space.n_layers, "layer")));
  }
  if (space.layers[layer].kind == KVM_LAYER_ABSENT) {
    return Status(KVM_ERR_INVALID, fmt::format("layer {} is absent and stores nothing", layer));
  }
  return Status::ok();
}

// What goes with its tokens goes first, so that at any time what is left fits together.
bool give_up_some(StoreMemory* memory, Sequence* seq, uint64_t max_pages, uint64_t* n_given) {
  seq->n_committed = 0;
  for (IndexRef& ref : seq->indexes) {
    if (ref.data == nullptr) {
      continue;
    }
    if (*n_given >= max_pages) {
      return false;
    }
    for (const HeadIndex& head : ref.data->heads) {
      *n_given += head.pages.size();
    }
    ref = {};
  }
  seq->observed.clear();
  seq->mean_entries.clear();
  seq->kept.clear();
  seq->masses.clear();
  for (PageList& list : seq->lists) {
    while (list.reserved_length() != 0) {
      if (*n_given >= max_pages) {
        return false;
      }
      *n_given += list.give_up(max_pages - *n_given, memory->bank(seq->account));
    }
  }
  return true;
}

void cut_mean_entries(Sequence* seq, uint64_t n_tokens) {
  for (std::shared_ptr<MeanEntry>& ref : seq->mean_entries) {
    if (ref != nullptr && n_tokens < ref->end) {
      ref.reset();
    }
  }
}

void cut_kept_tokens(Sequence* seq, uint64_t n_tokens) {
  for (uint32_t list = 0; list < seq->masses.size(); ++list) {
    const bool is_gone =
        !seq->kept.empty() && seq->kept[list] != nullptr && n_tokens < seq->kept[list]->end();
    if (is_gone) {
      seq->kept[list].reset();
      seq->masses[list] = {};
    }
    MassesRef& ref = seq->masses[list];
    if (ref.data != nullptr && n_tokens < ref.data->begin + ref.data->recent.size()) {
      ref.limit = std::min(ref.limit, n_tokens);
    }
  }
}

void prepare_index_fork(StoreMemory* memory, Sequence* parent, uint64_t n_tokens) {
  for (uint32_t layer = 0; layer < parent->indexes.size(); ++layer) {
    const std::vector<IndexConfig>& configs = parent->space().layers[layer].indexes;
    IndexRef& ref = parent->indexes[layer];
    const uint64_t n_blocks = indexable_blocks(std::min(n_tokens, layer_length(parent, layer)));
    const bool has_any =
        std::any_of(configs.begin(), configs.end(), [&](const IndexConfig& config) {
          return config.kind != KVM_INDEX_NONE && n_blocks * kPageTokens >= config.min_tokens;
        });
    if (has_any && (ref.data == nullptr || ref.limit < n_blocks)) {
      own_index(&ref, configs, memory->index_bank(parent->account));
    }
  }
}

void cut_indexes(Sequence* seq, uint64_t n_tokens) {
  for (uint32_t layer = 0; layer < seq->indexes.size(); ++layer) {
    IndexRef& ref = seq->indexes[layer];
    if (ref.data == nullptr) {
      continue;
    }
    ref.limit = std::min(ref.limit, indexable_blocks(std::min(n_tokens, layer_length(seq, layer))));
    if (ref.data.use_count() == 1) {
      ref.data->cut(ref.limit, seq->space().layers[layer].indexes);
      ref.limit = UINT64_MAX;
    }
  }
}

IndexPin pin_layer_index(const Sequence* seq, uint32_t layer) {
  return seq->indexes.empty()
             ? IndexPin()
             : IndexPin(seq->indexes[seq->space().layers[layer].storage_layer].data.get());
}

}  // namespace kvm::engine
