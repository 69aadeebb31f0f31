// SPDX-License-Identifier: Apache-2.0
// Approximate attention: the scalar table.
#include "base/simd/vec_scalar.h"
//
#include "attention/sampled/gather_kernel.h"

namespace kvm {
namespace attention {

extern const SampledKernels kSampledScalar = kKernels;

}  // namespace attention
}  // namespace kvm
