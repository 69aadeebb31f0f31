// SPDX-License-Identifier: Apache-2.0
// DiskMemory: memory for direct I/O: aligned to an OS page, and children of fork() have none of it,
// so that a transfer in flight stays the parent's.
//
// Threads: as of plain memory.
#ifndef KVM_TIERS_DISK_DISK_MEMORY_H_
#define KVM_TIERS_DISK_DISK_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvm::tiers {

class DiskMemory {
 public:
  DiskMemory() = default;
  // Of no bytes where the system has none.
  explicit DiskMemory(uint64_t size_bytes) noexcept;
  DiskMemory(DiskMemory&& other) noexcept { *this = static_cast<DiskMemory&&>(other); }
  DiskMemory& operator=(DiskMemory&& other) noexcept;
  ~DiskMemory();

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

}  // namespace kvm::tiers

#endif  // KVM_TIERS_DISK_DISK_MEMORY_H_
