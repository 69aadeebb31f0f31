// SPDX-License-Identifier: Apache-2.0
// The primitives for nvcc: sm_80 and up. primitives.h has the contracts.
#ifndef KVM_ATTENTION_CUDA_PRIMITIVES_PTX_H_
#define KVM_ATTENTION_CUDA_PRIMITIVES_PTX_H_

#include "attention/cuda/primitives.h"

#define KVM_GPU __device__ __forceinline__

namespace kvm::attention::gpu {

KVM_GPU uint32_t thread_id() { return threadIdx.x; }
KVM_GPU uint32_t lane_id() { return threadIdx.x % 32; }
// From a shuffle, so that the compiler knows it to be the same for the whole warp.
KVM_GPU uint32_t warp_id() { return __shfl_sync(~0u, threadIdx.x / 32, 0); }
KVM_GPU uint32_t block_id() { return blockIdx.x; }
KVM_GPU uint32_t block_count() { return gridDim.x; }

KVM_GPU void sync_warp() { __syncwarp(); }
KVM_GPU void sync_block() { __syncthreads(); }

KVM_GPU void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}
KVM_GPU void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

KVM_GPU uint32_t shuffle(uint32_t value, uint32_t lane) { return __shfl_sync(~0u, value, lane); }
KVM_GPU uint64_t shuffle(uint64_t value, uint32_t lane) { return __shfl_sync(~0u, value, lane); }
KVM_GPU float shuffle(float value, uint32_t lane) { return __shfl_sync(~0u, value, lane); }
KVM_GPU float shuffle_xor(float value, uint32_t mask) {
  return __shfl_xor_sync(~0u, value, static_cast<int>(mask));
}
KVM_GPU bool any_lane(bool value) { return __any_sync(~0u, value) != 0; }

KVM_GPU unsigned char* shared_bytes() {
  extern __shared__ __align__(128) unsigned char kvm_shared_memory[];
  return kvm_shared_memory;
}
// Several instructions: to be called once, not for each access.
KVM_GPU SharedAddress shared_start() {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared_bytes()));
}

KVM_GPU void copy_async_16(SharedAddress to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(valid ? 16 : 0)
               : "memory");
}
KVM_GPU void copy_async_16(SharedAddress to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n" ::"r"(to),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}
KVM_GPU void copy_async_4(SharedAddress to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(valid ? 4 : 0)
               : "memory");
}
KVM_GPU void copy_async_8(SharedAddress to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(valid ? 8 : 0)
               : "memory");
}
KVM_GPU void copy_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <uint32_t kNewest>
KVM_GPU void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kNewest) : "memory");
}

KVM_GPU void load_matrix_x4(uint32_t (&to)[4], SharedAddress from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}
KVM_GPU void load_matrix_x4_transposed(uint32_t (&to)[4], SharedAddress from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

template <Element kElement>
KVM_GPU void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kElement == Element::kBf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

template <Element kElement>
KVM_GPU uint32_t pack(float low, float high) {
  static_assert(!kIsNarrow<kElement>);
  uint32_t packed;
  if constexpr (kElement == Element::kBf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

template <uint32_t kSelector>
KVM_GPU uint32_t permute_bytes(uint32_t low, uint32_t high) {
  return __byte_perm(low, high, kSelector);
}

template <Element kElement>
KVM_GPU void widen(uint32_t bytes, uint32_t (&to)[2]) {
  static_assert(kIsScaled<kElement>);
  if constexpr (kElement == Element::kI8) {
    // With a byte x + 128 in its low bits, the fp16 of bits 0x6400 is 1024 + x + 128.
    const uint32_t biased = bytes ^ 0x80808080u;
    constexpr uint32_t kThousand = 0x64646464u, kBias = 0x64806480u;
    asm("sub.f16x2 %0, %1, %2;\n"
        : "=r"(to[0])
        : "r"(permute_bytes<0x4140>(biased, kThousand)), "r"(kBias));
    asm("sub.f16x2 %0, %1, %2;\n"
        : "=r"(to[1])
        : "r"(permute_bytes<0x4342>(biased, kThousand)), "r"(kBias));
  } else {
#if __CUDA_ARCH__ >= 890
    // With the halves taken apart here the instruction reads them where they are.
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}\n"
        : "=r"(to[0]), "=r"(to[1])
        : "r"(bytes));
#else
    // Exponent and mantissa moved to where fp16 has them; its exponents count from 8 less.
    const uint32_t halves[2] = {permute_bytes<0x1404>(bytes, 0), permute_bytes<0x3424>(bytes, 0)};
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t placed = (halves[i] & 0x80008000u) | (halves[i] & 0x7f007f00u) >> 1;
      asm("mul.f16x2 %0, %1, %2;\n" : "=r"(to[i]) : "r"(placed), "r"(0x5c005c00u));
    }
#endif
  }
}

KVM_GPU int32_t round_to_int(float x) { return __float2int_rn(x); }
KVM_GPU float rounded_quotient(float a, float b) { return __fdiv_rn(a, b); }

KVM_GPU float float_from_bits(uint32_t bits) { return __uint_as_float(bits); }
KVM_GPU uint32_t bits_from_float(float x) { return __float_as_uint(x); }
KVM_GPU float float_from_f16(uint32_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;\n" : "=f"(value) : "h"(static_cast<uint16_t>(bits)));
  return value;
}

KVM_GPU float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
KVM_GPU float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
KVM_GPU float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

KVM_GPU float product_or_zero(float weight, float scale) {
  asm("{\n"
      ".reg .pred seen;\n"
      "setp.neu.f32 seen, %0, 0f00000000;\n"
      "@seen mul.f32 %0, %0, %1;\n"
      "}\n"
      : "+f"(weight)
      : "f"(scale));
  return weight;
}

template <class T>
KVM_GPU void store_shared(SharedAddress at, T value) {
  *static_cast<T*>(__cvta_shared_to_generic(at)) = value;
}
template <class T>
KVM_GPU T load_shared(SharedAddress at) {
  return *static_cast<const T*>(__cvta_shared_to_generic(at));
}
template <class T>
KVM_GPU T load_global(const void* from) {
  return *static_cast<const T*>(from);
}
template <class T>
KVM_GPU void store_global(void* to, T value) {
  *static_cast<T*>(to) = value;
}
KVM_GPU uint32_t count_up_to(uint32_t* global, uint32_t last) { return atomicInc(global, last); }

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_PRIMITIVES_PTX_H_
