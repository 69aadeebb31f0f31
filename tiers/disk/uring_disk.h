// SPDX-License-Identifier: Apache-2.0
// A DiskIo of io_uring: one system call begins a batch of ops, files and buffers are registered, so
// that the kernel looks them up and pins them once.
//
// Kernels, containers and administrators may refuse io_uring; where they refuse registering alone
// (locked memory has a limit), plain files and buffers are taken.
//
// Threads: as DiskIo.
#ifndef KVM_TIERS_DISK_URING_DISK_H_
#define KVM_TIERS_DISK_URING_DISK_H_

#include <memory>

#include "base/status.h"
#include "tiers/disk/disk_io.h"

namespace kvm::tiers {

// Fails: UNSUPPORTED, with the reason; NO_MEMORY.
Result<std::unique_ptr<DiskIo>> open_uring_disk(const DiskIoOptions& options);

}  // namespace kvm::tiers

#endif  // KVM_TIERS_DISK_URING_DISK_H_
