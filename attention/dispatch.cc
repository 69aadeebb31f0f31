// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "attention/exact/exact_args.h"
#include "attention/kernel_table.h"
#include "attention/sampled/sampled_args.h"
#include "base/cpu_features.h"

namespace kvm::attention {
namespace {

constexpr KernelTable kScalar{"scalar", false, &kExactScalar, &kSampledScalar};
#if defined(__x86_64__)
constexpr KernelTable kAvx2{"avx2", false, &kExactAvx2, &kSampledAvx2};
constexpr KernelTable kAvx512{"avx512", false, &kExactAvx512, &kSampledAvx512};
constexpr KernelTable kAvx512Bf16{"avx512bf16", true, &kExactAvx512Bf16, &kSampledAvx512Bf16};
#endif

struct Available {
  std::array<const KernelTable*, 4> tables{};
  size_t n = 0;

  Available() {
    tables[n++] = &kScalar;
#if defined(__x86_64__)
    const CpuFeatures& cpu = cpu_features();
    const bool avx2 = cpu.avx2 && cpu.fma && cpu.f16c;
    const bool avx512 = avx2 && cpu.avx512f && cpu.avx512bw && cpu.avx512dq && cpu.avx512vl;
    if (avx2) {
      tables[n++] = &kAvx2;
    }
    if (avx512) {
      tables[n++] = &kAvx512;
    }
    if (avx512 && cpu.avx512bf16 && cpu.avx512vnni) {
      tables[n++] = &kAvx512Bf16;
    }
#endif
  }
};

const KernelTable* choose() {
  const KernelTable* best = available_tables().back();
  const char* forced = std::getenv("KVM_FORCE_ISA");
  if (forced == nullptr || *forced == '\0') {
    return best;
  }
  if (const KernelTable* table = find_table(forced)) {
    return table;
  }
  std::fprintf(stderr, "kvm: KVM_FORCE_ISA=%s is not available on this machine; using %s\n", forced,
               best->name);
  return best;
}

}  // namespace

std::span<const KernelTable* const> available_tables() {
  static const Available available;
  return {available.tables.data(), available.n};
}

const KernelTable* find_table(const char* name) {
  for (const KernelTable* table : available_tables()) {
    if (std::string_view(table->name) == name) {
      return table;
    }
  }
  return nullptr;
}

const KernelTable& active_table() {
  static const KernelTable* const table = choose();
  return *table;
}

}  // namespace kvm::attention
