// SPDX-License-Identifier: Apache-2.0
// Hands out pieces of an arena.
//
// Boost.Interprocess keeps its free lists inside the arena, which the daemon maps but never looks
// at: it sees offsets and lengths only. The lock is an ordinary mutex of this process.
//
// Threads: any.
#ifndef KVM_CLIENT_ARENA_ALLOCATOR_H_
#define KVM_CLIENT_ARENA_ALLOCATOR_H_

#include <cstdint>
#include <memory>

namespace kvm::client {

class ArenaAllocator {
 public:
  // Bytes that the allocator itself may need beside an allocation of its only piece.
  static constexpr uint64_t kOverheadBytes = 64 * 1024;

  // REQUIRES: base is aligned to a page, size_bytes >= 4096, and the memory outlives the allocator.
  ArenaAllocator(void* base, uint64_t size_bytes);
  ~ArenaAllocator();
  ArenaAllocator(const ArenaAllocator&) = delete;
  ArenaAllocator& operator=(const ArenaAllocator&) = delete;

  // Offset of size_bytes bytes at a multiple of `alignment` (a power of two), or kNone.
  static constexpr uint64_t kNone = UINT64_MAX;
  uint64_t allocate(uint64_t size_bytes, uint64_t alignment);
  // Gives a piece back; an offset that allocate did not return (or that was freed) is ignored.
  void free(uint64_t offset);
  bool is_empty() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvm::client

#endif  // KVM_CLIENT_ARENA_ALLOCATOR_H_
