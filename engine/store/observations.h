// SPDX-License-Identifier: Apache-2.0
// These functions keep what clients let the store observe of a sequence (kvm_observe), as
// engine/store/store.h states it.
#ifndef KVM_ENGINE_STORE_OBSERVATIONS_H_
#define KVM_ENGINE_STORE_OBSERVATIONS_H_

#include <cstdint>
#include <span>
#include <vector>

#include "engine/store/sequence.h"
#include "engine/store/store_memory.h"
#include "engine/store/store_types.h"

namespace kvm::engine {

// As Store::observed.
ObservedView observed_view(const Sequence* seq, uint32_t layer);
// The largest magnitudes, by channel, of the queries that are kept of a layer and ask these kv
// heads: [n_kv_heads][dim_k]; empty where none are. Throws std::bad_alloc.
std::vector<float> largest_queries(const Sequence* seq, uint32_t layer,
                                   std::span<const uint16_t> kv_heads);
// Forgets rows and columns at positions from n_tokens on.
void cut_observed(StoreMemory* memory, Sequence* seq, uint64_t n_tokens);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_OBSERVATIONS_H_
