// SPDX-License-Identifier: Apache-2.0
// Dot products: the AVX2 table. CMakeLists.txt gives this file its instruction-set flags.
#include "base/simd/vec_avx2.h"
//
#include "attention/dots/dots_kernel.h"

namespace kvm {
namespace attention {

extern const DotKernels kDotsAvx2 = kDotKernels;

}  // namespace attention
}  // namespace kvm
