// SPDX-License-Identifier: Apache-2.0
// State that the parts of the dispatcher share: the engine, the limits, counters, and helper
// threads.
//
// Threads: the dispatcher, except where said.
#ifndef KVM_DAEMON_SERVICE_H_
#define KVM_DAEMON_SERVICE_H_

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "daemon/background.h"
#include "daemon/device_memory.h"
#include "daemon/prefix_memory.h"
#include "daemon/request_stats.h"
#include "daemon/snapshots.h"
#include "daemon/uring_notifier.h"
#include "daemon/wake.h"
#include "engine/engine.h"
#include "ipc/control.h"
#include "ipc/fd.h"
#include "ipc/memory.h"
#include "ipc/validate.h"
#include "ipc/wire.h"
#include "tiers/disk/disk_tier.h"

namespace kvm::daemon {

class ServedQueue;

// Limits hold for each client, but for max_clients and arena_capacity_bytes; engine/store/quota.h
// counts. max_queues and max_arenas are what applications may have; what libkvm makes for itself is
// admitted beside it (ipc::own_queues, ipc::own_arenas).
struct Limits {
  uint32_t max_clients = ipc::kMaxClients;
  uint32_t max_queues = ipc::kMaxQueuesPerClient;
  uint32_t max_arenas = ipc::kMaxArenasPerClient;
  uint64_t max_arena_bytes = ipc::kMaxArenaBytes;
  uint64_t arena_quota_bytes = ipc::kMaxArenaBytes;     // of one client
  uint64_t max_requests = engine::kNoLimit;             // in flight, of one client
  uint64_t arena_capacity_bytes = ipc::kMaxArenaBytes;  // of all clients
};

// A FinishedArena is an arena whose memory another thread has allocated.
struct FinishedArena {
  uint64_t session = 0;
  uint64_t message_id = 0;
  uint64_t size_bytes = 0;
  Result<ipc::SharedMemory> memory;
};
// In a list, so that one that was asked for has its place before there is an arena to lose.
using FinishedArenas = std::list<FinishedArena>;

struct Service {
  engine::Engine* engine = nullptr;
  const tiers::DiskTier* disk = nullptr;        // null: there is none
  const PrefixMemory* prefix_memory = nullptr;  // null: of none that can be shared
  DeviceMemory* devices = nullptr;              // null: there are none
  std::function<uint64_t()> ring_bytes;         // of the engine; null: none
  Limits limits;
  std::string config_text;  // for operators: options_json
  uint64_t epoch = 0;
  uint64_t start_ns = 0;
  uid_t uid = 0;
  ipc::Fd epoll;
  Wake wake;
  std::unique_ptr<UringNotifier> notifier;  // null: eventfds are not offered

  // Counters.
  uint64_t n_clients = 0;  // connected and welcomed
  uint64_t n_clients_total = 0;
  uint64_t n_protocol_errors = 0;
  std::array<uint64_t, ipc::kRejects> n_rejects{};  // requests, by ipc::Reject
  uint64_t n_immediate = 0;  // requests answered without the engine: nop, cancel
  uint64_t n_immediate_failed = 0;
  uint64_t n_sleeps = 0;
  uint64_t n_notifications = 0;
  uint64_t n_queues = 0;
  // Mapped, being allocated, or being given back: the reaper subtracts what is free again.
  std::atomic<uint64_t> arena_bytes{0};

  // Closes a client as if it had gone, for this reason; whether there is such a client.
  std::function<bool(engine::ClientId, const std::string& reason)> close_client;

  RequestStats requests;
  Snapshots snapshots{[this] { wake.wake(); }};

  // Queues with completions to publish. Has room for all queues.
  std::vector<ServedQueue*> dirty;

  // For short replies, which it has memory for: who has none is told so. daemon/reply.h uses it.
  ipc::ControlWriter reply_writer;

  // SYNC: guarded by finished_mutex; has_finished is a hint that saves the lock.
  std::mutex finished_mutex;
  FinishedArenas finished;
  std::atomic<bool> has_finished{false};

  // Last, so that their threads end before anything that they use goes.
  BackgroundThread reaper{"kvmd-reaper"};
  BackgroundThread allocator{"kvmd-allocator"};
};

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_SERVICE_H_
