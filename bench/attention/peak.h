// SPDX-License-Identifier: Apache-2.0
// The fastest multiply-add of this processor on registers alone: the ceiling of prefill.
#ifndef KVM_BENCH_ATTENTION_PEAK_H_
#define KVM_BENCH_ATTENTION_PEAK_H_

#include <cstdint>

namespace kvm::bench {

// Runs `rounds` rounds of independent bf16 dot products (where the processor has them, else fp32
// multiply-adds) on the calling thread; returns how many floating-point operations that was.
double run_multiply_adds(uint64_t rounds);

}  // namespace kvm::bench

#endif  // KVM_BENCH_ATTENTION_PEAK_H_
