// SPDX-License-Identifier: Apache-2.0
// From scores to logits: soft caps, log weights, and which tokens a row sees. What the attention
// kernels share.
#ifndef KVM_ATTENTION_CUDA_LOGITS_H_
#define KVM_ATTENTION_CUDA_LOGITS_H_

#include "attention/cuda/pages.h"
#include "attention/cuda/params.h"
#include "attention/cuda/primitives.h"

namespace kvm::attention::gpu {

// A logit in units of log 2, soft-capped. Its error is a few ulp of the cap.
KVM_GPU float soft_cap(const DecodeParams& p, float score) {
  const float decay = exp2_fast(-fabsf(score * p.softcap_rate));
  const float size = p.softcap_log2 * (1.0f - decay) * reciprocal_fast(1.0f + decay);
  return score < 0.0f ? -size : size;
}

// Where the log weight of token `token` of the request lies. REQUIRES: the request has log weights.
KVM_GPU const float* log_weight_at(const DecodeParams& p, const Work& work, uint32_t token) {
  const Request& request = work.request;
  const int64_t at = request.log_weights +
                     static_cast<int64_t>(work.kv_head) * request.log_weight_stride +
                     list_token(request, token);
  return p.log_weights + at;
}

// All rows see the tokens of the piece below this one.
KVM_GPU uint32_t seen_by_all(const Work& work) {
  const Request& request = work.request;
  const uint32_t n_before = request.n_tokens - request.n_query + 1;
  const uint32_t least = n_before < request.tree_first ? n_before : request.tree_first;
  return least < work.end ? least : work.end;
}

// VisibleTokens says which tokens of a piece one row sees.
struct VisibleTokens {
  uint32_t limit;  // and below it
  bool tree;
  uint64_t seen;  // the row's word of the tree

  // row: of the request; it may be behind the last.
  KVM_GPU VisibleTokens(const DecodeParams& p, const Work& work, uint32_t row) {
    const Request& request = work.request;
    const uint32_t n_before = request.n_tokens - request.n_query + 1;
    tree = request.tree_first != kNoTree;
    const uint32_t query = row / p.tensors.group;
    seen = tree && query < request.n_query
               ? load_global<uint64_t>(p.tree_mask + request.q_token + query)
               : 0;
    limit = tree || n_before + query > work.end ? work.end : n_before + query;
  }
  KVM_GPU bool has(const Request& request, uint32_t token) const {
    bool sees = token < limit;
    if (tree && token >= request.tree_first) {
      sees = sees && (seen >> (list_token(request, token) - request.tree_list) % 64 & 1) != 0;
    }
    return sees;
  }
};

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_LOGITS_H_
