// SPDX-License-Identifier: Apache-2.0
#include "base/counted.h"

#include <gtest/gtest.h>

namespace kvm {
namespace {

TEST(Counted, OneHasNoPlural) {
  EXPECT_EQ(counted(0, "token"), "0 tokens");
  EXPECT_EQ(counted(1, "token"), "1 token");
  EXPECT_EQ(counted(2, "token"), "2 tokens");
}

TEST(Numbered, NamesTheFirstAndTheLast) {
  EXPECT_EQ(numbered(7, 1, "layer"), "layer 7");
  EXPECT_EQ(numbered(7, 3, "layer"), "layers 7 to 9");
  EXPECT_EQ(numbered(7, 0, "range"), "range 7");
  EXPECT_EQ(numbered(0xffffffff, 0xffffffff, "range"), "ranges 4294967295 to 8589934589");
}

}  // namespace
}  // namespace kvm
