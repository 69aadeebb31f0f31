// SPDX-License-Identifier: Apache-2.0
// Built where there is no CUDA toolkit.
#include "device/driver.h"

namespace kvm::device {

namespace {

Status unsupported() {
  return Status(KVM_ERR_UNSUPPORTED,
                "this program was built without CUDA: no device memory can be used");
}

}  // namespace

Result<std::unique_ptr<Driver>> open_driver(uint32_t) { return unsupported(); }

Result<std::unique_ptr<SharingDriver>> open_sharing_driver(uint32_t) { return unsupported(); }

}  // namespace kvm::device
