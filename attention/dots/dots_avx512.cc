// SPDX-License-Identifier: Apache-2.0
// Dot products: the AVX-512 table. CMakeLists.txt gives this file its instruction-set flags.
#include "base/simd/vec_avx512.h"
//
#include "attention/dots/dots_kernel.h"

namespace kvm {
namespace attention {

extern const DotKernels kDotsAvx512 = kDotKernels;

}  // namespace attention
}  // namespace kvm
