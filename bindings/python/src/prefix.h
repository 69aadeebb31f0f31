// SPDX-License-Identifier: Apache-2.0
// Prefixes of kvm.h: tokens from Python become hashes, and hashes are published and found. Hashes
// lie in Python's bytes, which do not change: calls read them where they are, without the GIL.
#ifndef KVM_BINDINGS_PYTHON_SRC_PREFIX_H_
#define KVM_BINDINGS_PYTHON_SRC_PREFIX_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include <nanobind/nanobind.h>
#include "kvm.h"

namespace kvm::python {

// The hashes in `bytes`, for as long as these live. Throws StatusError: they are not whole ones.
std::span<const kvm_prefix_hash> hashes_in(const nanobind::bytes& bytes);

// As kvm.h counts what is published: far more than it takes stay too many.
inline uint32_t count_of(std::span<const kvm_prefix_hash> hashes) {
  return static_cast<uint32_t>(std::min<size_t>(hashes.size(), UINT32_MAX));
}

void register_prefix(nanobind::module_& module);

}  // namespace kvm::python

#endif  // KVM_BINDINGS_PYTHON_SRC_PREFIX_H_
