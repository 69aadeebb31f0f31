// SPDX-License-Identifier: Apache-2.0
#include "codecs/convert.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/assert.h"
#include "base/cpu_features.h"
#include "codecs/float8.h"
#include "codecs/gear.h"
#include "codecs/int8.h"
#include "codecs/int8_channel.h"
#include "codecs/low_bits.h"
#include "codecs/pair.h"
#include "codecs/rows.h"
#if defined(__x86_64__)
#include <emmintrin.h>

#include "codecs/convert_f16c.h"
#endif

namespace kvm::codecs {
namespace {

// Elements that pass through fp32 at a time: small enough to stay in the first-level cache.
constexpr uint64_t kBlock = 256;

template <typename T>
T load(const char* address) {
  T value;
  std::memcpy(&value, address, sizeof value);
  return value;
}

template <typename T>
void store(char* address, T value) {
  std::memcpy(address, &value, sizeof value);
}

// Elements [first, n), one by one.
template <auto kConvert, typename From, typename To>
void convert_each(const char* src, char* dst, uint64_t first, uint64_t n) {
  for (uint64_t i = first; i < n; ++i) {
    store<To>(dst + sizeof(To) * i, kConvert(load<From>(src + sizeof(From) * i)));
  }
}

// How many of the first elements the processor's instructions have converted.
uint64_t f16_by_instructions([[maybe_unused]] const char* src, [[maybe_unused]] char* dst,
                             [[maybe_unused]] uint64_t n, [[maybe_unused]] bool to_f32) {
#if defined(__x86_64__)
  if (cpu_features().f16c) {
    return to_f32 ? f16_to_f32_f16c(src, dst, n) : f32_to_f16_f16c(src, dst, n);
  }
#endif
  return 0;
}

// dtype is F16 or BF16, here and below.
void to_f32(const char* src, Dtype dtype, char* dst, uint64_t n) {
  if (dtype == Dtype::kBf16) {
    convert_each<bf16_to_f32, uint16_t, float>(src, dst, 0, n);
  } else {
    const uint64_t first = f16_by_instructions(src, dst, n, true);
    convert_each<f16_to_f32, uint16_t, float>(src, dst, first, n);
  }
}

void from_f32(const char* src, char* dst, Dtype dtype, uint64_t n) {
  if (dtype == Dtype::kBf16) {
    convert_each<f32_to_bf16, float, uint16_t>(src, dst, 0, n);
  } else {
    const uint64_t first = f16_by_instructions(src, dst, n, false);
    convert_each<f32_to_f16, float, uint16_t>(src, dst, first, n);
  }
}

// The place of a head among those of SourceRows or TargetRows.
template <typename Rows>
uint32_t place_of(const Rows& rows, uint32_t head) {
  return rows.heads != nullptr ? rows.heads[head] : head;
}

const char* source_row(const SourceRows& rows, uint64_t row, uint32_t head) {
  return static_cast<const char*>(rows.data) + (rows.slot + row) * rows.row_stride_bytes +
         place_of(rows, head) * rows.head_stride_bytes;
}

char* target_row(const TargetRows& rows, uint64_t row, uint32_t head) {
  return static_cast<char*>(rows.data) + (rows.slot + row) * rows.row_stride_bytes +
         place_of(rows, head) * rows.head_stride_bytes;
}

// The parameters of a head.
const uint16_t* params_of(const SourceRows& rows, uint32_t head) {
  return static_cast<const uint16_t*>(rows.params) +
         uint64_t{place_of(rows, head)} * rows.head_scales;
}
uint16_t* params_of(const TargetRows& rows, uint32_t head) {
  return static_cast<uint16_t*>(rows.params) + uint64_t{place_of(rows, head)} * rows.head_scales;
}

// The scale of a row. REQUIRES: rows have some of their own.
uint16_t& scale_of(const TargetRows& rows, uint64_t row, uint32_t head) {
  return params_of(rows, head)[rows.slot + row];
}

void copy_params(const SourceRows& source, const TargetRows& target, uint64_t n_rows,
                 uint32_t n_heads, uint32_t dim) {
  const Codec& codec = codec_of(source.codec);
  for (uint32_t head = 0; head < n_heads; ++head) {
    if (codec.scaling == Scaling::kPage) {
      const uint64_t n_slot = uint64_t{codec.group_params} * codec.n_groups(dim);
      const uint64_t channels = kPageTokens * n_slot;
      std::copy_n(params_of(source, head) + source.slot * n_slot, n_rows * n_slot,
                  params_of(target, head) + target.slot * n_slot);
      // What is of the page as a whole goes with it. Parts of codecs/gear.h and pair.h name slots.
      KVM_ASSERT((!codec.is_gear() && !codec.is_pair()) || source.slot == target.slot);
      std::copy_n(params_of(source, head) + channels, codec.n_scales(dim) - channels,
                  params_of(target, head) + channels);
      continue;
    }
    std::memcpy(&scale_of(target, 0, head), params_of(source, head) + source.slot,
                n_rows * sizeof(uint16_t));
  }
}

// REQUIRES: the codec is not scaled.
Dtype dtype_of(const Codec& codec) {
  KVM_ASSERT(!codec.is_scaled());
  return static_cast<Dtype>(codec.elem);
}

// REQUIRES: the codecs differ, and at least one is scaled.
void convert_scaled_rows(const SourceRows& source, const TargetRows& target, uint64_t n_rows,
                         uint32_t n_heads, uint32_t n) {
  KVM_ASSERT(n <= kMaxScaledRow);
  const Codec& from = codec_of(source.codec);
  const Codec& to = codec_of(target.codec);
  KVM_ASSERT(to.rows_stand_alone());
  std::array<float, kMaxScaledRow> block;
  for (uint64_t row = 0; row < n_rows; ++row) {
    for (uint32_t head = 0; head < n_heads; ++head) {
      const char* in = source_row(source, row, head);
      char* out = target_row(target, row, head);
      if (from.is_scaled()) {
        decode_scaled(in, source.codec, params_of(source, head),
                      source.row_dim != 0 ? source.row_dim : n,
                      source.slot + static_cast<uint32_t>(row), 1, n, block.data());
      } else {
        convert(in, dtype_of(from), block.data(), Dtype::kF32, n);
      }
      if (to.is_scaled()) {
        scale_of(target, row, head) = encode_row(block.data(), n, target.codec, out);
      } else {
        convert(block.data(), Dtype::kF32, out, dtype_of(to), n);
      }
    }
  }
}

// Rows [kPageTokens][dim] in a codec whose rows do not stand alone.
[[nodiscard]] bool encode_head(const float* rows, uint32_t dim, const float* largest_q,
                               CodecId codec, void* out, uint16_t* params) {
  if (codec_of(codec).is_gear()) {
    return encode_gear(codec_of(codec), rows, dim, static_cast<uint8_t*>(out), params);
  }
  if (codec_of(codec).is_low_bits()) {
    return encode_low_bits(codec_of(codec), rows, dim, largest_q, static_cast<uint8_t*>(out),
                           params);
  }
  KVM_ASSERT(codec == kI8Channel);
  return encode_i8_channel(rows, dim, static_cast<int8_t*>(out), params);
}

#if defined(__x86_64__)

// From this many bytes on, the destination is not read soon enough to be worth a place in the
// cache, and stores around it save the read that an ordinary store makes first.
constexpr uint64_t kStreamBytes = uint64_t{64} << 10;

bool can_stream(const TargetRows& target, uint64_t row_bytes) {
  return ((reinterpret_cast<uintptr_t>(target.data) | target.row_stride_bytes |
           target.head_stride_bytes | row_bytes) &
          15) == 0;
}

// REQUIRES: `out` and n_bytes are multiples of 16.
void stream_bytes(const char* in, char* out, uint64_t n_bytes) {
  for (uint64_t i = 0; i < n_bytes; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i)));
  }
}

// SYNC: orders the streaming stores, which x86 leaves unordered, before whatever this thread stores
// next: the release that tells others that the bytes are there.
void end_stream() { _mm_sfence(); }

// REQUIRES: can_stream, and equal codecs.
void stream_rows(const SourceRows& source, const TargetRows& target, uint64_t n_rows,
                 uint32_t n_heads, uint64_t row_bytes) {
  for (uint64_t row = 0; row < n_rows; ++row) {
    for (uint32_t head = 0; head < n_heads; ++head) {
      stream_bytes(source_row(source, row, head), target_row(target, row, head), row_bytes);
    }
  }
  end_stream();
}

#endif

}  // namespace

void convert(const void* src, Dtype src_dtype, void* dst, Dtype dst_dtype, uint64_t n) {
  const char* in = static_cast<const char*>(src);
  char* out = static_cast<char*>(dst);
  if (src_dtype == dst_dtype) {
    std::memcpy(out, in, n * dtype_size_bytes(src_dtype));
  } else if (dst_dtype == Dtype::kF32) {
    to_f32(in, src_dtype, out, n);
  } else if (src_dtype == Dtype::kF32) {
    from_f32(in, out, dst_dtype, n);
  } else {
    std::array<char, kBlock * sizeof(float)> block;
    for (uint64_t i = 0; i < n; i += kBlock) {
      const uint64_t count = std::min(kBlock, n - i);
      to_f32(in + i * dtype_size_bytes(src_dtype), src_dtype, block.data(), count);
      from_f32(block.data(), out + i * dtype_size_bytes(dst_dtype), dst_dtype, count);
    }
  }
}

void copy_past_caches(const void* src, void* dst, uint64_t n_bytes) {
#if defined(__x86_64__)
  if (((reinterpret_cast<uintptr_t>(dst) | n_bytes) & 15) == 0) {
    stream_bytes(static_cast<const char*>(src), static_cast<char*>(dst), n_bytes);
    end_stream();
    return;
  }
#endif
  std::memcpy(dst, src, n_bytes);
}

SourceRows rows_of(const KvPlane& plane, uint32_t dim, uint32_t slot) {
  const Codec& codec = codec_of(plane.codec);
  return {.data = plane.rows,
          .codec = plane.codec,
          .row_stride_bytes = codec.row_bytes(dim),
          .head_stride_bytes = codec.head_rows_bytes(dim),
          .params = plane.params,
          .head_scales = codec.n_scales(dim),
          .slot = slot,
          .row_dim = dim};
}

TargetRows writable_rows(const KvPlane& plane, uint32_t dim, uint32_t slot) {
  const SourceRows rows = rows_of(plane, dim, slot);
  return {.data = const_cast<void*>(rows.data),
          .codec = rows.codec,
          .row_stride_bytes = rows.row_stride_bytes,
          .head_stride_bytes = rows.head_stride_bytes,
          .params = const_cast<void*>(rows.params),
          .head_scales = rows.head_scales,
          .slot = slot};
}

void convert_rows(const SourceRows& source, const TargetRows& target, uint64_t n_rows,
                  uint32_t n_heads, uint32_t dim) {
  const Codec& from = codec_of(source.codec);
  const Codec& to = codec_of(target.codec);
  const bool is_copy = source.codec == target.codec;
  if (!is_copy && (from.is_scaled() || to.is_scaled())) {
    convert_scaled_rows(source, target, n_rows, n_heads, dim);
    return;
  }
  if (from.is_scaled()) {
    copy_params(source, target, n_rows, n_heads, dim);
  }
  const uint64_t row_bytes = to.row_bytes(dim);
#if defined(__x86_64__)
  if (is_copy && n_rows * n_heads * row_bytes >= kStreamBytes && can_stream(target, row_bytes)) {
    stream_rows(source, target, n_rows, n_heads, row_bytes);
    return;
  }
#endif
  for (uint64_t row = 0; row < n_rows; ++row) {
    for (uint32_t head = 0; head < n_heads; ++head) {
      const char* in = source_row(source, row, head);
      char* out = target_row(target, row, head);
      if (is_copy) {
        std::memcpy(out, in, row_bytes);
      } else {
        convert(in, dtype_of(from), out, dtype_of(to), dim);
      }
    }
  }
}

void decode_rows(const KvPlane& plane, uint32_t row_dim, uint32_t slot, uint32_t n_rows,
                 uint32_t dim, float* out) {
  const TargetRows floats = writable_rows({out, nullptr, CodecId::kF32}, dim, 0);
  convert_rows(rows_of(plane, row_dim, slot), floats, n_rows, 1, dim);
}

bool encode_page_head(const KvPlane& from, const KvPlane& to, uint16_t head, uint32_t dim,
                      const float* largest_q, float* scratch) {
  SourceRows source = rows_of(from, dim, 0);
  source.heads = &head;
  if (codec_of(to.codec).rows_stand_alone()) {
    TargetRows target = writable_rows(to, dim, 0);
    target.heads = &head;
    convert_rows(source, target, kPageTokens, 1, dim);
    return true;
  }
  convert_rows(source, writable_rows({scratch, nullptr, CodecId::kF32}, dim, 0), kPageTokens, 1,
               dim);
  return encode_head(scratch, dim, largest_q, to.codec,
                     const_cast<uint8_t*>(row_at(to, dim, head, 0)),
                     const_cast<uint16_t*>(params_at(to, dim, head)));
}

bool encode_rows(const float* rows, const KvPlane& to, uint32_t dim, const float* largest_q) {
  if (codec_of(to.codec).rows_stand_alone()) {
    convert_rows(rows_of({rows, nullptr, CodecId::kF32}, dim, 0), writable_rows(to, dim, 0),
                 kPageTokens, 1, dim);
    return true;
  }
  return encode_head(rows, dim, largest_q, to.codec, const_cast<uint8_t*>(row_at(to, dim, 0, 0)),
                     const_cast<uint16_t*>(params_at(to, dim, 0)));
}

uint16_t encode_row(const float* src, uint32_t n, CodecId codec, void* dst) {
  KVM_ASSERT(codec == CodecId::kI8 || codec == CodecId::kF8);
  return codec == CodecId::kI8 ? encode_i8(src, n, static_cast<int8_t*>(dst))
                               : encode_f8(src, n, static_cast<uint8_t*>(dst));
}

void decode_scaled(const void* src, CodecId codec, const void* params, uint32_t row_dim,
                   uint32_t slot, uint32_t n_rows, uint32_t n, float* dst) {
  const auto* scales = static_cast<const uint16_t*>(params);
  const auto* bytes = static_cast<const uint8_t*>(src);
  if (codec_of(codec).is_pair()) {
    decode_pair(codec_of(codec), bytes, scales, row_dim, slot, n_rows, n, dst);
    return;
  }
  if (codec_of(codec).is_gear()) {
    decode_gear(codec_of(codec), bytes, scales, row_dim, slot, n_rows, n, dst);
    return;
  }
  if (codec_of(codec).is_low_bits()) {
    decode_low_bits(codec_of(codec), bytes, scales, row_dim, slot, n_rows, n, dst);
    return;
  }
  for (uint32_t row = 0; row < n_rows; ++row, bytes += row_dim, dst += n) {
    if (codec == CodecId::kI8) {
      decode_i8(reinterpret_cast<const int8_t*>(bytes), scales[slot + row], n, dst);
    } else if (codec == CodecId::kF8) {
      decode_f8(bytes, scales[slot + row], n, dst);
    } else {
      KVM_ASSERT(codec == kI8Channel);
      decode_i8_channel(reinterpret_cast<const int8_t*>(bytes), scales, n, dst);
    }
  }
}

}  // namespace kvm::codecs
