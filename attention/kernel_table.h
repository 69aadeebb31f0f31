// SPDX-License-Identifier: Apache-2.0
// One table of kernels per instruction set, and the choice between them.
//
// Tables: "scalar" (any machine), "avx2" (AVX2 + FMA + F16C), "avx512" (F + BW + DQ + VL),
// "avx512bf16" (those, AVX512_BF16 and AVX512_VNNI). A table is available only where the processor
// and the operating system offer every extension that it was compiled with.
#ifndef KVM_ATTENTION_KERNEL_TABLE_H_
#define KVM_ATTENTION_KERNEL_TABLE_H_

#include <span>

#include "base/status.h"

namespace kvm::attention {

struct DotKernels;      // attention/dots/dots.h
struct ExactKernels;    // attention/exact/exact_args.h
struct SampledKernels;  // attention/sampled/sampled_args.h

struct KernelTable {
  const char* name = nullptr;
  bool has_bf16_dot = false;
  const ExactKernels* exact = nullptr;
  const SampledKernels* sampled = nullptr;
  const DotKernels* dots = nullptr;
};

// Tables that this machine can run, worst first; never empty, element 0 is "scalar". Constant for
// the life of the process.
std::span<const KernelTable* const> available_tables();

// The table with this name, or null where it is unknown or cannot run here.
const KernelTable* find_table(const char* name);

// Fails: INVALID where KVM_FORCE_ISA names a table that this machine cannot run, or none; the
// sentence has those that can. An engine asks before it computes.
Status check_forced_isa();
// The best available table, or the one named by the environment variable KVM_FORCE_ISA. Read once,
// at the first call; a name that cannot run here is ignored with one line on stderr.
const KernelTable& active_table();

}  // namespace kvm::attention

#endif  // KVM_ATTENTION_KERNEL_TABLE_H_
