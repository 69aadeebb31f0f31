// SPDX-License-Identifier: Apache-2.0
// Cuts a launch of decode attention into pieces of work that take all blocks the same time.
//
// Requests times heads times blocks of rows are items, laid end to end; their tokens are cut so
// that every block gets about the same number, where a piece counts overhead_tokens more than it
// has. A block may end one item and begin the next; an item that is cut leaves partial states,
// which the merge kernel makes one. There are at most items + blocks pieces, and those of a tail.
//
// Of the prefill kernel's items each is as long as what its rows see: the tokens up to its last
// row, but for those that the window or the policy hides from its first one. Where these items,
// whole, go to blocks about evenly, the longest one first to who has least (Graham, "Bounds on
// Multiprocessing Timing Anomalies", 1969), none is cut; where they do not, a few rows behind a
// long context among them, all blocks get the same as above.
//
// Of a long launch of the decode kernel the last part is a tail: pieces that no block is given, but
// that each takes when it is done with its own (tail.h), for SMs do not get the same bandwidth.
// Each item gives about the same part of its tokens, from its end. The first pieces of the tail are
// as long as what is left of it would be for each block, and so each is a little shorter than the
// one before (guided self-scheduling: Polychronopoulos and Kuck, 1987). ADR 0038 has the model that
// the constants are from.
//
// A plan depends on lengths and on where page lists begin in the page table, so one serves all
// layers of a step whose page tables have the same shape.
// Threads: pure.  Memory: the vectors of the result.  Errors: none; REQUIRES are the caller's.
#ifndef KVM_ATTENTION_CUDA_PLAN_H_
#define KVM_ATTENTION_CUDA_PLAN_H_

#include <cstdint>
#include <span>
#include <vector>

#include "attention/cuda/params.h"

namespace kvm::attention::gpu {

// The part of a long launch's tokens that is its tail is 1 / kTailPart; 0 = none has one.
inline constexpr uint32_t kTailPart = 16;
// A launch is long where each block has so many tokens.
inline constexpr uint32_t kTailLoadTokens = 16384;
// No piece of a tail is shorter, unless its item is.
inline constexpr uint32_t kLeastTailTokens = 512;
// LIMIT: pieces, for each block, that a tail cuts off items. None is shorter than a sixth of what a
// block would have of the tail, so ln 6 + 1 = 2.8 for each block are all that there are to cut.
inline constexpr uint32_t kTailCuts = 3;

// What a launch of n_work pieces, of which the last n_tail are its tail, begins with.
inline Tail tail_of(uint32_t n_work, uint32_t n_tail) { return {n_work - n_tail, n_tail, 0}; }

struct PlanOptions {
  uint32_t blocks = 1;       // that run at once: SMs times blocks per SM; at most kMaxMergeSlots
  uint32_t block_rows = 16;  // of the decode kernel's shape
  uint32_t group = 1;
  // A piece costs this much to begin and to end, in tokens.
  uint32_t overhead_tokens = 128;
  // No piece is shorter, unless its item is. A multiple of kCutTokens.
  uint32_t least_tokens = 256;
  // Reproducible results: items are cut every so many tokens (doubled until kMaxMergeSlots
  // suffice), whatever else is in the launch and however many blocks there are. 0 = for speed.
  // In plans of the prefill kernel, times the blocks of rows that the request has.
  uint32_t fixed_tokens = 0;
  // [page class] what rows see, for the prefill kernel. Empty: for the decode kernel, of which
  // every block of rows reads all tokens of its request.
  std::span<const Sight> sights;
  // As the constants above; without sights only. tail_part: 0, or 2 and more.
  uint32_t tail_part = kTailPart;
  uint32_t tail_load_tokens = kTailLoadTokens;
  uint32_t least_tail_tokens = kLeastTailTokens;
  // By so many tokens, at most, lists may turn out shorter (lengths_kernel.h): with sights, an item
  // has as many tokens as its rows see of whichever of these lists they see most of.
  uint32_t max_unsure = 0;
};

// The pieces that a plan's tail may cut off items, of a launch whose items have so many tokens. 0:
// it has no tail.
uint32_t most_tail_cuts(uint64_t n_tokens, const PlanOptions& options);

// No piece of the prefill kernel is shorter: its partial state has as many bytes as 128 tokens of
// bf16, and is written and read again.
inline constexpr uint32_t kLeastPrefillTokens = 512;

// Cuts lie at multiples of this many tokens of a request.
inline constexpr uint32_t kCutTokens = 64;

struct PlanCounts {
  uint32_t n_blocks = 0;  // that have work
  uint32_t n_work = 0;    // pieces, those at the front and those of the tail included
  uint32_t n_tail = 0;    // of the tail: the last ones
  uint32_t n_slots = 0;   // partial states
  uint32_t max_rows = 0;  // of any merge, at most block_rows: MergeParams::rows
};

// Adds the requests of the decode kernel for the last n_query tokens of a list of n_tokens: one for
// all of them, where all tokens are within the sight of each; else one for each row, whose window
// and policy go by its own position, also in a tree, where it may see tokens of later rows. A list
// that may turn out shorter by up to max_unsure tokens counts as whichever a row sees most of.
//   request: where the list lies, its log weights, its page class, q_token and n_query; tree_first
//            is kNoTree, or anything else where the query tokens are a tree.
void add_requests(const Request& request, uint32_t n_tokens, const Sight& sight,
                  uint32_t max_unsure, std::vector<Request>* to);

// Writes a plan where it is wanted. The first pieces of the blocks go to the front of `work`, which
// keeps n_first places for them (0: as many as there are blocks); those of blocks without work stay
// as they are. Where `work` is too short, n_work says how long it should be and pieces are missing.
// REQUIRES: requests refer to `classes`, and classes to `heads`; 1 <= n_query, and n_query <=
// n_tokens unless both n_query is 1 and n_tokens 0; 1 <= group <= kMaxMlaGroup; 1 <= blocks;
// n_first is 0 or at least `blocks`; 1 <= least_tail_tokens, and tail_part is not 1; with sights,
// requests are of all tokens of a list from the first one on, and have no tree.
PlanCounts plan_decode(std::span<const Request> requests, std::span<const PageClass> classes,
                       std::span<const uint16_t> heads, const PlanOptions& options,
                       uint32_t n_first, std::span<Work> work, std::vector<Merge>* merges);

struct DecodePlan {
  std::vector<Work> work;  // first the first pieces of the blocks, in order
  uint32_t n_blocks = 0;   // as of PlanCounts, here and below
  uint32_t n_tail = 0;
  std::vector<Merge> merges;
  uint32_t n_slots = 0;
  uint32_t max_rows = 0;

  Tail tail() const { return tail_of(static_cast<uint32_t>(work.size()), n_tail); }
};

// Likewise, into vectors.
DecodePlan plan_decode(std::span<const Request> requests, std::span<const PageClass> classes,
                       std::span<const uint16_t> heads, const PlanOptions& options);

// Tokens, overheads included, of the block that has most, without what it takes of the tail: what
// the plan keeps small.
uint64_t longest_block_tokens(const DecodePlan& plan, const PlanOptions& options);

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_PLAN_H_
