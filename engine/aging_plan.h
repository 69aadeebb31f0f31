// SPDX-License-Identifier: Apache-2.0
// Which slice of aging (engine/aging.h) comes next, and what its actions change: the driver's part,
// as engine/store.h states it.
#ifndef KVM_ENGINE_AGING_PLAN_H_
#define KVM_ENGINE_AGING_PLAN_H_

#include <memory>

#include "engine/aging.h"
#include "engine/ledger.h"
#include "engine/sequence.h"

namespace kvm::engine {

bool is_aging_due(const Sequence* seq);
std::unique_ptr<Aging> plan_aging(const Ledger& ledger, Sequence* seq, AgingCursor* cursor);
void open_aging(Ledger* ledger, Aging* aging);
void close_aging(Ledger* ledger, Aging* aging, AgingCursor* cursor);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_AGING_PLAN_H_
