// SPDX-License-Identifier: Apache-2.0
// The stored tokens of a list as runs for attention, and pins that keep their pages: the part of
// engine/store.h that is headed Reading.
#ifndef KVM_ENGINE_STORED_RUNS_H_
#define KVM_ENGINE_STORED_RUNS_H_

#include <cstdint>
#include <vector>

#include "base/kv_view.h"
#include "engine/ledger.h"
#include "engine/sequence.h"
#include "engine/store.h"

namespace kvm::engine {

void collect_runs(const Ledger& ledger, const Sequence* seq, uint32_t layer, uint32_t class_index,
                  std::vector<KvRun>* runs, bool is_packed);
// Of an OWN layer, only what pages with blocks in [block_begin, block_end) hold.
void collect_between(const Ledger& ledger, const Sequence* seq, uint32_t layer,
                     uint32_t class_index, uint64_t block_begin, uint64_t block_end,
                     std::vector<KvRun>* runs);
void pin_pages(Ledger* ledger, const Sequence* seq, uint32_t layer, uint32_t class_index,
               PagePins* pins);
void unpin_pages(Ledger* ledger, PagePins* pins);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORED_RUNS_H_
