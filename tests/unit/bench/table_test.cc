// SPDX-License-Identifier: Apache-2.0
// Tables of benches fit a terminal, and say everything.
#include "bench/table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

namespace kvm::bench {
namespace {

using Rows = std::vector<nlohmann::ordered_json>;

size_t widest_line(const std::string& text) {
  std::istringstream lines(text);
  size_t widest = 0;
  for (std::string line; std::getline(lines, line);) {
    widest = std::max(widest, line.size());
  }
  return widest;
}

TEST(Table, TitlesAreBrokenAndFiguresAligned) {
  const Rows rows = {{{"bench", "b"}, {"mode", "exact"}, {"rel_error_mean", 0.5}},
                     {{"bench", "b"}, {"mode", "top"}, {"rel_error_mean", 123.44}}};
  EXPECT_EQ(table_text(rows, {}, 120),
            "           rel\n"
            "         error\n"
            "   mode   mean\n"
            "  exact  0.500\n"
            "    top  123.4\n");
}

TEST(Table, HiddenColumnsAndMissingFiguresAreLeftOut) {
  const Rows rows = {{{"a", 1}, {"b", 2}}, {{"a", 3}, {"c", 4}}};
  EXPECT_EQ(table_text(rows, {"b"}, 120),
            "  a  c\n"
            "  1   \n"
            "  3  4\n");
}

TEST(Table, WhatIsTheSameInEveryRowLeavesAWideTable) {
  const Rows rows = {{{"data", "model"}, {"tokens", 64}, {"error", 1}},
                     {{"data", "model"}, {"tokens", 64}, {"error", 2}}};
  EXPECT_EQ(table_text(rows, {}, 40).find("in every row"), std::string::npos) << "it fits";
  EXPECT_EQ(table_text(rows, {}, 20),
            "  in every row:\n"
            "    data model,\n"
            "    tokens 64\n"
            "  error\n"
            "      1\n"
            "      2\n");
}

TEST(Table, NoLineIsLongerThanAskedForAndNothingIsLost) {
  Rows rows(3);
  for (int column = 0; column < 30; ++column) {
    for (int row = 0; row < 3; ++row) {
      rows[static_cast<size_t>(row)]["a_column_named_" + std::to_string(column)] =
          1000 * row + column;
    }
  }
  for (const size_t width : {40, 60, 120}) {
    const std::string text = table_text(rows, {}, width);
    EXPECT_LE(widest_line(text), width);
    for (int column = 0; column < 30; ++column) {
      EXPECT_NE(text.find(std::to_string(2000 + column)), std::string::npos) << column;
    }
  }
  EXPECT_NE(table_text({{{"one_row_alone", std::string(200, 'x')}}}, {}, 120).find("xxx"),
            std::string::npos);
}

}  // namespace
}  // namespace kvm::bench
