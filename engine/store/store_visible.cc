// SPDX-License-Identifier: Apache-2.0
// Whether a sequence still has the tokens that a query, a read or a cut would need.
#include <fmt/format.h>

#include <algorithm>

#include "base/counted.h"
#include "base/round.h"
#include "engine/store/store.h"

namespace kvm::engine {
namespace {

// The tokens that a list has kept; null: none.
const KeptTokens* kept_tokens(const Sequence& seq, uint32_t layer, uint32_t class_index) {
  return seq.kept_of(seq.space().storage(layer).first_list + class_index);
}

// Those that lead pages of demoted ones; null: there are none.
const KeptTokens* leading_tokens(const Sequence& seq, uint32_t layer, uint32_t class_index) {
  const KeptTokens* kept = kept_tokens(seq, layer, class_index);
  return kept != nullptr && kept->leads() ? kept : nullptr;
}

// Whether tokens that queries at `first_query` and later would see, out of those below `end`, have
// been dropped from a list.
bool misses_visible(const Sequence& seq, uint32_t layer, uint32_t class_index, const PageList& list,
                    uint64_t first_query, uint64_t end) {
  if (list.n_dropped() == 0) {
    return false;  // as a rule; a fork asks about each list of all layers
  }
  const Space& space = seq.space();
  const Retention& retention = space.head_class(layer, class_index).retention;
  if (const KeptTokens* kept = leading_tokens(seq, layer, class_index); kept != nullptr) {
    // All are there, of what was given up in no order: seen as a whole, or not at all.
    return first_query < kept->end() && end > kept->runs_end();
  }
  HeadVisibility seen = space.visibility(layer, class_index, first_query);
  if (retention.is_per_head()) {
    const uint32_t storage = space.layers[layer].storage_layer;
    seen = {.window = budget_of(seq, storage, class_index).n_recent, .n_sinks = retention.n_sinks};
  }
  uint64_t recent =
      seen.window == 0 || first_query < seen.window ? 0 : first_query - seen.window + 1;
  if (retention.is_per_head() && recent >= end && end > 0 && end < list.length()) {
    recent = end - 1;  // where that one is gone, what was left of it would be seen as well
  }
  return !list.covers(std::min(recent, end), end) ||
         !list.covers(std::min(seen.first_sink, end), std::min(seen.n_sinks, end));
}

// Whether a sequence's head class has dropped nothing but what drop_part() has.
bool keeps_all(const Sequence& seq, uint32_t layer, uint32_t class_index) {
  return seq.space().head_class(layer, class_index).retention.kind == KVM_RETAIN_FULL;
}

// The first of the tokens [begin, end), not none, that `seen` has ranges to show: those up to where
// the first one is that it hides, or that follows a hidden one. None: begin == end.
PositionRange shown_part(const SeenPart& seen, uint64_t begin, uint64_t end) {
  const auto first =
      std::partition_point(seen.ranges.begin(), seen.ranges.end(),
                           [begin](const kvm_range& range) { return range.end <= begin; });
  for (auto range = first; range != seen.ranges.end() && range->begin < end; ++range) {
    if (!seen.excludes && range->begin != range->end) {
      return {std::max(begin, range->begin), std::min(end, range->end)};
    }
    if (seen.excludes && range->begin > begin) {
      return {begin, range->begin};
    }
    begin = seen.excludes ? std::min(end, range->end) : begin;
  }
  return {seen.excludes ? begin : end, end};
}

// Tokens that drop_part() has dropped from a list, of a head that keeps all, and that are seen; or
// none.
PositionRange dropped_part(const Sequence& seq, uint32_t layer, uint32_t class_index,
                           const PageList& list, const SeenPart& seen) {
  PositionRange found;
  if (list.n_dropped() == 0) {
    return found;
  }
  const uint64_t window = seq.space().visibility(layer, class_index, seen.first_query).window;
  const uint64_t seen_begin =
      window == 0 || seen.first_query < window ? 0 : seen.first_query - window + 1;
  list.for_each_gap([&](uint64_t begin, uint64_t end) {
    begin = std::max(begin, seen_begin);
    end = std::min(end, seen.end);
    if (found.begin == found.end && begin < end) {
      found = shown_part(seen, begin, end);
    }
  });
  return found;
}

// Whether a list has every token of [begin, end), in its pages or among those that it chose to keep
// of pages that it gave up: these lie behind the sinks' pages and before KeptTokens::end().
bool holds(const Sequence* seq, uint32_t layer, uint32_t class_index, uint64_t begin,
           uint64_t end) {
  const PageList& list = seq->stored_lists(layer)[class_index];
  const KeptTokens* kept = kept_tokens(*seq, layer, class_index);
  if (kept == nullptr || (!kept->leads() && list.covers(begin, end))) {
    return list.covers(begin, end);
  }
  const Retention& retention = seq->space().head_class(layer, class_index).retention;
  const uint64_t given_up = round_up(retention.n_sinks, kPageTokens);
  const uint64_t low = std::clamp(given_up, begin, end);
  const uint64_t high = std::clamp(kept->end(), low, end);
  const auto is_before = [](const KeptTokens::Token& token, uint64_t at) {
    return token.position < at;
  };
  const auto tokens = kept->tokens();
  const auto first = std::lower_bound(tokens.begin(), tokens.end(), low, is_before);
  const auto last = std::lower_bound(first, tokens.end(), high, is_before);
  return static_cast<uint64_t>(last - first) == high - low && list.covers(begin, low) &&
         list.covers(high, end);
}

}  // namespace

Status Store::check_visible(const Sequence* seq, uint32_t layer, const SeenPart& seen) const {
  KVM_TRY(check_layer(seq, layer));
  const std::span<const PageList> lists = seq->stored_lists(layer);
  for (uint32_t i = 0; i < lists.size(); ++i) {
    if (keeps_all(*seq, layer, i)) {
      const PositionRange part = dropped_part(*seq, layer, i, lists[i], seen);
      if (part.begin != part.end) {
        return {KVM_ERR_PARTIAL,
                fmt::format("a query at position {} of layer {} sees tokens [{}, {}), which "
                            "kvm_seq_drop has dropped: restore them (KVM_ITEM_RESTORE), or leave "
                            "them out (KVM_ITEM_EXCLUDE_RANGES)",
                            seen.first_query, layer, part.begin, part.end)};
      }
      continue;
    }
    if (misses_visible(*seq, layer, i, lists[i], seen.first_query, lists[i].length())) {
      if (seq->space().head_class(layer, i).retention.kind == KVM_RETAIN_PROMPT) {
        return Status(KVM_ERR_PARTIAL,
                      fmt::format("layer {} has dropped its tokens when the prompt ended, at {}",
                                  layer, seq->prompt_end));
      }
      return Status(
          KVM_ERR_PARTIAL,
          fmt::format("a query at position {} of layer {} sees tokens that kv head {} has dropped",
                      seen.first_query, layer, seq->space().head_class(layer, i).kv_heads[0]));
    }
  }
  return Status::ok();
}

Status Store::check_read(const Sequence* seq, uint32_t layer, uint64_t position,
                         uint64_t n_tokens) const {
  KVM_TRY(check_layer(seq, layer));
  const std::span<const PageList> lists = seq->stored_lists(layer);
  const uint64_t present = lists[0].length();
  if (position > present || n_tokens > present - position) {
    return Status(KVM_ERR_INVALID,
                  fmt::format("{} from position {} on: layer {} has {}", counted(n_tokens, "token"),
                              position, layer, counted(present, "token")));
  }
  for (uint32_t i = 0; i < lists.size(); ++i) {
    if (!holds(seq, layer, i, position, position + n_tokens)) {
      return Status(KVM_ERR_PARTIAL,
                    fmt::format("kv head {} of layer {} has dropped tokens of [{}, {})",
                                seq->space().head_class(layer, i).kv_heads[0], layer, position,
                                position + n_tokens));
    }
  }
  return Status::ok();
}

Status Store::check_cut(const Sequence* seq, uint64_t n_tokens) {
  const Space& space = seq->space();
  for (uint32_t layer = 0; layer < space.n_layers; ++layer) {
    if (space.layers[layer].kind == KVM_LAYER_ABSENT) {
      continue;
    }
    const std::span<const PageList> lists = seq->stored_lists(layer);
    for (uint32_t i = 0; i < lists.size(); ++i) {
      if (space.head_class(layer, i).retention.kind == KVM_RETAIN_PROMPT) {
        // No token behind the prompt asks this layer, so nothing that it has dropped is missed.
        if (lists[i].n_dropped() != 0 && n_tokens != 0 && n_tokens < seq->prompt_end) {
          return Status(KVM_ERR_PARTIAL,
                        fmt::format("sequence {:#x} cannot be cut at {}: layer {} has dropped its "
                                    "tokens when the prompt ended, at {}",
                                    seq->id, n_tokens, layer, seq->prompt_end));
        }
        continue;
      }
      if (keeps_all(*seq, layer, i)) {
        const uint64_t end = std::min(n_tokens, lists[i].length());
        if (!lists[i].covers(end / kPageTokens * kPageTokens, end)) {
          return {
              KVM_ERR_PARTIAL,
              fmt::format("sequence {:#x} cannot be cut at {}: kvm_seq_drop has dropped the page "
                          "there of layer {}; cut at a multiple of {}, or restore it",
                          seq->id, n_tokens, layer, kPageTokens)};
        }
        continue;
      }
      // Of a list that ends before, too: tokens may have ended at other layers.
      if (misses_visible(*seq, layer, i, lists[i], n_tokens,
                         std::min(n_tokens, lists[i].length()))) {
        return Status(KVM_ERR_PARTIAL,
                      fmt::format("sequence {:#x} cannot be cut at {}: layer {} has "
                                  "dropped tokens that queries there would see",
                                  seq->id, n_tokens, layer));
      }
    }
  }
  return Status::ok();
}

Status Store::check_complete(const Sequence* seq, uint64_t n_tokens) {
  const Space& space = seq->space();
  for (uint32_t layer = 0; layer < space.n_layers; ++layer) {
    if (space.layers[layer].kind != KVM_LAYER_OWN) {
      continue;
    }
    const std::span<const PageList> lists = seq->layer_lists(layer);
    for (uint32_t i = 0; i < lists.size(); ++i) {
      const PositionRange part =
          keeps_all(*seq, layer, i)
              ? dropped_part(*seq, layer, i, lists[i], {.first_query = 0, .end = n_tokens})
              : PositionRange();
      if (part.begin != part.end) {
        return {KVM_ERR_PARTIAL,
                fmt::format("kvm_seq_drop has dropped tokens [{}, {}) of layer {} of sequence "
                            "{:#x}: restore them first (KVM_ITEM_RESTORE)",
                            part.begin, part.end, layer, seq->id)};
      }
    }
  }
  return Status::ok();
}

}  // namespace kvm::engine
