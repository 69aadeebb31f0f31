// SPDX-License-Identifier: Apache-2.0
// What the machine, or the container we run in, has for us.
//
// Threads: any.
#ifndef KVM_BASE_MACHINE_H_
#define KVM_BASE_MACHINE_H_

#include <cstdint>

namespace kvm {

struct MachineMemory {
  uint64_t total_bytes = 0;
  uint64_t free_bytes = 0;  // that can be used without swapping
};

// From /proc/meminfo, and the limits of the control group where they are lower. Zeros when /proc
// cannot be read.
MachineMemory machine_memory();

// Cores that this process may run on; at least 1.
uint32_t usable_cores();

// Raises the soft limit of open files to the hard one.
void raise_open_file_limit();

}  // namespace kvm

#endif  // KVM_BASE_MACHINE_H_
