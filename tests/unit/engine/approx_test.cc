// SPDX-License-Identifier: Apache-2.0
// The approximate modes through the whole engine: against its own exact answers, with what requests
// report, whatever the threads and the cuts of appends.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "tests/unit/engine/rig.h"

namespace kvm::engine::testing {
namespace {

constexpr uint32_t kKvHeads = 2;
constexpr uint32_t kGroup = 2;
constexpr uint32_t kQHeads = kKvHeads * kGroup;
constexpr uint32_t kDim = 64;
constexpr uint32_t kTokens = 6000;
constexpr uint32_t kLongTokens = 60'000;

SpaceSpec indexed_spec(uint32_t kind, const std::string& name = "approx") {
  SpaceSpec spec = make_spec(name, 1, kQHeads, kKvHeads, kDim);
  if (kind != KVM_INDEX_NONE) {
    spec.indexes = {make_index(kind)};
  }
  return spec;
}

// K and V of some tokens, the same for every rig.
struct Tokens {
  explicit Tokens(uint32_t count, uint64_t seed = 7)
      : n(count),
        k(Dtype::kF32, 1, count, kKvHeads, kDim),
        v(Dtype::kF32, 1, count, kKvHeads, kDim) {
    std::mt19937_64 random(seed);
    fill(&k, 1, n, kKvHeads, random, 1.5f);
    fill(&v, 1, n, kKvHeads, random);
    for (uint32_t t = 0; t < n; ++t) {
      for (uint32_t h = 0; h < kKvHeads; ++h) {
        v.set(0, t, h, t % 7, v.get(0, t, h, t % 7) + 3.0f);
      }
    }
  }
  uint32_t n;
  Buffer k;
  Buffer v;
};

struct Asked {
  uint32_t mode = KVM_MODE_EXACT;
  uint32_t proposal = KVM_PROPOSAL_DEFAULT;
  float eps = 0;
  float delta = 0;
  uint64_t budget = 0;
  uint64_t seed = 0;
};

struct Got {
  RequestResult result;
  Buffer o;
  Buffer lse;
  Buffer err;
};

struct World : Rig {
  explicit World(uint32_t kind, uint32_t n_threads = 1) : World(indexed_spec(kind), n_threads) {}
  explicit World(const SpaceSpec& spec, uint32_t n_threads = 1)
      : Rig(n_threads), id(space(spec)), seq(create(id)) {}

  void append(Tokens* tokens, uint32_t first, uint32_t n) {
    StepRequest step;
    step.append = true;
    step.space = id;
    step.items = {append_item(seq, n, first)};
    step.k = tokens->k.view();
    step.v = tokens->v.view();
    const RequestResult result = run(std::move(step));
    ASSERT_TRUE(result.status.is_ok()) << result.status.message();
  }
  Got attend(const Asked& asked, uint32_t n_query = 1, kvm_seq_id of = 0) {
    Buffer q(Dtype::kF32, 1, n_query, kQHeads, kDim);
    std::mt19937_64 random(n_query);
    fill(&q, 1, n_query, kQHeads, random, 1.5f);
    return attend_with(&q, asked, n_query, of);
  }
  Got attend_with(Buffer* query, const Asked& asked, uint32_t n_query = 1, kvm_seq_id of = 0) {
    Buffer& q = *query;
    Got got;
    got.o = Buffer(Dtype::kF32, 1, n_query, kQHeads, kDim);
    got.lse = Buffer(Dtype::kF32, 1, n_query, kQHeads, 1);
    got.err = Buffer(Dtype::kF32, 1, n_query, kQHeads, 2);
    StepRequest step;
    step.attend = true;
    step.space = id;
    step.flags = KVM_STEP_F32_VALUES;
    step.items = {query_item(of == 0 ? seq : of, n_query)};
    step.mode = asked.mode;
    step.proposal = asked.proposal;
    step.eps = asked.eps;
    step.delta = asked.delta;
    step.budget = asked.budget;
    step.seed = asked.seed;
    step.q = q.view();
    step.o = got.o.view();
    step.lse = got.lse.view();
    step.err = got.err.view();
    got.result = run(std::move(step));
    EXPECT_TRUE(got.result.status.is_ok()) << got.result.status.message();
    return got;
  }

  kvm_space_id id;
  kvm_seq_id seq;
};

double relative_error(const Got& got, const Got& exact, uint32_t row, uint32_t head) {
  double difference = 0;
  double norm = 0;
  for (uint32_t i = 0; i < kDim; ++i) {
    const double a = double{got.o.get(0, row, head, i)};
    const double b = double{exact.o.get(0, row, head, i)};
    difference += (a - b) * (a - b);
    norm += b * b;
  }
  return std::sqrt(difference / norm);
}

bool same_bits(const Got& a, const Got& b) {
  return a.o.bytes() == b.o.bytes() && a.lse.bytes() == b.lse.bytes() &&
         a.err.bytes() == b.err.bytes();
}

void fill_world(World* world, Tokens* tokens) { world->append(tokens, 0, tokens->n); }

TEST(Approx, SampledKeepsItsBar) {
  Tokens tokens(kTokens);
  World world(KVM_INDEX_SKETCH);
  fill_world(&world, &tokens);
  const Got exact = world.attend({});
  EXPECT_EQ(exact.result.mode, uint32_t{KVM_MODE_EXACT});
  uint32_t n_missed = 0;
  uint32_t n_trials = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const Got got =
        world.attend({.mode = KVM_MODE_SAMPLED, .delta = 0.1f, .budget = 600, .seed = seed});
    ASSERT_EQ(got.result.mode, uint32_t{KVM_MODE_SAMPLED});
    EXPECT_EQ(got.result.keys_present, uint64_t{kTokens} * kKvHeads);
    EXPECT_LT(got.result.keys_read, got.result.keys_present / 2);
    EXPECT_GT(got.result.keys_read, 600u);
    EXPECT_LT(got.result.bytes_read, exact.result.bytes_read);
    EXPECT_EQ(got.result.n_exact, 0u);
    float worst = 0;
    for (uint32_t head = 0; head < kQHeads; ++head) {
      const float bar = got.err.get(0, 0, head, 0);
      ASSERT_GT(bar, 0.0f);
      ASSERT_LT(bar, 0.5f);
      worst = std::max(worst, bar);
      n_missed += relative_error(got, exact, 0, head) > double{bar} ? 1 : 0;
      ++n_trials;
      EXPECT_NEAR(got.lse.get(0, 0, head, 0), exact.lse.get(0, 0, head, 0), 0.1f);
    }
    EXPECT_EQ(got.result.err_max, worst);
  }
  EXPECT_LE(n_missed, n_trials / 5) << "of " << n_trials;
}

// A key that lies further out than leading coordinates reach would be put far too low each time.
TEST(Approx, KeysBeyondTheRangeOfTheirCodesAreReadExactly) {
  Tokens tokens(kTokens);
  for (uint32_t h = 0; h < kKvHeads; ++h) {
    for (uint32_t t = 0; t < kTokens; ++t) {
      for (uint32_t i = 8; i < kDim; ++i) {
        tokens.k.set(0, t, h, i, 0.1f * tokens.k.get(0, t, h, i));
      }
    }
    tokens.k.set(0, 5000, h, 0, 100.0f);
  }
  World world(KVM_INDEX_SKETCH_8I8);
  fill_world(&world, &tokens);
  Buffer q(Dtype::kF32, 1, 1, kQHeads, kDim);
  for (uint32_t head = 0; head < kQHeads; ++head) {
    for (uint32_t i = 0; i < kDim; ++i) {
      q.set(0, 0, head, i, i == 0 ? 1.0f : 0.01f);
    }
  }
  const Got exact = world.attend_with(&q, {});
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const Got got = world.attend_with(&q, {.mode = KVM_MODE_SAMPLED, .budget = 8, .seed = seed});
    ASSERT_EQ(got.result.mode, uint32_t{KVM_MODE_SAMPLED});
    EXPECT_LT(got.result.keys_read, got.result.keys_present / 4);
    for (uint32_t head = 0; head < kQHeads; ++head) {
      EXPECT_LT(relative_error(got, exact, 0, head), 0.1) << seed;
    }
  }
}

TEST(Approx, VerifiedMeetsEpsOrIsExact) {
  Tokens tokens(kTokens);
  World world(KVM_INDEX_SKETCH_2BIT);
  fill_world(&world, &tokens);
  const Got exact = world.attend({});
  for (const float eps : {0.2f, 0.05f, 0.001f}) {
    SCOPED_TRACE("eps " + std::to_string(eps));
    const Got got = world.attend({.mode = KVM_MODE_VERIFIED, .eps = eps, .seed = 3});
    EXPECT_LE(got.result.err_max, eps);
    EXPECT_LE(got.result.n_exact, kQHeads);
    for (uint32_t head = 0; head < kQHeads; ++head) {
      EXPECT_LE(got.err.get(0, 0, head, 0), eps);
      EXPECT_LE(relative_error(got, exact, 0, head), double{eps});
    }
  }
}

// Shorter contexts are exact before anything is drawn (attention/sampled/pilot.h).
TEST(Approx, VerifiedReadsFewKeysOfALongContext) {
  Tokens tokens(kLongTokens);
  World world(KVM_INDEX_SKETCH);
  fill_world(&world, &tokens);
  const Got exact = world.attend({});
  const Asked asked = {.mode = KVM_MODE_VERIFIED, .eps = 0.2f, .seed = 3};
  const Got got = world.attend(asked);
  EXPECT_LT(got.result.n_exact, kQHeads);
  EXPECT_LT(got.result.keys_read, got.result.keys_present / 2);
  EXPECT_LE(got.result.err_max, asked.eps);
  for (uint32_t head = 0; head < kQHeads; ++head) {
    EXPECT_LE(relative_error(got, exact, 0, head), double{asked.eps});
  }
  World threads(indexed_spec(KVM_INDEX_SKETCH), 3);
  fill_world(&threads, &tokens);
  EXPECT_TRUE(same_bits(threads.attend(asked), got));
}

// A budget goes before time: a short context is sampled where few keys suffice, and only there.
TEST(Approx, VerifiedWithABudgetReadsNoMoreForEachRow) {
  Tokens tokens(kTokens);
  World world(KVM_INDEX_SKETCH_2BIT);
  fill_world(&world, &tokens);
  const Got exact = world.attend({});
  const auto ask = [&](float eps, uint64_t budget) {
    return world.attend({.mode = KVM_MODE_VERIFIED, .eps = eps, .budget = budget, .seed = 3});
  };
  EXPECT_EQ(ask(0.2f, 0).result.n_exact, kQHeads);
  const Got sampled = ask(0.2f, 2000);
  EXPECT_EQ(sampled.result.mode, uint32_t{KVM_MODE_VERIFIED});
  EXPECT_EQ(sampled.result.n_exact, 0u);
  EXPECT_LT(sampled.result.keys_read, sampled.result.keys_present * 3 / 4);
  EXPECT_LT(sampled.result.bytes_read, exact.result.bytes_read);
  EXPECT_LE(sampled.result.err_max, 0.2f);
  for (uint32_t head = 0; head < kQHeads; ++head) {
    EXPECT_GT(sampled.err.get(0, 0, head, 0), 0.0f);
    EXPECT_LE(relative_error(sampled, exact, 0, head), 0.2);
  }
  // More than it may read, and more than there is.
  for (const auto& [eps, budget] : {std::pair{0.2f, uint64_t{16}}, {0.001f, UINT64_MAX}}) {
    const Got all = ask(eps, budget);
    EXPECT_EQ(all.result.n_exact, kQHeads) << budget;
    EXPECT_EQ(all.result.err_max, 0.0f);
    EXPECT_LT(relative_error(all, exact, 0, 0), 1e-5);
  }
  World threads(indexed_spec(KVM_INDEX_SKETCH_2BIT), 3);
  fill_world(&threads, &tokens);
  EXPECT_TRUE(
      same_bits(threads.attend({.mode = KVM_MODE_VERIFIED, .eps = 0.2f, .budget = 2000, .seed = 3}),
                sampled));
}

TEST(Approx, TopKReadsItsBudgetAndHasNoBar) {
  Tokens tokens(kTokens);
  World world(KVM_INDEX_SKETCH_8I8);
  fill_world(&world, &tokens);
  const Got exact = world.attend({});
  const Got got = world.attend({.mode = KVM_MODE_TOPK, .budget = 500});
  EXPECT_EQ(got.result.mode, uint32_t{KVM_MODE_TOPK});
  EXPECT_TRUE(std::isnan(got.result.err_max));
  EXPECT_TRUE(std::isnan(got.err.get(0, 0, 0, 0)));
  EXPECT_LT(got.result.keys_read, got.result.keys_present);
  for (uint32_t head = 0; head < kQHeads; ++head) {
    // What is left out is missing.
    EXPECT_LT(got.lse.get(0, 0, head, 0), exact.lse.get(0, 0, head, 0));
    EXPECT_LT(relative_error(got, exact, 0, head), 1.0);
  }
}

TEST(Approx, LshModesAnswer) {
  Tokens tokens(kTokens);
  World world(KVM_INDEX_LSH);
  fill_world(&world, &tokens);
  const Got exact = world.attend({});
  const Got got = world.attend({.mode = KVM_MODE_SAMPLED});
  EXPECT_EQ(got.result.mode, uint32_t{KVM_MODE_SAMPLED});
  EXPECT_TRUE(std::isnan(got.result.err_max));
  for (uint32_t head = 0; head < kQHeads; ++head) {
    EXPECT_LT(relative_error(got, exact, 0, head), 0.5);
  }
  // No bar to verify, and no sketches.
  for (const Asked& asked :
       {Asked{.mode = KVM_MODE_VERIFIED},
        Asked{.mode = KVM_MODE_SAMPLED, .proposal = KVM_PROPOSAL_SKETCH, .budget = 100}}) {
    const Got other = world.attend(asked);
    EXPECT_EQ(other.result.mode, uint32_t{KVM_MODE_EXACT});
    EXPECT_EQ(other.result.n_exact, kQHeads);
    EXPECT_EQ(other.o.bytes(), exact.o.bytes());
  }
}

TEST(Approx, WithoutAnIndexItIsExactAndSaysSo) {
  Tokens tokens(2000);
  World world(KVM_INDEX_NONE);
  fill_world(&world, &tokens);
  const Got exact = world.attend({});
  const Got got = world.attend({.mode = KVM_MODE_SAMPLED, .budget = 100});
  EXPECT_EQ(got.result.mode, uint32_t{KVM_MODE_EXACT});
  EXPECT_EQ(got.result.n_exact, kQHeads);
  EXPECT_EQ(got.result.keys_read, got.result.keys_present);
  EXPECT_EQ(got.result.err_max, 0.0f);
  EXPECT_TRUE(same_bits(got, exact));
  EXPECT_EQ(world.engine->stats().index_bytes, 0u);
}

SpaceSpec defaulted_spec(uint32_t kind, const Asked& defaults) {
  SpaceSpec spec = indexed_spec(kind);
  spec.params.default_mode = defaults.mode;
  spec.params.default_proposal = defaults.proposal;
  spec.params.default_eps = defaults.eps;
  spec.params.default_delta = defaults.delta;
  spec.params.default_budget = defaults.budget;
  return spec;
}

void expect_same(const Got& got, const Got& expected) {
  EXPECT_TRUE(same_bits(got, expected));
  EXPECT_EQ(got.result.mode, expected.result.mode);
  EXPECT_EQ(got.result.n_exact, expected.result.n_exact);
  EXPECT_EQ(got.result.keys_read, expected.result.keys_read);
}

TEST(Approx, ASpaceSaysForRequestsThatDoNot) {
  Tokens tokens(kTokens);
  struct Case {
    uint32_t kind;
    Asked defaults;
  };
  for (const Case& one :
       {Case{KVM_INDEX_SKETCH, {.mode = KVM_MODE_SAMPLED, .delta = 0.1f, .budget = 300}},
        Case{KVM_INDEX_SKETCH, {.mode = KVM_MODE_SAMPLED, .eps = 0.2f}},
        Case{KVM_INDEX_SKETCH, {.mode = KVM_MODE_SAMPLED, .eps = 0.05f, .budget = 100}},
        Case{KVM_INDEX_SKETCH, {.mode = KVM_MODE_VERIFIED, .eps = 0.1f, .delta = 0.1f}},
        Case{KVM_INDEX_SKETCH, {.mode = KVM_MODE_TOPK, .budget = 300}},
        Case{KVM_INDEX_LSH, {.mode = KVM_MODE_SAMPLED}},
        Case{KVM_INDEX_LSH, {.mode = KVM_MODE_SAMPLED, .proposal = KVM_PROPOSAL_SKETCH}},
        Case{KVM_INDEX_NONE, {.mode = KVM_MODE_SAMPLED, .budget = 300}}}) {
    SCOPED_TRACE("mode " + std::to_string(one.defaults.mode) + " index " +
                 std::to_string(one.kind));
    World plain(one.kind);
    fill_world(&plain, &tokens);
    World world(defaulted_spec(one.kind, one.defaults));
    fill_world(&world, &tokens);
    Asked named = one.defaults;
    named.seed = 5;
    const Got expected = plain.attend(named);
    expect_same(world.attend({.mode = KVM_MODE_DEFAULT, .seed = 5}), expected);
    // Whoever names a mode takes nothing.
    expect_same(world.attend(named), expected);
    expect_same(world.attend({.mode = KVM_MODE_EXACT}), plain.attend({.mode = KVM_MODE_DEFAULT}));
  }
}

TEST(Approx, NumbersOfARequestGoBeforeThoseOfItsSpace) {
  Tokens tokens(kTokens);
  World world(
      defaulted_spec(KVM_INDEX_SKETCH, {.mode = KVM_MODE_SAMPLED, .delta = 0.1f, .budget = 300}));
  fill_world(&world, &tokens);
  expect_same(world.attend({.mode = KVM_MODE_DEFAULT, .budget = 600}),
              world.attend({.mode = KVM_MODE_SAMPLED, .delta = 0.1f, .budget = 600}));
  expect_same(world.attend({.mode = KVM_MODE_DEFAULT, .delta = 0.01f}),
              world.attend({.mode = KVM_MODE_SAMPLED, .delta = 0.01f, .budget = 300}));
  // As many keys as should give this eps, not the space's budget.
  const Got by_error = world.attend({.mode = KVM_MODE_DEFAULT, .eps = 0.3f});
  expect_same(by_error, world.attend({.mode = KVM_MODE_SAMPLED, .eps = 0.3f, .delta = 0.1f}));
  EXPECT_FALSE(same_bits(by_error, world.attend({.mode = KVM_MODE_DEFAULT})));
  // No index of hash tables.
  expect_same(world.attend({.mode = KVM_MODE_DEFAULT, .proposal = KVM_PROPOSAL_LSH}),
              world.attend({.mode = KVM_MODE_SAMPLED, .proposal = KVM_PROPOSAL_LSH}));
}

// A space that has both, a budget and an eps: numbers of a request go before them one by one.
TEST(Approx, BudgetAndEpsOfASampleComeTogether) {
  Tokens tokens(kTokens);
  World world(defaulted_spec(
      KVM_INDEX_SKETCH, {.mode = KVM_MODE_SAMPLED, .eps = 0.02f, .delta = 0.1f, .budget = 100}));
  fill_world(&world, &tokens);
  const auto sampled = [&](float eps, uint64_t budget) {
    return world.attend({.mode = KVM_MODE_SAMPLED, .eps = eps, .delta = 0.1f, .budget = budget});
  };
  const Got both = world.attend({.mode = KVM_MODE_DEFAULT});
  const Got plain = sampled(0, 100);
  expect_same(both, sampled(0.02f, 100));
  EXPECT_EQ(both.result.mode, uint32_t{KVM_MODE_SAMPLED});
  EXPECT_EQ(both.result.n_exact, 0u);
  EXPECT_GT(both.result.keys_read, plain.result.keys_read);
  expect_same(world.attend({.mode = KVM_MODE_DEFAULT, .budget = 200}), sampled(0.02f, 200));
  expect_same(world.attend({.mode = KVM_MODE_DEFAULT, .eps = 0.2f}), sampled(0.2f, 100));
}

TEST(Approx, SameBitsWhateverTheThreadsAndTheCuts) {
  Tokens tokens(kTokens);
  for (const Asked& asked :
       {Asked{.mode = KVM_MODE_SAMPLED, .budget = 300, .seed = 5},
        Asked{.mode = KVM_MODE_SAMPLED, .eps = 0.03f, .budget = 100, .seed = 5},
        Asked{.mode = KVM_MODE_VERIFIED, .eps = 0.05f, .seed = 5},
        Asked{.mode = KVM_MODE_TOPK, .budget = 300}}) {
    World one(KVM_INDEX_SKETCH, 1);
    fill_world(&one, &tokens);
    const Got expected = one.attend(asked, 3);
    World other(KVM_INDEX_SKETCH, 3);
    // In pieces, with requests in between that make the index as far as it goes.
    for (uint32_t at = 0; at < kTokens;) {
      const uint32_t n = std::min(kTokens - at, at < 3000 ? 700u : 61u);
      other.append(&tokens, at, n);
      at += n;
      (void)other.attend(asked);
    }
    EXPECT_TRUE(same_bits(other.attend(asked, 3), expected)) << asked.mode;
  }
}

TEST(Approx, AForkAnswersAsItsParent) {
  Tokens tokens(kTokens);
  World world(KVM_INDEX_SKETCH);
  fill_world(&world, &tokens);
  const Asked asked = {.mode = KVM_MODE_SAMPLED, .budget = 300, .seed = 5};
  const kvm_seq_id child = world.verb(SeqVerb::kFork, world.seq, KVM_POSITION_END).seq;
  EXPECT_EQ(world.engine->stats().index_bytes, 0u) << "a fork waits for no index";
  // Who attends first makes the index, and both have it.
  const Got expected = world.attend(asked);
  const uint64_t index_bytes = world.engine->stats().index_bytes;
  EXPECT_GT(index_bytes, 0u);
  EXPECT_EQ(world.engine->seq_info(world.client, child).value().bytes_index, index_bytes);
  EXPECT_TRUE(same_bits(world.attend(asked, 1, child), expected));
  EXPECT_EQ(world.engine->stats().index_bytes, index_bytes);

  // Back to a shorter length and forward again: as one that was never longer.
  ASSERT_TRUE(world.verb(SeqVerb::kTruncate, world.seq, 4000).status.is_ok());
  World fresh(KVM_INDEX_SKETCH);
  fresh.append(&tokens, 0, 4000);
  EXPECT_TRUE(same_bits(world.attend(asked), fresh.attend(asked)));
  EXPECT_TRUE(same_bits(world.attend(asked, 1, child), expected));
}

TEST(Approx, NothingIsIndexedForARequestThatIsTooLate) {
  Tokens tokens(kTokens);
  World world(KVM_INDEX_SKETCH);
  fill_world(&world, &tokens);
  Buffer q(Dtype::kF32, 1, 1, kQHeads, kDim);
  Buffer o(Dtype::kF32, 1, 1, kQHeads, kDim);
  StepRequest step;
  step.attend = true;
  step.space = world.id;
  step.items = {query_item(world.seq, 1)};
  step.mode = KVM_MODE_SAMPLED;
  step.deadline_ns = 1;
  step.q = q.view();
  step.o = o.view();
  EXPECT_EQ(world.run(std::move(step)).status.code(), KVM_ERR_DEADLINE);
  EXPECT_EQ(world.engine->stats().n_index_blocks, 0u);
}

TEST(Approx, SeveralQueryTokensAndManyAreExact) {
  Tokens tokens(kTokens);
  World world(KVM_INDEX_SKETCH);
  fill_world(&world, &tokens);
  const Asked asked = {.mode = KVM_MODE_SAMPLED, .budget = 600, .seed = 5};
  for (const uint32_t n : {2u, 8u, 20u}) {
    const Got exact = world.attend({}, n);
    const Got got = world.attend(asked, n);
    EXPECT_EQ(got.result.mode, uint32_t{KVM_MODE_SAMPLED}) << n;
    EXPECT_EQ(got.result.keys_present, exact.result.keys_present);
    EXPECT_LE(got.result.keys_read, got.result.keys_present);
    for (uint32_t row = 0; row < n; ++row) {
      for (uint32_t head = 0; head < kQHeads; ++head) {
        EXPECT_LT(relative_error(got, exact, row, head), 0.3) << n << " " << row << " " << head;
      }
    }
  }
  const Got many = world.attend(asked, 65);
  EXPECT_EQ(many.result.mode, uint32_t{KVM_MODE_EXACT});
  EXPECT_EQ(many.result.n_exact, 65 * kQHeads);
  EXPECT_TRUE(same_bits(many, world.attend({}, 65)));
}

// Appends and attends in one request, token by token, as a decode does.
TEST(Approx, StepsAsAppendThenAttend) {
  Tokens tokens(kTokens);
  World world(KVM_INDEX_SKETCH, 2);
  World apart(KVM_INDEX_SKETCH, 1);
  constexpr uint32_t kFirst = 4000;
  world.append(&tokens, 0, kFirst);
  apart.append(&tokens, 0, kFirst);
  const Asked asked = {.mode = KVM_MODE_SAMPLED, .budget = 200, .seed = 9};
  for (uint32_t i = 0; i < 150; ++i) {
    Buffer q(Dtype::kF32, 1, 1, kQHeads, kDim);
    std::mt19937_64 random(1);
    fill(&q, 1, 1, kQHeads, random, 1.5f);
    Buffer o(Dtype::kF32, 1, 1, kQHeads, kDim);
    StepRequest step;
    step.append = step.attend = true;
    step.space = world.id;
    step.flags = KVM_STEP_F32_VALUES;
    kvm_item item = append_item(world.seq, 1, kFirst + i);
    item.n_query = 1;
    step.items = {item};
    step.mode = asked.mode;
    step.budget = asked.budget;
    step.seed = asked.seed;
    step.k = tokens.k.view();
    step.v = tokens.v.view();
    step.q = q.view();
    step.o = o.view();
    const RequestResult result = world.run(std::move(step));
    ASSERT_TRUE(result.status.is_ok()) << result.status.message();
    ASSERT_EQ(result.mode, uint32_t{KVM_MODE_SAMPLED});
    apart.append(&tokens, kFirst + i, 1);
    ASSERT_EQ(o.bytes(), apart.attend(asked).o.bytes()) << "token " << i;
  }
}

}  // namespace
}  // namespace kvm::engine::testing
