// SPDX-License-Identifier: Apache-2.0
#include "base/cpu_features.h"

#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdint>

namespace kvm {
namespace {

#if defined(__x86_64__)
uint64_t read_xcr0() {
  uint32_t low = 0;
  uint32_t high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// Bit numbers are those of the processor manuals, CPUID leaves 1, 7.0 and 7.1.
CpuFeatures detect() {
  CpuFeatures features;
  uint32_t a = 0;
  uint32_t b = 0;
  uint32_t c = 0;
  uint32_t d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c >> 27 & 1) == 0) {
    return features;  // no OSXSAVE: no wide register is preserved
  }
  const uint32_t leaf1_c = c;
  const uint64_t xcr0 = read_xcr0();
  const bool ymm = (xcr0 & 0x06) == 0x06;
  const bool zmm = (xcr0 & 0xe6) == 0xe6;
  features.fma = ymm && (leaf1_c >> 12 & 1) != 0;
  features.f16c = ymm && (leaf1_c >> 29 & 1) != 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) {
    return features;
  }
  const uint32_t max_subleaf = a;
  features.avx2 = ymm && (leaf1_c >> 28 & 1) != 0 && (b >> 5 & 1) != 0;
  features.avx512f = zmm && (b >> 16 & 1) != 0;
  features.avx512dq = zmm && (b >> 17 & 1) != 0;
  features.avx512bw = zmm && (b >> 30 & 1) != 0;
  features.avx512vl = zmm && (b >> 31 & 1) != 0;
  features.avx512vbmi = zmm && (c >> 1 & 1) != 0;
  features.avx512vnni = zmm && (c >> 11 & 1) != 0;
  if (max_subleaf >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0) {
    features.avx512bf16 = zmm && (a >> 5 & 1) != 0;
  }
  return features;
}
#else
CpuFeatures detect() { return {}; }
#endif

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

bool has_large_first_level() {
  static const bool is_large = ::sysconf(_SC_LEVEL1_DCACHE_SIZE) >= long{48} << 10;
  return is_large;
}

}  // namespace kvm
