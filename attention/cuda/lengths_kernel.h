// SPDX-License-Identifier: Apache-2.0
// Brings a plan to lengths that only the device knows: the host has planned for sequences that may
// have up to n_unsure tokens fewer. What becomes of the plan lies beside it, so one plan may be
// brought to other lengths again. ADR 0036 has the reasons.
//
// Of a sequence with d tokens fewer the new tokens lie d positions lower, and so do its query
// tokens; what each sees is found again by its Sight. Pieces are cut where the plan cut them, at
// the same tokens of their requests, and end where there are no more. A request never has more
// tokens than its pieces reach to, for it was planned for the list of which it has most. Where its
// first piece has all tokens, that one writes the result, and its merge gets no rows: it is what a
// plan for so many tokens would be, but for pieces without tokens.
//
// A thread has a piece, a merge and a token at a time. A block may begin anywhere: nothing is
// shared.
#ifndef KVM_ATTENTION_CUDA_LENGTHS_KERNEL_H_
#define KVM_ATTENTION_CUDA_LENGTHS_KERNEL_H_

#include "attention/cuda/params.h"
#include "attention/cuda/primitives.h"
#include "attention/cuda/stretch.h"

namespace kvm::attention::gpu {

inline constexpr uint32_t kLengthsThreads = 128;

// The item that has a list whose first entry in the page table, or any other, is `entry`.
KVM_GPU uint32_t item_of(const LengthsParams& p, uint32_t entry) {
  return entry / p.max_pages % p.max_items;
}

// Tokens that a sequence has fewer than the plan counts on.
KVM_GPU uint32_t missing_tokens(const LengthsParams& p, uint32_t item) {
  if (p.lengths == nullptr) {
    return 0;
  }
  const uint32_t most = load_global<uint32_t>(&p.items[item].n_before);
  const uint32_t unsure = load_global<uint32_t>(&p.items[item].n_unsure);
  const uint32_t length = load_global<uint32_t>(p.lengths + item);
  const uint32_t missing = length < most ? most - length : 0;
  return missing < unsure ? missing : unsure;
}

// Gives the request of a piece its tokens; returns how many of them the piece's rows have.
// REQUIRES: the piece has query tokens.
KVM_GPU uint32_t bring_request(const LengthsParams& p, const LengthsKind& kind, Work* work) {
  Request& request = work->request;
  const uint32_t item = item_of(p, static_cast<uint32_t>(request.table));
  const uint32_t n_query = load_global<uint32_t>(&p.items[item].n_query);
  const uint32_t query_row = load_global<uint32_t>(&p.items[item].query_row);
  const uint32_t n_tokens = load_global<uint32_t>(&p.items[item].n_before) +
                            load_global<uint32_t>(&p.items[item].n_append) -
                            missing_tokens(p, item);
  // The prefill kernel's blocks of rows have requests of their own; others go by the request.
  const bool prefill = p.block_rows == kPrefillRows;
  const uint32_t row = request.q_token - query_row + (prefill ? work->row_first / kind.group : 0);
  const uint32_t tree_list = n_tokens - n_query;
  const uint32_t n_before = tree_list + row + 1;
  const bool whole = request.n_query == n_query || request.tree_first != kNoTree;
  const Stretch seen =
      stretch_of(kind.sights[request.page_class], n_before, whole ? n_tokens : n_before);
  set_stretch(&request, seen, tree_list);
  const uint32_t behind =
      prefill ? tokens_behind(work->row_first, n_query, kind.group, p.block_rows) : 0;
  return seen.n_tokens - (behind < seen.n_tokens ? behind : seen.n_tokens);
}

// A piece that begins behind the last token has none, and makes a state that counts nothing.
KVM_GPU void bring_piece(const LengthsParams& p, const LengthsKind& kind, uint32_t piece) {
  Work work = kind.planned_work[piece];
  if (work.request.n_query != 0) {
    const uint32_t n_tokens = bring_request(p, kind, &work);
    if (work.begin == 0 && work.end >= n_tokens) {
      work.slot = -1;
    }
    work.end = work.end < n_tokens ? work.end : n_tokens;
  }
  kind.work[piece] = work;
}

KVM_GPU void bring_merge(const LengthsParams& p, const LengthsKind& kind, uint32_t index) {
  Merge merge = kind.planned_merges[index];
  Work first = kind.planned_work[merge.work];
  if (first.end >= bring_request(p, kind, &first)) {
    merge.n_query = merge.row_first = 0;  // no row is left of it
  }
  kind.merges[index] = merge;
}

KVM_GPU void bring_token(const LengthsParams& p, const LengthsKind& kind, uint32_t index) {
  AppendToken token = kind.planned_tokens[index];
  const uint32_t page = token.table % p.max_pages;
  const uint32_t position =
      page * p.page_tokens + token.row - missing_tokens(p, item_of(p, token.table));
  token.table += position / p.page_tokens - page;
  token.row = position % p.page_tokens;
  kind.tokens[index] = token;
}

// Does the work of one thread of one block.
KVM_GPU void lengths_thread(const LengthsParams& p) {
  const uint32_t first = block_id() * kLengthsThreads + thread_id();
  const uint32_t step = block_count() * kLengthsThreads;
  for (uint32_t k = 0; k < p.n_kinds; ++k) {
    const LengthsKind& kind = p.kinds[k];
    const uint32_t n_work = load_global<uint32_t>(kind.n_work);
    for (uint32_t i = first; i < n_work; i += step) {
      bring_piece(p, kind, i);
    }
    const uint32_t n_merges = load_global<uint32_t>(kind.n_merges);
    for (uint32_t i = first; i < n_merges; i += step) {
      bring_merge(p, kind, i);
    }
    const uint32_t n_tokens = kind.n_tokens != nullptr ? load_global<uint32_t>(kind.n_tokens) : 0;
    for (uint32_t i = first; i < n_tokens; i += step) {
      bring_token(p, kind, i);
    }
  }
}

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_LENGTHS_KERNEL_H_
