// SPDX-License-Identifier: Apache-2.0
#include "attention/merge.h"

#include <cstring>

namespace kvm::attention {
namespace {

float load(const StateRows& s, uint64_t row, uint32_t d) {
  const uint64_t i = row * s.o_stride + d;
  switch (s.dtype_o) {
    case Dtype::kF32:
      return static_cast<const float*>(s.o)[i];
    case Dtype::kF16:
      return f16_to_f32(static_cast<const uint16_t*>(s.o)[i]);
    case Dtype::kBf16:
      return bf16_to_f32(static_cast<const uint16_t*>(s.o)[i]);
  }
  return 0.0f;
}

void store(const StateRows& s, uint64_t row, uint32_t d, float value) {
  const uint64_t i = row * s.o_stride + d;
  switch (s.dtype_o) {
    case Dtype::kF32:
      static_cast<float*>(s.o)[i] = value;
      break;
    case Dtype::kF16:
      static_cast<uint16_t*>(s.o)[i] = f32_to_f16(value);
      break;
    case Dtype::kBf16:
      static_cast<uint16_t*>(s.o)[i] = f32_to_bf16(value);
      break;
  }
}

}  // namespace

void merge_states(const StateRows& a, const StateRows& b, const StateRows& out, uint64_t n_rows,
                  uint32_t dim_v) {
  for (uint64_t row = 0; row < n_rows; ++row) {
    const float lse_a = a.lse[row * a.lse_stride];
    const float lse_b = b.lse[row * b.lse_stride];
    if (lse_a == kEmptyLse || lse_b == kEmptyLse) {
      const StateRows& full = lse_b == kEmptyLse ? a : b;
      for (uint32_t d = 0; d < dim_v; ++d) {
        store(out, row, d, load(full, row, d));
      }
      out.lse[row * out.lse_stride] = lse_b == kEmptyLse ? lse_a : lse_b;
      continue;
    }
    const MergeWeights w = merge_weights(lse_a, lse_b);
    const float total = w.a + w.b;
    for (uint32_t d = 0; d < dim_v; ++d) {
      store(out, row, d, (w.a * load(a, row, d) + w.b * load(b, row, d)) / total);
    }
    out.lse[row * out.lse_stride] = state_lse(w.m, total);
  }
}

}  // namespace kvm::attention
