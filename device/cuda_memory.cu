// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_memory.h"

namespace kvm::device {

Result<std::unique_ptr<SharingDriver>> open_sharing_driver(uint32_t ordinal) {
  auto driver = std::make_unique<cuda::CudaMemory<SharingDriver>>();
  KVM_TRY(driver->open(static_cast<int>(ordinal)));
  return std::unique_ptr<SharingDriver>(std::move(driver));
}

}  // namespace kvm::device
