// SPDX-License-Identifier: Apache-2.0
#include "tools/kvmctl/values.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>

#include "base/counted.h"

namespace kvm::tools {
namespace {

TEST(Values, IdsAreReadAsTheyArePrinted) {
  for (const uint64_t id : {uint64_t{0}, uint64_t{16}, uint64_t{0x1f00000003}, UINT64_MAX}) {
    EXPECT_EQ(parse_id(id_text(id)).value(), id);
    EXPECT_EQ(parse_id(std::to_string(id)).value(), id);
  }
  EXPECT_EQ(id_text(31), "0x1f");
  EXPECT_EQ(parse_id("0X1F").value(), 31u);
  EXPECT_EQ(parse_id("10").value(), 10u) << "without 0x an id is decimal";
}

TEST(Values, WhatIsNoIdIsNamedWithWhatIsAllowed) {
  for (const char* text : {"", "0x", "-1", "+1", " 1", "1 ", "0xg", "xyz", "18446744073709551616",
                           "0x10000000000000000", "1.0"}) {
    const Result<uint64_t> id = parse_id(text);
    ASSERT_FALSE(id.is_ok()) << text;
    EXPECT_EQ(std::string(id.status().message()).find(fmt::format("'{}' is no id", text)), 0u);
  }
  const std::string sentence(parse_id("1f").status().message());
  EXPECT_NE(sentence.find("did you mean 0x1f?"), std::string::npos) << sentence;
  const std::string large(parse_id("18446744073709551616").status().message());
  EXPECT_EQ(large.find("did you mean"), std::string::npos) << large;
}

TEST(Values, SecondsLieInTheirRange) {
  EXPECT_EQ(parse_seconds("0.05", 0.05, 3600).value(), 0.05);
  EXPECT_EQ(parse_seconds("3600", 0.05, 3600).value(), 3600);
  for (const char* text : {"nan", "-nan", "inf", "-inf", "infinity", "-1", "0", "0.04", "3600.1",
                           "1e3", "", "1s", "NAN"}) {
    const Result<double> seconds = parse_seconds(text, 0.05, 3600);
    ASSERT_FALSE(seconds.is_ok()) << text;
    const std::string sentence(seconds.status().message());
    EXPECT_EQ(sentence, fmt::format("'{}' is no time; allowed are 0.05 to 3600 seconds", text));
  }
}

TEST(Values, OneIsNoPlural) {
  EXPECT_EQ(counted(0, "token"), "0 tokens");
  EXPECT_EQ(counted(1, "token"), "1 token");
  EXPECT_EQ(counted(2, "token"), "2 tokens");
}

}  // namespace
}  // namespace kvm::tools
