// SPDX-License-Identifier: Apache-2.0
// The tables that benches print, for a terminal of 120 columns.
//
// Names of columns are broken at their underscores, so that a column is hardly wider than its
// figures. Where a table would still be too wide, columns that say the same in every row go into a
// line above it; where that is not enough, the table continues in a second one, rows numbered.
#ifndef KVM_BENCH_TABLE_H_
#define KVM_BENCH_TABLE_H_

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace kvm::bench {

inline constexpr size_t kTableColumns = 120;

// A figure as tables show it.
std::string table_cell(const nlohmann::ordered_json& value);

// `rows` as text of lines that end in a newline. Columns stand in the order in which the rows name
// them first; those of `hidden` are left out. No line is longer than max_columns unless a single
// column is.
std::string table_text(const std::vector<nlohmann::ordered_json>& rows,
                       const std::vector<std::string>& hidden, size_t max_columns = kTableColumns);

}  // namespace kvm::bench

#endif  // KVM_BENCH_TABLE_H_
