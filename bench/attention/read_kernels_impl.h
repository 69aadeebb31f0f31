// SPDX-License-Identifier: Apache-2.0
// The read kernels, for the file that includes this and its instruction-set flags.
#ifndef KVM_BENCH_ATTENTION_READ_KERNELS_IMPL_H_
#define KVM_BENCH_ATTENTION_READ_KERNELS_IMPL_H_

#include "bench/attention/read_kernels.h"

namespace kvm::bench {
namespace {

// 64 bytes at a time, in whatever registers the target has.
typedef uint64_t Line __attribute__((vector_size(64), aligned(64)));

uint64_t fold(const Line& x) { return x[0] ^ x[1] ^ x[2] ^ x[3] ^ x[4] ^ x[5] ^ x[6] ^ x[7]; }

// One stream after the other.
template <size_t kAhead>
uint64_t read_lines(const std::byte* p, size_t bytes, const std::byte* next) {
  Line s0{}, s1{}, s2{}, s3{};
  for (size_t i = 0; i < bytes; i += 256) {
    const Line* x = reinterpret_cast<const Line*>(p + i);
    if constexpr (kAhead != 0) {
      const std::byte* ahead = i + kAhead < bytes ? p + i + kAhead : next + (i + kAhead - bytes);
      for (int j = 0; j < 4; ++j)
        __builtin_prefetch(ahead + 64 * j);
    }
    s0 ^= x[0];
    s1 ^= x[1];
    s2 ^= x[2];
    s3 ^= x[3];
  }
  s0 ^= s1 ^ s2 ^ s3;
  return fold(s0);
}

template <size_t kAhead>
uint64_t read_one(std::span<const ReadSpan> spans) {
  uint64_t sum = 0;
  for (size_t i = 0; i < spans.size(); ++i) {
    const ReadSpan& s = spans[i];
    const ReadSpan& n = spans[i + 1 < spans.size() ? i + 1 : i];
    sum ^= read_lines<kAhead>(s.a, s.bytes, s.b);
    sum ^= read_lines<kAhead>(s.b, s.bytes, n.a);
  }
  return sum;
}

// One stream after the other, prefetched into the first level kNear bytes ahead and into the second
// kFar bytes ahead, line by line. Both divide the length of a span or are multiples of it.
template <size_t kNear, size_t kFar>
uint64_t read_two_levels(std::span<const ReadSpan> spans) {
  constexpr size_t kStep = 1024;
  Line s0{}, s1{};
  const size_t n = 2 * spans.size();
  const auto at = [spans, n](size_t i) {
    i = i < n ? i : n - 1;
    return i % 2 == 0 ? spans[i / 2].a : spans[i / 2].b;
  };
  for (size_t k = 0; k < n; ++k) {
    const std::byte* p = at(k);
    const size_t bytes = spans[k / 2].bytes;
    for (size_t i = 0; i < bytes; i += kStep) {
      const std::byte* near = at(k + (i + kNear) / bytes) + (i + kNear) % bytes;
      const std::byte* far = at(k + (i + kFar) / bytes) + (i + kFar) % bytes;
#pragma GCC unroll 2
      for (size_t j = 0; j < kStep; j += 128) {
        __builtin_prefetch(near + j);
        __builtin_prefetch(far + j, 0, 2);
        s0 ^= *reinterpret_cast<const Line*>(p + i + j);
        __builtin_prefetch(near + j + 64);
        __builtin_prefetch(far + j + 64, 0, 2);
        s1 ^= *reinterpret_cast<const Line*>(p + i + j + 64);
      }
    }
  }
  s0 ^= s1;
  return fold(s0);
}

// Both streams at once, kStep bytes of each in turn.
template <size_t kAhead, size_t kStep>
uint64_t read_both(std::span<const ReadSpan> spans) {
  Line s0{}, s1{}, s2{}, s3{};
  for (size_t k = 0; k < spans.size(); ++k) {
    const ReadSpan& s = spans[k];
    const ReadSpan& n = spans[k + 1 < spans.size() ? k + 1 : k];
    for (size_t i = 0; i < s.bytes; i += kStep) {
      for (int side = 0; side < 2; ++side) {
        const std::byte* p = side == 0 ? s.a : s.b;
        const std::byte* q = side == 0 ? n.a : n.b;
        const std::byte* ahead = i + kAhead < s.bytes ? p + kAhead : q + kAhead - s.bytes;
        for (size_t j = i; j < i + kStep; j += 256) {
          const Line* x = reinterpret_cast<const Line*>(p + j);
          if constexpr (kAhead != 0) {
            for (size_t l = 0; l < 256; l += 64)
              __builtin_prefetch(ahead + j + l);
          }
          s0 ^= x[0];
          s1 ^= x[1];
          s2 ^= x[2];
          s3 ^= x[3];
        }
      }
    }
  }
  s0 ^= s1 ^ s2 ^ s3;
  return fold(s0);
}

constexpr ReadKernel kKernels[] = {
    {"plain", read_one<0>},
    {"ahead 2K", read_one<2048>},
    {"ahead 4K", read_one<4096>},
    {"ahead 8K", read_one<8192>},
    {"both plain", read_both<0, 4096>},
    {"both ahead 8K", read_both<8192, 4096>},
    {"levels 1K 8K", read_two_levels<1024, 8192>},
    {"levels 4K 16K", read_two_levels<4096, 16384>},
    {"levels 2K 32K", read_two_levels<2048, 32768>},
};

}  // namespace
}  // namespace kvm::bench

#endif  // KVM_BENCH_ATTENTION_READ_KERNELS_IMPL_H_
