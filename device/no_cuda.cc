// SPDX-License-Identifier: Apache-2.0
// Built where there is no CUDA toolkit.
#include "device/driver.h"

namespace kvm::device {

Result<std::unique_ptr<Driver>> open_driver(uint32_t) {
  return Status(KVM_ERR_UNSUPPORTED,
                "this library was built without CUDA: no device memory can be used");
}

}  // namespace kvm::device
