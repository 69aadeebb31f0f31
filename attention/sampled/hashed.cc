// SPDX-License-Identifier: Apache-2.0
#include "attention/sampled/hashed.h"

#include <algorithm>
#include <cmath>

#include "attention/sampled/core.h"
#include "hash_index/lsh/planes.h"

namespace kvm::attention {
namespace {

using hash_index::LshCandidate;

struct HashedQueries {
  uint16_t* codes;    // [rows][L]
  float* dense;       // [rows][dim_k]
  float* center;      // [stride], zero beyond dim_k
  float* inverse;     // [rows]: 1 / |q|; 0 where q is
  float* center_dot;  // [rows + 1]: q . centre, and |centre|^2
};

uint32_t q_stride(const Problem& problem) {
  return (problem.dim_k + kDimPad - 1) / kDimPad * kDimPad;
}

HashedQueries carve_queries(const ApproxInput& input, Carver& carver) {
  const Problem& problem = *input.problem;
  const uint32_t rows = problem.n_query * problem.group;
  const uint32_t n_tables = input.index.planes == nullptr ? 0 : input.index.planes->params.n_tables;
  HashedQueries h;
  h.codes = carver.take<uint16_t>(size_t{rows} * n_tables);
  h.dense = carver.take<float>(size_t{rows} * problem.dim_k);
  h.center = carver.take<float>(q_stride(problem));
  h.inverse = carver.take<float>(rows);
  h.center_dot = carver.take<float>(rows + 1);
  return h;
}

struct HashedScratch {
  uint64_t* position;
  uint16_t* rows;
  uint32_t* ids;
  LshCandidate* found;
  std::byte* lookup;
};

HashedScratch carve_scratch(const ApproxInput& input, Carver& carver) {
  uint32_t most = 0;
  for (const HashedRun& run : input.index.hashes) {
    most = std::max(most, run.n_keys);
  }
  HashedScratch s;
  s.position = carver.take<uint64_t>(most);
  s.rows = carver.take<uint16_t>(most);
  s.ids = carver.take<uint32_t>(most);
  s.found = carver.take<LshCandidate>(most);
  s.lookup = carver.take<std::byte>(
      hash_index::lookup_scratch_bytes(most, input.problem->n_query * input.problem->group));
  return s;
}

float dot(const float* a, const float* b, uint32_t n) {
  double sum = 0;
  for (uint32_t i = 0; i < n; ++i) {
    sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  }
  return static_cast<float>(sum);
}

// 1/u of the keys of a batch for the rows that met them; 0 for the others.
class Factors {
 public:
  Factors(const Context& c, const Use& use) : c_(c) {
    Carver carver(c.prepared.queries + use.query_at);
    queries_ = carve_queries(*c.input, carver);
  }

  // All rows at once: the kernel of the probabilities takes 64 cosines or a few in the same time.
  void fill(const GatherArgs& args, const GatherBatch& batch, const uint16_t* rows_of_key,
            float* out) const {
    float inverse_norms[kGatherKeys];
    fill_inverse_norms(args, batch, inverse_norms);
    GatherArgs dots = args;
    dots.scale = 1.0f;
    dots.softcap = 0.0f;
    alignas(64) float products[kMaxGatherRows * kGatherKeys];
    c_.table->sampled->logits(&dots, &batch, products);
    for (uint32_t r = 0; r < c_.rows; ++r) {
      const float of_center = queries_.center_dot[r];
      const float inverse = queries_.inverse[r];
      float* cosines = products + r * kGatherKeys;
      for (uint32_t i = 0; i < kGatherKeys; ++i) {
        cosines[i] = (cosines[i] - of_center) * inverse * inverse_norms[i];
      }
    }
    hash_index::inverse_inclusion(products, size_t{c_.rows} * kGatherKeys,
                                  c_.input->index.planes->params, products);
    uint16_t masks[kGatherKeys] = {};
    std::copy_n(rows_of_key, batch.n, masks);
    for (uint32_t r = 0; r < c_.rows; ++r) {
      for (uint32_t i = 0; i < kGatherKeys; ++i) {
        const auto met = static_cast<float>(masks[i] >> r & 1);
        out[r * kGatherKeys + i] = met * products[r * kGatherKeys + i];
      }
    }
    std::fill(out + c_.rows * kGatherKeys, out + padded_rows(c_.rows) * kGatherKeys, 0.0f);
  }

 private:
  // 1 / |k - centre|, and 0 for a key at the centre, whose cosines are 0.
  void fill_inverse_norms(const GatherArgs& args, const GatherBatch& batch, float* out) const {
    GatherArgs center = args;
    center.q = queries_.center;
    center.q_bf16 = nullptr;
    center.q_stride = q_stride(c_.problem);
    center.rows = center.rows_padded = 1;
    center.scale = 1.0f;
    center.softcap = 0.0f;
    alignas(64) float of_center[kGatherKeys];
    alignas(64) float squares[kGatherKeys];
    c_.table->sampled->logits(&center, &batch, of_center);
    c_.table->sampled->norms(batch.k, batch.elem_k, c_.problem.dim_k, squares);
    const float center_square = queries_.center_dot[c_.rows];
    for (uint32_t i = 0; i < kGatherKeys; ++i) {
      const float k2 = squares[i] * batch.k_scale[i] * batch.k_scale[i];
      const float square = k2 - 2.0f * of_center[i] + center_square;
      out[i] = square > 0.0f ? 1.0f / std::sqrt(square) : 0.0f;
    }
  }

  const Context& c_;
  HashedQueries queries_{};
};

}  // namespace

size_t hashed_query_bytes(const ApproxInput& input) {
  Carver carver(nullptr);
  carve_queries(input, carver);
  return carver.used_bytes();
}

void prepare_hashed(const Context& c, const Use& use, void* out) {
  Carver carver(out);
  const HashedQueries h = carve_queries(*c.input, carver);
  const uint32_t dim = c.problem.dim_k;
  const uint32_t stride = q_stride(c.problem);
  const float* center = c.input->index.hashes[use.index_run].center;
  dense_queries(c, use.variant, h.dense);
  hash_index::hash_queries(*c.input->index.planes, h.dense, c.rows, h.codes);
  for (uint32_t r = 0; r < c.rows; ++r) {
    const float* q = h.dense + size_t{r} * dim;
    const float norm = std::sqrt(dot(q, q, dim));
    h.inverse[r] = norm > 0.0f ? 1.0f / norm : 0.0f;
    h.center_dot[r] = dot(q, center, dim);
  }
  std::fill_n(h.center, stride, 0.0f);
  std::copy_n(center, dim, h.center);
  h.center_dot[c.rows] = dot(center, center, dim);
}

size_t hashed_scratch_bytes(const ApproxInput& input) {
  Carver carver(nullptr);
  carve_scratch(input, carver);
  return carver.used_bytes();
}

HashedKeys look_up(const Context& c, const Use& use, void* scratch) {
  Carver carver(scratch);
  const HashedScratch s = carve_scratch(*c.input, carver);
  Carver query_carver(c.prepared.queries + use.query_at);
  const HashedQueries h = carve_queries(*c.input, query_carver);
  const HashedRun& run = c.input->index.hashes[use.index_run];
  const auto stretches = c.stretches().subspan(use.first_stretch, use.n_stretches);
  const auto n_live =
      static_cast<uint32_t>(std::min<uint64_t>(run.n_keys, stretches.back().end() - run.position));
  HashedKeys keys{.position = s.position, .rows = s.rows};
  const uint32_t n = hash_index::lookup(*c.input->index.planes, run.tables, run.n_keys, n_live,
                                        h.codes, c.rows, s.lookup, s.found, &keys.ids_read);
  size_t at = 0;
  for (uint32_t i = 0; i < n; ++i) {
    const uint64_t position = run.position + s.found[i].id;
    while (at < stretches.size() && stretches[at].end() <= position) {
      ++at;
    }
    if (at < stretches.size() && stretches[at].position <= position) {
      keys.position[keys.n] = position;
      keys.rows[keys.n++] = s.found[i].rows;
    }
  }
  return keys;
}

void gather_hashed(const Context& c, const Use& use, const HashedKeys& keys, void* scratch,
                   const GatherSums& sums) {
  Carver carver(scratch);
  const HashedScratch s = carve_scratch(*c.input, carver);
  for (uint32_t i = 0; i < keys.n; ++i) {
    s.ids[i] = i;
  }
  const GatherContext context = c.gathering();
  const GatherList list{.kind = kGatherWeighted, .ids = {s.ids, keys.n}, .position = keys.position};
  const Factors factors(c, use);
  BatchMaker maker(context, list);
  GatherArgs args;
  GatherBatch batch;
  alignas(64) float per_row[kMaxGatherRows * kGatherKeys];
  while (maker.next(&args, &batch)) {
    const uint16_t* rows = keys.rows + maker.first();
    if (c.params().mode == ApproxMode::kTopK) {
      fill_row_masks(c.rows, rows, batch.n, per_row);
    } else {
      factors.fill(args, batch, rows, per_row);
    }
    batch.kind = kGatherWeighted;
    batch.per_row = per_row;
    context.kernels->gather(&args, &batch, &sums);
  }
}

}  // namespace kvm::attention
