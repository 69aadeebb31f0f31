// SPDX-License-Identifier: Apache-2.0
// What is known of prefixes (engine/run/prefixes.h) beyond the engine, and what it asks for.
#ifndef KVM_ENGINE_STORE_PREFIX_STATS_H_
#define KVM_ENGINE_STORE_PREFIX_STATS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "base/status.h"

namespace kvm::engine {

// Makes memory for the table of a user's prefixes: zeroes, aligned to 64 bytes, there until the
// engine is gone. Called once for a user. Fails: NO_MEMORY.
using PrefixMemory = std::function<Result<std::span<std::byte>>(uint32_t uid, uint64_t size_bytes)>;

struct PrefixStats {
  uint64_t n_prefixes = 0;      // that can be found
  uint64_t n_pages = 0;         // of them, each once
  uint64_t n_pages_hidden = 0;  // of these, for which their part of a table had no room
  uint64_t table_bytes = 0;
  uint64_t n_published = 0;
  uint64_t n_forked = 0;  // forks of them
  uint64_t n_expired = 0;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_PREFIX_STATS_H_
