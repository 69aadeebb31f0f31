// SPDX-License-Identifier: Apache-2.0
// The arenas of one client as the daemon maps them, by region id.
//
// A region that is removed while requests use it stays mapped until the last of them is released:
// nothing that a client says can unmap memory under a running task.
//
// Threads: the daemon's dispatcher only.
#ifndef KVM_IPC_REGION_TABLE_H_
#define KVM_IPC_REGION_TABLE_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "ipc/memory.h"

namespace kvm::ipc {

class RegionTable;

// LIMIT: a request names a block, a result and at most six tensors.
inline constexpr uint32_t kMaxRegionsPerRequest = 8;

// The regions that a request keeps mapped. Released on destruction. REQUIRES: destroyed before the
// table.
class RegionPins {
 public:
  RegionPins() = default;
  RegionPins(RegionPins&& other) noexcept;
  RegionPins& operator=(RegionPins&& other) noexcept;
  ~RegionPins() { release(); }

  void release();

 private:
  friend class RegionTable;

  RegionTable* table_ = nullptr;
  std::array<uint32_t, kMaxRegionsPerRequest> ids_{};
  uint32_t n_ = 0;
};

// Where a region lies in this process.
struct RegionView {
  uint8_t* data = nullptr;
  uint64_t size_bytes = 0;
};

class RegionTable {
 public:
  // `discard` gets each mapping that is no longer used, so that another thread can take its time
  // over unmapping it. Without one it is unmapped on the spot.
  explicit RegionTable(std::function<void(Mapping)> discard = {}) : discard_(std::move(discard)) {}
  RegionTable(const RegionTable&) = delete;
  RegionTable& operator=(const RegionTable&) = delete;

  // Returns the region's id: never 0, never used before in this table. Throws std::bad_alloc:
  // nothing has changed, and the mapping is still the caller's.
  uint32_t add(Mapping&& mapping);
  // Returns whether there was such a region. Its id is unknown from here on.
  bool remove(uint32_t id);
  uint64_t total_bytes() const { return total_bytes_; }  // of regions still mapped

  // Gives the memory of every region back. REQUIRES: nothing is pinned.
  void discard_contents();

  // Finds a region and pins it once for `pins`. data == nullptr: the id is unknown.
  RegionView pin(uint32_t id, RegionPins* pins);

 private:
  friend class RegionPins;

  struct Region {
    uint32_t id = 0;
    uint32_t n_pins = 0;
    bool removed = false;
    Mapping mapping;
  };

  Region* find(uint32_t id);
  void unpin(uint32_t id);
  void erase(Region* region);

  std::function<void(Mapping)> discard_;
  std::vector<Region> regions_;  // few: searched in order
  uint32_t last_id_ = 0;
  uint64_t total_bytes_ = 0;
};

}  // namespace kvm::ipc

#endif  // KVM_IPC_REGION_TABLE_H_
