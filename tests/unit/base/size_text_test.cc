// SPDX-License-Identifier: Apache-2.0
#include "base/size_text.h"

#include <gtest/gtest.h>

#include <string>

namespace kvm {
namespace {

TEST(SizeText, NumbersWithUnits) {
  EXPECT_EQ(parse_bytes("0").value(), 0u);
  EXPECT_EQ(parse_bytes("4096").value(), 4096u);
  EXPECT_EQ(parse_bytes("7B").value(), 7u);
  EXPECT_EQ(parse_bytes("200GiB").value(), 200ull << 30);
  EXPECT_EQ(parse_bytes("64MB").value(), 64'000'000u);
  EXPECT_EQ(parse_bytes("3 PB").value(), 3'000'000'000'000'000u);
  EXPECT_EQ(parse_bytes("1EiB").value(), 1ull << 60);
  EXPECT_EQ(parse_bytes("9EB").value(), 9'000'000'000'000'000'000u);
}

TEST(SizeText, FractionsGoToTheNearestByte) {
  EXPECT_EQ(parse_bytes("1.5GiB").value(), 3ull << 29);
  EXPECT_EQ(parse_bytes("1.5 TiB").value(), 3ull << 39);
  EXPECT_EQ(parse_bytes("4.035MB").value(), 4'035'000u);
  EXPECT_EQ(parse_bytes("0.1kB").value(), 100u);
  EXPECT_EQ(parse_bytes("2.4").value(), 2u);
}

TEST(SizeText, WholeNumbersOfBytesAreExact) {
  EXPECT_EQ(parse_bytes("9223372036854775807").value(), kMaxTextBytes);
  EXPECT_EQ(parse_bytes("9007199254740993").value(), 9007199254740993u) << "not a double";
}

TEST(SizeText, WhatIsNoSizeIsNamedWithWhatIsAllowed) {
  for (const char* text :
       {"", " ", "GiB", "-1GiB", "-0", "+1", "1Gib", "1GiBs", "1e9", "1.GiB", ".5GiB", "1.5.5",
        "nan", "inf", "12 34", "0x10", "1 ", "1  GiB", "60%"}) {
    const Result<uint64_t> bytes = parse_bytes(text);
    ASSERT_FALSE(bytes.is_ok()) << text;
    EXPECT_EQ(bytes.status().code(), KVM_ERR_INVALID);
    const std::string sentence(bytes.status().message());
    EXPECT_TRUE(sentence.starts_with(std::string("'").append(text).append("'"))) << sentence;
    EXPECT_NE(sentence.find("1.5 with a unit: B, KiB"), std::string::npos) << sentence;
  }
}

TEST(SizeText, WhatIsTooLargeIsToldSo) {
  for (const char* text : {"8EiB", "7.9999999999999999999EiB", "99999999TiB", "9223372036854775808",
                           "99999999999999999999999999", "9.3EB"}) {
    const Result<uint64_t> bytes = parse_bytes(text);
    ASSERT_FALSE(bytes.is_ok()) << text;
    const std::string sentence(bytes.status().message());
    EXPECT_NE(sentence.find("below 8EiB"), std::string::npos) << sentence;
  }
}

}  // namespace
}  // namespace kvm
