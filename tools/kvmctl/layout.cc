// SPDX-License-Identifier: Apache-2.0
#include "tools/kvmctl/layout.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>

#include "tools/kvmctl/cli.h"

namespace kvm::tools {
namespace {

constexpr size_t kGap = 2;  // between columns, as in table_text

// Widths of all columns, and 0 for those that are left out.
std::vector<size_t> widths_within(const std::vector<Column>& columns,
                                  const std::vector<std::vector<std::string>>& rows, size_t width) {
  std::vector<size_t> widths;
  size_t total = 0;
  for (size_t i = 0; i < columns.size(); ++i) {
    widths.push_back(columns[i].title.size());
    for (const auto& row : rows) {
      widths[i] = std::max(widths[i], row[i].size());
    }
    total += widths[i] + (i == 0 ? 0 : kGap);
  }
  for (size_t n_left = columns.size(); total > width && n_left > 1; --n_left) {
    size_t least = 0;
    for (size_t i = 0; i < columns.size(); ++i) {
      if (widths[i] != 0 &&
          (widths[least] == 0 || columns[i].importance < columns[least].importance)) {
        least = i;
      }
    }
    total -= widths[least] + kGap;
    widths[least] = 0;
  }
  return widths;
}

// Each line of a text, cut.
std::string cut_lines(const std::string& text, size_t width) {
  std::string out;
  size_t column = 0;
  for (const char c : text) {
    column = c == '\n' ? 0 : column + 1;
    if (column <= width) {
      out += c;
    }
  }
  return out;
}

}  // namespace

size_t terminal_columns() {
  if (::isatty(STDOUT_FILENO) == 0) {
    return kWide;
  }
  winsize size{};
  return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

std::string fitted_table(const std::vector<Column>& columns,
                         const std::vector<std::vector<std::string>>& rows, size_t width) {
  const std::vector<size_t> widths = widths_within(columns, rows, width);
  std::vector<std::vector<std::string>> shown(1 + rows.size());
  for (size_t i = 0; i < columns.size(); ++i) {
    if (widths[i] == 0) {
      continue;
    }
    shown[0].push_back(columns[i].title);
    for (size_t j = 0; j < rows.size(); ++j) {
      shown[j + 1].push_back(rows[j][i]);
    }
  }
  return cut_lines(table_text(shown), width);
}

std::string fitted_lines(const std::vector<Line>& lines, size_t width) {
  size_t indent = 0;
  for (const Line& line : lines) {
    indent = std::max(indent, line.title.size() + kGap);
  }
  std::string text;
  for (const Line& line : lines) {
    std::string current = line.title + std::string(indent - line.title.size(), ' ');
    for (size_t i = 0; i < line.parts.size(); ++i) {
      const std::string part = line.parts[i] + (i + 1 < line.parts.size() ? "," : "");
      if (i > 0 && current.size() + 1 + part.size() > width) {
        text += current + '\n';
        current = std::string(indent, ' ') + part;
      } else {
        current += (i > 0 ? " " : "") + part;
      }
    }
    text += current + '\n';
  }
  return cut_lines(text, width);
}

}  // namespace kvm::tools
