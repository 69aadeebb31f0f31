// SPDX-License-Identifier: Apache-2.0
// Carries out what policies ask for: pages that go, are encoded anew, are folded into one entry, or
// of which a head keeps some tokens.
//
// Threads: the driver thread.
#ifndef KVM_ENGINE_POLICY_ACTIONS_H_
#define KVM_ENGINE_POLICY_ACTIONS_H_

#include <cstdint>
#include <span>

#include "base/status.h"
#include "engine/aging.h"
#include "engine/ledger.h"
#include "engine/sequence.h"
#include "policies/policy.h"

namespace kvm::engine {

// As Store::apply and Store::add_masses.
Status apply_action(Ledger* ledger, Sequence* seq, const policies::Action& action);
void add_list_masses(Ledger* ledger, Sequence* seq, uint32_t layer, uint32_t class_index,
                     std::span<const float> sums, uint64_t position, bool is_packed);

// Begins an action of a slice of aging; one that reads rows becomes a work of it, to be closed when
// its pieces have run. *is_cut: set where a part of the action is left for the next slice.
// Fails: as apply_action.
Status open_action(Ledger* ledger, Aging* aging, const policies::Action& action,
                   std::span<const uint64_t> positions, bool* is_cut);
void close_fold(Ledger* ledger, Sequence* seq, Aging::Work* work);
void close_keep(Ledger* ledger, Sequence* seq, Aging::Work* work);

// Forget what was folded and kept of tokens from n_tokens on. Cuts that would need a part of it are
// refused before (check_cut); who cuts before all of it has nothing of it left.
void cut_folded(Sequence* seq, uint64_t n_tokens);
void cut_kept(Sequence* seq, uint64_t n_tokens);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_POLICY_ACTIONS_H_
