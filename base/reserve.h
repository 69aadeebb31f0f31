// SPDX-License-Identifier: Apache-2.0
// Room in a vector ahead of push_back, where that must not fail. Vector::reserve alone may take
// exactly what is asked for, and then every call copies.
#ifndef KVM_BASE_RESERVE_H_
#define KVM_BASE_RESERVE_H_

#include <algorithm>
#include <cstddef>

namespace kvm {

// Room for n elements in all; at least twice what there was, where that is not enough.
template <class Vector>
void reserve_growing(Vector& vector, size_t n) {
  if (n > vector.capacity()) {
    vector.reserve(std::max(n, 2 * vector.capacity()));
  }
}

}  // namespace kvm

#endif  // KVM_BASE_RESERVE_H_
