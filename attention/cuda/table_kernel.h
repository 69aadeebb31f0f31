// SPDX-License-Identifier: Apache-2.0
// Kernels that keep page tables and pages in order: single entries that change, and pages gathered
// into a buffer, or spread from it, for the sake of copies that are long enough.
#ifndef KVM_ATTENTION_CUDA_TABLE_KERNEL_H_
#define KVM_ATTENTION_CUDA_TABLE_KERNEL_H_

#include "attention/cuda/params.h"
#include "attention/cuda/primitives.h"

namespace kvm::attention::gpu {

inline constexpr uint32_t kPatchThreads = 128;
inline constexpr uint32_t kMoveThreads = 256;
// Blocks that share a page.
inline constexpr uint32_t kMoveBlocks = 4;

// Does the work of one thread: one patch. Blocks: n_patches / kPatchThreads, rounded up.
KVM_GPU void patch_thread(const PatchParams& p) {
  const uint32_t i = block_id() * kPatchThreads + thread_id();
  if (i < p.n_patches) {
    const Patch patch = load_global<Patch>(p.patches + i);
    store_global(p.page_table + patch.index, patch.entry);
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
