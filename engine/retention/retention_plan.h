// SPDX-License-Identifier: Apache-2.0
// The driver's part of engine/retention/retention_slice.h: it asks policies what they want done
// with a sequence since its commit point moved, and carries out what changes its lists.
#ifndef KVM_ENGINE_RETENTION_RETENTION_PLAN_H_
#define KVM_ENGINE_RETENTION_RETENTION_PLAN_H_

#include <memory>

#include "engine/retention/retention_slice.h"
#include "engine/store/sequence.h"
#include "engine/store/store_memory.h"

namespace kvm::engine {

// Says whether a policy is to be asked about anything.
bool is_retention_due(const Sequence* seq);
// Returns the next slice of what policies are to be asked about; null at the end. *cursor is zeros
// for the first slice. Every slice must be opened and closed, or destroyed unopened, before
// anything else changes the sequence. O(pages of the slice).
std::unique_ptr<RetentionSlice> plan_retention(const StoreMemory& memory, Sequence* seq,
                                               RetentionCursor* cursor);
void open_retention(StoreMemory* memory, RetentionSlice* slice);
void close_retention(StoreMemory* memory, RetentionSlice* slice, RetentionCursor* cursor);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RETENTION_RETENTION_PLAN_H_
