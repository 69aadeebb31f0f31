// SPDX-License-Identifier: Apache-2.0
// Which tokens of a list some query rows see, by a Sight: on the host, which plans with it, and in
// the lengths kernel, which finds it again for a list that turns out shorter.
#ifndef KVM_ATTENTION_CUDA_STRETCH_H_
#define KVM_ATTENTION_CUDA_STRETCH_H_

#include "attention/cuda/params.h"

#ifdef __CUDACC__
#define KVM_HOST_GPU __host__ __device__ __forceinline__
#else
#define KVM_HOST_GPU constexpr
#endif

namespace kvm::attention::gpu {

// A Stretch is the tokens of a request, as Request has them.
struct Stretch {
  uint32_t first = 0;
  uint32_t n_first = 0;
  uint32_t second = 0;
  uint32_t n_tokens = 0;
};

// Returns what is seen, of a list of `end` tokens, by rows of which the first one is token n_before
// - 1 of it: all that the window and the policy do not hide from that row, the tokens behind it
// among them. n_before is 0 where the list is empty. REQUIRES: n_before <= end.
KVM_HOST_GPU Stretch stretch_of(const Sight& sight, uint32_t n_before, uint32_t end) {
  const uint32_t reach = sight.window < sight.n_recent ? sight.window : sight.n_recent;
  const uint32_t sinks = n_before > sight.window ? n_before - sight.window : 0;
  const uint32_t rest = n_before > reach ? n_before - reach : 0;
  Stretch seen;
  if (sinks < sight.n_sinks && sight.n_sinks < rest) {
    seen.first = sinks;
    seen.n_first = sight.n_sinks - sinks;
    seen.second = rest;
    seen.n_tokens = seen.n_first + (end - rest);
  } else {
    seen.first = sinks < sight.n_sinks ? sinks : rest;
    seen.n_first = seen.n_tokens = end - seen.first;
  }
  return seen;
}

// Returns how many tokens of a stretch are list tokens before `list`.
KVM_HOST_GPU uint32_t tokens_before(const Stretch& seen, uint32_t list) {
  const uint32_t n_second = seen.n_tokens - seen.n_first;
  const uint32_t in_first = list > seen.first ? list - seen.first : 0;
  const uint32_t in_second = list > seen.second ? list - seen.second : 0;
  return (in_first < seen.n_first ? in_first : seen.n_first) +
         (in_second < n_second ? in_second : n_second);
}

// Gives a request its tokens, and the first one of its tree, if it has one, which begins at list
// token `tree_list`.
KVM_HOST_GPU void set_stretch(Request* request, const Stretch& seen, uint32_t tree_list) {
  request->first = seen.first;
  request->n_first = seen.n_first;
  request->second = seen.second;
  request->n_tokens = seen.n_tokens;
  if (request->tree_first != kNoTree) {
    request->tree_first = tokens_before(seen, tree_list);
    request->tree_list = tree_list;
  }
}

// Returns the tokens that a block of rows has nothing of, at the end of its request: those behind
// its last row's. None in the decode kernel, of which every block reads all tokens.
KVM_HOST_GPU uint32_t tokens_behind(uint32_t row_first, uint32_t n_query, uint32_t group,
                                    uint32_t block_rows) {
  const uint32_t n_rows = n_query * group;
  const uint32_t end = n_rows - row_first < block_rows ? n_rows : row_first + block_rows;
  return n_query - 1 - (end - 1) / group;
}

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_STRETCH_H_
