// SPDX-License-Identifier: Apache-2.0
// The running accounts of a store against a recount of everything, for tests.
#ifndef KVM_ENGINE_STORE_CHECK_H_
#define KVM_ENGINE_STORE_CHECK_H_

#include "engine/id_table.h"
#include "engine/ledger.h"
#include "engine/sequence.h"

namespace kvm::engine {

// As Store::check_accounts.
void check_store(const Ledger& ledger, const IdTable<Sequence>& sequences);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_CHECK_H_
