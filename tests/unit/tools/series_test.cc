// SPDX-License-Identifier: Apache-2.0
#include "tools/kvmctl/series.h"

#include <gtest/gtest.h>

#include <string>

namespace kvm::tools {
namespace {

// Counts of requests up to 1 ms, up to 2 ms, and all.
std::string durations(const char* verb, int a, int b, int all) {
  const std::string begin =
      "kvm_request_duration_seconds_bucket{verb=\"" + std::string(verb) + "\",le=\"";
  return begin + "0.001\"} " + std::to_string(a) + "\n" + begin + "0.002\"} " + std::to_string(b) +
         "\n" + begin + "+Inf\"} " + std::to_string(all) + "\n";
}

TEST(Series, DurationsAreOfAllVerbsButNull) {
  const auto sum = read_durations("# HELP x\n" + durations("attend", 1, 3, 4) +
                                  durations("step", 10, 20, 20) + durations("null", 99, 99, 99));
  ASSERT_EQ(sum.size(), 3u);
  EXPECT_EQ(sum[0].bound, 0.001);
  EXPECT_EQ(sum[0].below, 11);
  EXPECT_EQ(sum[1].below, 23);
  EXPECT_EQ(sum[2].below, 24);
  EXPECT_TRUE(read_durations("").empty());
}

TEST(Series, QuantilesAreOfWhatCameBetweenTwoLooks) {
  const auto before = read_durations(durations("attend", 1000, 1000, 1000));
  const auto after = read_durations(durations("attend", 1000, 1100, 1100));
  const auto added = added_between(before, after);
  EXPECT_GT(quantile(added, 0.5), 0.001);
  EXPECT_LT(quantile(added, 0.5), 0.002);
  EXPECT_NEAR(quantile(added, 0.99), 0.002, 2e-5);
  EXPECT_EQ(quantile(added_between(after, after), 0.5), 0) << "nothing came";
}

}  // namespace
}  // namespace kvm::tools
