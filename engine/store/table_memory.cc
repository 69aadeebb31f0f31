// SPDX-License-Identifier: Apache-2.0
#include "engine/store/table_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "base/assert.h"
#include "base/children.h"
#include "base/round.h"

namespace kvm::engine {
namespace {

constexpr uint64_t kOsPageBytes = 4096;

}  // namespace

uint64_t table_map_bytes(uint64_t size_bytes) { return round_up(size_bytes, kOsPageBytes); }

std::byte* map_tables(uint64_t map_bytes) {
  void* data = mmap(nullptr, map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return nullptr;
  }
  leave_out_of_children(data, map_bytes);
  return static_cast<std::byte*>(data);
}

TableReclaimer::~TableReclaimer() {
  while (unmap_some(UINT64_MAX)) {
  }
}

void TableReclaimer::reclaim(std::byte* data, uint64_t map_bytes) {
  size_bytes_ += map_bytes;
  try {
    tables_.push_back({data, map_bytes});
  } catch (const std::bad_alloc&) {
    // No room to remember them: now.
    KVM_ASSERT(munmap(data, map_bytes) == 0);
    budget_->uncharge(map_bytes);
    size_bytes_ -= map_bytes;
  }
}

bool TableReclaimer::unmap_some(uint64_t max_bytes) {
  if (tables_.empty()) {
    return false;
  }
  uint64_t left = std::max(max_bytes / kOsPageBytes, uint64_t{1}) * kOsPageBytes;
  while (left != 0 && !tables_.empty()) {
    Tables& last = tables_.back();
    const uint64_t n = std::min(left, last.map_bytes);
    last.map_bytes -= n;
    KVM_ASSERT(munmap(last.data + last.map_bytes, n) == 0);
    budget_->uncharge(n);
    size_bytes_ -= n;
    left -= n;
    if (last.map_bytes == 0) {
      tables_.pop_back();
    }
  }
  return true;
}

}  // namespace kvm::engine
