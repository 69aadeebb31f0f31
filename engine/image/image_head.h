// SPDX-License-Identifier: Apache-2.0
// The head of an image. DISK.
#ifndef KVM_ENGINE_IMAGE_IMAGE_HEAD_H_
#define KVM_ENGINE_IMAGE_IMAGE_HEAD_H_

#include <cstdint>

namespace kvm::engine {

// Little-endian.
struct ImageHead {
  uint64_t magic = 0;
  uint32_t version = 0;
  uint32_t buffer_bytes = 0;  // of the FlatBuffer behind it, which is all that follows
};
static_assert(sizeof(ImageHead) == 16);

inline constexpr uint64_t kImageMagic = 0x31514553494d564bu;  // "KVMISEQ1"
inline constexpr uint32_t kImageVersion = 1;

}  // namespace kvm::engine

#endif  // KVM_ENGINE_IMAGE_IMAGE_HEAD_H_
