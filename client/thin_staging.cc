// SPDX-License-Identifier: Apache-2.0
#include "client/thin_staging.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/undo.h"
#include "ipc/wire.h"

namespace kvm::client {

namespace {

constexpr uint64_t kFirstBytes = 1 << 20;
constexpr uint64_t kAlign = 64;

}  // namespace

StagingPool::~StagingPool() { close(add_saturating(now_ns(), connection_->timeout_ns())); }

void StagingPool::close(uint64_t deadline_ns) noexcept {
  for (const auto& arena : arenas_) {
    connection_->destroy_arena(arena->memory.region, time_left(deadline_ns));
  }
  arenas_.clear();
}

Result<StagingPool::Piece> StagingPool::allocate(uint64_t size_bytes) {
  for (auto it = arenas_.rbegin(); it != arenas_.rend(); ++it) {
    const uint64_t offset = (*it)->allocator->allocate(size_bytes, kAlign);
    if (offset != ArenaAllocator::kNone) {
      const SharedArena& memory = (*it)->memory;
      return Piece{memory.region, offset, memory.mapping.data() + offset, size_bytes};
    }
  }
  KVM_TRY(grow(size_bytes));
  return allocate_in(arenas_.back().get(), size_bytes);
}

Result<StagingPool::Piece> StagingPool::allocate_in(Arena* arena, uint64_t size_bytes) {
  const uint64_t offset = arena->allocator->allocate(size_bytes, kAlign);
  if (offset == ArenaAllocator::kNone) {
    return Status(KVM_ERR_INTERNAL,
                  "a new staging arena has no room for " + std::to_string(size_bytes) + " bytes");
  }
  return Piece{arena->memory.region, offset, arena->memory.mapping.data() + offset, size_bytes};
}

Status StagingPool::grow(uint64_t size_bytes) {
  if (size_bytes > ipc::kMaxArenaBytes) {
    return Status(KVM_ERR_LIMIT, "a HOST buffer of " + std::to_string(size_bytes) +
                                     " bytes does not fit into a staging arena of at most " +
                                     std::to_string(ipc::kMaxArenaBytes));
  }
  const uint64_t last = arenas_.empty() ? 0 : arenas_.back()->memory.mapping.size_bytes();
  drop_empty_but(nullptr);
  if (arenas_.size() >= kMaxArenas) {
    return Status(KVM_ERR_AGAIN,
                  "the staging arenas are full of requests in flight: take "
                  "completions first");
  }
  const uint64_t wanted = std::max({kFirstBytes, last * 2, size_bytes});
  auto arena = std::make_unique<Arena>();
  arenas_.reserve(arenas_.size() + 1);
  KVM_TRY_ASSIGN(arena->memory, connection_->create_arena(std::min(wanted, ipc::kMaxArenaBytes)));
  Undo destroying([&] { connection_->destroy_arena(arena->memory.region); });
  arena->allocator = std::make_unique<ArenaAllocator>(arena->memory.mapping.size_bytes());
  destroying.dismiss();
  arenas_.push_back(std::move(arena));
  return Status::ok();
}

void StagingPool::free(const Piece& piece) {
  for (const auto& arena : arenas_) {
    if (arena->memory.region == piece.region) {
      arena->allocator->free(piece.offset);
      if (arena != arenas_.back() && arena->allocator->is_empty()) {
        drop_empty_but(arenas_.back().get());
      }
      return;
    }
  }
}

void StagingPool::drop_empty_but(const Arena* keep) {
  std::erase_if(arenas_, [&](const std::unique_ptr<Arena>& arena) {
    if (arena.get() == keep || !arena->allocator->is_empty()) {
      return false;
    }
    connection_->destroy_arena(arena->memory.region);
    return true;
  });
}

}  // namespace kvm::client
