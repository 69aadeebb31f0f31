// SPDX-License-Identifier: Apache-2.0
// A copy of the counters of the whole service, which another thread may keep.
#ifndef KVM_DAEMON_STATS_SNAPSHOT_H_
#define KVM_DAEMON_STATS_SNAPSHOT_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/audit_stats.h"
#include "daemon/device_memory.h"
#include "daemon/request_stats.h"
#include "engine/store/movement_options.h"
#include "engine/store/snapshot_info.h"
#include "ipc/validate.h"
#include "kvm.h"
#include "tiers/disk/disk_tier.h"

namespace kvm::daemon {

// A StatsSnapshot is everything that the text of the statistics says, at one moment.
struct StatsSnapshot {
  kvm_stats stats{};
  AuditStats audit;
  RequestStats requests;
  std::array<uint64_t, ipc::kRejects> rejects{};  // by ipc::Reject
  std::vector<uint64_t> refusals;                 // by engine::Refusal
  engine::MovementStats movement;
  tiers::DiskTierStats disk;
  uint64_t disk_live_bytes = 0;
  uint64_t ring_bytes = 0;
  engine::SnapshotStats saved;
  engine::PrefixStats prefixes;
  uint64_t staying_bytes = 0;  // engine::Resource::kMemoryBytes of all users
  std::string cost_model;
  const char* isa = "";
  uint32_t n_threads = 0;
  uint64_t n_queues = 0;
  uint64_t arena_bytes = 0;
  uint64_t arena_capacity_bytes = 0;
  uint64_t n_sleeps = 0;
  uint64_t n_notifications = 0;
  std::vector<DeviceFigures> devices;
  uint64_t device_host_bytes = 0;
  uint64_t device_host_capacity_bytes = 0;
};

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_STATS_SNAPSHOT_H_
