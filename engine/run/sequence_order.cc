// SPDX-License-Identifier: Apache-2.0
#include "engine/run/sequence_order.h"

#include "base/assert.h"

namespace kvm::engine {

void SequenceOrder::enter(Ticket* ticket, std::span<const kvm_seq_id> seqs) {
  KVM_ASSERT(ticket->places_.empty());
  ticket->n_ahead_ = 0;
  // What may fail comes first: an empty line that nobody joins is no harm.
  ticket->places_.reserve(seqs.size());
  for (const kvm_seq_id seq : seqs) {
    lines_[seq];
  }
  for (const kvm_seq_id seq : seqs) {
    ticket->places_.push_back({.seq = seq, .ticket = ticket});
  }
  for (Ticket::Place& place : ticket->places_) {
    Line& line = lines_[place.seq];
    if (line.first == nullptr) {
      line.first = &place;
    } else {
      line.last->next = &place;
      place.before = line.last;
      ++ticket->n_ahead_;
    }
    line.last = &place;
  }
}

void SequenceOrder::leave(Ticket* ticket, std::vector<Ticket*>* ready) {
  for (Ticket::Place& place : ticket->places_) {
    const auto found = lines_.find(place.seq);
    KVM_ASSERT(found != lines_.end());
    Line& line = found->second;
    if (line.first != &place) {
      KVM_ASSERT(place.before != nullptr && place.before->next == &place);
      place.before->next = place.next;
      (place.next == nullptr ? line.last : place.next->before) = place.before;
      continue;
    }
    line.first = place.next;
    if (line.first != nullptr) {
      line.first->before = nullptr;
    }
    if (line.first == nullptr) {
      line.last = nullptr;
      if (line.is_gone) {
        lines_.erase(found);
      }
      continue;
    }
    Ticket* next = line.first->ticket;
    KVM_ASSERT(next != ticket && next->n_ahead_ != 0);
    if (--next->n_ahead_ == 0) {
      ready->push_back(next);
    }
  }
  ticket->places_.clear();
  ticket->n_ahead_ = 0;
}

void SequenceOrder::forget(kvm_seq_id seq) {
  const auto line = lines_.find(seq);
  if (line == lines_.end()) {
    return;
  }
  if (line->second.first == nullptr) {
    lines_.erase(line);
  } else {
    line->second.is_gone = true;
  }
}

bool SequenceOrder::is_busy(kvm_seq_id seq) const {
  const auto line = lines_.find(seq);
  return line != lines_.end() && line->second.first != nullptr &&
         !line->second.first->ticket->is_resting;
}

}  // namespace kvm::engine
