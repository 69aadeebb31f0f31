// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstdlib>
#include <string_view>

#include "base/cpu_features.h"
#include "hash_index/sketch/scan_args.h"
#include "hash_index/sketch/scan_table.h"

namespace kvm::hash_index {
namespace {

constexpr ScanTable kScalar{"scalar", &kScanScalar};
#if defined(__x86_64__)
constexpr ScanTable kAvx2{"avx2", &kScanAvx2};
constexpr ScanTable kAvx512{"avx512", &kScanAvx512};
constexpr ScanTable kAvx512Vbmi{"avx512vbmi", &kScanAvx512Vbmi};
#endif

struct Available {
  std::array<const ScanTable*, 4> tables{};
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
    if (avx512 && cpu.avx512vbmi && cpu.avx512vnni) {
      tables[n++] = &kAvx512Vbmi;
    }
#endif
  }
};

const ScanTable* choose() {
  const char* forced = std::getenv("KVM_FORCE_ISA");
  const ScanTable* table = forced != nullptr ? find_scan_table(forced) : nullptr;
  return table != nullptr ? table : available_scan_tables().back();
}

}  // namespace

std::span<const ScanTable* const> available_scan_tables() {
  static const Available available;
  return {available.tables.data(), available.n};
}

const ScanTable* find_scan_table(const char* name) {
  for (const ScanTable* table : available_scan_tables()) {
    if (std::string_view(table->name) == name) {
      return table;
    }
  }
  return nullptr;
}

const ScanTable& active_scan_table() {
  static const ScanTable* const table = choose();
  return *table;
}

}  // namespace kvm::hash_index
