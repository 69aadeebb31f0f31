// SPDX-License-Identifier: Apache-2.0
// Memory for hash tables, tens of megabytes each: mapped at once, unmapped bit by bit, because
// giving back a gigabyte takes the driver a tenth of a second.
//
// Threads: the driver's; the bytes may be used by any. Memory: charged by the caller of map_tables,
// taken off the budget when it is unmapped.
#ifndef KVM_ENGINE_STORE_TABLE_MEMORY_H_
#define KVM_ENGINE_STORE_TABLE_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tiers/budget.h"

namespace kvm::engine {

// Returns what `size_bytes` take.
uint64_t table_map_bytes(uint64_t size_bytes);
// Zeros, aligned to an OS page; null where the machine refuses. map_bytes: from table_map_bytes.
std::byte* map_tables(uint64_t map_bytes);

// A TableReclaimer holds tables that nobody needs any more.
class TableReclaimer {
 public:
  explicit TableReclaimer(tiers::MemoryBudget* budget) : budget_(budget) {}
  ~TableReclaimer();
  TableReclaimer(const TableReclaimer&) = delete;
  TableReclaimer& operator=(const TableReclaimer&) = delete;

  void reclaim(std::byte* data, uint64_t map_bytes);
  // Unmaps at most max_bytes, and takes them off the budget. Returns whether there were any.
  bool unmap_some(uint64_t max_bytes);
  uint64_t size_bytes() const { return size_bytes_; }

 private:
  struct Tables {
    std::byte* data = nullptr;
    uint64_t map_bytes = 0;
  };
  tiers::MemoryBudget* const budget_;
  std::vector<Tables> tables_;
  uint64_t size_bytes_ = 0;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_TABLE_MEMORY_H_
