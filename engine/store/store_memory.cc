// SPDX-License-Identifier: Apache-2.0
#include "engine/store/store_memory.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/assert.h"
#include "base/reserve.h"
#include "base/undo.h"
#include "engine/store/store_types.h"

namespace kvm::engine {
namespace {

// Extents given back per call (10 us each, or 60 where the machine is slow at that): after a
// sequence went, in passing, and when there is time.
constexpr uint64_t kTrimAfterFree = 64;
constexpr uint64_t kTrimInPassing = 2;
constexpr uint64_t kTrimHousekeeping = 6;
// Likewise bytes of hash tables (some 0.1 ms a MiB).
constexpr uint64_t kUnmapInPassing = uint64_t{256} << 10;
constexpr uint64_t kUnmapAtOnce = uint64_t{8} << 20;
constexpr uint64_t kUnmapHousekeeping = uint64_t{2} << 20;
// Before an allocation fails.
constexpr uint64_t kUnmapForRoom = uint64_t{32} << 20;

}  // namespace

StoreMemory::StoreMemory(const StoreOptions& options)
    : budget_(options.host_capacity_bytes),
      pool_(&budget_, std::min(options.cached_bytes, options.host_capacity_bytes / 8),
            &page_memory_),
      pages_(&pool_, options.slow_tier),
      reclaimer_(&budget_),
      quotas_(options.tenant_limits) {}

// --- Accounts -----------------------------------------------------------------------------------

Account* StoreMemory::open(const ClientSpec& spec, const Amounts& limits) {
  close_unused();
  return add(quotas_.open(next_client_, spec, limits));
}

Account* StoreMemory::library_of(const Account* account, const Amounts& limits) {
  return library_of_user(quotas_.uid(account->client), limits);
}

Account* StoreMemory::library_of_user(uint32_t uid, const Amounts& limits) {
  for (Account* other : lingering_) {
    if (other->is_library && quotas_.uid(other->client) == uid) {
      return other;
    }
  }
  Account* library = add(quotas_.open_library(next_client_, uid, limits));
  library->is_library = true;
  lingering_.push_back(library);
  return library;
}

// Adds the account of next_client_, whose quota was opened.
Account* StoreMemory::add(QuotaAccount* quota) {
  const ClientId client = next_client_++;
  Undo closing([&] { quotas_.close(client); });
  auto account = std::make_unique<Account>();
  account->client = client;
  account->quota = quota;
  reserve_growing(lingering_, accounts_.size() + 1);  // who leaves finds room
  Account* opened = account.get();
  payers_.add(opened);
  Undo removing([&, payer = opened->payer] { payers_.remove(payer); });
  accounts_.emplace(opened->client, std::move(account));
  removing.dismiss();
  closing.dismiss();
  return opened;
}

void StoreMemory::leave(Account* account) {
  KVM_ASSERT(account->quota->used(Resource::kSequences) == 0);
  quotas_.leave(account->client);
  lingering_.push_back(account);
  account->has_left = true;
  close_unused();
}

size_t StoreMemory::n_gone(const QuotaAccount* tenant) {
  close_unused();
  return static_cast<size_t>(
      std::count_if(lingering_.begin(), lingering_.end(), [tenant](const Account* account) {
        return account->has_left && account->quota->tenant() == tenant;
      }));
}

void StoreMemory::close_unused() {
  std::erase_if(lingering_, [this](const Account* account) {
    if (!account->is_unused()) {
      return false;
    }
    payers_.remove(account->payer);
    const ClientId client = account->client;
    quotas_.close(client);
    accounts_.erase(client);
    return true;
  });
}

Account* StoreMemory::find(ClientId client) const {
  const auto it = accounts_.find(client);
  return it == accounts_.end() || it->second->has_left ? nullptr : it->second.get();
}

Status StoreMemory::make_quota_room(Account* account, const KvBytes& need, std::string_view what) {
  QuotaAccount* quota = account->quota;
  if (quota->room().covers(need)) {
    return Status::ok();
  }
  // Nothing makes way where it would not fit without a single index either.
  const QuotaAccount* tenant = quota->tenant();
  uint64_t tenant_index_bytes = 0;
  for (const auto& [client, other] : accounts_) {
    tenant_index_bytes += other->quota->tenant() == tenant ? other->indexes.bytes : 0;
  }
  if (quota->could_hold(need, account->indexes.bytes) &&
      tenant->could_hold(need, tenant_index_bytes)) {
    while (!quota->own_room().covers(need) && account->indexes.drop_oldest()) {
    }
    while (quota->own_room().covers(need) && !tenant->own_room().covers(need)) {
      Account* oldest = oldest_index(tenant);
      if (oldest == nullptr || !oldest->indexes.drop_oldest()) {
        break;
      }
    }
  }
  return quota->check(need, what);
}

Status StoreMemory::charge(Account* account, uint64_t size_bytes) {
  KVM_TRY(make_quota_room(account, KvBytes::that_stay(size_bytes), "the observation"));
  bool is_charged = pool_.make_room(size_bytes) && budget_.charge(size_bytes);
  while (!is_charged && relieve()) {
    is_charged = pool_.make_room(size_bytes) && budget_.charge(size_bytes);
  }
  if (!is_charged) {
    return Status(KVM_ERR_NO_SPACE,
                  fmt::format("the observation needs {} bytes; {} of {} are in use", size_bytes,
                              budget_.used_bytes(), budget_.capacity_bytes()));
  }
  account->quota->charge(KvBytes::that_stay(size_bytes));
  charged_bytes_ += size_bytes;
  return Status::ok();
}

void StoreMemory::uncharge(Account* account, uint64_t size_bytes) {
  account->quota->give_back(KvBytes::that_stay(size_bytes));
  charged_bytes_ -= size_bytes;
  budget_.uncharge(size_bytes);
}

Status StoreMemory::grow_rings(uint64_t size_bytes) {
  if (size_bytes > rings_.size_bytes()) {
    pool_.make_room(size_bytes - rings_.size_bytes());
  }
  return rings_.grow_to(size_bytes);
}

Result<tiers::PageTable::Move> StoreMemory::begin_fetch(tiers::PageRef page) {
  return with_relief(this, [&] { return pages_.begin_fetch(page); });
}

// --- Making room --------------------------------------------------------------------------------

bool StoreMemory::relieve() {
  if (reclaimer_.unmap_some(kUnmapForRoom) || pages_.free_left_frames() || pool_.reopen_closed()) {
    return true;
  }
  Account* oldest = keeps_indexes_ ? nullptr : oldest_index(nullptr);
  return oldest != nullptr && oldest->indexes.drop_oldest();
}

Account* StoreMemory::oldest_index(const QuotaAccount* tenant) {
  Account* oldest = nullptr;
  uint64_t oldest_use = UINT64_MAX;
  for (const auto& [client, account] : accounts_) {
    const uint64_t use = account->indexes.oldest_use();
    if (use < oldest_use && (tenant == nullptr || account->quota->tenant() == tenant)) {
      oldest_use = use;
      oldest = account.get();
    }
  }
  return oldest;
}

void StoreMemory::trim_in_passing() {
  pool_.trim(kTrimInPassing);
  reclaimer_.unmap_some(kUnmapInPassing);
}

void StoreMemory::trim_after_free() {
  pool_.trim(kTrimAfterFree);
  reclaimer_.unmap_some(kUnmapAtOnce);
}

bool StoreMemory::housekeep() {
  close_unused();
  reclaimer_.unmap_some(kUnmapHousekeeping);
  return pool_.trim(kTrimHousekeeping) || reclaimer_.size_bytes() != 0;
}

void StoreMemory::add_stats(kvm_stats* stats) const {
  stats->n_pages = pages_.n_pages() - index_totals_.n_pages;
  stats->host_used_bytes = pool_.extent_bytes();
  stats->host_capacity_bytes = budget_.capacity_bytes();
  stats->host_peak_bytes = pool_.peak_extent_bytes();
  stats->host_page_bytes = pages_.page_bytes_in_use();
  stats->observed_bytes = charged_bytes_;
  stats->index_bytes = index_totals_.bytes();
  stats->n_index_blocks = index_totals_.n_blocks;
  stats->n_index_refused = index_totals_.n_refused;
  stats->n_index_dropped = index_totals_.n_dropped;
  stats->n_tokens_appended = counts_.n_tokens_appended;
  stats->bytes_appended = counts_.bytes_appended;
  stats->n_pages_dropped = counts_.n_pages_dropped;
  stats->n_pages_copied = counts_.n_pages_copied;
  stats->n_pages_moved = counts_.n_pages_moved;
  stats->n_pages_away = pages_.n_pages_away();
  stats->away_bytes = pages_.away_bytes();
}

}  // namespace kvm::engine
