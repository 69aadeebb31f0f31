// SPDX-License-Identifier: Apache-2.0
// Accounts of clients and tenants: exact sums, limits before charges, changes at run time.
#include "engine/store/quota.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace kvm::engine {
namespace {

ClientSpec of_user(uint32_t uid) {
  ClientSpec spec;
  spec.uid = uid;
  spec.pid = 4000 + uid;
  spec.name = "engine";
  return spec;
}

Amounts limited(Resource resource, uint64_t limit) {
  Amounts limits = no_limits();
  limits[resource] = limit;
  return limits;
}

TEST(Quota, NamesOfResourcesAreReadBack) {
  for (const Resource resource : kResources) {
    EXPECT_EQ(parse_resource(resource_name(resource)), resource);
  }
  EXPECT_EQ(parse_resource("Bytes"), std::nullopt);
  EXPECT_EQ(parse_resource(""), std::nullopt);
}

TEST(Quota, ARefusalNamesWhatIsHeldAndWhatIsAllowed) {
  QuotaBook book(TenantLimits{});
  QuotaAccount* account = book.open(1, of_user(7), limited(Resource::kBytes, 100));
  EXPECT_TRUE(account->check(Resource::kBytes, 100, "the append").is_ok());
  account->charge(Resource::kBytes, 60);
  const Status status = account->check(Resource::kBytes, 41, "the append");
  EXPECT_EQ(status.code(), KVM_ERR_QUOTA);
  EXPECT_EQ(status.message(),
            "the append: this client holds 60 of 100 bytes, and 41 more do not fit");
  EXPECT_EQ(account->used(Resource::kBytes), 60u) << "a refusal changes nothing";
  EXPECT_TRUE(account->check(Resource::kBytes, 40, "the append").is_ok());
  EXPECT_EQ(book.clients().at(0).n_refused, 1u);
  // Sums that would wrap are refused as well.
  EXPECT_EQ(account->check(Resource::kBytes, UINT64_MAX, "it").code(), KVM_ERR_QUOTA);
}

TEST(Quota, WhatALibraryMakesForItselfIsBesideTheLimit) {
  QuotaBook book(TenantLimits{});
  ClientSpec spec = of_user(7);
  spec.beside[Resource::kQueues] = 1;
  spec.beside[Resource::kBytes] = 1;
  QuotaAccount* account = book.open(1, spec, limited(Resource::kQueues, 16));
  EXPECT_EQ(book.clients().at(0).limits[Resource::kQueues], 16u);
  EXPECT_EQ(account->room(Resource::kQueues), 17u);
  EXPECT_EQ(account->room(Resource::kBytes), kNoLimit) << "no sum wraps";
  account->charge(Resource::kQueues, 17);
  EXPECT_EQ(account->check(Resource::kQueues, 1, "a new queue").message(),
            "a new queue: this client holds 17 of 17 queues, and 1 more does not fit");
  LimitChanges changes;
  changes[Resource::kQueues] = 20;
  account->set_limits(changes);
  EXPECT_EQ(account->limit(Resource::kQueues), 20u);
  EXPECT_EQ(account->room(Resource::kQueues), 4u);
}

TEST(Quota, ClientsOfAUserShareItsLimit) {
  TenantLimits tenants;
  tenants.each[Resource::kSequences] = 10;
  tenants.own[8][Resource::kSequences] = 4;
  QuotaBook book(tenants);
  QuotaAccount* a = book.open(1, of_user(8), no_limits());
  QuotaAccount* b = book.open(2, of_user(8), no_limits());
  QuotaAccount* other = book.open(3, of_user(9), no_limits());
  a->charge(Resource::kSequences, 3);
  EXPECT_EQ(b->room(Resource::kSequences), 1u);
  b->charge(Resource::kSequences, 1);
  const Status status = b->check(Resource::kSequences, 1, "a fork");
  EXPECT_EQ(status.message(), "a fork: user 8 holds 4 of 4 sequences, and 1 more does not fit");
  EXPECT_EQ(other->room(Resource::kSequences), 10u);
  book.close(1);
  EXPECT_EQ(b->room(Resource::kSequences), 3u) << "what a client held comes back when it goes";
  EXPECT_EQ(book.find(1), nullptr);
}

TEST(Quota, LimitsChangeAtRunTime) {
  TenantLimits tenants;
  QuotaBook book(tenants);
  QuotaAccount* account = book.open(1, of_user(5), limited(Resource::kQueues, 3));
  account->charge(Resource::kQueues, 3);
  LimitChanges changes;
  changes[Resource::kQueues] = 1;
  EXPECT_TRUE(book.set_client_limits(1, changes).is_ok());
  EXPECT_EQ(book.set_client_limits(2, changes).code(), KVM_ERR_NOT_FOUND);
  EXPECT_EQ(account->room(Resource::kQueues), 0u);
  account->give_back(Resource::kQueues, 2);
  EXPECT_EQ(account->check(Resource::kQueues, 1, "a queue").code(), KVM_ERR_QUOTA);
  account->give_back(Resource::kQueues, 1);
  EXPECT_TRUE(account->check(Resource::kQueues, 1, "a queue").is_ok());
  EXPECT_EQ(account->limits()[Resource::kBytes], kNoLimit) << "the rest stays";

  // A user's limits hold for those connected and for those to come, and outlive its clients.
  LimitChanges of_tenant;
  of_tenant[Resource::kBytes] = 1000;
  book.set_tenant_limits(5, of_tenant);
  EXPECT_EQ(account->limit(Resource::kBytes), 1000u);
  book.close(1);
  EXPECT_EQ(book.tenants().size(), 1u);
  EXPECT_EQ(book.tenants()[0].n_clients, 0u);
  EXPECT_EQ(book.open(9, of_user(5), no_limits())->limit(Resource::kBytes), 1000u);
}

// Bytes that stay count against both limits, others against one.
TEST(Quota, WhatCannotLeaveMemoryHasItsOwnLimit) {
  QuotaBook book(TenantLimits{});
  Amounts limits = no_limits();
  limits[Resource::kBytes] = 1000;
  limits[Resource::kMemoryBytes] = 300;
  QuotaAccount* account = book.open(1, of_user(5), limits);
  EXPECT_EQ(account->room(), (KvBytes{1000, 300}));
  account->charge(KvBytes{500, 200});
  EXPECT_EQ(account->used_bytes(), (KvBytes{500, 200}));
  EXPECT_EQ(account->room(), (KvBytes{500, 100}));
  EXPECT_TRUE(account->check(KvBytes{500, 100}, "it").is_ok());
  const Status refused = account->check(KvBytes::that_stay(101), "it");
  EXPECT_EQ(refused.code(), KVM_ERR_QUOTA);
  EXPECT_NE(refused.message().find("200 of 300 bytes that cannot leave memory"), std::string::npos)
      << refused.message();
  EXPECT_FALSE(account->could_hold(KvBytes::that_stay(301), 200));
  EXPECT_TRUE(account->could_hold(KvBytes::that_stay(300), 200));
  EXPECT_FALSE(account->could_hold(KvBytes{801, 0}, 300));
  // Where the limit is below what is held, what does not stay is given still.
  LimitChanges lower;
  lower[Resource::kMemoryBytes] = 100;
  account->set_limits(lower);
  EXPECT_TRUE(account->check(KvBytes{500, 0}, "it").is_ok());
  EXPECT_EQ(account->check(KvBytes{500, 1}, "it").code(), KVM_ERR_QUOTA);
  QuotaAccount* other = book.open(2, of_user(5), no_limits());
  account->pass_to(other, KvBytes{300, 150});
  EXPECT_EQ(account->used_bytes(), (KvBytes{200, 50}));
  EXPECT_EQ(other->used_bytes(), (KvBytes{300, 150}));
  book.leave(2);
  EXPECT_EQ(book.tenants()[0].used[Resource::kMemoryBytes], 200u) << "they live on";
  book.close(2);
  EXPECT_EQ(book.tenants()[0].used[Resource::kMemoryBytes], 50u);
}

// Against sums that are kept apart.
TEST(Quota, SumsAreExactUnderRandomUse) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const auto pick = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  TenantLimits tenants;
  for (const Resource resource : kResources) {
    tenants.each[resource] = 500;
  }
  QuotaBook book(tenants);
  std::map<ClientId, std::pair<uint32_t, Amounts>> model;  // uid and use
  ClientId next = 1;
  for (int i = 0; i < 20'000; ++i) {
    const uint32_t dice = pick(100);
    if (model.empty() || dice < 3) {
      const uint32_t uid = pick(3);
      Amounts limits;
      for (const Resource resource : kResources) {
        limits[resource] = 300;
      }
      book.open(next, of_user(uid), limits);
      model[next++] = {uid, Amounts{}};
      continue;
    }
    auto at = model.begin();
    std::advance(at, pick(static_cast<uint32_t>(model.size())));
    auto& [uid, used] = at->second;
    const Resource resource = kResources[pick(kResources.size())];
    QuotaAccount* account = book.find(at->first);
    ASSERT_NE(account, nullptr);
    if (dice < 5) {
      book.close(at->first);
      model.erase(at);
    } else if (dice < 55) {
      const uint64_t n = pick(120);
      uint64_t of_tenant = 0;
      for (const auto& [id, client] : model) {
        of_tenant += client.first == uid ? client.second[resource] : 0;
      }
      const bool fits = used[resource] + n <= 300 && of_tenant + n <= 500;
      ASSERT_EQ(account->check(resource, n, "it").is_ok(), fits);
      ASSERT_EQ(account->room(resource) >= n, fits);
      if (fits) {
        account->charge(resource, n);
        used[resource] += n;
      }
    } else {
      const uint64_t n = used[resource] == 0 ? 0 : pick(static_cast<uint32_t>(used[resource]) + 1);
      account->give_back(resource, n);
      used[resource] -= n;
    }
  }
  std::map<uint32_t, Amounts> sums;
  for (const ClientUsage& usage : book.clients()) {
    EXPECT_EQ(usage.used, model.at(usage.client).second);
    for (const Resource resource : kResources) {
      sums[usage.uid][resource] += usage.used[resource];
    }
  }
  EXPECT_EQ(book.clients().size(), model.size());
  for (const TenantUsage& usage : book.tenants()) {
    EXPECT_EQ(usage.used, sums[usage.uid]);
  }
}

}  // namespace
}  // namespace kvm::engine
