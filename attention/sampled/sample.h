// SPDX-License-Identifier: Apache-2.0
// Horvitz-Thompson sampling of one shard: scan and draw, gather, grow; and the totals over shards.
//
// Sums of open keys are kept with p as it was before growth. A sample that has grown by f has
// p(f) = min(1, f p): its w/p sums are those divided by f, its w^2/p^2 sums divided by f^2, and
// only keys that are new, or that f has closed, are read.
#ifndef KVM_ATTENTION_SAMPLED_SAMPLE_H_
#define KVM_ATTENTION_SAMPLED_SAMPLE_H_

#include "attention/sampled/core.h"
#include "attention/sampled/estimate.h"

namespace kvm::attention {

// How far a sample that may grow is scanned for at once.
inline constexpr float kReach = 4.0f;
// Open keys of smaller size are not counted in SampleHead::square: (1 - p)/p is taken as 1/p.
inline constexpr float kLeastSquared = 1.0f / 128;

struct SampleHead {
  hash_index::DrawSums sums;
  uint32_t n_candidates = 0;
  uint32_t n_closed = 0;  // keys read with p = 1
  uint32_t n_open = 0;
  float reach = 1.0f;
  float log_c[kMaxApproxRows] = {};  // that this shard drew with
  uint64_t index_bytes = 0;
  uint64_t keys_read = 0;              // repeats after another scan included
  double square[kMaxApproxRows] = {};  // sum h^2 over open keys, where the sample may grow
};

// State of a shard.
struct SampleState {
  std::byte* exact;  // of its part of F, or of all its tokens where the answer is exact
  SampleHead* head;
  GatherSums sums;
  hash_index::Candidates candidates;  // in scratch where the sample does not grow
};

bool may_grow(const ApproxParams& params);
uint32_t candidate_capacity(const ApproxParams& params, uint64_t n_keys, uint32_t rows);
size_t sample_state_bytes(const ApproxInput& input, uint64_t n_keys, uint32_t rows);
size_t sample_scratch_bytes(const ApproxInput& input, uint64_t n_keys, uint32_t rows);
SampleState sample_state(const Context& c, void* state, void* scratch);

// Draws with all c of the problem times e^log_growth, and reads what is drawn. An overfull shard
// draws with smaller c: any p is as good for what is expected.
void draw_shard(const Context& c, uint64_t shard_id, float log_growth, void* scratch,
                const SampleState& state);

// From p(from) to p(to). REQUIRES: to <= head->reach.
void grow_shard(const Context& c, double from, double to, void* scratch, const SampleState& state);

// What p(f) makes of the sums over all keys of a shard.
struct GrownSums {
  double expected = 0;  // keys read
  double n_open = 0;    // keys left to chance
  double open_mass[kMaxApproxRows] = {};
  double spread[kMaxApproxRows] = {};
};
GrownSums grown_sums(const Context& c, const SampleState& state, double f);

// Adds a key list to a sample: the seam between proposals and estimator, which tests use too.
// Candidates with random < size are drawn.
void gather_drawn(const Context& c, const SampleState& state, void* scratch);

}  // namespace kvm::attention

#endif  // KVM_ATTENTION_SAMPLED_SAMPLE_H_
