// SPDX-License-Identifier: Apache-2.0
#include "attention/sampled/approx.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <map>
#include <random>
#include <set>

#include "attention/sampled/core.h"
#include "attention/sampled/estimate.h"
#include "attention/sampled/pilot.h"
#include "attention/sampled/sample.h"
#include "base/merge.h"
#include "tests/unit/attention/approx_rig.h"

namespace kvm::attention {
namespace {

using testing::Buffer;
using testing::Head;
using testing::HeadShape;

// Candidates that the last run of a head drew, by shard.
SampleState sample_of(const Head& head, uint32_t shard) {
  const Context c = make_context(head.input, head.plan, head.prepared->data());
  SampleState s =
      sample_state(c, head.states->data() + shard * head.plan.state_bytes, head.scratch->data());
  s.candidates.n = s.head->n_candidates;
  return s;
}

// What a scan says of all keys of R: by position, logits of all rows and then |v|.
std::map<uint64_t, std::vector<double>> scan_all(const Head& head) {
  const Context c = make_context(head.input, head.plan, head.prepared->data());
  const QueryRows q = query_rows(c.problem, c.prepared.exact);
  std::map<uint64_t, std::vector<double>> keys;
  for_stretches_in(c, 0, UINT64_MAX, [&](const Use& use, const Stretch& stretch) {
    const SketchedRun& run = head.sketches[stretch.index_run];
    const hash_index::SketchSpan span{.frame = run.frame,
                                      .query = c.prepared.queries + use.query_at,
                                      .blocks = run.blocks,
                                      .n_blocks = run.n_blocks,
                                      .position = run.position};
    for (uint64_t t = stretch.position; t < stretch.end(); t += 64) {
      std::vector<float> logits(size_t{c.rows} * 64);
      std::vector<float> norms(64);
      hash_index::scan_logits(span, c.rows, static_cast<uint32_t>((t - run.position) / 64),
                              logits.data(), norms.data());
      for (uint32_t i = 0; i < 64; ++i) {
        std::vector<double>& key = keys[t + i];
        for (uint32_t r = 0; r < c.rows; ++r) {
          const float* bias = bias_of(q, use.variant);
          key.push_back(static_cast<double>(logits[r * 64 + i]) +
                        (bias == nullptr ? 0.0 : static_cast<double>(bias[r] * c.problem.scale)));
        }
        key.push_back(static_cast<double>(norms[i]));
      }
    }
  });
  return keys;
}

struct Want {
  std::vector<double> o;
  double lse = 0;
  double sigma_o = 0;
  double sigma_lse = 0;
  double noise = 0;
  double bar = 0;
};

// sampled_head and error_bar of models/house/estimators.py, with the candidates of the last run.
Want reference_of(const Head& head, uint32_t row) {
  struct Key {
    double s, s_hat, p;
    uint64_t t;
  };
  const auto scanned = scan_all(head);
  const SampleState sample = sample_of(head, 0);
  std::vector<Key> drawn;
  std::map<uint64_t, double> p_of;
  for (uint32_t i = 0; i < sample.candidates.n; ++i) {
    const auto size = static_cast<double>(sample.candidates.size[i]);
    const uint64_t t = sample.candidates.position[i];
    p_of[t] = std::min(1.0, size);
    if (static_cast<double>(sample.candidates.random[i]) < size) {
      drawn.push_back({head.logit(row, t),
                       static_cast<double>(sample.candidates.logits[i * head.rows() + row]),
                       std::min(1.0, size), t});
    }
  }
  double top = -INFINITY;
  for (uint64_t t = 0; t < head.shape.n_tokens; ++t) {
    if (head.sees(row, t)) {
      top = std::max(top, head.logit(row, t));
    }
  }
  const float* sinks = head.problem.sink_logits;
  double d_hat =
      sinks == nullptr ? 0 : std::exp(static_cast<double>(sinks[row % head.shape.group]) - top);
  std::vector<double> n_hat(head.shape.dim_v);
  const auto add = [&](uint64_t t, double weight) {
    d_hat += weight;
    for (uint32_t d = 0; d < head.shape.dim_v; ++d) {
      n_hat[d] += weight * static_cast<double>(head.v[t][d]);
    }
  };
  for (uint64_t t = 0; t < head.shape.n_tokens; ++t) {
    if (head.sees(row, t) && !scanned.contains(t)) {
      add(t, std::exp(head.logit(row, t) - top));
    }
  }
  double n_open = 0, open = 0, square = 0, hat = 0, mass = 0, e1 = 0, e2 = 0;
  for (const Key& key : drawn) {
    const double w = std::exp(key.s - top);
    add(key.t, w / key.p);
    mass += w / key.p;
    if (key.p < 1) {
      const double e = key.s - key.s_hat;
      open += w / key.p;
      n_open += 1;
      square += (1 - key.p) * (w / key.p) * (w / key.p);
      hat += std::exp(key.s_hat - top) / key.p;
      e1 += w / key.p * e;
      e2 += w / key.p * e * e;
    }
  }
  Want want;
  for (double n : n_hat) {
    want.o.push_back(n / d_hat);
  }
  const double a = open / hat;
  double open_mass = 0, spread = 0;
  const auto& log_c = sample.head->log_c;
  for (const auto& [t, key] : scanned) {
    double size = hash_index::kMinSize;
    for (uint32_t r = 0; r < head.rows(); ++r) {
      size = std::max(size, std::exp(key[r] + static_cast<double>(log_c[r])) * key.back());
    }
    const double p = p_of.contains(t) ? p_of[t] : std::min(1.0, size);
    const double h = std::exp(key[row] - top);
    open_mass += p < 1 ? h : 0;
    spread += p < 1 ? h * h * (1 - p) / p : 0;
  }
  const double d_lse = d_hat + a * (open_mass - hat);
  want.lse = top + std::log(d_lse);
  want.noise = std::sqrt(std::max(e2 / open - e1 / open * (e1 / open), 0.0));
  double v_o = 0, v_lse = 0, r2 = 0, o2 = 0;
  for (double x : want.o) {
    o2 += x * x;
  }
  for (const Key& key : drawn) {
    const double w = std::exp(key.s - top);
    double away = 0;
    for (uint32_t d = 0; d < head.shape.dim_v; ++d) {
      const double x = static_cast<double>(head.v[key.t][d]) - want.o[d];
      away += x * x;
    }
    const double chance = (1 - key.p) / (key.p * key.p);
    const double predicted = key.p < 1 ? a * std::exp(key.s_hat - top) : 0;
    v_o += chance * w * w * away;
    v_lse += chance * (w - predicted) * (w - predicted);
    r2 += w / key.p * away / mass;
  }
  want.sigma_o = std::sqrt(v_o) / d_hat;
  want.sigma_lse = std::sqrt(v_lse) / d_lse;
  const double v = want.noise * want.noise;
  const double model = a * std::sqrt(std::exp(v) * spread * r2) / d_hat;
  // Student's t by its density: its two-sided quantile of 0.01.
  const double n = std::max(std::min(open * open / square, n_open) - 1, 2.0);
  double t = 0;
  double tail = 1;
  const double norm = std::exp(std::lgamma((n + 1) / 2) - std::lgamma(n / 2)) / std::sqrt(n * M_PI);
  for (; tail > 0.01; t += 1e-3) {
    tail -= 2e-3 * norm * std::pow(1 + (t + 5e-4) * (t + 5e-4) / n, -(n + 1) / 2);
  }
  const double kappa = 1.25 * t / 2.575829 * std::max(1.0, std::exp((v - 0.36) / 2));
  want.bar = std::max(kappa * std::max(want.sigma_o, model), 2e-3 * std::sqrt(o2));
  return want;
}

void expect_reference(const Head& head, double tolerance) {
  for (uint32_t r = 0; r < head.rows(); ++r) {
    SCOPED_TRACE(r);
    const Want want = reference_of(head, r);
    double size = 0;
    double difference = 0;
    for (uint32_t d = 0; d < head.shape.dim_v; ++d) {
      const double e = static_cast<double>(head.o[r * head.shape.dim_v + d]) - want.o[d];
      size += want.o[d] * want.o[d];
      difference += e * e;
    }
    EXPECT_LT(std::sqrt(difference / size), tolerance);
    EXPECT_NEAR(static_cast<double>(head.lse[r]), want.lse, tolerance);
    EXPECT_NEAR(static_cast<double>(head.report.err_o[r]), want.bar / std::sqrt(size),
                2e-2 * want.bar / std::sqrt(size));
    EXPECT_NEAR(static_cast<double>(head.report.noise[r]), want.noise, 1e-3 + 1e-2 * want.noise);
  }
}

TEST(Sampled, AgreesWithTheReference) {
  for (const KernelTable* table : available_tables()) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kF32, Dtype::kF16}) {
      for (const uint32_t group : {1u, 3u, 4u, 8u}) {
        SCOPED_TRACE(std::string(table->name) + " " + dtype_name(dtype) + " " +
                     std::to_string(group));
        Head head({.n_tokens = 2500,
                   .n_query = group == 8 ? 2u : 1u,
                   .group = group,
                   .dim_k = group == 3 ? 40u : 64u,
                   .dim_v = group == 3 ? 24u : 48u,
                   .dtype = dtype},
                  group);
        head.problem.fp32_weights = true;
        head.input.table = table;
        head.input.params.budget = 150;
        head.build();
        head.run();
        ASSERT_FALSE(head.plan.exact);
        expect_reference(head, 2e-4);
      }
    }
  }
}

// D and N of the sample alone, by the sums of a shard.
void sample_sums(const Head& head, uint32_t row, double reference, double* d,
                 std::vector<double>* n) {
  const SampleState s = sample_of(head, 0);
  const double w = std::exp(static_cast<double>(s.sums.m[row]) - reference);
  *d = 0;
  n->assign(head.shape.dim_v, 0.0);
  for (uint32_t i = 0; i < kGatherKeys; ++i) {
    for (const GatherSum which : {kSumClosed, kSumOpen}) {
      *d += w * static_cast<double>(s.sums.sums[(row * kGatherSums + which) * kGatherKeys + i]);
    }
  }
  const uint32_t stride = acc_stride(head.problem);
  for (const GatherVector which : {kVecClosed, kVecOpen}) {
    const float* acc = s.sums.acc + (which * padded_rows(head.rows()) + row) * stride;
    for (uint32_t x = 0; x < head.shape.dim_v; ++x) {
      (*n)[x] += w * static_cast<double>(acc[x]);
    }
  }
}

TEST(Sampled, DenominatorAndNumeratorAreUnbiased) {
  Head head({.n_tokens = 1024, .group = 2, .dim_k = 32, .dim_v = 8}, 11);
  head.input.params.budget = 60;
  head.build();
  constexpr int kSeeds = 10000;
  const uint32_t n_channels = head.shape.dim_v + 1;
  std::vector<double> sum(2 * n_channels), square(2 * n_channels), want(2 * n_channels);
  std::vector<double> top(2);
  for (int seed = 0; seed < kSeeds; ++seed) {
    head.input.params.seed = static_cast<uint64_t>(seed) * 7919;
    head.run();
    if (seed == 0) {
      for (uint32_t r = 0; r < 2; ++r) {
        for (const auto& [t, unused] : scan_all(head)) {
          top[r] = std::max(top[r], head.logit(r, t));
        }
        for (const auto& [t, unused] : scan_all(head)) {
          const double w = std::exp(head.logit(r, t) - top[r]);
          want[r * n_channels] += w;
          for (uint32_t d = 0; d < head.shape.dim_v; ++d) {
            want[r * n_channels + 1 + d] += w * static_cast<double>(head.v[t][d]);
          }
        }
      }
    }
    for (uint32_t r = 0; r < 2; ++r) {
      double mass = 0;
      std::vector<double> n;
      sample_sums(head, r, top[r], &mass, &n);
      n.insert(n.begin(), mass);
      for (uint32_t i = 0; i < n_channels; ++i) {
        sum[r * n_channels + i] += n[i];
        square[r * n_channels + i] += n[i] * n[i];
      }
    }
  }
  for (uint32_t i = 0; i < 2 * n_channels; ++i) {
    const double mean = sum[i] / kSeeds;
    const double variance = square[i] / kSeeds - mean * mean;
    EXPECT_LT(std::abs(mean - want[i]), 4 * std::sqrt(variance / kSeeds)) << i << " " << want[i];
  }
}

std::set<uint64_t> drawn_by(const Head& head) {
  std::set<uint64_t> drawn;
  for (uint32_t shard = 0; shard < head.plan.n_shards; ++shard) {
    const SampleState s = sample_of(head, shard);
    for (uint32_t i = 0; i < s.candidates.n; ++i) {
      if (s.candidates.random[i] < s.candidates.size[i]) {
        drawn.insert(s.candidates.position[i]);
      }
    }
  }
  return drawn;
}

TEST(Sampled, SamplesOfGrowingBudgetsAreNested) {
  Head head({.n_tokens = 8192}, 3);
  head.build();
  std::set<uint64_t> smaller;
  for (const uint64_t budget : {40, 100, 400, 900}) {
    head.input.params.budget = budget;
    head.run();
    const std::set<uint64_t> drawn = drawn_by(head);
    EXPECT_TRUE(std::includes(drawn.begin(), drawn.end(), smaller.begin(), smaller.end()));
    EXPECT_GT(drawn.size(), smaller.size());
    // Between one row's budget and that of all rows.
    EXPECT_GT(drawn.size(), budget * 7 / 10);
    EXPECT_LT(drawn.size(), budget * 4 * 13 / 10);
    smaller = drawn;
  }
}

TEST(Sampled, ManyShardsAreOneSampleAndAnyOrderGivesTheSameBits) {
  Head head({.n_tokens = 70000, .group = 2, .dim_k = 16, .dim_v = 8}, 17);
  head.input.params.budget = 2000;
  head.build();
  head.run();
  ASSERT_EQ(head.plan.n_shards, 3u);
  const std::vector<float> first = head.o;
  const std::vector<float> first_lse = head.lse;
  for (uint32_t r = 0; r < 2; ++r) {
    EXPECT_LT(head.error_o(r), 1.5 * static_cast<double>(head.report.err_o[r]));
    EXPECT_LT(head.error_lse(r), 1.5 * static_cast<double>(head.report.err_lse[r]));
  }
  // The sum over shards is that over all keys.
  double n_keys = 0;
  for (uint32_t shard = 0; shard < 3; ++shard) {
    n_keys += sample_of(head, shard).head->sums.n_keys;
  }
  EXPECT_EQ(n_keys, static_cast<double>(head.plan.n_keys_indexed));
  for (int again = 0; again < 3; ++again) {
    head.run();
    EXPECT_EQ(head.o, first);
    EXPECT_EQ(head.lse, first_lse);
  }
}

// --- Growth -------------------------------------------------------------------------------------

std::set<uint64_t> positions_of(const SampleState& s) {
  std::set<uint64_t> out;
  for (uint32_t i = 0; i < s.candidates.n; ++i) {
    if (s.candidates.random[i] < s.candidates.size[i]) {
      out.insert(s.candidates.position[i]);
    }
  }
  return out;
}

TEST(Verified, GrowingByRowIsAScanWithThatC) {
  for (const KernelTable* table : available_tables()) {
    SCOPED_TRACE(table->name);
    Head head({.n_tokens = 6000}, 23);
    head.input.table = table;
    head.input.params.mode = ApproxMode::kVerified;
    head.input.params.budget = 100;
    head.input.params.eps = 10;  // the first bar meets it
    head.build();
    head.run();
    const Context c = make_context(head.input, head.plan, head.prepared->data());
    const SampleState grown = sample_of(head, 0);
    const float reach = grown.head->reach;
    const std::set<uint64_t> before = positions_of(grown);
    const float first[4] = {0, std::log(1.7f), std::log(1.2f), 0};
    const float second[4] = {std::log(1.5f), std::log(2.0f), 0, 0};
    redraw_shard(c, first, head.scratch->data(), grown);
    redraw_shard(c, second, head.scratch->data(), grown);
    EXPECT_NEAR(grown.head->reach, reach / 3.4f, 1e-5f * reach);
    const std::set<uint64_t> after = positions_of(grown);
    EXPECT_TRUE(std::ranges::includes(after, before));
    EXPECT_GT(after.size(), before.size());
    // The same by another scan, in memory of its own.
    Buffer memory(head.plan.state_bytes);
    std::memcpy(memory.data(), head.states->data(), head.plan.state_bytes);
    const SampleState scanned = sample_state(c, memory.data(), nullptr);
    float log_c[4];
    for (uint32_t r = 0; r < 4; ++r) {
      log_c[r] = c.prepared.head->log_c[r] + first[r] + second[r];
    }
    *scanned.head = SampleHead{};
    draw_shard(c, 0, log_c, grown.head->reach, head.scratch->data(), scanned);
    SampleState fresh = scanned;
    fresh.candidates.n = fresh.head->n_candidates;
    // Sizes that have grown are 3e-4 off.
    const std::set<uint64_t> want = positions_of(fresh);
    std::vector<uint64_t> difference;
    std::ranges::set_symmetric_difference(after, want, std::back_inserter(difference));
    EXPECT_LE(difference.size(), 2u);
    EXPECT_GE(fresh.head->n_closed + 1, grown.head->n_closed);
    EXPECT_GT(fresh.head->n_closed, 10u);
    EXPECT_EQ(fresh.head->sums.n_keys, grown.head->sums.n_keys);
    for (uint32_t r = 0; r < head.rows(); ++r) {
      EXPECT_NEAR(grown.head->log_c[r], log_c[r], 1e-5f);
      EXPECT_NEAR(grown.head->sums.open_mass[r], fresh.head->sums.open_mass[r],
                  0.02 * fresh.head->sums.open_mass[r]);
    }
    // A later growth finds its keys among the candidates of the first scan.
    const std::set<uint64_t> found(grown.candidates.position,
                                   grown.candidates.position + grown.candidates.n);
    for (uint32_t i = 0; i < fresh.candidates.n; ++i) {
      if (fresh.candidates.random[i] < 0.999f * grown.head->reach * fresh.candidates.size[i]) {
        EXPECT_TRUE(found.contains(fresh.candidates.position[i]));
      }
    }
  }
}

// Rows that need more get more, and those that do not are left alone.
TEST(Verified, GrowthIsSolvedForEveryRow) {
  std::mt19937_64 random(5);
  std::uniform_real_distribution<double> uniform;
  std::vector<float> size(2 * 400), excess(2 * 400);
  KeyShares keys{.n = 390, .stride = 400, .rows = 2, .size = size.data(), .excess = excess.data()};
  for (uint32_t i = 0; i < keys.n; ++i) {
    // Every other key belongs to one row alone.
    const uint32_t own = i % 2;
    size[own * 400 + i] = static_cast<float>(0.02 + 0.2 * uniform(random));
    size[(1 - own) * 400 + i] = 1e-4f;
    excess[own * 400 + i] = size[own * 400 + i] * (own == 0 ? 1e-3f : 0.03f);
  }
  double growth[2];
  solve_growth(keys, 1.0, growth);
  EXPECT_EQ(growth[0], 1.0);
  EXPECT_GT(growth[1], 2.0);
  double squared = 0;
  for (uint32_t i = 1; i < keys.n; i += 2) {
    const double p = std::min(1.0, growth[1] * static_cast<double>(size[400 + i]));
    squared += static_cast<double>(excess[400 + i]) * (1 - p) / p;
  }
  EXPECT_NEAR(squared, 1.0, 0.05);
  solve_growth(keys, 1.0 / 16, growth);
  EXPECT_LT(growth[0], 1.0);
}

TEST(Verified, MeetsEpsOrAnswersExactly) {
  int grown = 0;
  int exact = 0;
  int sampled = 0;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    Head head({.n_tokens = 12288, .sharpness = 1.0 + 0.25 * static_cast<double>(seed)}, seed);
    head.build();
    for (const float eps : {0.15f, 0.06f, 0.01f}) {
      head.input.params.mode = ApproxMode::kVerified;
      head.input.params.budget = seed % 2 == 0 ? 0 : 64;
      head.input.params.eps = eps;
      head.run();
      grown += head.report.n_grown > 0 ? 1 : 0;
      exact += head.report.n_exact > 0 ? 1 : 0;
      sampled += head.report.n_exact > 0 ? 0 : 1;
      const std::vector<float> o = head.o;
      const std::vector<float> lse = head.lse;
      for (uint32_t r = 0; r < head.rows(); ++r) {
        EXPECT_LE(head.report.err_o[r], eps);
        EXPECT_LT(head.error_o(r), 1.3 * static_cast<double>(eps) + 4e-3);
      }
      if (head.report.n_exact > 0) {
        head.run_exact();
        EXPECT_EQ(head.o, o);
        EXPECT_EQ(head.lse, lse);
      } else {
        EXPECT_LT(head.report.keys_read, head.report.keys_present);
      }
    }
  }
  EXPECT_GT(grown, 2);
  EXPECT_GT(exact, 2);
  EXPECT_GT(sampled, 2);
}

TEST(Verified, ExactAnswersAreThoseOfExactOverSeveralShards) {
  for (const float eps : {1e-6f, 0.02f}) {
    for (const uint64_t budget : {0, 50}) {
      Head head({.n_tokens = 67000, .group = 3, .dim_k = 16, .dim_v = 16, .sharpness = 0.3}, 2);
      head.input.params.mode = ApproxMode::kVerified;
      head.input.params.eps = eps;
      head.input.params.budget = budget;
      head.input.params.max_read_fraction = 1e-4f;
      head.build();
      head.run();
      EXPECT_EQ(head.report.n_exact, 3u);
      EXPECT_EQ(head.report.err_o[0], 0.0f);
      const std::vector<float> o = head.o;
      head.run_exact();
      EXPECT_EQ(head.o, o);
    }
  }
}

TEST(Sampled, ASampleOfEverythingIsExact) {
  Head head({.n_tokens = 2048}, 9);
  head.build();
  head.input.params.budget = 100000;
  head.run();
  EXPECT_TRUE(head.plan.exact);
  // One key short of all: the plan cannot know, the scan does.
  head.input.params.budget = 1;
  const uint64_t n = (head.run(), head.plan.n_keys_indexed);
  head.input.params.budget = n - 1;
  head.run();
  ASSERT_FALSE(head.plan.exact);
  const std::vector<float> o = head.o;
  if (head.report.n_exact > 0) {
    head.run_exact();
    EXPECT_EQ(head.o, o);
  } else {
    for (uint32_t r = 0; r < head.rows(); ++r) {
      EXPECT_LT(head.error_o(r), 6e-3);
    }
  }
}

// --- The bar ------------------------------------------------------------------------------------

TEST(Sampled, TheBarCoversTheError) {
  int misses = 0;
  int misses_lse = 0;
  int trials = 0;
  double ratio = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Head head(
        {.n_tokens = 4096, .dim_v = 64, .sharpness = 1.0 + 0.2 * static_cast<double>(seed % 8)},
        seed + 100);
    head.input.params.budget = 150;
    head.build();
    head.run();
    for (uint32_t r = 0; r < head.rows(); ++r) {
      ++trials;
      const double share = head.error_o(r) / static_cast<double>(head.report.err_o[r]);
      ratio += share;
      misses += share > 1 ? 1 : 0;
      misses_lse += head.error_lse(r) > static_cast<double>(head.report.err_lse[r]) ? 1 : 0;
    }
  }
  // delta 0.01: of 240 trials (four rows share a sample) 2.4 misses are expected.
  EXPECT_LE(misses, 9);
  EXPECT_LE(misses_lse, 9);
  EXPECT_GT(ratio / trials, 0.4);  // and it is no wider than it must be
  EXPECT_LT(ratio / trials, 0.95);
}

TEST(Sampled, KappaFollowsDelta) {
  EXPECT_DOUBLE_EQ(kappa_of(0.5), 1.1);
  EXPECT_NEAR(kappa_of(0.1), 1.1, 1e-12);
  EXPECT_NEAR(kappa_of(0.01), 1.25, 1e-12);
  EXPECT_NEAR(kappa_of(0.003), 1.5, 1e-12);
  EXPECT_NEAR(kappa_of(std::sqrt(0.1 * 0.01)), 1.175, 1e-12);
  EXPECT_GT(kappa_of(0.001), 1.5);
  EXPECT_NEAR(gaussian_of(0.05), 1.959964, 1e-4);
  EXPECT_NEAR(Kappas(0.05).lse, 1.1 * 1.959964, 1e-4);
}

// Against tables of Student's t.
TEST(Sampled, BarsOfFewDrawsAreWider) {
  const double z10 = gaussian_of(0.1);
  const double z01 = gaussian_of(0.01);
  EXPECT_NEAR(few_draws(6, z10), 2.015 / 1.645, 0.02);
  EXPECT_NEAR(few_draws(11, z10), 1.812 / 1.645, 0.01);
  EXPECT_NEAR(few_draws(6, z01), 4.032 / 2.576, 0.02);
  EXPECT_NEAR(few_draws(11, z01), 3.169 / 2.576, 0.01);
  EXPECT_NEAR(few_draws(101, z01), 2.626 / 2.576, 0.005);
  EXPECT_NEAR(few_draws(1e6, z01), 1, 1e-4);
  EXPECT_EQ(few_draws(0.5, z01), few_draws(3, z01));
  EXPECT_EQ(few_draws(NAN, z01), few_draws(3, z01));
}

TEST(Sampled, WithoutABudgetItReadsWhatEpsNeeds) {
  constexpr float kEps[] = {0.05f, 0.1f, 0.2f};
  double bars[3] = {};
  uint64_t read[3] = {};
  constexpr int kHeads = 6;
  for (uint64_t seed = 0; seed < kHeads; ++seed) {
    Head head({.n_tokens = 12288, .group = 2}, seed);
    head.build();
    for (int i = 0; i < 3; ++i) {
      head.input.params.budget = 0;
      head.input.params.eps = kEps[i];
      head.input.params.max_read_fraction = 0.9f;
      head.run();
      ASSERT_EQ(head.report.n_exact, 0u);
      bars[i] += static_cast<double>(std::max(head.report.err_o[0], head.report.err_o[1])) / kHeads;
      read[i] += head.report.keys_read;
    }
  }
  for (int i = 0; i < 3; ++i) {
    EXPECT_GT(bars[i], 0.5 * static_cast<double>(kEps[i]));
    EXPECT_LT(bars[i], 1.6 * static_cast<double>(kEps[i]));
    EXPECT_TRUE(i == 0 || read[i] < read[i - 1]);
  }
}

TEST(Sampled, ThresholdSolvesItsEquation) {
  std::mt19937_64 random(1);
  std::lognormal_distribution<float> size(0, 3);
  Buffer memory(1024 * sizeof(float));
  auto* sizes = reinterpret_cast<float*>(memory.data());
  std::generate_n(sizes, 1024, [&] { return size(random); });
  for (const KernelTable* table : available_tables()) {
    for (const double wanted : {0.5, 3.0, 64.0, 500.0, 1000.0}) {
      const auto c = static_cast<double>(threshold(*table->sampled, sizes, 1024, wanted));
      double sum = 0;
      for (int i = 0; i < 1024; ++i) {
        sum += std::min(1.0, c * static_cast<double>(sizes[i]));
      }
      EXPECT_NEAR(sum, wanted, 1e-3 * wanted) << table->name;
    }
    // More than there are positive ones.
    std::fill_n(sizes + 512, 512, 0.0f);
    const float c = threshold(*table->sampled, sizes, 1024, 700);
    EXPECT_GE(c * *std::min_element(sizes, sizes + 512), 0.9f);
    std::generate_n(sizes, 1024, [&] { return size(random); });
  }
}

// --- What is visible ----------------------------------------------------------------------------

// With most keys drawn, the error is small for every shape of the problem, and the parts that a
// sample must not touch are read exactly.
void expect_close(Head& head, const char* what) {
  SCOPED_TRACE(what);
  head.build();
  head.run();
  ASSERT_FALSE(head.plan.exact);
  uint64_t present = 0;
  for (uint64_t t = 0; t < head.shape.n_tokens; ++t) {
    bool seen = false;
    for (uint32_t i = 0; i < head.shape.n_query; ++i) {
      seen = seen || head.sees(i * head.shape.group, t);
    }
    present += seen ? 1 : 0;
  }
  EXPECT_EQ(head.plan.n_keys_present, present);
  for (uint32_t r = 0; r < head.rows(); ++r) {
    EXPECT_LT(head.error_o(r), 2 * static_cast<double>(head.report.err_o[r])) << r;
    EXPECT_LT(head.error_lse(r), 2 * static_cast<double>(head.report.err_lse[r])) << r;
    EXPECT_LT(head.report.err_o[r], 0.25f) << r;
  }
}

TEST(Sampled, KnowsWhatIsVisible) {
  const HeadShape shape{.n_tokens = 4100, .n_query = 3, .group = 4};
  const auto head = [&] {
    Head h(shape, 41);
    h.input.params.budget = 500;
    return h;
  };
  {
    Head h = head();
    expect_close(h, "causal");
  }
  {
    Head h = head();
    h.problem.visible.query_position = 3000;
    expect_close(h, "tokens behind the query");
  }
  {
    Head h = head();
    h.problem.visible.causal = false;
    expect_close(h, "not causal");
  }
  {
    Head h = head();
    h.problem.visible.window = 2500;
    h.problem.visible.sinks = 70;
    expect_close(h, "window and sinks");
  }
  {
    Head h = head();
    const PositionRange include[] = {{3, 700}, {1000, 2333}, {2400, 4100}};
    const PositionRange exclude[] = {{200, 230}, {1500, 1700}};
    h.problem.visible.include = include;
    h.problem.visible.exclude = exclude;
    expect_close(h, "ranges");
  }
  {
    Head h = head();
    const uint64_t tree[3] = {1, 3, 5};
    h.problem.visible.tree = tree;
    h.problem.visible.tree_stride_words = 1;
    expect_close(h, "tree");
  }
  {
    Head h = head();
    h.dropped.assign(shape.n_tokens, 0);
    std::fill_n(h.dropped.begin() + 640, 64, uint8_t{1});
    std::fill_n(h.dropped.begin() + 1000, 300, uint8_t{1});
    h.dropped[2000] = 1;
    expect_close(h, "dropped");
  }
  {
    Head h = head();
    h.log_weight.assign(shape.n_tokens, 0.0f);
    std::fill_n(h.log_weight.begin() + 900, 200, -1.5f);
    h.log_weight[3000] = 2.0f;
    expect_close(h, "log weights");
  }
  {
    Head h = head();
    const float sinks[4] = {-2.0f, 1.0f, 3.0f, 6.0f};
    h.problem.sink_logits = sinks;
    expect_close(h, "sink logits");
    expect_reference(h, 5e-3);
  }
  {
    Head h = head();
    h.problem.softcap = 8.0f;
    expect_close(h, "soft cap");
  }
  {
    Head h = head();
    std::vector<float> scale(shape.dim_k, 1.0f), bias(shape.dim_k, 0.2f);
    std::fill_n(scale.begin(), 8, 0.7f);
    h.transforms = {{}, {.channel_scale = scale.data(), .bias = bias.data()}};
    h.transform.assign(shape.n_tokens, 0);
    std::fill_n(h.transform.begin() + 1000, 1500, uint16_t{1});
    expect_close(h, "transforms");
    expect_reference(h, 5e-3);
  }
}

// --- TopK ---------------------------------------------------------------------------------------

// The answer from F and the `budget` best keys of R by exact score.
void brute_force(const Head& head, uint32_t row, const std::set<uint64_t>& rest, uint64_t budget,
                 std::vector<double>* o, double* lse) {
  std::vector<std::pair<double, uint64_t>> order;
  for (uint64_t t : rest) {
    order.emplace_back(-head.logit(row, t), t);
  }
  std::sort(order.begin(), order.end());
  std::set<uint64_t> chosen;
  for (uint64_t i = 0; i < std::min<uint64_t>(budget, order.size()); ++i) {
    chosen.insert(order[i].second);
  }
  double mass = 0;
  o->assign(head.shape.dim_v, 0.0);
  for (uint64_t t = 0; t < head.shape.n_tokens; ++t) {
    if (head.sees(row, t) && (!rest.contains(t) || chosen.contains(t))) {
      const double w = std::exp(head.logit(row, t));
      mass += w;
      for (uint32_t d = 0; d < head.shape.dim_v; ++d) {
        (*o)[d] += w * static_cast<double>(head.v[t][d]);
      }
    }
  }
  for (double& x : *o) {
    x /= mass;
  }
  *lse = std::log(mass);
}

std::set<uint64_t> rest_of(const Head& head) {
  const Context c = make_context(head.input, head.plan, head.prepared->data());
  std::set<uint64_t> rest;
  for (const Stretch& stretch : c.stretches()) {
    for (uint64_t t = stretch.position; t < stretch.end(); ++t) {
      rest.insert(t);
    }
  }
  return rest;
}

TEST(TopK, ByExactScoresEqualsBruteForceTiesIncluded) {
  for (const KernelTable* table : available_tables()) {
    SCOPED_TRACE(table->name);
    Head head({.n_tokens = 40000, .group = 3, .dim_k = 16, .dim_v = 8, .dtype = Dtype::kF32}, 8);
    // Many equal keys with different values.
    for (uint64_t t = 500; t < 40000; t += 7) {
      head.k[t] = head.k[500];
    }
    head.input.table = table;
    head.input.params.mode = ApproxMode::kTopK;
    head.input.params.proposal = Proposal::kExact;
    head.input.params.budget = 700;
    head.build();
    head.run();
    ASSERT_FALSE(head.plan.exact);
    const std::set<uint64_t> rest = rest_of(head);
    for (uint32_t r = 0; r < head.rows(); ++r) {
      std::vector<double> want;
      double lse = 0;
      brute_force(head, r, rest, 700, &want, &lse);
      for (uint32_t d = 0; d < head.shape.dim_v; ++d) {
        EXPECT_NEAR(static_cast<double>(head.o[r * head.shape.dim_v + d]), want[d], 2e-4);
      }
      EXPECT_NEAR(static_cast<double>(head.lse[r]), lse, 2e-4);
      EXPECT_TRUE(std::isnan(head.report.err_o[r]));
    }
  }
}

TEST(TopK, BySketchFindsTheLargest) {
  Head head({.n_tokens = 20000, .group = 4, .sharpness = 3.0}, 18);
  head.input.params.mode = ApproxMode::kTopK;
  head.input.params.budget = 300;
  head.build();
  head.run();
  const std::set<uint64_t> rest = rest_of(head);
  for (uint32_t r = 0; r < head.rows(); ++r) {
    std::vector<double> want;
    double lse = 0;
    brute_force(head, r, rest, 300, &want, &lse);
    EXPECT_NEAR(static_cast<double>(head.lse[r]), lse, 2e-2);
  }
  EXPECT_LE(head.report.keys_read, head.plan.n_keys_present - rest.size() + 4 * 4 * 300);
  const std::vector<float> o = head.o;
  head.run();
  EXPECT_EQ(head.o, o);
}

// Bars save work: with none, or with such that nothing passes, the answer has the same bits.
TEST(TopK, BarsOfThePilotChangeNothing) {
  Head head({.n_tokens = 20000, .group = 4, .sharpness = 3.0}, 19);
  head.input.params.mode = ApproxMode::kTopK;
  head.input.params.budget = 300;
  head.build();
  head.run();
  const std::vector<float> o = head.o;
  const Context c = make_context(head.input, head.plan, head.prepared->data());
  for (uint32_t r = 0; r < head.rows(); ++r) {
    EXPECT_TRUE(std::isfinite(c.prepared.head->log_c[r])) << r;
  }
  for (const float bar : {-INFINITY, 1e30f}) {
    SCOPED_TRACE(bar);
    std::fill_n(c.prepared.head->log_c, head.rows(), bar);
    for (uint32_t s = 0; s < head.plan.n_shards; ++s) {
      eval_shard(head.input, head.plan, head.prepared->data(), s, head.scratch->data(),
                 head.states->data() + s * head.plan.state_bytes);
    }
    std::fill(head.o.begin(), head.o.end(), 0.0f);
    ApproxReport report;
    finish_approx(head.input, head.plan, head.prepared->data(), head.scratch->data(),
                  head.states->data(), &report);
    EXPECT_EQ(head.o, o);
    EXPECT_EQ(report.keys_read, head.report.keys_read);
  }
}

// --- Hash tables --------------------------------------------------------------------------------

// Keys that share the codes of a row in two tables or more, by brute force over the lookups of a
// row alone.
TEST(Hashed, EstimatorIsASoftmaxOverLogitsMinusLogU) {
  Head head({.n_tokens = 5000, .with_tables = true}, 28);
  head.input.params.proposal = Proposal::kLsh;
  head.build();
  head.run();
  ASSERT_FALSE(head.plan.exact);
  const std::set<uint64_t> rest = rest_of(head);
  const HashedRun& run = head.hashes[0];
  const auto& planes = *head.input.index.planes;
  for (uint32_t r = 0; r < head.rows(); ++r) {
    std::vector<uint16_t> codes(head.shape.lsh.n_tables);
    const float* q = head.q.data() + r * head.shape.dim_k;
    hash_index::hash_queries(planes, q, 1, codes.data());
    Buffer work(hash_index::lookup_scratch_bytes(run.n_keys, 1));
    std::vector<hash_index::LshCandidate> found(run.n_keys);
    const uint32_t n = hash_index::lookup(planes, run.tables, run.n_keys, run.n_keys, codes.data(),
                                          1, work.data(), found.data(), nullptr);
    std::map<uint64_t, double> u_of;
    for (uint32_t i = 0; i < n; ++i) {
      const uint64_t t = found[i].id;
      double dot = 0, q2 = 0, k2 = 0;
      for (uint32_t d = 0; d < head.shape.dim_k; ++d) {
        const double x = static_cast<double>(head.k[t][d] - run.center[d]);
        dot += x * static_cast<double>(q[d]);
        q2 += static_cast<double>(q[d] * q[d]);
        k2 += x * x;
      }
      u_of[t] = hash_index::inclusion_probability(dot / std::sqrt(q2 * k2), head.shape.lsh);
    }
    double mass = 0;
    std::vector<double> o(head.shape.dim_v);
    int used = 0;
    for (uint64_t t = 0; t < head.shape.n_tokens; ++t) {
      if (!head.sees(r, t) || (rest.contains(t) && !u_of.contains(t))) {
        continue;
      }
      const double u = rest.contains(t) ? u_of[t] : 1.0;
      used += rest.contains(t) ? 1 : 0;
      const double w = std::exp(head.logit(r, t)) / u;
      mass += w;
      for (uint32_t d = 0; d < head.shape.dim_v; ++d) {
        o[d] += w * static_cast<double>(head.v[t][d]);
      }
    }
    EXPECT_GT(used, 20);
    for (uint32_t d = 0; d < head.shape.dim_v; ++d) {
      EXPECT_NEAR(static_cast<double>(head.o[r * head.shape.dim_v + d]), o[d] / mass, 3e-3);
    }
    EXPECT_NEAR(static_cast<double>(head.lse[r]), std::log(mass), 3e-3);
    EXPECT_TRUE(std::isnan(head.report.err_o[r]));
  }
}

TEST(Hashed, TopKTakesTheBestOfTheCandidates) {
  Head head({.n_tokens = 5000, .with_tables = true}, 29);
  head.input.params.mode = ApproxMode::kTopK;
  head.input.params.proposal = Proposal::kLsh;
  head.input.params.budget = 64;
  head.build();
  head.run();
  const std::set<uint64_t> rest = rest_of(head);
  for (uint32_t r = 0; r < head.rows(); ++r) {
    std::vector<double> unused;
    double most = 0, least = 0;
    brute_force(head, r, rest, 64, &unused, &most);
    brute_force(head, r, rest, 0, &unused, &least);
    EXPECT_LE(static_cast<double>(head.lse[r]), most + 2e-3);
    EXPECT_GT(static_cast<double>(head.lse[r]), least);
  }
}

TEST(Hashed, TopKWithoutABudgetTakesAllCandidates) {
  Head head({.n_tokens = 5000, .with_tables = true}, 30);
  head.input.params.mode = ApproxMode::kTopK;
  head.input.params.proposal = Proposal::kLsh;
  head.input.params.budget = 4000;
  head.build();
  head.run();
  const std::vector<float> all = head.lse;
  head.input.params.budget = 0;
  head.run();
  ASSERT_FALSE(head.plan.exact);
  for (uint32_t r = 0; r < head.rows(); ++r) {
    EXPECT_NEAR(head.lse[r], all[r], 1e-5);
  }
}

// --- Odd inputs ---------------------------------------------------------------------------------

TEST(Odd, FewTokensAreAnsweredExactly) {
  for (const uint64_t n : {0, 1, 63, 64, 130}) {
    Head head({.n_tokens = n}, 1);
    head.build();
    head.input.params.budget = 1;
    head.run();
    EXPECT_TRUE(head.plan.exact) << n;
  }
}

TEST(Odd, OneKeyWithAllTheMass) {
  Head head({.n_tokens = 8192}, 51);
  for (uint32_t d = 0; d < head.shape.dim_k; ++d) {
    head.k[3333][d] = head.q[d] * 3;  // of row 0
  }
  head.build();
  head.run();
  EXPECT_LT(head.error_o(0), 4e-3);
  EXPECT_TRUE(drawn_by(head).contains(3333));
}

// It belongs to the denominator all the same.
TEST(Odd, AHeavyKeyWithoutAValueIsDrawn) {
  Head head({.n_tokens = 8192}, 54);
  for (uint32_t d = 0; d < head.shape.dim_k; ++d) {
    head.k[3333][d] = head.q[d] * 2;  // of row 0
  }
  std::fill(head.v[3333].begin(), head.v[3333].end(), 0.0f);
  head.input.params.budget = 200;
  head.build();
  head.run();
  EXPECT_TRUE(drawn_by(head).contains(3333));
  EXPECT_LT(head.error_lse(0), 4e-3);
}

// Logits at which fp32 does not resolve the factors by which thresholds change.
TEST(Odd, HugeEqualLogitsComeToAnEnd) {
  for (const float size : {0x1p20f, 0x1.8p30f, 0x1.2p45f}) {
    Head head({.n_tokens = 20000, .dim_v = 16}, 55);
    std::fill(head.q.begin(), head.q.end(), size);
    for (uint64_t t = 0; t < 20000; ++t) {
      std::fill(head.k[t].begin(), head.k[t].end(), size);
      head.v[t][0] += 4;
    }
    head.input.params.mode = ApproxMode::kVerified;
    head.input.params.budget = 400;
    head.build();
    head.run();
    for (uint32_t r = 0; r < head.rows(); ++r) {
      EXPECT_TRUE(head.report.n_exact > 0 || head.report.err_o[r] <= head.input.params.eps);
      EXPECT_LT(head.error_o(r), 0.1) << size;
    }
  }
}

// What no number is known of is no small number.
TEST(Odd, BarsOfSumsThatAreNoNumbers) {
  const std::vector<double> vector(4, 1.0);
  std::vector<double> o(4);
  const Kappas kappas(0.01);
  RowTotals totals{.closed = 1,
                   .open = 1,
                   .norm2 = 2,
                   .hat = 1,
                   .chance = 1,
                   .chance_norm2 = 2,
                   .open_mass = 1,
                   .spread = 1,
                   .any_open = true,
                   .n_fixed = vector,
                   .n_sample = vector,
                   .chance_v = vector};
  EXPECT_TRUE(std::isfinite(estimate_row(totals, kappas, o).bar));
  totals.spread = NAN;
  EXPECT_EQ(estimate_row(totals, kappas, o).bar, INFINITY);
  EXPECT_EQ(estimate_row(totals, kappas, o).bar_lse, INFINITY);
  totals.spread = 1;
  totals.chance_norm2 = NAN;
  EXPECT_EQ(estimate_row(totals, kappas, o).bar, INFINITY);
  totals.open = 0;  // nothing drawn of what was left to chance
  totals.open_mass = NAN;
  EXPECT_EQ(estimate_row(totals, kappas, o).bar, INFINITY);
  // Values far longer than o: what is missing moves it by their length.
  totals.open_mass = 0.1;
  totals.norm2 = 1e4;
  EXPECT_GT(estimate_row(totals, kappas, o).bar, 8);
  totals.closed = 0;
  EXPECT_EQ(estimate_row(totals, kappas, o).bar, INFINITY);
}

TEST(Odd, EqualKeysZeroKeysAndALateSink) {
  Head head({.n_tokens = 8192, .dim_v = 64}, 52);
  for (uint64_t t = 0; t < 4096; ++t) {
    head.k[t] = head.k[0];
  }
  for (uint64_t t = 4096; t < 5000; ++t) {
    std::fill(head.k[t].begin(), head.k[t].end(), 0.0f);
  }
  std::fill(head.v[5001].begin(), head.v[5001].end(), 0.0f);
  for (uint32_t d = 0; d < head.shape.dim_k; ++d) {
    head.k[6000][d] *= 30;
  }
  head.input.params.budget = 400;
  head.build();
  head.run();
  for (uint32_t r = 0; r < head.rows(); ++r) {
    EXPECT_LT(head.error_o(r), 1.5 * static_cast<double>(head.report.err_o[r]));
  }
}

TEST(Odd, NothingThatIsStoredBreaksIt) {
  const float odd[] = {INFINITY, -INFINITY, NAN, 3e38f, 1e-40f};
  for (const ApproxMode mode : {ApproxMode::kSampled, ApproxMode::kVerified, ApproxMode::kTopK}) {
    for (const float x : odd) {
      Head head({.n_tokens = 4096, .dtype = Dtype::kF32, .with_tables = true}, 53);
      for (uint64_t t = 100; t < 4000; t += 97) {
        head.k[t][t % 64] = x;
      }
      head.input.params.mode = mode;
      head.build();
      head.run();
      // Finite keys give finite answers; all that is asked of the others is an answer.
      if (std::isfinite(x)) {
        EXPECT_TRUE(std::all_of(head.o.begin(), head.o.end(), [](float y) {
          return std::isfinite(y);
        })) << x;
      }
      for (float& y : head.q) {
        y = 0;
      }
      head.build();
      head.run();
    }
  }
}

}  // namespace
}  // namespace kvm::attention
