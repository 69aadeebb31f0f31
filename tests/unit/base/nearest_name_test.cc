// SPDX-License-Identifier: Apache-2.0
#include "base/nearest_name.h"

#include <gtest/gtest.h>

namespace kvm {
namespace {

TEST(NearestName, EditDistanceKnownPairs) {
  EXPECT_EQ(edit_distance("", "abc"), 3u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(edit_distance("scoket", "socket"), 1u) << "swapped neighbours are one edit";
  EXPECT_EQ(edit_distance("same", "same"), 0u);
}

TEST(NearestName, OnlyWhenNear) {
  const std::vector<std::string> names = {"socket", "socket_mode", "threads"};
  EXPECT_EQ(nearest_name("sokcet", names), "socket");
  EXPECT_EQ(nearest_name("thread", names), "threads");
  EXPECT_EQ(nearest_name("socketmode", names), "socket_mode");
  EXPECT_EQ(nearest_name("soc", names), "socket") << "it begins so";
  EXPECT_EQ(nearest_name("banana", names), "");
  EXPECT_EQ(nearest_name("", names), "");
}

}  // namespace
}  // namespace kvm
