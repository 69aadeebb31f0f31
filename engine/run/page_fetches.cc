// SPDX-License-Identifier: Apache-2.0
#include "engine/run/page_fetches.h"

#include <new>
#include <thread>
#include <utility>

#include "base/assert.h"

namespace kvm::engine {
namespace {

// Without exceptions: pages may be on their way already.
Result<tiers::PageTable::Move> begin_fetch(tiers::PageTable* pages, tiers::PageRef page) noexcept {
  try {
    return pages->begin_fetch(page);
  } catch (const std::bad_alloc&) {
    return Status::fixed(KVM_ERR_NO_MEMORY, "the machine refused memory for a page to come back");
  }
}

}  // namespace

void PageFetches::aim(kvm_seq_id seq) {
  KVM_ASSERT(!has_begun());
  target_ = seq;
  from_.rewind();
}

void PageFetches::begin(Store* store, uint64_t max_bytes) {
  KVM_ASSERT(!has_begun());
  tiers::PageTable& pages = store->memory().pages();
  found_.reserve(FullPages::kMaxPages);
  reads_.reserve(FullPages::kMaxPages);
  batch_ = {};
  const Result<Sequence*> seq = store->find_any_seq(target_);
  found_.clear();
  batch_.is_last = !seq.is_ok() || from_.find(pages, *seq.value(), false, max_bytes, &found_);
  for (const FullPage& found : found_) {
    const Result<tiers::PageTable::Move> move = begin_fetch(&pages, found.page);
    if (!move.is_ok()) {
      batch_.is_last = false;
      batch_.status = move.status();
      break;
    }
    reads_.add(move.value(), pages.place(found.page));
  }
  has_begun_ = true;
  if (!reads_.is_empty()) {
    reads_.submit(pages.slow_tier(), this);
  }
}

PageFetches::Batch PageFetches::end(StoreMemory* memory) {
  KVM_ASSERT(has_begun());
  reads_.end([&](const tiers::PageTable::Move& move, const tiers::Transfer& read) {
    const bool is_there = read.status.is_ok();
    memory->pages().end_fetch(move, is_there);
    if (!is_there) {
      if (batch_.n_failed++ == 0) {
        batch_.status = read.status;
      }
      return;
    }
    ++batch_.n_pages;
    batch_.size_bytes += move.size_bytes;
  });
  has_begun_ = false;
  return std::exchange(batch_, {});
}

void PageFetches::stop(StoreMemory* memory) {
  while (!is_over()) {
    std::this_thread::yield();
  }
  if (has_begun()) {
    end(memory);
  }
  target_ = 0;
}

}  // namespace kvm::engine
