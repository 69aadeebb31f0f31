// SPDX-License-Identifier: Apache-2.0
// Observed: what kvm_observe left behind for one (sequence, layer), shared by forks until one of
// them adds to it.
#ifndef KVM_ENGINE_STORE_OBSERVED_H_
#define KVM_ENGINE_STORE_OBSERVED_H_

#include <cstdint>
#include <vector>

namespace kvm::engine {

struct ObserveInput;

struct Observed {
  uint64_t query_position = 0;     // of the first row
  uint32_t n_rows = 0;             // at most kMaxObservedRows, consecutive positions
  std::vector<float> queries;      // [n_rows][row_floats]
  std::vector<float> column_sums;  // [column][n_kv_heads], columns from position 0

  uint64_t size_bytes() const { return (queries.size() + column_sums.size()) * sizeof(float); }
};

// Bytes that `present` (null: nothing) would have after add_observation.
uint64_t observed_bytes_after(const Observed* present, const ObserveInput& input,
                              uint32_t row_floats, uint32_t n_kv_heads);

// Appends rows (those that do not follow replace what is there; the newest kMaxObservedRows stay)
// and adds column sums. row_floats: floats of a query row, n_q_heads * head_dim_k.
// Throws std::bad_alloc: nothing has changed.
void add_observation(Observed* present, const ObserveInput& input, uint32_t row_floats,
                     uint32_t n_kv_heads);

// Forgets rows and columns at positions from n_tokens on.
void truncate_observation(Observed* present, uint64_t n_tokens, uint32_t row_floats,
                          uint32_t n_kv_heads);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_OBSERVED_H_
