// SPDX-License-Identifier: Apache-2.0
// Shared memory: anonymous files (memfd) that the daemon makes, allocates, maps and seals, and
// whose descriptors it hands to one client.
//
// Seals make the size final, so no access within it can fault; the daemon's regions are sealed
// against future writable mappings as well, so a client can only read them. A client checks both
// before it trusts what it was given.
#ifndef KVM_IPC_MEMORY_H_
#define KVM_IPC_MEMORY_H_

#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "ipc/fd.h"

namespace kvm::ipc {

// A mapping that is unmapped on destruction; only the functions below make one. Threads: a value.
class Mapping {
 public:
  Mapping() = default;
  Mapping(void* data, uint64_t size_bytes) : data_(data), size_bytes_(size_bytes) {}
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  uint8_t* data() const { return static_cast<uint8_t*>(data_); }
  uint64_t size_bytes() const { return size_bytes_; }

  // Gives the memory of a kReadWrite region back to the system although others may still map it:
  // they read zeros from here on, and what they write is memory of their own. Unmapping alone would
  // leave it with a client that keeps its descriptor, counted by nobody.
  void discard_contents();

 private:
  void unmap();

  void* data_ = nullptr;
  uint64_t size_bytes_ = 0;
};

enum class PeerAccess : uint8_t {
  kReadWrite,
  kReadOnly,  // the receiver of the descriptor can map it for reading only
};

struct SharedMemory {
  Fd fd;
  Mapping mapping;  // read-write
};

// Makes `size_bytes` of zeroed memory (rounded up to a page), allocated at once and sealed.
// `name` shows up in /proc. Fails: NO_MEMORY.
Result<SharedMemory> create_shared_memory(const char* name, uint64_t size_bytes, PeerAccess access);

// The client's side: maps the first size_bytes of a received descriptor after checking that it is
// sealed as above and at least that large. kReadOnly maps for reading.
// Fails: PROTOCOL (not sealed, too small), NO_MEMORY (mmap).
Result<Mapping> map_shared_memory(const Fd& fd, uint64_t size_bytes, PeerAccess access);

}  // namespace kvm::ipc

#endif  // KVM_IPC_MEMORY_H_
