// SPDX-License-Identifier: Apache-2.0
// What is known of prefixes (engine/run/prefixes.h) beyond the engine, and what it asks for.
#ifndef KVM_ENGINE_STORE_PREFIX_STATS_H_
#define KVM_ENGINE_STORE_PREFIX_STATS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "base/prefix_table.h"
#include "base/status.h"

namespace kvm::engine {

// Makes memory for the table of a user's prefixes: zeroes, aligned to 64 bytes, there until the
// engine is gone. Called once for a user. Fails: NO_MEMORY.
using PrefixMemory = std::function<Result<std::span<std::byte>>(uint32_t uid, uint64_t size_bytes)>;

// Which prefixes are saved, so that they outlive the service.
enum class SavePrefixes : uint8_t {
  kAll,
  kUsed,  // those that somebody has forked, so that a drive is not worn by prompts that come once
  kNone,
};

struct PrefixStats {
  uint64_t n_prefixes = 0;      // that can be found
  uint64_t n_pages = 0;         // of them, each once
  uint64_t n_pages_hidden = 0;  // of these, for which their part of a table had no room
  uint64_t table_bytes = 0;
  uint64_t n_published = 0;
  uint64_t n_forked = 0;  // forks of them
  uint64_t n_expired = 0;
  // Of those that were weighed (Engine::weigh_prefix).
  uint64_t n_faster = 0;
  uint64_t n_slower = 0;
  // Of those that outlive the service (engine/run/kept_prefixes.h).
  uint64_t n_saved = 0;         // that are published, and have a snapshot
  uint64_t n_waiting = 0;       // snapshots of a service before that wait for their space
  uint64_t n_restored = 0;      // published again
  uint64_t n_failed_saves = 0;  // they end with the service
  uint64_t n_failed_loads = 0;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_PREFIX_STATS_H_
