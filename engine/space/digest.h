// SPDX-License-Identifier: Apache-2.0
// Digests of a space: what two spaces, or a space and a file, must agree in to share stored tokens.
//
//   geometry layers, kv heads, dims, shard: what rows there are
//   layout   what the bytes of pages mean: layers, kv heads, dims, codecs, shard
//   policy   which tokens heads keep
//   index    what is kept beside them
//
// Of the space as it is resolved, so a default and the same value written out agree; what only
// queries need (q heads, scales, windows, rotations) is in none. Each is the version 5 UUID (RFC
// 4122, SHA-1) of a text, in the URL namespace: `uuid.uuid5(uuid.NAMESPACE_URL, text)` of Python.
#ifndef KVM_ENGINE_SPACE_DIGEST_H_
#define KVM_ENGINE_SPACE_DIGEST_H_

#include <string>

#include "engine/space/space.h"

namespace kvm::engine {

// The texts, lines that end with a newline; docs/storage.md describes them.
std::string geometry_text(const Space& space);
std::string layout_text(const Space& space);
std::string policy_text(const Space& space);
std::string index_text(const Space& space);

Digest digest_of(const std::string& text);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_SPACE_DIGEST_H_
