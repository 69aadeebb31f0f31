// SPDX-License-Identifier: Apache-2.0
#include "engine/index/sequence_index.h"

#include <algorithm>
#include <utility>

#include "base/round.h"
#include "engine/store/observations.h"
#include "engine/store/stored_runs.h"

namespace kvm::engine {

PlannedBuild plan_index_build(StoreMemory* memory, Sequence* seq, uint32_t layer, uint64_t n_append,
                              uint64_t max_cost) {
  const Space& space = seq->space();
  const uint32_t own = space.layers[layer].storage_layer;
  if (seq->indexes.empty() || space.layers[own].indexes.empty()) {
    return {};
  }
  const IndexRef& ref = seq->indexes[own];
  const uint64_t present = layer_length(seq, own);
  const uint64_t n_blocks = std::min(present / kPageTokens, indexable_blocks(present + n_append));
  if (!IndexBuild::is_needed(space, own, ref, n_blocks)) {
    return {};
  }
  if (ref.data != nullptr && ref.data->is_claimed) {
    return {.slice = nullptr, .is_claimed = true};
  }
  auto build = std::make_unique<IndexBuild>(
      seq, space, own, ref, IndexBuild::blocks_to_plan(space, own, ref, n_blocks), max_cost);
  const uint64_t block_begin = build->position_begin() / kPageTokens;
  const uint64_t block_end = div_up(build->position_end(), kPageTokens);
  if (!are_in_memory(*memory, seq, own, block_begin, block_end)) {
    return {};  // what is away is read exactly, and without an index
  }
  std::vector<std::vector<KvRun>> class_runs(space.layers[own].classes.size());
  for (uint32_t c = 0; c < class_runs.size(); ++c) {
    collect_between(*memory, seq, own, c, block_begin, block_end, &class_runs[c]);
  }
  std::vector<SeenQueries> seen;
  for (uint32_t i = 0; i < seq->observed.size(); ++i) {
    if (space.layers[i].storage_layer == own) {
      const ObservedView view = observed_view(seq, i);
      seen.push_back({view.q, view.n_rows});
    }
  }
  // Who pays for an index pays for what is added to it.
  const IndexBank bank = build->is_added() ? ref.data->bank : memory->index_bank(seq->account);
  build->start(std::move(class_runs), std::move(seen), bank);
  return {.slice = std::move(build), .is_claimed = false};
}

void open_index_build(StoreMemory* memory, IndexBuild* build) {
  Sequence* seq = build->seq();
  build->open(&seq->indexes[build->layer()], memory->index_bank(seq->account));
}

void close_index_build(StoreMemory* memory, IndexBuild* build) {
  Sequence* seq = build->seq();
  build->close(&seq->indexes[build->layer()], memory->index_bank(seq->account));
}

void collect_head_index(const Sequence* seq, uint32_t layer, uint32_t kv_head, uint64_t length,
                        std::vector<attention::SketchedRun>* sketches,
                        std::vector<attention::HashedRun>* hashes) {
  const Space& space = seq->space();
  const uint32_t own = space.layers[layer].storage_layer;
  if (seq->indexes.empty() || seq->indexes[own].data == nullptr) {
    return;
  }
  const IndexRef& ref = seq->indexes[own];
  const IndexConfig config = space.index(layer, kv_head);
  const uint64_t n_blocks = indexable_blocks(length);
  collect_sketches(ref, kv_head, config, n_blocks, space.layers[own].dim_k, sketches);
  collect_hashes(ref, kv_head, config, n_blocks, hashes);
}

void drop_from_index(StoreMemory* memory, Sequence* seq, const policies::Action& action) {
  if (seq->indexes.empty() || seq->indexes[action.layer].data == nullptr) {
    return;
  }
  const HeadClass& head_class = seq->space().head_class(action.layer, action.class_index);
  LayerIndex* index =
      own_index(&seq->indexes[action.layer], seq->space().layers[action.layer].indexes,
                memory->index_bank(seq->account));
  for (const uint16_t head : head_class.kv_heads) {
    index->drop(head, action.range.begin / kPageTokens, action.range.end / kPageTokens);
  }
}

}  // namespace kvm::engine
