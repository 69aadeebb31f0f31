// SPDX-License-Identifier: Apache-2.0
// One table of sketch kernels per instruction set, and the choice between them.
//
// Tables: "scalar" (any machine), "avx2" (AVX2 + FMA + F16C), "avx512" (F + BW + DQ + VL),
// "avx512vbmi" (those, VBMI and VNNI). A table is available only where the processor and the
// operating system offer every extension that it was compiled with.
#ifndef KVM_HASH_INDEX_SKETCH_SCAN_TABLE_H_
#define KVM_HASH_INDEX_SKETCH_SCAN_TABLE_H_

#include <span>

namespace kvm::hash_index {

struct ScanKernels;   // sketch/scan_args.h
struct FrameKernels;  // sketch/frame_args.h

struct ScanTable {
  const char* name = nullptr;
  const ScanKernels* kernels = nullptr;
  const FrameKernels* frame = nullptr;
};

// Tables that this machine can run, worst first; never empty, element 0 is "scalar". Constant for
// the life of the process.
std::span<const ScanTable* const> available_scan_tables();

// The table with this name, or null where it is unknown or cannot run here.
const ScanTable* find_scan_table(const char* name);

// The best available table, or the one named by the environment variable KVM_FORCE_ISA; a name that
// is not one of ours (another folder may have more tables) means the best. Read once.
const ScanTable& active_scan_table();

}  // namespace kvm::hash_index

#endif  // KVM_HASH_INDEX_SKETCH_SCAN_TABLE_H_
