// SPDX-License-Identifier: Apache-2.0
// Append, attend and step through the whole engine against the naive model.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "tests/unit/engine/rig.h"

namespace kvm::engine::testing {
namespace {

// Instrumented memory accesses make everything ten times slower and more: fewer, smaller cases.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSlow = true;
#else
constexpr bool kSlow = false;
#endif

constexpr uint32_t kLayers = 3;  // 0 and 1 store; 2 stores or reads layer 0

// A space with random features, sequences in it, and what they should hold.
class World {
 public:
  World(uint64_t seed, uint32_t n_threads) : random_(seed), rig(n_threads) {
    const uint32_t dims[] = {8, 16, 24, 40, 64, 72, 128};
    const uint32_t groups[] = {1, 2, 3, 4, 7, 16};
    n_kv_heads = pick(1, 4);
    group = groups[pick(0, 5)];
    dim_k = dims[pick(0, 6)];
    dim_v = dims[pick(0, 6)];
    stored = static_cast<CodecId>(pick(1, 4));
    spec = make_spec("world", kLayers, n_kv_heads * group, n_kv_heads, dim_k, dim_v);
    spec.params.codec = static_cast<uint32_t>(stored);
    spec.params.logit_softcap = pick(0, 2) == 0 ? 3.0f : 0.0f;
    for (Rule& rule : rules) {
      rule.group = group;
      rule.scale = 1.0f / std::sqrt(static_cast<float>(dim_k));
      rule.softcap = spec.params.logit_softcap;
    }
    head_rules.assign(n_kv_heads, Rule{});
    head_codecs.assign(n_kv_heads, stored);
    choose_layers();
    choose_policy();
    choose_codec();
    choose_sinks();
    space = rig.space(spec);
    seqs.push_back({rig.create(space), std::vector<ModelLayer>(2)});
  }

  uint32_t pick(uint32_t low, uint32_t high) {
    return std::uniform_int_distribution<uint32_t>(low, high)(random_);
  }

  uint32_t storage(uint32_t layer) const { return layer == 2 ? 0 : layer; }

  struct Seq {
    kvm_seq_id id = 0;
    std::vector<ModelLayer> layers;
  };

  // Appends n_append[i] tokens to layers [layer, layer + n_layers) of sequence i and attends with
  // n_query[i] rows to `layer`, all in one request; either half may be empty.
  void step(uint32_t layer, uint32_t n_layers, const std::vector<uint32_t>& n_append,
            const std::vector<uint32_t>& n_query) {
    StepRequest request;
    request.space = space;
    request.layer_begin = layer;
    request.n_layers = n_layers;
    uint32_t append_rows = pick(0, 3);  // rows before are not used
    uint32_t query_rows = pick(0, 3);
    for (size_t i = 0; i < seqs.size(); ++i) {
      if (n_append[i] == 0 && n_query[i] == 0) {
        continue;
      }
      kvm_item item = append_item(seqs[i].id, n_append[i], append_rows);
      item.n_query = n_query[i];
      item.query_row = query_rows;
      append_rows += n_append[i];
      query_rows += n_query[i];
      request.append |= n_append[i] != 0;
      request.attend |= n_query[i] != 0;
      request.items.push_back(item);
      decorate(&request, n_append[i] + seqs[i].layers[storage(layer)].k.size());
    }
    if (!request.append && !request.attend) {
      return;
    }
    run(std::move(request), append_rows, query_rows);
  }

  // What a policy may legitimately refuse, and what must work.
  uint64_t n_answers = 0;
  uint64_t n_refused = 0;

 private:
  void choose_layers() {
    kvm_layer_params windowed{};
    windowed.n_layers = 1;
    windowed.layer_begin = pick(0, 1);
    windowed.window = pick(0, 1) == 0 ? pick(1, 90) : 0;
    spec.layers.push_back(windowed);
    rules[windowed.layer_begin].window = windowed.window;
    kvm_layer_params alias{};
    alias.layer_begin = 2;
    alias.n_layers = 1;
    alias.kind = KVM_LAYER_ALIAS;
    alias.target = 0;
    spec.layers.push_back(alias);
    spec.params.n_layer_params = 2;
  }
  void choose_policy() {
    if (pick(0, 2) == 0) {
      return;
    }
    kvm_policy_params policy{};
    policy.kv_head_mask[0] = pick(1, (1u << n_kv_heads) - 1);
    policy.retention = KVM_RETAIN_SINKS_RECENT;
    policy.n_sinks = pick(0, 1) == 0 ? pick(0, 5) : pick(60, 140);
    policy.n_recent = pick(1, 150);
    policy.slack = pick(0, 1) * pick(1, 100);
    spec.policies.push_back(policy);
    spec.params.n_policies = 1;
    for (uint32_t h = 0; h < n_kv_heads; ++h) {
      if ((policy.kv_head_mask[0] >> h & 1) != 0) {
        head_rules[h].sinks_recent = true;
        head_rules[h].n_sinks = policy.n_sinks;
        head_rules[h].n_recent = policy.n_recent;
        has_policy = true;
      }
    }
  }
  void choose_codec() {
    if (pick(0, 1) == 0) {
      return;
    }
    kvm_codec_params codec{};
    codec.kv_head_mask[0] = pick(1, (1u << n_kv_heads) - 1);
    codec.codec_k = codec.codec_v = pick(1, 4);
    spec.codecs.push_back(codec);
    spec.params.n_codecs = 1;
    for (uint32_t h = 0; h < n_kv_heads; ++h) {
      if ((codec.kv_head_mask[0] >> h & 1) != 0) {
        head_codecs[h] = static_cast<CodecId>(codec.codec_k);
      }
    }
  }
  void choose_sinks() {
    if (pick(0, 1) == 0) {
      return;
    }
    std::normal_distribution<float> normal;
    for (uint32_t i = 0; i < kLayers * n_kv_heads * group; ++i) {
      spec.sink_logits.push_back(pick(0, 5) == 0 ? -INFINITY : normal(random_));
    }
  }

  // Ranges, trees and positions for the last item; its sequence will have `length` tokens.
  void decorate(StepRequest* request, uint64_t length) {
    kvm_item& item = request->items.back();
    if (item.n_query == 0) {
      return;
    }
    if (item.n_query > length || pick(0, 3) == 0) {
      // A position of its own, which may lie beyond the end. Rows that a policy may have dropped
      // tokens of are asked for only where the request itself appends them.
      item.query_position = length - std::min<uint64_t>(length, item.n_append) + pick(0, 5);
    }
    if (pick(0, 2) == 0) {
      item.range_begin = static_cast<uint32_t>(request->ranges.size());
      item.n_ranges = pick(1, 4);
      uint64_t at = 0;
      for (uint32_t i = 0; i < item.n_ranges; ++i) {
        const uint64_t begin = at + pick(0, static_cast<uint32_t>(length / 3) + 1);
        at = begin + pick(0, static_cast<uint32_t>(length / 3) + 1);
        request->ranges.push_back({begin, at});
      }
      item.flags |= pick(0, 1) == 0 ? uint32_t{KVM_ITEM_EXCLUDE_RANGES} : 0u;
    }
    if (item.n_query <= 64 && pick(0, 3) == 0) {
      item.flags |= KVM_ITEM_TREE;
      item.tree_begin = static_cast<uint32_t>(request->tree_mask.size());
      for (uint32_t i = 0; i < item.n_query; ++i) {
        const uint64_t below = i == 63 ? ~uint64_t{0} : (uint64_t{2} << i) - 1;
        request->tree_mask.push_back((random_() & below) | uint64_t{1} << i);
      }
    } else if (pick(0, 5) == 0) {
      item.flags |= KVM_ITEM_NOT_CAUSAL;
    }
  }

  void run(StepRequest request, uint32_t append_rows, uint32_t query_rows) {
    const uint32_t n_q_heads = n_kv_heads * group;
    const uint32_t layers = request.n_layers;
    const uint64_t gap = pick(0, 1) * 8;
    Buffer k(static_cast<Dtype>(pick(1, 3)), layers, append_rows, n_kv_heads, dim_k, gap);
    Buffer v(static_cast<Dtype>(pick(1, 3)), layers, append_rows, n_kv_heads, dim_v, gap);
    Buffer q(static_cast<Dtype>(pick(1, 3)), 1, query_rows, n_q_heads, dim_k, gap);
    Buffer o(static_cast<Dtype>(pick(1, 3)), 1, query_rows, n_q_heads, dim_v, gap);
    Buffer lse(Dtype::kF32, 1, query_rows, n_q_heads, 1, gap);
    Buffer err(Dtype::kF32, 1, query_rows, n_q_heads, 2, gap);
    fill(&k, layers, append_rows, n_kv_heads, random_);
    fill(&v, layers, append_rows, n_kv_heads, random_);
    fill(&q, 1, query_rows, n_q_heads, random_);
    if (request.append) {
      request.k = k.view();
      request.v = v.view();
    }
    if (request.attend) {
      request.q = q.view();
      request.o = o.view();
      request.lse = lse.view();
      request.err = err.view();
    }
    request.flags = pick(0, 1) == 0 ? uint32_t{KVM_STEP_F32_VALUES} : 0u;
    const StepRequest copy = request;
    const RequestResult result = rig.run(std::move(request));
    if (has_policy &&
        (result.status.code() == KVM_ERR_PARTIAL || result.status.code() == KVM_ERR_UNSUPPORTED)) {
      ++n_refused;
      return;
    }
    ASSERT_TRUE(result.status.is_ok()) << result.status.message();
    remember(copy, k, v);
    if (copy.attend) {
      check(copy, result, q, o, lse, err);
    }
  }

  Seq& seq_of(kvm_seq_id id) {
    return *std::find_if(seqs.begin(), seqs.end(), [id](const Seq& s) { return s.id == id; });
  }

  void remember(const StepRequest& request, const Buffer& k, const Buffer& v) {
    for (const kvm_item& item : request.items) {
      for (uint32_t l = 0; l < request.n_layers; ++l) {
        for (uint32_t t = 0; t < item.n_append; ++t) {
          std::vector<float> k_row;
          std::vector<float> v_row;
          for (uint32_t h = 0; h < n_kv_heads; ++h) {
            for (const float x : round_row(head_codecs[h], k.get_row(l, item.append_row + t, h))) {
              k_row.push_back(x);
            }
            for (const float x : round_row(head_codecs[h], v.get_row(l, item.append_row + t, h))) {
              v_row.push_back(x);
            }
          }
          ModelLayer& layer = seq_of(item.seq).layers[request.layer_begin + l];
          layer.k.push_back(std::move(k_row));
          layer.v.push_back(std::move(v_row));
        }
      }
    }
  }

  void check(const StepRequest& request, const RequestResult& result, const Buffer& q,
             const Buffer& o, const Buffer& lse, const Buffer& err) {
    const uint32_t layer = request.layer_begin;
    const bool precise = (request.flags & KVM_STEP_F32_VALUES) != 0 && o.dtype() == Dtype::kF32;
    const double bound = (precise ? 2e-4 : 8e-3) * std::sqrt(dim_v);
    uint64_t n_seen = 0;
    for (const kvm_item& item : request.items) {
      const ModelLayer& model = seq_of(item.seq).layers[storage(layer)];
      const uint64_t first = item.query_position == KVM_POSITION_END ? model.k.size() - item.n_query
                                                                     : item.query_position;
      for (uint32_t h = 0; h < n_kv_heads; ++h) {
        Rule rule = head_rules[h];
        rule.group = rules[layer].group;
        rule.window = rules[layer].window;
        rule.scale = rules[layer].scale;
        rule.softcap = rules[layer].softcap;
        for (uint64_t x = 0; x < model.k.size(); ++x) {
          bool seen = false;
          for (uint32_t r = 0; r < item.n_query && !seen; ++r) {
            seen = rule_sees(rule, request, item, first, r, x);
          }
          n_seen += seen ? 1 : 0;
        }
        for (uint32_t r = 0; r < item.n_query; ++r) {
          for (uint32_t g = 0; g < group; ++g) {
            const uint32_t q_head = h * group + g;
            const uint64_t row = uint64_t{item.query_row} + r;
            if (!spec.sink_logits.empty()) {
              rule.sink_logit = &spec.sink_logits[layer * n_kv_heads * group + q_head];
            }
            std::vector<float> q_row;
            for (uint32_t i = 0; i < dim_k; ++i) {
              q_row.push_back(q.get(0, row, q_head, i));
            }
            const Answer answer =
                naive_attention(rule, request, item, first, r, q_head, q_row, model, dim_k, dim_v);
            double distance = 0;
            for (uint32_t i = 0; i < dim_v; ++i) {
              distance += std::pow(double{o.get(0, row, q_head, i)} - answer.o[i], 2);
            }
            ASSERT_LE(std::sqrt(distance), bound) << "row " << r << ", q head " << q_head;
            if (std::isinf(answer.lse)) {
              ASSERT_EQ(double{lse.get(0, row, q_head, 0)}, answer.lse);
            } else {
              ASSERT_NEAR(double{lse.get(0, row, q_head, 0)}, answer.lse, 2e-3);
            }
            ASSERT_EQ(err.get(0, row, q_head, 0), 0.0f);
            ASSERT_EQ(err.get(0, row, q_head, 1), 0.0f);
            ++n_answers;
          }
        }
      }
    }
    EXPECT_EQ(result.keys_present, n_seen);
    EXPECT_EQ(result.keys_read, n_seen);
    EXPECT_EQ(result.mode, uint32_t{KVM_MODE_EXACT});
  }

  std::mt19937_64 random_;

 public:
  Rig rig;
  SpaceSpec spec;
  kvm_space_id space = 0;
  uint32_t n_kv_heads = 0;
  uint32_t group = 0;
  uint32_t dim_k = 0;
  uint32_t dim_v = 0;
  CodecId stored = CodecId::kBf16;
  bool has_policy = false;
  Rule rules[kLayers];
  std::vector<Rule> head_rules;
  std::vector<CodecId> head_codecs;
  std::vector<Seq> seqs;
};

void random_program(World& world, int n_steps) {
  for (int i = 0; i < n_steps && !::testing::Test::HasFatalFailure(); ++i) {
    const uint32_t action = world.pick(0, 11);
    World::Seq& some = world.seqs[world.pick(0, static_cast<uint32_t>(world.seqs.size()) - 1)];
    if (action == 0 && world.seqs.size() < 4) {
      const RequestResult fork = world.rig.verb(SeqVerb::kFork, some.id, KVM_POSITION_END);
      ASSERT_TRUE(fork.status.is_ok()) << fork.status.message();
      World::Seq child{fork.seq, some.layers};
      world.seqs.push_back(std::move(child));
      continue;
    }
    if (action == 1) {
      const uint64_t longest = std::max(some.layers[0].k.size(), some.layers[1].k.size());
      const uint64_t n = longest - std::min<uint64_t>(longest, world.pick(0, 130));
      const RequestResult cut = world.rig.verb(SeqVerb::kTruncate, some.id, n);
      if (cut.status.code() == KVM_ERR_PARTIAL && world.has_policy) {
        continue;
      }
      ASSERT_TRUE(cut.status.is_ok()) << cut.status.message();
      for (ModelLayer& layer : some.layers) {
        layer.k.resize(std::min<uint64_t>(layer.k.size(), n));
        layer.v.resize(layer.k.size());
      }
      continue;
    }
    std::vector<uint32_t> n_append(world.seqs.size());
    std::vector<uint32_t> n_query(world.seqs.size());
    if (action == 2) {  // both storing layers at once
      n_append[world.pick(0, static_cast<uint32_t>(world.seqs.size()) - 1)] = world.pick(1, 200);
      world.step(0, 2, n_append, n_query);
      continue;
    }
    const uint32_t layer = world.pick(0, 2);
    for (size_t s = 0; s < world.seqs.size(); ++s) {
      if (layer != 2 && world.pick(0, 2) != 0) {
        n_append[s] = world.pick(0, 3) == 0 ? world.pick(1, 150) : world.pick(1, 3);
      }
      if (world.pick(0, 3) != 0) {
        n_query[s] = world.pick(0, 4) == 0 ? world.pick(10, 70) : world.pick(1, 3);
      }
    }
    world.step(layer, 1, n_append, n_query);
  }
}

// KVM_SEED=n runs one seed.
std::vector<uint64_t> seeds() {
  if (const char* seed = std::getenv("KVM_SEED")) {
    return {std::strtoull(seed, nullptr, 10)};
  }
  std::vector<uint64_t> all(kSlow ? 4 : 24);
  std::iota(all.begin(), all.end(), uint64_t{1});
  return all;
}

TEST(Step, RandomProgramsAgreeWithTheModel) {
  uint64_t n_answers = 0;
  uint64_t n_refused = 0;
  for (const uint64_t seed : seeds()) {
    SCOPED_TRACE("KVM_SEED=" + std::to_string(seed));
    World world(seed, static_cast<uint32_t>(1 + seed % 3));
    random_program(world, 40);
    n_answers += world.n_answers;
    n_refused += world.n_refused;
    if (HasFailure()) {
      return;
    }
  }
  if (seeds().size() > 1) {
    EXPECT_GT(n_answers, kSlow ? 2000u : 20000u);
    EXPECT_LT(n_refused, 400u);
  }
}

// Units of rows are cut every 64 rows at best, in the middle of a token's group where that is odd.
TEST(Step, RowBlocksMayCutGroups) {
  uint32_t n_worlds = 0;
  for (uint64_t seed = 1; n_worlds < (kSlow ? 1 : 4) && !HasFatalFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    World world(seed, static_cast<uint32_t>(1 + seed % 3));
    if (world.group == 3 || world.group == 7) {
      ++n_worlds;
      world.step(1, 1, {350}, {350});
      EXPECT_GT(world.n_answers, 0u);
    }
  }
}

// A prefill large enough for several row blocks and cut units, in chunks with few threads.
struct Prefill {
  std::vector<std::byte> o;
  std::vector<std::byte> lse;
};

Prefill run_prefill(uint32_t n_threads, const std::vector<uint32_t>& cuts, uint32_t n_query,
                    uint32_t n_decode) {
  constexpr uint32_t kHeads = 2;
  constexpr uint32_t kGroup = 4;
  constexpr uint32_t kDim = 64;
  uint32_t n_tokens = 0;
  for (uint32_t cut : cuts) {
    n_tokens += cut;
  }
  Rig rig(n_threads);
  const kvm_space_id space = rig.space(make_spec("p", 1, kHeads * kGroup, kHeads, kDim));
  const kvm_seq_id seq = rig.create(space);
  std::mt19937_64 random(11);
  Buffer k(Dtype::kBf16, 1, n_tokens, kHeads, kDim);
  Buffer v(Dtype::kBf16, 1, n_tokens, kHeads, kDim);
  Buffer q(Dtype::kBf16, 1, n_query, kHeads * kGroup, kDim);
  Buffer o(Dtype::kF32, 1, n_query, kHeads * kGroup, kDim);
  Buffer lse(Dtype::kF32, 1, n_query, kHeads * kGroup, 1);
  fill(&k, 1, n_tokens, kHeads, random);
  fill(&v, 1, n_tokens, kHeads, random);
  fill(&q, 1, n_query, kHeads * kGroup, random);
  uint32_t row = 0;
  StepRequest step;
  step.space = space;
  step.k = k.view();
  step.v = v.view();
  for (size_t i = 0; i < cuts.size(); ++i) {
    StepRequest part = step;
    part.append = true;
    part.items.push_back(append_item(seq, cuts[i], row));
    row += cuts[i];
    if (i + 1 == cuts.size()) {  // the last cut and the queries in one request
      part.attend = true;
      part.items[0].n_query = n_query - n_decode;
      part.items[0].query_position = n_tokens - n_query;
      for (uint32_t d = 0; d < n_decode; ++d) {
        const uint32_t r = n_query - n_decode + d;
        part.items.push_back(query_item(seq, 1, r, n_tokens - n_query + r));
      }
      part.q = q.view();
      part.o = o.view();
      part.lse = lse.view();
    }
    const RequestResult result = rig.run(part);
    EXPECT_TRUE(result.status.is_ok()) << result.status.message();
  }
  return {o.bytes(), lse.bytes()};
}

TEST(Step, TheSameBitsForAnyThreadsAndAnyCuts) {
  const uint32_t n_query = kSlow ? 40 : 400;
  const uint32_t n = kSlow ? 1000 : 9700;
  const Prefill expected = run_prefill(1, {n - 700, 700}, n_query, 5);
  const std::vector<uint32_t> all_cuts[] = {
      {n - 700, 700}, {1, n / 2, n - n / 2 - 101, 100}, {64, 64, n - 129, 1}, {n}};
  for (const uint32_t n_threads : {1u, 2u, 3u}) {
    for (const std::vector<uint32_t>& cuts : all_cuts) {
      const Prefill got = run_prefill(n_threads, cuts, n_query, 5);
      EXPECT_EQ(got.o, expected.o) << n_threads << " threads, " << cuts.size() << " cuts";
      EXPECT_EQ(got.lse, expected.lse) << n_threads << " threads, " << cuts.size() << " cuts";
    }
  }
}

// The outputs of some requests to a space with random features, whose tokens were appended in
// pieces that `cut_seed` chooses. With other clients, tasks are shorter.
std::vector<std::byte> run_random_space(uint64_t seed, uint64_t cut_seed, uint32_t n_threads,
                                        bool has_company = false) {
  std::mt19937_64 random(seed);
  const auto pick = [&random](uint32_t low, uint32_t high) {
    return std::uniform_int_distribution<uint32_t>(low, high)(random);
  };
  const uint32_t dims[] = {8, 24, 64, 128};
  const uint32_t groups[] = {1, 3, 4, 16};
  const uint32_t n_heads = pick(1, 4);
  const uint32_t group = groups[pick(0, 3)];
  SpaceSpec spec =
      make_spec("bits", 1, n_heads * group, n_heads, dims[pick(0, 3)], dims[pick(0, 3)]);
  const uint32_t dim_k = spec.params.head_dim_k;
  const uint32_t dim_v = spec.params.head_dim_v;
  spec.params.logit_softcap = pick(0, 2) == 0 ? 20.0f : 0.0f;
  if (pick(0, 2) == 0) {
    spec.layers.push_back({.n_layers = 1, .window = pick(1, 3000)});
  }
  const auto some_heads = [&] { return uint64_t{pick(1, (1u << n_heads) - 1)}; };
  if (pick(0, 1) == 0) {
    spec.policies.push_back({.kv_head_mask = {some_heads(), 0},
                             .retention = KVM_RETAIN_SINKS_RECENT,
                             .n_sinks = pick(0, 200),
                             .n_recent = pick(1, 2500)});
  }
  spec.codecs.push_back(
      {.kv_head_mask = {some_heads(), 0}, .codec_k = pick(1, 4), .codec_v = pick(1, 4)});
  for (uint32_t h = 0; pick(0, 1) == 0 && h < n_heads * group; ++h) {
    spec.sink_logits.assign(n_heads * group, 0.5f);
  }
  Rig rig(n_threads);
  if (has_company) {
    (void)rig.engine->add_client({});
  }
  const kvm_space_id space = rig.space(spec);
  const kvm_seq_id seq = rig.create(space, KVM_SEQ_MANUAL_COMMIT);
  const uint32_t n_tokens = kSlow ? pick(1000, 2500) : pick(1000, 12000);
  const uint32_t n_query = pick(1, 90);
  Buffer k(Dtype::kF32, 1, n_tokens, n_heads, dim_k);
  Buffer v(Dtype::kF32, 1, n_tokens, n_heads, dim_v);
  Buffer q(Dtype::kBf16, 1, 2 * n_query, n_heads * group, dim_k);
  Buffer o(Dtype::kF32, 1, 2 * n_query, n_heads * group, dim_v);
  fill(&k, 1, n_tokens, n_heads, random);
  fill(&v, 1, n_tokens, n_heads, random);
  fill(&q, 1, 2 * n_query, n_heads * group, random);
  StepRequest step;
  step.space = space;
  step.k = k.view();
  step.v = v.view();
  std::mt19937_64 cuts(cut_seed);
  for (uint32_t row = 0; row < n_tokens;) {
    const auto n = static_cast<uint32_t>(std::min<uint64_t>(n_tokens - row, 1 + cuts() % 5000));
    StepRequest append = step;
    append.append = true;
    append.items = {append_item(seq, n, row)};
    EXPECT_TRUE(rig.run(append).status.is_ok());
    row += n;
  }
  EXPECT_TRUE(rig.verb(SeqVerb::kCommit, seq, n_tokens - n_query).status.is_ok());
  step.attend = true;
  step.q = q.view();
  step.o = o.view();
  step.items = {query_item(seq, n_query)};
  for (uint32_t r = 0; r < n_query; ++r) {  // the same rows, each as an item of its own
    step.items.push_back(query_item(seq, 1, n_query + r, n_tokens - n_query + r));
    if (pick(0, 2) == 0) {
      step.items.back().range_begin = static_cast<uint32_t>(step.ranges.size());
      step.items.back().n_ranges = 1;
      step.items.back().flags = pick(0, 1) * KVM_ITEM_EXCLUDE_RANGES;
      const uint64_t begin = pick(0, n_tokens);
      step.ranges.push_back({begin, begin + pick(0, n_tokens)});
    }
  }
  const RequestResult result = rig.run(step);
  EXPECT_TRUE(result.status.is_ok()) << result.status.message();
  return o.bytes();
}

TEST(Step, RandomSpacesGiveTheSameBitsOnAnyThreads) {
  for (uint64_t seed = 1; seed <= (kSlow ? 3 : 8) && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const std::vector<std::byte> expected = run_random_space(seed, 1, 1);
    EXPECT_TRUE(run_random_space(seed, 2, 2) == expected);
    EXPECT_TRUE(run_random_space(seed, 3, 4) == expected);
    EXPECT_TRUE(run_random_space(seed, 3, 4, true) == expected);
  }
}

TEST(Step, LongDecodeIsTheSameInABatchAndAlone) {
  constexpr uint32_t kSeqs = 5;
  for (const uint32_t n_threads : {1u, 3u}) {
    Rig rig(n_threads);
    const kvm_space_id space = rig.space(make_spec("d", 1, 8, 2, 128));
    std::mt19937_64 random(3);
    std::vector<kvm_seq_id> seqs;
    for (uint32_t s = 0; s < kSeqs; ++s) {
      const uint32_t n = 100 + 1500 * s;
      Buffer k(Dtype::kBf16, 1, n, 2, 128);
      Buffer v(Dtype::kBf16, 1, n, 2, 128);
      fill(&k, 1, n, 2, random);
      fill(&v, 1, n, 2, random);
      seqs.push_back(rig.create(space));
      StepRequest append;
      append.append = true;
      append.space = space;
      append.items = {append_item(seqs.back(), n)};
      append.k = k.view();
      append.v = v.view();
      ASSERT_TRUE(rig.run(append).status.is_ok());
    }
    Buffer q(Dtype::kBf16, 1, kSeqs, 8, 128);
    Buffer batch(Dtype::kF32, 1, kSeqs, 8, 128);
    Buffer alone(Dtype::kF32, 1, kSeqs, 8, 128);
    fill(&q, 1, kSeqs, 8, random);
    StepRequest attend;
    attend.attend = true;
    attend.space = space;
    attend.q = q.view();
    attend.o = batch.view();
    for (uint32_t s = 0; s < kSeqs; ++s) {
      attend.items.push_back(query_item(seqs[s], 1, s));
    }
    ASSERT_TRUE(rig.run(attend).status.is_ok());
    attend.o = alone.view();
    for (uint32_t s = 0; s < kSeqs; ++s) {
      attend.items = {query_item(seqs[s], 1, s)};
      ASSERT_TRUE(rig.run(attend).status.is_ok());
    }
    EXPECT_EQ(batch.bytes(), alone.bytes());
  }
}

}  // namespace
}  // namespace kvm::engine::testing
