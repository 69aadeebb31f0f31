// SPDX-License-Identifier: Apache-2.0
// The kernel of dots.h over the vector wrapper that was included before it. Rows lie across the
// lanes of a vector, so that each sum is made in the same order whatever the width; the files are
// compiled without contraction into fused operations.
#ifndef KVM_ATTENTION_DOTS_DOTS_KERNEL_H_
#define KVM_ATTENTION_DOTS_DOTS_KERNEL_H_

#include <stdint.h>

#include "attention/dots/dots.h"

namespace kvm {
namespace attention {
namespace {

// Vectors of rows that share what is read of the one row, as far as registers go.
constexpr uint32_t kDotVectors = vec::kWidth == 16 ? 2 : 1;

void dots(const float* columns, const float* row, uint32_t dim, float* result) {
  constexpr uint32_t kAtOnce = kDotVectors * vec::kWidth;
  static_assert(kDotRows % kAtOnce == 0);
  for (uint32_t first = 0; first < kDotRows; first += kAtOnce) {
    vec::F sums[kDotLanes][kDotVectors];
    for (auto& lane : sums) {
      for (vec::F& sum : lane) {
        sum = vec::zero();
      }
    }
    for (uint32_t i = 0; i < dim; i += kDotLanes) {
      for (uint32_t lane = 0; lane < kDotLanes; ++lane) {
        const vec::F x = vec::set1(row[i + lane]);
        const float* column = columns + (i + lane) * kDotRows + first;
        for (uint32_t v = 0; v < kDotVectors; ++v) {
          sums[lane][v] = vec::add(sums[lane][v], vec::mul(vec::load(column + v * vec::kWidth), x));
        }
      }
    }
    for (uint32_t half = kDotLanes / 2; half != 0; half /= 2) {
      for (uint32_t lane = 0; lane < half; ++lane) {
        for (uint32_t v = 0; v < kDotVectors; ++v) {
          sums[lane][v] = vec::add(sums[lane][v], sums[lane + half][v]);
        }
      }
    }
    for (uint32_t v = 0; v < kDotVectors; ++v) {
      vec::store(result + first + v * vec::kWidth, sums[0][v]);
    }
  }
}

constexpr DotKernels kDotKernels = {dots};

}  // namespace
}  // namespace attention
}  // namespace kvm

#endif  // KVM_ATTENTION_DOTS_DOTS_KERNEL_H_
