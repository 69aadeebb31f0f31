// SPDX-License-Identifier: Apache-2.0
#include "engine/run/page_sends.h"

#include <new>
#include <thread>
#include <utility>

#include "base/assert.h"

namespace kvm::engine {

void PageSends::aim(kvm_seq_id seq) {
  KVM_ASSERT(!has_begun());
  target_ = seq;
  from_.rewind();
}

void PageSends::begin(Store* store, const Limits& limits, uint64_t max_bytes) {
  KVM_ASSERT(!has_begun());
  tiers::PageTable& pages = store->memory().pages();
  found_.reserve(FullPages::kMaxPages);
  writes_.reserve(FullPages::kMaxPages);
  batch_ = {};
  const Result<Sequence*> seq = store->find_any_seq(target_);
  found_.clear();
  batch_.is_last = !seq.is_ok() || from_.find(pages, *seq.value(), true, max_bytes, &found_);
  batch_.has_passed = from_.has_skipped();
  for (const FullPage& found : found_) {
    const bool has_place = pages.place(found.page) != tiers::kNoPlace;
    if ((found.is_shared && !limits.takes_shared) || (!has_place && !limits.writes)) {
      batch_.has_passed = true;
      continue;
    }
    tiers::PageTable::Move move;
    try {
      move = pages.begin_leave(found.page);
    } catch (const std::bad_alloc&) {
      ++batch_.n_failed;  // the others stay
      batch_.status =
          Status::fixed(KVM_ERR_NO_MEMORY, "the machine refused memory for a page to leave");
      break;
    }
    if (has_place) {
      pages.end_leave(move, pages.place(found.page));
      ++batch_.n_pages;
      batch_.size_bytes += move.size_bytes;
      continue;
    }
    writes_.add(move, tiers::kNoPlace);
  }
  has_begun_ = true;
  if (!writes_.is_empty()) {
    writes_.submit(pages.slow_tier(), this);
  }
}

PageSends::Batch PageSends::end(StoreMemory* memory) {
  KVM_ASSERT(has_begun());
  writes_.end([&](const tiers::PageTable::Move& move, const tiers::Transfer& write) {
    const bool is_written = write.status.is_ok();
    if (is_written && batch_.is_kept) {
      memory->pages().slow_tier()->release(write.place);
    }
    const bool is_away = is_written && !batch_.is_kept;
    memory->pages().end_leave(move, is_away ? write.place : tiers::kNoPlace);
    if (!is_written) {
      if (batch_.n_failed++ == 0) {
        batch_.status = write.status;
      }
      return;
    }
    batch_.written_bytes += move.size_bytes;
    batch_.n_pages += is_away ? 1 : 0;
    batch_.size_bytes += is_away ? move.size_bytes : 0;
  });
  memory->pages().free_left_frames();
  has_begun_ = false;
  return std::exchange(batch_, {});
}

void PageSends::stop(StoreMemory* memory) {
  while (!is_over()) {
    std::this_thread::yield();
  }
  if (has_begun()) {
    end(memory);
  }
  target_ = 0;
}

}  // namespace kvm::engine
