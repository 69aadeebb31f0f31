// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/disk_memory.h"

#include <sys/mman.h>

#include <utility>

#include "base/children.h"

namespace kvm::tiers {

DiskMemory::DiskMemory(uint64_t size_bytes) noexcept {
  if (size_bytes == 0) {
    return;
  }
  void* const data =
      ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data != MAP_FAILED) {
    leave_out_of_children(data, size_bytes);
    bytes_ = {static_cast<std::byte*>(data), size_bytes};
  }
}

DiskMemory& DiskMemory::operator=(DiskMemory&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

DiskMemory::~DiskMemory() {
  if (!bytes_.empty()) {
    ::munmap(bytes_.data(), bytes_.size());
  }
}

}  // namespace kvm::tiers
