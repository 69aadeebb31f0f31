// SPDX-License-Identifier: Apache-2.0
// Copies rows of new tokens from the caller's tensors into pages, converting them, to the bytes
// that a CPU would write: as codecs/convert.h says of 16-bit rows (nearest even, too large becomes
// infinite), codecs/int8.h and codecs/float8.h of rows of bytes, and codecs/low_bits.h (int4) of
// rows of 4 bits. Where the latter encodes no row, for an element is not finite or above 2^126,
// here its group of 64 channels has no number: both steps are NaN, the codes 0. One block of
// kAppendThreads per token and head class; the pages must be nobody else's to read yet.
#ifndef KVM_ATTENTION_CUDA_APPEND_KERNEL_H_
#define KVM_ATTENTION_CUDA_APPEND_KERNEL_H_

#include "attention/cuda/pages.h"
#include "attention/cuda/params.h"
#include "attention/cuda/primitives.h"

namespace kvm::attention::gpu {

inline constexpr uint32_t kAppendThreads = 128;

// 8 elements of a tensor from `element` on.
KVM_GPU void load_floats(const void* tensor, Dtype dtype, int64_t element, float (&to)[8]) {
  if (dtype == Dtype::kF32) {
    const float* from = static_cast<const float*>(tensor) + element;
    const Float4 low = load_global<Float4>(from), high = load_global<Float4>(from + 4);
    to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
    to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
    return;
  }
  const Word4 raw = load_global<Word4>(static_cast<const uint16_t*>(tensor) + element);
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    to[i] = dtype == Dtype::kBf16 ? unpack<Element::kBf16>(words[i / 2], i % 2)
                                  : unpack<Element::kF16>(words[i / 2], i % 2);
  }
}

// The same as elements of pages of 16 bits.
template <Element kElement>
KVM_GPU Word4 load_converted(const void* tensor, Dtype dtype, int64_t element) {
  if (dtype == (kElement == Element::kBf16 ? Dtype::kBf16 : Dtype::kF16)) {
    return load_global<Word4>(static_cast<const uint16_t*>(tensor) + element);
  }
  float x[8];
  load_floats(tensor, dtype, element, x);
  return {pack<kElement>(x[0], x[1]), pack<kElement>(x[2], x[3]), pack<kElement>(x[4], x[5]),
          pack<kElement>(x[6], x[7])};
}

// The e4m3 nearest to x, even where two are. REQUIRES: |x| < 464.
KVM_GPU uint32_t narrow_f8(float x) {
  const uint32_t bits = bits_from_float(x), size = bits & 0x7fffffffu;
  uint32_t code;
  if (size < 0x3c800000u) {
    // Below 2^-6 steps are 2^-9, which is what a float of 2^14 has.
    code = bits_from_float(float_from_bits(size) + 16384.0f) - 0x46800000u;
  } else {
    code = ((size + 0x7ffffu + (size >> 20 & 1)) >> 20) - ((127 - 7) << 3);
  }
  return code == 0 ? 0 : code | (bits >> 31) << 7;
}

// Encodes the 8 elements that this thread has of a row which `lanes` lanes share, a power of two;
// the row's scale in bf16 goes to all of them. REQUIRES: all lanes of the warp call it.
template <Element kElement>
KVM_GPU Word2 encode_row(const float (&x)[8], uint32_t lanes, uint32_t* scale_bits) {
  uint32_t top = 0;
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    const uint32_t size = bits_from_float(x[i]) & 0x7fffffffu;
    top = size > top ? size : top;
  }
  for (uint32_t mask = 1; mask < lanes; mask *= 2) {
    const uint32_t other = shuffle(top, lane_id() ^ mask);
    top = other > top ? other : top;
  }
  constexpr bool kIsI8 = kElement == Element::kI8;
  constexpr uint32_t kRoundsToZero = kIsI8 ? 0x00400000u : 0x00002000u;  // 2^-127, 2^-136
  constexpr uint32_t kInfinity = 0x7f800000u;
  if (top <= kRoundsToZero || top >= kInfinity) {
    *scale_bits = top <= kRoundsToZero ? 0 : 0x7fc0u;
    return {0, 0};
  }
  const float wanted = rounded_quotient(float_from_bits(top), kIsI8 ? 127.0f : 448.0f);
  *scale_bits = pack<Element::kBf16>(fmaxf(wanted, 0x1p-126f), 0.0f);
  const float scale = float_from_bits(*scale_bits << 16);
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    const float steps = rounded_quotient(x[i], scale);
    const uint32_t byte =
        kIsI8 ? static_cast<uint32_t>(round_to_int(steps)) & 0xffu : narrow_f8(steps);
    words[i / 4] |= byte << (i % 4 * 8);
  }
  return {words[0], words[1]};
}

// Likewise the codes of 8 elements of a group of 64 channels, which 8 lanes share, and the word of
// its steps.
KVM_GPU uint32_t encode_codes(const float (&x)[8], uint32_t* steps) {
  float least = x[0], most = x[0];
  uint32_t top = 0;
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    const uint32_t size = bits_from_float(x[i]) & 0x7fffffffu;
    top = size > top ? size : top;
    least = x[i] < least ? x[i] : least;
    most = x[i] > most ? x[i] : most;
  }
#pragma unroll
  for (uint32_t mask = 1; mask < 8; mask *= 2) {
    const uint32_t other = shuffle(top, lane_id() ^ mask);
    top = other > top ? other : top;
    const float other_least = shuffle_xor(least, mask), other_most = shuffle_xor(most, mask);
    least = other_least < least ? other_least : least;
    most = other_most > most ? other_most : most;
  }
  constexpr uint32_t kLargest = 0x7e800000u;  // 2^126
  if (top > kLargest) {
    *steps = 0x7fc07fc0u;
    return 0;
  }
  // The zero is cut to bf16 downwards, the scale upwards. No -0: what comes first does not matter.
  const uint32_t least_bits = bits_from_float(least == 0.0f ? 0.0f : least);
  const bool cut_up = (least_bits & 0xffffu) != 0 && least_bits >> 31 != 0;
  const uint32_t zero_bits = (least_bits >> 16) + (cut_up ? 1 : 0);
  const float zero = float_from_bits(zero_bits << 16);
  const float span = most - zero;
  uint32_t scale_bits = 0;
  if (span > 0.0f) {
    const uint32_t wanted = bits_from_float(fmaxf(rounded_quotient(span, 15.0f), 0x1p-126f));
    scale_bits = (wanted >> 16) + ((wanted & 0xffffu) != 0 ? 1 : 0);
  }
  *steps = scale_bits | zero_bits << 16;
  const float scale = scale_bits == 0 ? 1.0f : float_from_bits(scale_bits << 16);
  uint32_t codes = 0;
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    // At most 15: the scale was not cut down.
    codes |= static_cast<uint32_t>(round_to_int(rounded_quotient(x[i] - zero, scale))) << (i * 4);
  }
  return codes;
}

// Does the work of one thread for one token.
template <Element kElement>
KVM_GPU void append_token(const AppendParams& p, const AppendToken& token) {
  const PageClass& of = p.pool.classes[token.page_class];
  const uint32_t row_chunks = p.dim / 8, chunks = of.n_heads * row_chunks;
  const uint32_t entry = load_global<uint32_t>(p.page_table + token.table);
  // Narrow rows are shared among the lanes of a warp, which have to stay together: a power of two
  // of them, of which those behind the row's end have nothing.
  uint32_t lanes = row_chunks;
  if constexpr (kIsNarrow<kElement>) {
    lanes = row_chunks <= 8 ? 8 : row_chunks <= 16 ? 16 : 32;
  }
  const uint32_t end = kIsNarrow<kElement> ? (of.n_heads * lanes + 31) / 32 * 32 : chunks;
  for (uint32_t i = thread_id(); i < end; i += kAppendThreads) {
    const uint32_t head = i / lanes, chunk = i % lanes;
    const bool valid = head < of.n_heads && chunk < row_chunks;
    const uint32_t kv_head =
        valid ? load_global<uint16_t>(p.pool.heads + of.heads_first + head) : 0;
    const int64_t element = token.source * p.stride_token + kv_head * p.stride_head + chunk * 8;
    if constexpr (kIsScaled<kElement>) {
      uint8_t* page = page_of(p.pool, of, entry);
      uint8_t* to =
          page + token.row * p.dim + static_cast<uint64_t>(head) * of.head_stride_bytes + chunk * 8;
      uint8_t* scale_to =
          page + of.scales_offset_bytes + (head * p.pool.page_tokens.divisor + token.row) * 2;
#pragma unroll
      for (uint32_t plane = 0; plane < 2; ++plane) {
        float x[8] = {};
        if (valid) {
          load_floats(plane == 0 ? p.k : p.v, p.dtype, element, x);
        }
        uint32_t scale;
        const Word2 bytes = encode_row<kElement>(x, lanes, &scale);
        if (valid) {
          store_global(to + plane * of.v_offset_bytes, bytes);
          if (chunk == 0) {
            store_global(scale_to + plane * of.v_scales_offset_bytes, static_cast<uint16_t>(scale));
          }
        }
      }
    } else if constexpr (kHasSteps<kElement>) {
      const uint32_t groups = p.dim / 64;
      uint8_t* page = page_of(p.pool, of, entry);
      uint8_t* to = page + token.row * (p.dim / 2) +
                    static_cast<uint64_t>(head) * of.head_stride_bytes + chunk * 4;
      uint8_t* steps_to =
          page + of.scales_offset_bytes +
          ((head * p.pool.page_tokens.divisor + token.row) * groups + chunk / 8) * 4;
#pragma unroll
      for (uint32_t plane = 0; plane < 2; ++plane) {
        float x[8] = {};
        if (valid) {
          load_floats(plane == 0 ? p.k : p.v, p.dtype, element, x);
        }
        uint32_t steps;
        const uint32_t codes = encode_codes(x, &steps);
        if (valid) {
          store_global(to + plane * of.v_offset_bytes, codes);
          if (chunk % 8 == 0) {
            store_global(steps_to + plane * of.v_scales_offset_bytes, steps);
          }
        }
      }
    } else {
      uint8_t* to = page_row(p.pool, of, entry, token.row, p.dim * 2) +
                    static_cast<uint64_t>(head) * of.head_stride_bytes + chunk * 16;
      store_global(to, load_converted<kElement>(p.k, p.dtype, element));
      if (of.v_offset_bytes != 0) {
        store_global(to + of.v_offset_bytes, load_converted<kElement>(p.v, p.dtype, element));
      }
    }
  }
}

// Does the work of one thread of one block. REQUIRES: is_head_dim_on_devices, or V is in K and rows
// are of two bytes an element.
template <Element kElement>
KVM_GPU void append_thread(const AppendParams& p) {
  const uint32_t n = p.n_tokens != nullptr ? load_global<uint32_t>(p.n_tokens) : block_count();
  for (uint32_t i = block_id(); i < n; i += block_count()) {
    append_token<kElement>(p, p.tokens[i]);
  }
}

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_APPEND_KERNEL_H_
