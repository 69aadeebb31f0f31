// SPDX-License-Identifier: Apache-2.0
// The running accounts of a store against a recount of everything, for tests.
#ifndef KVM_ENGINE_STORE_STORE_CHECK_H_
#define KVM_ENGINE_STORE_STORE_CHECK_H_

#include <memory>
#include <span>

#include "engine/store/aside.h"
#include "engine/store/id_table.h"
#include "engine/store/sequence.h"
#include "engine/store/store_memory.h"

namespace kvm::engine {

// As Store::check_accounts.
void check_store(const StoreMemory& memory, const IdTable<Sequence>& sequences,
                 std::span<const std::unique_ptr<Aside>> asides);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_STORE_CHECK_H_
