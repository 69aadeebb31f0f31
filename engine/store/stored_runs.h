// SPDX-License-Identifier: Apache-2.0
// Runs of some pages of a list, for what reads a part of it: indexes and policies.
#ifndef KVM_ENGINE_STORE_STORED_RUNS_H_
#define KVM_ENGINE_STORE_STORED_RUNS_H_

#include <cstdint>
#include <vector>

#include "base/kv_view.h"
#include "engine/store/sequence.h"
#include "engine/store/store_memory.h"

namespace kvm::engine {

// Makes a run, whose tokens lie in one page, point to where that page is.
void point_to_page(const tiers::SlabClass& slab_class, const std::byte* page, KvRun* run);

// Whether all pages of an OWN layer with blocks in [block_begin, block_end) are in memory.
bool are_in_memory(const StoreMemory& memory, const Sequence* seq, uint32_t layer,
                   uint64_t block_begin, uint64_t block_end);

// Appends the stored tokens of an OWN layer, as Store::collect_runs does, but only what pages with
// blocks in [block_begin, block_end) hold. REQUIRES: these are in memory.
void collect_between(const StoreMemory& memory, const Sequence* seq, uint32_t layer,
                     uint32_t class_index, uint64_t block_begin, uint64_t block_end,
                     std::vector<KvRun>* runs);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_STORED_RUNS_H_
