// SPDX-License-Identifier: Apache-2.0
// What kvmctl audit makes of the metrics of audits, from the numbers that went into them.
#include "tools/kvmctl/audit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "base/audit_stats.h"

namespace kvm::tools {
namespace {

TEST(AuditSummary, NothingWithoutTheSeries) {
  EXPECT_FALSE(summarize_audits("").has_value());
  EXPECT_FALSE(summarize_audits("kvm_uptime_seconds 1\n# HELP kvm_audit_every\n").has_value());
}

TEST(AuditSummary, AllSeriesAreThereFromTheStart) {
  StatsText text;
  write_audit(AuditStats{}, &text);
  const auto summary = summarize_audits(text.take());
  ASSERT_TRUE(summary.has_value());
  EXPECT_EQ(summary->every, 0u);
  ASSERT_EQ(summary->modes.size(), 3u);
  for (const AuditedModeSummary& mode : summary->modes) {
    EXPECT_EQ(mode.n_answers, 0u);
    EXPECT_EQ(mode.true_error.n_rows, 0u);
    EXPECT_FALSE(mode.over_share().has_value());
    EXPECT_FALSE(mode.allowed_share().has_value());
  }
}

TEST(AuditSummary, NumbersComeThrough) {
  AuditStats stats;
  stats.every = 64;
  stats.n_busy = 5;
  stats.n_given_up = 6;
  stats.n_unfit = 7;
  AuditedMode& sampled = stats.modes[1];
  sampled.n_answers = 9;
  sampled.n_barred = 4000;
  sampled.n_over = 12;
  sampled.allowed_over = 40;
  std::mt19937_64 random(5);
  std::lognormal_distribution<double> error(-4.0, 0.8);
  std::vector<double> errors;
  double sum = 0;
  for (int i = 0; i < 4000; ++i) {
    errors.push_back(error(random));
    sum += errors.back();
    sampled.true_error.add(errors.back());
    sampled.estimated_error.add(2 * errors.back());
  }
  std::sort(errors.begin(), errors.end());
  StatsText text;
  write_audit(stats, &text);
  const auto summary = summarize_audits(text.take());
  ASSERT_TRUE(summary.has_value());
  EXPECT_EQ(summary->every, 64u);
  EXPECT_EQ(summary->n_busy, 5u);
  EXPECT_EQ(summary->n_given_up, 6u);
  EXPECT_EQ(summary->n_unfit, 7u);
  const AuditedModeSummary& mode = summary->modes[1];
  EXPECT_EQ(mode.mode, "sampled");
  EXPECT_EQ(mode.n_answers, 9u);
  EXPECT_EQ(mode.true_error.n_rows, 4000u);
  EXPECT_NEAR(mode.true_error.mean, sum / 4000, 1e-6 * sum / 4000);
  // Buckets are a factor of at most 1.67 wide, and interpolated.
  EXPECT_NEAR(mode.true_error.p95 / errors[3800], 1.0, 0.1);
  EXPECT_NEAR(mode.true_error.p99 / errors[3960], 1.0, 0.15);
  EXPECT_NEAR(mode.estimated_error.mean, 2 * sum / 4000, 1e-6 * sum);
  EXPECT_DOUBLE_EQ(mode.over_share().value(), 0.003);
  EXPECT_DOUBLE_EQ(mode.allowed_share().value(), 0.01);
  EXPECT_EQ(summary->modes[2].true_error.n_rows, 0u);
}

TEST(AuditSummary, ErrorsBeyondTheLastBoundAreAtLeastThat) {
  AuditStats stats;
  for (int i = 0; i < 100; ++i) {
    stats.modes[0].true_error.add(i < 90 ? 0.00005 : 5.0);
  }
  StatsText text;
  write_audit(stats, &text);
  const AuditedModeSummary mode = summarize_audits(text.take())->modes[0];
  EXPECT_EQ(mode.true_error.p95, 1.0);
  EXPECT_NEAR(mode.true_error.mean, 0.500045, 1e-9);
}

// The text may come from anybody's service.
TEST(AuditSummary, ABoundThatIsNoNumberCountsForNothing) {
  AuditStats stats;
  for (int i = 0; i < 100; ++i) {
    stats.modes[0].true_error.add(i < 90 ? 0.00005 : 0.5);
  }
  StatsText text;
  write_audit(stats, &text);
  const std::string lines = text.take();
  const double p95 = summarize_audits(lines)->modes[0].true_error.p95;
  EXPECT_GT(p95, 0.1);
  const auto bent = summarize_audits(
      lines + "kvm_audit_error_bucket{mode=\"topk\",kind=\"true\",le=\"nan\"} 100\n");
  EXPECT_EQ(bent->modes[0].true_error.p95, p95);
}

}  // namespace
}  // namespace kvm::tools
