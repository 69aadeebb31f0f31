// SPDX-License-Identifier: Apache-2.0
#include "engine/image/image_check.h"

#include <fmt/format.h>

#include <cstring>
#include <string>

#include "engine/image/image_generated.h"
#include "engine/image/image_head.h"

namespace kvm::engine {
namespace {

// As decode_image has them.
constexpr flatbuffers::uoffset_t kMaxDepth = 8;
constexpr flatbuffers::uoffset_t kMaxTables = 1u << 20;
constexpr size_t kDigestBytes = 16;
constexpr size_t kFingerprintBytes = 32;

Status corrupt(const std::string& what) {
  return {KVM_ERR_CORRUPT, "a saved sequence says what none can be: " + what};
}

template <typename T>
uint64_t size_of(const flatbuffers::Vector<T>* vector) {
  return vector == nullptr ? 0 : vector->size();
}

}  // namespace

Status check_image(std::span<const std::byte> body, uint64_t n_pages) {
  ImageHead head;
  if (body.size() < sizeof head) {
    return corrupt(fmt::format("it has {} bytes", body.size()));
  }
  std::memcpy(&head, body.data(), sizeof head);
  if (head.magic != kImageMagic) {
    return corrupt("it does not begin as one");
  }
  if (head.version != kImageVersion) {
    return {KVM_ERR_UNSUPPORTED,
            fmt::format("the sequence was saved in version {} of the format; this program reads "
                        "version {}",
                        head.version, kImageVersion)};
  }
  const auto* buffer = reinterpret_cast<const uint8_t*>(body.data() + sizeof head);
  const size_t n_left = body.size() - sizeof head;
  flatbuffers::Verifier verifier(buffer, n_left, kMaxDepth, kMaxTables);
  if (head.buffer_bytes != n_left || n_left < 8 || !disk::VerifyImageBuffer(verifier)) {
    return corrupt("its parts do not fit each other");
  }
  const disk::Image& image = *disk::GetImage(buffer);
  if (size_of(image.layout_digest()) != kDigestBytes ||
      size_of(image.policy_digest()) != kDigestBytes ||
      size_of(image.fingerprint()) != kFingerprintBytes) {
    return corrupt("it does not say of what space it is");
  }
  uint64_t n_listed = 0;
  for (uint64_t i = 0; i < size_of(image.lists()); ++i) {
    const disk::List* const list = image.lists()->Get(static_cast<flatbuffers::uoffset_t>(i));
    n_listed += size_of(list->pages());
  }
  return n_listed == n_pages
             ? Status::ok()
             : corrupt(fmt::format("its lists have {} pages, and it has {}", n_listed, n_pages));
}

}  // namespace kvm::engine
