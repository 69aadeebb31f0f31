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

// Count a page that has moved, and one that has not.
void count(PageBatches::Batch* batch, uint64_t size_bytes) {
  ++batch->n_pages;
  batch->size_bytes += size_bytes;
}

void count_failure(PageBatches::Batch* batch, const Status& status) {
  if (batch->n_failed++ == 0) {
    batch->status = status;
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
  KVM_ASSERT(can_begin());
  found_.reserve(FullPages::kMaxPages);
  next().transfers.reserve(FullPages::kMaxPages);
  next().batch = {};
  const Result<Sequence*> seq = store->find_any_seq(target_);
  found_.clear();
  next().batch.is_last = !seq.is_ok() || from_.find(store->memory().pages(), *seq.value(),
                                                    in_memory, worth, max_bytes, &found_);
}

void PageBatches::submit(PageTable* pages) {
  Flight& flight = next();
  ++n_begun_;
  is_at_end_ = flight.batch.is_last || !flight.batch.status.is_ok();
  if (!flight.transfers.is_empty()) {
    flight.transfers.submit(pages->slow_tier(), this);
  }
}

void PageBatches::begin_send(Store* store, const Limits& limits, uint64_t max_bytes) {
  find(store, true, limits.worth, max_bytes);
  PageTable& pages = store->memory().pages();
  Flight& flight = next();
  flight.batch.has_passed = from_.has_skipped();
  for (const FullPage& found : found_) {
    const bool has_place = pages.place(found.page) != tiers::kNoPlace;
    if ((found.is_shared && !limits.takes_shared) || (!has_place && !limits.writes)) {
      flight.batch.has_passed = true;
      continue;
    }
    const Result<PageTable::Move> move =
        begin_move([&]() -> Result<PageTable::Move> { return pages.begin_leave(found.page); });
    if (!move.is_ok()) {
      count_failure(&flight.batch, move.status());
      break;  // the others stay
    }
    if (has_place) {
      pages.end_leave(move.value(), pages.place(found.page));
      count(&flight.batch, move.value().size_bytes);
      continue;
    }
    flight.transfers.add(move.value(), tiers::kNoPlace);
  }
  submit(&pages);
}

void PageBatches::begin_fetch(Store* store, uint64_t max_bytes) {
  find(store, false, {}, max_bytes);
  PageTable& pages = store->memory().pages();
  Flight& flight = next();
  for (const FullPage& found : found_) {
    const Result<PageTable::Move> move = begin_move([&] { return pages.begin_fetch(found.page); });
    if (!move.is_ok()) {
      flight.batch.is_last = false;
      flight.batch.status = move.status();
      break;
    }
    flight.transfers.add(move.value(), pages.place(found.page));
  }
  submit(&pages);
}

PageBatches::Batch PageBatches::end(StoreMemory* memory) {
  KVM_ASSERT(has_begun());
  PageTable& pages = memory->pages();
  Batch batch = std::exchange(first().batch, {});
  first().transfers.end([&](const PageTable::Move& move, const Transfer& transfer) {
    const bool is_ok = transfer.status.is_ok();
    if (!is_ok) {
      count_failure(&batch, transfer.status);
    }
    if (transfer.kind == Transfer::Kind::kWrite) {
      pages.end_leave(move, is_ok ? transfer.place : tiers::kNoPlace);
      batch.written_bytes += is_ok ? move.size_bytes : 0;
    } else {
      pages.end_fetch(move, is_ok);
    }
    if (is_ok) {
      count(&batch, move.size_bytes);
    }
  });
  first_ = (first_ + 1) % kMaxBegun;
  --n_begun_;
  return batch;
}

void PageBatches::stop(StoreMemory* memory) {
  while (has_begun()) {
    if (is_over()) {
      end(memory);
    } else {
      std::this_thread::yield();
    }
  }
  target_ = 0;
}

}  // namespace kvm::engine
