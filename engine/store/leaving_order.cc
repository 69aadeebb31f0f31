// SPDX-License-Identifier: Apache-2.0
#include "engine/store/leaving_order.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"

namespace kvm::engine {

using LeavingHook = ResidenceHook<ByLeaving>;
using PriorityHook = ResidenceHook<ByPriority>;

namespace {

// Counts the parts of a sequence among those of each priority, or takes them out.
template <typename Counts>
void count_parts(const Priorities& priorities, bool is_in, Counts* n_parts) {
  for (const Priorities::Part& part : priorities.parts()) {
    uint32_t& n = (*n_parts)[part.priority];
    KVM_ASSERT(is_in || n != 0);
    n = is_in ? n + 1 : n - 1;
  }
}

}  // namespace

Residence::~Residence() {
  if (order_ != nullptr) {
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
      enter_priorities(residence);
      break;
    case Residence::Queue::kMain:
      main_.push_front(*residence);
      ++n_main_;
      enter_priorities(residence);
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
  if (residence->is_in_order()) {
    leave_priorities(residence);
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
  if (residence->PriorityHook::is_linked()) {
    residence->PriorityHook::unlink();
    prioritised_.push_front(*residence);
  }
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

void LeavingOrder::set_priorities(Residence* residence, Priorities priorities) {
  if (residence->is_in_order()) {
    leave_priorities(residence);
  }
  residence->priorities_ = std::move(priorities);
  if (residence->is_in_order()) {
    enter_priorities(residence);
  }
}

// It keeps its place in the pass.
void LeavingOrder::expire_priorities(Residence* residence, uint64_t now_ns) {
  KVM_ASSERT(residence->is_in_order());
  if (!residence->priorities_.has_expired(now_ns)) {
    return;
  }
  count_parts(residence->priorities_, false, &n_parts_);
  residence->priorities_.expire(now_ns);
  count_parts(residence->priorities_, true, &n_parts_);
  if (residence->priorities_.is_empty()) {
    residence->PriorityHook::unlink();
  }
}

void LeavingOrder::enter_priorities(Residence* residence) {
  if (residence->priorities_.is_empty()) {
    return;
  }
  prioritised_.push_front(*residence);
  count_parts(residence->priorities_, true, &n_parts_);
}

void LeavingOrder::leave_priorities(Residence* residence) {
  if (residence->PriorityHook::is_linked()) {
    residence->PriorityHook::unlink();
  }
  count_parts(residence->priorities_, false, &n_parts_);
}

std::optional<uint32_t> LeavingOrder::priority_from(uint32_t priority) const {
  for (uint32_t i = priority; i < n_parts_.size(); ++i) {
    if (n_parts_[i] != 0 || i == KVM_PRIORITY_DEFAULT) {
      return i;
    }
  }
  return std::nullopt;
}

// Who was set aside was the oldest.
void LeavingOrder::begin_pass(uint32_t priority) {
  small_.splice(small_.end(), small_aside_);
  main_.splice(main_.end(), main_aside_);
  prioritised_.splice(prioritised_.end(), prioritised_aside_);
  pass_priority_ = priority;
}

Residence* LeavingOrder::next() {
  KVM_ASSERT(!is_exhausted());
  if (!is_default_pass()) {
    Residence* oldest = &prioritised_.back();
    if (oldest->priorities_.has(pass_priority_)) {
      return oldest;
    }
    set_aside(oldest);
    return nullptr;
  }
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
  if (!is_default_pass()) {
    // Its parts may have expired.
    if (residence->PriorityHook::is_linked()) {
      residence->PriorityHook::unlink();
      prioritised_aside_.push_front(*residence);
    }
    return;
  }
  residence->LeavingHook::unlink();
  (residence->queue_ == Residence::Queue::kSmall ? small_aside_ : main_aside_)
      .push_front(*residence);
}

void LeavingOrder::leave(Residence* residence) {
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
