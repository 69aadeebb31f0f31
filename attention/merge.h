// SPDX-License-Identifier: Apache-2.0
// The merge of two attention states: the only copy of the formula.
//
// A state of a set of keys is (o, m, l) with o = sum_t e^(logit_t - m) v_t, l = sum_t
// e^(logit_t - m); m is any reference, usually the largest logit. The public form (o / l, lse) is
// the same thing with m = lse and l = 1. The empty set is m = -inf, l = 0, o = 0; merging with it
// changes no bit of the other state.
#ifndef KVM_ATTENTION_MERGE_H_
#define KVM_ATTENTION_MERGE_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "base/dtype.h"

namespace kvm::attention {

inline constexpr float kEmptyLse = -std::numeric_limits<float>::infinity();

// The two factors that bring states a and b to the common reference m.
struct MergeWeights {
  float m;
  float a;
  float b;
};

// An empty side gets factor 0, the other exactly 1. Two empty sides give factors (1, 0).
inline MergeWeights merge_weights(float m_a, float m_b) {
  if (m_b == kEmptyLse) {
    return {m_a, 1.0f, 0.0f};
  }
  if (m_a == kEmptyLse) {
    return {m_b, 0.0f, 1.0f};
  }
  return m_a >= m_b ? MergeWeights{m_a, 1.0f, std::exp(m_b - m_a)}
                    : MergeWeights{m_b, std::exp(m_a - m_b), 1.0f};
}

// a := a merged with b, for one row of dim_v fp32 values.
inline void merge_row(float* o_a, float* m_a, float* l_a, const float* o_b, float m_b, float l_b,
                      uint32_t dim_v) {
  if (m_b == kEmptyLse) {
    return;
  }
  const MergeWeights w = merge_weights(*m_a, m_b);
  if (*m_a == kEmptyLse) {
    for (uint32_t d = 0; d < dim_v; ++d) {
      o_a[d] = o_b[d];
    }
    *l_a = l_b;
  } else {
    for (uint32_t d = 0; d < dim_v; ++d) {
      o_a[d] = w.a * o_a[d] + w.b * o_b[d];
    }
    *l_a = w.a * *l_a + w.b * l_b;
  }
  *m_a = w.m;
}

// lse of a state; -inf for the empty one.
inline float state_lse(float m, float l) { return l > 0.0f ? m + std::log(l) : kEmptyLse; }

// One side of a public merge. Row r has its dim_v values at o + r * o_stride elements and its lse
// at lse[r * lse_stride].
struct StateRows {
  void* o = nullptr;
  Dtype dtype_o = Dtype::kF32;
  uint64_t o_stride = 0;
  float* lse = nullptr;
  uint64_t lse_stride = 1;
};

// out := a merged with b, row by row; `out` may be `a` or `b` itself, or must not overlap them.
// Computes in fp32. Where one side is empty the other is copied, bit for bit where the dtypes are
// equal. NaN in, NaN out.
void merge_states(const StateRows& a, const StateRows& b, const StateRows& out, uint64_t n_rows,
                  uint32_t dim_v);

}  // namespace kvm::attention

#endif  // KVM_ATTENTION_MERGE_H_
