// SPDX-License-Identifier: Apache-2.0
// A DiskIo of threads that call pread, pwrite and fdatasync: for systems that refuse io_uring.
//
// Threads: as DiskIo; its own do the calls.
#ifndef KVM_TIERS_DISK_POOL_DISK_H_
#define KVM_TIERS_DISK_POOL_DISK_H_

#include <memory>

#include "base/status.h"
#include "tiers/disk/disk_io.h"

namespace kvm::tiers {

// Fails: NO_MEMORY; LIMIT: the system refuses threads.
Result<std::unique_ptr<DiskIo>> open_pool_disk(const DiskIoOptions& options);

}  // namespace kvm::tiers

#endif  // KVM_TIERS_DISK_POOL_DISK_H_
