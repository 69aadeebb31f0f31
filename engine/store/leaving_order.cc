// SPDX-License-Identifier: Apache-2.0
#include "engine/store/leaving_order.h"

#include <algorithm>

#include "base/assert.h"

namespace kvm::engine {

using LeavingHook = ResidenceHook<ByLeaving>;

Residence::~Residence() {
  if (order_ != nullptr) {
    order_->n_pinned_ -= is_pinned() ? 1 : 0;
    order_->take_out(this);
  }
}

LeavingOrder::~LeavingOrder() {
  for (List* list : {&small_, &main_, &ghosts_, &small_aside_, &main_aside_}) {
    while (!list->empty()) {
      take_out(&list->front());
    }
  }
}

void LeavingOrder::enter(Residence* residence, kvm_seq_id seq) {
  if (residence->is_in_order()) {
    return;
  }
  const bool is_known = rule_ == LeavingRule::kLru || residence->queue_ == Residence::Queue::kGhost;
  take_out(residence);
  residence->seq_ = seq;
  push(residence, is_known ? Residence::Queue::kMain : Residence::Queue::kSmall);
}

void LeavingOrder::push(Residence* residence, Residence::Queue queue) {
  residence->order_ = this;
  residence->queue_ = queue;
  switch (queue) {
    case Residence::Queue::kSmall:
      small_.push_front(*residence);
      small_bytes_ += residence->bytes_;
      ++n_small_;
      break;
    case Residence::Queue::kMain:
      main_.push_front(*residence);
      ++n_main_;
      break;
    case Residence::Queue::kGhost:
      ghosts_.push_front(*residence);
      ++n_ghosts_;
      break;
    case Residence::Queue::kNone:
      break;
  }
}

void LeavingOrder::take_out(Residence* residence) {
  if (residence->LeavingHook::is_linked()) {
    residence->LeavingHook::unlink();
  }
  switch (residence->queue_) {
    case Residence::Queue::kSmall:
      KVM_ASSERT(small_bytes_ >= residence->bytes_);
      small_bytes_ -= residence->bytes_;
      --n_small_;
      break;
    case Residence::Queue::kMain:
      --n_main_;
      break;
    case Residence::Queue::kGhost:
      --n_ghosts_;
      break;
    case Residence::Queue::kNone:
      break;
  }
  residence->queue_ = Residence::Queue::kNone;
  residence->order_ = nullptr;
}

void LeavingOrder::use(Residence* residence) {
  KVM_ASSERT(residence->is_in_order());
  if (rule_ == LeavingRule::kLru) {
    residence->LeavingHook::unlink();
    main_.push_front(*residence);
    return;
  }
  residence->n_uses_ = std::min(residence->n_uses_ + 1, kMaxUses);
}

void LeavingOrder::grow(Residence* residence, uint64_t size_bytes) {
  residence->bytes_ += size_bytes;
  small_bytes_ += residence->queue_ == Residence::Queue::kSmall ? size_bytes : 0;
}

void LeavingOrder::shrink(Residence* residence, uint64_t size_bytes) {
  const uint64_t gone = std::min(size_bytes, residence->bytes_);
  residence->bytes_ -= gone;
  small_bytes_ -= residence->queue_ == Residence::Queue::kSmall ? gone : 0;
}

void LeavingOrder::pin(Residence* residence) {
  KVM_ASSERT(residence->is_in_order());
  n_pinned_ += residence->n_pins_++ == 0 ? 1 : 0;
}

void LeavingOrder::unpin(Residence* residence) {
  KVM_ASSERT(residence->is_pinned());
  n_pinned_ -= --residence->n_pins_ == 0 ? 1 : 0;
}

// Who was set aside was the oldest.
void LeavingOrder::begin_pass() {
  small_.splice(small_.end(), small_aside_);
  main_.splice(main_.end(), main_aside_);
}

Residence* LeavingOrder::next() {
  KVM_ASSERT(!is_exhausted());
  if (!small_.empty() && (small_bytes_ > max_small_bytes_ || main_.empty())) {
    Residence* oldest = &small_.back();
    if (oldest->n_uses_ < 2) {
      return oldest;
    }
    take_out(oldest);
    oldest->n_uses_ = 0;
    push(oldest, Residence::Queue::kMain);
    return nullptr;
  }
  Residence* oldest = &main_.back();
  if (oldest->n_uses_ == 0) {
    return oldest;
  }
  --oldest->n_uses_;
  oldest->LeavingHook::unlink();
  main_.push_front(*oldest);
  return nullptr;
}

// In the order in which they were met, the oldest last.
void LeavingOrder::set_aside(Residence* residence) {
  KVM_ASSERT(residence->is_in_order());
  residence->LeavingHook::unlink();
  (residence->queue_ == Residence::Queue::kSmall ? small_aside_ : main_aside_)
      .push_front(*residence);
}

void LeavingOrder::leave(Residence* residence) {
  KVM_ASSERT(!residence->is_pinned());
  const bool was_small = residence->queue_ == Residence::Queue::kSmall;
  take_out(residence);
  residence->bytes_ = 0;
  residence->n_uses_ = 0;
  if (was_small) {
    push(residence, Residence::Queue::kGhost);
    forget_ghosts();
  }
}

void LeavingOrder::forget_ghosts() {
  while (n_ghosts_ > std::max(n_main_, kLeastGhosts)) {
    take_out(&ghosts_.back());
  }
}

}  // namespace kvm::engine
