// SPDX-License-Identifier: Apache-2.0
// VisibleKeys counts the stored tokens that at least one row of some problems sees, for statistics
// and cost estimates.
#ifndef KVM_ENGINE_ATTEND_VISIBLE_KEYS_H_
#define KVM_ENGINE_ATTEND_VISIBLE_KEYS_H_

#include <cstdint>
#include <vector>

#include "attention/attention.h"
#include "base/kv_view.h"

namespace kvm::engine {

// Reuses its memory from call to call. One thread at a time.
class VisibleKeys {
 public:
  void clear() { all_.clear(); }
  // Adds what the rows of a problem see. O(ranges).
  void add(const attention::Visibility& visible, uint32_t n_query);
  // Tokens of the runs that anything added since clear() sees. Exact. O(runs + what was added).
  uint64_t count(KvRuns runs);

 private:
  void see(uint64_t begin, uint64_t end);
  void see_tree(const attention::Visibility& visible, uint32_t n_query);
  void keep(std::span<const PositionRange> ranges);
  void remove(std::span<const PositionRange> ranges);

  // These are of one problem: sorted, disjoint, not empty.
  std::vector<PositionRange> seen_;
  std::vector<PositionRange> before_;
  // These are of all problems together, in any order.
  std::vector<PositionRange> all_;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_ATTEND_VISIBLE_KEYS_H_
