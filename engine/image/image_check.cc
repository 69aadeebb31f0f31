// SPDX-License-Identifier: Apache-2.0
#include "engine/image/image_check.h"

#include <fmt/format.h>

#include "engine/image/image_view.h"

namespace kvm::engine {
namespace {

constexpr size_t kDigestBytes = 16;
constexpr size_t kFingerprintBytes = 32;

}  // namespace

Status check_image(std::span<const std::byte> body, uint64_t n_pages) {
  KVM_TRY_ASSIGN(const disk::Image* const view, view_image(body));
  const disk::Image& image = *view;
  if (size_of(image.layout_digest()) != kDigestBytes ||
      size_of(image.policy_digest()) != kDigestBytes ||
      size_of(image.fingerprint()) != kFingerprintBytes) {
    return corrupt_image("it does not say of what space it is");
  }
  uint64_t n_listed = 0;
  for (uint64_t i = 0; i < size_of(image.lists()); ++i) {
    const disk::List* const list = image.lists()->Get(static_cast<flatbuffers::uoffset_t>(i));
    n_listed += size_of(list->pages());
  }
  return n_listed == n_pages ? Status::ok()
                             : corrupt_image(fmt::format("its lists have {} pages, and it has {}",
                                                         n_listed, n_pages));
}

}  // namespace kvm::engine
