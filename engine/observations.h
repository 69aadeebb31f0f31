// SPDX-License-Identifier: Apache-2.0
// What clients let the store observe of a sequence (kvm_observe), as engine/store.h states it.
#ifndef KVM_ENGINE_OBSERVATIONS_H_
#define KVM_ENGINE_OBSERVATIONS_H_

#include <cstdint>

#include "base/status.h"
#include "engine/ledger.h"
#include "engine/sequence.h"
#include "engine/store.h"

namespace kvm::engine {

// As Store::observe and Store::observed.
Status observe_queries(Ledger* ledger, Sequence* seq, const ObserveInput& input);
ObservedView observed_view(const Sequence* seq, uint32_t layer);
// Forgets rows and columns at positions from n_tokens on.
void cut_observed(Ledger* ledger, Sequence* seq, uint64_t n_tokens);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_OBSERVATIONS_H_
