// SPDX-License-Identifier: Apache-2.0
// All policies in one space, mixed over heads and layers: random sequences of appends, attends of
// several rows and of trees, commits by hand and by itself, forks and truncates, against the rules
// in double precision. KVM_SEED=n runs one seed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/round.h"
#include "tests/unit/engine/policy_testbed.h"

namespace kvm::engine::testing {
namespace {

constexpr uint32_t kDim = 16;
constexpr uint32_t kPairs = 6;
constexpr uint32_t kKvHeads = 6;
constexpr uint32_t kGroup = 2;
constexpr uint32_t kQHeads = kKvHeads * kGroup;
constexpr uint32_t kOwnLayers = 2;
constexpr uint32_t kLayers = 3;  // the last is an alias of the first
constexpr uint64_t kSlack = 48;
const double kScale = 1.0 / std::sqrt(double{kDim});

enum class Kind { kFull, kWindow, kInCache, kFold, kHeavy, kDemoted };

struct Rule {
  Kind kind = Kind::kFull;
  uint64_t n_sinks = 0;
  uint64_t n_recent = 0;
  uint64_t n_heavy = 0;

  // What is demoted is whole pages, so is what is kept.
  uint64_t capacity() const {
    return kind == Kind::kDemoted ? round_up(n_heavy, kPageTokens) : n_heavy;
  }
  bool chooses() const { return kind == Kind::kHeavy || kind == Kind::kDemoted; }
  uint64_t begin() const { return round_up(n_sinks, kPageTokens); }
  uint64_t end(uint64_t n_committed) const {
    const uint64_t kept = n_recent + kSlack;
    const uint64_t limit = n_committed > kept ? n_committed - kept : 0;
    return std::max(begin(), limit / kPageTokens * kPageTokens);
  }
};

Row rope(Row row, double position) {
  for (uint32_t i = 0; i < kPairs; ++i) {
    const double angle = position * double{std::pow(100.0f, -static_cast<float>(i) / 6.0f)};
    const double x = row[i] * std::cos(angle) - row[i + kPairs] * std::sin(angle);
    row[i + kPairs] = row[i] * std::sin(angle) + row[i + kPairs] * std::cos(angle);
    row[i] = x;
  }
  return row;
}

// Of a token with the number `id`, which no other has.
Row key(uint64_t id, uint64_t position, uint32_t layer, uint32_t head) {
  return rope(hashed_row(11 + layer, id, head, kDim, 1.7), static_cast<double>(position));
}
Row value(uint64_t id, uint32_t layer, uint32_t head) {
  return hashed_row(21 + layer, id, head, kDim, 1.0);
}
Row query(uint64_t id, uint64_t position, uint32_t layer, uint32_t head) {
  return rope(hashed_row(31 + layer, id, head, kDim, 1.7), static_cast<double>(position));
}

// What a head of a layer holds.
struct List {
  std::vector<Row> k;  // of all tokens, also those it gave up
  std::vector<Row> v;
  uint64_t end = 0;                 // what lies behind the sinks' pages and before it is given up
  std::map<uint64_t, double> kept;  // those that chooses(): tokens in full, and their mass
};

struct ModelSeq {
  bool is_manual = false;
  uint64_t n_committed = 0;
  std::vector<uint64_t> ids;  // of tokens
  List lists[kOwnLayers][kKvHeads];
};

class Mixed {
 public:
  Mixed(uint64_t seed, uint32_t n_threads) : random_(seed), rig_(n_threads) {
    SpaceSpec spec = make_spec("mixed", kLayers, kQHeads, kKvHeads, kDim);
    spec.params.codec = KVM_CODEC_F32;
    spec.params.rope_layout = KVM_ROPE_HALF;
    spec.params.n_rope_pairs = kPairs;
    for (uint32_t i = 0; i < kPairs; ++i) {
      spec.rope_inv_freq.push_back(std::pow(100.0f, -static_cast<float>(i) / 6.0f));
    }
    spec.layers = {{.layer_begin = 2, .n_layers = 1, .kind = KVM_LAYER_ALIAS, .target = 0}};
    for (uint32_t layer = 0; layer < kOwnLayers; ++layer) {
      for (uint32_t head = 0; head < kKvHeads; ++head) {
        Rule& rule = rules_[layer][head];
        rule.kind = static_cast<Kind>((head + pick(0, 1) * layer) % 6);
        rule.n_sinks = pick(0, 2) == 0 ? 0 : pick(1, 100);
        rule.n_recent = pick(1, 120);
        rule.n_heavy = pick(1, 100);
        if (rule.kind != Kind::kFull) {
          spec.policies.push_back(policy(rule, layer, head));
        }
        if (rule.kind == Kind::kDemoted) {
          spec.codecs.push_back({.layer_begin = layer,
                                 .n_layers = 1,
                                 .kv_head_mask = {uint64_t{1} << head, 0},
                                 .demoted_k = KVM_CODEC_I8,
                                 .demoted_v = KVM_CODEC_F16});
        }
      }
    }
    space_ = rig_.space(spec);
    for (const bool is_manual : {false, true}) {
      const kvm_seq_id seq = rig_.create(space_, is_manual ? KVM_SEQ_MANUAL_COMMIT : 0);
      ModelSeq model;
      model.is_manual = is_manual;
      for (uint32_t layer = 0; layer < kOwnLayers; ++layer) {
        for (uint32_t head = 0; head < kKvHeads; ++head) {
          model.lists[layer][head].end = rules_[layer][head].begin();
        }
      }
      seqs_.emplace(seq, std::move(model));
    }
  }

  // False where masses are too near to each other to say what is kept.
  bool run(int n_turns) {
    for (int turn = 0; turn < n_turns && is_clear_; ++turn) {
      const auto at = std::next(seqs_.begin(), pick(0, static_cast<uint32_t>(seqs_.size()) - 1));
      const uint32_t n = turn % 6 == 4 ? pick(800, 1500) : pick(1, 90);
      step(at->first, &at->second, n);
      if (::testing::Test::HasFatalFailure()) {
        return false;
      }
      commit(at->first, &at->second);
      if (pick(0, 2) == 0) {
        cut(at->first, &at->second);
      }
      if (pick(0, 3) == 0 && seqs_.size() < 7) {
        fork(at->first, at->second);
      }
    }
    return is_clear_;
  }

  uint64_t n_rows = 0;
  uint64_t n_tree_rows = 0;
  uint64_t n_cuts = 0;
  uint64_t n_refused = 0;

 private:
  uint32_t pick(uint32_t low, uint32_t high) {
    return std::uniform_int_distribution<uint32_t>(low, high)(random_);
  }

  static kvm_policy_params policy(const Rule& rule, uint32_t layer, uint32_t head) {
    kvm_policy_params params{};
    params.layer_begin = layer;
    params.n_layers = 1;
    params.kv_head_mask[0] = uint64_t{1} << head;
    params.retention = rule.kind == Kind::kFold ? KVM_RETAIN_SINKS_RECENT_FOLD
                       : rule.chooses()         ? KVM_RETAIN_HEAVY
                                                : KVM_RETAIN_SINKS_RECENT;
    params.merge = rule.kind == Kind::kDemoted ? KVM_MERGE_DEMOTED : KVM_MERGE_NONE;
    params.positions =
        rule.kind == Kind::kInCache ? KVM_POSITIONS_IN_CACHE : KVM_POSITIONS_ABSOLUTE;
    params.n_sinks = rule.n_sinks;
    params.n_recent = rule.n_recent;
    params.slack = kSlack;
    params.n_heavy = rule.chooses() ? rule.n_heavy : 0;
    return params;
  }

  // One request for each layer: n tokens, and some rows that attend, perhaps as a tree.
  void step(kvm_seq_id seq, ModelSeq* model, uint32_t n) {
    const uint64_t before = model->ids.size();
    for (uint32_t t = 0; t < n; ++t) {
      model->ids.push_back(++n_ids_);
    }
    const uint32_t n_query = std::min(n, pick(1, 12));
    std::vector<uint64_t> tree;
    const bool is_tree = pick(0, 2) == 0;
    for (uint32_t row = 0; is_tree && row < n_query; ++row) {
      // Itself and an earlier row with all that this one sees.
      tree.push_back((uint64_t{1} << row) | (row == 0 ? 0 : tree[pick(0, row - 1)]));
    }
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      step_layer(seq, model, layer, before, n, n_query, tree);
      if (layer + 1 == kOwnLayers && !model->is_manual) {
        advance(model, model->ids.size());  // all that store have it
      }
      if (::testing::Test::HasFatalFailure()) {
        return;
      }
    }
  }

  void step_layer(kvm_seq_id seq, ModelSeq* model, uint32_t layer, uint64_t before, uint32_t n,
                  uint32_t n_query, const std::vector<uint64_t>& tree) {
    const uint64_t first = before + n - n_query;
    Buffer k(Dtype::kF32, 1, n, kKvHeads, kDim);
    Buffer v(Dtype::kF32, 1, n, kKvHeads, kDim);
    Buffer q(Dtype::kF32, 1, n_query, kQHeads, kDim);
    Buffer o(Dtype::kF32, 1, n_query, kQHeads, kDim);
    Buffer lse(Dtype::kF32, 1, n_query, kQHeads, 1);
    for (uint32_t t = 0; t < n; ++t) {
      const uint64_t id = model->ids[before + t];
      for (uint32_t h = 0; h < kKvHeads; ++h) {
        put(&k, t, h, key(id, before + t, layer, h));
        put(&v, t, h, value(id, layer, h));
      }
    }
    for (uint32_t row = 0; row < n_query; ++row) {
      for (uint32_t h = 0; h < kQHeads; ++h) {
        put(&q, row, h, query(model->ids[first + row], first + row, layer, h));
      }
    }
    StepRequest request;
    request.space = space_;
    request.layer_begin = layer;
    request.append = layer < kOwnLayers;
    request.attend = true;
    kvm_item item = append_item(seq, request.append ? n : 0);
    item.n_query = n_query;
    item.query_position = KVM_POSITION_END;
    item.flags = tree.empty() ? 0 : uint32_t{KVM_ITEM_TREE};
    request.items = {item};
    request.tree_mask = tree;
    if (request.append) {
      request.k = k.view();
      request.v = v.view();
    }
    request.q = q.view();
    request.o = o.view();
    request.lse = lse.view();
    const RequestResult result = rig_.run(std::move(request));
    ASSERT_TRUE(result.status.is_ok()) << result.status.message();
    for (uint32_t h = 0; h < kKvHeads; ++h) {
      for (uint64_t x = before; layer < kOwnLayers && x < before + n; ++x) {
        List& list = model->lists[layer][h];
        list.kept[x] = 0;
        list.k.push_back(key(model->ids[x], x, layer, h));
        list.v.push_back(value(model->ids[x], layer, h));
      }
    }
    for (uint32_t row = 0; row < n_query; ++row) {
      for (uint32_t h = 0; h < kQHeads; ++h) {
        const Answer expected = attend(model, layer, h, first, row, tree);
        double error = std::fabs(double{lse.get(0, row, h, 0)} - expected.lse);
        for (uint32_t i = 0; i < kDim; ++i) {
          error = std::max(error, std::fabs(double{o.get(0, row, h, i)} - expected.o[i]));
        }
        ASSERT_LT(error, 1e-4) << "layer " << layer << " head " << h << " (kind "
                               << static_cast<int>(rules_[layer % kOwnLayers][h / kGroup].kind)
                               << ") position " << first + row << (tree.empty() ? "" : " tree");
      }
    }
    n_rows += n_query;
    n_tree_rows += tree.empty() ? 0 : n_query;
  }

  static void put(Buffer* buffer, uint32_t row, uint32_t head, const Row& values) {
    for (uint32_t i = 0; i < values.size(); ++i) {
      buffer->set(0, row, head, i, static_cast<float>(values[i]));
    }
  }

  // What row `row` of a request gets; mass is added up where the head chooses by it.
  Answer attend(ModelSeq* model, uint32_t layer, uint32_t q_head, uint64_t first, uint32_t row,
                const std::vector<uint64_t>& tree) const {
    const uint32_t own = layer % kOwnLayers;
    const uint32_t head = q_head / kGroup;
    const Rule& rule = rules_[own][head];
    List& list = model->lists[own][head];
    const uint64_t p = first + row;
    const Row q = query(model->ids[p], p, layer, q_head);
    // Positions in the cache: of a tree all rows are turned as the first.
    const uint64_t at = (tree.empty() ? p : first) + 1;
    const uint64_t near = rule.n_recent + rule.n_sinks;
    const double shift =
        rule.kind == Kind::kInCache && at > near ? static_cast<double>(at - near) : 0.0;
    const Row turned = rope(q, -shift);
    std::vector<double> logits;
    std::vector<Row> values;
    std::vector<uint64_t> seen;
    Row mean_k(kDim);
    Row mean_v(kDim);
    const auto dot = [](const Row& a, const Row& b) {
      double sum = 0;
      for (uint32_t i = 0; i < kDim; ++i) {
        sum += a[i] * b[i];
      }
      return sum * kScale;
    };
    for (uint64_t x = 0; x <= (tree.empty() ? p : first + tree.size() - 1); ++x) {
      if (!tree.empty() && x >= first && (tree[row] >> (x - first) & 1) == 0) {
        continue;
      }
      const bool is_given_up = x >= rule.begin() && x < list.end;
      const Row& k = list.k[x];
      const Row& v = list.v[x];
      if (rule.kind == Kind::kFold && is_given_up) {
        for (uint32_t i = 0; i < kDim; ++i) {
          mean_k[i] += k[i] / static_cast<double>(list.end - rule.begin());
          mean_v[i] += v[i] / static_cast<double>(list.end - rule.begin());
        }
        continue;
      }
      const bool is_windowed = rule.kind == Kind::kWindow || rule.kind == Kind::kInCache;
      if ((is_windowed && x >= rule.n_sinks && x + rule.n_recent <= p) ||
          (rule.kind == Kind::kHeavy && list.kept.count(x) == 0)) {
        continue;
      }
      logits.push_back(dot(x < rule.n_sinks ? turned : q, k));
      values.push_back(v);
      seen.push_back(x);
    }
    if (rule.kind == Kind::kFold && list.end > rule.begin()) {
      logits.push_back(dot(q, mean_k) + std::log(static_cast<double>(list.end - rule.begin())));
      values.push_back(mean_v);
    }
    Answer answer;
    answer.o.assign(kDim, 0.0);
    const double most = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const double logit : logits) {
      sum += std::exp(logit - most);
    }
    answer.lse = most + std::log(sum);
    for (size_t i = 0; i < logits.size(); ++i) {
      const double weight = std::exp(logits[i] - answer.lse);
      for (uint32_t d = 0; d < kDim; ++d) {
        answer.o[d] += weight * values[i][d];
      }
      if (rule.chooses() && list.kept.contains(seen[i])) {
        list.kept[seen[i]] += weight;
      }
    }
    return answer;
  }

  void commit(kvm_seq_id seq, ModelSeq* model) {
    if (model->is_manual) {
      const uint64_t length = model->ids.size();
      const uint64_t n = length - (pick(0, 2) == 0 ? std::min<uint64_t>(length, pick(0, 100)) : 0);
      ASSERT_TRUE(rig_.verb(SeqVerb::kCommit, seq, n).status.is_ok());
      advance(model, n);
    }
  }

  void advance(ModelSeq* model, uint64_t n) {
    if (n <= model->n_committed) {
      return;
    }
    model->n_committed = n;
    for (uint32_t layer = 0; layer < kOwnLayers; ++layer) {
      for (uint32_t head = 0; head < kKvHeads; ++head) {
        const Rule& rule = rules_[layer][head];
        List& list = model->lists[layer][head];
        const uint64_t end = std::max(list.end, rule.end(n));
        const bool chooses = rule.chooses() && end != list.end;
        list.end = rule.kind == Kind::kFull ? list.end : end;
        if (chooses) {
          choose(rule, &list);
        }
      }
    }
  }

  static Row rounded(CodecId codec, const Row& row) {
    const std::vector<float> stored = round_row(codec, std::vector<float>(row.begin(), row.end()));
    return Row(stored.begin(), stored.end());
  }

  void choose(const Rule& rule, List* list) {
    std::vector<std::pair<double, uint64_t>> ranked;
    for (const auto& [x, mass] : list->kept) {
      if (x >= rule.begin() && x < list->end) {
        ranked.emplace_back(-mass, x);
      }
    }
    std::sort(ranked.begin(), ranked.end());
    for (size_t i = rule.capacity(); i < ranked.size(); ++i) {
      const uint64_t x = ranked[i].second;
      list->kept.erase(x);
      if (rule.kind == Kind::kDemoted) {
        list->k[x] = rounded(CodecId::kI8, list->k[x]);
        list->v[x] = rounded(CodecId::kF16, list->v[x]);
      }
    }
    if (ranked.size() > rule.capacity()) {
      const double last = -ranked[rule.capacity() - 1].first;
      const double next = -ranked[rule.capacity()].first;
      is_clear_ = is_clear_ && (next == 0 || last - next >= 1e-5 * last);
    }
  }

  // Whether a cut at n leaves every query its tokens; and whether it certainly does not.
  bool is_allowed(const ModelSeq& model, uint64_t n) const {
    return all_lists(model, [&](const Rule& rule, const List& list) {
      return list.end == rule.begin() || n >= list.end + rule.n_recent;
    });
  }
  bool is_forbidden(const ModelSeq& model, uint64_t n) const {
    return !all_lists(model, [&](const Rule& rule, const List& list) {
      const bool leaves = rule.kind == Kind::kFold || rule.chooses();
      return !leaves || n <= rule.begin() || n >= list.end;
    });
  }
  template <typename Test>
  bool all_lists(const ModelSeq& model, Test test) const {
    for (uint32_t layer = 0; layer < kOwnLayers; ++layer) {
      for (uint32_t head = 0; head < kKvHeads; ++head) {
        if (!test(rules_[layer][head], model.lists[layer][head])) {
          return false;
        }
      }
    }
    return true;
  }

  static void cut_model(ModelSeq* model, uint64_t n) {
    model->ids.resize(std::min<size_t>(model->ids.size(), n));
    model->n_committed = std::min(model->n_committed, n);
    for (auto& layer : model->lists) {
      for (List& list : layer) {
        list.kept.erase(list.kept.lower_bound(n), list.kept.end());
        list.k.resize(std::min<size_t>(list.k.size(), n));
        list.v.resize(list.k.size());
      }
    }
  }

  void cut(kvm_seq_id seq, ModelSeq* model) {
    const uint64_t n = model->ids.size() - std::min<uint64_t>(model->ids.size(), pick(1, 130));
    if (is_allowed(*model, n)) {
      ASSERT_TRUE(rig_.verb(SeqVerb::kTruncate, seq, n).status.is_ok()) << n;
      cut_model(model, n);
      ++n_cuts;
    } else if (is_forbidden(*model, n)) {
      ASSERT_EQ(rig_.verb(SeqVerb::kTruncate, seq, n).status.code(), KVM_ERR_PARTIAL) << n;
      ASSERT_EQ(rig_.verb(SeqVerb::kFork, seq, n).status.code(), KVM_ERR_PARTIAL) << n;
      ++n_refused;
    }
  }

  void fork(kvm_seq_id seq, const ModelSeq& model) {
    uint64_t n = model.ids.size();
    if (pick(0, 1) == 0 && is_allowed(model, n - std::min<uint64_t>(n, 20))) {
      n -= std::min<uint64_t>(n, 20);
    }
    const RequestResult child = rig_.verb(SeqVerb::kFork, seq, n);
    ASSERT_TRUE(child.status.is_ok()) << child.status.message();
    ModelSeq copy = model;
    cut_model(&copy, n);
    seqs_.emplace(child.seq, std::move(copy));
  }

  std::mt19937_64 random_;
  Rig rig_;
  kvm_space_id space_ = 0;
  Rule rules_[kOwnLayers][kKvHeads];
  std::map<kvm_seq_id, ModelSeq> seqs_;
  uint64_t n_ids_ = 0;
  bool is_clear_ = true;
};

TEST(MixedPolicies, EveryHeadFollowsItsRule) {
  const char* only = std::getenv("KVM_SEED");
  const uint64_t first = only != nullptr ? std::strtoull(only, nullptr, 10) : 1;
  const uint64_t n_seeds = only != nullptr ? 1 : is_nightly() ? 200 : kInstrumented ? 4 : 12;
  uint64_t n_ambiguous = 0;
  uint64_t n_tree_rows = 0;
  uint64_t n_cuts = 0;
  uint64_t n_refused = 0;
  for (uint64_t seed = first; seed < first + n_seeds; ++seed) {
    SCOPED_TRACE("KVM_SEED=" + std::to_string(seed));
    Mixed mixed(seed, seed % 2 == 0 ? 1 : 3);
    n_ambiguous += mixed.run(kInstrumented ? 14 : 24) ? 0 : 1;
    if (::testing::Test::HasFailure()) {
      return;
    }
    n_tree_rows += mixed.n_tree_rows;
    n_cuts += mixed.n_cuts;
    n_refused += mixed.n_refused;
  }
  EXPECT_LE(n_ambiguous, 1 + n_seeds / 4);
  if (only == nullptr) {
    EXPECT_GT(n_tree_rows, 0u);
    EXPECT_GT(n_cuts, 0u);
    EXPECT_GT(n_refused, 0u);
  }
}

}  // namespace
}  // namespace kvm::engine::testing
