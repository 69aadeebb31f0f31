// SPDX-License-Identifier: Apache-2.0
#include "engine/store/mean_entry.h"

#include <algorithm>
#include <cmath>

#include "base/assert.h"
#include "codecs/convert.h"

namespace kvm::engine {
namespace {

// Adds rows of a page to sums.
void add_page(const KvPlane& plane, uint32_t slot, uint32_t n_rows, float* __restrict scratch,
              double* __restrict sums, uint32_t dim) {
  codecs::decode_rows(plane, dim, slot, n_rows, dim, scratch);
  for (uint32_t t = 0; t < n_rows; ++t) {
    const float* row = scratch + uint64_t{t} * dim;
    for (uint32_t i = 0; i < dim; ++i) {
      sums[i] += static_cast<double>(row[i]);
    }
  }
}

// The mean of n_old equal rows and of those that were summed up.
void move_mean(const std::vector<double>& sums, uint64_t n_old, uint64_t n_new,
               std::vector<float>* mean) {
  for (size_t i = 0; i < mean->size(); ++i) {
    const auto old = n_old == 0 ? 0.0 : static_cast<double>((*mean)[i]);
    const double excess = sums[i] - static_cast<double>(n_new) * old;
    (*mean)[i] = static_cast<float>(old + excess / static_cast<double>(n_old + n_new));
  }
}

}  // namespace

KvRun MeanEntry::run() const {
  KVM_ASSERT(n_tokens > 0);
  KvRun run;
  run.k = {k.data(), nullptr, CodecId::kF32};
  run.v = v.empty() ? run.k : KvPlane{v.data(), nullptr, CodecId::kF32};
  run.log_weight = &log_weight;
  run.position = end - 1;
  run.n_tokens = 1;
  return run;
}

bool sum_rows(KvRuns runs, const tiers::SlabClass& slab_class, Workspace* scratch, RowSums* sums) {
  KVM_ASSERT(slab_class.n_heads == 1);
  const uint64_t n_floats = uint64_t{kPageTokens} * std::max(slab_class.dim_k, slab_class.dim_v);
  auto* floats = reinterpret_cast<float*>(scratch->reserve(n_floats * sizeof(float)));
  if (floats == nullptr) {
    return false;
  }
  for (const KvRun& run : runs) {
    add_page(run.k, run.slot, run.n_tokens, floats, sums->k.data(), slab_class.dim_k);
    if (!slab_class.v_in_k) {
      add_page(run.v, run.slot, run.n_tokens, floats, sums->v.data(), slab_class.dim_v);
    }
    sums->n_tokens += run.n_tokens;
    sums->end = std::max(sums->end, run.position + run.n_tokens);
  }
  return true;
}

void add_rows(const RowSums& more, RowSums* sums) {
  for (size_t i = 0; i < sums->k.size(); ++i) {
    sums->k[i] += more.k[i];
  }
  for (size_t i = 0; i < sums->v.size(); ++i) {
    sums->v[i] += more.v[i];
  }
  sums->n_tokens += more.n_tokens;
  sums->end = std::max(sums->end, more.end);
}

void fold(const RowSums& sums, MeanEntry* mean) {
  KVM_ASSERT(mean->k.size() == sums.k.size() && mean->v.size() == sums.v.size());
  if (sums.n_tokens == 0) {
    return;
  }
  move_mean(sums.k, mean->n_tokens, sums.n_tokens, &mean->k);
  move_mean(sums.v, mean->n_tokens, sums.n_tokens, &mean->v);
  mean->end = std::max(mean->end, sums.end);
  mean->n_tokens += sums.n_tokens;
  mean->log_weight = std::log(static_cast<float>(mean->n_tokens));
}

}  // namespace kvm::engine
