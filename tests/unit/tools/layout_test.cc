// SPDX-License-Identifier: Apache-2.0
#include "tools/kvmctl/layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <string>

namespace kvm::tools {
namespace {

const std::vector<Column> kColumns = {{"ID", 9}, {"NAME", 5}, {"BYTES", 7}, {"USER", 1}};
const std::vector<std::vector<std::string>> kRows = {{"0x1", "engine", "1.5 GiB", "alice"},
                                                     {"0x2", "a longer name", "3 B", "bob"}};

size_t widest(const std::string& text) {
  std::istringstream lines(text);
  size_t width = 0;
  for (std::string line; std::getline(lines, line);) {
    width = std::max(width, line.size());
  }
  return width;
}

TEST(Layout, TheLeastImportantColumnsGoFirst) {
  EXPECT_EQ(fitted_table(kColumns, kRows, kWide),
            "ID   NAME           BYTES    USER\n"
            "0x1  engine         1.5 GiB  alice\n"
            "0x2  a longer name  3 B      bob\n");
  EXPECT_EQ(fitted_table(kColumns, kRows, 30),
            "ID   NAME           BYTES\n"
            "0x1  engine         1.5 GiB\n"
            "0x2  a longer name  3 B\n");
  EXPECT_EQ(fitted_table(kColumns, kRows, 20),
            "ID   BYTES\n"
            "0x1  1.5 GiB\n"
            "0x2  3 B\n");
  EXPECT_EQ(fitted_table(kColumns, kRows, 2), "ID\n0x\n0x\n");
}

TEST(Layout, LinesGoOnBelowTheirFirstPart) {
  const std::vector<Line> lines = {{"kvmd", {"0.1.0", "process 17", "up 3 s"}},
                                   {"memory", {"all"}}};
  EXPECT_EQ(fitted_lines(lines, kWide), "kvmd    0.1.0, process 17, up 3 s\nmemory  all\n");
  EXPECT_EQ(fitted_lines(lines, 26), "kvmd    0.1.0, process 17,\n        up 3 s\nmemory  all\n");
}

TEST(Layout, NothingIsWiderThanTheTerminal) {
  for (size_t width = 1; width < 60; ++width) {
    EXPECT_LE(widest(fitted_table(kColumns, kRows, width)), width);
    EXPECT_LE(widest(fitted_lines({{"a", {"first part", "second"}}, {"longer", {}}}, width)),
              width);
  }
}

}  // namespace
}  // namespace kvm::tools
