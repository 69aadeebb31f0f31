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

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace kvm::client {

class ArenaAllocator {
 public:
  explicit ArenaAllocator(uint64_t size_bytes);
  ArenaAllocator(const ArenaAllocator&) = delete;
  ArenaAllocator& operator=(const ArenaAllocator&) = delete;

  // Offset of size_bytes bytes at a multiple of `alignment` (a power of two) and of 64, or kNone.
  // Throws std::bad_alloc: nothing has changed.
  static constexpr uint64_t kNone = UINT64_MAX;
  uint64_t allocate(uint64_t size_bytes, uint64_t alignment);
  // Gives a piece back; an offset that allocate did not return (or that was freed) is ignored.
  void free(uint64_t offset) noexcept;
  bool is_empty() const;

 private:
  using Rooms = std::set<std::pair<uint64_t, uint64_t>>;  // size, offset
  struct Span {
    uint64_t size = 0;
    // A piece's: what lists it once it is room, so that freeing needs no memory.
    Rooms::node_type out;
  };
  using Spans = std::map<uint64_t, Span>;  // by offset

  Spans::iterator add_span(uint64_t offset, uint64_t size_bytes);
  void take(Spans::iterator span);
  void set_size(Spans::iterator room, uint64_t size_bytes);
  void merge(Spans::iterator room, Spans::iterator next);

  const uint64_t size_bytes_;
  mutable std::mutex mutex_;
  // Guarded by mutex_, as all below.
  // INVARIANT: the spans make up the arena; each is a piece that is out, or room, which rooms_
  // lists. No two rooms touch.
  Spans spans_;
  Rooms rooms_;
  size_t n_out_ = 0;
};

}  // namespace kvm::client

#endif  // KVM_CLIENT_ARENA_ALLOCATOR_H_
