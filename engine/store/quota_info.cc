// SPDX-License-Identifier: Apache-2.0
#include "engine/store/quota_info.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace kvm::engine {
namespace {

// One table for both directions: which field is which resource.
constexpr std::pair<Resource, uint64_t kvm_amounts::*> kFields[] = {
    {Resource::kSequences, &kvm_amounts::sequences},
    {Resource::kBytes, &kvm_amounts::bytes},
    {Resource::kMemoryBytes, &kvm_amounts::memory_bytes},
    {Resource::kArenas, &kvm_amounts::arenas},
    {Resource::kArenaBytes, &kvm_amounts::arena_bytes},
    {Resource::kQueues, &kvm_amounts::queues},
    {Resource::kRequests, &kvm_amounts::requests},
    {Resource::kSnapshotBytes, &kvm_amounts::snapshot_bytes}};
static_assert(std::size(kFields) == kResources.size());

kvm_amounts amounts(const Amounts& from) {
  kvm_amounts out{};
  for (const auto& [resource, field] : kFields) {
    out.*field = from[resource];
  }
  return out;
}

}  // namespace

kvm_client_entry client_entry(const ClientUsage& usage) {
  kvm_client_entry out{};
  out.struct_size = sizeof(out);
  out.uid = usage.uid;
  out.pid = usage.pid;
  out.client_id = usage.client;
  usage.name.copy(out.name, sizeof(out.name) - 1);
  out.used = amounts(usage.used);
  out.limits = amounts(usage.limits);
  out.n_refused = usage.n_refused;
  out.n_requests = usage.n_requests;
  std::copy(usage.durations.begin(), usage.durations.end(), out.n_by_duration);
  return out;
}

kvm_user_entry user_entry(const TenantUsage& usage) {
  kvm_user_entry out{};
  out.struct_size = sizeof(out);
  out.uid = usage.uid;
  out.n_clients = usage.n_clients;
  out.used = amounts(usage.used);
  out.limits = amounts(usage.limits);
  return out;
}

Result<LimitChanges> limit_changes(const kvm_quota_params& params) {
  if (params.whose != KVM_QUOTA_CLIENT && params.whose != KVM_QUOTA_USER) {
    return Status(KVM_ERR_INVALID,
                  fmt::format("whose is {}; allowed are {} and {} (KVM_QUOTA_*)", params.whose,
                              KVM_QUOTA_CLIENT + 0, KVM_QUOTA_USER + 0));
  }
  if (params.whose == KVM_QUOTA_USER && params.id > UINT32_MAX) {
    return Status(KVM_ERR_INVALID, fmt::format("{} is no number of a user", params.id));
  }
  if (params.whose == KVM_QUOTA_CLIENT && params.limits.snapshot_bytes != 0) {
    return Status::fixed(
        KVM_ERR_INVALID,
        "snapshot_bytes is of users: snapshots outlive the client that saves them");
  }
  LimitChanges changes;
  bool changes_any = false;
  for (const auto& [resource, field] : kFields) {
    if (params.limits.*field != 0) {
      changes[resource] = params.limits.*field;
      changes_any = true;
    }
  }
  return changes_any ? Result<LimitChanges>(changes)
                     : Status(KVM_ERR_INVALID, "no limit is named: all are 0");
}

}  // namespace kvm::engine
