// SPDX-License-Identifier: Apache-2.0
#include "client/arena_allocator.h"

#include <algorithm>
#include <iterator>

#include "base/round.h"

namespace kvm::client {

namespace {

constexpr uint64_t kMinAlign = 64;

}  // namespace

ArenaAllocator::ArenaAllocator(uint64_t size_bytes) : size_bytes_(size_bytes) {
  add_room(0, size_bytes_ / kMinAlign * kMinAlign);
}

void ArenaAllocator::add_room(uint64_t offset, uint64_t size_bytes) {
  if (size_bytes != 0) {
    by_offset_.emplace(offset, size_bytes);
    by_size_.emplace(size_bytes, offset);
  }
}

void ArenaAllocator::remove_room(uint64_t offset, uint64_t size_bytes) {
  by_offset_.erase(offset);
  by_size_.erase({size_bytes, offset});
}

uint64_t ArenaAllocator::allocate(uint64_t size_bytes, uint64_t alignment) {
  if (size_bytes == 0 || size_bytes > size_bytes_) {
    return kNone;
  }
  const uint64_t size = round_up(size_bytes, kMinAlign);
  alignment = std::max(alignment, kMinAlign);
  const std::lock_guard lock(mutex_);
  // Whatever is larger by the alignment fits, so this looks at few.
  for (auto it = by_size_.lower_bound({size, 0}); it != by_size_.end(); ++it) {
    const auto [room, begin] = *it;
    const uint64_t offset = round_up(begin, alignment);
    if (offset - begin > room - size) {
      continue;
    }
    pieces_.emplace(offset, size);
    remove_room(begin, room);
    add_room(begin, offset - begin);
    add_room(offset + size, begin + room - offset - size);
    return offset;
  }
  return kNone;
}

void ArenaAllocator::free(uint64_t offset) {
  const std::lock_guard lock(mutex_);
  const auto piece = pieces_.find(offset);
  if (piece == pieces_.end()) {
    return;
  }
  uint64_t begin = offset;
  uint64_t end = offset + piece->second;
  pieces_.erase(piece);
  const auto after = by_offset_.find(end);
  if (after != by_offset_.end()) {
    end += after->second;
    remove_room(after->first, after->second);
  }
  const auto next = by_offset_.lower_bound(begin);
  if (next != by_offset_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == begin) {
      begin = before->first;
      remove_room(before->first, before->second);
    }
  }
  add_room(begin, end - begin);
}

bool ArenaAllocator::is_empty() const {
  const std::lock_guard lock(mutex_);
  return pieces_.empty();
}

}  // namespace kvm::client
