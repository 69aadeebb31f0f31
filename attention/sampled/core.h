// SPDX-License-Identifier: Apache-2.0
// State that the parts of approximate attention share: the prepared state of a problem, its shards,
// and the layout of a shard's state. Internal to attention/sampled/.
#ifndef KVM_ATTENTION_SAMPLED_CORE_H_
#define KVM_ATTENTION_SAMPLED_CORE_H_

#include <span>

#include "attention/exact/layout.h"
#include "attention/sampled/approx.h"
#include "attention/sampled/exact_part.h"
#include "attention/sampled/gather.h"
#include "attention/sampled/partition.h"

namespace kvm::attention {

// Exact chunks divide a shard.
static_assert(kShardTokens % kStreamChunkTokens == 0 && kShardTokens % kBlockedChunkTokens == 0);

// A Use is stretches that the index is asked about with the same queries.
struct Use {
  uint32_t index_run = 0;  // of the first; hash tables: of all
  uint16_t variant = 0;
  uint32_t first_stretch = 0;
  uint32_t n_stretches = 0;
  size_t query_at = 0;  // in Prepared::queries
};

struct PreparedHead {
  uint32_t n_fixed = 0;         // ranges of F
  uint32_t answer_exactly = 0;  // the pilot has shown that sampling would not pay
  uint32_t n_probed = 0;        // keys that the pilot has read
  float log_c[kMaxApproxRows] = {};
  float reach = 1.0f;  // how far the first scan looks: sample.h
};

struct Prepared {
  PreparedHead* head;
  Stretch* stretches;    // [n_stretches]
  Use* uses;             // [n_uses]
  PositionRange* fixed;  // [head->n_fixed]: F
  std::byte* exact;      // prepare_queries'
  std::byte* queries;    // of the uses
};

// A Context is an approximate problem while it is computed: its input, its plan, its memory.
struct Context {
  const ApproxInput* input;
  const ApproxPlan* plan;
  const KernelTable* table;
  Problem problem;  // without what approximate attention does not give: column sums
  Plan exact;       // of `problem`
  Prepared prepared;
  uint32_t rows;

  const ApproxParams& params() const { return input->params; }
  std::span<const Stretch> stretches() const { return {prepared.stretches, plan->n_stretches}; }
  std::span<const Use> uses() const { return {prepared.uses, plan->n_uses}; }
  GatherContext gathering() const { return gather_context(problem, *table, prepared.exact); }
  // The problem with F alone visible.
  Problem fixed_problem() const;
};
Context make_context(const ApproxInput& input, const ApproxPlan& plan, const void* prepared);
size_t prepared_bytes(const ApproxInput& input, const Plan& exact, const Counts& counts);

// Shards are the stretches that hold a chunk which some row may see.
class Shards {
 public:
  explicit Shards(const Plan& exact);
  uint32_t count() const { return n_before_ + n_behind_; }
  // Its positions are [kShardTokens id, kShardTokens (id + 1)).
  uint64_t id(uint32_t shard) const {
    return shard < n_before_ ? first_ + shard : behind_ + (shard - n_before_);
  }

 private:
  uint64_t first_ = 0;
  uint64_t behind_ = 0;  // first one behind the gap
  uint32_t n_before_ = 0;
  uint32_t n_behind_ = 0;
};

// Calls body(use, stretch cut to the positions [begin, end)).
template <typename Body>
void for_stretches_in(const Context& c, uint64_t begin, uint64_t end, Body body) {
  for (const Use& use : c.uses()) {
    for (const Stretch& whole : c.stretches().subspan(use.first_stretch, use.n_stretches)) {
      const uint64_t from = whole.position > begin ? whole.position : begin;
      const uint64_t to = whole.end() < end ? whole.end() : end;
      if (from < to) {
        Stretch part = whole;
        part.position = from;
        part.n_blocks = static_cast<uint32_t>((to - from) / kPageTokens);
        body(use, part);
      }
    }
  }
}

// The blocks of a stretch, with the queries that they are asked with.
hash_index::SketchSpan span_of(const Context& c, const Use& use, const Stretch& stretch);

// Queries under the transform as dense rows of dim_k: out [rows][dim_k].
void dense_queries(const Context& c, uint32_t variant, float* out);

uint64_t row_bytes(const Problem& problem);  // K and V of one token, as the first run has them

}  // namespace kvm::attention

#endif  // KVM_ATTENTION_SAMPLED_CORE_H_
