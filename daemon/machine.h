// SPDX-License-Identifier: Apache-2.0
// What the machine, or the container we run in, has.
#ifndef KVM_DAEMON_MACHINE_H_
#define KVM_DAEMON_MACHINE_H_

#include <cstdint>

namespace kvm::daemon {

struct MachineMemory {
  uint64_t total_bytes = 0;
  uint64_t free_bytes = 0;  // that can be used without swapping
};

// From /proc/meminfo, and the limits of the control group where they are lower. Zeros when /proc
// cannot be read. Threads: any.
MachineMemory machine_memory();

// Raises the soft limit of open files to the hard one.
void raise_open_file_limit();

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_MACHINE_H_
