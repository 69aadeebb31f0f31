// SPDX-License-Identifier: Apache-2.0
// Arenas through which a queue copies HOST buffers: they grow with what is asked, and shrink to one
// when idle.
//
// Threads: one at a time (the queue's).
#ifndef KVM_CLIENT_THIN_STAGING_H_
#define KVM_CLIENT_THIN_STAGING_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "client/arena_allocator.h"
#include "client/thin_connection.h"

namespace kvm::client {

class StagingPool {
 public:
  explicit StagingPool(std::shared_ptr<Connection> connection)
      : connection_(std::move(connection)) {}
  ~StagingPool();
  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;

  struct Piece {
    uint32_t region = 0;
    uint64_t offset = 0;
    uint8_t* data = nullptr;
    uint64_t size_bytes = 0;
  };

  // Fails: AGAIN (all arenas are in use by requests in flight), LIMIT (larger than an arena can
  // be), and as kvm_arena_create.
  Result<Piece> allocate(uint64_t size_bytes);
  void free(const Piece& piece);
  // Gives all arenas back, whose pieces nobody uses any more, and waits for that until deadline_ns
  // at most.
  void close(uint64_t deadline_ns) noexcept;

 private:
  // LIMIT: ipc::own_arenas counts on it.
  static constexpr size_t kMaxArenas = 3;

  struct Arena {
    SharedArena memory;
    std::unique_ptr<ArenaAllocator> allocator;
  };

  Result<Piece> allocate_in(Arena* arena, uint64_t size_bytes);
  Status grow(uint64_t size_bytes);
  void drop_empty_but(const Arena* keep);

  std::shared_ptr<Connection> connection_;
  std::vector<std::unique_ptr<Arena>> arenas_;  // the newest, and largest, last
};

}  // namespace kvm::client

#endif  // KVM_CLIENT_THIN_STAGING_H_
