// SPDX-License-Identifier: Apache-2.0
// What can be said of an image without the space that it fits: whether it is one, and whether its
// parts fit each other and the object that it is the body of. decode_image (sequence_image.h)
// judges the rest.
//
// Threads: a pure function.
#ifndef KVM_ENGINE_IMAGE_IMAGE_CHECK_H_
#define KVM_ENGINE_IMAGE_IMAGE_CHECK_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"

namespace kvm::engine {

// n_pages: of the object. Fails: CORRUPT; UNSUPPORTED: another version of the format.
// REQUIRES: body.data() is aligned as memory of the heap is.
Status check_image(std::span<const std::byte> body, uint64_t n_pages);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_IMAGE_IMAGE_CHECK_H_
