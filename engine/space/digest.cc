// SPDX-License-Identifier: Apache-2.0
#include "engine/space/digest.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/uuid/name_generator_sha1.hpp>
#include <boost/uuid/uuid.hpp>
#include <iterator>

namespace kvm::engine {
namespace {

// A line for each stretch of heads that say the same: "layer 3 heads 0-7 " and what they say.
template <typename Say>
void add_heads(uint32_t layer, uint32_t n_heads, Say say, std::string* text) {
  for (uint32_t first = 0; first < n_heads;) {
    const std::string said = say(first);
    uint32_t end = first + 1;
    while (end < n_heads && say(end) == said) {
      ++end;
    }
    fmt::format_to(std::back_inserter(*text), "layer {} heads {}-{} {}\n", layer, first, end - 1,
                   said);
    first = end;
  }
}

// `text`, and behind it what say(layer, head) says of the layers that store something.
template <typename Say>
std::string text_of(const Space& space, std::string text, Say say) {
  for (uint32_t i = 0; i < space.n_layers; ++i) {
    const Layer& layer = space.layers[i];
    if (layer.kind == KVM_LAYER_OWN) {
      add_heads(
          i, layer.n_kv_heads, [&](uint32_t head) { return say(i, head); }, &text);
    }
  }
  return text;
}

const HeadClass& class_of(const Space& space, uint32_t layer, uint32_t head) {
  return space.head_class(layer, space.place(layer, head).class_index);
}

// What becomes of a layer that stores nothing itself; false: it does.
bool add_other_layer(uint32_t i, const Layer& layer, std::string* text) {
  if (layer.kind == KVM_LAYER_ALIAS) {
    fmt::format_to(std::back_inserter(*text), "layer {} alias {}\n", i, layer.storage_layer);
  } else if (layer.kind == KVM_LAYER_ABSENT) {
    fmt::format_to(std::back_inserter(*text), "layer {} absent\n", i);
  }
  return layer.kind == KVM_LAYER_ALIAS || layer.kind == KVM_LAYER_ABSENT;
}

}  // namespace

std::string geometry_text(const Space& space) {
  std::string text =
      fmt::format("kvm geometry 1\nshard {}/{}\n", space.shard_index, space.n_shards);
  for (uint32_t i = 0; i < space.n_layers; ++i) {
    add_other_layer(i, space.layers[i], &text);
  }
  return text_of(space, std::move(text), [&](uint32_t layer, uint32_t head) {
    const tiers::SlabClass& slab_class = class_of(space, layer, head).slab_class;
    return fmt::format("dims {} {}{}", slab_class.dim_k, slab_class.dim_v,
                       slab_class.v_in_k ? " v in k" : "");
  });
}

std::string layout_text(const Space& space) {
  std::string text =
      fmt::format("kvm layout 1\npage {}\nshard {}/{}\ndims {} {}\n", kPageTokens,
                  space.shard_index, space.n_shards, space.head_dim_k, space.head_dim_v);
  for (uint32_t i = 0; i < space.n_layers; ++i) {
    const Layer& layer = space.layers[i];
    if (!add_other_layer(i, layer, &text) && layer.pairs() && layer.partner < i) {
      fmt::format_to(std::back_inserter(text), "layer {} pair {} {} {}\n", i, layer.partner,
                     layer.pair_t, layer.pair_kept);
    }
  }
  return text_of(space, std::move(text), [&](uint32_t layer, uint32_t head) {
    const tiers::SlabClass& slab_class = class_of(space, layer, head).slab_class;
    std::string said = slab_class.v_in_k
                           ? fmt::format("{} v in k", slab_class.k().name)
                           : fmt::format("{} {}", slab_class.k().name, slab_class.v().name);
    if (slab_class.dim_k != space.head_dim_k || slab_class.dim_v != space.head_dim_v) {
      said += fmt::format(" dims {} {}", slab_class.dim_k, slab_class.dim_v);
    }
    if (const HeadClass& head_class = class_of(space, layer, head); head_class.demotes()) {
      said +=
          fmt::format(" demoted {} {}", head_class.demoted.k().name, head_class.demoted.v().name);
    }
    return said;
  });
}

std::string policy_text(const Space& space) {
  return text_of(space, "kvm policy 1\n", [&](uint32_t layer, uint32_t head) {
    const Retention& r = class_of(space, layer, head).retention;
    std::string said = fmt::format("retention {} sinks {} recent {} slack {} heavy {} positions {}",
                                   r.kind, r.n_sinks, r.n_recent, r.slack, r.n_heavy, r.positions);
    if (r.merge != KVM_MERGE_NONE) {
      said += fmt::format(" merge {}", r.merge);
    }
    if (r.budgets != KVM_BUDGETS_EQUAL) {
      said += fmt::format(" budgets {}", r.budgets);
    }
    return said;
  });
}

std::string index_text(const Space& space) {
  return text_of(space, "kvm index 1\n", [&](uint32_t layer, uint32_t head) {
    const IndexConfig index = space.index(layer, head);
    if (index.kind == KVM_INDEX_NONE) {
      return std::string("none");
    }
    std::string said = fmt::format("kind {} sinks {} recent {} from {} seed {}", index.kind,
                                   index.n_sinks, index.n_recent, index.min_tokens, index.seed);
    if (index.kind == KVM_INDEX_LSH) {
      said += fmt::format(" bits {} tables {}", space.lsh.n_bits, space.lsh.n_tables);
    }
    return said;
  });
}

Digest digest_of(const std::string& text) {
  const boost::uuids::uuid uuid = boost::uuids::name_generator_sha1(boost::uuids::ns::url())(text);
  Digest digest;
  std::copy(uuid.begin(), uuid.end(), digest.begin());
  return digest;
}

}  // namespace kvm::engine
