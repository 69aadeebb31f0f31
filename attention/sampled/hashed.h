// SPDX-License-Identifier: Apache-2.0
// Candidates of hash tables, and MagicPIG's estimator over them (Chen et al., arXiv 2410.16179):
//   o = sum_S (w/u) v / sum_S (w/u), F with u = 1: a softmax over s - ln u,
// u the probability that a key at that angle to the query meets it in two tables or more. The angle
// is that between the query and the key minus the centre with which its run was hashed.
#ifndef KVM_ATTENTION_SAMPLED_HASHED_H_
#define KVM_ATTENTION_SAMPLED_HASHED_H_

#include <cstddef>
#include <cstdint>

#include "attention/sampled/approx.h"

namespace kvm::attention {

struct Context;
struct Use;
struct GatherSums;

// Per use: codes of the queries, and the queries with the centre as one more row.
size_t hashed_query_bytes(const ApproxInput& input);
void prepare_hashed(const Context& c, const Use& use, void* out);

size_t hashed_scratch_bytes(const ApproxInput& input);

struct HashedKeys {
  uint64_t* position = nullptr;
  uint16_t* rows = nullptr;  // masks of the rows that met the key
  uint32_t n = 0;
  uint64_t ids_read = 0;
};
// The candidates of a use that lie in R. They live in `scratch`.
HashedKeys look_up(const Context& c, const Use& use, void* scratch);

// Adds them to the sums, with weights w/u; for TopK with weights w.
void gather_hashed(const Context& c, const Use& use, const HashedKeys& keys, void* scratch,
                   const GatherSums& sums);

}  // namespace kvm::attention

#endif  // KVM_ATTENTION_SAMPLED_HASHED_H_
