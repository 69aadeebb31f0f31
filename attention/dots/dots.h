// SPDX-License-Identifier: Apache-2.0
// Dot products of one row with many: who is nearest to whom, where tokens join each other
// (engine/store/token_merge.h). One object per per-ISA file.
#ifndef KVM_ATTENTION_DOTS_DOTS_H_
#define KVM_ATTENTION_DOTS_DOTS_H_

#include <stdint.h>

namespace kvm {
namespace attention {

// Rows that are multiplied at a time: with dim 128 they fill the first-level cache.
constexpr uint32_t kDotRows = 64;
// Sums are made in so many lanes: channel i goes to lane i % kDotLanes, and then halves are added.
constexpr uint32_t kDotLanes = 8;

struct DotKernels {
  // columns: [dim][kDotRows], the many rows channel by channel. row: [dim]. dots: [kDotRows].
  // The same bits in every table, since what is chosen by them stays. REQUIRES: dim is a multiple
  // of kDotLanes.
  void (*dots)(const float* columns, const float* row, uint32_t dim, float* dots);
};

extern const DotKernels kDotsScalar;
extern const DotKernels kDotsAvx2;
extern const DotKernels kDotsAvx512;

}  // namespace attention
}  // namespace kvm

#endif  // KVM_ATTENTION_DOTS_DOTS_H_
