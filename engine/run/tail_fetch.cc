// SPDX-License-Identifier: Apache-2.0
#include "engine/run/tail_fetch.h"

#include <new>
#include <utility>
#include <vector>

#include "base/assert.h"

namespace kvm::engine {

namespace {

// Without exceptions: pages may be on their way already.
Result<tiers::PageTable::Move> begin_fetch(StoreMemory* memory, tiers::PageRef page) noexcept {
  try {
    return memory->begin_fetch(page);
  } catch (const std::bad_alloc&) {
    return Status::fixed(KVM_ERR_NO_MEMORY, "the machine refused memory for a page to come back");
  }
}

}  // namespace

Result<TailFetch::Next> TailFetch::begin(StoreMemory* memory, std::span<const AppendItem> items,
                                         StreamListener* listener) {
  KVM_ASSERT(!has_begun());
  size_bytes_ = 0;
  const tiers::PageTable& pages = memory->pages();
  std::vector<tiers::PageRef> away;
  bool is_claimed = false;
  for (const AppendItem& item : items) {
    if (item.restores) {
      continue;  // which leaves tails as they are
    }
    for (const PageList& list : std::as_const(*item.seq).layer_lists(item.layer)) {
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
  for (const tiers::PageRef page : away) {
    if (!pages.is_sealed(page)) {
      continue;  // forks that share it append in the same request
    }
    const Result<tiers::PageTable::Move> move = begin_fetch(memory, page);
    if (move.is_ok()) {
      reads_.add(move.value(), pages.place(page));
      size_bytes_ += move.value().size_bytes;
    } else if (reads_.is_empty()) {
      return move.status();
    } else {
      break;
    }
  }
  reads_.submit(pages.slow_tier(), listener);
  return Next::kWait;
}

Status TailFetch::end(StoreMemory* memory) {
  Status first;
  reads_.end([&](const tiers::PageTable::Move& move, const tiers::Transfer& read) {
    memory->pages().end_fetch(move, read.status.is_ok());
    if (!read.status.is_ok() && first.is_ok()) {
      first = read.status;
    }
  });
  return first;
}

}  // namespace kvm::engine
