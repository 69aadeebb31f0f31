// SPDX-License-Identifier: Apache-2.0
// The shape of an answer's error: how many directions it has, from some of the keys that were
// drawn.
//
// The error of o is a sum of independent terms, one for each open key; its covariance is estimated
// by S = sum_S c_i (v_i - o)(v_i - o)^T, c = w^2 (1 - p)/p^2. An error of many directions has a
// length that hardly varies; one of a single direction varies as a Gaussian number does, and a bar
// has to be half as wide again. The length's quantiles follow from tr S^2 and the largest
// eigenvalue (estimate.h). S has dim_v^2 numbers and is never made: both are those of the matrix of
// the products of the terms, sqrt(c_i c_j) (v_i - o).(v_j - o), and the products v_i.v_j are the
// same for all rows of a group.
//
// A shard keeps every n-th of the open keys that it has drawn (told keys); their rows are read
// once more when the answer is finished.
#ifndef KVM_ATTENTION_SAMPLED_DIRECTIONS_H_
#define KVM_ATTENTION_SAMPLED_DIRECTIONS_H_

#include <algorithm>
#include <span>

#include "attention/sampled/core.h"
#include "attention/sampled/estimate.h"

namespace kvm::attention {

// LIMIT: told keys of a shard, and of all shards together. Reading them and their products takes
// some 25 us a head, however many tokens it has.
inline constexpr uint32_t kMostTold = 96;

struct ToldKeys {
  uint64_t* position = nullptr;  // [kMostTold], ascending
  float* p = nullptr;            // [kMostTold], below 1
  uint32_t n = 0;
  float weight = 0;  // drawn keys for each of them
  // Where rows are gone by then (ApproxInput::is_in_parts): what Directions would read of those
  // that it takes. Else null.
  float* logits = nullptr;  // [rows][most_taken]
  float* values = nullptr;  // [most_taken][acc_stride]
};

// How many of a shard's keys are taken.
inline uint32_t most_taken(uint32_t n_shards) {
  return std::max(kMostTold / std::max(n_shards, 1u), 1u);
}
// Reads of the keys that a shard tells of what `told` has room for.
void read_told(const Context& c, const ToldKeys& told);

class Directions {
 public:
  static size_t scratch_bytes(const Problem& problem);
  // scratch: scratch_bytes, aligned to kBufferAlign.
  Directions(const Context& c, void* scratch);

  // Takes the keys of a shard; shards in the order of positions. Where there are more than
  // kMostTold keys in the shards, every so many-th is taken.
  void add(const ToldKeys& keys);
  // Reads what was added: logits and values.
  void read();
  // Returns the shape of the error of a row; one direction where nothing tells. o [dim_v].
  ErrorShape shape(uint32_t row, std::span<const double> o);

 private:
  // Memory in scratch.
  struct Room {
    uint64_t* position;  // [kMostTold], and likewise
    float* p;
    float* weight;
    float* logits;    // [rows][kMostTold]
    float* values;    // [kMostTold][stride_]
    float* products;  // [kMostTold][kMostTold]: v_i.v_j
    float* terms;     // likewise, of one row
  };
  static Room carve_room(const Problem& problem, Carver& carver);

  const Context& c_;
  uint32_t n_ = 0;
  uint32_t stride_;  // floats of a value
  Room room_;
};

}  // namespace kvm::attention

#endif  // KVM_ATTENTION_SAMPLED_DIRECTIONS_H_
