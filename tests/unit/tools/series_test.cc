// SPDX-License-Identifier: Apache-2.0
#include "tools/kvmctl/series.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "base/durations.h"

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

TEST(Series, QuantilesOfAClientAreNearThoseOfTheTimesThatItCounted) {
  // 1,000 times from 10 us to 10 ms, evenly over the logarithm.
  kvm_client_entry client{};
  const auto time_ns = [](int i) { return 1e4 * std::pow(1e3, i / 999.0); };
  for (int i = 0; i < 1000; ++i) {
    ++client.n_by_duration[duration_bucket(static_cast<uint64_t>(time_ns(i)))];
  }
  const auto off_by = [&](double share) {
    const double exact_s = time_ns(static_cast<int>(share * 999)) * 1e-9;
    return quantile(client_durations(client), share) / exact_s;
  };
  // Where the times fill a bucket evenly it is as good as its spread, and never off by its width.
  for (const double share : {0.1, 0.5, 0.75, 0.9}) {
    EXPECT_NEAR(off_by(share), 1, 0.05) << share;
  }
  for (const double share : {0.001, 0.01, 0.99, 0.999}) {
    EXPECT_GT(off_by(share), 0.5) << share;
    EXPECT_LT(off_by(share), 2) << share;
  }
}

TEST(Series, QuantilesOfAClientAtTheEdges) {
  kvm_client_entry client{};
  EXPECT_EQ(quantile(client_durations(client), 0.5), 0) << "none, or an older kvmd";
  client.n_by_duration[0] = 10;
  EXPECT_LE(quantile(client_durations(client), 0.99), 1e-6);
  client.n_by_duration[0] = 0;
  client.n_by_duration[kDurationBuckets - 1] = 10;
  EXPECT_DOUBLE_EQ(quantile(client_durations(client), 0.5), 4.194304) << "at least";
}

}  // namespace
}  // namespace kvm::tools
