// SPDX-License-Identifier: Apache-2.0
#include "bench/attention/read_kernels_impl.h"

namespace kvm::bench {

extern const std::span<const ReadKernel> kReadKernelsAvx512 = kKernels;

}  // namespace kvm::bench
