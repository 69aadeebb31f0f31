// SPDX-License-Identifier: Apache-2.0
// Space: the geometry and identity of one model's KV, validated, with every default filled in and
// every override resolved to the layer and head that it concerns.
//
// Immutable after resolve_space; shared by the sequences of the space.
#ifndef KVM_ENGINE_SPACE_SPACE_H_
#define KVM_ENGINE_SPACE_SPACE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/assert.h"
#include "base/limits.h"
#include "base/request.h"
#include "base/status.h"
#include "engine/space/mode_choice.h"
#include "hash_index/lsh/lsh.h"
#include "kvm.h"
#include "tiers/slab_class.h"

namespace kvm::engine {

// An IndexConfig says what is kept beside the keys of a head for approximate modes. All zero but
// `kind` with NONE.
struct IndexConfig {
  uint32_t kind = KVM_INDEX_NONE;
  uint32_t n_sinks = 0;
  uint32_t n_recent = 0;
  uint32_t min_tokens = 0;
  uint64_t seed = 0;

  bool operator==(const IndexConfig&) const = default;
};

// A Retention says how a head keeps its tokens. kFull has zeros in all numbers.
struct Retention {
  uint32_t kind = KVM_RETAIN_FULL;
  uint64_t n_sinks = 0;
  uint64_t n_recent = 0;
  uint64_t slack = 0;
  uint64_t n_heavy = 0;
  uint32_t merge = KVM_MERGE_NONE;
  uint32_t budgets = KVM_BUDGETS_EQUAL;
  uint32_t positions = KVM_POSITIONS_ABSOLUTE;

  bool operator==(const Retention&) const = default;

  // Queries see whatever is stored, be it more than sinks and window.
  bool shows_all() const { return kind != KVM_RETAIN_SINKS_RECENT; }
  // Says whether what is given up differs from head to head, or leaves something behind in each.
  bool is_per_head() const {
    return kind == KVM_RETAIN_SINKS_RECENT_FOLD || kind == KVM_RETAIN_HEAVY;
  }
  // IN_CACHE: by how many positions a query at p is nearer to the sinks than it was appended.
  uint64_t shift(uint64_t query_position) const {
    const uint64_t seen = n_sinks + n_recent;
    return positions == KVM_POSITIONS_IN_CACHE && query_position >= seen ? query_position + 1 - seen
                                                                         : 0;
  }
};

// A HeadClass is the kv heads of one layer that share pages: same retention, same codec, and few
// enough that a page fits an extent (heads that agree in everything may still be split into several
// classes).
struct HeadClass {
  std::vector<uint16_t> kv_heads;  // ascending; head i of a page is kv head kv_heads[i]
  Retention retention;
  tiers::SlabClass slab_class;  // of pages that are full and committed; of the others its tail()
  // KVM_LAYER_PAIR: which of its layers this is. Both have the same classes; a page that is full
  // and committed in both is one page, which the lists of both refer to.
  codecs::PairSide side = codecs::PairSide::kNone;
  // KVM_MERGE_DEMOTED: of pages of demoted tokens, which stand in the places of pages whose tokens
  // went elsewhere; positions mean nothing within them. n_heads is 0 else.
  tiers::SlabClass demoted;

  // Says whether pages are encoded anew once they are full and committed.
  bool settles() const { return slab_class != slab_class.tail(); }
  bool demotes() const { return demoted.n_heads != 0; }
  bool is_paired() const { return side != codecs::PairSide::kNone; }
  // How heads of this class read a page.
  tiers::SlabClass seen(const tiers::SlabClass& of_page) const {
    return is_paired() ? of_page.seen_from(side) : of_page;
  }
  // Says whether pages of a list may differ in class.
  bool has_classes() const { return settles() || demotes(); }
  // Of the rows that are kept of pages that go.
  tiers::SlabClass kept_class() const { return demotes() ? slab_class : slab_class.tail(); }
  // The most that are kept: whole pages where the others become pages.
  uint64_t kept_capacity(uint64_t n_heavy) const {
    return demotes() ? round_up(n_heavy, kPageTokens) : n_heavy;
  }
};

// LazyPlanes are made when somebody first wants them: up to a million deviates are no work for the
// thread that registers a space.
class LazyPlanes {
 public:
  // Threads: any; whoever comes while they are made waits for them. Fails with bad_alloc; then the
  // next call tries again. REQUIRES: the same arguments each time.
  const hash_index::Planes& make(const hash_index::LshParams& params, uint32_t dim_k) const {
    std::call_once(once_, [&] {
      planes_ = hash_index::make_planes(params, dim_k);
      // SYNC: the planes become visible to those who get them.
      made_.store(planes_.get(), std::memory_order_release);
    });
    return *planes_;
  }
  // Null as long as nobody has made them.
  const hash_index::Planes* get() const {
    // SYNC: pairs with the release in make().
    return made_.load(std::memory_order_acquire);
  }

 private:
  mutable std::once_flag once_;
  mutable hash_index::PlanesPtr planes_;
  mutable std::atomic<const hash_index::Planes*> made_{nullptr};
};

// A HeadPlace says where the rows of a kv head lie.
struct HeadPlace {
  uint16_t class_index = 0;  // in Layer::classes of the storage layer
  uint16_t head = 0;         // within the pages of that class
};

struct Layer {
  static constexpr uint32_t kNoPartner = UINT32_MAX;

  uint32_t kind = KVM_LAYER_OWN;  // of a pair: OWN, since each has lists of its own
  uint32_t storage_layer = 0;     // itself; ALIAS: the target. ABSENT: itself, and nothing is there
  uint32_t n_q_heads = 0;
  uint32_t n_kv_heads = 0;
  uint64_t window = 0;  // query at p sees keys at positions > p - window; 0: all
  // KVM_LAYER_PAIR: the other layer of the pair, which is this one's neighbour, and in both what
  // the pages of both are made with: weight of the deeper one, tokens of 64 that are kept apart.
  uint32_t partner = kNoPartner;
  float pair_t = 0;
  uint32_t pair_kept = 0;
  uint32_t dim_k = 0;
  uint32_t dim_v = 0;
  float softmax_scale = 0;
  // OWN layers only; an ALIAS layer's are those of its storage layer (Space::storage).
  std::vector<HeadClass> classes;
  std::vector<HeadPlace> heads;      // [n_kv_heads]
  uint32_t first_list = 0;           // list of class c in a sequence: first_list + c
  std::vector<IndexConfig> indexes;  // [n_kv_heads], or empty: no head has one

  uint32_t group() const { return n_q_heads / n_kv_heads; }
  // Says whether pages of the layer become those of a pair. A pair that keeps all tokens has none.
  bool pairs() const { return partner != kNoPartner && pair_kept < kPageTokens; }
};

// A HeadVisibility says what the queries of one head see because of the layer's window and the
// head's retention, before causality, ranges and trees: a query at position p sees position x when
//   x > p - window  (window 0: always)   or   first_sink <= x < n_sinks.
// Fits attention::Visibility {window, sinks = n_sinks} with the range [0, first_sink) excluded
// where it is not empty.
struct HeadVisibility {
  uint64_t window = 0;
  uint64_t n_sinks = 0;
  uint64_t first_sink = 0;
  // The same answer holds for queries at [the one asked for, end). Only a layer whose window is
  // longer than the n_recent of a head with sinks ever has an end below UINT64_MAX.
  uint64_t end = UINT64_MAX;
};

using Digest = std::array<uint8_t, 16>;

struct Space {
  std::string name;
  std::array<uint8_t, 32> fingerprint{};
  uint32_t n_layers = 0;
  uint32_t n_q_heads = 0;  // of layers without an override
  uint32_t n_kv_heads = 0;
  uint32_t head_dim_k = 0;
  uint32_t head_dim_v = 0;
  bool v_in_k = false;             // KVM_SPACE_V_IN_K
  CodecId codec = CodecId::kBf16;  // of heads without an override
  float logit_softcap = 0;         // 0: none
  uint32_t rope_layout = KVM_ROPE_NONE;
  std::vector<float> rope_inv_freq;
  // Empty, or per layer: layer l's q head h at sink_logits[l * n_q_heads + h].
  std::vector<float> sink_logits;
  std::vector<float> alibi_slopes;  // [n_q_heads], or empty
  uint32_t shard_index = 0;
  uint32_t n_shards = 1;
  // Requests with KVM_MODE_DEFAULT take it. EXACT with zeros, or valid with eps and delta filled
  // in.
  ModeChoice default_choice;
  std::vector<Layer> layers;
  hash_index::LshParams lsh;  // of all LSH indexes
  bool has_hashes = false;    // there are some
  LazyPlanes planes;          // theirs

  uint32_t n_own_layers = 0;
  uint32_t n_lists = 0;  // head classes over all OWN layers
  uint64_t bytes_per_token = 0;
  bool has_indexes = false;                  // of some layer
  bool settles = false;                      // some head class does
  bool has_pairs = false;                    // some layers pair
  std::vector<codecs::PairSide> list_sides;  // [n_lists] of their classes; empty: no layers pair
  bool shares_budgets = false;               // likewise, among layers
  bool awaits_prompt = false;  // some head class gives up nothing before the prompt ends
  // engine/space/digest.h.
  Digest geometry_digest{};
  Digest layout_digest{};
  Digest policy_digest{};
  Digest index_digest{};

  // REQUIRES here and below: layer < n_layers.
  // The layer whose classes, lengths and pages `layer` reads.
  const Layer& storage(uint32_t layer) const {
    KVM_ASSERT(layer < layers.size());
    return layers[layers[layer].storage_layer];
  }
  const HeadClass& head_class(uint32_t layer, uint32_t class_index) const {
    KVM_ASSERT(class_index < storage(layer).classes.size());
    return storage(layer).classes[class_index];
  }
  // Returns the list that says how far those of a class have been settled (Sequence::settled_ends):
  // of a pair the deeper layer's. REQUIRES: the layer is OWN.
  uint32_t settling_list(uint32_t layer, uint32_t class_index) const {
    const bool is_shallow = head_class(layer, class_index).side == codecs::PairSide::kShallow;
    return layers[is_shallow ? layers[layer].partner : layer].first_list + class_index;
  }
  // Returns which side of pairs' pages a list of a sequence reads.
  codecs::PairSide list_side(size_t list) const {
    return list_sides.empty() ? codecs::PairSide::kNone : list_sides[list];
  }
  // Returns where kv head `head` of `layer` (OWN or ALIAS) is stored.
  HeadPlace place(uint32_t layer, uint32_t head) const {
    KVM_ASSERT(head < storage(layer).heads.size());
    return storage(layer).heads[head];
  }
  // Returns what is kept beside its keys.
  IndexConfig index(uint32_t layer, uint32_t head) const {
    const std::vector<IndexConfig>& indexes = storage(layer).indexes;
    return indexes.empty() ? IndexConfig{} : indexes[head];
  }
  // Sink logits of a layer's q heads, [n_q_heads of the layer]; null where there are none.
  const float* layer_sink_logits(uint32_t layer) const {
    return sink_logits.empty() ? nullptr : sink_logits.data() + uint64_t{layer} * n_q_heads;
  }
  // Slopes of a layer's q heads, [n_q_heads of the space]; null where there are none.
  const float* slopes() const { return alibi_slopes.empty() ? nullptr : alibi_slopes.data(); }
  uint32_t flags() const { return v_in_k ? uint32_t{KVM_SPACE_V_IN_K} : 0; }
  // Returns what queries of the heads of a class see, from query_position on.
  HeadVisibility visibility(uint32_t layer, uint32_t class_index, uint64_t query_position) const;
};

// Validates a specification and resolves it.
// Fails: INVALID (the sentence names the field, its value and what is allowed), UNSUPPORTED
// (a default proposal GRAPH, an index or a policy where there can be none).
Result<std::shared_ptr<const Space>> resolve_space(const SpaceSpec& spec);

// OK when both describe the same geometry and identity; else EXISTS with a sentence that names the
// first difference. Compared after resolution: a default and the same value written out agree.
Status compare_spaces(const Space& registered, const Space& offered);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_SPACE_SPACE_H_
