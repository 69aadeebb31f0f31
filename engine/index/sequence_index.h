// SPDX-License-Identifier: Apache-2.0
// The indexes of one sequence: planned, built and read.
//
// Whatever needs pages, quota or capacity takes it from indexes before it fails: from those that
// were used longest ago (of the client, where its quota is short), but not from one that is pinned
// or being built.
#ifndef KVM_ENGINE_INDEX_SEQUENCE_INDEX_H_
#define KVM_ENGINE_INDEX_SEQUENCE_INDEX_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "attention/sampled/approx.h"
#include "engine/index/index_build.h"
#include "engine/store/layer_index.h"
#include "engine/store/sequence.h"
#include "engine/store/store_memory.h"
#include "policies/policy.h"

namespace kvm::engine {

// What an attend finds of an index.
struct PlannedBuild {
  // A slice of what it lacks; null: nothing, or a sequence that shares it builds it now.
  std::unique_ptr<IndexBuild> slice;
  bool is_claimed = false;  // by that sequence: ask again when its build is closed
};

// Plans a slice of the index of a layer (OWN or ALIAS) for an attend after n_append more tokens, of
// about max_cost (IndexBuild::cost). Published tokens only. Every slice must be opened and closed,
// or destroyed, before anything else changes the sequence; the next one is planned after that.
PlannedBuild plan_index_build(StoreMemory* memory, Sequence* seq, uint32_t layer, uint64_t n_append,
                              uint64_t max_cost);
void open_index_build(StoreMemory* memory, IndexBuild* build);
void close_index_build(StoreMemory* memory, IndexBuild* build);
// Appends what the index of a kv head has for a sequence of `length` tokens. Valid as the runs of
// Store::collect_runs are. Nothing for an ABSENT layer.
void collect_head_index(const Sequence* seq, uint32_t layer, uint32_t kv_head, uint64_t length,
                        std::vector<attention::SketchedRun>* sketches,
                        std::vector<attention::HashedRun>* hashes);
// Forgets the pages that a policy dropped.
void drop_from_index(StoreMemory* memory, Sequence* seq, const policies::Action& action);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_INDEX_SEQUENCE_INDEX_H_
