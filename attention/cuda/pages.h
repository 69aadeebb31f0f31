// SPDX-License-Identifier: Apache-2.0
// From tokens to addresses, and from rows of a request to rows of tensors: what kernels share.
#ifndef KVM_ATTENTION_CUDA_PAGES_H_
#define KVM_ATTENTION_CUDA_PAGES_H_

#include "attention/cuda/params.h"
#include "attention/cuda/primitives.h"

namespace kvm::attention::gpu {

KVM_GPU uint32_t divide(const Divider& by, uint32_t n) {
  return static_cast<uint32_t>((static_cast<uint64_t>(2 * n) * by.multiplier) >> 32) >> by.shift;
}

// The list token that token `token` of a request is.
KVM_GPU uint32_t list_token(const Request& request, uint32_t token) {
  return token < request.n_first ? request.first + token
                                 : request.second + (token - request.n_first);
}

// The list token that query token `query` of a request is.
KVM_GPU uint32_t query_list_token(const Request& request, uint32_t query) {
  const uint32_t end = request.n_tokens > request.n_first
                           ? request.second + (request.n_tokens - request.n_first)
                           : request.first + request.n_tokens;
  return end - request.n_query + query;
}

// Says whether a row whose query token is list token `own` sees a list token.
KVM_GPU bool sees(const Sight& sight, uint32_t own, uint32_t list) {
  return list <= own && own - list < sight.window &&
         (list < sight.n_sinks || own - list < sight.n_recent);
}

// Returns the address of the layer's part of a page: its row of K of head 0, token 0.
KVM_GPU uint8_t* page_of(const PagePool& pool, const PageClass& of, uint32_t entry) {
  return pool.segments[entry >> kEntrySlotBits] +
         static_cast<uint64_t>(entry & kEntrySlotMask) * static_cast<uint32_t>(of.page_bytes) +
         of.layer_offset_bytes;
}

// Returns the address of the row of K of head 0 in row `row` of a page.
KVM_GPU uint8_t* page_row(const PagePool& pool, const PageClass& of, uint32_t entry, uint32_t row,
                          uint32_t row_bytes) {
  return page_of(pool, of, entry) + static_cast<uint64_t>(row) * row_bytes;
}

// A RowPlace says where row `row` of a request lies in the query and output tensors.
struct RowPlace {
  int64_t token;
  int64_t q_head;
};
KVM_GPU RowPlace row_place(uint32_t q_token, uint32_t kv_head, uint32_t group, uint32_t row) {
  return {static_cast<int64_t>(q_token) + row / group,
          static_cast<int64_t>(kv_head) * group + row % group};
}

// Writes 4 channels of a result.
KVM_GPU void store_result(const AttendTensors& tensors, RowPlace at, uint32_t channel,
                          Float4 value) {
  const int64_t element =
      at.token * tensors.o_stride_token + at.q_head * tensors.o_stride_head + channel;
  if (tensors.dtype_o == Dtype::kF32) {
    store_global(static_cast<float*>(tensors.o) + element, value);
    return;
  }
  Word2 packed;
  if (tensors.dtype_o == Dtype::kBf16) {
    packed = {pack<Element::kBf16>(value.x, value.y), pack<Element::kBf16>(value.z, value.w)};
  } else {
    packed = {pack<Element::kF16>(value.x, value.y), pack<Element::kF16>(value.z, value.w)};
  }
  store_global(static_cast<uint16_t*>(tensors.o) + element, packed);
}

KVM_GPU void store_lse(const AttendTensors& tensors, RowPlace at, float lse) {
  if (tensors.lse != nullptr) {
    store_global(
        tensors.lse + at.token * tensors.lse_stride_token + at.q_head * tensors.lse_stride_head,
        lse);
  }
}

// The logit without a value of a q head; -inf where there is none.
KVM_GPU float sink_of(const AttendTensors& tensors, RowPlace at) {
  return tensors.sink_logits != nullptr ? load_global<float>(tensors.sink_logits + at.q_head)
                                        : minus_infinity();
}

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_PAGES_H_
