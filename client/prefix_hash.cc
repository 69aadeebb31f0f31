// SPDX-License-Identifier: Apache-2.0
#include "client/prefix_hash.h"

#include <sodium/crypto_generichash_blake2b.h>

#include <algorithm>
#include <array>
#include <bit>
#include <string_view>

#include "base/assert.h"
#include "base/limits.h"

namespace kvm::client {
namespace {

static_assert(std::endian::native == std::endian::little, "tokens are hashed as they lie");

kvm_prefix_hash hash_of(std::span<const std::byte> bytes) {
  kvm_prefix_hash hash;
  const int failed = crypto_generichash_blake2b(
      hash.bytes, sizeof(hash.bytes), reinterpret_cast<const unsigned char*>(bytes.data()),
      bytes.size(), nullptr, 0);
  KVM_ASSERT(failed == 0);  // of sizes that it does not know alone
  return hash;
}

}  // namespace

kvm_prefix_hash prefix_seed(const kvm_space_info& space, std::span<const std::byte> salt) {
  constexpr std::string_view kWhat = "kvm prefix 1\n";
  constexpr size_t kMaxBytes = kWhat.size() + sizeof(space.layout_digest) +
                               sizeof(space.policy_digest) + sizeof(space.fingerprint) +
                               kMaxSaltBytes;
  KVM_ASSERT(salt.size() <= kMaxSaltBytes);
  std::array<std::byte, kMaxBytes> bytes;
  std::byte* at = bytes.data();
  const auto add = [&](std::span<const std::byte> part) {
    at = std::copy(part.begin(), part.end(), at);
  };
  add(std::as_bytes(std::span(kWhat)));
  add(std::as_bytes(std::span(space.layout_digest)));
  add(std::as_bytes(std::span(space.policy_digest)));
  add(std::as_bytes(std::span(space.fingerprint)));
  add(salt);
  return hash_of({bytes.data(), at});
}

void hash_pages(const kvm_prefix_hash& before, std::span<const uint32_t> tokens,
                kvm_prefix_hash* out) {
  struct Page {
    kvm_prefix_hash before;
    uint32_t tokens[kPageTokens];
  };
  static_assert(sizeof(Page) == sizeof(kvm_prefix_hash) + kPageTokens * sizeof(uint32_t));
  Page page{.before = before, .tokens = {}};
  for (; tokens.size() >= kPageTokens; tokens = tokens.subspan(kPageTokens)) {
    std::copy_n(tokens.begin(), kPageTokens, page.tokens);
    page.before = hash_of(std::as_bytes(std::span(&page, 1)));
    *out++ = page.before;
  }
}

}  // namespace kvm::client
