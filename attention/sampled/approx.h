// SPDX-License-Identifier: Apache-2.0
// Approximate attention over stored keys and values: TopK, sampled and verified, with an error bar.
//
// A problem is one request item for one kv head (attention.h), with at most kMaxApproxRows rows
// (query tokens times group), dims of at most kMaxIndexedDim, values of its own and no slopes. Its
// visible tokens fall into the exact set F and the rest R. R are
// the blocks of 64 positions that an index covers, that all rows see whole, that are stored whole
// and without log weights, and that hold none of the first n_sinks and last n_recent positions; F
// is everything else. F is evaluated exactly; of R some rows are read. Modes:
//
//   TopK       the `budget` keys of R with the largest score, by exact scores, by sketch scores
//              (four times as many re-ranked exactly), or the LSH candidates. Biased; no bar. Ties:
//              the lower position wins.
//   Sampled    Horvitz-Thompson over a sketch's proposal (p ~ w |v|, one sample for all rows,
//              Poisson, permanent random numbers) with the scalar control of the denominator, about
//              `budget` rows of each head or as many as eps needs (where that is more than exact
//              costs: exact); or MagicPIG's estimator over LSH candidates (softmax over s - ln u;
//              no bar, no budget).
//   Verified   Sampled, smaller at first; then as long as a bar exceeds eps the sample grows
//              (nested), each row's c by what its own bar needs, until all meet it or exact is
//              cheaper; then exact.
//
//     D_hat = D_F + sum_S w_i / p_i     N_hat = N_F + sum_S (w_i / p_i) v_i      o = N_hat / D_hat
//
// The bar is kappa times the larger of the plug-in sigma and one from the sketch's measured noise;
// kappa follows from how many directions the error has, and grows with that noise and where few
// keys were drawn; never below 2e-3 |o|.
// docs/approximate_attention.md explains it; models/house/estimators.py is the reference and names
// the sources.
//
// A problem is solved in pieces that may run on any threads:
//
//   ApproxPlan plan = plan_approx(input);
//   prepare_approx(input, plan, prepared, scratch);            // once: queries, thresholds
//   eval_shard(input, plan, prepared, s, scratch, states + s * plan.state_bytes);   // any order
//   if (!finish_approx(input, plan, prepared, scratch, states, &report)) // after all
//     ...                                                      // solve the problem exactly
//
// Where rows have to be brought from elsewhere, find_blocks says which ones a shard will read, and
// they need be there for its eval_shard alone (ApproxInput::is_in_parts).
//
// Shards are fixed runs of positions, so the bits depend on the problem, the index, the params and
// the kernel tables alone, and where the answer is exact they are those of attention.h.
// Side outputs: column_sums is not written.
#ifndef KVM_ATTENTION_SAMPLED_APPROX_H_
#define KVM_ATTENTION_SAMPLED_APPROX_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "attention/attention.h"
#include "hash_index/lsh/lsh.h"
#include "hash_index/sketch/sketch.h"

namespace kvm::attention {

inline constexpr uint32_t kMaxApproxRows = hash_index::kMaxRows;
// A shard is the visible ones of so many positions, from a multiple of that on.
inline constexpr uint64_t kShardTokens = 32768;

// A SketchedRun is blocks of the index of one kv head, ascending and disjoint in position. Blocks
// whose tokens are not all visible to every row, or not all stored in the problem's runs, are left
// out by plan_approx, not by the caller.
struct SketchedRun {
  uint64_t position = 0;  // multiple of 64
  uint32_t n_blocks = 0;
  const hash_index::Frame* frame = nullptr;
  const std::byte* blocks = nullptr;
};
struct HashedRun {
  uint64_t position = 0;
  uint32_t n_keys = 0;  // of the tables; those beyond the stored tokens are cut off
  const void* tables = nullptr;
  const float* center = nullptr;  // [dim_k]
};
struct HeadIndex {
  std::span<const SketchedRun> sketches;
  std::span<const HashedRun> hashes;
  const hash_index::Planes* planes = nullptr;
};

// Balanced is Sampled with more keys where errors are (budget, below). Without a bar Verified has
// nothing to verify, nor Balanced anything to go by: with kLsh they are exact, and Sampled.
enum class ApproxMode : uint8_t { kTopK, kSampled, kVerified, kBalanced };
enum class Proposal : uint8_t { kSketch, kLsh };

inline constexpr double kMostBudgets = 16;

struct ApproxParams {
  ApproxMode mode = ApproxMode::kSampled;
  Proposal proposal = Proposal::kSketch;
  float eps = 0.03f;  // relative error of o, > 0; not Sampled with a budget, not TopK
  // The accepted probability, for each row over seeds, that the error exceeds the reported bar. It
  // holds for Verified, too, whose bar may have met eps after growth only. Measured (kvm-bench
  // coverage), not proved.
  float delta = 0.01f;
  // How many keys of R to take for each row of the problem; Verified starts with so many. 0: as
  // many as eps asks for; TopK answers exactly then, or with hash tables takes all candidates.
  // Balanced, > 0: of rows whose bar is at most eps then; others take bar / eps times as many, up
  // to kMostBudgets. Keys in proportion to the deviation are of all ways to hand out so many the
  // one with the least sum of squared errors (Neyman 1934), as far as bars tell deviations. Exact
  // where half of the keys or more would be read.
  uint64_t budget = 0;
  uint64_t seed = 0;  // already mixed with layer and head
  uint64_t n_sinks = 4;
  uint64_t n_recent = 64;
  // Where eps decides: beyond this share of the keys exact is taken. 0: by what rows cost to
  // gather and to stream, and at once where a sample of usual size would not pay
  // (sampled/pilot.h).
  float max_read_fraction = 0;

  bool operator==(const ApproxParams&) const = default;
};

// An ApproxReport says what was done, for all rows together unless said otherwise.
struct ApproxReport {
  uint64_t keys_present = 0;
  uint64_t keys_read = 0;   // F included, unique over rows
  uint64_t bytes_read = 0;  // K and V rows, and the index scanned
  uint32_t n_exact = 0;     // rows that were answered exactly
  uint32_t n_grown = 0;     // how often the sample grew
  // [rows]: estimated relative error of o, absolute error of lse; NaN: no bar; 0: exact.
  float err_o[kMaxApproxRows] = {};
  float err_lse[kMaxApproxRows] = {};
  float noise[kMaxApproxRows] = {};  // sd of the sketch's logits over the sample, nats; NaN: none
};

// An ApproxInput is a problem with what is approximated of it. All four are alive and unchanged
// from plan to finish.
struct ApproxInput {
  const Problem* problem = nullptr;
  HeadIndex index;
  ApproxParams params;
  const KernelTable* table = nullptr;  // null: active_table()
  // Whether stored rows are where the problem's runs say only while their shard is evaluated, and
  // of these only what find_blocks says. REQUIRES, where it is so: may_be_in_parts(params). The
  // answer has the same bits.
  bool is_in_parts = false;
};

// An ApproxPlan says how the problem is cut. Derived from the input alone.
struct ApproxPlan {
  // Nothing of R would be skipped (no index, few keys, more than kMaxApproxRows rows, or a budget
  // that covers all): the caller solves the problem exactly (make_plan), and the other numbers are
  // 0.
  bool exact = false;
  uint32_t rows = 0;
  uint32_t n_shards = 0;
  uint64_t n_keys_present = 0;  // stored and seen by some row
  uint64_t n_keys_indexed = 0;  // of R
  uint32_t n_stretches = 0;     // of R; inner use
  uint32_t n_uses = 0;          // inner use
  size_t prepared_bytes = 0;
  size_t scratch_bytes = 0;  // of any one call below
  size_t state_bytes = 0;    // of one shard
  uint64_t cost_bytes = 0;   // what schedulers weigh: bytes of K, V and index that will be read

  bool operator==(const ApproxPlan&) const = default;
};

ApproxPlan plan_approx(const ApproxInput& input);
// Says whether what has to be read follows from the index, shard by shard: Sampled with a budget,
// of a sketch's proposal. Other modes look at rows before they know.
bool may_be_in_parts(const ApproxParams& params);
// Says whether the plan of `a` is that of `b`, too, whose problem differs in its queries, its
// outputs and its head alone: parameters but for the seed, and the index as it is cut into runs and
// frames, are the same. Costs little where planning walks through all pages.
bool same_plan(const ApproxInput& a, const ApproxInput& b);

// REQUIRES here and below: !plan.exact; buffers aligned to kBufferAlign. None of them allocates.
void prepare_approx(const ApproxInput& input, const ApproxPlan& plan, void* prepared,
                    void* scratch);
// The positions of a shard begin at kShardTokens times this.
uint64_t shard_number(const ApproxInput& input, uint32_t shard);
// Sets, of the kShardTokens / 64 blocks of a shard, the bits of those that eval_shard will read,
// 64 to a word, and leaves the others. Returns false where the whole problem is to be answered
// exactly. `state` is the shard's, before eval_shard. REQUIRES: may_be_in_parts(params).
bool find_blocks(const ApproxInput& input, const ApproxPlan& plan, const void* prepared,
                 uint32_t shard, void* scratch, void* state, uint64_t* blocks);
void eval_shard(const ApproxInput& input, const ApproxPlan& plan, const void* prepared,
                uint32_t shard, void* scratch, void* state);
// Merges the shards with F, lets the sample grow where it must, and writes o and lse of the
// problem. Returns false, and writes neither, where the whole problem has to be answered exactly:
// more would have to be read than pays, or a number that was read is not finite. The caller then
// solves it (make_plan); the report says what has been read once that is done.
[[nodiscard]] bool finish_approx(const ApproxInput& input, const ApproxPlan& plan,
                                 const void* prepared, void* scratch, void* states,
                                 ApproxReport* report);

// What a problem reports that its caller solves exactly without finish_approx.
void report_left(const ApproxInput& input, const ApproxPlan& plan, ApproxReport* report);

}  // namespace kvm::attention

#endif  // KVM_ATTENTION_SAMPLED_APPROX_H_
