// SPDX-License-Identifier: Apache-2.0
// The cores and the memory that the machine, or the container we run in, has for us.
//
// Threads: any.
#ifndef KVM_BASE_MACHINE_H_
#define KVM_BASE_MACHINE_H_

#include <cstdint>
#include <string>

namespace kvm {

struct MachineMemory {
  uint64_t total_bytes = 0;
  uint64_t free_bytes = 0;  // that can be used without swapping
};

// From /proc/meminfo, and where they are lower, from the limits of this process's control group and
// of all groups above it that can be seen (versions 2 and 1): a container's is at the root of what
// it sees, a systemd unit's is not. Page cache that a group can drop counts as free. Zeros when
// /proc cannot be read. `root` stands before all paths, for tests.
MachineMemory machine_memory(const std::string& root = {});

// Says whether the kernel gives this process transparent huge pages where it asks for them:
// "always", "madvise" or "never" as the system is set, "disabled" for this process alone (prctl),
// "absent" from this kernel. `root` as above.
std::string huge_page_setting(const std::string& root = {});

// Cores that this process may run on; at least 1.
uint32_t usable_cores();

// Raises the soft limit of open files to the hard one.
void raise_open_file_limit();

}  // namespace kvm

#endif  // KVM_BASE_MACHINE_H_
