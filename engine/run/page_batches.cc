// SPDX-License-Identifier: Apache-2.0
#include "engine/run/page_batches.h"

#include <new>
#include <thread>
#include <utility>

#include "base/assert.h"

namespace kvm::engine {
namespace {

using tiers::PageTable;
using tiers::Transfer;

// Without exceptions: pages may be on their way already.
template <typename Begin>
Result<PageTable::Move> begin_move(Begin begin) noexcept {
  try {
    return begin();
  } catch (const std::bad_alloc&) {
    return Status::fixed(KVM_ERR_NO_MEMORY, "the machine refused memory for a page to move");
  }
}

}  // namespace

void PageBatches::aim(kvm_seq_id seq) {
  KVM_ASSERT(!has_begun());
  target_ = seq;
  from_.rewind();
}

void PageBatches::find(Store* store, bool in_memory, const FullPages::Worth& worth,
                       uint64_t max_bytes) {
  KVM_ASSERT(!has_begun());
  found_.reserve(FullPages::kMaxPages);
  transfers_.reserve(FullPages::kMaxPages);
  batch_ = {};
  const Result<Sequence*> seq = store->find_any_seq(target_);
  found_.clear();
  batch_.is_last = !seq.is_ok() || from_.find(store->memory().pages(), *seq.value(), in_memory,
                                              worth, max_bytes, &found_);
}

void PageBatches::submit(PageTable* pages) {
  has_begun_ = true;
  if (!transfers_.is_empty()) {
    transfers_.submit(pages->slow_tier(), this);
  }
}

void PageBatches::count_failure(const Status& status) {
  if (batch_.n_failed++ == 0) {
    batch_.status = status;
  }
}

void PageBatches::begin_send(Store* store, const Limits& limits, uint64_t max_bytes) {
  find(store, true, limits.worth, max_bytes);
  PageTable& pages = store->memory().pages();
  batch_.has_passed = from_.has_skipped();
  for (const FullPage& found : found_) {
    const bool has_place = pages.place(found.page) != tiers::kNoPlace;
    if ((found.is_shared && !limits.takes_shared) || (!has_place && !limits.writes)) {
      batch_.has_passed = true;
      continue;
    }
    const Result<PageTable::Move> move =
        begin_move([&]() -> Result<PageTable::Move> { return pages.begin_leave(found.page); });
    if (!move.is_ok()) {
      count_failure(move.status());
      break;  // the others stay
    }
    if (has_place) {
      pages.end_leave(move.value(), pages.place(found.page));
      count(move.value().size_bytes);
      continue;
    }
    transfers_.add(move.value(), tiers::kNoPlace);
  }
  submit(&pages);
}

void PageBatches::begin_fetch(Store* store, uint64_t max_bytes) {
  find(store, false, {}, max_bytes);
  PageTable& pages = store->memory().pages();
  for (const FullPage& found : found_) {
    const Result<PageTable::Move> move = begin_move([&] { return pages.begin_fetch(found.page); });
    if (!move.is_ok()) {
      batch_.is_last = false;
      batch_.status = move.status();
      break;
    }
    transfers_.add(move.value(), pages.place(found.page));
  }
  submit(&pages);
}

void PageBatches::end_write(PageTable* pages, const PageTable::Move& move, const Transfer& write) {
  const bool is_written = write.status.is_ok();
  pages->end_leave(move, is_written ? write.place : tiers::kNoPlace);
  if (is_written) {
    batch_.written_bytes += move.size_bytes;
    count(move.size_bytes);
  }
}

PageBatches::Batch PageBatches::end(StoreMemory* memory) {
  KVM_ASSERT(has_begun());
  PageTable& pages = memory->pages();
  transfers_.end([&](const PageTable::Move& move, const Transfer& transfer) {
    const bool is_ok = transfer.status.is_ok();
    if (!is_ok) {
      count_failure(transfer.status);
    }
    if (transfer.kind == Transfer::Kind::kWrite) {
      end_write(&pages, move, transfer);
      return;
    }
    pages.end_fetch(move, is_ok);
    if (is_ok) {
      count(move.size_bytes);
    }
  });
  has_begun_ = false;
  return std::exchange(batch_, {});
}

void PageBatches::stop(StoreMemory* memory) {
  while (!is_over()) {
    std::this_thread::yield();
  }
  if (has_begun()) {
    end(memory);
  }
  target_ = 0;
}

}  // namespace kvm::engine
