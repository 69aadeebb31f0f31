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
  reads_ = std::make_unique<Read[]>(away.size());
  std::vector<tiers::Transfer*> transfers;
  transfers.reserve(away.size());
  listener_ = listener;
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
    Read& read = reads_[n_++];
    read.fetch = this;
    read.move = move.value();
    read.place = pages.place(page);
    read.data = read.move.target;
    read.size_bytes = static_cast<uint32_t>(read.move.size_bytes);
    transfers.push_back(&read);
  }
  if (n_ == 0) {
    return status_;
  }
  n_left_ = n_;
  pages.slow_tier()->submit(transfers);
  return Next::kWait;
}

void TailFetch::end_read() {
  const std::lock_guard lock(mutex_);
  if (--n_left_ == 0) {
    listener_->on_arrival();
  }
}

bool TailFetch::is_over() {
  const std::lock_guard lock(mutex_);
  return n_left_ == 0;
}

Status TailFetch::end(StoreMemory* memory) {
  KVM_ASSERT(is_over());
  Status first = status_;
  for (uint32_t i = 0; i < n_; ++i) {
    const Status& status = reads_[i].status;
    memory->pages().end_fetch(reads_[i].move, status.is_ok());
    if (!status.is_ok() && first.is_ok()) {
      first = status;
    }
  }
  n_ = 0;
  reads_.reset();
  return first;
}

}  // namespace kvm::engine
