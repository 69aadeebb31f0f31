// SPDX-License-Identifier: Apache-2.0
// What several parts of the disk tier ask of the system.
//
// Threads: any.
#ifndef KVM_TIERS_DISK_DISK_SYSTEM_H_
#define KVM_TIERS_DISK_DISK_SYSTEM_H_

#include <cstdint>
#include <string>

#include "base/status.h"

namespace kvm::tiers {

// What was made, renamed or removed in the directory is so after a crash, too. Fails: IO.
Status sync_directory(const std::string& path);

// Drawn by lot; not 0.
uint64_t random_id();

}  // namespace kvm::tiers

#endif  // KVM_TIERS_DISK_DISK_SYSTEM_H_
