// SPDX-License-Identifier: Apache-2.0
#include "device/sequence_store.h"

#include "base/round.h"

namespace kvm::device {

namespace {

std::string number(uint64_t n) { return std::to_string(n); }

// The list for a class of a layer, made if there is none.
uint32_t list_of(const ClassLayout& of, SpaceLayout* space) {
  const auto n_heads = static_cast<uint32_t>(of.kv_heads.size());
  for (uint32_t i = 0; i < space->lists.size(); ++i) {
    const ListLayout& list = space->lists[i];
    if (list.n_heads == n_heads && list.n_sinks == of.n_sinks && list.n_recent == of.n_recent &&
        list.slack == of.slack) {
      return i;
    }
  }
  ListLayout list;
  list.n_heads = n_heads;
  list.n_sinks = of.n_sinks;
  list.n_recent = of.n_recent;
  list.slack = of.slack;
  list.layer_bytes = space->slab_class(n_heads).page_bytes();
  space->lists.push_back(list);
  return static_cast<uint32_t>(space->lists.size() - 1);
}

}  // namespace

uint64_t ListLayout::first_droppable() const { return round_up(n_sinks, kPageTokens); }

tiers::SlabClass SpaceLayout::slab_class(uint32_t n_heads) const {
  tiers::SlabClass slab_class;
  slab_class.codec_k = slab_class.codec_v = codec;
  slab_class.dim_k = static_cast<uint16_t>(dim);
  slab_class.dim_v = static_cast<uint16_t>(dim_v());
  slab_class.v_in_k = v_in_k();
  slab_class.n_heads = static_cast<uint16_t>(n_heads);
  return slab_class;
}

Status make_lists(SpaceLayout* layout) {
  for (LayerLayout& layer : layout->layers) {
    for (ClassLayout& of : layer.classes) {
      of.list = list_of(of, layout);
      of.rank = layout->lists[of.list].n_layers++;
    }
  }
  for (const ListLayout& list : layout->lists) {
    if (list.n_layers * list.layer_bytes > UINT32_MAX) {
      return Status(KVM_ERR_UNSUPPORTED, "64 tokens of " + number(list.n_layers) + " layers take " +
                                             number(list.n_layers * list.layer_bytes) +
                                             " bytes; allowed are " + number(UINT32_MAX));
    }
  }
  return Status::ok();
}

DeviceSequence::DeviceSequence(std::shared_ptr<const SpaceLayout> of) : space(std::move(of)) {
  lists.resize(space->lists.size());
  for (uint32_t list = 0; list < lists.size(); ++list) {
    lists[list].kept_from = space->lists[list].first_droppable();
  }
}

Status DeviceSequence::check_visible(uint64_t n_before, uint64_t n_left) const {
  for (uint32_t list = 0; list < lists.size(); ++list) {
    const ListLayout& of = space->lists[list];
    const uint64_t kept_from = lists[list].kept_from;
    if (n_left <= of.first_droppable()) {
      continue;  // of these none is dropped
    }
    const uint64_t window_begin = n_before + 1 > of.n_recent ? n_before + 1 - of.n_recent : 0;
    if (of.n_recent != 0 && kept_from > of.first_droppable() &&
        std::max(window_begin, of.n_sinks) < kept_from) {
      return Status(KVM_ERR_PARTIAL, "queries at " + number(n_before) + " would see tokens from " +
                                         number(window_begin) + "; a policy has dropped those to " +
                                         number(kept_from));
    }
  }
  return Status::ok();
}

uint64_t DeviceSequence::n_dropped() const {
  uint64_t n = 0;
  for (uint32_t list = 0; list < lists.size(); ++list) {
    const ListLayout& of = space->lists[list];
    n += (lists[list].kept_from - of.first_droppable()) * of.n_layers;
  }
  return n;
}

Growth Growth::of(DeviceSequence* seq, uint32_t n_append, uint32_t n_query, uint32_t max_unsure) {
  const uint64_t n_unsure = std::min<uint64_t>(max_unsure, seq->n_tokens - seq->n_sure);
  return {seq, n_append, n_query, static_cast<uint32_t>(n_unsure), max_unsure};
}

Status Growth::check() const {
  const uint64_t n_after = seq->n_tokens + n_append, n_least = n_after - n_unsure;
  if (n_query > n_least) {
    return Status(KVM_ERR_INVALID, "n_query is " + number(n_query) + "; the sequence has " +
                                       number(n_least) + " tokens after the append" +
                                       (n_unsure == 0 ? "" : ", and may have no more"));
  }
  // The first row sees most, of the shortest sequence that it may be of.
  return n_query == 0 ? Status::ok() : seq->check_visible(n_least - n_query, n_after);
}

uint64_t Growth::unseen_before(uint32_t list, uint64_t n_before, uint64_t n_after) const {
  if (n_append == 0 && n_query == 0) {
    return 0;
  }
  const ListLayout& of = seq->space->lists[list];
  // This step's first row, or one of the next's, which has all tokens that are sure.
  const uint64_t behind = std::max<uint64_t>(uint64_t{n_query} + n_unsure,
                                             n_after - sure_tokens(n_after) + of.slack + 1);
  const uint64_t first_query = n_after > behind ? n_after - behind : 0;
  if (of.n_recent == 0 || first_query + 1 <= of.n_recent) {
    return 0;
  }
  return std::min(first_query + 1 - of.n_recent, n_before - n_unsure) / kPageTokens * kPageTokens;
}

}  // namespace kvm::device
