// SPDX-License-Identifier: Apache-2.0
// The pilot decides how many keys to draw: it finds the thresholds c of a problem by a look at a
// part of the index. Words: R are the keys that may be approximated, F those that are always read
// (partition.h); o, D and V are the answer, its denominator and its variance (estimate.h).
//
// The pilot is one block of every 16 of R (of every 32 with a budget; all where R is small), chosen
// at random among those. With a budget of m keys for each
// row, c of a row solves
//   sum min(1, c size_i) = m     over all keys, the pilot standing for them; size = e^s_hat |v|.
// Without one, some 64 keys of the pilot are read for each row. They and the nearest of F estimate
// o, D and the variance V of the whole sample for any c, and every row's c is taken such that its
// bar is eps; a sample that may grow begins larger. Where so many keys would have to be read that
// exact is cheaper, or where thresholds are beyond what fp32 resolves, the problem is marked to be
// answered exactly.
#ifndef KVM_ATTENTION_SAMPLED_PILOT_H_
#define KVM_ATTENTION_SAMPLED_PILOT_H_

#include "attention/sampled/core.h"

namespace kvm::attention {

size_t pilot_scratch_bytes(const ApproxInput& input, const Plan& exact, uint64_t n_keys);

// Sets log_c and answer_exactly. REQUIRES: everything else of c.prepared is there.
void find_thresholds(const Context& c, void* scratch);

// TopK over sketches: sets log_c to logits that about keys_above_bars (select.h) keys of R exceed
// in each row; minus infinity where the pilot cannot tell.
void find_bars(const Context& c, void* scratch);

// c with sum min(1, c sizes_i) = wanted. sizes [n], n a multiple of 16, aligned to 64 bytes;
// REQUIRES: wanted > 0. Where fewer than `wanted` sizes are positive, a c that saturates them.
float threshold(const SampledKernels& kernels, const float* sizes, size_t n, double wanted);

// KeyShares are what some keys, which stand for all, add to the bars. The columns of row r begin at
// r * stride.
struct KeyShares {
  uint32_t n = 0;
  uint32_t stride = 0;  // a multiple of 16; there is room for so many
  uint32_t rows = 0;
  float* size = nullptr;    // [rows][stride]: c size of the row alone; p = min(1, largest of rows)
  float* excess = nullptr;  // [rows][stride]: sum of it times (1 - p)/p is (bar / eps)^2
};
// By what to multiply every row's c, by `least` or more, that all bars are eps. V falls like 1/c or
// faster, and a row gains from what is drawn for others.
void solve_growth(const KeyShares& keys, double least, double* growth);

// Verified, and Sampled without a budget: the share of n keys beyond which exact is cheaper.
// Reading them in order takes n t, t the time of a row; a sample a fixed time for its pilot and its
// end, scan n, and t + 14 ns for a row gathered, for it comes alone. So sampling u n rows pays up
// to u = (t - scan - fixed / n) / (t + 14 ns), of which seven tenths are taken: the sample may have
// to grow again.
double max_read_fraction(const ApproxParams& params, const Problem& problem, uint64_t n_keys);

// Of the same modes: about how many keys a sample of `rows` reads that has an error of eps.
uint64_t usual_keys(const ApproxParams& params, uint64_t rows);

// Of the same modes: whether to ask the pilot at all. Where what is usually read at eps, or a fifth
// of the keys, is more than what pays, finding out costs more than it saves.
bool is_worth_a_pilot(const ApproxParams& params, const Problem& problem, uint64_t n_keys);

}  // namespace kvm::attention

#endif  // KVM_ATTENTION_SAMPLED_PILOT_H_
