// SPDX-License-Identifier: Apache-2.0
// Exact attention: the scalar table. CMakeLists.txt gives this file its instruction-set flags.
#include "base/simd/vec_scalar.h"
//
#include "attention/exact/exact_kernel.h"

namespace kvm {
namespace attention {

extern const ExactKernels kExactScalar = kKernels;

}  // namespace attention
}  // namespace kvm
