// SPDX-License-Identifier: Apache-2.0
#include "engine/folded.h"

#include <algorithm>
#include <cmath>

#include "base/assert.h"
#include "codecs/convert.h"

namespace kvm::engine {
namespace {

// Adds rows of a page to sums.
void add_rows(const void* rows, Dtype dtype, const uint16_t* scales, uint32_t n_rows, uint32_t dim,
              std::vector<float>* scratch, std::vector<double>* sums) {
  scratch->resize(uint64_t{n_rows} * dim);
  const uint64_t row_bytes = uint64_t{dim} * sizeof(float);
  codecs::convert_rows({rows, dtype, dim * dtype_size_bytes(dtype), 0, nullptr, scales},
                       {scratch->data(), Dtype::kF32, row_bytes, 0, nullptr, nullptr}, n_rows, 1,
                       dim);
  for (uint32_t t = 0; t < n_rows; ++t) {
    const float* row = scratch->data() + uint64_t{t} * dim;
    for (uint32_t i = 0; i < dim; ++i) {
      (*sums)[i] += static_cast<double>(row[i]);
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

KvRun Folded::run() const {
  KVM_ASSERT(n_tokens > 0);
  KvRun run;
  run.k = k.data();
  run.v = v.data();
  run.log_weight = &log_weight;
  run.position = end - 1;
  run.n_tokens = 1;
  run.dtype_k = Dtype::kF32;
  run.dtype_v = Dtype::kF32;
  return run;
}

void fold_runs(KvRuns runs, const tiers::SlabClass& slab_class, Folded* folded) {
  KVM_ASSERT(slab_class.n_heads == 1 && folded->k.size() == slab_class.dim_k &&
             folded->v.size() == slab_class.dim_v);
  std::vector<float> scratch;
  std::vector<double> k_sums(slab_class.dim_k);
  std::vector<double> v_sums(slab_class.dim_v);
  uint64_t n_new = 0;
  for (const KvRun& run : runs) {
    add_rows(run.k, run.dtype_k, run.k_scale, run.n_tokens, slab_class.dim_k, &scratch, &k_sums);
    add_rows(run.v, run.dtype_v, run.v_scale, run.n_tokens, slab_class.dim_v, &scratch, &v_sums);
    n_new += run.n_tokens;
    folded->end = std::max(folded->end, run.position + run.n_tokens);
  }
  if (n_new == 0) {
    return;
  }
  move_mean(k_sums, folded->n_tokens, n_new, &folded->k);
  move_mean(v_sums, folded->n_tokens, n_new, &folded->v);
  folded->n_tokens += n_new;
  folded->log_weight = std::log(static_cast<float>(folded->n_tokens));
}

}  // namespace kvm::engine
