// SPDX-License-Identifier: Apache-2.0
// Measurements of the attention kernels at library level: decode against the read ceiling, prefill
// against the bf16-dot peak. kvm-bench prints what these functions return.
//
// The ceiling is the best of several read-only kernels over the same pages, by the same threads, in
// the same order of pages, each run interleaved with the runs that it judges. Figures are medians.
#ifndef KVM_BENCH_ATTENTION_ATTENTION_BENCH_H_
#define KVM_BENCH_ATTENTION_ATTENTION_BENCH_H_

#include <cstdint>
#include <string>

namespace kvm::bench {

struct ExactShape {
  std::string name;
  uint32_t n_sequences = 1;
  uint32_t tokens = 0;  // of each sequence
  uint32_t q_heads = 32;
  uint32_t kv_heads = 8;
  uint32_t dim = 128;
  uint32_t v_in_k = 0;  // not 0: values are so many first channels of keys
};

struct ExactResult {
  std::string isa;
  uint32_t threads = 0;
  double ms = 0;
  double gbps = 0;
  double gflops = 0;
  double ceiling_gbps = 0;
  double fraction = 0;
  std::string ceiling_kernel;  // the read kernel that won
};

// One decode step of bf16 K and V for every sequence. `repeats` >= 7 rounds of (attention, each
// read kernel). Memory: the K and V of the shape, in transparent huge pages, pages in random order.
ExactResult measure_exact(const ExactShape& shape, uint32_t threads, int repeats);

struct PrefillResult {
  std::string isa;
  uint32_t threads = 0;
  double ms = 0;
  double gflops = 0;
  double peak_gflops = 0;
  double fraction = 0;
};

// A chunk of n_query tokens at the end of `tokens` keys of one sequence, 32 / 8 heads, dim 128,
// bf16, causal. The peak is a register-only loop of the fastest multiply-add that the table has.
PrefillResult measure_prefill(uint32_t n_query, uint32_t tokens, uint32_t threads, int repeats);

}  // namespace kvm::bench

#endif  // KVM_BENCH_ATTENTION_ATTENTION_BENCH_H_
