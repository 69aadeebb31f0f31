// SPDX-License-Identifier: Apache-2.0
// Audits: the true errors that they find are those of attention in double precision, whatever
// happens to the sequence meanwhile, and nobody waits for them.
#include "engine/attend/audit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "tests/unit/engine/rig.h"

namespace kvm::engine::testing {
namespace {

constexpr uint32_t kKvHeads = 2;
constexpr uint32_t kGroup = 2;
constexpr uint32_t kQHeads = kKvHeads * kGroup;
constexpr uint32_t kDim = 64;
// The last page is not full.
constexpr uint32_t kTokens = 5000 + 37;

uint64_t n_answers(const AuditStats& stats) {
  uint64_t n = 0;
  for (const AuditedMode& mode : stats.modes) {
    n += mode.n_answers;
  }
  return n;
}
uint64_t n_seen(const AuditStats& stats) {
  return n_answers(stats) + stats.n_busy + stats.n_given_up + stats.n_unfit;
}

struct World : Rig {
  explicit World(uint64_t audit_every, CodecId codec = CodecId::kBf16,
                 uint64_t capacity = 256 << 20)
      : Rig(options_of(audit_every, capacity)), stored(codec) {
    SpaceSpec spec = make_spec("audit", 1, kQHeads, kKvHeads, kDim);
    spec.params.codec = static_cast<uint32_t>(codec);
    spec.indexes = {make_index()};
    id = space(spec);
    seq = create(id);
  }
  static EngineOptions options_of(uint64_t audit_every, uint64_t capacity) {
    EngineOptions options = make_options(1, capacity);
    options.audit_every = audit_every;
    return options;
  }

  Status append(kvm_seq_id to, uint32_t n, uint64_t seed) {
    std::mt19937_64 random(seed);
    Buffer k(Dtype::kF32, 1, n, kKvHeads, kDim);
    Buffer v(Dtype::kF32, 1, n, kKvHeads, kDim);
    fill(&k, 1, n, kKvHeads, random, 2.0f);
    fill(&v, 1, n, kKvHeads, random);
    StepRequest step;
    step.append = true;
    step.space = id;
    step.items = {append_item(to, n)};
    step.k = k.view();
    step.v = v.view();
    const Status status = run(std::move(step)).status;
    for (uint32_t t = 0; to == seq && status.is_ok() && t < n; ++t) {
      std::vector<float> k_row, v_row;
      for (uint32_t h = 0; h < kKvHeads; ++h) {
        const auto k_head = round_row(stored, k.get_row(0, t, h));
        const auto v_head = round_row(stored, v.get_row(0, t, h));
        k_row.insert(k_row.end(), k_head.begin(), k_head.end());
        v_row.insert(v_row.end(), v_head.begin(), v_head.end());
      }
      model.k.push_back(k_row);
      model.v.push_back(v_row);
    }
    return status;
  }

  struct Got {
    RequestResult result;
    Buffer q{Dtype::kF32, 1, 1, kQHeads, kDim};
    Buffer o{Dtype::kF32, 1, 1, kQHeads, kDim};
    Buffer err{Dtype::kF32, 1, 1, kQHeads, 2};
  };
  Got attend(uint32_t mode, uint64_t budget, uint64_t seed) {
    Got got;
    std::mt19937_64 random(seed);
    fill(&got.q, 1, 1, kQHeads, random, 1.0f);
    StepRequest step;
    step.attend = true;
    step.space = id;
    step.flags = KVM_STEP_F32_VALUES;
    step.items = {query_item(seq, 1)};
    step.mode = mode;
    step.budget = budget;
    step.delta = 0.1f;
    step.seed = seed;
    step.q = got.q.view();
    step.o = got.o.view();
    step.err = got.err.view();
    got.result = run(std::move(step));
    EXPECT_TRUE(got.result.status.is_ok()) << got.result.status.message();
    return got;
  }
  double error(const Got& got, uint32_t q_head) const {
    const Rule rule = {.group = kGroup, .scale = 1.0f / std::sqrt(static_cast<float>(kDim))};
    const std::vector<double> o =
        naive_attention(rule, StepRequest{}, query_item(seq, 1), model.k.size() - 1, 0, q_head,
                        got.q.get_row(0, 0, q_head), model, kDim, kDim)
            .o;
    double difference = 0;
    double norm = 0;
    for (uint32_t i = 0; i < kDim; ++i) {
      difference += std::pow(double{got.o.get(0, 0, q_head, i)} - o[i], 2);
      norm += o[i] * o[i];
    }
    return std::sqrt(difference / norm);
  }
  // Waits until so many answers are accounted for.
  AuditStats drain(uint64_t n_expected) {
    for (int i = 0; i < 20000; ++i) {
      engine->poll();
      if (n_seen(engine->audit_stats()) >= n_expected) {
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const AuditStats stats = engine->audit_stats();
    EXPECT_EQ(n_seen(stats), n_expected);
    return stats;
  }

  CodecId stored;
  kvm_space_id id = 0;
  kvm_seq_id seq = 0;
  ModelLayer model;
};

TEST(Audit, TrueErrorsAreThoseOfTheOracle) {
  for (const CodecId codec : {CodecId::kBf16, CodecId::kI8, CodecId::kF8}) {
    World world(1, codec);
    ASSERT_TRUE(world.append(world.seq, kTokens, 7).is_ok());
    double error = 0;
    double bar = 0;
    uint64_t n_over = 0;
    for (uint64_t seed = 1; seed <= 6; ++seed) {
      const World::Got got = world.attend(KVM_MODE_SAMPLED, 100, seed);
      ASSERT_EQ(got.result.n_exact, 0u);
      world.drain(seed * kKvHeads);
      for (uint32_t h = 0; h < kQHeads; ++h) {
        const double e = world.error(got, h);
        const auto b = static_cast<double>(got.err.get(0, 0, h, 0));
        error += e;
        bar += b;
        n_over += e > b ? 1 : 0;
      }
    }
    const AuditStats stats = world.engine->audit_stats();
    const AuditedMode& mode = stats.modes[static_cast<size_t>(AuditedAs::kSampled)];
    EXPECT_EQ(mode.n_answers, 6 * kKvHeads);
    EXPECT_EQ(mode.true_error.count, 6 * kQHeads);
    EXPECT_EQ(mode.n_barred, 6 * kQHeads);
    EXPECT_NEAR(mode.true_error.sum, error, 1e-4 * error);
    EXPECT_NEAR(mode.estimated_error.sum, bar, 1e-5 * bar);
    EXPECT_NEAR(mode.allowed_over, 0.1 * 6 * kQHeads, 1e-5);
    EXPECT_EQ(mode.n_over, n_over);
    EXPECT_GT(error, 0.01 * 6 * kQHeads) << "the sample is too good to tell";
  }
}

TEST(Audit, ModesAreApartAndTopKHasNoBar) {
  World world(1);
  ASSERT_TRUE(world.append(world.seq, kTokens, 7).is_ok());
  world.attend(KVM_MODE_TOPK, 100, 1);
  world.attend(KVM_MODE_EXACT, 0, 1);
  world.drain(kKvHeads);
  const AuditStats stats = world.engine->audit_stats();
  const AuditedMode& topk = stats.modes[static_cast<size_t>(AuditedAs::kTopK)];
  EXPECT_EQ(topk.n_answers, kKvHeads);
  EXPECT_EQ(topk.true_error.count, kQHeads);
  EXPECT_EQ(topk.n_barred, 0u);
  EXPECT_EQ(topk.estimated_error.count, 0u);
  EXPECT_EQ(stats.modes[static_cast<size_t>(AuditedAs::kSampled)].n_answers, 0u);
  EXPECT_EQ(stats.every, 1u);
}

TEST(Audit, NoneWhereItIsOffAndAFractionWhereItIsNot) {
  World off(0);
  ASSERT_TRUE(off.append(off.seq, kTokens, 7).is_ok());
  World tenth(10);
  ASSERT_TRUE(tenth.append(tenth.seq, kTokens, 7).is_ok());
  constexpr uint64_t kRequests = 200;
  for (uint64_t i = 0; i < kRequests; ++i) {
    tenth.attend(KVM_MODE_SAMPLED, 20, i);
    off.attend(KVM_MODE_SAMPLED, 20, i);
  }
  EXPECT_EQ(n_seen(off.engine->audit_stats()), 0u);
  // 40 are expected of 400, with a standard deviation of 6; which ones is fixed.
  const uint64_t n = n_seen(tenth.drain(n_seen(tenth.engine->audit_stats())));
  EXPECT_GT(n, 10u);
  EXPECT_LT(n, 70u);
}

// A problem over memory of its own: all `n_pages` pages are the same one, which is full or not.
struct Handmade {
  explicit Handmade(uint32_t n_pages, uint32_t page_tokens = kPageTokens) {
    std::mt19937_64 random(3);
    std::normal_distribution<float> normal;
    for (std::vector<float>* each : {&k, &v, &q}) {
      std::generate(each->begin(), each->end(), [&] { return normal(random); });
    }
    for (uint32_t i = 0; i < n_pages; ++i) {
      KvRun run;
      run.k = {k.data(), nullptr, CodecId::kF32};
      run.v = {v.data(), nullptr, CodecId::kF32};
      run.position = uint64_t{i} * kPageTokens;
      run.n_tokens = static_cast<uint16_t>(page_tokens);
      runs.push_back(run);
    }
    problem.q = q.data();
    problem.dtype_q = Dtype::kF32;
    problem.q_stride_head = kDim;
    problem.n_query = 1;
    problem.group = kRows;
    problem.dim_k = problem.dim_v = kDim;
    problem.visible.causal = false;
    problem.runs = runs;
    problem.o = o.data();
    problem.o_stride_head = kDim;
    StoreOptions options;
    options.host_capacity_bytes = 64 << 20;
    store = Store::open(options).value();
  }
  void offer(Auditor* auditor, ClientId client = 1) {
    AuditJob* job = auditor->next_job();
    ASSERT_NE(job, nullptr);
    ASSERT_TRUE(job->take(problem, report));
    job->mode = AuditedAs::kVerified;
    job->delta = 0.25f;
    job->pins.client = client;
    auditor->offer();
  }

  static constexpr uint32_t kRows = 2;
  std::vector<float> k = std::vector<float>(kPageTokens * kDim);
  std::vector<float> v = k;
  std::vector<float> q = std::vector<float>(kRows * kDim);
  std::vector<float> o = std::vector<float>(kRows * kDim, 0.0f);
  std::vector<KvRun> runs;
  attention::Problem problem;
  attention::ApproxReport report;
  std::unique_ptr<Store> store;
};

// A bar that is planted too low shows, and so does a wrong answer.
TEST(Audit, WrongEstimatesShow) {
  Handmade made(1, 40);
  made.report.err_o[0] = 0.5f;
  made.report.err_o[1] = 2.0f;
  Auditor auditor(1);
  ASSERT_TRUE(auditor.is_due());
  made.offer(&auditor);
  // Nothing of the request is needed from here on.
  std::fill(made.k.begin(), made.k.end(), NAN);
  std::fill(made.q.begin(), made.q.end(), NAN);
  while (n_answers(auditor.stats()) == 0) {
    std::this_thread::yield();
    auditor.collect(*made.store);
  }
  const AuditedMode& mode = auditor.stats().modes[static_cast<size_t>(AuditedAs::kVerified)];
  // o = 0 is off by all of |o|: more than the first bar, less than the second.
  EXPECT_EQ(mode.n_answers, 1u);
  EXPECT_NEAR(mode.true_error.sum, 2.0, 1e-6);
  EXPECT_NEAR(mode.estimated_error.sum, 2.5, 1e-6);
  EXPECT_EQ(mode.n_barred, 2u);
  EXPECT_EQ(mode.n_over, 1u);
  EXPECT_NEAR(mode.allowed_over, 0.5, 1e-6);
}

TEST(Audit, AnAnswerThatIsNoNumberIsWrong) {
  // The second time the true answer is none either, and says nothing.
  for (const bool is_known : {true, false}) {
    Handmade made(1);
    made.o[0] = NAN;
    if (!is_known) {
      made.v[0] = NAN;
    }
    made.report.err_o[0] = made.report.err_o[1] = 0.5f;
    Auditor auditor(1);
    ASSERT_TRUE(auditor.is_due());
    made.offer(&auditor);
    while (n_answers(auditor.stats()) == 0) {
      std::this_thread::yield();
      auditor.collect(*made.store);
    }
    const AuditedMode& mode = auditor.stats().modes[static_cast<size_t>(AuditedAs::kVerified)];
    EXPECT_EQ(mode.n_over, is_known ? 2u : 0u);
    EXPECT_NEAR(mode.true_error.sum, is_known ? 11.0 : 0.0, 1e-5);
  }
}

TEST(Audit, AFullQueueSkipsAndGivesUp) {
  // A quarter of a million keys: each takes long enough for what follows.
  Handmade made(4096);
  Auditor auditor(1);
  for (uint32_t i = 0; i < Auditor::kQueue; ++i) {
    made.offer(&auditor, 1 + i % 2);
  }
  EXPECT_EQ(auditor.next_job(), nullptr);
  EXPECT_EQ(auditor.stats().n_busy, 1u);
  EXPECT_TRUE(auditor.holds(1));
  EXPECT_TRUE(auditor.holds(2));
  EXPECT_FALSE(auditor.holds(3));
  // Those of one client that wait go at once, the one that runs soon.
  auditor.cancel(*made.store, 2);
  EXPECT_GE(auditor.stats().n_given_up, 1u);
  while (auditor.holds(2)) {
    std::this_thread::yield();
    auditor.collect(*made.store);
  }
  EXPECT_TRUE(auditor.give_up(*made.store));
  EXPECT_FALSE(auditor.holds(1));
  EXPECT_FALSE(auditor.give_up(*made.store));
  EXPECT_EQ(n_seen(auditor.stats()), Auditor::kQueue + 1u);
  // It goes on as if nothing had been.
  ASSERT_NE(auditor.next_job(), nullptr);
}

TEST(Audit, KeysWithLogWeightsAreLeftOut) {
  const float weight = 0;
  KvRun run;
  run.log_weight = &weight;
  run.n_tokens = 1;
  attention::Problem problem;
  problem.runs = {&run, 1};
  AuditJob job;
  EXPECT_FALSE(job.take(problem, attention::ApproxReport{}));
}

// The sequence is cut, extended and freed while audits of it wait.
TEST(Audit, WhatIsPinnedStaysAsItWas) {
  World world(1);
  double error = 0;
  uint64_t n = 0;
  for (uint64_t round = 0; round < 4; ++round) {
    world.model = ModelLayer{};
    ASSERT_TRUE(world.append(world.seq, kTokens, round).is_ok());
    const World::Got got = world.attend(KVM_MODE_SAMPLED, 100, round);
    for (uint32_t h = 0; h < kQHeads; ++h) {
      error += world.error(got, h);
    }
    n += kKvHeads;
    if (round % 2 == 0) {
      ASSERT_TRUE(world.verb(SeqVerb::kTruncate, world.seq, 100).status.is_ok());
      world.model = ModelLayer{};
      ASSERT_TRUE(world.append(world.seq, 300, 99).is_ok());
    }
    ASSERT_TRUE(world.verb(SeqVerb::kFree, world.seq).status.is_ok());
    world.seq = world.create(world.id);
    ASSERT_TRUE(world.append(world.seq, kTokens, 1000 + round).is_ok());
    ASSERT_TRUE(world.verb(SeqVerb::kFree, world.seq).status.is_ok());
    world.seq = world.create(world.id);
  }
  const AuditStats stats = world.drain(n);
  EXPECT_EQ(world.engine->stats().n_pages, 0u);
  const AuditedMode& mode = stats.modes[static_cast<size_t>(AuditedAs::kSampled)];
  EXPECT_EQ(stats.n_given_up, 0u);
  if (stats.n_busy == 0) {
    EXPECT_NEAR(mode.true_error.sum, error, 1e-4 * error);
  } else {
    EXPECT_LT(mode.true_error.sum, error);
  }
}

// Memory that only audits hold is there for whoever needs it.
TEST(Audit, GivesWayToAppends) {
  constexpr uint64_t kCapacity = 16 << 20;
  World world(1, CodecId::kBf16, kCapacity);
  // More than half of the capacity: two do not fit.
  constexpr uint32_t kMany = 18000;
  uint64_t n_due = 0;
  for (uint64_t round = 0; round < 3; ++round) {
    world.model = ModelLayer{};
    ASSERT_TRUE(world.append(world.seq, kMany, round).is_ok()) << round;
    // Where memory for the index was refused, heads are exact and nothing is due.
    const World::Got got = world.attend(KVM_MODE_SAMPLED, 100, round);
    n_due += (kQHeads - got.result.n_exact) / kGroup;
    ASSERT_TRUE(world.verb(SeqVerb::kFree, world.seq).status.is_ok());
    world.seq = world.create(world.id);
  }
  const AuditStats stats = world.drain(n_due);
  EXPECT_EQ(world.engine->stats().n_pages, 0u);
  RecordProperty("n_given_up", static_cast<int>(stats.n_given_up));
}

TEST(Audit, AClientMayLeaveMeanwhile) {
  World world(1);
  ASSERT_TRUE(world.append(world.seq, kTokens, 1).is_ok());
  for (uint64_t seed = 0; seed < 5; ++seed) {
    world.attend(KVM_MODE_SAMPLED, 100, seed);
  }
  bool is_gone = false;
  world.engine->remove_client(world.client, [&] { is_gone = true; });
  world.drive(is_gone);
  EXPECT_EQ(world.engine->stats().n_pages, 0u);
  EXPECT_EQ(n_seen(world.engine->audit_stats()), 5 * kKvHeads);
}

// An engine may end at any time.
TEST(Audit, TheEngineMayEndMeanwhile) {
  for (int i = 0; i < 5; ++i) {
    World world(1);
    ASSERT_TRUE(world.append(world.seq, kTokens, 1).is_ok());
    world.attend(KVM_MODE_SAMPLED, 100, 1);
  }
}

}  // namespace
}  // namespace kvm::engine::testing
