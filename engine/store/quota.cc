// SPDX-License-Identifier: Apache-2.0
#include "engine/store/quota.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "base/undo.h"

namespace kvm::engine {
namespace {

struct ResourceText {
  const char* name;
  const char* unit;
};

ResourceText text_of(Resource resource) {
  switch (resource) {
    case Resource::kSequences:
      return {"sequences", "sequences"};
    case Resource::kBytes:
      return {"bytes", "bytes"};
    case Resource::kMemoryBytes:
      return {"memory_bytes", "bytes that cannot leave memory"};
    case Resource::kArenas:
      return {"arenas", "arenas"};
    case Resource::kArenaBytes:
      return {"arena_bytes", "bytes of arenas"};
    case Resource::kQueues:
      return {"queues", "queues"};
    case Resource::kSnapshotBytes:
      return {"snapshot_bytes", "bytes of snapshots"};
    case Resource::kRequests:
      break;
  }
  return {"requests", "requests in flight"};
}

void apply(const LimitChanges& changes, Amounts* limits) {
  for (const Resource resource : kResources) {
    (*limits)[resource] = changes[resource].value_or((*limits)[resource]);
  }
}

}  // namespace

const char* resource_name(Resource resource) { return text_of(resource).name; }

std::optional<Resource> parse_resource(std::string_view name) {
  for (const Resource resource : kResources) {
    if (name == resource_name(resource)) {
      return resource;
    }
  }
  return std::nullopt;
}

Amounts no_limits() {
  Amounts limits;
  for (const Resource resource : kResources) {
    limits[resource] = kNoLimit;
  }
  return limits;
}

// --- QuotaAccount -------------------------------------------------------------------------------

uint64_t QuotaAccount::limit(Resource resource) const {
  const uint64_t own = limits_[resource];
  return tenant_ == nullptr ? own : std::min(own, tenant_->limits_[resource]);
}

uint64_t QuotaAccount::admitted(Resource resource) const {
  return limits_[resource] + std::min(beside_[resource], kNoLimit - limits_[resource]);
}

uint64_t QuotaAccount::own_room(Resource resource) const {
  return admitted(resource) - std::min(admitted(resource), held(resource));
}

bool QuotaAccount::could_hold(Resource resource, uint64_t n, uint64_t droppable) const {
  const uint64_t limit = admitted(resource);
  return n <= limit && held(resource) - std::min(held(resource), droppable) <= limit - n;
}

uint64_t QuotaAccount::room(Resource resource) const {
  const uint64_t own = own_room(resource);
  return tenant_ == nullptr ? own : std::min(own, tenant_->own_room(resource));
}

bool QuotaAccount::has_room(Resource resource, uint64_t n) const {
  return held(resource) <= admitted(resource) && n <= own_room(resource);
}

Status QuotaAccount::check(Resource resource, uint64_t n, std::string_view what) {
  const QuotaAccount* short_of = has_room(resource, n) ? tenant_ : this;
  if (short_of == nullptr || (short_of == tenant_ && tenant_->has_room(resource, n))) {
    return Status::ok();
  }
  return refuse(*short_of, resource, n, what);
}

Status QuotaAccount::check_own(Resource resource, uint64_t n, std::string_view what) {
  return has_room(resource, n) ? Status::ok() : refuse(*this, resource, n, what);
}

Status QuotaAccount::refuse(const QuotaAccount& short_of, Resource resource, uint64_t n,
                            std::string_view what) {
  ++n_refused_;
  return Status(KVM_ERR_QUOTA,
                fmt::format("{}: {} holds {} of {} {}, and {} more {} not fit", what,
                            short_of.owner_, short_of.held(resource), short_of.admitted(resource),
                            text_of(resource).unit, n, n == 1 ? "does" : "do"));
}

void QuotaAccount::expect_no_more(Resource resource, uint64_t n) {
  KVM_ASSERT(n <= expected_[resource]);
  expected_[resource] -= n;
}

void QuotaAccount::pass_to(QuotaAccount* taker, Resource resource, uint64_t n) {
  KVM_ASSERT(n <= used_[resource] && tenant_ == taker->tenant_);
  used_[resource] -= n;
  taker->used_[resource] += n;
}

void QuotaAccount::charge(Resource resource, uint64_t n) {
  used_[resource] += n;
  if (tenant_ != nullptr) {
    tenant_->used_[resource] += n;
  }
}

void QuotaAccount::give_back(Resource resource, uint64_t n) {
  KVM_ASSERT(n <= used_[resource]);
  used_[resource] -= n;
  if (tenant_ != nullptr) {
    tenant_->used_[resource] -= n;
  }
}

void QuotaAccount::set_limits(const LimitChanges& changes) { apply(changes, &limits_); }

// --- QuotaBook ----------------------------------------------------------------------------------

Amounts QuotaBook::limits_of_tenant(uint32_t uid) const {
  Amounts limits = tenant_limits_.each;
  const auto own = tenant_limits_.own.find(uid);
  if (own != tenant_limits_.own.end()) {
    apply(own->second, &limits);
  }
  return limits;
}

QuotaBook::Client* QuotaBook::add(ClientId client, const ClientSpec& spec, std::string_view owner,
                                  const Amounts& limits) {
  auto found = tenants_.find(spec.uid);
  if (found == tenants_.end()) {
    auto tenant = std::make_unique<Tenant>(
        QuotaAccount(fmt::format("user {}", spec.uid), limits_of_tenant(spec.uid), nullptr));
    found = tenants_.emplace(spec.uid, std::move(tenant)).first;
  }
  Tenant* tenant = found->second.get();
  Undo forgetting([&] {
    if (tenant->n_accounts == 0) {
      tenants_.erase(found);
    }
  });
  Amounts own = limits;
  apply(spec.limits, &own);
  auto opened = std::make_unique<Client>(
      Client{spec, QuotaAccount(std::string(owner), own, &tenant->account, spec.beside)});
  Client* added = opened.get();
  clients_.emplace(client, std::move(opened));
  ++tenant->n_accounts;
  forgetting.dismiss();
  return added;
}

QuotaAccount* QuotaBook::open(ClientId client, const ClientSpec& spec, const Amounts& limits) {
  Client* added = add(client, spec, "this client", limits);
  ++tenants_.at(spec.uid)->n_clients;
  return &added->account;
}

QuotaAccount* QuotaBook::open_library(ClientId id, uint32_t uid, const Amounts& limits) {
  ClientSpec spec;
  spec.uid = uid;
  Client* added = add(id, spec, "the library of this user", limits);
  added->is_connected = false;
  return &added->account;
}

void QuotaBook::leave(ClientId client) {
  const auto found = clients_.find(client);
  if (found == clients_.end() || !found->second->is_connected) {
    return;
  }
  found->second->is_connected = false;
  --tenants_.at(found->second->spec.uid)->n_clients;
  QuotaAccount& account = found->second->account;
  for (const Resource resource : kResources) {
    const bool is_kept = resource == Resource::kBytes || resource == Resource::kMemoryBytes;
    account.give_back(resource, is_kept ? 0 : account.used(resource));
  }
}

void QuotaBook::close(ClientId client) {
  const auto found = clients_.find(client);
  if (found == clients_.end()) {
    return;
  }
  leave(client);
  QuotaAccount& account = found->second->account;
  for (const Resource resource : kResources) {
    account.give_back(resource, account.used(resource));
  }
  const auto tenant = tenants_.find(found->second->spec.uid);
  clients_.erase(found);
  if (--tenant->second->n_accounts == 0) {
    tenants_.erase(tenant);
  }
}

QuotaAccount* QuotaBook::find(ClientId client) {
  const auto found = clients_.find(client);
  return found == clients_.end() || !found->second->is_connected ? nullptr
                                                                 : &found->second->account;
}

std::vector<ClientUsage> QuotaBook::clients() const {
  std::vector<ClientUsage> all;
  all.reserve(clients_.size());
  for (const auto& [id, client] : clients_) {
    if (!client->is_connected) {
      continue;
    }
    all.push_back({.client = id,
                   .uid = client->spec.uid,
                   .pid = client->spec.pid,
                   .name = client->spec.name,
                   .used = client->account.used(),
                   .limits = client->account.limits(),
                   .n_refused = client->account.n_refused(),
                   .n_requests = client->account.n_requests(),
                   .durations = client->account.durations()});
  }
  return all;
}

std::vector<TenantUsage> QuotaBook::tenants() const {
  std::map<uint32_t, TenantUsage> all;
  for (const auto& [uid, changes] : tenant_limits_.own) {
    all[uid] = {.uid = uid, .n_clients = 0, .used = {}, .limits = limits_of_tenant(uid)};
  }
  for (const auto& [uid, tenant] : tenants_) {
    all[uid] = {.uid = uid,
                .n_clients = tenant->n_clients,
                .used = tenant->account.used(),
                .limits = tenant->account.limits()};
  }
  std::vector<TenantUsage> list;
  list.reserve(all.size());
  for (auto& [uid, tenant] : all) {
    list.push_back(std::move(tenant));
  }
  return list;
}

Status QuotaBook::set_client_limits(ClientId client, const LimitChanges& changes) {
  QuotaAccount* account = find(client);
  if (account == nullptr) {
    return Status(KVM_ERR_NOT_FOUND, fmt::format("there is no client {:#x}", client));
  }
  account->set_limits(changes);
  return Status::ok();
}

void QuotaBook::set_tenant_limits(uint32_t uid, const LimitChanges& changes) {
  LimitChanges& own = tenant_limits_.own[uid];
  for (const Resource resource : kResources) {
    if (changes[resource]) {
      own[resource] = changes[resource];
    }
  }
  if (const auto tenant = tenants_.find(uid); tenant != tenants_.end()) {
    tenant->second->account.set_limits(changes);
  }
}

}  // namespace kvm::engine
