// SPDX-License-Identifier: Apache-2.0
// Room for tokens that are being appended: the part of engine/store.h that is headed Appending.
#ifndef KVM_ENGINE_RESERVATION_H_
#define KVM_ENGINE_RESERVATION_H_

#include <span>
#include <vector>

#include "base/status.h"
#include "engine/ledger.h"
#include "engine/sequence.h"
#include "engine/store.h"

namespace kvm::engine {

Status check_append(const AppendItem& item);
Status reserve_append(Ledger* ledger, std::span<const AppendItem> items,
                      std::vector<AppendPiece>* pieces);
void publish_reserved(Ledger* ledger, Sequence* seq, uint32_t layer);
void rollback_reserved(Ledger* ledger, Sequence* seq, uint32_t layer);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RESERVATION_H_
