// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/disk_memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <utility>

#include "base/children.h"
#include "tiers/disk/disk_format.h"
#include "tiers/disk/disk_io.h"

namespace kvm::tiers {
namespace {

constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;

}  // namespace

DiskMemory::DiskMemory(uint64_t size_bytes) noexcept {
  if (size_bytes == 0) {
    return;
  }
  // To a drive a transfer is one stretch of a huge page, and otherwise one of each OS page, which
  // costs half of the bandwidth of a virtual drive. What is mapped is aligned to huge pages.
  const uint64_t slack = size_bytes < kHugePageBytes ? 0 : kHugePageBytes;
  void* const mapped = ::mmap(nullptr, size_bytes + slack, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    return;
  }
  auto* data = static_cast<std::byte*>(mapped);
  if (slack != 0) {
    const auto address = reinterpret_cast<uintptr_t>(mapped);
    const uint64_t before = align_up(address, kHugePageBytes) - address;
    const uint64_t end = align_up(before + size_bytes, kMaxDiskBlockBytes);
    if (before != 0) {
      ::munmap(data, before);
    }
    if (end < size_bytes + slack) {
      ::munmap(data + end, size_bytes + slack - end);
    }
    data += before;
    (void)::madvise(data, size_bytes, MADV_HUGEPAGE);  // a refusal costs speed only
  }
  leave_out_of_children(data, size_bytes);
  bytes_ = {data, size_bytes};
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
