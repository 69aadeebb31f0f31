// SPDX-License-Identifier: Apache-2.0
// One table of kernels per instruction set, and the choice between them: what attention/ and
// hash_index/ share. Constant while the process lives.
#ifndef KVM_BASE_KERNEL_TABLES_H_
#define KVM_BASE_KERNEL_TABLES_H_

#include <array>
#include <cstddef>
#include <cstdlib>
#include <span>
#include <string_view>

#include "base/cpu_features.h"

namespace kvm {

// The table that the environment variable KVM_FORCE_ISA names; null where it is unset or empty.
inline const char* forced_isa() {
  const char* name = std::getenv("KVM_FORCE_ISA");
  return name == nullptr || *name == '\0' ? nullptr : name;
}

// Table has a member `name`.
template <typename Table>
class KernelTables {
 public:
  explicit KernelTables(const Table* scalar) { add(scalar, true); }
  // avx2 is compiled for AVX2 + FMA + F16C, avx512 for F + BW + DQ + VL of it, best for those and
  // what has_best says.
  KernelTables(const Table* scalar, const Table* avx2, const Table* avx512, const Table* best,
               bool has_best)
      : KernelTables(scalar) {
    const CpuFeatures& cpu = cpu_features();
    const bool has_avx2 = cpu.avx2 && cpu.fma && cpu.f16c;
    const bool has_avx512 = has_avx2 && cpu.avx512f && cpu.avx512bw && cpu.avx512dq && cpu.avx512vl;
    add(avx2, has_avx2);
    add(avx512, has_avx512);
    add(best, has_avx512 && has_best);
  }

  // Those that this machine can run, worst first; element 0 is the scalar one.
  std::span<const Table* const> available() const { return {tables_.data(), n_}; }
  // Null where the name is unknown, null, or of one that cannot run here.
  const Table* find(const char* name) const {
    for (const Table* table : available()) {
      if (name != nullptr && std::string_view(table->name) == name) {
        return table;
      }
    }
    return nullptr;
  }
  // The best, or the one that forced_isa() finds.
  const Table& choose() const {
    const Table* forced = find(forced_isa());
    return forced != nullptr ? *forced : *available().back();
  }

 private:
  void add(const Table* table, bool can_run) {
    if (can_run) {
      tables_[n_++] = table;
    }
  }

  std::array<const Table*, 4> tables_{};
  size_t n_ = 0;
};

}  // namespace kvm

#endif  // KVM_BASE_KERNEL_TABLES_H_
