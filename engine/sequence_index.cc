// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence_index.h"

#include <algorithm>
#include <utility>

#include "base/round.h"
#include "engine/observations.h"
#include "engine/stored_runs.h"

namespace kvm::engine {

std::unique_ptr<IndexBuild> plan_index_build(Ledger* ledger, Sequence* seq, uint32_t layer,
                                             uint64_t n_append, uint64_t max_cost) {
  const Space& space = seq->space();
  const uint32_t own = space.layers[layer].storage_layer;
  if (seq->indexes.empty() || space.layers[own].indexes.empty()) {
    return nullptr;
  }
  const IndexRef& ref = seq->indexes[own];
  const uint64_t present = layer_length(seq, own);
  const uint64_t n_blocks = std::min(present / kPageTokens, indexable_blocks(present + n_append));
  if (!IndexBuild::is_needed(space, own, ref, n_blocks)) {
    return nullptr;
  }
  auto build = std::make_unique<IndexBuild>(seq, space, own, ref, n_blocks, max_cost);
  std::vector<std::vector<KvRun>> class_runs(space.layers[own].classes.size());
  for (uint32_t c = 0; c < class_runs.size(); ++c) {
    collect_between(*ledger, seq, own, c, build->position_begin() / kPageTokens,
                    div_up(build->position_end(), kPageTokens), &class_runs[c]);
  }
  std::vector<SeenQueries> seen;
  for (uint32_t i = 0; i < seq->observed.size(); ++i) {
    if (space.layers[i].storage_layer == own) {
      const ObservedView view = observed_view(seq, i);
      seen.push_back({view.q, view.n_rows});
    }
  }
  build->start(std::move(class_runs), std::move(seen), ledger->index_bank(seq->account));
  return build;
}

void open_index_build(Ledger* ledger, IndexBuild* build) {
  Sequence* seq = build->seq();
  build->open(&seq->indexes[build->layer()], ledger->index_bank(seq->account));
}

void close_index_build(Ledger* ledger, IndexBuild* build) {
  Sequence* seq = build->seq();
  build->close(&seq->indexes[build->layer()], ledger->index_bank(seq->account));
}

IndexPin pin_layer_index(const Sequence* seq, uint32_t layer) {
  return seq->indexes.empty()
             ? IndexPin()
             : IndexPin(seq->indexes[seq->space().layers[layer].storage_layer].data.get());
}

void collect_head_index(const Ledger& ledger, const Sequence* seq, uint32_t layer, uint32_t kv_head,
                        uint64_t length, std::vector<attention::SketchedRun>* sketches,
                        std::vector<attention::HashedRun>* hashes) {
  const Space& space = seq->space();
  const uint32_t own = space.layers[layer].storage_layer;
  if (seq->indexes.empty() || seq->indexes[own].data == nullptr) {
    return;
  }
  const IndexRef& ref = seq->indexes[own];
  const IndexConfig config = space.index(layer, kv_head);
  const uint64_t n_blocks = indexable_blocks(length);
  collect_sketches(ref, kv_head, config, n_blocks, ledger.pool(), space.head_dim_k, sketches);
  collect_hashes(ref, kv_head, config, n_blocks, hashes);
}

void cut_indexes(Sequence* seq, uint64_t n_tokens) {
  for (uint32_t layer = 0; layer < seq->indexes.size(); ++layer) {
    IndexRef& ref = seq->indexes[layer];
    if (ref.data == nullptr) {
      continue;
    }
    ref.limit = std::min(ref.limit, indexable_blocks(std::min(n_tokens, layer_length(seq, layer))));
    if (ref.data.use_count() == 1) {
      ref.data->cut(ref.limit, seq->space().layers[layer].indexes);
      ref.limit = UINT64_MAX;
    }
  }
}

void drop_from_index(Ledger* ledger, Sequence* seq, const policies::Action& action) {
  if (seq->indexes.empty() || seq->indexes[action.layer].data == nullptr) {
    return;
  }
  const HeadClass& head_class = seq->space().head_class(action.layer, action.class_index);
  LayerIndex* index =
      own_index(&seq->indexes[action.layer], seq->space().layers[action.layer].indexes,
                ledger->index_bank(seq->account));
  for (const uint16_t head : head_class.kv_heads) {
    index->drop(head, action.range.begin / kPageTokens, action.range.end / kPageTokens);
  }
}

}  // namespace kvm::engine
