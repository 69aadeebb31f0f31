// SPDX-License-Identifier: Apache-2.0
// The merge of two attention states: the only copy of the formula, used by the service between
// chunks and by kvm_merge in the client's process.
//
// A state of a set of keys is (o, m, l) with o = sum_t e^(logit_t - m) v_t, l = sum_t
// e^(logit_t - m); m is any reference, usually the largest logit. The public form (o / l, lse) is
// the same thing with m = lse and l = 1. The empty set is m = -inf, l = 0, o = 0; merging with it
// changes no bit of the other state.
#ifndef KVM_BASE_MERGE_H_
#define KVM_BASE_MERGE_H_

#include <cmath>
#include <cstdint>
#include <limits>

namespace kvm {

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

// a := a merged with b, for one row of dim_v fp32 values. NaN in, NaN out.
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

// lse of a state; -inf for the empty one, NaN where l is.
inline float state_lse(float m, float l) { return l <= 0.0f ? kEmptyLse : m + std::log(l); }

}  // namespace kvm

#endif  // KVM_BASE_MERGE_H_
