// SPDX-License-Identifier: Apache-2.0
// These functions keep what clients let the store observe of a sequence (kvm_observe), as
// engine/store/store.h states it.
#ifndef KVM_ENGINE_STORE_OBSERVATIONS_H_
#define KVM_ENGINE_STORE_OBSERVATIONS_H_

#include <cstdint>

#include "engine/store/sequence.h"
#include "engine/store/store_memory.h"
#include "engine/store/store_types.h"

namespace kvm::engine {

// As Store::observed.
ObservedView observed_view(const Sequence* seq, uint32_t layer);
// Forgets rows and columns at positions from n_tokens on.
void cut_observed(StoreMemory* memory, Sequence* seq, uint64_t n_tokens);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_OBSERVATIONS_H_
