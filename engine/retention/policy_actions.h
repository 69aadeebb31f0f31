// SPDX-License-Identifier: Apache-2.0
// Carries out what policies ask for: pages that go, are encoded anew, are folded into one entry, or
// of which a head keeps some tokens.
//
// Threads: the driver thread.
#ifndef KVM_ENGINE_RETENTION_POLICY_ACTIONS_H_
#define KVM_ENGINE_RETENTION_POLICY_ACTIONS_H_

#include <cstdint>
#include <span>

#include "base/status.h"
#include "engine/retention/retention_slice.h"
#include "engine/store/sequence.h"
#include "engine/store/store_memory.h"
#include "policies/policy.h"

namespace kvm::engine {

// Applies one action of a policy. All or nothing. kFold and kKeep come from retention only.
// Fails: INVALID (list or range out of bounds, tokens that are not committed, drop of a part of a
// page), UNSUPPORTED (an action without its tier or operator), QUOTA, NO_SPACE.
Status apply_action(StoreMemory* memory, Sequence* seq, const policies::Action& action);
// Adds the attention mass of a request's queries to that of the tokens of a list that chooses by it
// (KVM_RETAIN_HEAVY): column sums of the positions from `position` on, as Store::collect_runs
// counts them; reserved tokens may be among them. Left undone where there is no memory for it.
void add_list_masses(StoreMemory* memory, Sequence* seq, uint32_t layer, uint32_t class_index,
                     std::span<const float> sums, uint64_t position, bool is_packed);

// Begins an action of a slice of retention; one that reads rows becomes a work of it, to be closed
// when its pieces have run. *is_cut: set where a part of the action is left for the next slice.
// Fails: as apply_action.
Status open_action(StoreMemory* memory, RetentionSlice* slice, const policies::Action& action,
                   std::span<const uint64_t> positions, bool* is_cut);
// Throws std::bad_alloc: some pages stay what they were.
void close_demote(Sequence* seq, RetentionSlice::Work* work);
void close_fold(StoreMemory* memory, Sequence* seq, RetentionSlice::Work* work);
void close_keep(StoreMemory* memory, Sequence* seq, RetentionSlice::Work* work);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RETENTION_POLICY_ACTIONS_H_
