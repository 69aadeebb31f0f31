// SPDX-License-Identifier: Apache-2.0
#include "engine/store/observed.h"

#include <algorithm>
#include <cstddef>

#include "engine/store/store_types.h"

namespace kvm::engine {
namespace {

// How many of the rows that are there stay, and how many new ones are taken.
struct RowPlan {
  uint32_t n_old = 0;
  uint32_t n_new = 0;
};

RowPlan plan_rows(const Observed* present, const ObserveInput& input) {
  if (input.n_rows == 0) {
    return {present == nullptr ? 0 : present->n_rows, 0};
  }
  const uint32_t n_new = std::min(input.n_rows, kMaxObservedRows);
  const bool follows = present != nullptr && present->n_rows > 0 &&
                       present->query_position + present->n_rows == input.query_position;
  return {follows ? std::min(present->n_rows, kMaxObservedRows - n_new) : 0, n_new};
}

uint64_t n_columns_after(const Observed* present, const ObserveInput& input, uint32_t n_kv_heads) {
  const uint64_t n_present = present == nullptr ? 0 : present->column_sums.size() / n_kv_heads;
  return input.n_columns == 0 ? n_present
                              : std::max(n_present, input.column_begin + input.n_columns);
}

}  // namespace

uint64_t observed_bytes_after(const Observed* present, const ObserveInput& input,
                              uint32_t row_floats, uint32_t n_kv_heads) {
  const RowPlan rows = plan_rows(present, input);
  return (uint64_t{rows.n_old + rows.n_new} * row_floats +
          n_columns_after(present, input, n_kv_heads) * n_kv_heads) *
         sizeof(float);
}

void add_observation(Observed* present, const ObserveInput& input, uint32_t row_floats,
                     uint32_t n_kv_heads) {
  const RowPlan rows = plan_rows(present, input);
  const uint64_t n_sums = n_columns_after(present, input, n_kv_heads) * n_kv_heads;
  present->column_sums.reserve(n_sums);  // no more than was charged
  if (rows.n_new > 0) {
    const uint64_t n_forgotten = present->n_rows - rows.n_old;
    std::vector<float> queries;
    queries.reserve(uint64_t{rows.n_old + rows.n_new} * row_floats);
    queries.assign(present->queries.begin() + static_cast<ptrdiff_t>(n_forgotten * row_floats),
                   present->queries.end());
    const uint64_t n_skipped = input.n_rows - rows.n_new;
    queries.insert(queries.end(), input.q + n_skipped * row_floats,
                   input.q + uint64_t{input.n_rows} * row_floats);
    present->queries = std::move(queries);
    present->query_position = input.query_position + n_skipped - rows.n_old;
    present->n_rows = rows.n_old + rows.n_new;
  }
  present->column_sums.resize(n_sums);
  for (uint64_t i = 0; i < input.n_columns * n_kv_heads; ++i) {
    present->column_sums[input.column_begin * n_kv_heads + i] += input.column_sums[i];
  }
}

void truncate_observation(Observed* present, uint64_t n_tokens, uint32_t row_floats,
                          uint32_t n_kv_heads) {
  const uint64_t n_rows =
      n_tokens <= present->query_position
          ? 0
          : std::min<uint64_t>(present->n_rows, n_tokens - present->query_position);
  present->n_rows = static_cast<uint32_t>(n_rows);
  present->queries.resize(n_rows * row_floats);
  present->queries.shrink_to_fit();
  const uint64_t n_columns = std::min<uint64_t>(present->column_sums.size() / n_kv_heads, n_tokens);
  present->column_sums.resize(n_columns * n_kv_heads);
  present->column_sums.shrink_to_fit();
}

}  // namespace kvm::engine
