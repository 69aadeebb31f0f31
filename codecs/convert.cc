// SPDX-License-Identifier: Apache-2.0
#include "codecs/convert.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/assert.h"
#include "base/cpu_features.h"
#include "base/kv_view.h"
#include "codecs/float8.h"
#include "codecs/int8.h"
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

const char* source_row(const SourceRows& rows, uint64_t row, uint32_t head) {
  const uint32_t place = rows.heads != nullptr ? rows.heads[head] : head;
  return static_cast<const char*>(rows.data) + row * rows.row_stride_bytes +
         place * rows.head_stride_bytes;
}

char* target_row(const TargetRows& rows, uint64_t row, uint32_t head) {
  const uint32_t place = rows.heads != nullptr ? rows.heads[head] : head;
  return static_cast<char*>(rows.data) + row * rows.row_stride_bytes +
         place * rows.head_stride_bytes;
}

// Returns the scale of a row of SourceRows or TargetRows.
template <typename Rows>
auto& scale_of(const Rows& rows, uint64_t row, uint32_t head) {
  const uint32_t place = rows.heads != nullptr ? rows.heads[head] : head;
  return rows.scales[row + uint64_t{place} * kPageTokens];
}

void copy_scales(const SourceRows& source, const TargetRows& target, uint64_t n_rows,
                 uint32_t n_heads) {
  for (uint32_t head = 0; head < n_heads; ++head) {
    std::memcpy(&scale_of(target, 0, head), &scale_of(source, 0, head), n_rows * sizeof(uint16_t));
  }
}

// REQUIRES: the dtypes differ, and at least one is scaled.
void convert_scaled_rows(const SourceRows& source, const TargetRows& target, uint64_t n_rows,
                         uint32_t n_heads, uint32_t n) {
  KVM_ASSERT(n <= kMaxScaledRow);
  std::array<float, kMaxScaledRow> block;
  for (uint64_t row = 0; row < n_rows; ++row) {
    for (uint32_t head = 0; head < n_heads; ++head) {
      const char* in = source_row(source, row, head);
      char* out = target_row(target, row, head);
      if (dtype_is_scaled(source.dtype)) {
        decode_row(in, source.dtype, scale_of(source, row, head), n, block.data());
      } else {
        convert(in, source.dtype, block.data(), Dtype::kF32, n);
      }
      if (dtype_is_scaled(target.dtype)) {
        scale_of(target, row, head) = encode_row(block.data(), n, target.dtype, out);
      } else {
        convert(block.data(), Dtype::kF32, out, target.dtype, n);
      }
    }
  }
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

// REQUIRES: can_stream, and equal dtypes.
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

void convert_rows(const SourceRows& source, const TargetRows& target, uint64_t n_rows,
                  uint32_t n_heads, uint32_t row_elements) {
  const bool any_scaled = dtype_is_scaled(source.dtype) || dtype_is_scaled(target.dtype);
  if (any_scaled && source.dtype != target.dtype) {
    convert_scaled_rows(source, target, n_rows, n_heads, row_elements);
    return;
  }
  if (any_scaled) {
    copy_scales(source, target, n_rows, n_heads);
  }
#if defined(__x86_64__)
  const uint64_t row_bytes = uint64_t{row_elements} * dtype_size_bytes(target.dtype);
  if (source.dtype == target.dtype && n_rows * n_heads * row_bytes >= kStreamBytes &&
      can_stream(target, row_bytes)) {
    stream_rows(source, target, n_rows, n_heads, row_bytes);
    return;
  }
#endif
  for (uint64_t row = 0; row < n_rows; ++row) {
    for (uint32_t head = 0; head < n_heads; ++head) {
      convert(source_row(source, row, head), source.dtype, target_row(target, row, head),
              target.dtype, row_elements);
    }
  }
}

uint16_t encode_row(const float* src, uint32_t n, Dtype dtype, void* dst) {
  KVM_ASSERT(dtype_is_scaled(dtype));
  return dtype == Dtype::kI8 ? encode_i8(src, n, static_cast<int8_t*>(dst))
                             : encode_f8(src, n, static_cast<uint8_t*>(dst));
}

void decode_row(const void* src, Dtype dtype, uint16_t scale, uint32_t n, float* dst) {
  KVM_ASSERT(dtype_is_scaled(dtype));
  if (dtype == Dtype::kI8) {
    decode_i8(static_cast<const int8_t*>(src), scale, n, dst);
  } else {
    decode_f8(static_cast<const uint8_t*>(src), scale, n, dst);
  }
}

}  // namespace kvm::codecs
