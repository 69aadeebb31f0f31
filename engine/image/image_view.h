// SPDX-License-Identifier: Apache-2.0
// The FlatBuffer in the bytes of an image, once it is known to be one. Internal to engine/image/.
#ifndef KVM_ENGINE_IMAGE_IMAGE_VIEW_H_
#define KVM_ENGINE_IMAGE_IMAGE_VIEW_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/status.h"
#include "engine/image/image_generated.h"

namespace kvm::engine {

Status corrupt_image(const std::string& what);

// Fields that an older writer did not know are absent.
template <typename T>
uint64_t size_of(const flatbuffers::Vector<T>* vector) {
  return vector == nullptr ? 0 : vector->size();
}

// Within the body; its offsets are verified, and nothing that its numbers say. Fails: CORRUPT;
// UNSUPPORTED: another version of the format.
// REQUIRES: body.data() is aligned as memory of the heap is.
Result<const disk::Image*> view_image(std::span<const std::byte> body);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_IMAGE_IMAGE_VIEW_H_
