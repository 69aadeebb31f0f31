// SPDX-License-Identifier: Apache-2.0
// Fitting text into the columns of a terminal. kWide is as wide as needed.
//
// Threads: pure functions, but for terminal_columns, which asks the terminal.
#ifndef KVM_TOOLS_KVMCTL_LAYOUT_H_
#define KVM_TOOLS_KVMCTL_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvm::tools {

inline constexpr size_t kWide = SIZE_MAX;

// Returns the width of the terminal at the standard output: kWide where that is none, 80 where it
// does not know.
size_t terminal_columns();

struct Column {
  std::string title;
  uint32_t importance = 0;  // the least important go first where there is no room
};

// Rows below their titles, as table_text has them, with as many columns as fit; at least one.
std::string fitted_table(const std::vector<Column>& columns,
                         const std::vector<std::vector<std::string>>& rows, size_t width);

// "title  part, part, part", continued below the first part where a part does not fit.
struct Line {
  std::string title;
  std::vector<std::string> parts;
};
std::string fitted_lines(const std::vector<Line>& lines, size_t width);

}  // namespace kvm::tools

#endif  // KVM_TOOLS_KVMCTL_LAYOUT_H_
