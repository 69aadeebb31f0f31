// SPDX-License-Identifier: Apache-2.0
// What AUTO chooses by written-down rates, their text form, and that rates can be measured.
#include "engine/attend/cost_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>

#include "engine/attend/calibration.h"

namespace kvm::engine {
namespace {

constexpr CostModel kModel = {
    .exact_bf16 = 13.5, .exact_int8 = 7, .scan = 1.5, .gather = 28, .start = 40000};

ProblemCost problem_of(uint64_t n_tokens, bool is_int8 = false) {
  ProblemCost problem;
  problem.rows = 4;
  problem.dim = 256;
  problem.row_bytes = is_int8 ? 260 : 512;
  problem.is_scaled = is_int8;
  problem.n_present = n_tokens;
  problem.n_indexed = n_tokens < 4200 ? 0 : n_tokens - 128;
  problem.exact_bytes = n_tokens * problem.row_bytes;
  return problem;
}

TEST(CostModel, TextIsReadAndWritten) {
  for (const char* text : {"", "measure"}) {
    const auto parsed = parse_cost_model(text);
    ASSERT_TRUE(parsed.is_ok());
    EXPECT_FALSE(parsed.value().has_value());
  }
  CostModel model = kModel;
  model.threads = 3;
  for (const CostModel& each : {kModel, model}) {
    const auto parsed = parse_cost_model(format_cost_model(each));
    ASSERT_TRUE(parsed.is_ok()) << parsed.status().message();
    EXPECT_EQ(parsed.value(), each) << format_cost_model(each);
  }
}

TEST(CostModel, TextThatSaysTooLittleOrTooMuchHasItsSentence) {
  const std::string all = format_cost_model(kModel);
  const std::pair<std::string, const char*> cases[] = {
      {"fast", "'fast'"},
      {"scan=1", "lacks exact_bf16"},
      {all + ",", "''"},
      {all + ",scan=2", "'scan=2'"},
      {all + ",threads=0", "'threads=0'"},
      {all + ",threads=-1", "'threads=-1'"},
      {all + ",speed=9", "'speed=9'"},
      {"exact_bf16=0,exact_int8=7,scan=1,gather=28,start=1", "'exact_bf16=0'"},
      {"exact_bf16=nan,exact_int8=7,scan=1,gather=28,start=1", "'exact_bf16=nan'"},
      {"exact_bf16=1x,exact_int8=7,scan=1,gather=28,start=1", "'exact_bf16=1x'"},
      {"exact_bf16=,exact_int8=7,scan=1,gather=28,start=1", "'exact_bf16='"},
  };
  for (const auto& [text, sentence] : cases) {
    const auto parsed = parse_cost_model(text);
    ASSERT_FALSE(parsed.is_ok()) << text;
    EXPECT_EQ(parsed.status().code(), KVM_ERR_INVALID);
    EXPECT_NE(std::string(parsed.status().message()).find(sentence), std::string::npos)
        << parsed.status().message();
  }
}

TEST(CostModel, AnErrorTakesExactForShortContextsAndASampleForLongOnes) {
  EXPECT_EQ(choose_for_error(kModel, problem_of(2000)).mode, AutoMode::kExact);
  EXPECT_EQ(choose_for_error(kModel, problem_of(5000)).mode, AutoMode::kExact);
  const AutoChoice choice = choose_for_error(kModel, problem_of(131072));
  EXPECT_EQ(choice.mode, AutoMode::kVerified);
  EXPECT_EQ(choice.budget, 0u);
  // exact / 2 = start + scan + 128 keys + gather m
  const double most = (0.5 * 13.5 - 1.5) / 28;
  EXPECT_NEAR(static_cast<double>(choice.max_read_fraction), most, 0.02);
  // Rows that are faster to read in order leave less to sampling.
  const AutoChoice of_int8 = choose_for_error(kModel, problem_of(131072, true));
  EXPECT_EQ(of_int8.mode, AutoMode::kVerified);
  EXPECT_LT(of_int8.max_read_fraction, choice.max_read_fraction);
  CostModel slow = kModel;
  slow.scan = 12;
  EXPECT_EQ(choose_for_error(slow, problem_of(131072)).mode, AutoMode::kExact);
  EXPECT_EQ(choose_for_error(slow, problem_of(131072, true)).mode, AutoMode::kExact);
  ProblemCost hashed = problem_of(131072);
  hashed.is_hashed = true;
  EXPECT_EQ(choose_for_error(kModel, hashed).mode, AutoMode::kExact);
}

// Rates are those of four rows. An item of several tokens computes longer than it reads, exactly
// and drawn key by key.
TEST(CostModel, ManyRowsTakeTheirTime) {
  const ProblemCost few = problem_of(65536);
  ProblemCost many = few;
  many.rows = 16;
  EXPECT_DOUBLE_EQ(exact_ns(kModel, many), 4 * exact_ns(kModel, few));
  const double alone = 1000 * (kModel.gather - kModel.exact_bf16);
  const double gather = approx_ns(kModel, few, 1000) - approx_ns(kModel, few, 0);
  EXPECT_NEAR(approx_ns(kModel, many, 1000) - approx_ns(kModel, many, 0),
              4 * (gather - alone) + alone, 1);
  // What is worth drawing is no smaller a part of the keys than of few rows.
  EXPECT_GE(choose_for_error(kModel, many).max_read_fraction,
            choose_for_error(kModel, few).max_read_fraction);
}

TEST(CostModel, ATimeTakesTheMostKeysThatFit) {
  const ProblemCost problem = problem_of(131072);
  const double exact = exact_ns(kModel, problem);
  EXPECT_DOUBLE_EQ(exact, 13.5 * 131072);
  EXPECT_EQ(choose_for_time(kModel, problem, exact).mode, AutoMode::kExact);
  uint64_t last = 0;
  for (const double time : {300e3, 400e3, 800e3, 1.5e6}) {
    const AutoChoice choice = choose_for_time(kModel, problem, time);
    ASSERT_EQ(choice.mode, AutoMode::kSampled) << time;
    EXPECT_GT(choice.budget, last);
    last = choice.budget;
    const auto rows = static_cast<double>(choice.budget * problem.rows);
    EXPECT_LE(approx_ns(kModel, problem, rows), time);
    EXPECT_GT(approx_ns(kModel, problem, rows + problem.rows), time);
  }
  EXPECT_EQ(choose_for_time(kModel, problem, 0).budget, kLeastBudget);
  // Nothing is faster than exact: then that, although it does not fit.
  CostModel slow = kModel;
  slow.start = 1e6;
  EXPECT_EQ(choose_for_time(slow, problem_of(50000), 10).mode, AutoMode::kExact);
  // Hash tables: all candidates, weighed, where there is time for them; else the largest of them.
  ProblemCost hashed = problem;
  hashed.is_hashed = true;
  EXPECT_EQ(choose_for_time(kModel, hashed, exact).mode, AutoMode::kExact);
  EXPECT_EQ(choose_for_time(kModel, hashed, exact / 2).mode, AutoMode::kSampled);
  const AutoChoice few = choose_for_time(kModel, hashed, exact / 4);
  EXPECT_EQ(few.mode, AutoMode::kTopK);
  EXPECT_GT(few.budget, kLeastBudget);
}

// Whatever the rates: within the time, or the least that there is; and never slower than exact.
TEST(CostModel, ATimeIsKeptWhateverTheRates) {
  std::mt19937_64 random(11);
  std::uniform_real_distribution<double> factor(-1.0, 1.0);
  const auto vary = [&](double value) { return value * std::pow(10.0, factor(random)); };
  for (int i = 0; i < 20000; ++i) {
    const CostModel model = {.exact_bf16 = vary(13),
                             .exact_int8 = vary(7),
                             .scan = vary(1.5),
                             .gather = vary(28),
                             .start = vary(40000)};
    ProblemCost problem = problem_of(static_cast<uint64_t>(vary(50000)), i % 2 == 0);
    problem.rows = 1 + static_cast<uint32_t>(i % 16);
    problem.is_hashed = i % 3 == 0;
    const double time = vary(300e3);
    const AutoChoice choice = choose_for_time(model, problem, time);
    if (choice.mode == AutoMode::kExact) {
      continue;
    }
    const double least = approx_ns(model, problem, double{kLeastBudget} * problem.rows);
    const double takes =
        approx_ns(model, problem, static_cast<double>(choice.budget * problem.rows));
    ASSERT_LE(takes, std::max(time, least) * 1.000001) << i;
    ASSERT_LT(takes, exact_ns(model, problem)) << i;
    ASSERT_GT(exact_ns(model, problem), time) << i;
    ASSERT_LE(choice.budget, problem.n_indexed);
    const AutoChoice by_error = choose_for_error(model, problem);
    ASSERT_LE(by_error.max_read_fraction, 1.0f);
    ASSERT_EQ(by_error.mode == AutoMode::kVerified, by_error.max_read_fraction > 0);
  }
}

// Eight heads of a context that is away, and two threads.
ProblemCost away_problem(double alone_ns) {
  constexpr uint32_t kHeads = 8;
  constexpr double kThreads = 2;
  ProblemCost problem = problem_of(131072);
  const double page_ns = 64 * 512 * kHeads;  // 1 GB/s
  problem.n_pages_away = 2048;
  problem.n_sharing = kHeads;
  problem.stream_ns = 2048 * page_ns * kThreads / kHeads;
  problem.page_ns = (page_ns + alone_ns) * kThreads / kHeads;
  return problem;
}

TEST(CostModel, WhatIsAwayTakesItsReads) {
  const ProblemCost cheap = away_problem(10'000);
  EXPECT_EQ(exact_ns(kModel, cheap), cheap.stream_ns);
  ProblemCost fast = cheap;
  fast.stream_ns = 1;
  EXPECT_EQ(exact_ns(kModel, fast), exact_ns(kModel, problem_of(131072)));
  const double none = approx_ns(kModel, problem_of(131072), 50);
  // Few rows meet a page of their own, more share some, and too many are not drawn at all.
  const double few = approx_ns(kModel, cheap, 5);
  EXPECT_NEAR(few, none + (8 * 5 + 2) * cheap.page_ns, 0.05 * few);
  const double more = approx_ns(kModel, cheap, 50);
  EXPECT_LT(more, none + 8 * 50 * cheap.page_ns);
  EXPECT_GT(more, none + 8 * 40 * cheap.page_ns);
  EXPECT_TRUE(std::isinf(approx_ns(kModel, cheap, 1000)));
}

TEST(CostModel, ATimeForWhatIsAway) {
  const ProblemCost cheap = away_problem(10'000);
  const double exact = exact_ns(kModel, cheap);
  EXPECT_EQ(choose_for_time(kModel, cheap, exact).mode, AutoMode::kExact);
  uint64_t budget = 0;
  for (const double part : {0.0, 0.3, 0.38}) {
    const AutoChoice choice = choose_for_time(kModel, cheap, part * exact);
    EXPECT_EQ(choice.mode, AutoMode::kSampled) << part;
    EXPECT_GE(choice.budget, budget);
    const double takes = approx_ns(kModel, cheap, static_cast<double>(choice.budget * 4));
    EXPECT_LE(takes, part == 0.0 ? exact : part * exact);
    budget = choice.budget;
  }
  EXPECT_GT(budget, uint64_t{kLeastBudget});
  // Where a page alone takes as long as twenty in order, the least sample takes longer than all.
  EXPECT_EQ(choose_for_time(kModel, away_problem(5e6), exact / 10).mode, AutoMode::kExact);
}

TEST(CostModel, RatesAreMeasuredOnceAndMakeSense) {
  const CostModel& model = measured_costs(2);
  EXPECT_EQ(&model, &measured_costs(2));
  for (const double rate :
       {model.exact_bf16, model.exact_int8, model.scan, model.gather, model.start}) {
    EXPECT_GT(rate, 0.0);
    EXPECT_LT(rate, 1e9);
  }
  // A row by itself takes no less than one in order.
  EXPECT_GE(model.gather, model.exact_bf16);
  EXPECT_TRUE(parse_cost_model(format_cost_model(model)).is_ok());
  RecordProperty("rates", format_cost_model(model));
  const Costs pinned(kModel, 7);
  EXPECT_EQ(pinned.model(), kModel);
  EXPECT_EQ(pinned.n_threads(), 7u);
  CostModel with_threads = kModel;
  with_threads.threads = 2;
  EXPECT_EQ(Costs(with_threads, 7).n_threads(), 2u);
  EXPECT_EQ(&Costs(std::nullopt, 2).model(), &model);
}

}  // namespace
}  // namespace kvm::engine
