// SPDX-License-Identifier: Apache-2.0
#include "client/arena_allocator.h"

#include <algorithm>
#include <boost/interprocess/indexes/iset_index.hpp>
#include <boost/interprocess/managed_external_buffer.hpp>
#include <boost/interprocess/mem_algo/rbtree_best_fit.hpp>
#include <boost/interprocess/sync/mutex_family.hpp>
#include <mutex>
#include <new>
#include <unordered_set>

namespace kvm::client {

namespace {

namespace bip = boost::interprocess;

using Manager =
    bip::basic_managed_external_buffer<char, bip::rbtree_best_fit<bip::null_mutex_family>,
                                       bip::iset_index>;

constexpr uint64_t kMinAlign = 64;

}  // namespace

struct ArenaAllocator::State {
  State(void* memory, uint64_t size_bytes)
      : base(static_cast<char*>(memory)),
        size(size_bytes),
        manager(bip::create_only, memory, size_bytes) {}

  char* base;
  uint64_t size;
  mutable std::mutex mutex;
  Manager manager;
  // What is out: a double free or a foreign offset must not corrupt the lists.
  std::unordered_set<uint64_t> offsets;
};

ArenaAllocator::ArenaAllocator(void* base, uint64_t size_bytes)
    : state_(std::make_unique<State>(base, size_bytes)) {}

ArenaAllocator::~ArenaAllocator() = default;

uint64_t ArenaAllocator::allocate(uint64_t size_bytes, uint64_t alignment) {
  State& state = *state_;
  if (size_bytes == 0 || size_bytes > state.size) {
    return kNone;
  }
  const std::lock_guard lock(state.mutex);
  void* piece =
      state.manager.allocate_aligned(size_bytes, std::max(alignment, kMinAlign), std::nothrow);
  if (piece == nullptr) {
    return kNone;
  }
  const auto offset = static_cast<uint64_t>(static_cast<char*>(piece) - state.base);
  state.offsets.insert(offset);
  return offset;
}

void ArenaAllocator::free(uint64_t offset) {
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  if (state.offsets.erase(offset) != 0) {
    state.manager.deallocate(state.base + offset);
  }
}

bool ArenaAllocator::is_empty() const {
  const std::lock_guard lock(state_->mutex);
  return state_->offsets.empty();
}

}  // namespace kvm::client
