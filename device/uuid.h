// SPDX-License-Identifier: Apache-2.0
// A DeviceUuid says which device it is to every process: numbers go by what CUDA_VISIBLE_DEVICES
// and a container let each of them see.
//
// Threads: pure.
#ifndef KVM_DEVICE_UUID_H_
#define KVM_DEVICE_UUID_H_

#include <array>
#include <cstdint>
#include <string>

namespace kvm::device {

using DeviceUuid = std::array<uint8_t, 16>;

// "GPU-01234567-89ab-cdef-0123-456789abcdef", as nvidia-smi prints it.
std::string uuid_text(const DeviceUuid& uuid);

}  // namespace kvm::device

#endif  // KVM_DEVICE_UUID_H_
