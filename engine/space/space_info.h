// SPDX-License-Identifier: Apache-2.0
// What kvm_space_info says of a space, whoever keeps it.
#ifndef KVM_ENGINE_SPACE_SPACE_INFO_H_
#define KVM_ENGINE_SPACE_SPACE_INFO_H_

#include "engine/space/space.h"
#include "kvm.h"

namespace kvm::engine {

// All but what its keeper knows: space, uid, n_sequences, and the digests of layout, policy and
// index, which only hosts have.
kvm_space_info describe_space(const Space& space);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_SPACE_SPACE_INFO_H_
