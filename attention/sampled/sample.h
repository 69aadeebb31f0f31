// SPDX-License-Identifier: Apache-2.0
// Horvitz-Thompson sampling of one shard: scan and draw, gather, and draw more.
//
// A sample grows row by row: c of each row by a factor of its own. The candidates of a scan are all
// keys that may be drawn with any c up to head.reach times as large, so that a larger sample needs
// no other scan. What was drawn stays in the sums: only keys whose p is another now are read again,
// and the new ones. After another scan all are.
#ifndef KVM_ATTENTION_SAMPLED_SAMPLE_H_
#define KVM_ATTENTION_SAMPLED_SAMPLE_H_

#include "attention/sampled/core.h"
#include "attention/sampled/directions.h"
#include "attention/sampled/estimate.h"

namespace kvm::attention {

// How far a sample that may grow is scanned for at once, where nothing says better and at most, and
// in another scan.
inline constexpr float kReach = 2.0f;
inline constexpr float kMostReach = 64.0f;
inline constexpr float kReachAgain = 1.5f;

// Keys that the scan of a sample that may grow is to find: for growth beyond them the index is
// scanned again, and all is read again. Small samples are those that grow most (98,304 tokens of
// `model`: 35 other scans in 144 problems, where there were 50 with a reach of 2 for all).
inline constexpr double kCandidates = 16'000;
inline constexpr double kLeastReach = 1.5;

struct SampleHead {
  hash_index::DrawSums sums;
  uint32_t n_candidates = 0;
  uint32_t n_closed = 0;  // keys read with p = 1
  uint32_t n_open = 0;
  float reach = 1.0f;
  bool redrawn = false;
  float log_c[kMaxApproxRows] = {};  // that this shard drew with
  uint64_t index_bytes = 0;          // of all scans
  uint32_t n_told = 0;  // open keys whose places are kept, and how many each stands for
  float told_weight = 0;
};

// State of a shard.
struct SampleState {
  std::byte* exact;  // of its part of F, or of all its tokens where the answer is exact
  SampleHead* head;
  GatherSums sums;
  ToldKeys told;
  hash_index::Candidates candidates;  // in scratch where the sample does not grow
};

bool may_grow(const ApproxParams& params);
uint32_t candidate_capacity(const ApproxInput& input, uint64_t n_keys, uint32_t rows);
size_t sample_state_bytes(const ApproxInput& input, uint64_t n_keys, uint32_t rows,
                          uint32_t n_shards);
size_t sample_scratch_bytes(const ApproxInput& input, uint64_t n_keys, uint32_t rows);
SampleState sample_state(const Context& c, void* state, void* scratch);

// Scans, and draws with c = e^log_c of each row: of what it returns, the candidates whose random
// number is below their size. An overfull shard draws with smaller c: any p is as good for what is
// expected.
hash_index::Candidates scan_shard(const Context& c, uint64_t shard_id, const float* log_c,
                                  float reach, const SampleState& state);

// The same, and reads what is drawn.
void draw_shard(const Context& c, uint64_t shard_id, const float* log_c, float reach, void* scratch,
                const SampleState& state);

// Draws with c of each row times e^log_growth, and reads that. Nested: what was drawn stays drawn.
// REQUIRES: 0 <= log_growth <= ln(head->reach).
// ENSURES: the state is as after draw_shard, but that of head->sums only n_keys and open_mass are
// those of the new c, and that sums may be off by what fp32 rounds of those before.
void redraw_shard(const Context& c, const float* log_growth, void* scratch,
                  const SampleState& state);

// Adds a key list to a sample: the seam between proposals and estimator, which tests use too.
// Candidates with random < size are drawn.
void gather_drawn(const Context& c, const SampleState& state, void* scratch);

}  // namespace kvm::attention

#endif  // KVM_ATTENTION_SAMPLED_SAMPLE_H_
