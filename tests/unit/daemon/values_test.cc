// SPDX-License-Identifier: Apache-2.0
#include "daemon/values.h"

#include <gtest/gtest.h>

namespace kvm::daemon {
namespace {

TEST(Values, SizesWithUnits) {
  EXPECT_EQ(parse_size("4096")->bytes, 4096u);
  EXPECT_EQ(parse_size("200GiB")->bytes, 200ull << 30);
  EXPECT_EQ(parse_size("1.5 TiB")->bytes, 3ull << 39);
  EXPECT_EQ(parse_size("64MB")->bytes, 64'000'000u);
  EXPECT_EQ(parse_size("0B")->bytes, 0u);
}

TEST(Values, SharesResolveAgainstAWhole) {
  const auto size = parse_size("60%");
  ASSERT_TRUE(size.has_value());
  EXPECT_TRUE(size->is_share);
  EXPECT_EQ(size->resolve(1000), 600u);
  EXPECT_EQ(parse_size("4KiB")->resolve(1000), 4096u);
}

TEST(Values, WhatIsNotASizeIsRefused) {
  for (const char* text : {"", "GiB", "-1GiB", "1Gib", "1GiBs", "101%", "1e400", "nan", "inf",
                           "9999999TiB", "12 34", "0x10", "-0"}) {
    EXPECT_FALSE(parse_size(text).has_value()) << text;
  }
}

TEST(Values, IntegersAndSwitches) {
  EXPECT_EQ(parse_integer("18446744073709551615"), UINT64_MAX);
  EXPECT_FALSE(parse_integer("18446744073709551616").has_value());
  EXPECT_FALSE(parse_integer("-1").has_value());
  EXPECT_FALSE(parse_integer(" 1").has_value());
  EXPECT_EQ(parse_octal("0660"), 0660u);
  EXPECT_FALSE(parse_octal("0680").has_value());
  EXPECT_EQ(parse_bool("off"), false);
  EXPECT_FALSE(parse_bool("maybe").has_value());
}

TEST(Values, BytesForPeople) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1536), "1.5 KiB");
  EXPECT_EQ(format_bytes(1ull << 30), "1 GiB");
  EXPECT_EQ(format_bytes((1ull << 40) - 1), "1 TiB");
}

}  // namespace
}  // namespace kvm::daemon
