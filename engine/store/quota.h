// SPDX-License-Identifier: Apache-2.0
// Quotas: how much of each resource a client, and all clients of a user (its tenant), may hold.
//
//   QuotaBook -- one --> tenant (uid) -- one --> client (connection)
//
// An account of a client is charged together with that of its tenant, so the sum of the clients is
// the tenant's use, exactly, at all times. Whoever is about to take something checks first; what is
// refused has changed nothing. A limit may be set below what is held: nothing is taken away, and
// nothing more is given until enough has come back.
//
// Pages of a sequence that changes hands are paid for by another account of the same tenant from
// then on: a sum that the tenant does not see. An account outlives its client as long as something
// is charged to it.
//
// Threads: one, the driver's.
#ifndef KVM_ENGINE_STORE_QUOTA_H_
#define KVM_ENGINE_STORE_QUOTA_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/durations.h"
#include "base/status.h"

namespace kvm::engine {

using ClientId = uint64_t;

enum class Resource : uint8_t {
  kSequences,
  kBytes,        // of KV pages, observations and indexes, each counted once, whole
  kMemoryBytes,  // of these bytes, what cannot leave memory where there is a slow tier
  kArenas,       // that are mapped or being made
  kArenaBytes,   // of these
  kQueues,
  kRequests,       // taken from a queue and not answered yet
  kSnapshotBytes,  // of what the user has saved, each snapshot whole
};
inline constexpr std::array kResources = {
    Resource::kSequences,  Resource::kBytes,  Resource::kMemoryBytes, Resource::kArenas,
    Resource::kArenaBytes, Resource::kQueues, Resource::kRequests,    Resource::kSnapshotBytes};
// As in configuration files and tools: "sequences", "bytes", "memory_bytes", "arenas",
// "arena_bytes", "queues", "requests", "snapshot_bytes".
const char* resource_name(Resource resource);
std::optional<Resource> parse_resource(std::string_view name);

template <typename T>
class PerResource {
 public:
  T& operator[](Resource resource) { return values_[static_cast<size_t>(resource)]; }
  const T& operator[](Resource resource) const { return values_[static_cast<size_t>(resource)]; }
  bool operator==(const PerResource&) const = default;

 private:
  std::array<T, kResources.size()> values_{};
};
using Amounts = PerResource<uint64_t>;

// KvBytes are an amount of Resource::kBytes, and what of it counts as Resource::kMemoryBytes, too.
struct KvBytes {
  uint64_t all = 0;
  uint64_t staying = 0;

  static KvBytes that_stay(uint64_t n) { return {n, n}; }
  static KvBytes of(uint64_t n, bool stays) { return {n, stays ? n : 0}; }
  KvBytes& operator+=(const KvBytes& other) {
    all += other.all;
    staying += other.staying;
    return *this;
  }
  // REQUIRES: covers(other).
  KvBytes& operator-=(const KvBytes& other) {
    all -= other.all;
    staying -= other.staying;
    return *this;
  }
  bool covers(const KvBytes& other) const { return other.all <= all && other.staying <= staying; }
  bool operator==(const KvBytes&) const = default;
};

inline constexpr uint64_t kNoLimit = UINT64_MAX;
Amounts no_limits();
// LimitChanges replace the limits that are set in them; the rest stays.
using LimitChanges = PerResource<std::optional<uint64_t>>;

struct TenantLimits {
  Amounts each = no_limits();            // of every user
  std::map<uint32_t, LimitChanges> own;  // by uid: where a user's differ
};

// A ClientSpec says who a client is.
// No user's id: that of spaces which all users share.
inline constexpr uint32_t kEverybody = UINT32_MAX;

struct ClientSpec {
  uint32_t uid = 0;
  uint32_t pid = 0;
  std::string name;
  LimitChanges limits;  // where its limits differ from those of other clients
  Amounts beside{};     // what its library makes for itself: admitted beside the limits
};

// Snapshots for tools and metrics.
struct ClientUsage {
  ClientId client = 0;
  uint32_t uid = 0;
  uint32_t pid = 0;
  std::string name;
  Amounts used;
  Amounts limits;
  uint64_t n_refused = 0;      // requests and messages, for its own limits or its tenant's
  uint64_t n_requests = 0;     // that the engine has been given
  DurationCounts durations{};  // of those that it has answered
};
struct TenantUsage {
  uint32_t uid = 0;
  uint32_t n_clients = 0;
  Amounts used;
  Amounts limits;
};

// A QuotaAccount counts what a client, or a tenant, holds.
class QuotaAccount {
 public:
  // owner: for sentences. tenant: null for an account of a tenant. beside: as ClientSpec has it.
  QuotaAccount(std::string owner, const Amounts& limits, QuotaAccount* tenant,
               const Amounts& beside = {})
      : owner_(std::move(owner)), limits_(limits), beside_(beside), tenant_(tenant) {}

  uint64_t used(Resource resource) const { return used_[resource]; }
  const Amounts& used() const { return used_; }
  KvBytes used_bytes() const { return {used_[Resource::kBytes], used_[Resource::kMemoryBytes]}; }
  uint64_t expected(Resource resource) const { return expected_[resource]; }
  const Amounts& limits() const { return limits_; }
  // The smaller of its own limit and its tenant's.
  uint64_t limit(Resource resource) const;
  // Returns what could be charged now without passing its own.
  uint64_t own_room(Resource resource) const;
  // Whether n more could be held within its own limit if `droppable` of it were given up.
  bool could_hold(Resource resource, uint64_t n, uint64_t droppable) const;
  // What could be charged now without passing either.
  uint64_t room(Resource resource) const;
  // The same of bytes, those that stay counted twice. Where none stay, that limit does not matter.
  KvBytes own_room() const { return room_of(&QuotaAccount::own_room); }
  KvBytes room() const { return room_of(&QuotaAccount::room); }
  bool could_hold(const KvBytes& need, uint64_t droppable) const {
    return could_hold(Resource::kBytes, need.all, droppable) &&
           (need.staying == 0 || could_hold(Resource::kMemoryBytes, need.staying, droppable));
  }

  // `what` is about to take n: "the append". Fails: QUOTA, naming the numbers and whose they are;
  // counted.
  Status check(Resource resource, uint64_t n, std::string_view what);
  // REQUIRES: room(resource) >= n.
  void charge(Resource resource, uint64_t n);
  // REQUIRES: used(resource) >= n.
  void give_back(Resource resource, uint64_t n);
  // The same of bytes.
  Status check(const KvBytes& need, std::string_view what) {
    KVM_TRY(check(Resource::kBytes, need.all, what));
    return need.staying == 0 ? Status::ok() : check(Resource::kMemoryBytes, need.staying, what);
  }
  void charge(const KvBytes& bytes) {
    charge(Resource::kBytes, bytes.all);
    charge(Resource::kMemoryBytes, bytes.staying);
  }
  void give_back(const KvBytes& bytes) {
    give_back(Resource::kBytes, bytes.all);
    give_back(Resource::kMemoryBytes, bytes.staying);
  }

  // `what` is about to take over n from another account of the tenant, whose sum stays. Fails as
  // check(), for its own limit alone.
  Status check_own(Resource resource, uint64_t n, std::string_view what);
  // Keeps room for n that pass_to() will bring. It counts as held, but not as charged.
  // REQUIRES: own_room(resource) >= n.
  void expect(Resource resource, uint64_t n) { expected_[resource] += n; }
  // Of what was expected, n will not come, or has.
  void expect_no_more(Resource resource, uint64_t n);
  // What was charged here is charged to `taker`. REQUIRES: used(resource) >= n, and the tenant is
  // the same.
  void pass_to(QuotaAccount* taker, Resource resource, uint64_t n);
  // The same of bytes.
  Status check_own(const KvBytes& need, std::string_view what) {
    KVM_TRY(check_own(Resource::kBytes, need.all, what));
    return need.staying == 0 ? Status::ok() : check_own(Resource::kMemoryBytes, need.staying, what);
  }
  void expect(const KvBytes& bytes) {
    expect(Resource::kBytes, bytes.all);
    expect(Resource::kMemoryBytes, bytes.staying);
  }
  void expect_no_more(const KvBytes& bytes) {
    expect_no_more(Resource::kBytes, bytes.all);
    expect_no_more(Resource::kMemoryBytes, bytes.staying);
  }
  void pass_to(QuotaAccount* taker, const KvBytes& bytes) {
    pass_to(taker, Resource::kBytes, bytes.all);
    pass_to(taker, Resource::kMemoryBytes, bytes.staying);
  }

  QuotaAccount* tenant() const { return tenant_; }
  void set_limits(const LimitChanges& changes);
  uint64_t n_refused() const { return n_refused_; }
  void note_request() { ++n_requests_; }
  uint64_t n_requests() const { return n_requests_; }
  void note_duration(uint64_t ns) { ++durations_[duration_bucket(ns)]; }
  const DurationCounts& durations() const { return durations_; }

 private:
  KvBytes room_of(uint64_t (QuotaAccount::*room_in)(Resource) const) const {
    const uint64_t all = (this->*room_in)(Resource::kBytes);
    return {all, std::min(all, (this->*room_in)(Resource::kMemoryBytes))};
  }
  // Returns what may be held, with what is admitted beside the limit.
  uint64_t admitted(Resource resource) const;
  bool has_room(Resource resource, uint64_t n) const;
  uint64_t held(Resource resource) const { return used_[resource] + expected_[resource]; }
  Status refuse(const QuotaAccount& short_of, Resource resource, uint64_t n, std::string_view what);

  std::string owner_;
  Amounts used_;
  Amounts expected_{};
  Amounts limits_;
  Amounts beside_;
  QuotaAccount* tenant_;
  uint64_t n_refused_ = 0;
  uint64_t n_requests_ = 0;
  DurationCounts durations_{};
};

// A QuotaBook has all accounts.
class QuotaBook {
 public:
  explicit QuotaBook(TenantLimits tenant_limits) : tenant_limits_(std::move(tenant_limits)) {}

  // limits: of a client whose spec changes none. The account stays where it is until it is closed.
  QuotaAccount* open(ClientId client, const ClientSpec& spec, const Amounts& limits);
  // An account of the service itself beside those of a user's clients: nobody is connected.
  QuotaAccount* open_library(ClientId id, uint32_t uid, const Amounts& limits);
  // The client is gone. Its account stays, with the bytes that are charged to it.
  void leave(ClientId client);
  // Whatever is still charged to the account is the tenant's no more.
  void close(ClientId client);
  // Null: no such client is connected.
  QuotaAccount* find(ClientId client);
  // REQUIRES: the account is open.
  uint32_t uid(ClientId client) const { return clients_.at(client)->spec.uid; }

  // Clients that are connected, in the order of ids; tenants that have any account, or limits of
  // their own, in that of uids.
  std::vector<ClientUsage> clients() const;
  std::vector<TenantUsage> tenants() const;

  // Fails: NOT_FOUND.
  Status set_client_limits(ClientId client, const LimitChanges& changes);
  // Sets the limits of clients that are connected and of those to come.
  void set_tenant_limits(uint32_t uid, const LimitChanges& changes);

 private:
  struct Tenant {
    explicit Tenant(QuotaAccount&& own) : account(std::move(own)) {}
    QuotaAccount account;
    uint32_t n_accounts = 0;
    uint32_t n_clients = 0;  // that are connected
  };
  struct Client {
    ClientSpec spec;
    QuotaAccount account;
    bool is_connected = true;
  };

  Amounts limits_of_tenant(uint32_t uid) const;
  Client* add(ClientId client, const ClientSpec& spec, std::string_view owner,
              const Amounts& limits);

  TenantLimits tenant_limits_;
  std::map<uint32_t, std::unique_ptr<Tenant>> tenants_;  // with accounts
  std::map<ClientId, std::unique_ptr<Client>> clients_;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_QUOTA_H_
