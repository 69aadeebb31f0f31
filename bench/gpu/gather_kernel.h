// SPDX-License-Identifier: Apache-2.0
// Rows picked out of a table and laid one behind the other: the table is host memory that the
// device reads, so what matters is how many bytes are on their way over the link.
#ifndef KVM_BENCH_GPU_GATHER_KERNEL_H_
#define KVM_BENCH_GPU_GATHER_KERNEL_H_

#include <stdint.h>

#include "attention/cuda/primitives.h"

namespace kvm::bench::gpu {

inline constexpr uint32_t kGatherThreads = 1024;
// Loads of 16 bytes, for each thread.
inline constexpr uint32_t kGatherLoads = 8;

struct GatherParams {
  const uint8_t* table = nullptr;  // [row][row_bytes]
  const uint32_t* rows = nullptr;  // [n_rows] of the table
  uint8_t* out = nullptr;          // [n_rows][row_bytes]
  uint32_t n_rows = 0;
  uint32_t row_bytes = 0;  // a multiple of 16; n_rows times it is below 2^32
  uint32_t n_blocks = 0;   // of the launch
};

// Does the work of one thread of one block. Neighbours in a block read neighbouring 16 bytes.
KVM_GPU void gather_thread(const GatherParams& p) {
  using attention::gpu::Word4;
  const uint32_t row_words = p.row_bytes / 16;
  const uint32_t n_words = p.n_rows * row_words;
  for (uint64_t first = uint64_t{attention::gpu::block_id()} * kGatherThreads * kGatherLoads;
       first < n_words; first += uint64_t{p.n_blocks} * kGatherThreads * kGatherLoads) {
    Word4 words[kGatherLoads];
#pragma unroll
    for (uint32_t i = 0; i < kGatherLoads; ++i) {
      const uint64_t at = first + i * kGatherThreads + attention::gpu::thread_id();
      if (at < n_words) {
        const uint32_t row = static_cast<uint32_t>(at) / row_words;
        const uint64_t from = attention::gpu::load_global<uint32_t>(p.rows + row);
        words[i] = attention::gpu::load_global<Word4>(p.table + from * p.row_bytes +
                                                      (at - row * row_words) * 16);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kGatherLoads; ++i) {
      const uint64_t at = first + i * kGatherThreads + attention::gpu::thread_id();
      if (at < n_words) {
        attention::gpu::store_global(p.out + at * 16, words[i]);
      }
    }
  }
}

}  // namespace kvm::bench::gpu

#endif  // KVM_BENCH_GPU_GATHER_KERNEL_H_
