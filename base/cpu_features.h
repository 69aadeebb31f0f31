// SPDX-License-Identifier: Apache-2.0
// The features that the processor AND the operating system offer. Detected once.
#ifndef KVM_BASE_CPU_FEATURES_H_
#define KVM_BASE_CPU_FEATURES_H_

namespace kvm {

// One flag per extension; code that uses two extensions tests two flags. An extension whose
// registers the operating system does not save counts as absent.
struct CpuFeatures {
  bool avx2 = false;
  bool fma = false;
  bool f16c = false;
  bool avx512f = false;
  bool avx512bw = false;
  bool avx512dq = false;
  bool avx512vl = false;
  bool avx512vnni = false;
  bool avx512vbmi = false;
  bool avx512bf16 = false;
};

// Constant for the life of the process; all false on machines other than x86-64.
const CpuFeatures& cpu_features();

// Says whether a core's first-level data cache has 48 KiB or more: enough for what readers of long
// rows ask for 25 KiB ahead. False where the system does not say. Constant likewise.
bool has_large_first_level();

}  // namespace kvm

#endif  // KVM_BASE_CPU_FEATURES_H_
