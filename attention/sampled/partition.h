// SPDX-License-Identifier: Apache-2.0
// The partition says which tokens of a problem are approximated: R, in whole blocks of 64; all
// other visible tokens are F. A block belongs to R where an index covers it, every row sees all of
// it, all of it is stored with one query transform and without log weights, and it lies behind the
// sinks and before the recent tokens that params keep exact.
#ifndef KVM_ATTENTION_SAMPLED_PARTITION_H_
#define KVM_ATTENTION_SAMPLED_PARTITION_H_

#include <span>

#include "attention/exact/visibility.h"
#include "attention/sampled/approx.h"

namespace kvm::attention {

// A Stretch is consecutive blocks of R that one run of the index covers and one transform applies
// to.
struct Stretch {
  uint64_t position = 0;
  uint32_t n_blocks = 0;
  uint32_t index_run = 0;  // of HeadIndex::sketches or hashes
  uint16_t variant = 0;    // transform

  uint64_t end() const { return position + uint64_t{n_blocks} * kPageTokens; }
};

// Says whether the index is asked about both with the same queries: several runs may share a frame.
bool same_use(const ApproxInput& input, const Stretch& a, const Stretch& b);
// Says whether the problems, where they see the same keys, have stretches and uses at the same
// places, and the uses take as much memory.
bool same_index_runs(const ApproxInput& a, const ApproxInput& b);

struct Counts {
  uint32_t n_stretches = 0;
  uint32_t n_uses = 0;     // maximal sequences of stretches of the same use
  uint64_t n_keys = 0;     // of R
  uint64_t n_present = 0;  // keys stored and seen by some row, F and R
  size_t query_bytes = 0;  // what use_query_bytes gives, over all uses, each aligned
};

// Bytes of the queries that the index run of a stretch is asked with.
size_t use_query_bytes(const ApproxInput& input, const Stretch& stretch);

// Cost: O(runs).
Counts count_stretches(const ApproxInput& input);
void fill_stretches(const ApproxInput& input, std::span<Stretch> stretches);

// F as ranges of positions, with the problem's own include in them: `out` has room for
// max_fixed_ranges. Returns how many.
size_t max_fixed_ranges(const ApproxInput& input, uint32_t n_stretches);
size_t fill_fixed_ranges(const ApproxInput& input, std::span<const Stretch> stretches,
                         PositionRange* out);

}  // namespace kvm::attention

#endif  // KVM_ATTENTION_SAMPLED_PARTITION_H_
