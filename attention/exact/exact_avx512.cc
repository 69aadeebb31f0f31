// SPDX-License-Identifier: Apache-2.0
// Exact attention: the avx512 table. CMakeLists.txt gives this file its instruction-set flags.
#include "base/simd/vec_avx512.h"
//
#include "attention/exact/exact_kernel.h"

namespace kvm {
namespace attention {

extern const ExactKernels kExactAvx512 = kKernels;

}  // namespace attention
}  // namespace kvm
