// SPDX-License-Identifier: Apache-2.0
// Copies rows of tokens out of pages into the caller's tensors: what append_kernel.h has stored, as
// a CPU would read it. Rows of 16 bits are converted as codecs/convert.h says (nearest even, too
// large becomes infinite). An element of narrow ones is code * scale, which a float holds, or
// code * scale + zero, rounded to a float, and then rounded to the tensor's dtype.
//
// Tensors may lie in host memory that the device can address: what threads of a warp write lies
// side by side, so that it travels in whole lines. One block of kReadThreads per token.
#ifndef KVM_ATTENTION_CUDA_READ_KERNEL_H_
#define KVM_ATTENTION_CUDA_READ_KERNEL_H_

#include "attention/cuda/pages.h"
#include "attention/cuda/params.h"
#include "attention/cuda/primitives.h"

namespace kvm::attention::gpu {

inline constexpr uint32_t kReadThreads = 128;

// The 8 elements of a chunk of a stored row; params: of narrow rows, those of the row.
template <Element kElement>
KVM_GPU void load_stored(const uint8_t* row, const uint8_t* params, uint32_t chunk,
                         float (&to)[8]) {
  if constexpr (kIsScaled<kElement>) {
    const Word2 bytes = load_global<Word2>(row + chunk * 8);
    const float scale = float_from_bits(static_cast<uint32_t>(load_global<uint16_t>(params)) << 16);
    uint32_t halves[2][2];
    widen<kElement>(bytes.x, halves[0]);
    widen<kElement>(bytes.y, halves[1]);
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      to[i] = unpack<Element::kF16>(halves[i / 4][i / 2 % 2], i % 2) * scale;
    }
  } else if constexpr (kHasSteps<kElement>) {
    const uint32_t codes = load_global<uint32_t>(row + chunk * 4);
    const uint32_t steps = load_global<uint32_t>(params + chunk / 8 * 4);
    const float scale = float_from_bits(steps << 16);
    const float zero = float_from_bits(steps & 0xffff0000u);
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      to[i] = static_cast<float>(codes >> (i * 4) & 15) * scale + zero;
    }
  } else {
    const Word4 raw = load_global<Word4>(row + chunk * 16);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      to[i] = unpack<kElement>(words[i / 2], i % 2);
    }
  }
}

// Writes 8 elements of a tensor from `element` on.
KVM_GPU void store_floats(const RowTensor& tensor, int64_t element, const float (&x)[8]) {
  if (tensor.dtype == Dtype::kF32) {
    float* const to = static_cast<float*>(tensor.data) + element;
    store_global(to, Float4{x[0], x[1], x[2], x[3]});
    store_global(to + 4, Float4{x[4], x[5], x[6], x[7]});
    return;
  }
  uint32_t words[4];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    words[i] = tensor.dtype == Dtype::kBf16 ? pack<Element::kBf16>(x[2 * i], x[2 * i + 1])
                                            : pack<Element::kF16>(x[2 * i], x[2 * i + 1]);
  }
  store_global(static_cast<uint16_t*>(tensor.data) + element,
               Word4{words[0], words[1], words[2], words[3]});
}

// Does the work of one thread for the rows of K, or of V, of one token of one head class.
template <Element kElement>
KVM_GPU void read_rows(const ReadParams& p, const PageClass& of, bool is_v, uint32_t token,
                       uint32_t entry, uint32_t row) {
  const RowTensor& tensor = is_v ? p.v : p.k;
  const uint32_t row_chunks = tensor.dim / 8;
  const uint32_t row_bytes = p.dim * kElementBits<kElement> / 8;
  const uint32_t params_bytes = kHasSteps<kElement> ? p.dim / 64 * 4 : 2;
  const uint8_t* const rows =
      page_row(p.pool, of, entry, row, row_bytes) + (is_v ? of.v_offset_bytes : 0);
  const uint8_t* const params = page_of(p.pool, of, entry) + of.scales_offset_bytes +
                                (is_v ? of.v_scales_offset_bytes : 0) + row * params_bytes;
  for (uint32_t i = thread_id(); i < of.n_heads * row_chunks; i += kReadThreads) {
    const uint32_t head = i / row_chunks, chunk = i % row_chunks;
    const uint32_t kv_head = load_global<uint16_t>(p.pool.heads + of.heads_first + head);
    const uint8_t* const from = rows + static_cast<uint64_t>(head) * of.head_stride_bytes;
    const int64_t element = token * tensor.stride_token + kv_head * tensor.stride_head + chunk * 8;
    if constexpr (!kIsNarrow<kElement>) {
      if (tensor.dtype == (kElement == Element::kBf16 ? Dtype::kBf16 : Dtype::kF16)) {
        store_global(static_cast<uint16_t*>(tensor.data) + element,
                     load_global<Word4>(from + chunk * 16));
        continue;
      }
    }
    float x[8];
    load_stored<kElement>(from, params + head * p.pool.page_tokens.divisor * params_bytes, chunk,
                          x);
    store_floats(tensor, element, x);
  }
}

// Does the work of one thread of one block.
template <Element kElement>
KVM_GPU void read_thread(const ReadParams& p) {
  for (uint32_t token = block_id(); token < p.n_tokens; token += block_count()) {
    const uint32_t list = p.first + token;
    const uint32_t page = divide(p.pool.page_tokens, list);
    const uint32_t row = list - page * p.pool.page_tokens.divisor;
    for (uint32_t c = 0; c < p.n_classes; ++c) {
      const PageClass& of = p.pool.classes[c];
      const uint32_t entry = load_global<uint32_t>(p.page_table + p.tables[c] + page);
      read_rows<kElement>(p, of, false, token, entry, row);
      read_rows<kElement>(p, of, true, token, entry, row);
    }
  }
}

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_READ_KERNEL_H_
