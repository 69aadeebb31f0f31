// SPDX-License-Identifier: Apache-2.0
// MeanEntry: the tokens that a head has given up, as one entry: their mean key, their mean value,
// and the logarithm of how many they were (RazorAttention's compensation token, arXiv 2407.15891).
//
// Shared by forks until one of them folds more.
#ifndef KVM_ENGINE_STORE_MEAN_ENTRY_H_
#define KVM_ENGINE_STORE_MEAN_ENTRY_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/kv_view.h"
#include "engine/tasks/workspace.h"
#include "tiers/slab_class.h"

namespace kvm::engine {

struct MeanEntry {
  uint64_t end = 0;  // what was folded lies before it, and its last token at end - 1
  uint64_t n_tokens = 0;
  float log_weight = 0;  // ln n_tokens
  std::vector<float> k;  // [dim_k]
  std::vector<float> v;  // [dim_v]; empty where V is in K

  uint64_t size_bytes() const { return (k.size() + v.size()) * sizeof(float); }
  // At the position of the last token. Valid as long as this is unchanged. REQUIRES: n_tokens > 0.
  KvRun run() const;
};

// RowSums are rows of some tokens, added up in fp64 in the order of their positions.
struct RowSums {
  explicit RowSums(const tiers::SlabClass& slab_class)
      : k(slab_class.dim_k), v(slab_class.v_in_k ? 0 : slab_class.dim_v) {}

  uint64_t end = 0;
  uint64_t n_tokens = 0;
  std::vector<double> k;  // [dim_k]
  std::vector<double> v;  // [dim_v]; empty where V is in K
};

// Adds rows. Threads: any. `scratch` is its own. False: the machine refused memory for it.
// REQUIRES: runs of pages with one head, of this slab class but for the codecs.
[[nodiscard]] bool sum_rows(KvRuns runs, const tiers::SlabClass& slab_class, Workspace* scratch,
                            RowSums* sums);
void add_rows(const RowSums& more, RowSums* sums);

// Where all tokens have the same key, or value, the mean is that to the last bit; else it is the
// mean in fp64, rounded once for each call. REQUIRES: equal dims.
void fold(const RowSums& sums, MeanEntry* mean);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_MEAN_ENTRY_H_
