// SPDX-License-Identifier: Apache-2.0
// The instructions that kernels are written in. nvcc gets them as PTX (primitives_ptx.h), any other
// compiler as calls of an emulator of thread blocks (primitives_emulated.h), so that the same
// kernel source runs, and is checked against the fp64 oracle, where there is no GPU.
//
// What both provide, in namespace kvm::attention::gpu:
//
//   thread_id(), lane_id(), block_id(), block_count()
//   warp_id()                                    whole warps, converged: it is a shuffle
//   shared_start()                               of the block's dynamic shared memory
//   sync_warp(), sync_block()
//     SYNC: shared memory written before by any thread of the warp (the block) is visible after.
//     Nothing else orders shared memory: not a shuffle, not a matrix instruction.
//   let_next_kernel_begin(), wait_for_kernel_before()
//     The next kernel of the stream may be launched to begin early (launch.cu): when every block of
//     this one has called the first, or has ended. SYNC: behind the second all that the kernel
//     before wrote is visible, for that one has ended; a kernel that begins early touches no global
//     memory in front of it. Of kernels that do not, and before sm_90, both are nothing.
//   shuffle(value, lane), shuffle_xor(value, mask), any_lane(bool)      whole warps, converged
//   copy_async_16(SharedAddress, const void*),
//   copy_async_16(SharedAddress, const void*, bool valid)
//     16 bytes from global to shared memory, zeros where not valid; both aligned to 16.
//   copy_async_4, copy_async_8(SharedAddress, const void*, bool valid)
//     4 or 8 bytes likewise, both aligned to as many.
//   copy_async_commit(), copy_async_wait<n>()
//     SYNC: after the wait, all but the newest n committed groups of this thread have landed, for
//     this thread; sync_warp or sync_block hands them on.
//   load_matrix_x4(uint32_t (&)[4], SharedAddress), load_matrix_x4_transposed
//     Four 8 x 8 matrices of 16-bit elements; lane l has the address of row l % 8 of matrix l / 8.
//   mma_16x8x16<Element>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
//   pack<Element>(float low, float high)         to two elements, nearest even; kBf16 and kF16
//   widen<Element>(uint32_t bytes, uint32_t (&to)[2])
//     Four elements of kI8 or kF8 to fp16, exactly: the low two and the high two.
//   permute_bytes<selector>(uint32_t low, uint32_t high)
//     Byte i of the result is byte (selector >> 4 * i) % 8 of the eight.
//   round_to_int(float)                          nearest even
//   rounded_quotient                             of floats, nearest even, whatever follows
//   exp2_fast, log2_fast                         2 ulp; exp2_fast(-inf) = 0, log2_fast(0) = -inf
//   reciprocal_fast                              1 ulp
//   product_or_zero(weight, scale)               0 where the weight is, also if the scale is a NaN
//   store_shared, load_shared                    uint32_t, float, Float2, Float4, Word2, Word4
//   load_global<T>, store_global<T>              T of 1 to 16 bytes, aligned
//   count_up_to(uint32_t* global, uint32_t last)
//     Returns the word and adds 1, or makes it 0 where it was `last`, as one step: no two threads
//     of a launch get the same count in one round. Orders nothing else.
#ifndef KVM_ATTENTION_CUDA_PRIMITIVES_H_
#define KVM_ATTENTION_CUDA_PRIMITIVES_H_

#include <stdint.h>

namespace kvm::attention::gpu {

// An Element is what rows in pages are made of. Rows of bytes have a scale each; rows of 4 bits
// have steps, a scale and a zero, for each 64 channels (docs/storage.md).
enum class Element : uint32_t { kBf16, kF16, kI8, kF8, kI4 };

template <Element kElement>
inline constexpr bool kIsScaled = kElement == Element::kI8 || kElement == Element::kF8;
template <Element kElement>
inline constexpr bool kHasSteps = kElement == Element::kI4;
// Elements that the matrix unit, and tensors, do not have.
template <Element kElement>
inline constexpr bool kIsNarrow = kIsScaled<kElement> || kHasSteps<kElement>;
template <Element kElement>
inline constexpr uint32_t kElementBits = kHasSteps<kElement>   ? 4
                                         : kIsScaled<kElement> ? 8
                                                               : 16;

// An address that instructions take, from shared_start() on, which is a multiple of 128.
using SharedAddress = uint32_t;

struct alignas(8) Float2 {
  float x, y;
};
struct alignas(16) Float4 {
  float x, y, z, w;
};
struct alignas(8) Word2 {
  uint32_t x, y;
};
struct alignas(16) Word4 {
  uint32_t x, y, z, w;
};

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

}  // namespace kvm::attention::gpu

#if defined(__CUDACC__)
#include "attention/cuda/primitives_ptx.h"  // IWYU pragma: export
#else
#include "attention/cuda/primitives_emulated.h"  // IWYU pragma: export
#endif

namespace kvm::attention::gpu {

KVM_GPU float minus_infinity() { return -__builtin_huge_valf(); }

// The float that the given half of two packed elements stands for. kBf16 and kF16.
template <Element kElement>
KVM_GPU float unpack(uint32_t packed, uint32_t half) {
  static_assert(!kIsNarrow<kElement>);
  const uint32_t bits = half == 0 ? packed & 0xffffu : packed >> 16;
  if constexpr (kElement == Element::kBf16) {
    return float_from_bits(bits << 16);
  } else {
    return float_from_f16(bits);
  }
}

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_PRIMITIVES_H_
