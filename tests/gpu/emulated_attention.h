// SPDX-License-Identifier: Apache-2.0
// The kernels that attend, as the emulator runs them. They lie in a file of their own, for to
// compile them takes longer than all the rest of what runs them.
#ifndef KVM_TESTS_GPU_EMULATED_ATTENTION_H_
#define KVM_TESTS_GPU_EMULATED_ATTENTION_H_

#include <cstdint>
#include <functional>
#include <optional>

#include "attention/cuda/params.h"
#include "base/codec_id.h"

// Which kernels are compiled, as bits: 1 decode kernels of 16-bit rows, 2 of narrower ones, 4
// prefill kernels, 8 MLA kernels, 16 those that do not attend (of emulator_suite.cc). And of what
// head dimension decode and prefill kernels are; 0: of all.
#ifndef KVM_SUITE_PARTS
#define KVM_SUITE_PARTS 31
#endif
#ifndef KVM_SUITE_DIM
#define KVM_SUITE_DIM 0
#endif

namespace kvm::attention::gpu::testing {

constexpr bool is_in_suite(uint32_t part) { return (KVM_SUITE_PARTS & part) != 0; }

struct EmulatedKernel {
  uint32_t threads = 0;
  uint32_t shared_bytes = 0;
  void (*thread)(const DecodeParams& params) = nullptr;  // null: it is not compiled

  explicit operator bool() const { return thread != nullptr; }
};

// What code a kernel's shape is that of: for sm_90a, for sm_80, or for others.
enum class ShapeFor : uint8_t { kSm90a, kSm80, kOthers };

// Nothing where no kernel is shipped for these.
std::optional<EmulatedKernel> attention_kernel(CodecId codec, uint32_t dim, uint32_t block_rows,
                                               ShapeFor what = ShapeFor::kSm90a);

// Decode kernels of bf16 rows of 128 channels in 16 rows, in shapes that are not shipped but
// measured by `kvm_gpu_check sweep`: fewest stages, longer tiles, most warps.
void visit_other_kernels(
    const std::function<void(const EmulatedKernel& kernel, const char* shape)>& visit);

}  // namespace kvm::attention::gpu::testing

#endif  // KVM_TESTS_GPU_EMULATED_ATTENTION_H_
