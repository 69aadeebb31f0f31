// SPDX-License-Identifier: Apache-2.0
#include "base/cpu_features.h"
#include "base/kernel_tables.h"
#include "hash_index/sketch/frame_args.h"
#include "hash_index/sketch/scan_args.h"
#include "hash_index/sketch/scan_table.h"

namespace kvm::hash_index {
namespace {

constexpr ScanTable kScalar{"scalar", &kScanScalar, &kFrameScalar};
#if defined(__x86_64__)
constexpr ScanTable kAvx2{"avx2", &kScanAvx2, &kFrameAvx2};
constexpr ScanTable kAvx512{"avx512", &kScanAvx512, &kFrameAvx512};
constexpr ScanTable kAvx512Vbmi{"avx512vbmi", &kScanAvx512Vbmi, &kFrameAvx512};
#endif

const KernelTables<ScanTable>& tables() {
#if defined(__x86_64__)
  const CpuFeatures& cpu = cpu_features();
  static const KernelTables<ScanTable> all(&kScalar, &kAvx2, &kAvx512, &kAvx512Vbmi,
                                           cpu.avx512vbmi && cpu.avx512vnni);
#else
  static const KernelTables<ScanTable> all(&kScalar);
#endif
  return all;
}

}  // namespace

std::span<const ScanTable* const> available_scan_tables() { return tables().available(); }

const ScanTable* find_scan_table(const char* name) { return tables().find(name); }

const ScanTable& active_scan_table() {
  static const ScanTable& table = tables().choose();
  return table;
}

}  // namespace kvm::hash_index
