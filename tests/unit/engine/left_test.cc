// SPDX-License-Identifier: Apache-2.0
// Requests of which some heads are approximated and others are left to exact attention, a second
// job: random ones, against the exact answers of the same rows, and one that ends at any point.
//
//   KVM_SEED=1000 KVM_LEFT_WORLDS=900 build/dev/bin/engine_left_test
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "codecs/codec.h"
#include "tests/common/environment.h"
#include "tests/unit/engine/rig.h"

namespace kvm::engine::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// What the keys and values of a head look like.
enum class Kind : uint8_t { kEasy, kNoise, kNanKey, kBadValue };

// A World is an engine with a space of random features and some sequences in it.
struct World : Rig {
  static constexpr const char* kRates =
      "exact_bf16=1300,exact_int8=1000,scan=1.5,gather=28,start=100,threads=1";
  static EngineOptions options_of(uint32_t n_threads) {
    EngineOptions options = make_options(n_threads);
    options.cost_model = kRates;
    return options;
  }
  World(uint64_t seed, uint32_t n_threads) : Rig(options_of(n_threads)), random(seed) {
    n_kv_heads = pick(1, 4);
    const uint32_t groups[] = {1, 2, 4, 3};
    group = groups[pick(0, 3)];
    const uint32_t dims[] = {8, 16, 32, 48, 64, 128};
    dim_k = dims[pick(0, 5)];
    dim_v = pick(0, 1) == 0 ? dim_k : dims[pick(0, 5)];
    SpaceSpec spec = make_spec("left", 1, n_kv_heads * group, n_kv_heads, dim_k, dim_v);
    const CodecId codecs[] = {CodecId::kBf16, CodecId::kBf16, CodecId::kF16,
                              CodecId::kF32,  CodecId::kI8,   CodecId::kF8};
    codec = codecs[pick(0, 5)];
    spec.params.codec = static_cast<uint32_t>(codec);
    spec.params.logit_softcap = pick(0, 4) == 0 ? 20.0f : 0.0f;
    if (pick(0, 3) == 0) {
      spec.sink_logits.assign(n_kv_heads * group, 0.5f);
    }
    if (pick(0, 4) == 0) {
      kvm_layer_params layer{};
      layer.n_layers = 1;
      layer.window = pick(500, 6000);
      spec.layers = {layer};
    }
    // HEAVY goes with no window, and its heads have no index.
    const uint64_t all = (uint64_t{1} << n_kv_heads) - 1;
    const uint32_t policy = pick(0, 3);
    if (policy == 1) {
      kvm_policy_params p{};
      p.kv_head_mask[0] = pick(1, static_cast<uint32_t>(all));
      p.retention = KVM_RETAIN_SINKS_RECENT;
      p.n_sinks = pick(0, 70);
      p.n_recent = pick(1000, 5000);
      p.slack = 256;
      spec.policies = {p};
    } else if (policy == 2 && spec.layers.empty()) {
      kvm_policy_params p{};
      p.kv_head_mask[0] = pick(1, static_cast<uint32_t>(all));
      p.retention = KVM_RETAIN_HEAVY;
      p.n_recent = 512;
      p.n_heavy = 1024;
      spec.policies = {p};
    }
    const uint32_t kinds[] = {KVM_INDEX_SKETCH, KVM_INDEX_SKETCH_1BIT, KVM_INDEX_SKETCH_8I8,
                              KVM_INDEX_SKETCH_2BIT};
    kvm_index_params index = make_index(kinds[pick(0, 3)]);
    index.n_recent = pick(0, 200);
    index.n_sinks = pick(0, 100);
    spec.indexes = {index};
    auto registered = engine->register_space(spec);
    if (!registered.is_ok()) {
      refused = registered.status().message();
      return;
    }
    id = registered.value();
    for (uint32_t i = pick(1, 3); i != 0; --i) {
      add_sequence();
    }
  }
  uint32_t pick(uint32_t low, uint32_t high) {
    return std::uniform_int_distribution<uint32_t>(low, high)(random);
  }
  uint32_t n_q_heads() const { return n_kv_heads * group; }

  void add_sequence() {
    const uint32_t lengths[] = {0, pick(1, 300), pick(2400, 4500), pick(2400, 4500),
                                pick(2400, 4500)};
    const uint32_t length = lengths[pick(0, 4)];
    seqs.push_back(create(id));
    lengths_of.push_back(length);
    if (length != 0) {
      append(seqs.back(), length, true);
    }
  }
  void append(kvm_seq_id seq, uint32_t n, bool expect) {
    Buffer k(Dtype::kF32, 1, n, n_kv_heads, dim_k);
    Buffer v(Dtype::kF32, 1, n, n_kv_heads, dim_v);
    make_rows(n, &k, &v);
    StepRequest step;
    step.append = true;
    step.space = id;
    step.items = {append_item(seq, n)};
    step.k = k.view();
    step.v = v.view();
    const RequestResult result = run(std::move(step));
    EXPECT_TRUE(!expect || result.status.is_ok()) << result.status.message();
  }
  void make_rows(uint32_t n, Buffer* k, Buffer* v) {
    fill(k, 1, n, n_kv_heads, random, 1.0f);
    fill(v, 1, n, n_kv_heads, random);
    for (uint32_t h = 0; h < n_kv_heads; ++h) {
      const auto kind = static_cast<Kind>(pick(0, 9) < 7 ? pick(0, 1) : pick(2, 3));
      for (uint32_t t = 0; t < n; ++t) {
        for (uint32_t i = 0; i < dim_k && kind != Kind::kNoise; ++i) {
          k->set(0, t, h, i, 0.2f * k->get(0, t, h, i));
        }
        for (uint32_t i = 0; i < dim_v && kind != Kind::kNoise; ++i) {
          v->set(0, t, h, i, 1.0f + 0.02f * v->get(0, t, h, i));
        }
      }
      const uint32_t bad = pick(0, n - 1);
      if (kind == Kind::kNanKey) {
        k->set(0, bad, h, pick(0, dim_k - 1), kNan);
      } else if (kind == Kind::kBadValue) {
        v->set(0, bad, h, pick(0, dim_v - 1), pick(0, 1) == 0 ? kNan : kInfinity);
      }
    }
  }

  std::mt19937_64 random;
  uint32_t n_kv_heads = 0;
  uint32_t group = 0;
  uint32_t dim_k = 0;
  uint32_t dim_v = 0;
  CodecId codec = CodecId::kBf16;
  std::string refused;
  kvm_space_id id = 0;
  std::vector<kvm_seq_id> seqs;
  std::vector<uint32_t> lengths_of;
};

struct Got {
  RequestResult result;
  Buffer o, lse, err;
};

struct Asked {
  StepRequest step;  // without tensors but q, k and v
  uint32_t n_rows = 0;
  Dtype dtype_o = Dtype::kF32;
  bool wants_lse = true;
  bool wants_err = true;
  uint64_t gap = 0;
  Buffer q, k, v;
};

Asked make_request(World* w) {
  Asked a;
  StepRequest& step = a.step;
  step.attend = true;
  step.space = w->id;
  // The rates below make AUTO take VERIFIED for whatever has an index.
  const uint32_t modes[] = {KVM_MODE_AUTO,    KVM_MODE_AUTO,    KVM_MODE_AUTO, KVM_MODE_VERIFIED,
                            KVM_MODE_SAMPLED, KVM_MODE_SAMPLED, KVM_MODE_TOPK};
  step.mode = modes[w->pick(0, 6)];
  const bool has_budget =
      step.mode == KVM_MODE_TOPK || (step.mode != KVM_MODE_VERIFIED && w->pick(0, 3) == 0);
  const float errors[] = {0.3f, 0.05f, 0.01f};
  if (!has_budget) {
    step.eps = errors[w->pick(0, 2)];
  } else {
    step.budget = step.mode == KVM_MODE_AUTO ? w->pick(1, 100000) : w->pick(50, 600);
  }
  step.seed = w->pick(0, 1000);
  step.flags = w->pick(0, 1) == 0 ? KVM_STEP_F32_VALUES : 0;
  uint32_t row = 0;
  uint32_t append_row = 0;
  step.append = w->pick(0, 2) == 0;
  for (size_t i = 0; i < w->seqs.size(); ++i) {
    const uint32_t n_more = step.append ? w->pick(0, 1) * w->pick(1, 200) : 0;
    const uint32_t length = w->lengths_of[i] + n_more;
    const uint32_t counts[] = {0, 1, 1, w->pick(1, 4), w->pick(1, 20)};
    const uint32_t n = std::min(counts[w->pick(0, 4)], length);
    kvm_item item = query_item(w->seqs[i], n, row);
    item.n_append = n_more;
    item.append_position = KVM_POSITION_END;
    item.append_row = append_row;
    append_row += n_more;
    if (n != 0 && w->pick(0, 5) == 0) {
      item.query_position = length - w->pick(0, std::min(length, 50u));
    }
    const uint32_t feature = w->pick(0, 7);
    if (feature == 0 && n != 0) {
      item.flags |= KVM_ITEM_NOT_CAUSAL;
    } else if (feature == 1 && n != 0) {
      item.flags |= KVM_ITEM_TREE;
      item.tree_begin = static_cast<uint32_t>(step.tree_mask.size());
      for (uint32_t r = 0; r < n; ++r) {
        step.tree_mask.push_back((w->random() & ((uint64_t{2} << r) - 1)) | uint64_t{1} << r);
      }
    }
    if (w->pick(0, 4) == 0 && length > 100 && n != 0) {
      item.range_begin = static_cast<uint32_t>(step.ranges.size());
      item.n_ranges = w->pick(1, 3);
      uint64_t at = 0;
      for (uint32_t r = 0; r < item.n_ranges; ++r) {
        kvm_range range{};
        range.begin = at + w->pick(0, length / 3);
        range.end = range.begin + w->pick(0, length / 2);
        at = range.end;
        step.ranges.push_back(range);
      }
      item.flags |= w->pick(0, 1) == 0 ? uint32_t{KVM_ITEM_EXCLUDE_RANGES} : 0u;
    }
    row += n;
    step.items.push_back(item);
  }
  a.n_rows = row;
  const Dtype dtypes[] = {Dtype::kF32, Dtype::kF32, Dtype::kBf16, Dtype::kF16};
  a.gap = w->pick(0, 1) * 8;
  a.dtype_o = dtypes[w->pick(0, 3)];
  a.wants_lse = w->pick(0, 3) != 0;
  a.wants_err = w->pick(0, 7) != 0;
  a.q = Buffer(dtypes[w->pick(0, 3)], 1, std::max(row, 1u), w->n_q_heads(), w->dim_k, a.gap);
  fill(&a.q, 1, row, w->n_q_heads(), w->random, 1.0f);
  if (row != 0 && w->pick(0, 5) == 0) {
    a.q.set(0, w->pick(0, row - 1), w->pick(0, w->n_q_heads() - 1), 3, kNan);
  }
  step.append = append_row != 0;
  if (step.append) {
    a.k = Buffer(Dtype::kF32, 1, append_row, w->n_kv_heads, w->dim_k);
    a.v = Buffer(Dtype::kF32, 1, append_row, w->n_kv_heads, w->dim_v);
    w->make_rows(append_row, &a.k, &a.v);
  }
  return a;
}

StepRequest with_tensors(World* w, Asked* a, Got* got) {
  const uint32_t n = std::max(a->n_rows, 1u);
  got->o = Buffer(a->dtype_o, 1, n, w->n_q_heads(), w->dim_v, a->gap);
  got->lse = Buffer(Dtype::kF32, 1, n, w->n_q_heads(), 1, a->gap);
  got->err = Buffer(Dtype::kF32, 1, n, w->n_q_heads(), 2, a->gap);
  StepRequest step = a->step;
  step.q = a->q.view();
  step.o = got->o.view();
  if (a->wants_lse) {
    step.lse = got->lse.view();
  }
  if (a->wants_err) {
    step.err = got->err.view();
  }
  if (step.append) {
    step.k = a->k.view();
    step.v = a->v.view();
  }
  return step;
}

Got ask(World* w, Asked* a, bool exactly) {
  Got got;
  StepRequest step = with_tensors(w, a, &got);
  if (exactly) {
    step.mode = KVM_MODE_EXACT;
    step.proposal = KVM_PROPOSAL_DEFAULT;
    step.budget = step.seed = 0;
    step.eps = step.delta = 0;
  }
  // On forks: the request may append.
  std::vector<kvm_seq_id> forks;
  for (kvm_item& item : step.items) {
    forks.push_back(w->verb(SeqVerb::kFork, item.seq, KVM_POSITION_END).seq);
    item.seq = forks.back();
  }
  got.result = w->run(std::move(step));
  for (const kvm_seq_id fork : forks) {
    EXPECT_TRUE(w->verb(SeqVerb::kFree, fork).status.is_ok());
  }
  return got;
}

struct Counts {
  uint64_t n_left = 0;
  uint64_t n_mixed = 0;
  uint64_t n_nan = 0;
  uint64_t n_ok = 0;
};

void check(World* w, Asked* a, const Got& got, const Got& exact, Counts* counts) {
  uint64_t n_nan = 0;
  uint64_t n_zero = 0;
  uint64_t n_other = 0;
  float worst = 0;
  for (uint32_t r = 0; r < a->n_rows; ++r) {
    for (uint32_t h = 0; h < w->n_q_heads(); ++h) {
      const bool is_nan = std::isnan(got.o.get(0, r, h, 0));
      const bool should_be = std::isnan(exact.o.get(0, r, h, 0));
      n_nan += is_nan ? 1 : 0;
      if (a->step.mode != KVM_MODE_TOPK && a->step.budget == 0) {
        ASSERT_EQ(is_nan, should_be) << "row " << r << " head " << h;
      } else {
        ASSERT_TRUE(!is_nan || should_be) << "row " << r << " head " << h;
      }
      for (uint32_t i = 0; i < w->dim_v; ++i) {
        ASSERT_EQ(std::isnan(got.o.get(0, r, h, i)), is_nan);
      }
      if (!a->wants_err) {
        continue;
      }
      const float err = got.err.get(0, r, h, 0);
      worst = std::isnan(err) || std::isnan(worst) ? kNan : std::max(worst, err);
      if (is_nan) {
        ASSERT_TRUE(std::isnan(err)) << "row " << r << " head " << h << " " << err;
        ASSERT_TRUE(std::isnan(got.err.get(0, r, h, 1)));
      } else if (err == 0) {
        ++n_zero;
        for (uint32_t i = 0; i < w->dim_v; ++i) {
          ASSERT_EQ(got.o.get(0, r, h, i), exact.o.get(0, r, h, i))
              << "row " << r << " head " << h << " channel " << i;
        }
        if (a->wants_lse) {
          ASSERT_EQ(got.lse.get(0, r, h, 0), exact.lse.get(0, r, h, 0));
        }
      } else {
        ++n_other;
      }
    }
  }
  const RequestResult& result = got.result;
  EXPECT_EQ(result.n_not_finite, n_nan);
  EXPECT_LE(result.keys_read, result.keys_present);
  EXPECT_EQ(result.keys_present, exact.result.keys_present);
  if (a->wants_err) {
    EXPECT_GE(result.n_exact, n_zero);
    EXPECT_LE(result.n_exact, n_zero + n_nan);
    if (std::isnan(worst)) {
      EXPECT_TRUE(std::isnan(result.err_max)) << result.err_max;
    } else {
      EXPECT_EQ(result.err_max, worst);
    }
  }
  counts->n_mixed += n_zero != 0 && n_other != 0 ? 1 : 0;
  counts->n_left += n_zero;
  counts->n_nan += n_nan;
  ++counts->n_ok;
}

TEST(Left, RandomRequestsAnswerAsExactOnesWhereTheyAreExact) {
  const uint64_t first = kvm::testing::number_from_environment("KVM_SEED", 0);
  const uint64_t n = kvm::testing::number_from_environment("KVM_LEFT_WORLDS", 4);
  Counts counts;
  for (uint64_t seed = first; seed < first + n; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    World one(seed, 1);
    if (!one.refused.empty()) {
      continue;
    }
    World three(seed, 3);
    for (uint32_t i = 0; i < 12; ++i) {
      SCOPED_TRACE("request " + std::to_string(i));
      Asked a = make_request(&one);
      Asked same = make_request(&three);
      const Got exact = ask(&one, &a, true);
      const Got got = ask(&one, &a, false);
      const Got threads = ask(&three, &same, false);
      ASSERT_EQ(got.result.status.code(), threads.result.status.code());
      if (!exact.result.status.is_ok() || !got.result.status.is_ok()) {
        EXPECT_EQ(got.result.status.code(), exact.result.status.code());
        continue;
      }
      check(&one, &a, got, exact, &counts);
      {
        EXPECT_EQ(got.o.bytes(), threads.o.bytes());
        EXPECT_EQ(got.lse.bytes(), threads.lse.bytes());
        EXPECT_EQ(got.err.bytes(), threads.err.bytes());
        EXPECT_EQ(got.result.n_exact, threads.result.n_exact);
        EXPECT_EQ(got.result.keys_read, threads.result.keys_read);
        EXPECT_EQ(got.result.bytes_read, threads.result.bytes_read);
        EXPECT_EQ(got.result.n_not_finite, threads.result.n_not_finite);
      }
      if (::testing::Test::HasFailure()) {
        ADD_FAILURE() << "mode " << a.step.mode << ", budget " << a.step.budget << ", heads "
                      << one.n_kv_heads << ", group " << one.group << ", dims " << one.dim_k << " "
                      << one.dim_v << ", stored as " << codecs::codec_of(one.codec).name;
        return;
      }
    }
  }
  // The requests above reach every kind of answer.
  EXPECT_GT(counts.n_ok, 20u);
  EXPECT_GT(counts.n_left, 20u);
  EXPECT_GT(counts.n_mixed, 0u);
  EXPECT_GT(counts.n_nan, 20u);
}

// An engine whose driver is stepped by hand, and a step of which one head is sampled and another
// left.
struct Stepped : Rig {
  static constexpr uint32_t kHeads = 3;
  static constexpr uint32_t kDim = 64;
  static constexpr uint32_t kTokens = 1100;

  explicit Stepped(uint32_t n_threads) : Rig(n_threads) {
    SpaceSpec spec = make_spec("stepped", 1, kHeads, kHeads, kDim);
    spec.indexes = {make_index()};
    id = space(spec);
    leaver = engine->add_client({});
    fill_sequence();
  }
  void fill_sequence() {
    SeqRequest create;
    create.space = id;
    seq = run(create, leaver).seq;
    std::mt19937_64 random(5);
    StepRequest step;
    step.append = true;
    step.space = id;
    step.items = {append_item(seq, kTokens)};
    fill(&k, 1, kTokens, kHeads, random);
    fill(&v, 1, kTokens, kHeads, random);
    k.set(0, 700, 1, 3, kNan);
    v.set(0, 900, 2, 3, kInfinity);
    step.k = k.view();
    step.v = v.view();
    const Status status = run(std::move(step), leaver).status;
    ASSERT_TRUE(status.is_ok()) << status.message();
  }
  void submit() {
    std::mt19937_64 random(6);
    fill(&q, 1, 1, kHeads, random);
    StepRequest step;
    step.append = step.attend = true;
    step.space = id;
    kvm_item item = query_item(seq, 1);
    item.n_append = 1;
    step.items = {item};
    step.mode = KVM_MODE_SAMPLED;
    step.budget = 300;
    step.k = k.view();
    step.v = v.view();
    step.q = q.view();
    step.o = o.view();
    step.err = err.view();
    engine->submit(leaver, {7, 7}, std::move(step), [this](RequestResult&& r) {
      ++n_called;
      result = std::move(r);
    });
  }
  // Does the next bit, or waits for others to do theirs.
  void advance() {
    if (engine->poll() == 0 && !engine->work()) {
      engine->wait(1'000'000);
    }
  }

  Buffer k{Dtype::kF32, 1, kTokens, kHeads, kDim};
  Buffer v{Dtype::kF32, 1, kTokens, kHeads, kDim};
  Buffer q{Dtype::kF32, 1, 1, kHeads, kDim};
  Buffer o{Dtype::kF32, 1, 1, kHeads, kDim};
  Buffer err{Dtype::kF32, 1, 1, kHeads, 2};
  kvm_space_id id = 0;
  ClientId leaver = 0;
  kvm_seq_id seq = 0;
  uint32_t n_called = 0;
  RequestResult result;
};

// way 0: the client leaves; 1: it cancels; 2: the engine ends.
TEST(Left, RequestsEndAtAnyPoint) {
  for (const uint32_t n_threads : {1u, 3u}) {
    for (uint32_t way = 0; way < 3; ++way) {
      for (uint32_t n = 0;; ++n) {
        SCOPED_TRACE(std::to_string(n_threads) + " threads, way " + std::to_string(way) +
                     ", step " + std::to_string(n));
        Stepped world(n_threads);
        world.submit();
        for (uint32_t i = 0; i < n && world.n_called == 0; ++i) {
          world.advance();
        }
        const bool was_done = world.n_called != 0;
        if (way == 0) {
          bool is_gone = false;
          world.engine->remove_client(world.leaver, [&] { is_gone = true; });
          world.drive(is_gone);
          EXPECT_EQ(world.n_called, was_done ? 1u : 0u);
          const kvm_stats stats = world.engine->stats();
          EXPECT_EQ(stats.n_sequences, 0u);
          EXPECT_EQ(stats.host_page_bytes, 0u);
          EXPECT_EQ(stats.index_bytes, 0u);
          EXPECT_EQ(world.engine->n_in_flight(), 0u);
        } else if (way == 1) {
          EXPECT_EQ(world.engine->cancel(world.leaver, {7, 7}), !was_done);
          while (world.n_called == 0) {
            world.advance();
          }
          const bool is_cancelled = world.result.status.code() == KVM_ERR_CANCELLED;
          EXPECT_TRUE(is_cancelled || world.result.status.is_ok());
          if (!is_cancelled) {
            EXPECT_EQ(world.result.n_exact, 2u);
            EXPECT_EQ(world.result.n_not_finite, 2u);
            EXPECT_TRUE(std::isnan(world.o.get(0, 0, 1, 5)) && std::isnan(world.o.get(0, 0, 2, 5)));
            EXPECT_FALSE(std::isnan(world.o.get(0, 0, 0, 5)));
          }
          EXPECT_EQ(world.engine->seq_info(world.leaver, world.seq).value().n_tokens_max,
                    Stepped::kTokens + (is_cancelled ? 0 : 1));
        }
        world.engine.reset();  // with the request in it, where it neither left nor ended
        if (was_done) {
          EXPECT_GT(n, 3u);
          break;
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvm::engine::testing
