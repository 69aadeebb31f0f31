// SPDX-License-Identifier: Apache-2.0
#include "bench/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace kvm::bench {
namespace {

using Rows = std::vector<nlohmann::ordered_json>;

constexpr size_t kGap = 2;  // before each column

struct Column {
  std::string name;
  std::vector<std::string> title;  // one word a line
  std::vector<std::string> cells;  // of each row
  size_t width = 0;
};

std::vector<std::string> words_of(const std::string& name) {
  std::vector<std::string> words;
  size_t begin = 0;
  for (size_t end = 0; end != std::string::npos; begin = end + 1) {
    end = name.find('_', begin);
    words.push_back(name.substr(begin, end == std::string::npos ? end : end - begin));
  }
  return words;
}

Column make_column(const std::string& name, const Rows& rows) {
  Column column = {.name = name, .title = words_of(name)};
  for (const auto& word : column.title) {
    column.width = std::max(column.width, word.size());
  }
  for (const auto& row : rows) {
    column.cells.push_back(row.contains(name) ? table_cell(row[name]) : "");
    column.width = std::max(column.width, column.cells.back().size());
  }
  return column;
}

std::vector<Column> make_columns(const Rows& rows, const std::vector<std::string>& hidden) {
  std::vector<std::string> names;
  for (const auto& row : rows) {
    for (const auto& [name, value] : row.items()) {
      const bool is_known = std::find(names.begin(), names.end(), name) != names.end();
      const bool is_hidden = std::find(hidden.begin(), hidden.end(), name) != hidden.end();
      if (name != "bench" && !is_known && !is_hidden) {
        names.push_back(name);
      }
    }
  }
  std::vector<Column> columns;
  for (const auto& name : names) {
    columns.push_back(make_column(name, rows));
  }
  return columns;
}

size_t width_of(const std::vector<Column>& columns) {
  size_t width = 0;
  for (const auto& column : columns) {
    width += kGap + column.width;
  }
  return width;
}

// Moves what is the same in every row out of the columns. Returns it as lines.
std::string take_common(std::vector<Column>* columns, size_t max_columns) {
  std::string text;
  std::string line = "  in every row:";
  bool is_first = true;
  std::vector<Column> others;
  for (auto& column : *columns) {
    const auto& cells = column.cells;
    if (std::adjacent_find(cells.begin(), cells.end(), std::not_equal_to<>()) != cells.end()) {
      others.push_back(std::move(column));
      continue;
    }
    const std::string fact = column.name + " " + cells[0];
    line += is_first ? "" : ",";
    if (line.size() + 1 + fact.size() + 1 > max_columns) {  // a comma may follow
      text += line + "\n";
      line = "   ";
    }
    line += " " + fact;
    is_first = false;
  }
  *columns = std::move(others);
  return is_first ? "" : text + line + "\n";
}

std::string print(const std::vector<Column>& columns, size_t n_rows) {
  size_t n_words = 0;
  for (const auto& column : columns) {
    n_words = std::max(n_words, column.title.size());
  }
  std::string text;
  for (size_t i = 0; i < n_words; ++i) {
    for (const auto& column : columns) {
      const size_t above = n_words - column.title.size();  // titles stand on their last word
      text += fmt::format("{:{}}{:>{}}", "", kGap, i < above ? "" : column.title[i - above],
                          column.width);
    }
    text += "\n";
  }
  for (size_t row = 0; row < n_rows; ++row) {
    for (const auto& column : columns) {
      text += fmt::format("{:{}}{:>{}}", "", kGap, column.cells[row], column.width);
    }
    text += "\n";
  }
  return text;
}

}  // namespace

std::string table_cell(const nlohmann::ordered_json& value) {
  if (value.is_number_float()) {
    const double number = value.get<double>();
    return std::fabs(number) >= 100 ? fmt::format("{:.1f}", number) : fmt::format("{:.3f}", number);
  }
  return value.is_string() ? value.get<std::string>() : value.dump();
}

std::string table_text(const Rows& rows, const std::vector<std::string>& hidden,
                       size_t max_columns) {
  std::vector<Column> columns = make_columns(rows, hidden);
  std::string text;
  if (width_of(columns) > max_columns && rows.size() > 1) {
    text = take_common(&columns, max_columns);
  }
  if (width_of(columns) <= max_columns) {
    return text + print(columns, rows.size());
  }
  Column number = {.name = "row", .title = {"row"}, .width = 3};
  for (size_t row = 1; row <= rows.size(); ++row) {
    number.cells.push_back(std::to_string(row));
    number.width = std::max(number.width, number.cells.back().size());
  }
  for (auto next = columns.begin(); next != columns.end();) {
    std::vector<Column> part = {number};
    do {
      part.push_back(std::move(*next++));
    } while (next != columns.end() && width_of(part) + kGap + next->width <= max_columns);
    text += print(part, rows.size());
  }
  return text;
}

}  // namespace kvm::bench
