// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/composition_rig.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>

#include "tests/common/items.h"

namespace kvm::testing {
namespace {

constexpr uint32_t kDim = 64;  // what shares a scale of 4 and 2 bits
constexpr uint32_t kQHeads = 2;
constexpr uint64_t kSlack = 48;
constexpr uint64_t kRows = 2800;  // of the text, and of what is drafted behind it
constexpr uint64_t kDraftRow = kRows - 8;
constexpr uint32_t kDraft = 4;
constexpr uint64_t kWindowOfLayers = 100;
constexpr float kSlopes[kQHeads] = {0.01f, -0.002f};
constexpr float kTurn = 0.01f;  // angle a position of channels 0 and 1, for positions in the cache

kvm_policy_params make_policy(uint32_t retention, uint64_t n_sinks, uint64_t n_recent,
                              uint64_t n_heavy = 0) {
  kvm_policy_params params{};
  params.retention = retention;
  params.n_sinks = n_sinks;
  params.n_recent = n_recent;
  params.slack = n_recent == 0 ? 0 : kSlack;
  params.n_heavy = n_heavy;
  return params;
}

struct Text {
  std::array<std::vector<float>, kPairLayers> k, v;
  std::vector<float> q;
};

// Keys and queries with logits of deviation 2, values around 1.
const Text& text() {
  static const Text once = [] {
    std::mt19937 random(21);
    Text made;
    for (uint32_t layer = 0; layer < kPairLayers; ++layer) {
      made.k[layer] = random_floats(&random, kRows * kDim);
      made.v[layer] = random_floats(&random, kRows * kDim);
      for (float& x : made.v[layer]) {
        x = 1 + x / 2;
      }
    }
    made.q = random_floats(&random, kRows * kQHeads * kDim);
    for (float& x : made.q) {
      x *= 2;
    }
    return made;
  }();
  return once;
}

// What a query meets: a token, or what several have become.
struct Entry {
  const float* k;
  const float* v;
  double log_weight = 0;  // natural logarithm
  bool is_sink = false;
  uint64_t position = 0;
};

bool is_seen(const kvm_policy_params& policy, uint64_t at, uint64_t query) {
  return policy.retention != KVM_RETAIN_SINKS_RECENT || at < policy.n_sinks ||
         at + policy.n_recent > query;
}

// Of one q head over entries: o [kDim], and the lse as the result.
double attend_naively(const std::vector<Entry>& entries, const float* q, const float* q_of_sinks,
                      double slope, uint64_t query, std::vector<double>* o) {
  std::vector<double> logits;
  double largest = -std::numeric_limits<double>::infinity();
  for (const Entry& entry : entries) {
    const float* const row = entry.is_sink ? q_of_sinks : q;
    double dot = 0;
    for (uint32_t i = 0; i < kDim; ++i) {
      dot += static_cast<double>(row[i]) * static_cast<double>(entry.k[i]);
    }
    logits.push_back(dot / std::sqrt(static_cast<double>(kDim)) + entry.log_weight -
                     slope * static_cast<double>(query - entry.position));
    largest = std::max(largest, logits.back());
  }
  o->assign(kDim, 0);
  double sum = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    const double weight = std::exp(logits[i] - largest);
    sum += weight;
    for (uint32_t d = 0; d < kDim; ++d) {
      (*o)[d] += weight * static_cast<double>(entries[i].v[d]);
    }
  }
  for (double& x : *o) {
    x /= sum;
  }
  return largest + std::log(sum);
}

// A mean of rows, as one.
std::vector<float> mean_of(const std::vector<float>& rows, const std::vector<bool>& is_left_out,
                           uint64_t length) {
  std::vector<double> sum(kDim);
  uint64_t n = 0;
  for (uint64_t t = 0; t < length; ++t) {
    if (!is_left_out[t]) {
      ++n;
      for (uint32_t i = 0; i < kDim; ++i) {
        sum[i] += static_cast<double>(rows[t * kDim + i]);
      }
    }
  }
  std::vector<float> mean;
  for (const double x : sum) {
    mean.push_back(static_cast<float>(n == 0 ? 0.0 : x / static_cast<double>(n)));
  }
  return mean;
}

// How far the rows that are there are from those that were appended, relative to their length.
double distance(const Stored& stored, const std::vector<float>& rows,
                const std::vector<float>& appended) {
  double off = 0;
  double length = 1e-30;
  for (uint64_t t = 0; t < stored.is_there.size(); ++t) {
    for (uint64_t i = t * kDim; stored.is_there[t] && i < (t + 1) * kDim; ++i) {
      off += std::pow(static_cast<double>(rows[i]) - static_cast<double>(appended[i]), 2);
      length += std::pow(static_cast<double>(appended[i]), 2);
    }
  }
  return std::sqrt(off / length);
}

}  // namespace

std::vector<PolicyCase> policy_cases(uint64_t window) {
  kvm_policy_params in_cache = make_policy(KVM_RETAIN_SINKS_RECENT, 4, window);
  in_cache.positions = KVM_POSITIONS_IN_CACHE;
  const kvm_policy_params heavy = make_policy(KVM_RETAIN_HEAVY, 4, 128, 32);
  kvm_policy_params weighted = heavy;
  weighted.merge = KVM_MERGE_WEIGHTED;
  kvm_policy_params counted = heavy;
  counted.merge = KVM_MERGE_COUNTED;
  kvm_policy_params demoted = heavy;
  demoted.merge = KVM_MERGE_DEMOTED;
  kvm_policy_params by_density = heavy;
  by_density.budgets = KVM_BUDGETS_BY_DENSITY;
  kvm_policy_params prompt = make_policy(KVM_RETAIN_PROMPT, 0, 0);
  prompt.n_layers = 1;
  return {{"full", make_policy(KVM_RETAIN_FULL, 0, 0)},
          {"window", make_policy(KVM_RETAIN_SINKS_RECENT, 0, window)},
          {"window below `min_tokens`", make_policy(KVM_RETAIN_SINKS_RECENT, 0, 100)},
          {"sinks + recent", make_policy(KVM_RETAIN_SINKS_RECENT, 4, window)},
          {"sinks + recent, positions in the cache", in_cache},
          {"fold", make_policy(KVM_RETAIN_SINKS_RECENT_FOLD, 4, 128)},
          {"heavy", heavy},
          {"heavy, merged by weight", weighted},
          {"heavy, merged and counted", counted},
          {"heavy, demoted to it", demoted},
          {"heavy, shared out by density", by_density},
          {"prompt", prompt}};
}

const std::vector<CodecCase>& codec_cases() {
  static const std::vector<CodecCase> cases = {
      {"fp32, fp16, bf16", KVM_CODEC_BF16, KVM_CODEC_BF16, 0.004},
      {"fp32, fp16, bf16", KVM_CODEC_F32, KVM_CODEC_F32, 0},
      {"fp32, fp16, bf16", KVM_CODEC_F16, KVM_CODEC_F16, 0.001},
      {"int8, fp8", KVM_CODEC_I8, KVM_CODEC_I8, 0.012},
      {"int8, fp8", KVM_CODEC_F8E4M3, KVM_CODEC_F8E4M3, 0.04},
      {"int8_channel", KVM_CODEC_I8_CHANNEL, KVM_CODEC_I8_CHANNEL, 0.012},
      {"int4, int3, int2", KVM_CODEC_I4_CHANNEL, KVM_CODEC_I4, 0.13},
      {"int4, int3, int2", KVM_CODEC_I4_CENTRED, KVM_CODEC_I4, 0.13},
      {"int4, int3, int2", KVM_CODEC_I3_CHANNEL, KVM_CODEC_I3, 0.28},
      {"int4, int3, int2", KVM_CODEC_I3_CENTRED, KVM_CODEC_I3, 0.28},
      {"int4, int3, int2", KVM_CODEC_I2_CHANNEL, KVM_CODEC_I2, 0.55},
      {"int4, int3, int2", KVM_CODEC_I2_CENTRED, KVM_CODEC_I2, 0.55},
      {"gear", KVM_CODEC_GEAR4_CHANNEL, KVM_CODEC_GEAR4, 0.12},
      {"gear", KVM_CODEC_GEAR3_CHANNEL, KVM_CODEC_GEAR3, 0.25},
      {"gear", KVM_CODEC_GEAR2_CHANNEL, KVM_CODEC_GEAR2, 0.5}};
  return cases;
}

std::string said(kvm_status status, const CodecCase& codec) {
  if (status == KVM_OK) {
    return "";
  }
  std::string sentence = kvm_last_error();
  for (size_t at = sentence.find("0x"); at != std::string::npos; at = sentence.find("0x", at)) {
    const size_t end = sentence.find_first_not_of("0123456789abcdef", at + 2);
    sentence.replace(at, end - at, "S");
  }
  for (const uint32_t id : {codec.k, codec.v}) {
    const std::string named = std::string("codec ") + kvm_codec_name(id) + ",";
    if (const size_t at = sentence.find(named); at != std::string::npos) {
      sentence.replace(at, named.size(), "codec C,");
    }
  }
  return fmt::format("refused{{`{}`: {}}}", kvm_status_name(status), sentence);
}

std::string PairTest::add_space(const PolicyCase& policy, const CodecCase& codec,
                                uint32_t index_kind, Pair* pair, Extra extra) {
  kvm_codec_params codecs{};
  codecs.codec_k = codec.k;
  codecs.codec_v = extra == Extra::kVInK ? codec.k : codec.v;
  if (policy.demotes()) {
    codecs.demoted_k = codecs.codec_k;
    codecs.demoted_v = codecs.codec_v;
    codecs.codec_k = KVM_CODEC_F32;
    codecs.codec_v = KVM_CODEC_F32;
  }
  kvm_layer_params layer{};
  layer.n_layers = kPairLayers;
  if (extra == Extra::kWindow) {
    layer.window = kWindowOfLayers;
  } else {
    layer.layer_begin = kPairLayers - 1;
    layer.n_layers = 1;
    layer.kind = extra == Extra::kPair ? KVM_LAYER_PAIR : KVM_LAYER_ALIAS;
  }
  kvm_index_params index{};
  index.kind = index_kind;
  index.min_tokens = 256;
  index.lsh_bits = index_kind == KVM_INDEX_LSH ? 5 : 0;
  index.lsh_tables = index_kind == KVM_INDEX_LSH ? 40 : 0;
  kvm_space_params params{};
  params.struct_size = sizeof(params);
  params.name = "pair";
  params.n_layers = kPairLayers;
  params.n_q_heads = kQHeads;
  params.n_kv_heads = 1;
  params.head_dim_k = kDim;
  params.rope_layout = KVM_ROPE_HALF;
  params.n_rope_pairs = 1;
  params.rope_inv_freq = &kTurn;
  params.flags = extra == Extra::kVInK ? uint32_t{KVM_SPACE_V_IN_K} : 0;
  params.layers = &layer;
  const bool has_layer = extra == Extra::kWindow || extra == Extra::kAlias || extra == Extra::kPair;
  params.n_layer_params = has_layer ? 1 : 0;
  params.alibi_slopes = extra == Extra::kAlibi ? kSlopes : nullptr;
  params.policies = &policy.entry;
  params.n_policies = 1;
  params.codecs = &codecs;
  params.n_codecs = 1;
  params.indexes = &index;
  params.n_indexes = index_kind == KVM_INDEX_NONE ? 0 : 1;
  pair->policy = policy;
  pair->codec = codec;
  pair->extra = extra;
  return said(kvm_space_register(client_, &params, &pair->space), codec);
}

kvm_seq_id PairTest::add_seq(const Pair& pair, uint32_t flags) {
  kvm_seq_params params{};
  params.struct_size = sizeof(params);
  params.flags = flags;
  kvm_seq_id seq = 0;
  EXPECT_EQ(kvm_seq_create(client_, pair.space, &params, &seq), KVM_OK) << kvm_last_error();
  return seq;
}

kvm_seq_id PairTest::fork(kvm_seq_id parent) {
  kvm_seq_id child = 0;
  EXPECT_EQ(kvm_seq_fork(client_, parent, KVM_POSITION_END, &child), KVM_OK) << kvm_last_error();
  return child;
}

void PairTest::free_seq(kvm_seq_id seq) {
  EXPECT_EQ(kvm_seq_free(client_, seq), KVM_OK) << kvm_last_error();
}

void PairTest::drop_space(const Pair& pair) {
  EXPECT_EQ(kvm_space_drop(client_, pair.space), KVM_OK) << kvm_last_error();
}

void PairTest::append(const Pair& pair, kvm_seq_id seq, uint64_t at, uint64_t first_row, uint32_t n,
                      uint32_t item_flags) {
  std::vector<float> k;
  std::vector<float> v;
  const auto begin = static_cast<ptrdiff_t>(first_row * kDim);
  const auto end = static_cast<ptrdiff_t>((first_row + n) * kDim);
  for (uint32_t layer = 0; layer < pair.n_stored(); ++layer) {
    k.insert(k.end(), text().k[layer].begin() + begin, text().k[layer].begin() + end);
    v.insert(v.end(), text().v[layer].begin() + begin, text().v[layer].begin() + end);
  }
  kvm_item item = item_of(seq, n, 0);
  item.append_position = at;
  item.flags = item_flags;
  kvm_step_params step{};
  step.struct_size = sizeof(step);
  step.space = pair.space;
  step.n_layers = pair.n_stored();
  step.n_items = 1;
  step.items = &item;
  step.k = tensor_of(k);
  if (pair.extra != Extra::kVInK) {
    step.v = tensor_of(v);
  }
  ASSERT_EQ(kvm_append(queue_, &step), KVM_OK) << kvm_last_error();
}

void PairTest::grow(Pair* pair, kvm_seq_id seq, uint64_t from, uint64_t to, bool commits,
                    bool reads) {
  while (from < to) {
    // What is folded must have been read before.
    const uint64_t chunk = reads ? 64 : 256;
    const uint64_t most = from < pair->prompt ? std::min(chunk, pair->prompt - from) : 53;
    const auto n = static_cast<uint32_t>(std::min(to - from, most));
    const uint64_t length = from + n;
    append(*pair, seq, from, from, n, length == pair->prompt ? KVM_ITEM_PROMPT_END : 0);
    if (commits) {
      ASSERT_EQ(kvm_seq_commit(client_, seq, length), KVM_OK) << kvm_last_error();
    }
    for (uint32_t layer = 0; layer < kPairLayers; ++layer) {
      if (pair->answers(layer, length)) {
        const PairAnswer answer = attend(*pair, seq, layer, length, {.n_rows = 8, .flags = 0});
        ASSERT_EQ(answer.refusal, "");
      }
      if (reads) {
        const Stored now = read(*pair, seq, layer, length);
        pair->k[layer].resize(length * kDim);
        pair->v[layer].resize(length * kDim);
        for (uint64_t i = 0; i < length * kDim; ++i) {
          pair->k[layer][i] = now.is_there[i / kDim] ? now.k[i] : pair->k[layer][i];
          pair->v[layer][i] = now.is_there[i / kDim] ? now.v[i] : pair->v[layer][i];
        }
      }
    }
    from = length;
  }
}

std::string PairTest::draft(const Pair& pair, kvm_seq_id seq, uint64_t at, uint32_t step_flags) {
  append(pair, seq, at, kDraftRow, kDraft);
  for (uint32_t layer = 0; layer < kPairLayers; ++layer) {
    if (pair.answers(layer, at + kDraft)) {
      const PairAnswer answer =
          attend(pair, seq, layer, at + kDraft, {.n_rows = kDraft, .flags = step_flags});
      EXPECT_EQ(answer.refusal, "");
    }
  }
  return said(kvm_seq_truncate(client_, seq, at), pair.codec);
}

PairAnswer PairTest::attend(const Pair& pair, kvm_seq_id seq, uint32_t layer, uint64_t length,
                            const Ask& ask) {
  constexpr uint64_t kRow = uint64_t{kQHeads} * kDim;
  PairAnswer answer;
  answer.o.resize(ask.n_rows * kRow);
  answer.lse.resize(uint64_t{ask.n_rows} * kQHeads);
  const auto begin = text().q.begin() + static_cast<ptrdiff_t>((length - ask.n_rows) * kRow);
  const std::vector<float> q(begin, begin + static_cast<ptrdiff_t>(ask.n_rows * kRow));
  const kvm_item item = item_of(seq, 0, ask.n_rows);
  kvm_step_params step{};
  step.struct_size = sizeof(step);
  step.flags = KVM_STEP_F32_VALUES | ask.flags;
  step.space = pair.space;
  step.layer_begin = layer;
  step.n_items = 1;
  step.items = &item;
  step.mode = ask.mode;
  step.proposal = ask.proposal;
  step.budget = ask.budget;
  step.eps = ask.eps;
  step.q = tensor_of(q);
  step.o = tensor_of(answer.o);
  step.lse = tensor_of(answer.lse);
  kvm_step_stats stats{};
  stats.struct_size = sizeof(stats);
  answer.refusal = said(kvm_attend(queue_, &step, &stats), pair.codec);
  answer.mode = stats.mode;
  return answer;
}

std::vector<PairAnswer> PairTest::attend_all(const Pair& pair, kvm_seq_id seq, uint64_t length) {
  std::vector<PairAnswer> answers;
  for (uint32_t layer = 0; layer < kPairLayers; ++layer) {
    if (pair.answers(layer, length)) {
      answers.push_back(attend(pair, seq, layer, length));
      EXPECT_EQ(answers.back().refusal, "");
    }
  }
  return answers;
}

void PairTest::read_range(const Pair& pair, kvm_seq_id seq, uint32_t layer, uint64_t begin,
                          uint64_t end, Stored* stored) {
  std::vector<float> k((end - begin) * kDim);
  std::vector<float> v(k.size());
  kvm_read_params params{};
  params.struct_size = sizeof(params);
  params.seq = seq;
  params.layer = layer;
  params.position = begin;
  params.n_tokens = end - begin;
  params.k = tensor_of(k);
  params.v = tensor_of(v);
  const kvm_status status = kvm_read(queue_, &params);
  if (status == KVM_OK) {
    const auto at = static_cast<ptrdiff_t>(begin * kDim);
    std::copy(k.begin(), k.end(), stored->k.begin() + at);
    std::copy(v.begin(), v.end(), stored->v.begin() + at);
    std::fill(stored->is_there.begin() + static_cast<ptrdiff_t>(begin),
              stored->is_there.begin() + static_cast<ptrdiff_t>(end), true);
    return;
  }
  ASSERT_EQ(status, KVM_ERR_PARTIAL) << kvm_last_error();
  // Others drop whole pages.
  const bool is_heavy = pair.policy.entry.retention == KVM_RETAIN_HEAVY;
  for (uint64_t t = begin; is_heavy && end - begin > 1 && t < end; ++t) {
    read_range(pair, seq, layer, t, t + 1, stored);
  }
}

Stored PairTest::read(const Pair& pair, kvm_seq_id seq, uint32_t layer, uint64_t length) {
  Stored stored = {std::vector<bool>(length), std::vector<float>(length * kDim),
                   std::vector<float>(length * kDim)};
  constexpr uint64_t kPage = 64;  // of which policies drop whole ones
  for (uint64_t begin = 0; begin < length; begin += kPage) {
    read_range(pair, seq, layer, begin, std::min(begin + kPage, length), &stored);
  }
  return stored;
}

std::string PairTest::check(const Pair& pair, kvm_seq_id seq, uint64_t length) {
  const uint32_t layer = pair.answers(0, length) ? 0 : 1;
  const kvm_policy_params policy =
      pair.policy.is_prompt() ? kvm_policy_params{} : pair.policy.entry;
  const bool folds = policy.retention == KVM_RETAIN_SINKS_RECENT_FOLD;
  const Stored stored = read(pair, seq, layer, length);
  if (policy.merge == KVM_MERGE_NONE || pair.policy.demotes()) {
    const uint32_t source = pair.storage(layer);
    const double off =
        std::max(distance(stored, stored.k, text().k[source]),
                 distance(stored, stored.v,
                          pair.extra == Extra::kVInK ? text().k[source] : text().v[source]));
    // Rows that have nothing in common are off by their own length, about.
    if (off > (pair.extra == Extra::kPair ? 1 : pair.codec.off)) {
      return fmt::format("rows are off by {}", off);
    }
  }
  std::vector<Entry> entries;
  for (uint64_t t = 0; t < length; ++t) {
    const bool is_hidden = pair.extra == Extra::kWindow && t + kWindowOfLayers < length;
    if (!is_hidden && is_seen(policy, t, length - 1)) {
      if (stored.is_there[t]) {
        entries.push_back({&stored.k[t * kDim], &stored.v[t * kDim], 0, t < policy.n_sinks, t});
      } else if (pair.policy.demotes()) {  // it cannot be read: about what it was
        const uint32_t source = pair.storage(layer);
        const auto& v = pair.extra == Extra::kVInK ? text().k[source] : text().v[source];
        entries.push_back({&text().k[source][t * kDim], &v[t * kDim]});
      } else if (policy.retention == KVM_RETAIN_SINKS_RECENT) {
        return fmt::format("token {} is seen, and is not there", t);
      }
    }
  }
  const auto n_gone =
      static_cast<uint64_t>(std::count(stored.is_there.begin(), stored.is_there.end(), false));
  std::vector<float> mean_k;
  std::vector<float> mean_v;
  if (folds && n_gone != 0) {
    mean_k = mean_of(pair.k[layer], stored.is_there, length);
    mean_v = mean_of(pair.v[layer], stored.is_there, length);
    entries.push_back({mean_k.data(), mean_v.data(), std::log(static_cast<double>(n_gone))});
  }
  const PairAnswer answer = attend(pair, seq, layer, length);
  if (!answer.refusal.empty() || answer.mode != KVM_MODE_EXACT) {
    return answer.refusal + fmt::format(" mode {}", answer.mode);
  }
  // The table of rounding in kvm.h, with KVM_STEP_F32_VALUES; what was folded may have been read
  // before a cut that rounded it once more.
  const double most = (pair.codec.k == KVM_CODEC_I8 ? 2e-3 : 2e-4) +
                      (folds || pair.policy.demotes() ? pair.codec.off : 0);
  const bool in_cache = policy.positions == KVM_POSITIONS_IN_CACHE;
  const uint64_t seen = policy.n_sinks + policy.n_recent;
  const double turn = in_cache && length > seen
                          ? -static_cast<double>(length - seen) * static_cast<double>(kTurn)
                          : 0;
  for (uint32_t head = 0; head < kQHeads; ++head) {
    const float* const q = &text().q[((length - 1) * kQHeads + head) * kDim];
    std::vector<float> turned(q, q + kDim);
    const double a = static_cast<double>(q[0]);
    const double b = static_cast<double>(q[1]);
    turned[0] = static_cast<float>(a * std::cos(turn) - b * std::sin(turn));
    turned[1] = static_cast<float>(b * std::cos(turn) + a * std::sin(turn));
    std::vector<double> o;
    const double slope = pair.extra == Extra::kAlibi ? static_cast<double>(kSlopes[head]) : 0;
    const double lse = attend_naively(entries, q, turned.data(), slope, length - 1, &o);
    const double got = static_cast<double>(answer.lse[head]);
    if (policy.merge == KVM_MERGE_COUNTED) {
      // How many tokens have become one is nowhere to be read: at most all that are gone.
      if (got < lse - most || got > lse + std::log(static_cast<double>(n_gone + 1)) + most) {
        return fmt::format("lse of head {} is {}, uncounted {}", head, got, lse);
      }
      continue;
    }
    const double off = difference(&answer.o[size_t{head} * kDim], o);
    // A key that is off by a part of its length moves its logit by that part of what the query and
    // it have in length, at most, and the lse by no more than the logit that moves most.
    double longest = 0;
    for (const Entry& entry : entries) {
      longest = std::max(longest, std::inner_product(entry.k, entry.k + kDim, entry.k, 0.0));
    }
    const double reach =
        std::sqrt(longest * std::inner_product(q, q + kDim, q, 0.0) / double{kDim});
    const double most_lse = pair.policy.demotes() ? most + pair.codec.off * reach : most;
    if (off > most || std::abs(got - lse) > most_lse) {
      return fmt::format("head {} is off by {}, its lse by {}", head, off, got - lse);
    }
  }
  return "";
}

}  // namespace kvm::testing
