// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <string>

#include "attention/dots/dots.h"
#include "attention/exact/exact_args.h"
#include "attention/kernel_table.h"
#include "attention/sampled/sampled_args.h"
#include "base/cpu_features.h"
#include "base/kernel_tables.h"
#include "base/status.h"

namespace kvm::attention {
namespace {

constexpr KernelTable kScalar{"scalar", false, &kExactScalar, &kSampledScalar, &kDotsScalar};
#if defined(__x86_64__)
constexpr KernelTable kAvx2{"avx2", false, &kExactAvx2, &kSampledAvx2, &kDotsAvx2};
constexpr KernelTable kAvx512{"avx512", false, &kExactAvx512, &kSampledAvx512, &kDotsAvx512};
constexpr KernelTable kAvx512Bf16{"avx512bf16", true, &kExactAvx512Bf16, &kSampledAvx512Bf16,
                                  &kDotsAvx512};
#endif

const KernelTables<KernelTable>& tables() {
#if defined(__x86_64__)
  const CpuFeatures& cpu = cpu_features();
  static const KernelTables<KernelTable> all(&kScalar, &kAvx2, &kAvx512, &kAvx512Bf16,
                                             cpu.avx512bf16 && cpu.avx512vnni);
#else
  static const KernelTables<KernelTable> all(&kScalar);
#endif
  return all;
}

const KernelTable* choose() {
  const KernelTable* table = &tables().choose();
  const char* forced = forced_isa();
  if (forced != nullptr && tables().find(forced) == nullptr) {
    std::fprintf(stderr, "kvm: KVM_FORCE_ISA=%s is not available on this machine; using %s\n",
                 forced, table->name);
  }
  return table;
}

}  // namespace

Status check_forced_isa() {
  const char* forced = forced_isa();
  if (forced == nullptr || tables().find(forced) != nullptr) {
    return Status::ok();
  }
  std::string names;
  for (const KernelTable* table : tables().available()) {
    names += (names.empty() ? "" : ", ") + std::string(table->name);
  }
  return Status(KVM_ERR_INVALID,
                "KVM_FORCE_ISA is '" + std::string(forced) + "'; this machine can run " + names);
}

std::span<const KernelTable* const> available_tables() { return tables().available(); }

const KernelTable* find_table(const char* name) { return tables().find(name); }

const KernelTable& active_table() {
  static const KernelTable* const table = choose();
  return *table;
}

}  // namespace kvm::attention
