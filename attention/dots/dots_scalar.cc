// SPDX-License-Identifier: Apache-2.0
// Dot products: the scalar table. CMakeLists.txt gives this file its instruction-set flags.
#include "base/simd/vec_scalar.h"
//
#include "attention/dots/dots_kernel.h"

namespace kvm {
namespace attention {

extern const DotKernels kDotsScalar = kDotKernels;

}  // namespace attention
}  // namespace kvm
