// SPDX-License-Identifier: Apache-2.0
// Copies rows of new tokens from the caller's tensors into pages, converting them: nearest even,
// too large becomes infinite, as codecs/convert.h does. One block of kAppendThreads per token and
// head class; the pages must be nobody else's to read yet.
#ifndef KVM_ATTENTION_CUDA_APPEND_KERNEL_H_
#define KVM_ATTENTION_CUDA_APPEND_KERNEL_H_

#include "attention/cuda/pages.h"
#include "attention/cuda/params.h"
#include "attention/cuda/primitives.h"

namespace kvm::attention::gpu {

inline constexpr uint32_t kAppendThreads = 128;

// 8 elements of a tensor from `element` on, as elements of the pages.
template <Element kElement>
KVM_GPU Word4 load_converted(const void* tensor, Dtype dtype, int64_t element) {
  const bool same = dtype == (kElement == Element::kBf16 ? Dtype::kBf16 : Dtype::kF16);
  if (dtype != Dtype::kF32) {
    const Word4 raw = load_global<Word4>(static_cast<const uint16_t*>(tensor) + element);
    if (same) {
      return raw;
    }
    constexpr Element kOther = kElement == Element::kBf16 ? Element::kF16 : Element::kBf16;
    return {pack<kElement>(unpack<kOther>(raw.x, 0), unpack<kOther>(raw.x, 1)),
            pack<kElement>(unpack<kOther>(raw.y, 0), unpack<kOther>(raw.y, 1)),
            pack<kElement>(unpack<kOther>(raw.z, 0), unpack<kOther>(raw.z, 1)),
            pack<kElement>(unpack<kOther>(raw.w, 0), unpack<kOther>(raw.w, 1))};
  }
  const float* from = static_cast<const float*>(tensor) + element;
  const Float4 low = load_global<Float4>(from), high = load_global<Float4>(from + 4);
  return {pack<kElement>(low.x, low.y), pack<kElement>(low.z, low.w),
          pack<kElement>(high.x, high.y), pack<kElement>(high.z, high.w)};
}

// What one thread of one block does.
template <Element kElement>
KVM_GPU void append_thread(const AppendParams& p) {
  const AppendToken token = p.tokens[block_id()];
  if (token.table == kNoToken) {
    return;
  }
  const PageClass& of = p.pool.classes[token.page_class];
  const uint32_t row_chunks = p.dim / 8;
  const uint32_t entry = load_global<uint32_t>(p.page_table + token.table);
  uint8_t* row = page_row(p.pool, of, entry, token.row, p.dim * 2);
  for (uint32_t i = thread_id(); i < of.n_heads * row_chunks; i += kAppendThreads) {
    const uint32_t head = i / row_chunks, chunk = i % row_chunks;
    const uint32_t kv_head = load_global<uint16_t>(p.pool.heads + of.heads_first + head);
    const int64_t element = token.source * p.stride_token + kv_head * p.stride_head + chunk * 8;
    uint8_t* to = row + static_cast<uint64_t>(head) * of.head_stride_bytes + chunk * 16;
    store_global(to, load_converted<kElement>(p.k, p.dtype, element));
    store_global(to + of.v_offset_bytes, load_converted<kElement>(p.v, p.dtype, element));
  }
}

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_APPEND_KERNEL_H_
