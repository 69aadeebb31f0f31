// SPDX-License-Identifier: Apache-2.0
// Exact attention on the CPU over stored keys and values: the C++ interface of the engine.
//
// A Problem is one request item for one kv head: all its query tokens times the q heads that share
// the kv head, against the runs of that head. It is solved in pieces that may run on any threads:
//
//   Plan plan = make_plan(problem);                          // which chunks, how much memory
//   prepare_queries(problem, plan, prepared);                // once, before any chunk
//   eval_chunks(problem, plan, prepared, rows, c, n, scratch, states + ...);   // any order
//   merge_chunks(problem, plan, rows, states);               // after all chunks of those rows
//   eval_column_sums(problem, plan, prepared, p, q, scratch);  // optional, after every merge
//
// Computes, per row (query token i, q head g) with t ranging over the visible tokens:
//   dot    = q'(transform of t) . k_t
//   logit  = dot * scale                     or  softcap * tanh(dot * scale / softcap)
//   logit += log_weight_t  [ + slope_g (x_t - p_i), with the positions of token and query ]
//   lse    = ln( sum_t e^logit_t  [ + e^sink_g ] )            o = sum_t e^(logit_t - lse) v_t
// A row that sees nothing gets o = 0 and lse = -inf (with a sink: lse = sink).
//
// Reduction. Positions are cut into chunks [c * chunk_tokens, (c + 1) * chunk_tokens). Each chunk
// gives one state per row; states merge in a binary tree fixed by absolute chunk index. Inside a
// chunk the order of operations depends on token positions, dtypes and transforms only.
// ENSURES: for one kernel table the bits of o, lse and the side outputs depend on the problem
// alone: not on threads, on the cut into eval_chunks calls, on how tokens are cut into runs, nor on
// addresses. Those of a row's o and lse depend on its query, on the tokens that it sees
// and on the path (Plan::blocked) alone: not on which rows, or how many, are in the problem.
// docs/kernels.md says how, and how the paths differ.
//
// Errors: none at run time. Callers validate what comes from clients; violated REQUIRES are
// programmer errors. Finite inputs never give NaN: a dot product that overflows counts as a very
// large finite logit. LIMIT: |v| <= 2^115; a larger value may give an infinite o.
//
// Numbers that are not finite. A row whose query has a NaN or an infinity, or that sees a key with
// one, is NaN in all of o and lse; one that sees a value with one is NaN in all of o. (A
// log weight of -inf hides none.) Such a row spoils no other: those have the bits that they have
// without it. Kernels clamp logits and only
// note that a number of a chunk was not finite; the chunk is then evaluated again for one query
// token after the other, which takes as many times as long.
// LIMIT: finite log weights lie in [-1e37, 1e37].
//
// Threads: all functions are pure in their arguments and may run concurrently on disjoint outputs.
// Memory: no function here allocates; scratch, states and prepared queries belong to the caller.
#ifndef KVM_ATTENTION_ATTENTION_H_
#define KVM_ATTENTION_ATTENTION_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "attention/kernel_table.h"
#include "base/dtype.h"
#include "base/kv_view.h"
#include "base/limits.h"

namespace kvm::attention {

inline constexpr uint32_t kMaxTransforms = 256;
// LIMIT: of Plan::chunk_tokens.
inline constexpr uint32_t kMaxChunkTokens = 8192;
// Alignment of scratch, states and prepared queries.
inline constexpr size_t kBufferAlign = 64;

// A Visibility says which tokens a query token sees. A token at position x is visible to query
// token i, which sits at p = query_position + i, when all of these hold:
//   - tree == null and causal:    x <= p
//   - tree != null:               x < query_position, or x = query_position + j with bit j of row i
//   - window != 0:                x > p - window, or x < sinks
//   - include is not empty:       x lies in one of its ranges
//   - x lies in no range of exclude
struct Visibility {
  uint64_t query_position = 0;  // of query token 0
  uint64_t window = 0;          // tokens, the query's own included; 0 = no window
  uint64_t sinks = 0;           // first positions that a window does not hide
  bool causal = true;
  // [n_query] rows of tree_stride_words 64-bit words; bit j of a row is bit j % 64 of word j / 64.
  const uint64_t* tree = nullptr;
  uint32_t tree_stride_words = 0;  // >= ceil(n_query / 64) where tree is set
  // Sorted, disjoint.
  std::span<const PositionRange> include;
  std::span<const PositionRange> exclude;
};

struct Problem {
  // Queries: element (i, g) starts at q + (i * q_stride_query + g * q_stride_head) elements; its
  // dim_k channels are dense. Rows are numbered row = i * group + g.
  const void* q = nullptr;
  Dtype dtype_q = Dtype::kBf16;
  uint64_t q_stride_query = 0;  // elements
  uint64_t q_stride_head = 0;   // elements
  uint32_t n_query = 0;         // >= 0
  uint32_t group = 0;           // q heads of this kv head, 1 to kMaxGroup
  uint32_t dim_k = 0;           // multiple of 8, 8 to kMaxHeadDim
  uint32_t dim_v = 0;           // multiple of 8, 8 to kMaxHeadDim
  // V is the first dim_v channels of K's rows, which are read once (MLA). Runs say of V what they
  // say of K. REQUIRES: dim_v <= dim_k.
  bool v_in_k = false;

  float scale = 1.0f;    // finite
  float softcap = 0.0f;  // 0 = none, else 1e-6 or more
  // Logit of a value-less sink per q head [group], or null.
  const float* sink_logits = nullptr;
  // ALiBi (Press et al., 2022, section 3): logits of q head g grow by slopes[g] for each position;
  // query token i is at visible.query_position + i, in a tree too. [group], magnitudes at most
  // kMaxSlope; or null.
  const float* slopes = nullptr;
  Visibility visible;

  KvRuns runs;
  uint32_t head = 0;  // which head of the pages; head 0 is where the runs point
  // Transforms that runs refer to by index; where empty, every run must say 0, which is then the
  // identity. At most kMaxTransforms.
  std::span<const QueryTransform> transforms;

  // true: weights meet values in fp32 everywhere. false: where V is bf16 or fp8, of samples also
  // int8, and the table dots bf16, weights are rounded to bf16 first (exact.h: the error bound).
  bool fp32_weights = false;

  // Rows of the request item that this problem is a part of, where the item is solved in several
  // problems; at least n_query * group. 0: the problem is the whole item. The path goes by it, so
  // that a row has the bits that it has where the item is one problem.
  uint32_t item_rows = 0;

  // Outputs: element (i, g) at o + (i * o_stride_query + g * o_stride_head) elements.
  void* o = nullptr;
  Dtype dtype_o = Dtype::kF32;
  uint64_t o_stride_query = 0;
  uint64_t o_stride_head = 0;
  float* lse = nullptr;  // natural log; (i, g) at i * lse_stride_query + g * lse_stride_head
  uint64_t lse_stride_query = 0;
  uint64_t lse_stride_head = 0;

  // Side output, optional.
  // Sum over rows of the softmax weight of each token, at column_sums[position - column_position].
  // Written by eval_column_sums only, and needed by then; the plan depends on whether it is wanted.
  bool wants_column_sums = false;
  float* column_sums = nullptr;
  uint64_t column_position = 0;
};

// A RowRange is a stretch of rows of a problem.
struct RowRange {
  uint32_t first = 0;
  uint32_t count = 0;
};

// A Plan says how a problem is cut. Derived from the problem alone.
struct Plan {
  const KernelTable* table = nullptr;
  uint32_t rows = 0;  // n_query * group
  // Many rows: keys are repacked per 64 tokens and meet tiles of rows. Chosen by the rows of the
  // whole item alone (Problem::item_rows).
  bool blocked = false;
  // Rows of a problem may be evaluated in separate ranges, for parallel work and to bound memory.
  // false: every range must be {0, rows}.
  bool rows_divisible = false;
  uint32_t chunk_tokens = 0;
  // Chunks that may hold a token visible to some row are numbered [first_chunk, first_chunk +
  // n_chunks); n_chunks = 0 is legal (nothing visible).
  uint64_t first_chunk = 0;
  uint32_t n_chunks = 0;
  // Chunks that a window hides behind the sinks have no number, so that a head that keeps both
  // costs the same at any position: from number gap_at on, chunk c is that of position
  // (c + gap_chunks) * chunk_tokens; below, and without a gap, of position c * chunk_tokens.
  uint64_t gap_at = UINT64_MAX;
  uint64_t gap_chunks = 0;  // 0 where column sums are asked for
  size_t prepared_bytes = 0;
  // Per concurrently running eval call; enough for any range of rows.
  size_t scratch_bytes = 0;

  // Absolute index of a chunk: the position of its first token / chunk_tokens.
  uint64_t absolute(uint64_t chunk) const { return chunk < gap_at ? chunk : chunk + gap_chunks; }
};

// `table` null: active_table(). Cost: O(log runs).
Plan make_plan(const Problem& problem, const KernelTable* table = nullptr);

// Bytes of one state: what one chunk writes for `row_count` rows. A multiple of kBufferAlign.
// Layout: o [row_count][dim_v] fp32 (not yet divided by l), m [row_count], l [row_count], padding.
size_t state_bytes(const Problem& problem, uint32_t row_count);

// Converts, transforms and lays out the queries of the problem into `prepared`
// (plan.prepared_bytes, aligned). Afterwards read-only, shared by all tasks of the problem.
void prepare_queries(const Problem& problem, const Plan& plan, void* prepared);

// Evaluates chunks [chunk, chunk + n) for `rows`; chunk c writes the state at
// states + (c - chunk) * state_bytes(problem, rows.count). A chunk without visible tokens writes
// the empty state. Longer stretches run at full memory speed; each call pays a cold start of about
// a microsecond.
// REQUIRES, here and below: every chunk is one of the plan's, [plan.first_chunk, plan.first_chunk +
// plan.n_chunks).
void eval_chunks(const Problem& problem, const Plan& plan, const void* prepared, RowRange rows,
                 uint64_t chunk, uint32_t n, void* scratch, void* states);

// A gang is up to kMaxGang heads of the same pages that are evaluated together. A GangMember is one
// of its problems, with what eval_chunks takes for it.
struct GangMember {
  const Problem* problem = nullptr;
  const void* prepared = nullptr;
  void* states = nullptr;  // of `chunk` first, as in eval_chunks
};
inline constexpr uint32_t kMaxGang = 8;

// eval_chunks over all rows of several heads of the same pages, page by page instead of head by
// head, so that memory is read in the order of its addresses: about a third faster where K and V
// come from memory.
// ENSURES: the bits of eval_chunks for each member.
// REQUIRES: 1 to kMaxGang members whose problems differ in head, queries, sink logits and outputs
// only; !plan.blocked, plan being that of any of them. scratch: members.size() *
// plan.scratch_bytes.
void eval_chunks(std::span<const GangMember> members, const Plan& plan, uint64_t chunk, uint32_t n,
                 void* scratch);

// The MergeTree is the binary tree over absolute chunk indices in which states of chunks are
// merged. It depends on the plan alone, and so do the bits of the result, whoever merges what and
// when. States are numbered from the plan's first chunk; that of a node is the one of its first
// chunk.
class MergeTree {
 public:
  struct Node {
    uint64_t begin = 0;  // absolute
    uint64_t size = 1;
  };
  struct Merge {
    uint32_t into = 0;
    uint32_t from = 0;     // no two merges have the same
    bool is_last = false;  // of its two nodes, the present one has the later chunks
  };

  explicit MergeTree(const Plan& plan);  // which outlives the tree
  Node leaf(uint32_t state) const;
  // The merge that `node` waits for, with *node becoming what it makes; nothing where it is whole.
  std::optional<Merge> next(Node* node) const;
  // The number behind that of the state of the node's last chunk.
  uint32_t states_end(const Node& node) const;

 private:
  uint64_t present(uint64_t chunk) const;
  uint32_t state(uint64_t chunk) const;

  const Plan* plan_;
  uint64_t end_;  // absolute, behind the last chunk
};

// Carries out one merge. states: of all plan.n_chunks chunks of `rows`, first chunk first,
// state_bytes apart. REQUIRES: the states of both nodes are complete.
void merge_states(const Problem& problem, RowRange rows, const MergeTree::Merge& merge,
                  void* states);

// Writes o and lse of `rows` after the last merge, whose state is the first of `states`.
void write_result(const Problem& problem, const Plan& plan, RowRange rows, void* states);

// Says whether the answer written for a row is a number: where a query or a token was not finite,
// every element of o is NaN.
bool answer_is_finite(const Problem& problem, uint32_t row);

// All merges, and then the result.
void merge_chunks(const Problem& problem, const Plan& plan, RowRange rows, void* states);

// Second pass for statistics: fills column_sums for the present tokens at positions [begin, end)
// that lie in chunks of the plan (0 where no row sees them); writes nothing else. The bits do not
// depend on how positions are cut. Takes about as long as eval_chunks does without the values: the
// same products and exponentials, by the same kernels.
// REQUIRES: column_sums and lse set; merge_chunks has run for all rows; begin and end are multiples
// of kPageTokens.
void eval_column_sums(const Problem& problem, const Plan& plan, const void* prepared,
                      uint64_t begin, uint64_t end, void* scratch);

}  // namespace kvm::attention

#endif  // KVM_ATTENTION_ATTENTION_H_
