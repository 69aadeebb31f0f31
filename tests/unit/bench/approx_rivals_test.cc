// SPDX-License-Identifier: Apache-2.0
// The rivals of approximate attention are exact where they read everything, and the timed passes
// compute what the untimed ones do.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "bench/approx/baselines.h"
#include "bench/approx/passes.h"
#include "bench/approx/settings.h"
#include "bench/approx/tally.h"
#include "engine/index.h"
#include "engine/space.h"

namespace kvm::bench {
namespace {

constexpr uint32_t kTokens = 2048;

Case make(const std::string& name, uint32_t heads) {
  DataSpec spec;
  spec.name = name;
  spec.tokens = kTokens;
  spec.heads = heads;
  spec.sets = 2;
  return make_case(spec, 2, true);
}

double error(const Case& c, const Estimate& estimate, uint32_t set) {
  double worst = 0;
  for (uint32_t g = 0; g < c.data.heads[0].group; ++g) {
    const size_t at = size_t{g} * c.data.heads[0].dim;
    worst = std::max(worst, relative_error(estimate.answer.o.data() + at,
                                           c.answers[0][set].o.data() + at, c.data.heads[0].dim));
  }
  return worst;
}

TEST(Rivals, AreExactWhereTheyReadEverything) {
  const Case c = make("real", 1);
  const HeadData& head = c.data.heads[0];
  const Logits& logits = c.logits[0][1];
  const PageBounds bounds(head);
  EXPECT_LT(error(c, oracle_top_k(head, logits, kTokens), 1), 1e-12);
  EXPECT_LT(error(c, uniform_residual(head, logits, 2 * kTokens, 1), 1), 1e-12);
  EXPECT_LT(error(c, page_bounds(head, logits, bounds, 1, kTokens), 1), 1e-12);
  EXPECT_EQ(oracle_top_k(head, logits, kTokens).unique_rows, kTokens);
}

TEST(Rivals, ReadTheRowsOfTheirBudget) {
  const Case c = make("real", 1);
  const HeadData& head = c.data.heads[0];
  const Logits& logits = c.logits[0][0];
  const Estimate top = oracle_top_k(head, logits, 100);
  EXPECT_EQ(top.rows, 400u);
  EXPECT_GE(top.unique_rows, 168u);
  EXPECT_LE(top.unique_rows, 468u);
  // The heads of a group share the evenly drawn half, but for what is in their own top half.
  const Estimate uniform = uniform_residual(head, logits, 100, 7);
  EXPECT_EQ(uniform.rows, 400u);
  EXPECT_LT(uniform.unique_rows, top.unique_rows);
}

// Over many seeds the evenly drawn part is unbiased for the denominator: its mean lies within four
// standard errors of the exact one.
TEST(Rivals, UniformResidualEstimatesTheDenominator) {
  const Case c = make("diffuse", 1);
  constexpr int kSeeds = 400;
  double sum = 0, square = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    const Estimate e = uniform_residual(c.data.heads[0], c.logits[0][0], 200, 1000 + seed);
    const double ratio = std::exp(e.answer.lse[0] - c.answers[0][0].lse[0]);
    sum += ratio;
    square += ratio * ratio;
  }
  const double mean = sum / kSeeds;
  const double se = std::sqrt((square / kSeeds - mean * mean) / kSeeds);
  EXPECT_NEAR(mean, 1.0, 4 * se);
  EXPECT_GT(se, 0);
}

TEST(Rivals, PageBoundsAreBounds) {
  const Case c = make("model", 1);
  const HeadData& head = c.data.heads[0];
  const PageBounds bounds(head);
  for (uint32_t g = 0; g < head.group; ++g) {
    const auto scores = bounds.scores(head, head.q_rows(0) + size_t{g} * head.dim, kTokens);
    for (uint64_t t = 0; t < kTokens; ++t) {
      EXPECT_LE(c.logits[0][0].of(g)[t], head.scale * scores[t / PageBounds::kTokens] + 1e-3);
    }
  }
}

// Candidates carry the probability of the formula, which the weights divide by.
TEST(Rivals, MagicPigTakesTheCandidatesOfTheTables) {
  const Case c = make("real", 1);
  const HeadData& head = c.data.heads[0];
  const auto tables = build_tables(c.data, {8, 75, 3}, 1);
  const LshTables::Candidates found = tables[0]->lookup(head, 0);
  for (uint32_t g = 0; g < head.group; ++g) {
    EXPECT_TRUE(std::is_sorted(found.ids[g].begin(), found.ids[g].end()));
    for (const double u : found.inclusion[g]) {
      EXPECT_GT(u, 0.0);
      EXPECT_LE(u, 1.0);
    }
  }
  const Estimate weighted = magicpig(head, c.logits[0][0], *tables[0], 0);
  const Estimate plain = magicpig(head, c.logits[0][0], *tables[0], 0, false);
  EXPECT_EQ(weighted.unique_rows, plain.unique_rows);
  EXPECT_LT(weighted.unique_rows, kTokens);
  // A candidate stands for itself and for keys like it that were not met.
  EXPECT_GT(weighted.answer.lse[0], plain.answer.lse[0]);
}

// What is measured is what a space has that asks for a sketch and says nothing more.
TEST(Indexes, BeginAsTheEnginesDo) {
  engine::SpaceSpec spec;
  spec.name = "defaults";
  spec.params.struct_size = sizeof(spec.params);
  spec.params.n_layers = spec.params.n_q_heads = 1;
  spec.params.head_dim_k = 64;
  kvm_index_params index{};
  index.kind = KVM_INDEX_SKETCH;
  spec.indexes.push_back(index);
  const auto space = engine::resolve_space(spec);
  ASSERT_TRUE(space.is_ok()) << space.status().message();
  const engine::IndexConfig config = space.value()->index(0, 0);
  EXPECT_EQ(config.min_tokens, kFirstFrameTokens);
  EXPECT_EQ(config.n_sinks, kSinkTokens);
  EXPECT_EQ(config.n_sinks, kSinks);
  EXPECT_EQ(config.n_recent, kRecents);
  EXPECT_EQ(uint64_t{engine::kFrameBlocks} * kPageTokens, kFrameTokens);
}

// Whatever the threads, and whatever ran before: the bits of the untimed solver.
TEST(Passes, ComputeWhatTheSolverDoes) {
  Case c = make("model", 3);
  const auto sketches = build_sketches(c.data, {}, 2);
  const auto indexes = indexes_of(sketches);
  attention::ApproxParams params;
  params.budget = 50;
  params.seed = 5;
  Team team(2);
  ApproxPass approx(c.data, indexes, params, team);
  ExactPass exact(c.data, team);
  Solver solver;
  for (uint32_t set = 0; set < 2; ++set) {
    approx.run(set);
    exact.run(set);
    for (uint32_t h = 0; h < 3; ++h) {
      const HeadData& head = c.data.heads[h];
      attention::ApproxParams own = params;
      own.seed += h;
      const Solved wanted = solver.solve(head, set, indexes[h], own);
      const size_t bytes = wanted.o.size() * sizeof(float);
      EXPECT_EQ(0, std::memcmp(approx.o(h), wanted.o.data(), bytes));
      EXPECT_EQ(approx.report(h).keys_read, wanted.report.keys_read);
      const Solved all = solver.solve_exact(head, set);
      EXPECT_EQ(0, std::memcmp(exact.o(h), all.o.data(), bytes));
    }
  }
}

// 16-bit rows and the int8 rows made of them differ by the rounding of the codec alone.
TEST(Passes, Int8RowsAreTheSameKeys) {
  Case c = make("real", 2);
  Solver solver;
  c.data.use_int8_rows(2);
  Tally int8;
  const Solved rounded = solver.solve_exact(c.data.heads[1], 0);
  int8.add(c, 1, 0, rounded.o.data(), rounded.lse.data(), rounded.report);
  EXPECT_GT(int8.error_mean(), 1e-3);
  EXPECT_LT(int8.error_mean(), 5e-2);
  EXPECT_NEAR(int8.bytes_fraction(), 260.0 / 512.0, 1e-3);
  c.data.use_own_rows();
  Tally own;
  const Solved plain = solver.solve_exact(c.data.heads[1], 0);
  own.add(c, 1, 0, plain.o.data(), plain.lse.data(), plain.report);
  EXPECT_LT(own.error_mean(), 2e-3);
}

}  // namespace
}  // namespace kvm::bench
