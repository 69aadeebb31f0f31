// SPDX-License-Identifier: Apache-2.0
// A SequenceOrder is that of requests that touch the same sequences: each waits for all earlier
// ones that share a sequence with it.
//
// Threads: the driver.  Memory: one line per sequence that was ever used, until it is forgotten.
#ifndef KVM_ENGINE_RUN_SEQUENCE_ORDER_H_
#define KVM_ENGINE_RUN_SEQUENCE_ORDER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "kvm.h"

namespace kvm::engine {

class SequenceOrder {
 public:
  // A Ticket is a request's place in the lines of its sequences. It stays where it is between enter
  // and leave.
  class Ticket {
   public:
    bool may_run() const { return n_ahead_ == 0; }
    void* owner = nullptr;    // for the caller
    bool is_resting = false;  // likewise: does nothing with its sequences at the moment

   private:
    friend class SequenceOrder;
    struct Place {
      kvm_seq_id seq = 0;
      Ticket* ticket = nullptr;
      Place* before = nullptr;
      Place* next = nullptr;
    };
    std::vector<Place> places_;
    uint32_t n_ahead_ = 0;  // lines in which it is not the first
  };

  // Joins the line of every sequence, each named once. `ticket` is in no line. Throws
  // std::bad_alloc: it has joined none.
  void enter(Ticket* ticket, std::span<const kvm_seq_id> seqs);
  // Leaves every line, from wherever it stands. Appends to *ready the tickets that may run now.
  // Allocates nothing where *ready has room for all tickets.
  void leave(Ticket* ticket, std::vector<Ticket*>* ready);
  // Drops the line of a sequence that is gone, as soon as nobody stands in it.
  void forget(kvm_seq_id seq);
  // Whether whoever is first in the line of a sequence does something with it.
  bool is_busy(kvm_seq_id seq) const;
  size_t n_lines() const { return lines_.size(); }

 private:
  struct Line {
    Ticket::Place* first = nullptr;
    Ticket::Place* last = nullptr;
    bool is_gone = false;
  };
  std::unordered_map<kvm_seq_id, Line> lines_;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RUN_SEQUENCE_ORDER_H_
