// SPDX-License-Identifier: Apache-2.0
// Kernels behind copies that are few and long: what an update of a batch changes is brought from
// one message to its places, and pages are gathered into a buffer, or spread from it.
#ifndef KVM_ATTENTION_CUDA_TABLE_KERNEL_H_
#define KVM_ATTENTION_CUDA_TABLE_KERNEL_H_

#include "attention/cuda/params.h"
#include "attention/cuda/primitives.h"

namespace kvm::attention::gpu {

inline constexpr uint32_t kScatterThreads = 256;
inline constexpr uint32_t kMoveThreads = 256;
// Blocks that share a page.
inline constexpr uint32_t kMoveBlocks = 4;

// Does the work of one thread of one of n_runs blocks.
KVM_GPU void scatter_thread(const ScatterParams& p) {
  const WordRun run = load_global<WordRun>(p.runs + block_id());
  uint32_t* const to = p.to + run.to;
  const uint32_t* const from = p.words + run.from;
  // What a batch plans lies at multiples of 16 bytes; entries of page tables do not.
  const bool is_aligned = (run.to | run.from) % 4 == 0;
  const uint32_t n_wide = is_aligned ? run.n_words / 4 * 4 : 0;
  for (uint32_t i = thread_id() * 4; i < n_wide; i += kScatterThreads * 4) {
    store_global(to + i, load_global<Word4>(from + i));
  }
  for (uint32_t i = n_wide + thread_id(); i < run.n_words; i += kScatterThreads) {
    store_global(to + i, load_global<uint32_t>(from + i));
  }
}

// Does the work of one thread of one of n_pages * kMoveBlocks blocks.
KVM_GPU void move_thread(const MoveParams& p) {
  const uint32_t page = block_id() / kMoveBlocks;
  uint8_t* const in_pool = p.pages[page];
  uint8_t* const in_buffer = p.packed + page * p.page_bytes;
  const uint8_t* from = p.pack ? in_pool : in_buffer;
  uint8_t* to = p.pack ? in_buffer : in_pool;
  const uint64_t step = uint64_t{kMoveBlocks} * kMoveThreads * 16;
  uint64_t at = (uint64_t{block_id() % kMoveBlocks} * kMoveThreads + thread_id()) * 16;
  for (; at < p.page_bytes; at += step) {
    store_global(to + at, load_global<Word4>(from + at));
  }
}

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_TABLE_KERNEL_H_
