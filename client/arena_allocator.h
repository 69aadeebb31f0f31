// SPDX-License-Identifier: Apache-2.0
// Hands out pieces of an arena: of the room that is large enough the smallest, of equal ones the
// first.
//
// Nothing of its own lies in the arena. The daemon clears an arena when it closes the client, which
// an operator may ask for at any time; whoever gives pieces back then must find all as it was.
//
// Threads: any.  Memory: of this process, some 200 bytes for each piece that is out.
#ifndef KVM_CLIENT_ARENA_ALLOCATOR_H_
#define KVM_CLIENT_ARENA_ALLOCATOR_H_

#include <cstdint>
#include <map>
#include <memory_resource>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

namespace kvm::client {

class ArenaAllocator {
 public:
  explicit ArenaAllocator(uint64_t size_bytes);
  ArenaAllocator(const ArenaAllocator&) = delete;
  ArenaAllocator& operator=(const ArenaAllocator&) = delete;

  // Offset of size_bytes bytes at a multiple of `alignment` (a power of two) and of 64, or kNone.
  // May fail with std::bad_alloc, like free(); a piece may then be lost until the end.
  static constexpr uint64_t kNone = UINT64_MAX;
  uint64_t allocate(uint64_t size_bytes, uint64_t alignment);
  // Gives a piece back; an offset that allocate did not return (or that was freed) is ignored.
  void free(uint64_t offset);
  bool is_empty() const;

 private:
  void add_room(uint64_t offset, uint64_t size_bytes);
  void remove_room(uint64_t offset, uint64_t size_bytes);

  const uint64_t size_bytes_;
  mutable std::mutex mutex_;
  // Guarded by mutex_, as all below.
  std::pmr::unsynchronized_pool_resource memory_;
  // INVARIANT: rooms of both are the same (but for one that memory was refused for), none is empty
  // and no two touch; with the pieces that are out they make up the arena.
  std::pmr::map<uint64_t, uint64_t> by_offset_{&memory_};
  std::pmr::set<std::pair<uint64_t, uint64_t>> by_size_{&memory_};  // size, offset
  std::pmr::unordered_map<uint64_t, uint64_t> pieces_{&memory_};    // offset, size
};

}  // namespace kvm::client

#endif  // KVM_CLIENT_ARENA_ALLOCATOR_H_
