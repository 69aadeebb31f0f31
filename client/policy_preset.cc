// SPDX-License-Identifier: Apache-2.0
#include "client/policy_preset.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <iterator>

#include "base/limits.h"
#include "base/nearest_name.h"
#include "client/checks.h"
#include "codecs/codec.h"
#include "ipc/struct_size.h"

namespace kvm::client {
namespace {

constexpr uint64_t kDefaultTokens = 4096;
// Bounds of kvm_index_params.
constexpr uint64_t kMaxIndexRecent = 65536;
constexpr uint64_t kLeastIndexTokens = 256;
constexpr uint64_t kMostIndexTokens = 8192;

Status invalid(const std::string& sentence) { return Status(KVM_ERR_INVALID, sentence); }

std::string said(uint64_t number) { return std::to_string(number); }

std::string said(double number) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", number);
  return text;
}

// What a preset looks at, besides its name, n_layers and n_tokens.
enum Takes : uint32_t {
  kShare = 1,
  kSpeedUp = 2,
  kWindow = 4,
  kSlack = 8,
  kMasks = 16,
  kPairs = 32,
};

struct System;
using Resolve = Status (*)(const System& system, const kvm_preset_params& params, Preset* out);

struct System {
  const char* name;
  uint32_t takes;
  Resolve resolve;
  // Of those that say how rows are stored.
  uint32_t codec_k = 0;
  uint32_t codec_v = 0;
};

uint64_t tokens_of(const kvm_preset_params& params) {
  return params.n_tokens == 0 ? kDefaultTokens : params.n_tokens;
}

std::string said_tokens(const kvm_preset_params& params) {
  return said(tokens_of(params)) + " tokens" +
         (params.n_tokens == 0 ? " (n_tokens is 0, and was taken to be that)" : "");
}

uint64_t part_of(const kvm_preset_params& params, double share) {
  return static_cast<uint64_t>(std::llround(share * static_cast<double>(tokens_of(params))));
}

// An entry for all heads of all layers.
kvm_policy_params policy_of(uint32_t retention, uint64_t n_sinks, uint64_t n_recent,
                            uint64_t slack) {
  kvm_policy_params policy{};
  policy.retention = retention;
  policy.n_sinks = n_sinks;
  policy.n_recent = n_recent;
  policy.slack = slack;
  return policy;
}

// The same entry for the layers that `has` is true of, which are consecutive where they can be.
template <typename Entry, typename Has>
void add_for_layers(Entry entry, uint32_t n_layers, Has has, std::vector<Entry>* entries) {
  for (uint32_t layer = 0; layer < n_layers; ++layer) {
    if (!has(layer)) {
      continue;
    }
    if (layer != 0 && has(layer - 1)) {
      ++entries->back().n_layers;
      continue;
    }
    entry.layer_begin = layer;
    entry.n_layers = 1;
    entries->push_back(entry);
  }
}

// "0, 6, 12" of the layers that `has` is true of; longer runs as "4-7".
template <typename Has>
std::string said_layers(uint32_t n_layers, Has has) {
  std::string text;
  for (uint32_t layer = 0; layer < n_layers; ++layer) {
    if (!has(layer)) {
      continue;
    }
    uint32_t last = layer;
    while (last + 1 < n_layers && has(last + 1)) {
      ++last;
    }
    text += text.empty() ? "" : ", ";
    text += said(uint64_t{layer});
    if (last != layer) {
      text += '-';
      text += said(uint64_t{last});
    }
    layer = last;
  }
  return text;
}

Status keep_all(const System&, const kvm_preset_params&, Preset* out) {
  out->text = "Every token stays.\n";
  return Status::ok();
}

Status streaming_llm(const System&, const kvm_preset_params& params, Preset* out) {
  constexpr uint64_t kSinks = 4;
  uint64_t n_recent = 1020;
  if (params.share != 0) {
    const uint64_t n_kept = part_of(params, double{params.share});
    if (n_kept <= kSinks) {
      return invalid("share " + said(double{params.share}) + " of " + said_tokens(params) +
                     " keeps " + said(n_kept) + "; streaming_llm keeps at least 5");
    }
    n_recent = n_kept - kSinks;
  }
  kvm_policy_params policy = policy_of(KVM_RETAIN_SINKS_RECENT, kSinks, n_recent, params.slack);
  policy.positions = KVM_POSITIONS_IN_CACHE;
  out->policies.push_back(policy);
  out->text = "All heads keep 4 sinks and the last " + said(n_recent) +
              " tokens; positions count inside the cache.\n"
              "The space must say how the model rotates: rope_layout, n_rope_pairs, "
              "rope_inv_freq.\n";
  return Status::ok();
}

// The same for the heads of the table, in the layers that have any: a mask of zero would mean all.
void add_masked(kvm_policy_params policy, const kvm_preset_params& params, Preset* out) {
  const auto mask = [&](uint32_t layer) { return params.kv_head_masks + size_t{layer} * 2; };
  for (uint32_t layer = 0; layer < params.n_layers; ++layer) {
    if ((mask(layer)[0] | mask(layer)[1]) == 0) {
      continue;
    }
    if (!out->policies.empty()) {
      kvm_policy_params& last = out->policies.back();
      if (last.layer_begin + last.n_layers == layer &&
          std::equal(mask(layer), mask(layer) + 2, last.kv_head_mask)) {
        ++last.n_layers;
        continue;
      }
    }
    policy.layer_begin = layer;
    policy.n_layers = 1;
    std::copy_n(mask(layer), 2, policy.kv_head_mask);
    out->policies.push_back(policy);
  }
}

std::string said_heads(const kvm_preset_params& params) {
  uint64_t n_heads = 0;
  for (size_t i = 0; i < size_t{params.n_layers} * 2; ++i) {
    n_heads += static_cast<uint64_t>(__builtin_popcountll(params.kv_head_masks[i]));
  }
  return said(n_heads) + " kv heads of the table keep ";
}

Status duo_attention(const System&, const kvm_preset_params& params, Preset* out) {
  add_masked(policy_of(KVM_RETAIN_SINKS_RECENT, 64, 256, params.slack), params, out);
  out->text = said_heads(params) + "64 sinks and the last 256 tokens; all others keep all.\n";
  return Status::ok();
}

Status razor_attention(const System&, const kvm_preset_params& params, Preset* out) {
  const double share = params.share == 0 ? 0.2 : double{params.share};
  const uint64_t n_part = part_of(params, share);
  const uint64_t n_recent =
      params.share == 0 ? std::max<uint64_t>(4000, n_part) : std::max<uint64_t>(1, n_part);
  add_masked(policy_of(KVM_RETAIN_SINKS_RECENT_FOLD, 4, n_recent, params.slack), params, out);
  out->text = said_heads(params) + "4 sinks, the last " + said(n_recent) + " of " +
              said_tokens(params) + ", and the mean of the rest; all others keep all.\n";
  return Status::ok();
}

// Half of what is kept is heavy, half recent.
Result<kvm_policy_params> heavy_of(const kvm_preset_params& params, uint64_t n_sinks) {
  const double share = params.share == 0 ? 0.2 : double{params.share};
  const uint64_t half = part_of(params, share / 2);
  if (half == 0 || half > kMaxHeavy) {
    return invalid("share " + said(share) + " of " + said_tokens(params) + " keeps " + said(half) +
                   " heavy tokens; a head may keep 1 to " + said(kMaxHeavy));
  }
  kvm_policy_params policy = policy_of(KVM_RETAIN_HEAVY, n_sinks, half, params.slack);
  policy.n_heavy = half;
  return policy;
}

const char* name_of(uint32_t codec) { return codecs::codec_of(static_cast<CodecId>(codec)).name; }

std::string said_halves(const kvm_policy_params& policy, const kvm_preset_params& params) {
  return "the last " + said(policy.n_recent) + " tokens and the " + said(policy.n_heavy) +
         " with most attention, of " + said_tokens(params);
}

Status h2o(const System&, const kvm_preset_params& params, Preset* out) {
  KVM_TRY_ASSIGN(const kvm_policy_params policy, heavy_of(params, 0));
  out->policies.push_back(policy);
  out->text = "Each head keeps " + said_halves(policy, params) + ".\n";
  return Status::ok();
}

Status mikv(const System& system, const kvm_preset_params& params, Preset* out) {
  KVM_TRY_ASSIGN(kvm_policy_params policy, heavy_of(params, 0));
  policy.merge = KVM_MERGE_DEMOTED;
  out->policies.push_back(policy);
  kvm_codec_params codec{};
  codec.demoted_k = system.codec_k;
  codec.demoted_v = system.codec_v;
  out->codecs.push_back(codec);
  out->text = "Each head keeps " + said_halves(policy, params) +
              ", in the space's codec; its other keys stay as " + name_of(codec.demoted_k) +
              ", its other values as " + name_of(codec.demoted_v) +
              ".\nLet kvm_observe see the last queries of the prompt: keys are balanced by them.\n";
  return Status::ok();
}

// Of what lies before the window, ALISA takes the tokens with the most attention from the last
// queries; an index draws those that the query itself asks for, on a disk as well.
Status alisa(const System& system, const kvm_preset_params& params, Preset* out) {
  const double share = params.share == 0 ? 0.2 : double{params.share};
  const uint64_t half = part_of(params, share / 2);
  if (half == 0 || half > kMaxIndexRecent) {
    return invalid("share " + said(share) + " of " + said_tokens(params) + " is " + said(half) +
                   " recent tokens; there may be 1 to " + said(kMaxIndexRecent));
  }
  kvm_codec_params codec{};
  codec.codec_k = system.codec_k;
  codec.codec_v = system.codec_v;
  out->codecs.push_back(codec);
  kvm_index_params index{};
  index.kind = KVM_INDEX_SKETCH;
  index.n_recent = static_cast<uint32_t>(half);
  index.min_tokens =
      static_cast<uint32_t>(std::clamp<uint64_t>(2 * half, kLeastIndexTokens, kMostIndexTokens));
  out->indexes.push_back(index);
  out->default_mode = KVM_MODE_SAMPLED;
  out->default_budget = half;
  out->text =
      "Nothing is dropped. Attends read the last " + said(half) + " tokens and about " +
      said(half) + " before them, drawn by their weight, of " + said_tokens(params) +
      "; rows are stored as " + name_of(codec.codec_k) +
      ".\nWhere room ends, and what has left for the disk is too much: kvm_seq_drop the "
      "oldest tokens, leave them out with KVM_ITEM_EXCLUDE_RANGES, and bring them back with "
      "KVM_ITEM_RESTORE.\n";
  return Status::ok();
}

// The authors leave the first two layers and the last one whole.
Status d2o(const System&, const kvm_preset_params& params, Preset* out) {
  if (params.n_layers < 4) {
    return invalid("n_layers is " + said(uint64_t{params.n_layers}) +
                   "; d2o keeps layers 0, 1 and the last whole: there must be at least 4");
  }
  KVM_TRY_ASSIGN(kvm_policy_params policy, heavy_of(params, 4));
  policy.layer_begin = 2;
  policy.n_layers = params.n_layers - 3;
  policy.merge = KVM_MERGE_WEIGHTED;
  policy.budgets = KVM_BUDGETS_BY_DENSITY;
  out->policies.push_back(policy);
  out->text = "Heads of layers 2-" + said(uint64_t{params.n_layers} - 2) +
              " keep 4 sinks, and on average " + said_halves(policy, params) +
              ", shared out by density; tokens that go join their like. Other layers keep all.\n"
              "Say KVM_ITEM_PROMPT_END with the prompt's last tokens.\n";
  return Status::ok();
}

Status store_rows(const System& system, const kvm_preset_params&, Preset* out) {
  kvm_codec_params codec{};
  codec.codec_k = system.codec_k;
  codec.codec_v = system.codec_v;
  out->codecs.push_back(codec);
  out->text = std::string("Keys are stored as ") + name_of(codec.codec_k) + ", values as " +
              name_of(codec.codec_v) + "; of a page's 64 tokens until it is full, as bf16.\n";
  return Status::ok();
}

// Windows go by policy, which frees what kvm_layer_params.window only hides; they have no sinks.
Status yi_lightning(const System&, const kvm_preset_params& params, Preset* out) {
  if (params.n_layers < 4) {
    return invalid("n_layers is " + said(uint64_t{params.n_layers}) +
                   "; of 4 layers of yi_lightning one is full: there must be at least 4");
  }
  const uint64_t window = params.window == 0 ? 4096 : params.window;
  const auto is_full = [](uint32_t layer) { return layer % 4 == 3; };
  add_for_layers(
      policy_of(KVM_RETAIN_SINKS_RECENT, 0, window, params.slack), params.n_layers,
      [&](uint32_t layer) { return !is_full(layer); }, &out->policies);
  for (uint32_t layer = 7; layer < params.n_layers; layer += 8) {
    kvm_layer_params follower{};
    follower.layer_begin = layer;
    follower.n_layers = 1;
    follower.kind = KVM_LAYER_ALIAS;
    follower.target = layer - 4;
    out->layers.push_back(follower);
  }
  const auto follows = [](uint32_t layer) { return layer % 8 == 7; };
  const std::string followers = said_layers(params.n_layers, follows);
  out->text =
      "Layers " + said_layers(params.n_layers, is_full) + " keep all" +
      (followers.empty() ? ""
                         : "; of these, " + followers + " by what the layer four before stores") +
      "; the others keep the last " + said(window) +
      " tokens.\nThe layout is inferred from the published savings: where a model says "
      "which of its layers have windows, go by that.\n";
  return Status::ok();
}

// Version 2: of each block the long-term memory is a layer, and the short-term one the next, whose
// query sees h - 1 pairs (docs/policies/memory_mosaics.md).
Status memory_mosaics(const System&, const kvm_preset_params& params, Preset* out) {
  if (params.n_layers % 2 != 0) {
    return invalid("n_layers is " + said(uint64_t{params.n_layers}) +
                   "; of two layers of memory_mosaics one is the short-term memory: there must be "
                   "an even number");
  }
  const uint64_t h = params.window == 0 ? 256 : params.window;
  if (h < 2) {
    return invalid("window is " + said(h) +
                   "; a short-term memory of memory_mosaics keeps one "
                   "pair less: it must be at least 2");
  }
  const auto is_short = [](uint32_t layer) { return layer % 2 == 1; };
  add_for_layers(policy_of(KVM_RETAIN_SINKS_RECENT, 0, h - 1, params.slack), params.n_layers,
                 is_short, &out->policies);
  out->text = "Layers " + said_layers(params.n_layers, is_short) +
              " are short-term memories and keep the last " + said(h - 1) +
              " pairs; the others are long-term memories and keep all.\nAppend a pair one token "
              "late, and attend with token t's row at t - 1, or in long-term memories at t - 64; "
              "softmax_scale is 1.\n";
  return Status::ok();
}

// The authors pair layers from the middle of the model on.
Status minicache(const System&, const kvm_preset_params& params, Preset* out) {
  const uint32_t n_layers = params.n_layers;
  if (n_layers < 2) {
    return invalid("n_layers is " + said(uint64_t{n_layers}) +
                   "; a pair of minicache is of two: there must be at least 2");
  }
  const uint32_t n_pairs = params.n_pairs == 0 ? std::max(1u, n_layers / 4) : params.n_pairs;
  if (n_pairs > n_layers / 2) {
    return invalid("n_pairs is " + said(uint64_t{n_pairs}) + " of " + said(uint64_t{n_layers}) +
                   " layers; it must be at most " + said(uint64_t{n_layers} / 2));
  }
  const uint32_t first = n_layers - 2 * n_pairs;
  for (uint32_t deep = first + 1; deep < n_layers; deep += 2) {
    kvm_layer_params pair{};
    pair.layer_begin = deep;
    pair.n_layers = 1;
    pair.kind = KVM_LAYER_PAIR;
    pair.pair_t = 0.6f;
    pair.pair_gamma = 0.05f;
    out->layers.push_back(pair);
  }
  out->text = "Layers " + said(uint64_t{first}) + "-" + said(uint64_t{n_layers} - 1) +
              " share directions two by two, and keep their lengths; of each 64 tokens the 4 that "
              "differ most stay as they are.\n";
  return Status::ok();
}

Status skip_decode(const System&, const kvm_preset_params&, Preset* out) {
  out->text =
      "Nothing is set: the engine appends token t to its n(t) layers alone, the first w and the "
      "last n(t) - w of them, and says KVM_ITEM_LAST_LAYER with the last.\n"
      "n(t) falls from n_max to n_min: round(n_max - (n_max - n_min) t / (T - 1)); the prompt "
      "takes "
      "n_max. A token that goes where the one before it was not is refused (HOLE).\n";
  return Status::ok();
}

// R = L / s layers decode: the first, the last, and between them those at multiples of
// L / (R - 1), until there are so many.
Status unified_layer_skipping(const System&, const kvm_preset_params& params, Preset* out) {
  const uint32_t n_layers = params.n_layers;
  const uint32_t speed_up = params.speed_up == 0 ? 2 : params.speed_up;
  const uint32_t n_kept = n_layers / speed_up;
  if (n_kept < 2) {
    return invalid(
        "speed_up is " + said(uint64_t{speed_up}) + " of " + said(uint64_t{n_layers}) +
        " layers; at least the first and the last must decode: speed_up may be at most " +
        said(uint64_t{n_layers} / 2));
  }
  std::vector<bool> decodes(n_layers);
  decodes[0] = true;
  decodes[n_layers - 1] = true;
  const uint32_t interval = n_layers / (n_kept - 1);
  uint32_t n = 2;
  for (uint32_t layer = interval; n < n_kept && layer + 1 < n_layers; layer += interval, ++n) {
    decodes[layer] = true;
  }
  add_for_layers(
      policy_of(KVM_RETAIN_PROMPT, 0, 0, 0), n_layers,
      [&](uint32_t layer) { return !decodes[layer]; }, &out->policies);
  out->text = said(uint64_t{n}) + " of " + said(uint64_t{n_layers}) + " layers decode: " +
              said_layers(n_layers, [&](uint32_t layer) { return bool{decodes[layer]}; }) +
              ".\nThe prompt runs through all; say KVM_ITEM_PROMPT_END with its last tokens, and "
              "KVM_ITEM_LAST_LAYER with each token's append to the last layer.\n";
  return Status::ok();
}

constexpr System kSystems[] = {
    {"full", 0, keep_all},
    {"streaming_llm", kShare | kSlack, streaming_llm},
    {"duo_attention", kSlack | kMasks, duo_attention},
    {"razor_attention", kShare | kSlack | kMasks, razor_attention},
    {"h2o", kShare | kSlack, h2o},
    {"mikv", kShare | kSlack, mikv, KVM_CODEC_I2_BALANCED, KVM_CODEC_I2},
    {"mikv3", kShare | kSlack, mikv, KVM_CODEC_I3_BALANCED, KVM_CODEC_I3},
    {"mikv4", kShare | kSlack, mikv, KVM_CODEC_I4_BALANCED, KVM_CODEC_I4},
    {"alisa", kShare, alisa, KVM_CODEC_I8, KVM_CODEC_I8},
    {"d2o", kShare | kSlack, d2o},
    {"kivi", 0, store_rows, KVM_CODEC_I2_CHANNEL, KVM_CODEC_I2},
    {"kivi3", 0, store_rows, KVM_CODEC_I3_CHANNEL, KVM_CODEC_I3},
    {"kivi4", 0, store_rows, KVM_CODEC_I4_CHANNEL, KVM_CODEC_I4},
    {"gear4", 0, store_rows, KVM_CODEC_GEAR4_CHANNEL, KVM_CODEC_GEAR4},
    {"gear3", 0, store_rows, KVM_CODEC_GEAR3_CHANNEL, KVM_CODEC_GEAR3},
    {"gear2", 0, store_rows, KVM_CODEC_GEAR2_CHANNEL, KVM_CODEC_GEAR2},
    {"yi_lightning", kWindow | kSlack, yi_lightning},
    {"minicache", kPairs, minicache},
    {"memory_mosaics", kWindow | kSlack, memory_mosaics},
    {"skip_decode", 0, skip_decode},
    {"unified_layer_skipping", kSpeedUp, unified_layer_skipping},
};

// Published, and known not to be there.
struct Missing {
  const char* name;
  const char* what;
};

constexpr Missing kMissing[] = {
    {"snapkv", "a choice by the last queries of a prompt alone; h2o chooses by all of them"},
};

Status unknown(const std::string& name) {
  for (const Missing& missing : kMissing) {
    if (name == missing.name) {
      return Status(KVM_ERR_UNSUPPORTED,
                    "preset " + name + " is not there yet: it wants " + missing.what);
    }
  }
  std::string all;
  std::vector<std::string> names;
  for (const System& system : kSystems) {
    names.emplace_back(system.name);
    all += (all.empty() ? "" : ", ") + names.back();
  }
  const std::string nearest = nearest_name(name, names);
  return Status(KVM_ERR_NOT_FOUND, "no preset is called \"" + name + "\"" +
                                       (nearest.empty() ? "" : "; the nearest is " + nearest) +
                                       "; there are " + all);
}

Status refuse(const System& system, const char* field, const std::string& value) {
  return invalid(std::string(field) + " is " + value + "; preset " + system.name +
                 " has no use for it");
}

Status check_numbers(const System& system, const kvm_preset_params& params) {
  if (params.n_layers == 0 || params.n_layers > kMaxLayers) {
    return invalid("n_layers is " + said(uint64_t{params.n_layers}) + "; it must be 1 to " +
                   said(uint64_t{kMaxLayers}));
  }
  if (params.n_tokens > kMaxTokens) {
    return invalid("n_tokens is " + said(params.n_tokens) + "; it must be at most " +
                   said(kMaxTokens));
  }
  if (!(params.share >= 0 && params.share <= 1)) {
    return invalid("share is " + said(double{params.share}) + "; it must be 0 to 1");
  }
  if (params.share != 0 && (system.takes & kShare) == 0) {
    return refuse(system, "share", said(double{params.share}));
  }
  if (params.speed_up != 0 && (system.takes & kSpeedUp) == 0) {
    return refuse(system, "speed_up", said(uint64_t{params.speed_up}));
  }
  if (params.n_pairs != 0 && (system.takes & kPairs) == 0) {
    return refuse(system, "n_pairs", said(uint64_t{params.n_pairs}));
  }
  if (params.window != 0 && (system.takes & kWindow) == 0) {
    return refuse(system, "window", said(params.window));
  }
  if (params.slack != 0 && (system.takes & kSlack) == 0) {
    return refuse(system, "slack", said(params.slack));
  }
  const bool takes_masks = (system.takes & kMasks) != 0;
  if (params.kv_head_masks != nullptr && !takes_masks) {
    return refuse(system, "kv_head_masks", "not NULL");
  }
  if (params.kv_head_masks == nullptr && takes_masks) {
    return invalid(std::string("kv_head_masks is NULL; preset ") + system.name +
                   " needs to know which heads of the model do not retrieve: published tables, or "
                   "kvm_probe_heads");
  }
  return Status::ok();
}

template <typename Entry>
Status check_room(const char* field, const std::vector<Entry>& entries, const Entry* array,
                  uint32_t room) {
  if (entries.size() > room) {
    return Status(KVM_ERR_LIMIT, std::string("kvm_preset.") + field + " has room for " +
                                     said(uint64_t{room}) + "; the preset has " +
                                     said(uint64_t{entries.size()}) +
                                     "; room for n_layers entries in each of layers, policies, "
                                     "codecs and indexes is always enough");
  }
  if (!entries.empty() && array == nullptr) {
    return invalid(std::string("kvm_preset.") + field + " is NULL, with room for " +
                   said(uint64_t{room}));
  }
  return Status::ok();
}

}  // namespace

Result<Preset> resolve_preset(const kvm_preset_params& params) {
  KVM_TRY(check_flags(params.flags, 0, "kvm_preset_params"));
  KVM_TRY(check_reserved(params.reserved, std::size(params.reserved), "kvm_preset_params"));
  if (params.name == nullptr) {
    return invalid("kvm_preset_params.name is NULL");
  }
  // LIMIT: what a sentence shows of a name that nobody knows.
  const std::string name(params.name, ::strnlen(params.name, 64));
  for (const System& system : kSystems) {
    if (name == system.name) {
      KVM_TRY(check_numbers(system, params));
      Preset preset;
      KVM_TRY(system.resolve(system, params, &preset));
      return preset;
    }
  }
  return unknown(name);
}

Status write_preset(const Preset& preset, kvm_preset* out) {
  KVM_TRY(ipc::check_output(out, "kvm_preset"));
  if (out->struct_size < offsetof(kvm_preset, text)) {
    return invalid("kvm_preset.struct_size is " + said(uint64_t{out->struct_size}) +
                   "; set it to sizeof, here " + said(uint64_t{sizeof(kvm_preset)}));
  }
  kvm_preset full{};
  std::memcpy(&full, out, std::min<size_t>(out->struct_size, sizeof(full)));
  if (!preset.indexes.empty() && out->struct_size < sizeof(full)) {
    return Status(KVM_ERR_UNSUPPORTED, "the preset has an index, which a kvm_preset of " +
                                           said(uint64_t{out->struct_size}) +
                                           " bytes has no place for; here it has " +
                                           said(uint64_t{sizeof(full)}));
  }
  KVM_TRY(check_room("layers", preset.layers, full.layers, full.n_layer_params));
  KVM_TRY(check_room("policies", preset.policies, full.policies, full.n_policies));
  KVM_TRY(check_room("codecs", preset.codecs, full.codecs, full.n_codecs));
  KVM_TRY(check_room("indexes", preset.indexes, full.indexes, full.n_indexes));
  std::copy(preset.layers.begin(), preset.layers.end(), full.layers);
  std::copy(preset.policies.begin(), preset.policies.end(), full.policies);
  std::copy(preset.codecs.begin(), preset.codecs.end(), full.codecs);
  full.n_layer_params = static_cast<uint32_t>(preset.layers.size());
  full.n_policies = static_cast<uint32_t>(preset.policies.size());
  full.n_codecs = static_cast<uint32_t>(preset.codecs.size());
  std::copy(preset.indexes.begin(), preset.indexes.end(), full.indexes);
  full.n_indexes = static_cast<uint32_t>(preset.indexes.size());
  full.default_mode = preset.default_mode;
  full.default_budget = preset.default_budget;
  std::memset(full.text, 0, sizeof(full.text));
  std::memcpy(full.text, preset.text.data(), std::min(preset.text.size(), sizeof(full.text) - 1));
  ipc::write_struct(out, out->struct_size, full);
  return Status::ok();
}

const char* preset_name(uint32_t index) {
  return index < std::size(kSystems) ? kSystems[index].name : nullptr;
}

}  // namespace kvm::client
