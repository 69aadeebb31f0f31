// SPDX-License-Identifier: Apache-2.0
// Priorities: how much parts of a sequence are worth in memory (kvm_seq_set_priority). A part is
// whole pages; parts do not overlap, and what lies in none has KVM_PRIORITY_DEFAULT, as a part has
// when its time has passed.
//
// Threads: one at a time.
#ifndef KVM_ENGINE_STORE_PRIORITIES_H_
#define KVM_ENGINE_STORE_PRIORITIES_H_

#include <cstdint>
#include <span>
#include <vector>

#include "base/limits.h"
#include "base/request.h"
#include "base/status.h"

namespace kvm::engine {

class Priorities {
 public:
  // Of pages [begin, end).
  struct Part {
    uint64_t begin;
    uint64_t end;
    uint64_t until_ns;
    uint32_t priority;
  };
  // What pages from one on have, up to `end`, which does not have it.
  struct Stretch {
    uint32_t priority;
    uint64_t end;
  };

  // In place of what was said of the range. REQUIRES: range.begin < range.end.
  // Fails: LIMIT (parts); nothing has changed then. Throws std::bad_alloc, likewise.
  Status set(const PriorityRange& range, uint64_t now_ns);
  Stretch at(uint64_t page, uint64_t now_ns) const;
  // Those of the first n_tokens. Throws std::bad_alloc.
  Priorities first(uint64_t n_tokens, uint64_t now_ns) const;
  // Whether a part has this one, and whether the time of one has passed.
  bool has(uint32_t priority) const;
  bool has_expired(uint64_t now_ns) const;
  // Forgets those.
  void expire(uint64_t now_ns);

  bool is_empty() const { return parts_.empty(); }
  std::span<const Part> parts() const { return parts_; }  // in order

 private:
  std::vector<Part> parts_;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_PRIORITIES_H_
