// SPDX-License-Identifier: Apache-2.0
// Read-only kernels: what memory gives when nothing is computed.
#ifndef KVM_BENCH_ATTENTION_READ_KERNELS_H_
#define KVM_BENCH_ATTENTION_READ_KERNELS_H_

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvm::bench {

// Two streams of equal length that are read side by side; `next_*` follow them.
struct ReadSpan {
  const std::byte* a;
  const std::byte* b;
  size_t bytes;  // of each; a multiple of 4096
};

struct ReadKernel {
  const char* name;
  // Reads all spans; the result depends on every byte.
  uint64_t (*read)(std::span<const ReadSpan> spans);
};

std::span<const ReadKernel> read_kernels();

}  // namespace kvm::bench

#endif  // KVM_BENCH_ATTENTION_READ_KERNELS_H_
