// SPDX-License-Identifier: Apache-2.0
#include "engine/stream/page_transfers.h"

namespace kvm::engine {

void PageTransfers::reserve(size_t n) {
  KVM_ASSERT(is_empty());
  submitted_.reserve(n);
  parts_ = std::make_unique<Part[]>(n);
}

void PageTransfers::add(const tiers::PageTable::Move& move, tiers::PlaceId place) {
  KVM_ASSERT(submitted_.size() < submitted_.capacity());
  const bool is_read = move.target != nullptr;
  Part& part = parts_[submitted_.size()];
  part.kind = is_read ? tiers::Transfer::Kind::kRead : tiers::Transfer::Kind::kWrite;
  part.place = place;
  // The tier reads from what it writes away.
  part.data = is_read ? move.target : const_cast<std::byte*>(move.source);
  part.size_bytes = static_cast<uint32_t>(move.size_bytes);
  part.all = this;
  part.move = move;
  submitted_.push_back(&part);
}

void PageTransfers::submit(tiers::SlowTier* tier, StreamListener* listener) {
  listener_ = listener;
  n_left_ = submitted_.size();
  tier->submit(submitted_);
}

void PageTransfers::end_part() {
  const std::lock_guard lock(mutex_);
  if (--n_left_ == 0) {
    listener_->on_arrival();
  }
}

bool PageTransfers::is_over() {
  const std::lock_guard lock(mutex_);
  return n_left_ == 0;
}

}  // namespace kvm::engine
