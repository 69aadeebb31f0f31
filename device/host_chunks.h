// SPDX-License-Identifier: Apache-2.0
// HostChunks: page-locked host memory in chunks of 2 MiB, where spilled sequences lie packed.
// Chunks are reference counted, as pages of the device are.
//
// Threads: one at a time.  Memory: all of it, from creation on.
#ifndef KVM_DEVICE_HOST_CHUNKS_H_
#define KVM_DEVICE_HOST_CHUNKS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "device/driver.h"

namespace kvm::device {

inline constexpr uint64_t kChunkBytes = uint64_t{2} << 20;

class HostChunks {
 public:
  // size_bytes is rounded up to chunks; 0: there are none. `driver` must outlive it.
  // Fails: NO_MEMORY, DEVICE.
  static Result<std::unique_ptr<HostChunks>> create(MemoryDriver* driver, uint64_t size_bytes);
  // REQUIRES: no enqueued work uses a chunk.
  ~HostChunks();
  HostChunks(const HostChunks&) = delete;
  HostChunks& operator=(const HostChunks&) = delete;

  uint64_t n_chunks() const { return size_bytes_ / kChunkBytes; }
  uint64_t n_free() const { return free_.size(); }
  // With one reference. REQUIRES: n_free() > 0.
  uint32_t take();
  // REQUIRES, here and below: somebody holds it.
  void add_ref(uint32_t chunk) { ++refs_[chunk]; }
  void release(uint32_t chunk);
  uint32_t n_refs(uint32_t chunk) const { return refs_[chunk]; }
  uint8_t* data(uint32_t chunk) const { return memory_ + chunk * kChunkBytes; }

 private:
  HostChunks(MemoryDriver* driver, uint64_t size_bytes)
      : driver_(driver), size_bytes_(size_bytes) {}

  MemoryDriver* const driver_;
  const uint64_t size_bytes_;
  uint8_t* memory_ = nullptr;
  uint64_t registered_bytes_ = 0;
  std::vector<uint32_t> free_;  // has room for all: giving back asks for no memory
  std::vector<uint32_t> refs_;
};

}  // namespace kvm::device

#endif  // KVM_DEVICE_HOST_CHUNKS_H_
