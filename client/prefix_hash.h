// SPDX-License-Identifier: Apache-2.0
// Hashes of prefixes, as kvm_prefix_seed and kvm_prefix_hashes of kvm.h say.
//
// Threads: pure functions.
#ifndef KVM_CLIENT_PREFIX_HASH_H_
#define KVM_CLIENT_PREFIX_HASH_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvm.h"

namespace kvm::client {

// REQUIRES: salt.size() <= kMaxSaltBytes.
kvm_prefix_hash prefix_seed(const kvm_space_info& space, std::span<const std::byte> salt);
// out: of one hash for each full page of tokens.
void hash_pages(const kvm_prefix_hash& before, std::span<const uint32_t> tokens,
                kvm_prefix_hash* out);

}  // namespace kvm::client

#endif  // KVM_CLIENT_PREFIX_HASH_H_
