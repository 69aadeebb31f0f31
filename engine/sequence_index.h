// SPDX-License-Identifier: Apache-2.0
// The indexes of one sequence: built, cut and read, as engine/store.h states it.
#ifndef KVM_ENGINE_SEQUENCE_INDEX_H_
#define KVM_ENGINE_SEQUENCE_INDEX_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "attention/sampled/approx.h"
#include "engine/index.h"
#include "engine/index_build.h"
#include "engine/ledger.h"
#include "engine/sequence.h"
#include "policies/policy.h"

namespace kvm::engine {

std::unique_ptr<IndexBuild> plan_index_build(Ledger* ledger, Sequence* seq, uint32_t layer,
                                             uint64_t n_append, uint64_t max_cost);
void open_index_build(Ledger* ledger, IndexBuild* build);
void close_index_build(Ledger* ledger, IndexBuild* build);
IndexPin pin_layer_index(const Sequence* seq, uint32_t layer);
void collect_head_index(const Ledger& ledger, const Sequence* seq, uint32_t layer, uint32_t kv_head,
                        uint64_t length, std::vector<attention::SketchedRun>* sketches,
                        std::vector<attention::HashedRun>* hashes);
// What the index of the first n_tokens covers stays. Throws nothing; it is no use of the index.
void cut_indexes(Sequence* seq, uint64_t n_tokens);
// Forgets the pages that a policy dropped.
void drop_from_index(Ledger* ledger, Sequence* seq, const policies::Action& action);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_SEQUENCE_INDEX_H_
