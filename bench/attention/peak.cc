// SPDX-License-Identifier: Apache-2.0
#include "bench/attention/peak.h"

#include <immintrin.h>

namespace kvm::bench {

namespace {

__attribute__((target("avx512f,avx512bf16"))) double run_bf16_dots(uint64_t rounds) {
  __m512 acc[24];
  for (int i = 0; i < 24; ++i) {
    acc[i] = _mm512_set1_ps(static_cast<float>(i));
  }
  __m512bh a = (__m512bh)_mm512_set1_epi32(0x3f803f80);
  __m512bh b = (__m512bh)_mm512_set1_epi32(0x00010001);
  for (uint64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 24
    for (int i = 0; i < 24; ++i) {
      acc[i] = _mm512_dpbf16_ps(acc[i], a, b);
    }
    __asm__ volatile("" : "+v"(a), "+v"(b));
  }
#pragma GCC unroll 24
  for (int i = 0; i < 24; ++i) {
    __asm__ volatile("" : : "v"(acc[i]));
  }
  return static_cast<double>(rounds) * 24 * 64;
}

__attribute__((target("avx2,fma"))) double run_fp32_fmas(uint64_t rounds) {
  __m256 acc[12];
  for (int i = 0; i < 12; ++i) {
    acc[i] = _mm256_set1_ps(static_cast<float>(i));
  }
  __m256 a = _mm256_set1_ps(1.0f);
  __m256 b = _mm256_set1_ps(1e-30f);
  for (uint64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) {
      acc[i] = _mm256_fmadd_ps(a, b, acc[i]);
    }
    __asm__ volatile("" : "+x"(a), "+x"(b));
  }
#pragma GCC unroll 12
  for (int i = 0; i < 12; ++i) {
    __asm__ volatile("" : : "x"(acc[i]));
  }
  return static_cast<double>(rounds) * 12 * 16;
}

}  // namespace

double run_multiply_adds(uint64_t rounds) {
  return __builtin_cpu_supports("avx512bf16") ? run_bf16_dots(rounds) : run_fp32_fmas(rounds);
}

}  // namespace kvm::bench
