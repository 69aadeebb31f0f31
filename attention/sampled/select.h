// SPDX-License-Identifier: Apache-2.0
// TopK: the keys of R with the largest scores, row by row. A shard keeps its best ones; the best of
// those are read in the end. Where scores are equal the lower position wins.
#ifndef KVM_ATTENTION_SAMPLED_SELECT_H_
#define KVM_ATTENTION_SAMPLED_SELECT_H_

#include <algorithm>
#include <limits>

#include "attention/sampled/core.h"

namespace kvm::attention {

struct Scored {
  float score = 0;
  uint64_t position = 0;
};

// A TopList holds the `keep` best of what is pushed in order of position. REQUIRES: room for 2 *
// keep items, and for as many floats of work.
class TopList {
 public:
  TopList() = default;
  TopList(Scored* items, uint32_t keep, float* work) : items_(items), work_(work), keep_(keep) {}
  void push(float score, uint64_t position) { push(&score, 1, 1, position); }
  // scores[0], scores[stride], ... of n keys from `position` on. NaN never counts.
  void push(const float* scores, uint32_t stride, uint32_t n, uint64_t position);
  // Pushes n keys at these positions.
  void push(const float* scores, uint32_t n, const uint64_t* positions);
  // Only scores above the bar count from now on.
  void raise_bar(float bar) { bar_ = std::max(bar_, bar); }
  // The best ones in order of position; returns how many.
  uint32_t finish();

 private:
  template <typename Position>
  void add(const float* scores, uint32_t stride, uint32_t n, Position position_of);
  void shrink();

  Scored* items_ = nullptr;
  float* work_ = nullptr;
  uint32_t keep_ = 1;
  uint32_t n_ = 0;
  float bar_ = -std::numeric_limits<float>::infinity();  // what a score must exceed
};

// The k-th largest of x [n], 1 <= k <= n, none of them NaN; what is in x is lost.
float kth_largest(float* x, uint32_t n, uint32_t k);

// State of a shard.
struct SelectHead {
  uint32_t n[kMaxApproxRows] = {};
  uint64_t keys_scored = 0;  // whose key was read
  uint64_t index_bytes = 0;
};
struct SelectState {
  std::byte* exact;
  SelectHead* head;
  Scored* items;  // [rows][2 * keep]
};

uint32_t keep_in_shard(const ApproxParams& params, uint64_t n_keys);
size_t select_state_bytes(const ApproxInput& input, uint64_t n_keys, uint32_t rows);
size_t select_scratch_bytes(const ApproxInput& input, uint64_t n_keys, uint32_t rows);
SelectState select_state(const Context& c, void* state);

// How many keys of R a pilot's bars should let pass, of sketched scores: all that are kept, and
// more, for the pilot sees one key in `share`.
double keys_above_bars(const Context& c, double share);

// bars: keep only what is above those of prepare (PreparedHead::log_c).
void select_shard(const Context& c, uint64_t shard_id, bool bars, void* scratch,
                  const SelectState& state);

// Reads the best of all shards into `sums`. Where bars have left too few, shards are selected anew.
struct Selected {
  uint64_t keys_read = 0;
  uint64_t index_bytes = 0;
};
Selected gather_selected(const Context& c, void* scratch, std::byte* states,
                         const GatherSums& sums);

}  // namespace kvm::attention

#endif  // KVM_ATTENTION_SAMPLED_SELECT_H_
