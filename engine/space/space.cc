// SPDX-License-Identifier: Apache-2.0
#include "engine/space/space.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "attention/sampled/approx.h"
#include "engine/space/digest.h"

namespace kvm::engine {
namespace {

static_assert(static_cast<int>(CodecId::kF32) == KVM_CODEC_F32 &&
              static_cast<int>(CodecId::kF16) == KVM_CODEC_F16 &&
              static_cast<int>(CodecId::kBf16) == KVM_CODEC_BF16 &&
              static_cast<int>(CodecId::kI8) == KVM_CODEC_I8 &&
              static_cast<int>(CodecId::kF8) == KVM_CODEC_F8E4M3);

// A head class may leave at most this share of an extent unused before its heads are split.
constexpr uint64_t kMaxWasteBytes = tiers::kExtentBytes / 8;

template <typename Number>
std::string text(Number value) {
  return std::to_string(value);
}

Status invalid(std::string message) { return Status(KVM_ERR_INVALID, std::move(message)); }

// "policies[3]", for sentences.
std::string entry(const char* list, size_t index) {
  return std::string(list) + "[" + std::to_string(index) + "]";
}

Status check_range(const char* field, uint64_t value, uint64_t low, uint64_t high) {
  if (value < low || value > high) {
    return invalid(std::string(field) + " is " + text(value) + "; it must be " + text(low) +
                   " to " + text(high));
  }
  return Status::ok();
}

Status check_head_dim(const char* field, uint32_t value) {
  if (value < kMinHeadDim || value > kMaxHeadDim || value % 8 != 0) {
    return invalid(std::string(field) + " is " + text(value) +
                   "; it must be a multiple of 8 from " + text(kMinHeadDim) + " to " +
                   text(kMaxHeadDim));
  }
  return Status::ok();
}

// What say(codec) says of each codec; "" is left out.
template <typename Say>
std::string list_codecs(Say say) {
  std::string list;
  for (const codecs::Codec& codec : codecs::kCodecs) {
    const std::string said = say(codec);
    list += (list.empty() || said.empty() ? "" : ", ") + said;
  }
  return list;
}

Status check_codec(const std::string& field, uint32_t value) {
  if (codecs::codec_is_known(value)) {
    return Status::ok();
  }
  return invalid(field + " is " + text(value) +
                 "; it must be the id of a codec: " + list_codecs([](const codecs::Codec& codec) {
                   return text(static_cast<uint32_t>(codec.id)) + " (" + codec.name + ")";
                 }));
}

std::string codecs_with_rows() {
  return list_codecs([](const codecs::Codec& codec) {
    return std::string(codec.rows_stand_alone() ? codec.name : "");
  });
}
std::string codecs_with_own_rows() {
  return list_codecs([](const codecs::Codec& codec) {
    return std::string(codec.rows_are_own() ? codec.name : "");
  });
}

Status check_v_in_k(const std::string& where, bool v_in_k, uint32_t dim_k, uint32_t dim_v) {
  if (v_in_k && dim_v > dim_k) {
    return invalid(where + "head_dim_v is " + text(dim_v) + " with head_dim_k " + text(dim_k) +
                   "; with KVM_SPACE_V_IN_K it must be at most that");
  }
  return Status::ok();
}

Status check_reserved(const std::string& field, const uint64_t* values, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if (values[i] != 0) {
      return invalid(field + "[" + std::to_string(i) + "] is " + text(values[i]) +
                     "; reserved fields must be zero");
    }
  }
  return Status::ok();
}

Status check_name(const std::string& name) {
  constexpr std::string_view kAllowed =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._/-";
  if (name.empty() || name.size() > 63) {
    return invalid("name has " + text(name.size()) + " bytes; it must have 1 to 63");
  }
  const size_t bad = name.find_first_not_of(kAllowed);
  if (bad != std::string::npos) {
    return invalid("name has the byte " + text(static_cast<unsigned char>(name[bad])) + " at " +
                   text(bad) + "; allowed are letters, digits and . _ / -");
  }
  return Status::ok();
}

Status check_heads(const std::string& where, uint32_t n_q_heads, uint32_t n_kv_heads) {
  if (n_q_heads % n_kv_heads != 0 || n_q_heads / n_kv_heads > kMaxGroup) {
    return invalid(where + "n_q_heads is " + text(n_q_heads) + " with n_kv_heads " +
                   text(n_kv_heads) + "; n_kv_heads must divide it into groups of 1 to " +
                   text(kMaxGroup));
  }
  return Status::ok();
}

// Layers [begin, begin + n) of an override. n = 0: to the last layer, where allowed.
Status resolve_layers(const std::string& where, uint32_t begin, uint32_t n, bool zero_means_rest,
                      uint32_t n_layers, uint32_t* end) {
  if (begin >= n_layers) {
    return invalid(where + ".layer_begin is " + text(begin) + "; the space has " + text(n_layers) +
                   " layers");
  }
  if ((n == 0 && !zero_means_rest) || n > n_layers - begin) {
    return invalid(where + ".n_layers is " + text(n) + " from layer " + text(begin) +
                   "; it must be " + (zero_means_rest ? "0 to " : "1 to ") +
                   text(n_layers - begin));
  }
  *end = n == 0 ? n_layers : begin + n;
  return Status::ok();
}

bool mask_has(const uint64_t mask[2], uint32_t head) {
  if (mask[0] == 0 && mask[1] == 0) {
    return true;
  }
  return (mask[head / 64] >> (head % 64) & 1) != 0;
}

// The mask must not name heads that no layer of the range has.
Status check_mask(const std::string& where, const uint64_t mask[2], const Space& space,
                  uint32_t begin, uint32_t end) {
  uint32_t n_kv_heads = 0;
  for (uint32_t layer = begin; layer < end; ++layer) {
    n_kv_heads = std::max(n_kv_heads, space.layers[layer].n_kv_heads);
  }
  for (uint32_t head = n_kv_heads; head < kMaxKvHeads; ++head) {
    if ((mask[head / 64] >> (head % 64) & 1) != 0) {
      return invalid(where + ".kv_head_mask names kv head " + text(head) +
                     "; the layers have kv heads 0 to " + text(n_kv_heads - 1));
    }
  }
  return Status::ok();
}

Status resolve_scalars(const SpaceSpec& spec, Space* space) {
  const kvm_space_params& params = spec.params;
  KVM_TRY(check_name(spec.name));
  if ((params.flags & ~uint32_t{KVM_SPACE_V_IN_K}) != 0) {
    return invalid("flags is " + text(params.flags) + "; it must be 0 or KVM_SPACE_V_IN_K (1)");
  }
  KVM_TRY(check_reserved("reserved", params.reserved, std::size(params.reserved)));
  KVM_TRY(check_range("n_layers", params.n_layers, 1, kMaxLayers));
  KVM_TRY(check_range("n_q_heads", params.n_q_heads, 1, kMaxQHeads));
  const uint32_t n_kv_heads = params.n_kv_heads == 0 ? params.n_q_heads : params.n_kv_heads;
  KVM_TRY(check_range("n_kv_heads", n_kv_heads, 1, kMaxKvHeads));
  KVM_TRY(check_heads("", params.n_q_heads, n_kv_heads));
  const uint32_t head_dim_v = params.head_dim_v == 0 ? params.head_dim_k : params.head_dim_v;
  KVM_TRY(check_head_dim("head_dim_k", params.head_dim_k));
  KVM_TRY(check_head_dim("head_dim_v", head_dim_v));
  space->v_in_k = (params.flags & KVM_SPACE_V_IN_K) != 0;
  KVM_TRY(check_v_in_k("", space->v_in_k, params.head_dim_k, head_dim_v));
  const uint32_t codec = params.codec == 0 ? uint32_t{KVM_CODEC_BF16} : params.codec;
  KVM_TRY(check_codec("codec", codec));
  if (!std::isfinite(params.softmax_scale) || params.softmax_scale < 0) {
    return invalid("softmax_scale is " + text(params.softmax_scale) +
                   "; it must be positive and finite, or 0 for 1 / sqrt(head_dim_k)");
  }
  const float softcap = params.logit_softcap;
  if (softcap != 0 && !(softcap >= kMinSoftcap && softcap <= kMaxSoftcap)) {
    return invalid("logit_softcap is " + text(softcap) + "; it must be " + text(kMinSoftcap) +
                   " to " + text(kMaxSoftcap) + ", or 0 for none");
  }
  const uint32_t n_shards = params.n_shards == 0 ? 1 : params.n_shards;
  if (params.shard_index >= n_shards) {
    return invalid("shard_index is " + text(params.shard_index) + "; it must be below n_shards, " +
                   text(n_shards));
  }
  space->name = spec.name;
  std::copy(std::begin(params.fingerprint), std::end(params.fingerprint),
            space->fingerprint.begin());
  space->n_layers = params.n_layers;
  space->n_q_heads = params.n_q_heads;
  space->n_kv_heads = n_kv_heads;
  space->head_dim_k = params.head_dim_k;
  space->head_dim_v = head_dim_v;
  space->codec = static_cast<CodecId>(codec);
  space->logit_softcap = params.logit_softcap;
  space->shard_index = params.shard_index;
  space->n_shards = n_shards;
  return Status::ok();
}

Status resolve_default_choice(const SpaceSpec& spec, Space* space) {
  const kvm_space_params& params = spec.params;
  ModeChoice choice = {params.default_mode, params.default_proposal, params.default_eps,
                       params.default_delta, params.default_budget};
  KVM_TRY(check_choice(choice, "default_"));
  if (choice.mode <= KVM_MODE_EXACT) {
    choice.mode = KVM_MODE_EXACT;
    if (choice != ModeChoice{}) {
      return invalid("default_mode is " + text(params.default_mode) +
                     " (EXACT) with default_proposal " + text(choice.proposal) + ", default_eps " +
                     text(choice.eps) + ", default_delta " + text(choice.delta) +
                     " and default_budget " + text(choice.budget) +
                     "; these must be 0 without an approximate mode");
    }
    return Status::ok();
  }
  const attention::ApproxParams defaults;
  // A sample with a budget has an eps only where one is named.
  const bool is_plain = choice.mode == KVM_MODE_SAMPLED && choice.budget != 0;
  choice.eps = choice.eps == 0 && !is_plain ? defaults.eps : choice.eps;
  choice.delta = choice.delta == 0 ? defaults.delta : choice.delta;
  space->default_choice = choice;
  return Status::ok();
}

Status resolve_rope(const SpaceSpec& spec, Space* space) {
  const uint32_t layout = spec.params.rope_layout;
  if (layout > KVM_ROPE_INTERLEAVED) {
    return invalid("rope_layout is " + text(layout) + "; it must be KVM_ROPE_NONE (0), " +
                   "KVM_ROPE_HALF (1) or KVM_ROPE_INTERLEAVED (2)");
  }
  const size_t n_pairs = spec.rope_inv_freq.size();
  if (n_pairs > space->head_dim_k / 2) {
    return invalid("n_rope_pairs is " + text(n_pairs) +
                   "; it must be at most half of head_dim_k, " + text(space->head_dim_k / 2));
  }
  if ((layout == KVM_ROPE_NONE) != (n_pairs == 0)) {
    return invalid("rope_layout is " + text(layout) + " with n_rope_pairs " + text(n_pairs) +
                   "; both must be zero, or neither");
  }
  for (size_t i = 0; i < n_pairs; ++i) {
    if (!std::isfinite(spec.rope_inv_freq[i])) {
      return invalid(entry("rope_inv_freq", i) + " is not finite");
    }
  }
  space->rope_layout = layout;
  space->rope_inv_freq = spec.rope_inv_freq;
  return Status::ok();
}

// What only KVM_LAYER_PAIR takes.
Status check_pair_params(const std::string& where, const kvm_layer_params& params) {
  if (params.kind != KVM_LAYER_PAIR) {
    return params.pair_t == 0 && params.pair_gamma == 0
               ? Status::ok()
               : invalid(where + " has pair_t " + text(params.pair_t) + " and pair_gamma " +
                         text(params.pair_gamma) + "; without KVM_LAYER_PAIR both must be 0");
  }
  if (params.n_layers != 1) {
    return invalid(where + ".n_layers is " + text(params.n_layers) +
                   "; with KVM_LAYER_PAIR it must be 1: an entry is the deeper layer of one pair");
  }
  if (params.target != 0) {
    return invalid(where + ".target is " + text(params.target) +
                   "; with KVM_LAYER_PAIR it must be 0: the partner is the layer below");
  }
  for (const auto& [field, value] :
       {std::pair{".pair_t", params.pair_t}, std::pair{".pair_gamma", params.pair_gamma}}) {
    if (!(value >= 0 && value <= 1)) {
      return invalid(where + field + " is " + text(value) +
                     "; it must be above 0, up to 1, or 0 for the default");
    }
  }
  return Status::ok();
}

// Of 64 tokens: gamma of them, in whole steps, and one step at least.
uint32_t pair_kept_of(float gamma) {
  constexpr uint32_t kSteps = kPageTokens / codecs::kPairStep;
  const float steps = std::ceil((gamma == 0 ? 0.05f : gamma) * kSteps);
  return codecs::kPairStep * std::clamp(static_cast<uint32_t>(steps), 1u, kSteps);
}

Status apply_layer_override(const SpaceSpec& spec, size_t index, Space* space) {
  const kvm_layer_params& params = spec.layers[index];
  const std::string where = entry("layers", index);
  uint32_t end = 0;
  KVM_TRY(resolve_layers(where, params.layer_begin, params.n_layers, false, space->n_layers, &end));
  if (params.kind > KVM_LAYER_PAIR) {
    return invalid(where + ".kind is " + text(params.kind) + "; it must be KVM_LAYER_OWN (0), " +
                   "KVM_LAYER_ALIAS (1), KVM_LAYER_ABSENT (2) or KVM_LAYER_PAIR (3)");
  }
  KVM_TRY(check_pair_params(where, params));
  if (params.kind == KVM_LAYER_ALIAS && params.target >= space->n_layers) {
    return invalid(where + ".target is " + text(params.target) + "; the space has " +
                   text(space->n_layers) + " layers");
  }
  const uint32_t n_q_heads = params.n_q_heads == 0 ? space->n_q_heads : params.n_q_heads;
  const uint32_t n_kv_heads = params.n_kv_heads == 0 ? space->n_kv_heads : params.n_kv_heads;
  KVM_TRY(check_range((where + ".n_q_heads").c_str(), n_q_heads, 1, kMaxQHeads));
  KVM_TRY(check_range((where + ".n_kv_heads").c_str(), n_kv_heads, 1, kMaxKvHeads));
  KVM_TRY(check_heads(where + ": ", n_q_heads, n_kv_heads));
  if (params.head_dim_k != 0) {
    KVM_TRY(check_head_dim((where + ".head_dim_k").c_str(), params.head_dim_k));
  }
  if (params.head_dim_v != 0) {
    KVM_TRY(check_head_dim((where + ".head_dim_v").c_str(), params.head_dim_v));
  }
  for (uint32_t i = params.layer_begin; i < end; ++i) {
    Layer& layer = space->layers[i];
    layer.kind = params.kind;
    layer.storage_layer = params.kind == KVM_LAYER_ALIAS ? params.target : i;
    layer.n_q_heads = n_q_heads;
    layer.n_kv_heads = n_kv_heads;
    layer.window = params.window;
    layer.dim_k = params.head_dim_k;
    layer.dim_v = params.head_dim_v;
    const bool is_pair = params.kind == KVM_LAYER_PAIR;
    layer.pair_t = !is_pair ? 0.0f : params.pair_t == 0 ? 0.6f : params.pair_t;
    layer.pair_kept = is_pair ? pair_kept_of(params.pair_gamma) : 0;
  }
  return Status::ok();
}

// Layers of pairs know each other, and are OWN from here on.
Status resolve_pairs(Space* space) {
  for (uint32_t i = 0; i < space->n_layers; ++i) {
    Layer& deep = space->layers[i];
    if (deep.kind != KVM_LAYER_PAIR) {
      continue;
    }
    const std::string which = "layer " + text(i) + " is KVM_LAYER_PAIR";
    if (i == 0) {
      return invalid(which + ", and there is no layer below it to be its partner");
    }
    Layer& shallow = space->layers[i - 1];
    if (shallow.kind != KVM_LAYER_OWN || shallow.partner != Layer::kNoPartner) {
      return invalid(which + ", and the layer below it is " +
                     (shallow.kind == KVM_LAYER_OWN     ? "the deeper one of a pair itself"
                      : shallow.kind == KVM_LAYER_ALIAS ? "an alias"
                                                        : "absent") +
                     "; its partner must store K and V of its own");
    }
    if (shallow.n_kv_heads != deep.n_kv_heads) {
      return invalid(which + " with " + text(deep.n_kv_heads) + " kv heads, and its partner has " +
                     text(shallow.n_kv_heads) + "; they must agree");
    }
    shallow.partner = i;
    shallow.pair_t = deep.pair_t;
    shallow.pair_kept = deep.pair_kept;
    deep.partner = i - 1;
    deep.kind = KVM_LAYER_OWN;
    space->has_pairs = space->has_pairs || deep.pairs();
  }
  return Status::ok();
}

// Zeros become what they stand for. REQUIRES: the targets of aliases have theirs.
Status resolve_dims(const SpaceSpec& spec, uint32_t index, Space* space) {
  Layer& layer = space->layers[index];
  const Layer& target = space->layers[layer.storage_layer];
  const bool is_alias = layer.kind == KVM_LAYER_ALIAS;
  const auto resolve = [is_alias](uint32_t* dim, uint32_t of_space, uint32_t of_target) {
    *dim = *dim != 0 ? *dim : is_alias ? of_target : of_space;
  };
  resolve(&layer.dim_k, space->head_dim_k, target.dim_k);
  resolve(&layer.dim_v, space->head_dim_v, target.dim_v);
  if (is_alias && (layer.dim_k != target.dim_k || layer.dim_v != target.dim_v)) {
    return invalid("layer " + text(index) + " is an alias of layer " + text(layer.storage_layer) +
                   " with head dims " + text(layer.dim_k) + "/" + text(layer.dim_v) +
                   "; the target has " + text(target.dim_k) + "/" + text(target.dim_v) +
                   ", and they must agree");
  }
  layer.softmax_scale = spec.params.softmax_scale != 0
                            ? spec.params.softmax_scale
                            : 1.0f / std::sqrt(static_cast<float>(layer.dim_k));
  return layer.kind == KVM_LAYER_ABSENT
             ? Status::ok()
             : check_v_in_k("layer " + text(index) + ": ", space->v_in_k, layer.dim_k, layer.dim_v);
}

Status resolve_layer_map(const SpaceSpec& spec, Space* space) {
  space->layers.resize(space->n_layers);
  for (uint32_t i = 0; i < space->n_layers; ++i) {
    space->layers[i].storage_layer = i;
    space->layers[i].n_q_heads = space->n_q_heads;
    space->layers[i].n_kv_heads = space->n_kv_heads;
  }
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    KVM_TRY(apply_layer_override(spec, i, space));
  }
  KVM_TRY(resolve_pairs(space));
  for (uint32_t i = 0; i < space->n_layers; ++i) {
    const Layer& layer = space->layers[i];
    space->n_own_layers += layer.kind == KVM_LAYER_OWN ? 1 : 0;
    if (layer.kind != KVM_LAYER_ALIAS) {
      continue;
    }
    const Layer& target = space->layers[layer.storage_layer];
    const std::string which =
        "layer " + text(i) + " is an alias of layer " + text(layer.storage_layer);
    if (target.kind != KVM_LAYER_OWN) {
      return invalid(which + ", which stores nothing itself; the target must be KVM_LAYER_OWN");
    }
    if (target.n_q_heads != layer.n_q_heads || target.n_kv_heads != layer.n_kv_heads) {
      return invalid(which + " with " + text(layer.n_q_heads) + "/" + text(layer.n_kv_heads) +
                     " q/kv heads; the target has " + text(target.n_q_heads) + "/" +
                     text(target.n_kv_heads) + ", and they must agree");
    }
  }
  if (space->n_own_layers == 0) {
    return invalid("no layer is KVM_LAYER_OWN; at least one must store something");
  }
  for (const bool is_alias : {false, true}) {
    for (uint32_t i = 0; i < space->n_layers; ++i) {
      if ((space->layers[i].kind == KVM_LAYER_ALIAS) == is_alias) {
        KVM_TRY(resolve_dims(spec, i, space));
      }
    }
  }
  return Status::ok();
}

// Numbers for the space's q heads serve layers that have no more.
Status check_q_heads(const Space& space, const char* field) {
  for (uint32_t i = 0; i < space.n_layers; ++i) {
    if (space.layers[i].n_q_heads > space.n_q_heads) {
      return invalid("layer " + text(i) + " has " + text(space.layers[i].n_q_heads) +
                     " q heads; with " + field + " it may have at most the space's " +
                     text(space.n_q_heads));
    }
  }
  return Status::ok();
}

Status resolve_sink_logits(const SpaceSpec& spec, Space* space) {
  if (spec.sink_logits.empty()) {
    return Status::ok();
  }
  if (spec.sink_logits.size() != uint64_t{space->n_layers} * space->n_q_heads) {
    return invalid("sink_logits has " + text(spec.sink_logits.size()) + " numbers; it must have " +
                   text(uint64_t{space->n_layers} * space->n_q_heads));
  }
  KVM_TRY(check_q_heads(*space, "sink_logits"));
  for (size_t i = 0; i < spec.sink_logits.size(); ++i) {
    const float logit = spec.sink_logits[i];
    if (std::isnan(logit) || logit == INFINITY) {
      return invalid(entry("sink_logits", i) + " is " + text(logit) +
                     "; it must be finite or minus infinity");
    }
  }
  space->sink_logits = spec.sink_logits;
  return Status::ok();
}

Status resolve_alibi_slopes(const SpaceSpec& spec, Space* space) {
  if (spec.alibi_slopes.empty()) {
    return Status::ok();
  }
  if (spec.alibi_slopes.size() != space->n_q_heads) {
    return invalid("alibi_slopes has " + text(spec.alibi_slopes.size()) +
                   " numbers; it must have " + text(space->n_q_heads));
  }
  KVM_TRY(check_q_heads(*space, "alibi_slopes"));
  for (size_t i = 0; i < spec.alibi_slopes.size(); ++i) {
    const float slope = spec.alibi_slopes[i];
    if (!(std::fabs(slope) <= kMaxSlope)) {
      return invalid(entry("alibi_slopes", i) + " is " + text(slope) + "; it must be " +
                     text(-kMaxSlope) + " to " + text(kMaxSlope));
    }
  }
  space->alibi_slopes = spec.alibi_slopes;
  return Status::ok();
}

// A HeadConfig is what the policies and codecs say about one kv head of one layer.
struct HeadConfig {
  Retention retention;
  CodecId codec_k = CodecId::kBf16;
  CodecId codec_v = CodecId::kBf16;
  CodecId demoted_k = CodecId::kNone;
  CodecId demoted_v = CodecId::kNone;

  bool operator==(const HeadConfig&) const = default;
};

using HeadConfigs = std::vector<std::vector<HeadConfig>>;  // [layer][kv head]

// As kvm.h has it, and its number where it has none.
std::string retention_text(uint32_t kind) {
  constexpr const char* kNames[] = {"KVM_RETAIN_FULL", "KVM_RETAIN_SINKS_RECENT",
                                    "KVM_RETAIN_SINKS_RECENT_FOLD", "KVM_RETAIN_HEAVY",
                                    "KVM_RETAIN_PROMPT"};
  return kind < std::size(kNames) ? std::string(kNames[kind]) + " (" + text(kind) + ")"
                                  : "retention " + text(kind);
}

Status check_retention(const std::string& where, const kvm_policy_params& params) {
  if (params.positions > KVM_POSITIONS_IN_CACHE) {
    return invalid(where + ".positions is " + text(params.positions) +
                   "; it must be KVM_POSITIONS_ABSOLUTE (0) or KVM_POSITIONS_IN_CACHE (1)");
  }
  if (params.positions == KVM_POSITIONS_IN_CACHE && params.retention != KVM_RETAIN_SINKS_RECENT) {
    return invalid(where + ".positions is KVM_POSITIONS_IN_CACHE with " +
                   retention_text(params.retention) +
                   "; only with KVM_RETAIN_SINKS_RECENT (1) is it known " +
                   "how many tokens are between the sinks and a query");
  }
  if (params.retention > KVM_RETAIN_PROMPT) {
    return invalid(
        where + ".retention is " + text(params.retention) +
        "; it must be KVM_RETAIN_FULL (0), KVM_RETAIN_SINKS_RECENT (1), "
        "KVM_RETAIN_SINKS_RECENT_FOLD (2), KVM_RETAIN_HEAVY (3) or KVM_RETAIN_PROMPT (4)");
  }
  if (params.retention == KVM_RETAIN_HEAVY) {
    KVM_TRY(check_range((where + ".n_heavy").c_str(), params.n_heavy, 1, kMaxHeavy));
  } else if (params.n_heavy != 0) {
    return invalid(where + ".n_heavy is " + text(params.n_heavy) +
                   "; it must be 0 without KVM_RETAIN_HEAVY");
  }
  if (params.merge > KVM_MERGE_DEMOTED) {
    return invalid(where + ".merge is " + text(params.merge) +
                   "; it must be KVM_MERGE_NONE (0), KVM_MERGE_WEIGHTED (1), " +
                   "KVM_MERGE_COUNTED (2) or KVM_MERGE_DEMOTED (3)");
  }
  if (params.merge != KVM_MERGE_NONE && params.retention != KVM_RETAIN_HEAVY) {
    return invalid(where + ".merge is " + text(params.merge) +
                   "; it must be 0 without KVM_RETAIN_HEAVY");
  }
  if (params.budgets > KVM_BUDGETS_BY_DENSITY) {
    return invalid(where + ".budgets is " + text(params.budgets) +
                   "; it must be KVM_BUDGETS_EQUAL (0) or KVM_BUDGETS_BY_DENSITY (1)");
  }
  if (params.budgets != KVM_BUDGETS_EQUAL && params.retention != KVM_RETAIN_HEAVY) {
    return invalid(where + ".budgets is " + text(params.budgets) +
                   "; it must be 0 without KVM_RETAIN_HEAVY");
  }
  if (params.retention == KVM_RETAIN_FULL || params.retention == KVM_RETAIN_PROMPT) {
    if (params.n_sinks != 0 || params.n_recent != 0 || params.slack != 0) {
      return invalid(where + " has n_sinks " + text(params.n_sinks) + ", n_recent " +
                     text(params.n_recent) + ", slack " + text(params.slack) +
                     "; with KVM_RETAIN_FULL and KVM_RETAIN_PROMPT all must be 0");
    }
    return Status::ok();
  }
  // Sums of these with positions must not wrap around.
  constexpr uint64_t kMost = uint64_t{1} << 40;
  KVM_TRY(check_range((where + ".n_sinks").c_str(), params.n_sinks, 0, kMost));
  KVM_TRY(check_range((where + ".n_recent").c_str(), params.n_recent, 1, kMost));
  return check_range((where + ".slack").c_str(), params.slack, 0, kMost);
}

Status apply_policies(const SpaceSpec& spec, const Space& space, HeadConfigs* configs) {
  for (size_t index = 0; index < spec.policies.size(); ++index) {
    const kvm_policy_params& params = spec.policies[index];
    const std::string where = entry("policies", index);
    KVM_TRY(check_retention(where, params));
    uint32_t end = 0;
    KVM_TRY(resolve_layers(where, params.layer_begin, params.n_layers, true, space.n_layers, &end));
    KVM_TRY(check_mask(where, params.kv_head_mask, space, params.layer_begin, end));
    for (uint32_t layer = params.layer_begin; layer < end; ++layer) {
      for (uint32_t head = 0; head < space.layers[layer].n_kv_heads; ++head) {
        if (mask_has(params.kv_head_mask, head)) {
          (*configs)[layer][head].retention = {.kind = params.retention,
                                               .n_sinks = params.n_sinks,
                                               .n_recent = params.n_recent,
                                               .slack = params.slack,
                                               .n_heavy = params.n_heavy,
                                               .merge = params.merge,
                                               .budgets = params.budgets,
                                               .positions = params.positions};
        }
      }
    }
  }
  return Status::ok();
}

// Queries ask all heads of a layer.
Status check_prompt_layers(const Space& space, const HeadConfigs& configs) {
  for (uint32_t layer = 0; layer < space.n_layers; ++layer) {
    const auto goes = [&](const HeadConfig& config) {
      return config.retention.kind == KVM_RETAIN_PROMPT;
    };
    const auto& heads = configs[layer];
    const auto n = std::count_if(heads.begin(), heads.end(), goes);
    if (space.layers[layer].kind == KVM_LAYER_OWN && n != 0 &&
        static_cast<size_t>(n) != heads.size()) {
      return invalid(text(n) + " of the " + text(heads.size()) + " kv heads of layer " +
                     text(layer) + " have KVM_RETAIN_PROMPT; all must have it, or none: a query " +
                     "asks them all");
    }
  }
  return Status::ok();
}

// Positions in the cache need rotations, and a rule that is the same at every position. What is
// folded or chosen cannot be seen in part.
Status check_seen(const Space& space, const HeadConfigs& configs) {
  for (uint32_t i = 0; i < space.n_layers; ++i) {
    const Layer& layer = space.layers[i];
    const auto& heads = configs[layer.storage_layer];
    const auto head = std::find_if(heads.begin(), heads.end(), [](const HeadConfig& config) {
      return config.retention.positions == KVM_POSITIONS_IN_CACHE || config.retention.is_per_head();
    });
    if (layer.kind == KVM_LAYER_ABSENT || head == heads.end()) {
      continue;
    }
    const bool in_cache = head->retention.positions == KVM_POSITIONS_IN_CACHE;
    const std::string which =
        "kv head " + text(head - heads.begin()) + " of layer " + text(i) + " has " +
        (in_cache ? std::string("KVM_POSITIONS_IN_CACHE") : retention_text(head->retention.kind));
    if (in_cache && space.rope_layout == KVM_ROPE_NONE) {
      return invalid(which + ", and the space has no rope_layout: the service must know how " +
                     "positions turn queries to move them");
    }
    if (in_cache && 2 * space.rope_inv_freq.size() > layer.dim_k) {
      return invalid(which + " and head_dim_k " + text(layer.dim_k) + ", and n_rope_pairs is " +
                     text(space.rope_inv_freq.size()) + "; it must be at most half of that");
    }
    if (in_cache && !space.alibi_slopes.empty()) {
      return invalid(which + ", and the space has alibi_slopes; only one of the two can say what " +
                     "positions mean");
    }
    if (head->retention.kind == KVM_RETAIN_SINKS_RECENT_FOLD && !space.alibi_slopes.empty()) {
      return invalid(which + ", and the space has alibi_slopes: tokens that " +
                     "become one entry would all have the bias of its position");
    }
    if (layer.window != 0) {
      return invalid(which + ", and the layer has a window of " + text(layer.window) +
                     "; only one of the two can say what a query sees");
    }
  }
  return Status::ok();
}

// V in K is stored as K is.
Status check_agree(const Space& space, const std::string& where, const std::string& field,
                   uint32_t k, uint32_t v) {
  if (space.v_in_k && v != k) {
    return invalid(where + "." + field + "_v is " + text(v) + " with " + field + "_k " + text(k) +
                   "; with KVM_SPACE_V_IN_K they must agree");
  }
  return Status::ok();
}

Status apply_codecs(const SpaceSpec& spec, const Space& space, HeadConfigs* configs) {
  for (size_t index = 0; index < spec.codecs.size(); ++index) {
    const kvm_codec_params& params = spec.codecs[index];
    const std::string where = entry("codecs", index);
    KVM_TRY(check_reserved(where + ".reserved", params.reserved, std::size(params.reserved)));
    const uint32_t space_codec = static_cast<uint32_t>(space.codec);
    const uint32_t codec_k = params.codec_k == 0 ? space_codec : params.codec_k;
    const uint32_t codec_v = params.codec_v != 0 ? params.codec_v
                             : space.v_in_k      ? codec_k
                                                 : space_codec;
    KVM_TRY(check_codec(where + ".codec_k", codec_k));
    KVM_TRY(check_codec(where + ".codec_v", codec_v));
    KVM_TRY(check_agree(space, where, "codec", codec_k, codec_v));
    const uint32_t demoted_k = params.demoted_k;
    const uint32_t demoted_v = space.v_in_k && params.demoted_v == 0 ? demoted_k : params.demoted_v;
    if ((demoted_k == 0) != (demoted_v == 0)) {
      return invalid(where + " has demoted_k " + text(demoted_k) + " and demoted_v " +
                     text(demoted_v) + "; both must name a codec, or both be 0");
    }
    if (demoted_k != 0) {
      KVM_TRY(check_codec(where + ".demoted_k", demoted_k));
      KVM_TRY(check_codec(where + ".demoted_v", demoted_v));
      KVM_TRY(check_agree(space, where, "demoted", demoted_k, demoted_v));
    }
    uint32_t end = 0;
    KVM_TRY(resolve_layers(where, params.layer_begin, params.n_layers, true, space.n_layers, &end));
    KVM_TRY(check_mask(where, params.kv_head_mask, space, params.layer_begin, end));
    for (uint32_t layer = params.layer_begin; layer < end; ++layer) {
      for (uint32_t head = 0; head < space.layers[layer].n_kv_heads; ++head) {
        if (mask_has(params.kv_head_mask, head)) {
          HeadConfig& config = (*configs)[layer][head];
          config.codec_k = static_cast<CodecId>(codec_k);
          config.codec_v = static_cast<CodecId>(codec_v);
          config.demoted_k = static_cast<CodecId>(demoted_k);
          config.demoted_v = static_cast<CodecId>(demoted_v);
        }
      }
    }
  }
  return Status::ok();
}

// What a head demotes to, and that it demotes, come from two tables.
Status check_demoted(const Space& space, const HeadConfigs& configs) {
  for (uint32_t i = 0; i < space.n_layers; ++i) {
    const Layer& layer = space.layers[i];
    for (uint32_t head = 0; layer.kind == KVM_LAYER_OWN && head < layer.n_kv_heads; ++head) {
      const HeadConfig& config = configs[i][head];
      const bool demotes = config.retention.merge == KVM_MERGE_DEMOTED;
      const bool has_codecs = config.demoted_k != CodecId::kNone;
      const std::string which = "kv head " + text(head) + " of layer " + text(i);
      if (demotes != has_codecs) {
        return invalid(which + (demotes ? " has KVM_MERGE_DEMOTED and no demoted_k, demoted_v; "
                                          "kvm_codec_params must name them"
                                        : " has demoted_k and demoted_v without KVM_MERGE_DEMOTED; "
                                          "they must be 0"));
      }
      if (!demotes) {
        continue;
      }
      if (!space.alibi_slopes.empty()) {
        return invalid(which + " has KVM_MERGE_DEMOTED, and the space has alibi_slopes: where " +
                       "demoted tokens were is not kept");
      }
      const std::array<std::pair<CodecId, CodecId>, 2> pairs = {
          {{config.codec_k, config.demoted_k}, {config.codec_v, config.demoted_v}}};
      for (const auto& [own_id, demoted_id] : pairs) {
        const codecs::Codec& own = codecs::codec_of(own_id);
        const codecs::Codec& demoted = codecs::codec_of(demoted_id);
        if (!own.rows_are_own()) {
          return invalid(which + " has KVM_MERGE_DEMOTED and codec " + own.name +
                         ", whose rows cannot change places; codecs with such rows are " +
                         codecs_with_own_rows());
        }
        if (demoted.head_rows_bytes(layer.dim_k) > own.head_rows_bytes(layer.dim_k)) {
          return invalid(which + " would demote " + own.name + " to " + demoted.name +
                         ", which takes more");
        }
      }
    }
  }
  return Status::ok();
}

// Both layers of a pair hold the same tokens, as rows that have a direction and a length.
Status check_pairs(const Space& space, const HeadConfigs& configs) {
  for (uint32_t i = 0; i < space.n_layers; ++i) {
    const Layer& deep = space.layers[i];
    if (deep.partner == Layer::kNoPartner || deep.partner > i) {
      continue;
    }
    const Layer& shallow = space.layers[deep.partner];
    const std::string pair = "layers " + text(deep.partner) + " and " + text(i) + " are a pair";
    if (shallow.dim_k != deep.dim_k || shallow.dim_v != deep.dim_v) {
      return invalid(pair + " with head dims " + text(shallow.dim_k) + "/" + text(shallow.dim_v) +
                     " and " + text(deep.dim_k) + "/" + text(deep.dim_v) + "; they must agree");
    }
    for (uint32_t head = 0; head < deep.n_kv_heads; ++head) {
      const HeadConfig& config = configs[i][head];
      if (configs[deep.partner][head] != config) {
        return invalid(pair + ", and kv head " + text(head) +
                       " has another policy or codec in one than in the other; they must agree");
      }
      if (config.retention.kind > KVM_RETAIN_SINKS_RECENT) {
        return Status(
            KVM_ERR_UNSUPPORTED,
            pair + ", and kv head " + text(head) + " has " + retention_text(config.retention.kind) +
                ": both layers must hold the same tokens, which KVM_RETAIN_FULL (0) and " +
                "KVM_RETAIN_SINKS_RECENT (1) see to");
      }
      for (const CodecId id : {config.codec_k, config.codec_v}) {
        if (!codecs::can_pair(id)) {
          return Status(KVM_ERR_UNSUPPORTED, pair + ", and kv head " + text(head) + " has codec " +
                                                 codecs::codec_of(id).name +
                                                 ", and only fp32, fp16 and bf16 can be shared");
        }
      }
    }
  }
  return Status::ok();
}

Status check_index(const std::string& where, const kvm_index_params& params) {
  KVM_TRY(check_reserved(where + ".reserved", params.reserved, std::size(params.reserved)));
  if (params.kind > KVM_INDEX_LSH) {
    return invalid(where + ".kind is " + text(params.kind) +
                   "; it must be KVM_INDEX_NONE (0), one of KVM_INDEX_SKETCH* (1 to 4) or " +
                   "KVM_INDEX_LSH (5)");
  }
  if (params.kind == KVM_INDEX_LSH) {
    const uint32_t bits = params.lsh_bits == 0 ? 10 : params.lsh_bits;
    const uint32_t tables = params.lsh_tables == 0 ? 150 : params.lsh_tables;
    KVM_TRY(check_range((where + ".lsh_bits").c_str(), bits, 1, kMaxLshBits));
    KVM_TRY(check_range((where + ".lsh_tables").c_str(), tables, kMinLshTables, kMaxLshTables));
    KVM_TRY(check_range((where + ".lsh_bits * lsh_tables").c_str(), uint64_t{bits} * tables, 2,
                        kMaxHashBits));
  } else if (params.lsh_bits != 0 || params.lsh_tables != 0) {
    return invalid(where + " has lsh_bits " + text(params.lsh_bits) + " and lsh_tables " +
                   text(params.lsh_tables) + "; without KVM_INDEX_LSH both must be 0");
  }
  KVM_TRY(check_range((where + ".n_sinks").c_str(), params.n_sinks, 0, kMaxAlwaysRead));
  KVM_TRY(check_range((where + ".n_recent").c_str(), params.n_recent, 0, kMaxAlwaysRead));
  if (params.min_tokens != 0) {
    KVM_TRY(check_range((where + ".min_tokens").c_str(), params.min_tokens, kMinIndexTokens,
                        kMaxIndexTokens));
  }
  return Status::ok();
}

// All LSH indexes of a space share their planes.
Status resolve_hashes(const std::string& where, const kvm_index_params& params, Space* space) {
  if (params.kind != KVM_INDEX_LSH) {
    return Status::ok();
  }
  const hash_index::LshParams lsh = {.n_bits = params.lsh_bits == 0 ? 10 : params.lsh_bits,
                                     .n_tables = params.lsh_tables == 0 ? 150 : params.lsh_tables,
                                     .seed = params.seed};
  if (space->has_hashes && space->lsh != lsh) {
    return invalid(where + " has " + text(lsh.n_tables) + " tables of " + text(lsh.n_bits) +
                   " bits and seed " + text(lsh.seed) + ", and an earlier one " +
                   text(space->lsh.n_tables) + " of " + text(space->lsh.n_bits) + " and seed " +
                   text(space->lsh.seed) + "; all LSH indexes of a space must agree");
  }
  space->lsh = lsh;
  space->has_hashes = true;
  return Status::ok();
}

Status apply_indexes(const SpaceSpec& spec, Space* space) {
  for (size_t index = 0; index < spec.indexes.size(); ++index) {
    const kvm_index_params& params = spec.indexes[index];
    const std::string where = entry("indexes", index);
    KVM_TRY(check_index(where, params));
    uint32_t end = 0;
    KVM_TRY(
        resolve_layers(where, params.layer_begin, params.n_layers, true, space->n_layers, &end));
    KVM_TRY(check_mask(where, params.kv_head_mask, *space, params.layer_begin, end));
    KVM_TRY(resolve_hashes(where, params, space));
    IndexConfig config;
    if (params.kind != KVM_INDEX_NONE) {
      config = {.kind = params.kind,
                .n_sinks = params.n_sinks == 0 ? 4 : params.n_sinks,
                .n_recent = params.n_recent == 0 ? 64 : params.n_recent,
                .min_tokens = params.min_tokens == 0 ? 4096 : params.min_tokens,
                .seed = params.seed};
    }
    for (uint32_t i = params.layer_begin; i < end; ++i) {
      Layer& layer = space->layers[i];
      if (layer.kind != KVM_LAYER_OWN) {
        continue;
      }
      layer.indexes.resize(layer.n_kv_heads);
      for (uint32_t head = 0; head < layer.n_kv_heads; ++head) {
        layer.indexes[head] = mask_has(params.kv_head_mask, head) ? config : layer.indexes[head];
      }
    }
  }
  return Status::ok();
}

// Why a head of a layer can have no index, as the end of a sentence; empty where it can.
std::string why_not_indexed(const Space& space, const Layer& layer, const HeadConfig& config) {
  if (layer.pairs()) {
    return "its layer is one of a pair, whose pages have no rows that can be read one by one";
  }
  for (const CodecId id : {config.codec_k, config.codec_v}) {
    const codecs::Codec& codec = codecs::codec_of(id);
    if (!codec.rows_stand_alone()) {  // an index leads to single rows
      return std::string("codec ") + codec.name +
             ", which has no rows that can be read one by one; codecs with such rows are " +
             codecs_with_rows();
    }
  }
  if (std::max(layer.dim_k, layer.dim_v) > kMaxIndexedDim) {
    return "head dims " + text(layer.dim_k) + "/" + text(layer.dim_v) + "; an index takes up to " +
           text(kMaxIndexedDim);
  }
  if (space.v_in_k) {
    return "KVM_SPACE_V_IN_K; an index takes values that lie apart from the keys";
  }
  if (!space.alibi_slopes.empty()) {
    return "alibi_slopes; an index finds keys by what they are, not by where";
  }
  return {};
}

Status check_indexed(const HeadConfigs& configs, const Space& space) {
  uint32_t hashed_dim = 0;
  for (uint32_t i = 0; i < space.n_layers; ++i) {
    const Layer& layer = space.layers[i];
    for (uint32_t head = 0; head < layer.indexes.size(); ++head) {
      const uint32_t kind = layer.indexes[head].kind;
      if (kind == KVM_INDEX_NONE) {
        continue;
      }
      const std::string which =
          "kv head " + text(head) + " of layer " + text(i) + " has index " + text(kind) + " and ";
      const std::string why = why_not_indexed(space, layer, configs[i][head]);
      if (!why.empty()) {
        return Status(KVM_ERR_UNSUPPORTED, which + why);
      }
      hashed_dim = kind != KVM_INDEX_LSH ? hashed_dim : hashed_dim != 0 ? hashed_dim : layer.dim_k;
      if (kind == KVM_INDEX_LSH && layer.dim_k != hashed_dim) {
        return Status(KVM_ERR_UNSUPPORTED, which + "head_dim_k " + text(layer.dim_k) +
                                               ", and an earlier one has " + text(hashed_dim) +
                                               "; all LSH indexes of a space must agree");
      }
    }
  }
  return Status::ok();
}

// The most tokens that a query may see of a kv head, in a layer or in one that aliases it;
// UINT64_MAX: all.
uint64_t most_visible(const Space& space, uint32_t own, const Retention& retention) {
  uint64_t longest = 0;
  for (const Layer& layer : space.layers) {
    if (layer.storage_layer == own && layer.kind != KVM_LAYER_ABSENT) {
      longest = std::max(longest, layer.window == 0 ? UINT64_MAX : layer.window);
    }
  }
  if (retention.kind == KVM_RETAIN_FULL) {
    return longest;
  }
  return std::min(longest, retention.n_sinks + retention.n_recent);
}

// A head that shows no more tokens than are read without an index has none, nor one whose queries
// meet different keys at different positions, or whose tokens are not all those of the sequence.
void leave_out_indexes(const HeadConfigs& configs, Space* space) {
  for (uint32_t i = 0; i < space->n_layers; ++i) {
    Layer& layer = space->layers[i];
    for (uint32_t head = 0; head < layer.indexes.size(); ++head) {
      IndexConfig& config = layer.indexes[head];
      const Retention& retention = configs[i][head].retention;
      if (most_visible(*space, i, retention) < config.min_tokens ||
          retention.positions == KVM_POSITIONS_IN_CACHE || retention.is_per_head()) {
        config = {};
      }
    }
    const bool has_some =
        std::any_of(layer.indexes.begin(), layer.indexes.end(),
                    [](const IndexConfig& config) { return config.kind != KVM_INDEX_NONE; });
    if (!has_some) {
      layer.indexes.clear();
    }
    space->has_indexes |= has_some;
  }
}

uint64_t waste_bytes(const tiers::SlabClass& slab_class) {
  return tiers::kExtentBytes % slab_class.page_bytes();
}

// Into how many groups of nearly equal size the heads of a class are cut: the fewest with which a
// page fits an extent and little of the extent is left over; failing that, the least wasteful.
uint32_t choose_groups(tiers::SlabClass slab_class, uint32_t n_heads) {
  uint32_t best = n_heads;
  uint64_t best_waste = UINT64_MAX;
  for (uint32_t n_groups = 1; n_groups <= n_heads; ++n_groups) {
    slab_class.n_heads = static_cast<uint16_t>((n_heads + n_groups - 1) / n_groups);
    if (std::max(slab_class.page_bytes(), slab_class.tail().page_bytes()) > tiers::kExtentBytes) {
      continue;
    }
    const uint64_t waste = waste_bytes(slab_class);
    if (waste <= kMaxWasteBytes) {
      return n_groups;
    }
    if (waste < best_waste) {
      best = n_groups;
      best_waste = waste;
    }
  }
  return best;
}

void add_classes(const HeadConfig& config, const std::vector<uint16_t>& heads, const Space& space,
                 uint32_t index, Layer* layer) {
  tiers::SlabClass slab_class = {.codec_k = config.codec_k,
                                 .codec_v = config.codec_v,
                                 .dim_k = static_cast<uint16_t>(layer->dim_k),
                                 .dim_v = static_cast<uint16_t>(layer->dim_v),
                                 .v_in_k = space.v_in_k,
                                 // A policy reads what it gives up of such heads; a page of two
                                 // lists goes nowhere without both.
                                 .is_kept = config.retention.is_per_head() || layer->pairs()};
  codecs::PairSide side = codecs::PairSide::kNone;
  if (layer->pairs()) {
    side = layer->partner < index ? codecs::PairSide::kDeep : codecs::PairSide::kShallow;
    const auto pair_of = [&](CodecId rows) {
      return codecs::pair_codec(rows, codecs::PairSide::kShallow, layer->pair_kept);
    };
    slab_class.codec_k = pair_of(config.codec_k);
    slab_class.codec_v = pair_of(config.codec_v);
  }
  const uint32_t n_heads = static_cast<uint32_t>(heads.size());
  const uint32_t n_groups =
      config.retention.is_per_head() ? n_heads : choose_groups(slab_class, n_heads);
  for (uint32_t group = 0; group < n_groups; ++group) {
    const uint32_t begin = n_heads * group / n_groups;
    const uint32_t end = n_heads * (group + 1) / n_groups;
    HeadClass head_class;
    head_class.retention = config.retention;
    head_class.side = side;
    head_class.slab_class = slab_class;
    head_class.slab_class.n_heads = static_cast<uint16_t>(end - begin);
    if (config.demoted_k != CodecId::kNone) {
      head_class.demoted = head_class.slab_class;
      head_class.demoted.codec_k = config.demoted_k;
      head_class.demoted.codec_v = config.demoted_v;
    }
    for (uint32_t i = begin; i < end; ++i) {
      layer->heads[heads[i]] = {.class_index = static_cast<uint16_t>(layer->classes.size()),
                                .head = static_cast<uint16_t>(i - begin)};
      head_class.kv_heads.push_back(heads[i]);
    }
    layer->classes.push_back(std::move(head_class));
  }
}

// Groups the heads of each OWN layer that agree in everything, in the order of their first heads.
void make_classes(const HeadConfigs& configs, Space* space) {
  for (uint32_t i = 0; i < space->n_layers; ++i) {
    Layer& layer = space->layers[i];
    if (layer.kind != KVM_LAYER_OWN) {
      continue;
    }
    layer.first_list = space->n_lists;
    layer.heads.resize(layer.n_kv_heads);
    std::vector<bool> done(layer.n_kv_heads);
    for (uint32_t first = 0; first < layer.n_kv_heads; ++first) {
      if (done[first]) {
        continue;
      }
      std::vector<uint16_t> heads;
      for (uint32_t head = first; head < layer.n_kv_heads; ++head) {
        if (configs[i][head] == configs[i][first]) {
          heads.push_back(static_cast<uint16_t>(head));
          done[head] = true;
        }
      }
      add_classes(configs[i][first], heads, *space, i, &layer);
    }
    for (const HeadClass& head_class : layer.classes) {
      if (space->has_pairs) {
        space->list_sides.push_back(head_class.side);
      }
      // Pages of a pair count once.
      space->bytes_per_token +=
          head_class.side == codecs::PairSide::kShallow
              ? 0
              : head_class.slab_class.n_heads * head_class.slab_class.token_bytes();
      space->settles = space->settles || head_class.settles();
      space->shares_budgets =
          space->shares_budgets || head_class.retention.budgets != KVM_BUDGETS_EQUAL;
      space->awaits_prompt = space->awaits_prompt || space->shares_budgets ||
                             head_class.retention.kind == KVM_RETAIN_PROMPT;
    }
    space->n_lists += static_cast<uint32_t>(layer.classes.size());
  }
}

Status check_list_size(const char* field, size_t n) {
  return check_range(field, n, 0, kMaxOverrides);
}

Status exists(const Space& space, const std::string& difference) {
  return Status(KVM_ERR_EXISTS,
                "a space named \"" + space.name + "\" exists with other parameters: " + difference);
}

Status compare_field(const Space& space, const char* field, uint64_t there, uint64_t here) {
  if (there == here) {
    return Status::ok();
  }
  return exists(space,
                std::string(field) + " is " + text(there) + " there and " + text(here) + " here");
}

Status compare_field(const Space& space, const char* field, float there, float here) {
  if (there == here) {
    return Status::ok();
  }
  return exists(space,
                std::string(field) + " is " + text(there) + " there and " + text(here) + " here");
}

uint64_t code_of(CodecId codec, bool is_there) {
  return is_there ? static_cast<uint64_t>(codec) : 0;
}

Status compare_layer(const Space& space, uint32_t index, const Layer& there, const Layer& here) {
  const std::string where = "layers[" + text(index) + "].";
  const auto compare = [&](const std::string& field, uint64_t a, uint64_t b) {
    return compare_field(space, (where + field).c_str(), a, b);
  };
  KVM_TRY(compare("kind", there.kind, here.kind));
  KVM_TRY(compare("target", there.storage_layer, here.storage_layer));
  KVM_TRY(compare("n_q_heads", there.n_q_heads, here.n_q_heads));
  KVM_TRY(compare("n_kv_heads", there.n_kv_heads, here.n_kv_heads));
  KVM_TRY(compare("window", there.window, here.window));
  KVM_TRY(compare("partner", there.partner, here.partner));
  KVM_TRY(compare_field(space, (where + "pair_t").c_str(), there.pair_t, here.pair_t));
  KVM_TRY(compare("pair_gamma * 64", there.pair_kept, here.pair_kept));
  KVM_TRY(compare("head_dim_k", there.dim_k, here.dim_k));
  KVM_TRY(compare("head_dim_v", there.dim_v, here.dim_v));
  KVM_TRY(compare_field(space, "softmax_scale", there.softmax_scale, here.softmax_scale));
  for (uint32_t head = 0; head < there.heads.size(); ++head) {
    const HeadClass& a = there.classes[there.heads[head].class_index];
    const HeadClass& b = here.classes[here.heads[head].class_index];
    const std::string kv_head = "kv_heads[" + text(head) + "].";
    KVM_TRY(compare(kv_head + "retention", a.retention.kind, b.retention.kind));
    KVM_TRY(compare(kv_head + "n_sinks", a.retention.n_sinks, b.retention.n_sinks));
    KVM_TRY(compare(kv_head + "n_recent", a.retention.n_recent, b.retention.n_recent));
    KVM_TRY(compare(kv_head + "slack", a.retention.slack, b.retention.slack));
    KVM_TRY(compare(kv_head + "n_heavy", a.retention.n_heavy, b.retention.n_heavy));
    KVM_TRY(compare(kv_head + "merge", a.retention.merge, b.retention.merge));
    KVM_TRY(compare(kv_head + "demoted_k", code_of(a.demoted.codec_k, a.demotes()),
                    code_of(b.demoted.codec_k, b.demotes())));
    KVM_TRY(compare(kv_head + "demoted_v", code_of(a.demoted.codec_v, a.demotes()),
                    code_of(b.demoted.codec_v, b.demotes())));
    KVM_TRY(compare(kv_head + "budgets", a.retention.budgets, b.retention.budgets));
    KVM_TRY(compare(kv_head + "positions", a.retention.positions, b.retention.positions));
    KVM_TRY(compare(kv_head + "codec_k", static_cast<uint64_t>(a.slab_class.codec_k),
                    static_cast<uint64_t>(b.slab_class.codec_k)));
    KVM_TRY(compare(kv_head + "codec_v", static_cast<uint64_t>(a.slab_class.codec_v),
                    static_cast<uint64_t>(b.slab_class.codec_v)));
  }
  for (uint32_t head = 0; head < std::max(there.indexes.size(), here.indexes.size()); ++head) {
    const IndexConfig a = there.indexes.empty() ? IndexConfig{} : there.indexes[head];
    const IndexConfig b = here.indexes.empty() ? IndexConfig{} : here.indexes[head];
    const std::string of_index = "kv_heads[" + text(head) + "].index.";
    KVM_TRY(compare(of_index + "kind", a.kind, b.kind));
    KVM_TRY(compare(of_index + "n_sinks", a.n_sinks, b.n_sinks));
    KVM_TRY(compare(of_index + "n_recent", a.n_recent, b.n_recent));
    KVM_TRY(compare(of_index + "min_tokens", a.min_tokens, b.min_tokens));
    KVM_TRY(compare(of_index + "seed", a.seed, b.seed));
  }
  return Status::ok();
}

}  // namespace

HeadVisibility Space::visibility(uint32_t layer, uint32_t class_index,
                                 uint64_t query_position) const {
  const uint64_t window = layers[layer].window;
  const Retention& retention = head_class(layer, class_index).retention;
  if (retention.shows_all()) {
    return {.window = window};
  }
  if (window != 0 && window <= retention.n_recent) {
    return {.window = window};  // the layer hides the sinks as soon as the head would need them
  }
  HeadVisibility seen = {.window = retention.n_recent, .n_sinks = retention.n_sinks};
  if (window == 0 || seen.n_sinks == 0) {
    return seen;
  }
  // The layer's window is longer than the head's: sinks go out of sight one by one.
  const uint64_t first_visible = query_position < window ? 0 : query_position - window + 1;
  if (first_visible == 0) {
    seen.end = window;
  } else if (first_visible < seen.n_sinks) {
    seen.first_sink = first_visible;
    seen.end = query_position + 1;
  } else {
    seen.n_sinks = 0;
  }
  return seen;
}

Result<std::shared_ptr<const Space>> resolve_space(const SpaceSpec& spec) {
  auto space = std::make_shared<Space>();
  KVM_TRY(check_list_size("n_layer_params", spec.layers.size()));
  KVM_TRY(check_list_size("n_policies", spec.policies.size()));
  KVM_TRY(check_list_size("n_codecs", spec.codecs.size()));
  KVM_TRY(check_list_size("n_indexes", spec.indexes.size()));
  KVM_TRY(resolve_scalars(spec, space.get()));
  KVM_TRY(resolve_default_choice(spec, space.get()));
  KVM_TRY(resolve_rope(spec, space.get()));
  KVM_TRY(resolve_layer_map(spec, space.get()));
  KVM_TRY(resolve_sink_logits(spec, space.get()));
  KVM_TRY(resolve_alibi_slopes(spec, space.get()));
  HeadConfigs configs(space->n_layers);
  for (uint32_t i = 0; i < space->n_layers; ++i) {
    configs[i].assign(space->layers[i].n_kv_heads,
                      {.retention = {}, .codec_k = space->codec, .codec_v = space->codec});
  }
  KVM_TRY(apply_policies(spec, *space, &configs));
  KVM_TRY(check_seen(*space, configs));
  KVM_TRY(check_prompt_layers(*space, configs));
  KVM_TRY(apply_codecs(spec, *space, &configs));
  KVM_TRY(check_demoted(*space, configs));
  KVM_TRY(check_pairs(*space, configs));
  KVM_TRY(apply_indexes(spec, space.get()));
  KVM_TRY(check_indexed(configs, *space));
  leave_out_indexes(configs, space.get());
  make_classes(configs, space.get());
  space->geometry_digest = digest_of(geometry_text(*space));
  space->layout_digest = digest_of(layout_text(*space));
  space->policy_digest = digest_of(policy_text(*space));
  space->index_digest = digest_of(index_text(*space));
  return std::shared_ptr<const Space>(std::move(space));
}

Status compare_spaces(const Space& registered, const Space& offered) {
  const Space& a = registered;
  const Space& b = offered;
  const auto compare = [&](const char* field, auto there, auto here) {
    return compare_field(a, field, there, here);
  };
  if (a.fingerprint != b.fingerprint) {
    return exists(a, "fingerprint differs");
  }
  KVM_TRY(compare("n_layers", uint64_t{a.n_layers}, uint64_t{b.n_layers}));
  KVM_TRY(compare("n_q_heads", uint64_t{a.n_q_heads}, uint64_t{b.n_q_heads}));
  KVM_TRY(compare("n_kv_heads", uint64_t{a.n_kv_heads}, uint64_t{b.n_kv_heads}));
  KVM_TRY(compare("head_dim_k", uint64_t{a.head_dim_k}, uint64_t{b.head_dim_k}));
  KVM_TRY(compare("head_dim_v", uint64_t{a.head_dim_v}, uint64_t{b.head_dim_v}));
  KVM_TRY(compare("flags", uint64_t{a.flags()}, uint64_t{b.flags()}));
  KVM_TRY(compare("codec", static_cast<uint64_t>(a.codec), static_cast<uint64_t>(b.codec)));
  KVM_TRY(compare("logit_softcap", a.logit_softcap, b.logit_softcap));
  KVM_TRY(compare("rope_layout", uint64_t{a.rope_layout}, uint64_t{b.rope_layout}));
  KVM_TRY(
      compare("n_rope_pairs", uint64_t{a.rope_inv_freq.size()}, uint64_t{b.rope_inv_freq.size()}));
  if (a.rope_inv_freq != b.rope_inv_freq) {
    return exists(a, "rope_inv_freq differs");
  }
  if (a.sink_logits != b.sink_logits) {
    return exists(a, "sink_logits differs");
  }
  if (a.alibi_slopes != b.alibi_slopes) {
    return exists(a, "alibi_slopes differs");
  }
  KVM_TRY(compare("shard_index", uint64_t{a.shard_index}, uint64_t{b.shard_index}));
  KVM_TRY(compare("n_shards", uint64_t{a.n_shards}, uint64_t{b.n_shards}));
  const ModeChoice& x = a.default_choice;
  const ModeChoice& y = b.default_choice;
  KVM_TRY(compare("default_mode", uint64_t{x.mode}, uint64_t{y.mode}));
  KVM_TRY(compare("default_proposal", uint64_t{x.proposal}, uint64_t{y.proposal}));
  KVM_TRY(compare("default_eps", x.eps, y.eps));
  KVM_TRY(compare("default_delta", x.delta, y.delta));
  KVM_TRY(compare("default_budget", x.budget, y.budget));
  KVM_TRY(compare("lsh_bits", uint64_t{a.lsh.n_bits}, uint64_t{b.lsh.n_bits}));
  KVM_TRY(compare("lsh_tables", uint64_t{a.lsh.n_tables}, uint64_t{b.lsh.n_tables}));
  for (uint32_t i = 0; i < a.n_layers; ++i) {
    KVM_TRY(compare_layer(a, i, a.layers[i], b.layers[i]));
  }
  return Status::ok();
}

}  // namespace kvm::engine
