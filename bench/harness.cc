// SPDX-License-Identifier: Apache-2.0
#include "bench/harness.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "base/machine.h"
#include "bench/table.h"

namespace kvm::bench {

void Report::add(std::vector<std::pair<std::string, nlohmann::json>> fields) {
  nlohmann::ordered_json row;
  row["bench"] = bench_;
  for (auto& [name, value] : fields) {
    row[name] = std::move(value);
  }
  if (row.contains("fraction") && row["fraction"].get<double>() > max_fraction_) {
    failed_ = true;
    note(fmt::format("fraction {} is above {}: its ceiling was not one, run again",
                     table_cell(row["fraction"]), max_fraction_));
  }
  fmt::print(stderr, ".");
  rows_.push_back(std::move(row));
}

void Report::note(const std::string& text) { notes_.push_back(text); }

void Report::fail(const std::string& text) {
  notes_.push_back("FAILED: " + text);
  failed_ = true;
}

int Report::finish() {
  if (rows_.empty()) {
    note("nothing was measured: --max-tokens or --memory leaves out every case");
    failed_ = true;
  }
  fmt::print("\n{}\n{}", bench_, table_text(rows_, hidden_));
  for (const auto& text : notes_) {
    fmt::print("  {}\n", text);
  }
  if (!options_.json_path.empty()) {
    std::ofstream out(options_.json_path, std::ios::app);
    for (const auto& row : rows_) {
      out << row.dump() << "\n";
    }
    if (!out.flush()) {
      fmt::print(stderr, "kvm-bench: cannot write {}\n", options_.json_path);
      return 1;
    }
  }
  return failed_ ? 1 : 0;
}

uint64_t memory_budget_bytes(const Options& options) {
  return options.memory_bytes != 0 ? options.memory_bytes : machine_memory().free_bytes / 10 * 7;
}

uint32_t thread_count(const Options& options) {
  return options.threads != 0 ? options.threads : usable_cores();
}

void require(const Status& status, const char* what) {
  if (!status.is_ok()) {
    fmt::print(stderr, "kvm-bench: {}: {} ({})\n", what, status.message(),
               static_cast<int>(status.code()));
    std::exit(1);
  }
}

void fill_random_bf16(uint16_t* data, uint64_t count, uint64_t seed) {
  uint64_t state = seed * 0x9e3779b97f4a7c15ull + 0x632be59bd9b4e019ull;
  for (uint64_t i = 0; i < count; i += 4) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    // Four values at once: sign, lowest exponent bit and mantissa at random, so 0.5 <= |x| < 2.
    const uint64_t four = (state & 0x80ff80ff80ff80ffull) | 0x3f003f003f003f00ull;
    std::memcpy(data + i, &four, std::min<uint64_t>(8, (count - i) * 2));
  }
}

}  // namespace kvm::bench
