// SPDX-License-Identifier: Apache-2.0
// Approximate attention: the avx512bf16 table. CMakeLists.txt gives this file its flags.
#include "base/simd/vec_avx512.h"
//
#include "attention/sampled/gather_kernel.h"

namespace kvm {
namespace attention {

extern const SampledKernels kSampledAvx512Bf16 = kKernels;

}  // namespace attention
}  // namespace kvm
