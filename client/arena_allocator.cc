// SPDX-License-Identifier: Apache-2.0
#include "client/arena_allocator.h"

#include <algorithm>
#include <iterator>

#include "base/round.h"
#include "base/undo.h"

namespace kvm::client {

namespace {

constexpr uint64_t kMinAlign = 64;

}  // namespace

ArenaAllocator::ArenaAllocator(uint64_t size_bytes) : size_bytes_(size_bytes) {
  if (size_bytes_ >= kMinAlign) {
    add_span(0, size_bytes_ / kMinAlign * kMinAlign);
  }
}

// Adds room. Throws std::bad_alloc: nothing has changed.
ArenaAllocator::Spans::iterator ArenaAllocator::add_span(uint64_t offset, uint64_t size_bytes) {
  const auto span = spans_.try_emplace(offset).first;
  Undo erasing([&] { spans_.erase(span); });
  rooms_.emplace(size_bytes, offset);
  erasing.dismiss();
  span->second.size = size_bytes;
  return span;
}

// Makes a piece of a room.
void ArenaAllocator::take(Spans::iterator span) {
  span->second.out = rooms_.extract({span->second.size, span->first});
  ++n_out_;
}

void ArenaAllocator::set_size(Spans::iterator room, uint64_t size_bytes) {
  Rooms::node_type node = rooms_.extract({room->second.size, room->first});
  node.value().first = size_bytes;
  rooms_.insert(std::move(node));
  room->second.size = size_bytes;
}

uint64_t ArenaAllocator::allocate(uint64_t size_bytes, uint64_t alignment) {
  if (size_bytes == 0 || size_bytes > size_bytes_) {
    return kNone;
  }
  const uint64_t size = round_up(size_bytes, kMinAlign);
  alignment = std::max(alignment, kMinAlign);
  const std::lock_guard lock(mutex_);
  // Whatever is larger by the alignment fits, so this looks at few.
  for (auto it = rooms_.lower_bound({size, 0}); it != rooms_.end(); ++it) {
    const auto [room, begin] = *it;
    const uint64_t offset = round_up(begin, alignment);
    if (offset - begin > room - size) {
      continue;
    }
    const uint64_t n_before = offset - begin;
    const uint64_t n_after = room - size - n_before;
    const auto first = spans_.find(begin);
    const auto piece = n_before == 0 ? first : add_span(offset, size);
    Undo erasing([&] {
      if (piece != first) {
        rooms_.erase({size, offset});
        spans_.erase(piece);
      }
    });
    if (n_after != 0) {
      add_span(offset + size, n_after);
    }
    erasing.dismiss();
    set_size(first, piece == first ? size : n_before);
    take(piece);
    return offset;
  }
  return kNone;
}

void ArenaAllocator::free(uint64_t offset) noexcept {
  const std::lock_guard lock(mutex_);
  const auto span = spans_.find(offset);
  if (span == spans_.end() || span->second.out.empty()) {
    return;
  }
  rooms_.insert(std::move(span->second.out));
  --n_out_;
  const auto after = std::next(span);
  if (after != spans_.end() && after->second.out.empty()) {
    merge(span, after);
  }
  if (span != spans_.begin() && std::prev(span)->second.out.empty()) {
    merge(std::prev(span), span);
  }
}

// Makes one room of two that touch.
void ArenaAllocator::merge(Spans::iterator room, Spans::iterator next) {
  const uint64_t size = room->second.size + next->second.size;
  rooms_.erase({next->second.size, next->first});
  spans_.erase(next);
  set_size(room, size);
}

bool ArenaAllocator::is_empty() const {
  const std::lock_guard lock(mutex_);
  return n_out_ == 0;
}

}  // namespace kvm::client
