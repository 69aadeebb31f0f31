// SPDX-License-Identifier: Apache-2.0
#include "base/durations.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace kvm {
namespace {

TEST(Durations, EachTimeIsBelowItsBoundAndNotBelowTheOneBefore) {
  for (uint64_t ns = 1; ns < 4'000'000'000; ns += ns / 7 + 1) {
    const size_t bucket = duration_bucket(ns);
    ASSERT_LT(bucket, kDurationBuckets - 1) << ns;
    EXPECT_LT(ns, duration_bound_ns(bucket)) << ns;
    EXPECT_TRUE(bucket == 0 || ns >= duration_bound_ns(bucket - 1)) << ns;
  }
}

TEST(Durations, TheHeaderSaysWhichBucket) {
  EXPECT_EQ(duration_bucket(0), 0u);
  EXPECT_EQ(duration_bucket(999), 0u);
  EXPECT_EQ(duration_bucket(1'000), 1u);
  EXPECT_EQ(duration_bucket(1'999), 1u);
  EXPECT_EQ(duration_bucket(2'000), 2u);
  EXPECT_EQ(duration_bucket((uint64_t{1} << 22) * 1000 - 1), 22u);
  EXPECT_EQ(duration_bucket((uint64_t{1} << 22) * 1000), 23u);
  EXPECT_EQ(duration_bucket(UINT64_MAX), 23u) << "nothing is beyond the last";
}

}  // namespace
}  // namespace kvm
