// SPDX-License-Identifier: Apache-2.0
#include "bench/attention/read_kernels.h"

#include "base/cpu_features.h"
#include "bench/attention/read_kernels_impl.h"

namespace kvm::bench {

#if defined(__x86_64__)
extern const std::span<const ReadKernel> kReadKernelsAvx512;
#endif

std::span<const ReadKernel> read_kernels() {
#if defined(__x86_64__)
  if (cpu_features().avx512f) {
    return kReadKernelsAvx512;
  }
#endif
  return kKernels;
}

}  // namespace kvm::bench
