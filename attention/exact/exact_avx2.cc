// SPDX-License-Identifier: Apache-2.0
// Exact attention: the avx2 table. CMakeLists.txt gives this file its instruction-set flags.
#include "base/simd/vec_avx2.h"
//
#include "attention/exact/exact_kernel.h"

namespace kvm {
namespace attention {

extern const ExactKernels kExactAvx2 = kKernels;

}  // namespace attention
}  // namespace kvm
