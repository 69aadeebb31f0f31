// SPDX-License-Identifier: Apache-2.0
#include "engine/run/tail_fetch.h"

#include <vector>

#include "base/assert.h"

namespace kvm::engine {

Result<TailFetch::Next> TailFetch::begin(StoreMemory* memory, std::span<Sequence* const> seqs,
                                         uint32_t layer, StreamListener* listener) {
  KVM_ASSERT(!has_begun());
  tiers::PageTable& pages = memory->pages();
  std::vector<tiers::PageRef> away;
  bool is_claimed = false;
  for (const Sequence* seq : seqs) {
    for (const PageList& list : seq->layer_lists(layer)) {
      const tiers::PageRef page = list.tail().page;
      if (page == tiers::kNoPage || pages.is_in_memory(page)) {
        continue;
      }
      if (pages.is_sealed(page)) {
        away.push_back(page);
      } else {
        is_claimed = true;
      }
    }
  }
  if (away.empty()) {
    return is_claimed ? Next::kClaimed : Next::kDone;
  }
  reads_.reserve(away.size());
  status_ = Status::ok();
  for (const tiers::PageRef page : away) {
    if (!pages.is_sealed(page)) {
      continue;  // forks that share it append in the same request
    }
    const Result<tiers::PageTable::Move> move = pages.begin_fetch(page);
    if (!move.is_ok()) {
      status_ = move.status();
      break;
    }
    reads_.add(move.value(), pages.place(page));
  }
  if (reads_.is_empty()) {
    return status_;
  }
  reads_.submit(pages.slow_tier(), listener);
  return Next::kWait;
}

Status TailFetch::end(StoreMemory* memory) {
  Status first = status_;
  reads_.end([&](const tiers::PageTable::Move& move, const tiers::Transfer& read) {
    memory->pages().end_fetch(move, read.status.is_ok());
    if (!read.status.is_ok() && first.is_ok()) {
      first = read.status;
    }
  });
  return first;
}

}  // namespace kvm::engine
