// SPDX-License-Identifier: Apache-2.0
// From scores to logits: what the attention kernels share.
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

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_LOGITS_H_
