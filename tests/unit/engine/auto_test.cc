// SPDX-License-Identifier: Apache-2.0
// KVM_MODE_AUTO through the whole engine, with rates that are written down: what it takes for which
// heads, and that errors and times are kept, against attention in double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "engine/attend/cost_model.h"
#include "tests/unit/engine/rig.h"

namespace kvm::engine::testing {
namespace {

constexpr uint32_t kKvHeads = 2;
constexpr uint32_t kGroup = 2;
constexpr uint32_t kQHeads = kKvHeads * kGroup;
constexpr uint32_t kDim = 64;
// Half of what a key of 128 channels takes.
constexpr double kExactNs = 6.75;
constexpr const char* kModel =
    "exact_bf16=13.5,exact_int8=6,scan=1.5,gather=20,start=5000,threads=2";

// Head 0 attends to a part of its keys, whose values have a mean; head 1 as `kind` says.
enum class Second { kConcentrated, kFlat, kGauss };

struct World : Rig {
  World(const std::string& rates, uint32_t index, Second second, uint32_t n, uint32_t n_threads = 1,
        uint32_t codec = KVM_CODEC_BF16)
      : Rig(options_of(rates, n_threads)), n_tokens(n), q(Dtype::kF32, 1, 1, kQHeads, kDim) {
    SpaceSpec spec = make_spec("auto", 1, kQHeads, kKvHeads, kDim);
    spec.params.codec = codec;
    spec.indexes = {make_index(index)};
    id = space(spec);
    seq = create(id);
    append(second, static_cast<CodecId>(codec));
  }
  static EngineOptions options_of(const std::string& rates, uint32_t n_threads) {
    EngineOptions options = make_options(n_threads);
    options.cost_model = rates;
    return options;
  }

  void append(Second second, CodecId stored) {
    std::mt19937_64 random(7);
    std::normal_distribution<float> normal;
    Buffer k(Dtype::kF32, 1, n_tokens, kKvHeads, kDim);
    Buffer v(Dtype::kF32, 1, n_tokens, kKvHeads, kDim);
    fill(&q, 1, 1, kQHeads, random);
    for (uint32_t t = 0; t < n_tokens; ++t) {
      std::vector<float> k_row, v_row;
      for (uint32_t h = 0; h < kKvHeads; ++h) {
        const bool is_typical = h == 0 || second == Second::kConcentrated;
        // Logits with a standard deviation of 2.5, of 1, and of 0.
        const float sharp = is_typical ? 2.5f : (second == Second::kGauss ? 1.0f : 0.0f);
        std::vector<float> k_head(kDim), v_head(kDim);
        for (uint32_t i = 0; i < kDim; ++i) {
          k_head[i] = sharp * normal(random);
          v_head[i] = normal(random) + (is_typical && i % 4 == 0 ? 2.0f : 0.0f);
        }
        for (uint32_t i = 0; i < kDim; ++i) {
          k.set(0, t, h, i, k_head[i]);
          v.set(0, t, h, i, v_head[i]);
        }
        const std::vector<float> k_stored = round_row(stored, k_head);
        const std::vector<float> v_stored = round_row(stored, v_head);
        k_row.insert(k_row.end(), k_stored.begin(), k_stored.end());
        v_row.insert(v_row.end(), v_stored.begin(), v_stored.end());
      }
      model.k.push_back(k_row);
      model.v.push_back(v_row);
    }
    StepRequest step;
    step.append = true;
    step.space = id;
    step.items = {append_item(seq, n_tokens)};
    step.k = k.view();
    step.v = v.view();
    const RequestResult result = run(std::move(step));
    ASSERT_TRUE(result.status.is_ok()) << result.status.message();
  }

  struct Got {
    RequestResult result;
    Buffer o{Dtype::kF32, 1, 1, kQHeads, kDim};
    Buffer lse{Dtype::kF32, 1, 1, kQHeads, 1};
    Buffer err{Dtype::kF32, 1, 1, kQHeads, 2};

    bool is_exact(uint32_t q_head) const { return err.get(0, 0, q_head, 0) == 0.0f; }
  };
  Got attend(float eps, uint64_t budget_ns = 0, uint64_t seed = 1, uint32_t mode = KVM_MODE_AUTO) {
    Got got;
    StepRequest step;
    step.attend = true;
    step.space = id;
    step.flags = KVM_STEP_F32_VALUES;
    step.items = {query_item(seq, 1)};
    step.mode = mode;
    step.eps = eps;
    step.budget = budget_ns;
    step.seed = seed;
    step.q = q.view();
    step.o = got.o.view();
    step.lse = got.lse.view();
    step.err = got.err.view();
    got.result = run(std::move(step));
    EXPECT_TRUE(got.result.status.is_ok()) << got.result.status.message();
    return got;
  }
  // Relative error of o against double precision.
  double error(const Got& got, uint32_t q_head) {
    if (oracle.empty()) {
      const Rule rule = {.group = kGroup, .scale = 1.0f / std::sqrt(static_cast<float>(kDim))};
      for (uint32_t h = 0; h < kQHeads; ++h) {
        oracle.push_back(naive_attention(rule, StepRequest{}, query_item(seq, 1), n_tokens - 1, 0,
                                         h, q.get_row(0, 0, h), model, kDim, kDim)
                             .o);
      }
    }
    double difference = 0;
    double norm = 0;
    for (uint32_t i = 0; i < kDim; ++i) {
      difference += std::pow(double{got.o.get(0, 0, q_head, i)} - oracle[q_head][i], 2);
      norm += oracle[q_head][i] * oracle[q_head][i];
    }
    return std::sqrt(difference / norm);
  }

  uint32_t n_tokens;
  Buffer q;
  ModelLayer model;
  kvm_space_id id = 0;
  kvm_seq_id seq = 0;
  std::vector<std::vector<double>> oracle;
};

TEST(Auto, ShortContextsAreExact) {
  World world(kModel, KVM_INDEX_SKETCH, Second::kConcentrated, 1500);
  const World::Got got = world.attend(0.05f);
  EXPECT_EQ(got.result.mode, uint32_t{KVM_MODE_EXACT});
  EXPECT_EQ(got.result.n_exact, kQHeads);
  EXPECT_EQ(got.result.keys_read, got.result.keys_present);
  EXPECT_EQ(got.o.bytes(), world.attend(0, 0, 1, KVM_MODE_EXACT).o.bytes());
}

TEST(Auto, LongContextsAreSampledAndKeepTheError) {
  World world(kModel, KVM_INDEX_SKETCH, Second::kConcentrated, 12000);
  for (const float eps : {0.07f, 0.15f}) {
    for (uint64_t seed = 0; seed < 5; ++seed) {
      const World::Got got = world.attend(eps, 0, seed);
      EXPECT_EQ(got.result.mode, uint32_t{KVM_MODE_VERIFIED});
      EXPECT_EQ(got.result.n_exact, 0u);
      EXPECT_LT(got.result.keys_read, got.result.keys_present / 2);
      EXPECT_LE(got.result.err_max, eps);
      for (uint32_t h = 0; h < kQHeads; ++h) {
        // delta is 0.01; the seeds are fixed.
        EXPECT_LE(world.error(got, h), double{eps}) << h << ", seed " << seed;
      }
    }
  }
}

TEST(Auto, FlatHeadsAreExactBesideSampledOnes) {
  for (const Second second : {Second::kFlat, Second::kGauss}) {
    World world(kModel, KVM_INDEX_SKETCH, second, 12000);
    const World::Got got = world.attend(0.05f);
    EXPECT_EQ(got.result.mode, uint32_t{KVM_MODE_VERIFIED});
    EXPECT_EQ(got.result.n_exact, kGroup);
    for (uint32_t h = 0; h < kQHeads; ++h) {
      EXPECT_EQ(got.is_exact(h), h >= kGroup) << h;
      EXPECT_LE(world.error(got, h), h >= kGroup ? 1e-4 : 0.05) << h;
    }
  }
}

TEST(Auto, AnErrorThatOnlyExactKeepsIsExact) {
  World world(kModel, KVM_INDEX_SKETCH, Second::kFlat, 12000);
  const World::Got got = world.attend(0.001f);
  EXPECT_EQ(got.result.mode, uint32_t{KVM_MODE_EXACT});
  EXPECT_EQ(got.result.n_exact, kQHeads);
  EXPECT_EQ(got.result.err_max, 0.0f);
}

// The same tokens, taken for sampled or exact by what int8 rows cost to read in order; fp8 rows are
// taken to cost the same.
TEST(Auto, CheapScaledRowsAreReadExactly) {
  for (const uint32_t codec : {KVM_CODEC_I8, KVM_CODEC_F8E4M3}) {
    World slow("exact_bf16=13.5,exact_int8=12,scan=1.5,gather=20,start=5000", KVM_INDEX_SKETCH,
               Second::kConcentrated, 12000, 1, codec);
    World::Got got = slow.attend(0.1f);
    EXPECT_EQ(got.result.mode, uint32_t{KVM_MODE_VERIFIED});
    World fast("exact_bf16=13.5,exact_int8=2,scan=1.5,gather=20,start=5000", KVM_INDEX_SKETCH,
               Second::kConcentrated, 12000, 1, codec);
    got = fast.attend(0.1f);
    EXPECT_EQ(got.result.mode, uint32_t{KVM_MODE_EXACT});
    for (uint32_t h = 0; h < kQHeads; ++h) {
      EXPECT_LE(fast.error(got, h), 1e-4);
    }
  }
}

TEST(Auto, ATimeTakesTheBestErrorWithinIt) {
  World world(kModel, KVM_INDEX_SKETCH, Second::kConcentrated, 12000);
  // Both heads; two threads share the time, as the model says.
  const double exact_ns = kKvHeads * 12000 * kExactNs / 2;
  World::Got got = world.attend(0, static_cast<uint64_t>(exact_ns * 1.05));
  EXPECT_EQ(got.result.mode, uint32_t{KVM_MODE_EXACT});
  EXPECT_EQ(got.result.err_max, 0.0f);
  uint64_t last_read = 0;
  double last_error = 1.0;
  for (const double share : {0.3, 0.5, 0.8}) {
    double error = 0;
    uint64_t n_read = 0;
    for (uint64_t seed = 0; seed < 12; ++seed) {
      got = world.attend(0, static_cast<uint64_t>(exact_ns * share), seed);
      ASSERT_EQ(got.result.mode, uint32_t{KVM_MODE_SAMPLED}) << share;
      EXPECT_FALSE(std::isnan(got.result.err_max));
      n_read += got.result.keys_read / 12;
      for (uint32_t h = 0; h < kQHeads; ++h) {
        error += world.error(got, h) / (12 * kQHeads);
      }
    }
    // What was read, by the rates of the model: of a head start, scan, and rows that lie alone.
    const double gather = 20 - 13.5 + kExactNs;
    const double takes = kKvHeads * (5000 + 12000 * 0.75) + static_cast<double>(n_read) * gather;
    EXPECT_LE(takes / 2, exact_ns * share * 1.05) << share;
    EXPECT_GT(n_read, last_read);
    EXPECT_LT(error, last_error);
    last_read = n_read;
    last_error = error;
  }
  got = world.attend(0, 1);
  EXPECT_EQ(got.result.mode, uint32_t{KVM_MODE_SAMPLED});
  EXPECT_LT(got.result.keys_read, kKvHeads * (kGroup * 3 * kLeastBudget + 200));
}

TEST(Auto, HashTablesGiveWhatFitsForATimeAndExactForAnError) {
  World world(kModel, KVM_INDEX_LSH, Second::kConcentrated, 12000);
  World::Got got = world.attend(0.1f);
  EXPECT_EQ(got.result.mode, uint32_t{KVM_MODE_EXACT});
  EXPECT_EQ(got.result.n_exact, kQHeads);
  const double exact_ns = kKvHeads * 12000 * kExactNs / 2;
  const World::Got all = world.attend(0, static_cast<uint64_t>(0.8 * exact_ns));
  EXPECT_EQ(all.result.mode, uint32_t{KVM_MODE_SAMPLED});
  EXPECT_TRUE(std::isnan(all.result.err_max));
  EXPECT_LT(all.result.keys_read, all.result.keys_present);
  // The largest of the same keys.
  got = world.attend(0, static_cast<uint64_t>(0.25 * exact_ns));
  EXPECT_EQ(got.result.mode, uint32_t{KVM_MODE_TOPK});
  EXPECT_TRUE(std::isnan(got.result.err_max));
  EXPECT_EQ(got.result.keys_read, all.result.keys_read);
}

TEST(Auto, SameBitsWhateverTheThreads) {
  World one(kModel, KVM_INDEX_SKETCH, Second::kGauss, 9000, 1);
  World other(kModel, KVM_INDEX_SKETCH, Second::kGauss, 9000, 3);
  for (const uint64_t budget : {0u, 30000u, 60000u}) {
    const World::Got a = one.attend(0.05f, budget, 5);
    const World::Got b = other.attend(0.05f, budget, 5);
    EXPECT_EQ(a.result.mode, b.result.mode);
    EXPECT_EQ(a.result.keys_read, b.result.keys_read);
    EXPECT_EQ(a.o.bytes(), b.o.bytes()) << budget;
    EXPECT_EQ(a.err.bytes(), b.err.bytes()) << budget;
  }
}

TEST(Auto, MeasuredRatesKeepTheErrorToo) {
  World world("", KVM_INDEX_SKETCH, Second::kConcentrated, 9000);
  const World::Got got = world.attend(0.1f);
  EXPECT_LE(got.result.err_max, 0.1f);
  for (uint32_t h = 0; h < kQHeads; ++h) {
    EXPECT_LE(world.error(got, h), 0.1);
  }
}

TEST(Auto, RatesThatCannotBeReadRefuseTheEngine) {
  EngineOptions options = Rig::make_options(1);
  options.cost_model = "quick";
  const auto opened = Engine::open(options);
  ASSERT_FALSE(opened.is_ok());
  EXPECT_EQ(opened.status().code(), KVM_ERR_INVALID);
}

}  // namespace
}  // namespace kvm::engine::testing
