// SPDX-License-Identifier: Apache-2.0
// Which tokens are approximated, TopK, hash tables, and odd inputs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <random>
#include <set>

#include "attention/sampled/estimate.h"
#include "attention/sampled/select.h"
#include "tests/unit/attention/approx_reference.h"

namespace kvm::attention {
namespace {

using testing::Buffer;
using testing::drawn_by;
using testing::expect_reference;
using testing::Head;
using testing::HeadShape;
using testing::sample_of;
using testing::scan_all;

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
    expect_reference(h, 5e-3);
  }
  {
    Head h = head();
    std::vector<float> scale(shape.dim_k, 1.0f);
    std::fill_n(scale.begin(), 8, 0.7f);
    h.transforms = {{}, {.channel_scale = scale.data()}};
    h.transform.assign(shape.n_tokens, 0);
    std::fill_n(h.transform.begin() + 1000, 1500, uint16_t{1});
    expect_close(h, "transforms");
    expect_reference(h, 5e-3);
  }
}

// A cap that bends most logits: a proposal by logits without it would take the bend for noise of
// the sketch, and end up exact.
TEST(Sampled, ProposesByLogitsWithTheirSoftCap) {
  for (const ApproxMode mode : {ApproxMode::kSampled, ApproxMode::kVerified}) {
    Head head({.n_tokens = 30000, .dim_v = 16, .sharpness = 5.0}, 42);
    head.problem.softcap = 3.0f;
    head.input.params.mode = mode;
    head.input.params.budget = 0;
    head.input.params.eps = 0.1f;
    head.build();
    head.run();
    ASSERT_FALSE(head.plan.exact);
    EXPECT_EQ(head.report.n_exact, 0u);
    EXPECT_LT(head.report.keys_read, head.plan.n_keys_present / 8);
    for (uint32_t r = 0; r < head.rows(); ++r) {
      EXPECT_LT(head.report.noise[r], 0.6f) << r;
      EXPECT_LT(head.error_o(r), 1.5 * static_cast<double>(head.report.err_o[r])) << r;
      EXPECT_LT(head.error_lse(r), 1.5 * static_cast<double>(head.report.err_lse[r])) << r;
    }
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

// Scores that tie often, in batches of any length: the lower position wins.
TEST(TopK, ListKeepsTheLargestAndOfEqualScoresTheFirst) {
  std::mt19937_64 random(8);
  for (int trial = 0; trial < 200; ++trial) {
    const auto n = static_cast<uint32_t>(1 + random() % 600);
    const auto keep = static_cast<uint32_t>(1 + random() % 90);
    const uint64_t n_values = 1 + random() % 40;
    std::vector<float> scores(n), work(2 * size_t{keep});
    std::vector<Scored> wanted, items(2 * size_t{keep});
    TopList list(items.data(), keep, work.data());
    for (uint32_t i = 0; i < n; ++i) {
      scores[i] = static_cast<float>(random() % n_values) - 7.0f;
      wanted.push_back({scores[i], uint64_t{3} * i});
    }
    for (uint32_t i = 0, batch = 0; i < n; i += batch) {
      batch = std::min(n - i, static_cast<uint32_t>(1 + random() % kGatherKeys));
      uint64_t positions[kGatherKeys];
      for (uint32_t j = 0; j < batch; ++j) {
        positions[j] = wanted[i + j].position;
      }
      list.push(scores.data() + i, batch, positions);
    }
    std::ranges::stable_sort(wanted, std::greater(), &Scored::score);
    wanted.resize(std::min(n, keep));
    std::ranges::sort(wanted, std::less(), &Scored::position);
    ASSERT_EQ(list.finish(), wanted.size()) << "trial " << trial;
    for (size_t i = 0; i < wanted.size(); ++i) {
      ASSERT_EQ(items[i].position, wanted[i].position) << "trial " << trial << " item " << i;
      ASSERT_EQ(items[i].score, wanted[i].score) << "trial " << trial << " item " << i;
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
    ASSERT_TRUE(finish_approx(head.input, head.plan, head.prepared->data(), head.scratch->data(),
                              head.states->data(), &report));
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

// A pilot alone takes as long as all of so few keys; a budget says that it shall be.
TEST(Odd, ShortContextsAreExactWithoutAPilot) {
  const auto is_exact = [](uint64_t n_tokens, float eps, uint64_t budget) {
    Head head({.n_tokens = n_tokens, .group = 1, .dim_k = 32, .dim_v = 8, .codec = CodecId::kF32},
              5);
    head.build();
    head.input.params.mode = budget > 0 ? ApproxMode::kSampled : ApproxMode::kVerified;
    head.input.params.budget = budget;
    head.input.params.eps = eps;
    head.input.params.max_read_fraction = 0;
    return plan_approx(head.input).exact;
  };
  EXPECT_TRUE(is_exact(8192, 0.1f, 0));
  EXPECT_FALSE(is_exact(8192, 0.1f, 100));
  EXPECT_FALSE(is_exact(60000, 0.1f, 0));
  EXPECT_TRUE(is_exact(60000, 0.01f, 0));
}

// So few keys suffice that those of the pilot are most of what is read.
TEST(Verified, WhatThePilotReadsCounts) {
  Head head({.n_tokens = 8192, .group = 1}, 3);
  head.build();
  head.input.params.mode = ApproxMode::kVerified;
  head.input.params.budget = 0;
  head.input.params.eps = 0.9f;
  head.input.params.max_read_fraction = 0.9f;
  head.run();
  ASSERT_EQ(head.report.n_exact, 0u);
  const uint64_t fixed = head.plan.n_keys_present - head.plan.n_keys_indexed;
  const uint64_t drawn = drawn_by(head).size();
  EXPECT_GE(head.report.keys_read, fixed + drawn + 32);
  EXPECT_LE(head.report.keys_read, fixed + drawn + 128);
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
  const Kappa kappa(0.01);
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
  EXPECT_TRUE(std::isfinite(estimate_row(totals, o).bar(kappa, {})));
  // A sketch that is above all that was read by more than a float can hold.
  for (const double mass : {1e60, 1e10, double{INFINITY}, double{NAN}}) {
    totals.open_mass = mass;
    const RowEstimate e = estimate_row(totals, o);
    EXPECT_EQ(e.lse_mass, e.mass) << mass;
    EXPECT_EQ(e.bar(kappa, {}), INFINITY) << mass;
    EXPECT_EQ(e.bar_lse(kappa), INFINITY) << mass;
  }
  totals.open_mass = 1;
  totals.spread = NAN;
  EXPECT_EQ(estimate_row(totals, o).bar(kappa, {}), INFINITY);
  EXPECT_EQ(estimate_row(totals, o).bar_lse(kappa), INFINITY);
  totals.spread = 1;
  totals.chance_norm2 = NAN;
  EXPECT_EQ(estimate_row(totals, o).bar(kappa, {}), INFINITY);
  totals.open = 0;  // nothing drawn of what was left to chance
  totals.open_mass = NAN;
  EXPECT_EQ(estimate_row(totals, o).bar(kappa, {}), INFINITY);
  // Values far longer than o: what is missing moves it by their length.
  totals.open_mass = 0.1;
  totals.norm2 = 1e4;
  EXPECT_GT(estimate_row(totals, o).bar(kappa, {}), 8);
  totals.closed = 0;
  EXPECT_EQ(estimate_row(totals, o).bar(kappa, {}), INFINITY);
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
  for (const ApproxMode mode :
       {ApproxMode::kSampled, ApproxMode::kVerified, ApproxMode::kBalanced, ApproxMode::kTopK}) {
    for (const float x : odd) {
      Head head({.n_tokens = 4096, .codec = CodecId::kF32, .with_tables = true}, 53);
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
