// SPDX-License-Identifier: Apache-2.0
#include "engine/image/image_view.h"

#include <fmt/format.h>

#include <cstring>

#include "engine/image/image_head.h"
#include "engine/image/sequence_image.h"

namespace kvm::engine {
namespace {

// Of a space with as many lists as there may be.
constexpr flatbuffers::uoffset_t kMaxDepth = 8;
constexpr flatbuffers::uoffset_t kMaxTables = 1u << 20;

}  // namespace

Status corrupt_image(const std::string& what) {
  return {KVM_ERR_CORRUPT, "a saved sequence says what none can be: " + what};
}

Result<const disk::Image*> view_image(std::span<const std::byte> body) {
  ImageHead head;
  if (body.size() < sizeof head || body.size() > kMaxImageBytes + kMaxImageBytes / 2) {
    return corrupt_image(fmt::format("it has {} bytes", body.size()));
  }
  std::memcpy(&head, body.data(), sizeof head);
  if (head.magic != kImageMagic) {
    return corrupt_image("it does not begin as one");
  }
  if (head.version != kImageVersion) {
    return Status(KVM_ERR_UNSUPPORTED, fmt::format("the sequence was saved in version {} of the "
                                                   "format; this program reads version {}",
                                                   head.version, kImageVersion));
  }
  const auto* buffer = reinterpret_cast<const uint8_t*>(body.data() + sizeof head);
  const size_t n_left = body.size() - sizeof head;
  flatbuffers::Verifier verifier(buffer, n_left, kMaxDepth, kMaxTables);
  if (head.buffer_bytes != n_left || n_left < 8 || !disk::VerifyImageBuffer(verifier)) {
    return corrupt_image("its parts do not fit each other");
  }
  return disk::GetImage(buffer);
}

}  // namespace kvm::engine
