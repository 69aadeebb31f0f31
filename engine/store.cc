// SPDX-License-Identifier: Apache-2.0
#include "engine/store.h"

#include <sys/random.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/assert.h"
#include "base/round.h"
#include "engine/aging.h"
#include "engine/folded.h"
#include "engine/id_table.h"
#include "engine/kept.h"
#include "engine/observed.h"
#include "engine/page_list.h"
#include "policies/heavy.h"
#include "policies/sinks_recent.h"
#include "tiers/budget.h"
#include "tiers/host/host_pool.h"

namespace kvm::engine {

using tiers::kNoPage;
using tiers::PageRef;

namespace {

// Extents given back per call (about 10 us each): after a sequence went, in passing, and when there
// is time.
constexpr uint64_t kTrimAfterFree = 64;
constexpr uint64_t kTrimInPassing = 2;
constexpr uint64_t kTrimHousekeeping = 16;
// Likewise bytes of hash tables (some 0.1 ms a MiB).
constexpr uint64_t kUnmapInPassing = uint64_t{256} << 10;
constexpr uint64_t kUnmapAtOnce = uint64_t{8} << 20;
constexpr uint64_t kUnmapHousekeeping = uint64_t{2} << 20;
// Before an allocation fails.
constexpr uint64_t kUnmapForRoom = uint64_t{32} << 20;

// LIMIT: page references counted for one part of a list of sequences, but for its first sequence:
// the driver does nothing else meanwhile.
constexpr uint64_t kMaxListedPages = 65536;

// What freeing a sequence costs besides its pages, in pages.
constexpr uint64_t kPagesPerSequence = 16;

// A policy that keeps asking for more is cut off here, until the next event.
constexpr int kMaxPolicyRounds = 1024;

std::string text(uint64_t value) { return std::to_string(value); }

struct Account {
  ClientId client = 0;
  QuotaAccount* quota = nullptr;
  IndexUses indexes;
  kvm_seq_id next_freed = 0;  // where free_some goes on
};

// The lists of a space that one policy decides about.
struct Governed {
  const policies::Policy* policy = nullptr;
  struct Member {
    uint32_t layer;
    uint32_t class_index;
  };
  std::vector<Member> members;
};

struct SpaceRecord {
  kvm_space_id id = 0;
  std::shared_ptr<const Space> space;
  std::vector<Governed> governed;
  uint64_t n_sequences = 0;
};

// Observations of one layer, perhaps shared, of which positions below `limit` hold.
struct ObservedRef {
  std::shared_ptr<Observed> data;
  uint64_t limit = UINT64_MAX;
};

// Likewise masses of one list.
struct MassesRef {
  std::shared_ptr<Masses> data;
  uint64_t limit = UINT64_MAX;
};

}  // namespace

struct Sequence {
  kvm_seq_id id = 0;
  Account* account = nullptr;
  SpaceRecord* record = nullptr;
  uint32_t flags = 0;
  uint64_t n_committed = 0;
  std::vector<PageList> lists;  // [Space::n_lists]
  // Per Governed of the space: the commit point at which the policy wants to be asked again.
  std::vector<uint64_t> next_commits;
  policies::EventSet due_events = 0;  // that policies have not been asked about
  std::vector<ObservedRef> observed;  // empty, or [n_layers]
  std::vector<IndexRef> indexes;      // [n_layers], or empty: the space has none
  // [Space::n_lists], or empty: nothing has been folded.
  std::vector<std::shared_ptr<Folded>> folded;
  // Likewise of lists that choose tokens.
  std::vector<std::shared_ptr<Kept>> kept;
  std::vector<MassesRef> masses;

  const Space& space() const { return *record->space; }
  // The lists of an OWN layer.
  std::span<PageList> layer_lists(uint32_t layer) {
    const Layer& own = space().layers[layer];
    return {lists.data() + own.first_list, own.classes.size()};
  }
  std::span<const PageList> layer_lists(uint32_t layer) const {
    const Layer& own = space().layers[layer];
    return {lists.data() + own.first_list, own.classes.size()};
  }
};

namespace {

class StoreImpl final : public Store, private PageRelief {
 public:
  StoreImpl(const StoreOptions& options, uint32_t epoch_tag)
      : options_(options),
        budget_(options.host_capacity_bytes),
        pool_(&budget_, std::min(options.cached_bytes, options.host_capacity_bytes / 8)),
        yard_(&budget_),
        quotas_(options.tenant_limits),
        spaces_("space", epoch_tag, 0),
        sequences_("sequence", epoch_tag, 1) {}

  ~StoreImpl() override {
    std::vector<Sequence*> all;
    sequences_.for_each([&](uint64_t, Sequence& seq) { all.push_back(&seq); });
    for (Sequence* seq : all) {
      free_seq(seq);
    }
  }

  // Clients.
  ClientId add_client(const ClientSpec& spec) override;
  void remove_client(ClientId client) override;
  uint64_t client_bytes(ClientId client) const override;
  bool free_some(ClientId client, uint64_t max_pages, std::vector<kvm_seq_id>* gone) override;
  QuotaBook& quotas() override { return quotas_; }
  // Spaces.
  Result<kvm_space_id> register_space(const SpaceSpec& spec) override;
  Result<kvm_space_id> find_space(std::string_view name) const override;
  Result<const Space*> space(kvm_space_id id) const override;
  Result<kvm_space_info> space_info(kvm_space_id id) const override;
  std::vector<kvm_space_info> list_spaces() const override;
  Status drop_space(kvm_space_id id) override;
  // Sequences.
  Result<Sequence*> find_seq(ClientId client, kvm_seq_id id) override;
  Result<ClientId> seq_client(kvm_seq_id id) const override;
  Result<kvm_seq_id> create_seq(ClientId client, kvm_space_id space, uint32_t flags) override;
  Result<kvm_seq_id> fork_seq(Sequence* parent, uint64_t n_tokens) override;
  Status check_fork(const Sequence* parent, uint64_t n_tokens) const override;
  Status truncate_seq(Sequence* seq, uint64_t n_tokens) override;
  Status commit_seq(Sequence* seq, uint64_t n_tokens) override;
  void free_seq(Sequence* seq) override;
  kvm_seq_id seq_id(const Sequence* seq) const override { return seq->id; }
  kvm_space_id seq_space_id(const Sequence* seq) const override { return seq->record->id; }
  const Space& seq_space(const Sequence* seq) const override { return seq->space(); }
  uint64_t length(const Sequence* seq, uint32_t layer) const override;
  uint64_t reserved_length(const Sequence* seq, uint32_t layer) const override;
  uint64_t n_committed(const Sequence* seq) const override { return seq->n_committed; }
  kvm_seq_info seq_info(const Sequence* seq) const override;
  SeqPage list_seqs(ClientId client, kvm_space_id space, bool all_clients, kvm_seq_id begin,
                    size_t n_max) const override;
  std::vector<kvm_seq_id> client_seqs(ClientId client) const override;
  // Appending.
  Status reserve_append(std::span<const AppendItem> items,
                        std::vector<AppendPiece>* pieces) override;
  Status check_append(const AppendItem& item) const override;
  void publish(Sequence* seq, uint32_t layer) override;
  void rollback(Sequence* seq, uint32_t layer) override;
  // Reading.
  void collect_runs(const Sequence* seq, uint32_t layer, uint32_t class_index,
                    std::vector<KvRun>* runs, bool is_packed) const override;
  void pin_pages(const Sequence* seq, uint32_t layer, uint32_t class_index,
                 PagePins* pins) override;
  void unpin_pages(PagePins* pins) override;
  Status check_visible(const Sequence* seq, uint32_t layer,
                       uint64_t first_query_position) const override;
  Status check_read(const Sequence* seq, uint32_t layer, uint64_t position,
                    uint64_t n_tokens) const override;
  // Observations and policies.
  Status observe(Sequence* seq, const ObserveInput& input) override;
  ObservedView observed(const Sequence* seq, uint32_t layer) const override;
  void add_masses(Sequence* seq, uint32_t layer, uint32_t class_index, std::span<const float> sums,
                  uint64_t position, bool is_packed) override;
  Status apply(Sequence* seq, const policies::Action& action) override;
  bool is_aging_due(const Sequence* seq) const override;
  std::unique_ptr<Aging> plan_aging(Sequence* seq, AgingCursor* cursor) override;
  void open_aging(Aging* aging) override;
  void close_aging(Aging* aging, AgingCursor* cursor) override;
  // Indexes.
  std::unique_ptr<IndexBuild> plan_index(Sequence* seq, uint32_t layer, uint64_t n_append,
                                         uint64_t max_cost) override;
  void open_index(IndexBuild* build) override;
  void close_index(IndexBuild* build) override;
  IndexPin pin_index(const Sequence* seq, uint32_t layer) override;
  void collect_index(const Sequence* seq, uint32_t layer, uint32_t kv_head, uint64_t length,
                     std::vector<attention::SketchedRun>* sketches,
                     std::vector<attention::HashedRun>* hashes) const override;
  // Memory and statistics.
  bool housekeep() override;
  void add_stats(kvm_stats* stats) const override;
  void check_accounts() const override;

 private:
  PageBank bank(const Sequence* seq) { return PageBank(&pool_, seq->account->quota, this); }
  IndexBank index_bank(const Sequence* seq) {
    return IndexBank(&pool_, &budget_, &yard_, &index_totals_, &seq->account->indexes,
                     seq->account->quota);
  }
  bool relieve() override;
  // That the quotas have room for `need` bytes, if need be without indexes. Fails: QUOTA.
  Status make_quota_room(Account* account, uint64_t need, std::string_view what);
  // The client of a tenant whose index was used longest ago; null: none may go.
  Account* oldest_index(const QuotaAccount* tenant);
  Status check_limits(Account* account, std::string_view what) const;
  // The stored tokens of pages with blocks in [block_begin, block_end).
  void collect_between(const Sequence* seq, uint32_t layer, uint32_t class_index,
                       uint64_t block_begin, uint64_t block_end, std::vector<KvRun>* runs) const;
  KvRun run_of(const PageEntry& entry) const;
  void trim_after_free() {
    pool_.trim(kTrimAfterFree);
    yard_.unmap_some(kUnmapAtOnce);
  }
  void cut_indexes(Sequence* seq, uint64_t n_tokens);
  void drop_from_index(Sequence* seq, const policies::Action& action);
  static std::unique_ptr<Sequence> make_seq(Account* account, SpaceRecord* record, uint32_t flags);
  kvm_seq_id add_seq(std::unique_ptr<Sequence> seq);
  void remove_seq(Sequence* seq);
  Status check_layer(const Sequence* seq, uint32_t layer) const;
  Status check_quota(std::span<const AppendItem> items);
  Status reserve_item(const AppendItem& item);
  void rollback_lists(Sequence* seq, uint32_t layer);
  // PARTIAL where queries at n_tokens and later would miss tokens below n_tokens.
  Status check_cut(const Sequence* seq, uint64_t n_tokens) const;
  void advance_commit(Sequence* seq, uint64_t n_tokens);
  static void note(Sequence* seq, policies::Event event) {
    seq->due_events |= policies::event_bit(event);
  }
  // Returns how many pages the list has, those that its kept tokens would take included.
  uint64_t show_list(const Sequence& seq, uint32_t layer, uint32_t class_index,
                     std::vector<policies::StoredRange>* stored,
                     std::vector<policies::KeptToken>* kept, policies::ListView* view) const;
  Status check_action(const Sequence* seq, const policies::Action& action) const;
  Status demote(Sequence* seq, const policies::Action& action);
  // *is_cut: set where a part of the action is left for the next slice.
  Status open_action(Aging* aging, const policies::Action& action,
                     std::span<const uint64_t> positions, bool* is_cut);
  Status open_fold(Aging* aging, const policies::Action& action, bool* is_cut);
  Status open_keep(Aging* aging, const policies::Action& action,
                   std::span<const uint64_t> positions);
  void close_fold(Sequence* seq, Aging::Work* work);
  void close_keep(Sequence* seq, Aging::Work* work);
  void drop_pages(Sequence* seq, const Aging::Work& work);
  Result<Folded*> own_folded(Sequence* seq, uint32_t list, const tiers::SlabClass& slab_class);
  static void cut_folded(Sequence* seq, uint64_t n_tokens);
  // Memory that a list has beside pages, charged until the last reference goes.
  template <typename T>
  Result<std::shared_ptr<T>> make_charged(Account* account, T&& made);
  Result<Kept*> own_kept(Sequence* seq, uint32_t list, const HeadClass& head_class);
  Result<Masses*> own_masses(Sequence* seq, uint32_t list, uint64_t begin);
  static void cut_kept(Sequence* seq, uint64_t n_tokens);
  Status charge_observed(Account* account, uint64_t size_bytes);
  void uncharge_observed(Account* account, uint64_t size_bytes);
  std::shared_ptr<Observed> make_observed(Account* account);
  void cut_observed(Sequence* seq, uint64_t n_tokens);

  const StoreOptions options_;
  tiers::MemoryBudget budget_;
  tiers::HostPool pool_;
  TableYard yard_;
  QuotaBook quotas_;
  IdTable<SpaceRecord> spaces_;
  IdTable<Sequence> sequences_;
  std::unordered_map<ClientId, std::unique_ptr<Account>> accounts_;
  ClientId next_client_ = 1;
  uint64_t observed_bytes_ = 0;  // and of what lists have beside pages
  IndexTotals index_totals_;
  uint64_t n_tokens_appended_ = 0;
  uint64_t bytes_appended_ = 0;
  uint64_t n_pages_dropped_ = 0;
  uint64_t n_pages_copied_ = 0;
};

// --- Clients ------------------------------------------------------------------------------------

ClientId StoreImpl::add_client(const ClientSpec& spec) {
  auto account = std::make_unique<Account>();
  Amounts limits = no_limits();
  limits[Resource::kBytes] = options_.default_quota_bytes != 0 ? options_.default_quota_bytes
                                                               : options_.host_capacity_bytes;
  limits[Resource::kSequences] = options_.max_sequences_per_client;
  const ClientId client = next_client_++;
  account->client = client;
  account->quota = quotas_.open(client, spec, limits);
  accounts_[client] = std::move(account);
  return client;
}

void StoreImpl::remove_client(ClientId client) {
  for (const kvm_seq_id id : client_seqs(client)) {
    free_seq(sequences_.find(id).value());
  }
  const auto it = accounts_.find(client);
  if (it != accounts_.end()) {
    const Amounts& used = it->second->quota->used();
    KVM_ASSERT(used[Resource::kBytes] == 0 && used[Resource::kSequences] == 0);
    quotas_.close(client);
    accounts_.erase(it);
  }
}

bool StoreImpl::free_some(ClientId client, uint64_t max_pages, std::vector<kvm_seq_id>* gone) {
  const auto it = accounts_.find(client);
  if (it == accounts_.end()) {
    return false;
  }
  Account& account = *it->second;
  uint64_t n_seen = 0;
  while (account.quota->used(Resource::kSequences) != 0) {
    Sequence* seq = nullptr;
    sequences_.walk_from(account.next_freed, [&](uint64_t id, Sequence& at) {
      account.next_freed = id;
      seq = at.account == &account ? &at : nullptr;
      return seq == nullptr && ++n_seen < max_pages;
    });
    if (seq == nullptr) {
      return true;
    }
    for (PageList& list : seq->lists) {
      const uint64_t n_pages = div_up(list.reserved_length(), kPageTokens);
      if (n_pages != 0 && n_seen >= max_pages) {
        return true;
      }
      n_seen += n_pages;
      list.clear(bank(seq));
    }
    gone->push_back(seq->id);
    n_seen += kPagesPerSequence;
    remove_seq(seq);
    if (n_seen >= max_pages) {
      return true;
    }
  }
  return false;
}

uint64_t StoreImpl::client_bytes(ClientId client) const {
  const auto it = accounts_.find(client);
  return it == accounts_.end() ? 0 : it->second->quota->used(Resource::kBytes);
}

// --- Spaces -------------------------------------------------------------------------------------

const policies::Policy& policy_of(const Retention& retention) {
  switch (retention.kind) {
    case KVM_RETAIN_SINKS_RECENT:
      return policies::sinks_recent();
    case KVM_RETAIN_SINKS_RECENT_FOLD:
      return policies::sinks_recent_fold();
    case KVM_RETAIN_HEAVY:
      return policies::heavy();
    default:
      return policies::full();
  }
}

// One Governed per policy object that has anything to decide.
std::vector<Governed> find_governed(const Space& space) {
  std::vector<Governed> governed;
  for (uint32_t layer = 0; layer < space.n_layers; ++layer) {
    const std::vector<HeadClass>& classes = space.layers[layer].classes;
    for (uint32_t i = 0; i < classes.size(); ++i) {
      const policies::Policy* policy = &policy_of(classes[i].retention);
      if (policy->events() == 0) {
        continue;
      }
      auto it = std::find_if(governed.begin(), governed.end(),
                             [policy](const Governed& g) { return g.policy == policy; });
      if (it == governed.end()) {
        it = governed.insert(it, {.policy = policy, .members = {}});
      }
      it->members.push_back({layer, i});
    }
  }
  return governed;
}

Result<kvm_space_id> StoreImpl::register_space(const SpaceSpec& spec) {
  KVM_TRY_ASSIGN(std::shared_ptr<const Space> offered, resolve_space(spec));
  const Result<kvm_space_id> known = find_space(offered->name);
  if (known.is_ok()) {
    KVM_TRY(compare_spaces(*spaces_.find(known.value()).value()->space, *offered));
    return known.value();
  }
  if (spaces_.size() >= options_.max_spaces || spaces_.full()) {
    return Status(KVM_ERR_LIMIT, "there are " + text(spaces_.size()) + " spaces already; at most " +
                                     text(options_.max_spaces) + " are allowed");
  }
  auto record = std::make_unique<SpaceRecord>();
  SpaceRecord* added = record.get();
  added->governed = find_governed(*offered);
  added->space = std::move(offered);
  added->id = spaces_.insert(std::move(record));
  return added->id;
}

Result<kvm_space_id> StoreImpl::find_space(std::string_view name) const {
  kvm_space_id found = 0;
  spaces_.for_each([&](uint64_t id, const SpaceRecord& record) {
    found = record.space->name == name ? id : found;
  });
  if (found == 0) {
    return Status(KVM_ERR_NOT_FOUND, "no space is named \"" + std::string(name) + "\"");
  }
  return found;
}

Result<const Space*> StoreImpl::space(kvm_space_id id) const {
  KVM_TRY_ASSIGN(const SpaceRecord* record, spaces_.find(id));
  return record->space.get();
}

kvm_space_info info_of(const SpaceRecord& record) {
  const Space& space = *record.space;
  kvm_space_info info{};
  info.struct_size = sizeof info;
  info.n_layers = space.n_layers;
  info.space = record.id;
  std::memcpy(info.name, space.name.data(), space.name.size());  // shorter than info.name
  std::copy(space.fingerprint.begin(), space.fingerprint.end(), info.fingerprint);
  info.n_q_heads = space.n_q_heads;
  info.n_kv_heads = space.n_kv_heads;
  info.head_dim_k = space.head_dim_k;
  info.head_dim_v = space.head_dim_v;
  info.dtype = static_cast<uint32_t>(space.dtype);
  info.n_head_classes = space.n_lists;
  info.n_sequences = record.n_sequences;
  info.bytes_per_token = space.bytes_per_token;
  info.page_tokens = kPageTokens;
  return info;
}

Result<kvm_space_info> StoreImpl::space_info(kvm_space_id id) const {
  KVM_TRY_ASSIGN(const SpaceRecord* record, spaces_.find(id));
  return info_of(*record);
}

std::vector<kvm_space_info> StoreImpl::list_spaces() const {
  std::vector<kvm_space_info> infos;
  spaces_.for_each([&](uint64_t, const SpaceRecord& record) { infos.push_back(info_of(record)); });
  return infos;
}

Status StoreImpl::drop_space(kvm_space_id id) {
  KVM_TRY_ASSIGN(const SpaceRecord* record, spaces_.find(id));
  if (record->n_sequences > 0) {
    return Status(KVM_ERR_BUSY, "space \"" + record->space->name + "\" has " +
                                    text(record->n_sequences) + " sequences");
  }
  spaces_.erase(id);
  return Status::ok();
}

// --- Sequences ----------------------------------------------------------------------------------

Result<Sequence*> StoreImpl::find_seq(ClientId client, kvm_seq_id id) {
  KVM_TRY_ASSIGN(Sequence * seq, sequences_.find(id));
  if (seq->account->client != client) {
    return Status(KVM_ERR_PERMISSION, "sequence " + text(id) + " belongs to another client");
  }
  return seq;
}

Status StoreImpl::check_limits(Account* account, std::string_view what) const {
  KVM_TRY(account->quota->check(Resource::kSequences, 1, what));
  if (sequences_.full()) {
    return Status(KVM_ERR_LIMIT,
                  "the service has " + text(sequences_.size()) + " sequences and can name no more");
  }
  return Status::ok();
}

std::unique_ptr<Sequence> StoreImpl::make_seq(Account* account, SpaceRecord* record,
                                              uint32_t flags) {
  auto seq = std::make_unique<Sequence>();
  seq->account = account;
  seq->record = record;
  seq->flags = flags;
  seq->lists.resize(record->space->n_lists);
  seq->next_commits.resize(record->governed.size());
  seq->indexes.resize(record->space->has_indexes ? record->space->n_layers : 0);
  return seq;
}

kvm_seq_id StoreImpl::add_seq(std::unique_ptr<Sequence> seq) {
  Sequence* added = seq.get();
  added->account->quota->charge(Resource::kSequences, 1);
  ++added->record->n_sequences;
  added->id = sequences_.insert(std::move(seq));
  return added->id;
}

Result<kvm_seq_id> StoreImpl::create_seq(ClientId client, kvm_space_id space, uint32_t flags) {
  const auto account = accounts_.find(client);
  KVM_ASSERT(account != accounts_.end());
  KVM_TRY_ASSIGN(SpaceRecord * record, spaces_.find(space));
  if ((flags & ~uint32_t{KVM_SEQ_MANUAL_COMMIT}) != 0) {
    return Status(KVM_ERR_INVALID,
                  "flags is " + text(flags) + "; only KVM_SEQ_MANUAL_COMMIT (1) is defined");
  }
  KVM_TRY(check_limits(account->second.get(), "a new sequence"));
  return add_seq(make_seq(account->second.get(), record, flags));
}

uint64_t shortest_layer(const Sequence* seq) {
  uint64_t shortest = UINT64_MAX;
  for (const PageList& list : seq->lists) {
    shortest = std::min(shortest, list.length());
  }
  return shortest;
}

uint64_t longest_layer(const Sequence* seq) {
  uint64_t longest = 0;
  for (const PageList& list : seq->lists) {
    longest = std::max(longest, list.length());
  }
  return longest;
}

Status StoreImpl::check_fork(const Sequence* parent, uint64_t n_tokens) const {
  const uint64_t longest = longest_layer(parent);
  if (n_tokens != KVM_POSITION_END && n_tokens > longest) {
    return Status(KVM_ERR_INVALID, "n_tokens is " + text(n_tokens) + "; the longest layer has " +
                                       text(longest) + " tokens");
  }
  KVM_TRY(check_cut(parent, n_tokens));
  return check_limits(parent->account, "a fork");
}

Result<kvm_seq_id> StoreImpl::fork_seq(Sequence* parent, uint64_t n_tokens) {
  KVM_TRY(check_fork(parent, n_tokens));
  std::unique_ptr<Sequence> child = make_seq(parent->account, parent->record, parent->flags);
  for (size_t i = 0; i < parent->lists.size(); ++i) {
    const PageList& list = parent->lists[i];
    child->lists[i].share(list, std::min(n_tokens, list.length()), bank(parent));
  }
  child->n_committed = std::min(parent->n_committed, n_tokens);
  child->observed = parent->observed;
  for (ObservedRef& ref : child->observed) {
    ref.limit = std::min(ref.limit, n_tokens);
  }
  child->folded = parent->folded;
  cut_folded(child.get(), n_tokens);
  child->kept = parent->kept;
  child->masses = parent->masses;
  cut_kept(child.get(), n_tokens);
  child->indexes = parent->indexes;
  cut_indexes(child.get(), n_tokens);
  Sequence* added = child.get();
  const kvm_seq_id id = add_seq(std::move(child));
  note(added, policies::Event::kForked);
  return id;
}

// Whether tokens that queries at `first_query` and later would see, out of those below `end`, have
// been dropped from a list.
bool misses_visible(const Space& space, uint32_t layer, uint32_t class_index, const PageList& list,
                    uint64_t first_query, uint64_t end) {
  const Retention& retention = space.head_class(layer, class_index).retention;
  HeadVisibility seen = space.visibility(layer, class_index, first_query);
  if (retention.is_per_head()) {
    seen = {.window = retention.n_recent, .n_sinks = retention.n_sinks};
  }
  uint64_t recent =
      seen.window == 0 || first_query < seen.window ? 0 : first_query - seen.window + 1;
  if (retention.is_per_head() && recent >= end && end > 0) {
    recent = end - 1;  // where that one is gone, what was left of it would be seen as well
  }
  return !list.covers(std::min(recent, end), end) ||
         !list.covers(std::min(seen.first_sink, end), std::min(seen.n_sinks, end));
}

Status StoreImpl::check_cut(const Sequence* seq, uint64_t n_tokens) const {
  const Space& space = seq->space();
  for (uint32_t layer = 0; layer < space.n_layers; ++layer) {
    if (space.layers[layer].kind == KVM_LAYER_ABSENT) {
      continue;
    }
    const std::span<const PageList> lists = seq->layer_lists(space.layers[layer].storage_layer);
    for (uint32_t i = 0; i < lists.size(); ++i) {
      if (n_tokens < lists[i].length() &&
          misses_visible(space, layer, i, lists[i], n_tokens, n_tokens)) {
        return Status(KVM_ERR_PARTIAL, "sequence " + text(seq->id) + " cannot be cut at " +
                                           text(n_tokens) + ": layer " + text(layer) +
                                           " has dropped tokens that queries there would see");
      }
    }
  }
  return Status::ok();
}

Status StoreImpl::truncate_seq(Sequence* seq, uint64_t n_tokens) {
  if (n_tokens >= longest_layer(seq)) {
    return Status::ok();  // observed queries may lie further on, and stay
  }
  KVM_TRY(check_cut(seq, n_tokens));
  for (PageList& list : seq->lists) {
    list.truncate(std::min(n_tokens, list.length()), bank(seq));
  }
  if (n_tokens < seq->n_committed) {
    seq->n_committed = n_tokens;
    std::fill(seq->next_commits.begin(), seq->next_commits.end(), 0);
  }
  cut_observed(seq, n_tokens);
  cut_folded(seq, n_tokens);
  cut_kept(seq, n_tokens);
  cut_indexes(seq, n_tokens);
  trim_after_free();
  return Status::ok();
}

Status StoreImpl::commit_seq(Sequence* seq, uint64_t n_tokens) {
  const uint64_t shortest = shortest_layer(seq);
  if (n_tokens == KVM_POSITION_END) {
    n_tokens = shortest;
  }
  if (n_tokens > shortest) {
    return Status(KVM_ERR_INVALID, "n_tokens is " + text(n_tokens) + "; the shortest layer has " +
                                       text(shortest) + " tokens");
  }
  advance_commit(seq, n_tokens);
  return Status::ok();
}

void StoreImpl::advance_commit(Sequence* seq, uint64_t n_tokens) {
  if (n_tokens > seq->n_committed) {
    seq->n_committed = n_tokens;
    note(seq, policies::Event::kCommitted);
  }
}

void StoreImpl::free_seq(Sequence* seq) {
  remove_seq(seq);
  trim_after_free();
}

void StoreImpl::remove_seq(Sequence* seq) {
  for (PageList& list : seq->lists) {
    list.clear(bank(seq));
  }
  seq->observed.clear();
  seq->folded.clear();
  seq->kept.clear();
  seq->masses.clear();
  seq->indexes.clear();
  seq->account->quota->give_back(Resource::kSequences, 1);
  --seq->record->n_sequences;
  sequences_.erase(seq->id);
}

uint64_t StoreImpl::length(const Sequence* seq, uint32_t layer) const {
  const std::span<const PageList> lists =
      seq->layer_lists(seq->space().layers[layer].storage_layer);
  return lists.empty() ? 0 : lists[0].length();
}

uint64_t StoreImpl::reserved_length(const Sequence* seq, uint32_t layer) const {
  const std::span<const PageList> lists =
      seq->layer_lists(seq->space().layers[layer].storage_layer);
  return lists.empty() ? 0 : lists[0].reserved_length();
}

kvm_seq_info StoreImpl::seq_info(const Sequence* seq) const {
  kvm_seq_info info{};
  info.struct_size = sizeof info;
  info.flags = seq->flags;
  info.seq = seq->id;
  info.space = seq->record->id;
  info.client_id = seq->account->client;
  info.n_tokens_min = shortest_layer(seq);
  info.n_committed = seq->n_committed;
  info.n_tokens_max = longest_layer(seq);
  for (const PageList& list : seq->lists) {
    info.n_entries_dropped += list.n_dropped();
    list.for_each([&](const PageEntry& entry, bool shared) {
      const uint64_t page_bytes = pool_.page_bytes(entry.page);
      ++info.n_pages;
      info.bytes += page_bytes;
      info.bytes_shared += shared || pool_.n_refs(entry.page) > 1 ? page_bytes : 0;
    });
  }
  for (const ObservedRef& ref : seq->observed) {
    info.bytes_observed += ref.data != nullptr ? ref.data->size_bytes() : 0;
  }
  for (const std::shared_ptr<Folded>& folded : seq->folded) {
    const uint64_t folded_bytes = folded != nullptr ? folded->size_bytes() : 0;
    info.bytes += folded_bytes;
    info.bytes_shared += folded.use_count() > 1 ? folded_bytes : 0;
  }
  for (const std::shared_ptr<Kept>& kept : seq->kept) {
    const uint64_t kept_bytes = kept != nullptr ? kept->size_bytes() : 0;
    info.bytes += kept_bytes;
    info.bytes_shared += kept.use_count() > 1 ? kept_bytes : 0;
    info.n_entries_dropped -= kept != nullptr ? kept->tokens().size() : 0;
  }
  for (const MassesRef& masses : seq->masses) {
    info.bytes_observed += masses.data != nullptr ? masses.data->size_bytes() : 0;
  }
  for (uint32_t layer = 0; layer < seq->observed.size(); ++layer) {
    info.n_rows_observed += observed(seq, layer).n_rows;
  }
  for (const IndexRef& ref : seq->indexes) {
    info.bytes_index += ref.data != nullptr ? ref.data->size_bytes(pool_) : 0;
  }
  return info;
}

SeqPage StoreImpl::list_seqs(ClientId client, kvm_space_id space, bool all_clients,
                             kvm_seq_id begin, size_t n_max) const {
  SeqPage page;
  uint64_t n_visited = 0;
  sequences_.walk_from(begin, [&](uint64_t, const Sequence& seq) {
    if ((!all_clients && seq.account->client != client) ||
        (space != 0 && seq.record->id != space)) {
      return true;
    }
    if (page.infos.size() >= n_max || n_visited >= kMaxListedPages) {
      page.has_more = true;
      return false;
    }
    page.infos.push_back(seq_info(&seq));
    n_visited += page.infos.back().n_pages;
    return true;
  });
  return page;
}

Result<ClientId> StoreImpl::seq_client(kvm_seq_id id) const {
  KVM_TRY_ASSIGN(const Sequence* seq, sequences_.find(id));
  return seq->account->client;
}

std::vector<kvm_seq_id> StoreImpl::client_seqs(ClientId client) const {
  std::vector<kvm_seq_id> ids;
  sequences_.for_each([&](uint64_t id, const Sequence& seq) {
    if (seq.account->client == client) {
      ids.push_back(id);
    }
  });
  return ids;
}

// --- Appending ----------------------------------------------------------------------------------

Status StoreImpl::check_layer(const Sequence* seq, uint32_t layer) const {
  const Space& space = seq->space();
  if (layer >= space.n_layers) {
    return Status(KVM_ERR_INVALID, "layer " + text(layer) + " is beyond the space's " +
                                       text(space.n_layers) + " layers");
  }
  if (space.layers[layer].kind == KVM_LAYER_ABSENT) {
    return Status(KVM_ERR_INVALID, "layer " + text(layer) + " is absent and stores nothing");
  }
  return Status::ok();
}

Status StoreImpl::check_append(const AppendItem& item) const {
  KVM_TRY(check_layer(item.seq, item.layer));
  if (item.seq->space().layers[item.layer].kind == KVM_LAYER_ALIAS) {
    return Status(KVM_ERR_INVALID, "layer " + text(item.layer) + " is an alias of layer " +
                                       text(item.seq->space().layers[item.layer].storage_layer) +
                                       "; append there");
  }
  const uint64_t present = length(item.seq, item.layer);
  if (item.position != KVM_POSITION_END && item.position != present) {
    return Status(KVM_ERR_HOLE, "append_position is " + text(item.position) + "; layer " +
                                    text(item.layer) + " of sequence " + text(item.seq->id) +
                                    " has " + text(present) + " tokens");
  }
  if (item.n_tokens == 0 || item.n_tokens > kMaxTokens - present) {
    return Status(KVM_ERR_INVALID, "n_append is " + text(item.n_tokens) + "; it must be 1 to " +
                                       text(kMaxTokens - present));
  }
  return Status::ok();
}

// The quotas of all clients concerned hold what all items together need.
Status StoreImpl::check_quota(std::span<const AppendItem> items) {
  std::unordered_map<Account*, uint64_t> needs;
  for (const AppendItem& item : items) {
    const std::span<const PageList> lists = std::as_const(*item.seq).layer_lists(item.layer);
    for (uint32_t i = 0; i < lists.size(); ++i) {
      const tiers::SlabClass& slab_class = item.seq->space().head_class(item.layer, i).slab_class;
      needs[item.seq->account] +=
          lists[i].pages_to_reserve(item.n_tokens, slab_class, pool_) * slab_class.page_bytes();
    }
  }
  std::unordered_map<QuotaAccount*, uint64_t> tenant_needs;
  for (const auto& [account, need] : needs) {
    if (need > 0) {
      KVM_TRY(make_quota_room(account, need, "the append"));
      tenant_needs[account->quota->tenant()] += need;
    }
  }
  for (const auto& [tenant, need] : tenant_needs) {
    KVM_TRY(tenant->check(Resource::kBytes, need, "the append"));
  }
  return Status::ok();
}

Status StoreImpl::reserve_item(const AppendItem& item) {
  const std::span<PageList> lists = item.seq->layer_lists(item.layer);
  if (lists[0].reserved_length() != lists[0].length()) {
    return Status(KVM_ERR_INVALID, "sequence " + text(item.seq->id) +
                                       " is appended to twice in layer " + text(item.layer));
  }
  for (uint32_t i = 0; i < lists.size(); ++i) {
    const Status status = lists[i].reserve(
        item.n_tokens, item.seq->space().head_class(item.layer, i).slab_class, bank(item.seq));
    if (!status.is_ok()) {
      rollback_lists(item.seq, item.layer);
      return status;
    }
  }
  return Status::ok();
}

Status StoreImpl::reserve_append(std::span<const AppendItem> items,
                                 std::vector<AppendPiece>* pieces) {
  for (const AppendItem& item : items) {
    KVM_TRY(check_append(item));
  }
  KVM_TRY(check_quota(items));
  for (size_t i = 0; i < items.size(); ++i) {
    const Status status = reserve_item(items[i]);
    if (!status.is_ok()) {
      for (size_t j = 0; j < i; ++j) {
        rollback_lists(items[j].seq, items[j].layer);
      }
      pool_.trim(kTrimAfterFree);
      return status;
    }
  }
  for (uint32_t i = 0; i < items.size(); ++i) {
    const std::span<const PageList> lists =
        std::as_const(*items[i].seq).layer_lists(items[i].layer);
    for (uint32_t c = 0; c < lists.size(); ++c) {
      n_pages_copied_ += lists[c].copy_tail(pool_) ? 1 : 0;
      const HeadClass& head_class = items[i].seq->space().head_class(items[i].layer, c);
      const tiers::SlabClass& slab_class = head_class.slab_class;
      const uint64_t begin = lists[c].length();
      for (uint64_t p = begin; p < lists[c].reserved_length();) {
        const PageEntry entry = lists[c].reserved_piece(p);
        std::byte* data = pool_.data(entry.page);
        pieces->push_back(
            {.item = i,
             .class_index = c,
             .token = static_cast<uint32_t>(p - begin),
             .n_tokens = entry.count,
             .k = data + entry.first * slab_class.k_row_bytes(),
             .v = data + slab_class.v_offset() + entry.first * slab_class.v_row_bytes(),
             .k_scale = slab_class.k_scales(data, entry.first),
             .v_scale = slab_class.v_scales(data, entry.first),
             .cls = &head_class});
        p += entry.count;
      }
    }
  }
  return Status::ok();
}

void StoreImpl::publish(Sequence* seq, uint32_t layer) {
  const std::span<PageList> lists = seq->layer_lists(layer);
  const uint64_t n_tokens = lists[0].reserved_length() - lists[0].length();
  for (uint32_t i = 0; i < lists.size(); ++i) {
    const tiers::SlabClass& slab_class = seq->space().head_class(layer, i).slab_class;
    lists[i].publish(bank(seq));
    bytes_appended_ += n_tokens * slab_class.n_heads * slab_class.token_bytes();
  }
  n_tokens_appended_ += n_tokens;
  note(seq, policies::Event::kAppended);
  if ((seq->flags & KVM_SEQ_MANUAL_COMMIT) == 0) {
    advance_commit(seq, shortest_layer(seq));
  }
  pool_.trim(kTrimInPassing);
  yard_.unmap_some(kUnmapInPassing);
}

void StoreImpl::rollback_lists(Sequence* seq, uint32_t layer) {
  for (PageList& list : seq->layer_lists(layer)) {
    list.rollback(bank(seq));
  }
}

void StoreImpl::rollback(Sequence* seq, uint32_t layer) {
  rollback_lists(seq, layer);
  pool_.trim(kTrimAfterFree);
}

// --- Reading ------------------------------------------------------------------------------------

KvRun StoreImpl::run_of(const PageEntry& entry) const {
  const tiers::SlabClass& slab_class = pool_.slab_class(entry.page);
  const std::byte* data = pool_.data(entry.page);
  KvRun run;
  run.k = data + entry.first * slab_class.k_row_bytes();
  run.v = data + slab_class.v_offset() + entry.first * slab_class.v_row_bytes();
  if (slab_class.has_log_weights) {
    run.log_weight =
        reinterpret_cast<const float*>(data + slab_class.log_weight_offset()) + entry.first;
  }
  run.position = entry.position();
  run.n_tokens = entry.count;
  run.transform = entry.transform;
  run.dtype_k = slab_class.dtype_k;
  run.dtype_v = slab_class.dtype_v;
  run.k_scale = slab_class.k_scales(data, entry.first);
  run.v_scale = slab_class.v_scales(data, entry.first);
  return run;
}

void StoreImpl::collect_runs(const Sequence* seq, uint32_t layer, uint32_t class_index,
                             std::vector<KvRun>* runs, bool is_packed) const {
  const std::span<const PageList> lists =
      seq->layer_lists(seq->space().layers[layer].storage_layer);
  if (lists.empty()) {
    return;
  }
  const uint32_t list = seq->space().storage(layer).first_list + class_index;
  const Folded* folded = seq->folded.empty() ? nullptr : seq->folded[list].get();
  folded = folded == nullptr || folded->n_tokens == 0 ? nullptr : folded;
  const Kept* kept = seq->kept.empty() ? nullptr : seq->kept[list].get();
  lists[class_index].for_each([&](const PageEntry& entry, bool) {
    if (folded != nullptr && entry.position() >= folded->end) {
      runs->push_back(folded->run());
      folded = nullptr;
    }
    if (kept != nullptr && entry.position() >= kept->end()) {
      kept->collect(is_packed, runs);
      kept = nullptr;
    }
    runs->push_back(run_of(entry));
  });
  if (kept != nullptr) {
    kept->collect(is_packed, runs);
  }
  if (folded != nullptr) {
    runs->push_back(folded->run());
  }
}

void StoreImpl::collect_between(const Sequence* seq, uint32_t layer, uint32_t class_index,
                                uint64_t block_begin, uint64_t block_end,
                                std::vector<KvRun>* runs) const {
  seq->layer_lists(layer)[class_index].for_each_between(
      block_begin, block_end, [&](const PageEntry& entry) { runs->push_back(run_of(entry)); });
}

void StoreImpl::pin_pages(const Sequence* seq, uint32_t layer, uint32_t class_index,
                          PagePins* pins) {
  pins->client = seq->account->client;
  const std::span<const PageList> lists =
      seq->layer_lists(seq->space().layers[layer].storage_layer);
  if (lists.empty()) {
    return;
  }
  std::vector<PageRef> pages;
  lists[class_index].for_each([&](const PageEntry& entry, bool) {
    if (entry.count == kPageTokens) {
      pages.push_back(entry.page);
    }
  });
  // Nothing throws from here on.
  for (const PageRef page : pages) {
    pool_.add_ref(page);
  }
  pins->pages = std::move(pages);
}

void StoreImpl::unpin_pages(PagePins* pins) {
  if (pins->pages.empty()) {
    return;
  }
  Account& account = *accounts_.at(pins->client);
  for (const PageRef page : pins->pages) {
    const uint64_t page_bytes = pool_.page_bytes(page);
    account.quota->give_back(Resource::kBytes, pool_.release(page) ? page_bytes : 0);
  }
  pins->pages.clear();
  pool_.trim(kTrimAfterFree);
}

Status StoreImpl::check_visible(const Sequence* seq, uint32_t layer,
                                uint64_t first_query_position) const {
  KVM_TRY(check_layer(seq, layer));
  const std::span<const PageList> lists =
      seq->layer_lists(seq->space().layers[layer].storage_layer);
  for (uint32_t i = 0; i < lists.size(); ++i) {
    if (misses_visible(seq->space(), layer, i, lists[i], first_query_position, lists[i].length())) {
      return Status(KVM_ERR_PARTIAL, "a query at position " + text(first_query_position) +
                                         " of layer " + text(layer) + " sees tokens that kv head " +
                                         text(seq->space().head_class(layer, i).kv_heads[0]) +
                                         " has dropped");
    }
  }
  return Status::ok();
}

Status StoreImpl::check_read(const Sequence* seq, uint32_t layer, uint64_t position,
                             uint64_t n_tokens) const {
  KVM_TRY(check_layer(seq, layer));
  const std::span<const PageList> lists =
      seq->layer_lists(seq->space().layers[layer].storage_layer);
  const uint64_t present = lists[0].length();
  if (position > present || n_tokens > present - position) {
    return Status(KVM_ERR_INVALID, text(n_tokens) + " tokens from position " + text(position) +
                                       " are beyond the " + text(present) + " of layer " +
                                       text(layer));
  }
  for (uint32_t i = 0; i < lists.size(); ++i) {
    if (!lists[i].covers(position, position + n_tokens)) {
      return Status(KVM_ERR_PARTIAL, "kv head " +
                                         text(seq->space().head_class(layer, i).kv_heads[0]) +
                                         " of layer " + text(layer) + " has dropped tokens of [" +
                                         text(position) + ", " + text(position + n_tokens) + ")");
    }
  }
  return Status::ok();
}

// --- Observations -------------------------------------------------------------------------------

Status StoreImpl::charge_observed(Account* account, uint64_t size_bytes) {
  KVM_TRY(make_quota_room(account, size_bytes, "the observation"));
  bool is_charged = pool_.make_room(size_bytes) && budget_.charge(size_bytes);
  while (!is_charged && relieve()) {
    is_charged = pool_.make_room(size_bytes) && budget_.charge(size_bytes);
  }
  if (!is_charged) {
    return Status(KVM_ERR_NO_SPACE, "the observation needs " + text(size_bytes) + " bytes; " +
                                        text(budget_.used_bytes()) + " of " +
                                        text(budget_.capacity_bytes()) + " are in use");
  }
  account->quota->charge(Resource::kBytes, size_bytes);
  observed_bytes_ += size_bytes;
  return Status::ok();
}

void StoreImpl::uncharge_observed(Account* account, uint64_t size_bytes) {
  account->quota->give_back(Resource::kBytes, size_bytes);
  observed_bytes_ -= size_bytes;
  budget_.uncharge(size_bytes);
}

std::shared_ptr<Observed> StoreImpl::make_observed(Account* account) {
  return std::shared_ptr<Observed>(new Observed, [this, account](Observed* gone) {
    uncharge_observed(account, gone->size_bytes());
    delete gone;
  });
}

bool all_finite(const float* values, uint64_t n) {
  return std::all_of(values, values + n, [](float value) { return std::isfinite(value); });
}

Status StoreImpl::observe(Sequence* seq, const ObserveInput& input) {
  KVM_TRY(check_layer(seq, input.layer));
  const Layer& layer = seq->space().layers[input.layer];
  const uint32_t row_floats = layer.n_q_heads * seq->space().head_dim_k;
  const uint64_t present_tokens = length(seq, input.layer);
  if (input.n_columns > present_tokens || input.column_begin > present_tokens - input.n_columns) {
    return Status(KVM_ERR_INVALID, text(input.n_columns) + " column sums from position " +
                                       text(input.column_begin) + " are beyond the " +
                                       text(present_tokens) + " tokens of layer " +
                                       text(input.layer));
  }
  if (input.query_position > kMaxTokens) {
    return Status(KVM_ERR_INVALID, "query_position is " + text(input.query_position) +
                                       "; it must be at most " + text(kMaxTokens));
  }
  if (!all_finite(input.q, uint64_t{input.n_rows} * row_floats) ||
      !all_finite(input.column_sums, input.n_columns * layer.n_kv_heads)) {
    return Status(KVM_ERR_INVALID, "a query or a column sum is not finite");
  }
  if (seq->observed.empty()) {
    seq->observed.resize(seq->space().n_layers);
  }
  ObservedRef& ref = seq->observed[input.layer];
  if (ref.data != nullptr && ref.data.use_count() == 1 && ref.limit == UINT64_MAX) {
    // In place. It may shrink, when rows are replaced by fewer.
    const uint64_t before = ref.data->size_bytes();
    const uint64_t after =
        observed_bytes_after(ref.data.get(), input, row_floats, layer.n_kv_heads);
    KVM_TRY(charge_observed(seq->account, after > before ? after - before : 0));
    add_observation(ref.data.get(), input, row_floats, layer.n_kv_heads);
    uncharge_observed(seq->account, before > after ? before - after : 0);
    return Status::ok();
  }
  Observed own;
  if (ref.data != nullptr) {
    own = *ref.data;
    truncate_observation(&own, ref.limit, row_floats, layer.n_kv_heads);
  }
  KVM_TRY(charge_observed(seq->account,
                          observed_bytes_after(&own, input, row_floats, layer.n_kv_heads)));
  add_observation(&own, input, row_floats, layer.n_kv_heads);
  std::shared_ptr<Observed> added = make_observed(seq->account);
  *added = std::move(own);
  ref = {.data = std::move(added)};
  return Status::ok();
}

ObservedView StoreImpl::observed(const Sequence* seq, uint32_t layer) const {
  ObservedView view;
  if (seq->observed.empty() || seq->observed[layer].data == nullptr) {
    return view;
  }
  const ObservedRef& ref = seq->observed[layer];
  const uint64_t n_columns = ref.data->column_sums.size() / seq->space().layers[layer].n_kv_heads;
  view.query_position = ref.data->query_position;
  view.n_rows = ref.limit <= ref.data->query_position
                    ? 0
                    : static_cast<uint32_t>(std::min<uint64_t>(
                          ref.data->n_rows, ref.limit - ref.data->query_position));
  view.q = view.n_rows > 0 ? ref.data->queries.data() : nullptr;
  view.n_columns = std::min(n_columns, ref.limit);
  view.column_sums = view.n_columns > 0 ? ref.data->column_sums.data() : nullptr;
  return view;
}

void StoreImpl::cut_observed(Sequence* seq, uint64_t n_tokens) {
  for (uint32_t i = 0; i < seq->observed.size(); ++i) {
    ObservedRef& ref = seq->observed[i];
    if (ref.data == nullptr) {
      continue;
    }
    ref.limit = std::min(ref.limit, n_tokens);
    if (ref.data.use_count() == 1) {
      const Layer& layer = seq->space().layers[i];
      const uint64_t before = ref.data->size_bytes();
      truncate_observation(ref.data.get(), ref.limit, layer.n_q_heads * seq->space().head_dim_k,
                           layer.n_kv_heads);
      uncharge_observed(seq->account, before - ref.data->size_bytes());
      ref.limit = UINT64_MAX;
    }
  }
}

// --- Policies -----------------------------------------------------------------------------------

// The pages of a list as ranges of one encoding.
std::vector<policies::StoredRange> stored_ranges(const PageList& list, const tiers::HostPool& pool,
                                                 uint64_t* stored_bytes, uint64_t* n_pages) {
  std::vector<policies::StoredRange> ranges;
  list.for_each([&](const PageEntry& entry, bool) {
    ++*n_pages;
    const tiers::SlabClass& slab_class = pool.slab_class(entry.page);
    *stored_bytes += slab_class.page_bytes();
    if (!ranges.empty() && ranges.back().positions.end == entry.position() &&
        ranges.back().dtype_k == slab_class.dtype_k &&
        ranges.back().dtype_v == slab_class.dtype_v) {
      ranges.back().positions.end = entry.end();
      return;
    }
    ranges.push_back({.positions = {entry.position(), entry.end()},
                      .dtype_k = slab_class.dtype_k,
                      .dtype_v = slab_class.dtype_v,
                      .tier = static_cast<uint8_t>(tiers::Tier::kHost)});
  });
  return ranges;
}

// What a list that chooses tokens has kept; their masses and those of stored ones go to the view.
std::vector<policies::KeptToken> kept_tokens(const Sequence& seq, uint32_t list,
                                             policies::ListView* view) {
  const Kept* kept = seq.kept.empty() ? nullptr : seq.kept[list].get();
  std::vector<policies::KeptToken> tokens(kept == nullptr ? 0 : kept->tokens().size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    tokens[i].position = kept->tokens()[i].position;
  }
  if (seq.masses.empty() || seq.masses[list].data == nullptr) {
    return tokens;
  }
  const MassesRef& ref = seq.masses[list];
  for (size_t i = 0; i < tokens.size(); ++i) {
    tokens[i].mass = ref.data->kept[i];
  }
  const uint64_t n_held = ref.limit <= ref.data->begin ? 0 : ref.limit - ref.data->begin;
  view->mass_begin = ref.data->begin;
  view->masses = {ref.data->recent.data(), std::min<uint64_t>(ref.data->recent.size(), n_held)};
  return tokens;
}

uint64_t StoreImpl::show_list(const Sequence& seq, uint32_t layer, uint32_t class_index,
                              std::vector<policies::StoredRange>* stored,
                              std::vector<policies::KeptToken>* kept,
                              policies::ListView* view) const {
  const Layer& own = seq.space().layers[layer];
  const HeadClass& head_class = own.classes[class_index];
  const PageList& list = seq.layer_lists(layer)[class_index];
  const ObservedView seen = observed(&seq, layer);
  uint64_t n_pages = 0;
  view->layer = layer;
  view->class_index = class_index;
  view->n_heads = head_class.slab_class.n_heads;
  view->length = list.length();
  *stored = stored_ranges(list, pool_, &view->stored_bytes, &n_pages);
  view->stored = *stored;
  view->n_sinks = head_class.retention.n_sinks;
  view->n_recent = head_class.retention.n_recent;
  view->slack = head_class.retention.slack;
  view->n_heavy = head_class.retention.n_heavy;
  *kept = kept_tokens(seq, own.first_list + class_index, view);
  view->kept = *kept;
  view->kv_heads = head_class.kv_heads;
  view->n_kv_heads = own.n_kv_heads;
  view->column_sums = seen.column_sums;
  view->n_columns = seen.n_columns;
  view->queries = seen.q;
  view->n_query_rows = seen.n_rows;
  view->query_position = seen.query_position;
  return n_pages + kept->size() / kPageTokens;
}

// Whether a policy is to be asked about an event.
bool is_due(const Sequence& seq, size_t governed, uint32_t event) {
  const policies::EventSet bit = 1u << event;
  const bool waits = event == static_cast<uint32_t>(policies::Event::kCommitted) &&
                     seq.n_committed < seq.next_commits[governed];
  return (seq.due_events & seq.record->governed[governed].policy->events() & bit) != 0 && !waits;
}

bool StoreImpl::is_aging_due(const Sequence* seq) const {
  for (size_t i = 0; i < seq->record->governed.size(); ++i) {
    for (uint32_t event = 0; event < policies::kEvents; ++event) {
      if (is_due(*seq, i, event)) {
        return true;
      }
    }
  }
  return false;
}

std::unique_ptr<Aging> StoreImpl::plan_aging(Sequence* seq, AgingCursor* cursor) {
  const std::vector<Governed>& all = seq->record->governed;
  for (; cursor->event < policies::kEvents; *cursor = {.event = cursor->event + 1}) {
    for (; cursor->governed < all.size();
         *cursor = {.event = cursor->event, .governed = cursor->governed + 1}) {
      if (!is_due(*seq, cursor->governed, cursor->event)) {
        continue;
      }
      const Governed& governed = all[cursor->governed];
      const auto n_members = static_cast<uint32_t>(governed.members.size());
      if (cursor->member == n_members) {
        seq->next_commits[cursor->governed] = cursor->next_commit;
        continue;
      }
      auto aging = std::make_unique<Aging>(
          seq, governed.policy, static_cast<policies::Event>(cursor->event), seq->n_committed);
      std::vector<Aging::Group>& groups = aging->groups();
      groups.reserve(std::min<size_t>(Aging::kMaxGroups, n_members - cursor->member));
      uint64_t n_pages = 0;
      for (uint32_t at = cursor->member;
           at < n_members && groups.size() < Aging::kMaxGroups && n_pages < Aging::kSlicePages;) {
        const uint32_t n = governed.policy->decides_by_list() ? 1 : n_members - at;
        Aging::Group& group = groups.emplace_back();
        group.first_member = at;
        group.stored.resize(n);
        group.kept.resize(n);
        group.lists.resize(n);
        for (uint32_t i = 0; i < n; ++i, ++at) {
          n_pages += show_list(*seq, governed.members[at].layer, governed.members[at].class_index,
                               &group.stored[i], &group.kept[i], &group.lists[i]);
        }
      }
      aging->set_pages(n_pages);
      return aging;
    }
  }
  seq->due_events = 0;
  return nullptr;
}

// What cannot be done (no room to demote, say) is left as it is: the policy sees that in the next
// view.
void StoreImpl::open_aging(Aging* aging) {
  for (uint32_t g = 0; g < aging->n_groups(); ++g) {
    Aging::Group& group = aging->groups()[g];
    for (uint32_t i = 0; i < group.actions.n_actions && !group.is_cut; ++i) {
      if (aging->bytes() >= Aging::kSliceBytes) {
        group.is_cut = true;
        break;
      }
      const policies::Action& action = group.actions.actions[i];
      const Status status = open_action(
          aging, action, std::span(group.actions.kept).subspan(action.first_kept, action.n_kept),
          &group.is_cut);
      group.is_cut = group.is_cut && status.is_ok();
      group.actions.more = group.actions.more && status.is_ok();  // it would ask for the same
    }
  }
}

Status StoreImpl::open_action(Aging* aging, const policies::Action& action,
                              std::span<const uint64_t> positions, bool* is_cut) {
  if (action.kind != policies::ActionKind::kFold && action.kind != policies::ActionKind::kKeep) {
    return apply(aging->seq(), action);
  }
  KVM_TRY(check_action(aging->seq(), action));
  return action.kind == policies::ActionKind::kFold ? open_fold(aging, action, is_cut)
                                                    : open_keep(aging, action, positions);
}

void StoreImpl::close_aging(Aging* aging, AgingCursor* cursor) {
  for (Aging::Work& work : aging->works()) {
    if (!work.has_failed && work.kept != nullptr) {
      close_keep(aging->seq(), &work);
    } else if (!work.has_failed) {
      close_fold(aging->seq(), &work);
    } else {
      // Nothing would change by trying again at once.
      aging->give_up(work);
    }
  }
  for (const Aging::Group& group : aging->groups()) {
    cursor->member = group.first_member;
    const bool goes_on = group.actions.more && ++cursor->n_rounds < kMaxPolicyRounds;
    if (group.is_cut || goes_on) {
      return;
    }
    cursor->n_rounds = 0;
    cursor->next_commit = std::min(cursor->next_commit, group.actions.next_commit);
    cursor->member += static_cast<uint32_t>(group.lists.size());
  }
}

Status StoreImpl::check_action(const Sequence* seq, const policies::Action& action) const {
  const Space& space = seq->space();
  if (action.layer >= space.n_layers ||
      action.class_index >= space.layers[action.layer].classes.size()) {
    return Status(KVM_ERR_INVALID, "there is no head class " + text(action.class_index) +
                                       " of layer " + text(action.layer));
  }
  const PositionRange range = action.range;
  if (range.begin > range.end || range.end > seq->n_committed) {
    return Status(KVM_ERR_INVALID, "an action on [" + text(range.begin) + ", " + text(range.end) +
                                       "); the commit point is " + text(seq->n_committed));
  }
  if (range.begin % kPageTokens != 0 || range.end % kPageTokens != 0) {
    return Status(KVM_ERR_INVALID, "an action on [" + text(range.begin) + ", " + text(range.end) +
                                       "); it must be whole pages of " + text(kPageTokens));
  }
  return Status::ok();
}

Status StoreImpl::apply(Sequence* seq, const policies::Action& action) {
  KVM_TRY(check_action(seq, action));
  PageList& list = seq->layer_lists(action.layer)[action.class_index];
  const uint32_t block_begin = static_cast<uint32_t>(action.range.begin / kPageTokens);
  const uint32_t block_end = static_cast<uint32_t>(action.range.end / kPageTokens);
  switch (action.kind) {
    case policies::ActionKind::kDrop:
      n_pages_dropped_ += list.drop(block_begin, block_end, bank(seq));
      drop_from_index(seq, action);
      return Status::ok();
    case policies::ActionKind::kDemote:
      return demote(seq, action);
    case policies::ActionKind::kMove:
      return Status(KVM_ERR_UNSUPPORTED, "there is no tier but the host's to move pages to");
    case policies::ActionKind::kFold:
    case policies::ActionKind::kMerge:
    case policies::ActionKind::kKeep:
      break;
  }
  return Status(KVM_ERR_UNSUPPORTED, "action " + text(static_cast<uint64_t>(action.kind)) +
                                         " has no operator in this service");
}

template <typename T>
Result<std::shared_ptr<T>> StoreImpl::make_charged(Account* account, T&& made) {
  KVM_TRY(charge_observed(account, made.size_bytes()));
  return std::shared_ptr<T>(new T(std::move(made)), [this, account](T* gone) {
    uncharge_observed(account, gone->size_bytes());
    delete gone;
  });
}

// For changing; a new one where there is none, a copy where it is shared.
Result<Folded*> StoreImpl::own_folded(Sequence* seq, uint32_t list,
                                      const tiers::SlabClass& slab_class) {
  if (seq->folded.empty()) {
    seq->folded.resize(seq->space().n_lists);
  }
  std::shared_ptr<Folded>& ref = seq->folded[list];
  if (ref.use_count() == 1) {
    return ref.get();
  }
  Folded own;
  if (ref != nullptr) {
    own = *ref;
  } else {
    own.k.resize(slab_class.dim_k);
    own.v.resize(slab_class.dim_v);
  }
  KVM_TRY_ASSIGN(ref, make_charged(seq->account, std::move(own)));
  return ref.get();
}

Status StoreImpl::open_fold(Aging* aging, const policies::Action& action, bool* is_cut) {
  Sequence* seq = aging->seq();
  const Layer& layer = seq->space().layers[action.layer];
  const HeadClass& head_class = layer.classes[action.class_index];
  KVM_ASSERT(head_class.retention.kind == KVM_RETAIN_SINKS_RECENT_FOLD);
  Aging::Work work;
  work.action = action;
  work.list = layer.first_list + action.class_index;
  const uint64_t most = action.range.begin + Aging::kActionPages * kPageTokens;
  *is_cut = action.range.end > most;
  work.action.range.end = std::min(action.range.end, most);
  collect_between(seq, action.layer, action.class_index, action.range.begin / kPageTokens,
                  work.action.range.end / kPageTokens, &work.runs);
  KVM_TRY(own_folded(seq, work.list, head_class.slab_class).status());
  aging->add_fold(std::move(work), head_class.slab_class);
  return Status::ok();
}

void StoreImpl::close_fold(Sequence* seq, Aging::Work* work) {
  for (size_t i = 1; i < work->sums.size(); ++i) {
    add_rows(work->sums[i], &work->sums[0]);
  }
  if (!work->sums.empty()) {
    fold(work->sums[0], seq->folded[work->list].get());
  }
  drop_pages(seq, *work);
}

void StoreImpl::drop_pages(Sequence* seq, const Aging::Work& work) {
  const PositionRange range = work.action.range;
  n_pages_dropped_ +=
      seq->lists[work.list].drop(static_cast<uint32_t>(range.begin / kPageTokens),
                                 static_cast<uint32_t>(range.end / kPageTokens), bank(seq));
}

// Cuts that would need a part of what was folded are refused before; who cuts before all of it has
// nothing of it left.
void StoreImpl::cut_folded(Sequence* seq, uint64_t n_tokens) {
  for (std::shared_ptr<Folded>& ref : seq->folded) {
    if (ref != nullptr && n_tokens < ref->end) {
      ref.reset();
    }
  }
}

// Where the pages begin that a class gives up.
uint64_t first_given_up(const HeadClass& head_class) {
  return round_up(head_class.retention.n_sinks, kPageTokens);
}

// As own_folded.
Result<Kept*> StoreImpl::own_kept(Sequence* seq, uint32_t list, const HeadClass& head_class) {
  if (seq->kept.empty()) {
    seq->kept.resize(seq->space().n_lists);
  }
  std::shared_ptr<Kept>& ref = seq->kept[list];
  if (ref.use_count() != 1) {
    Kept own = ref != nullptr ? *ref
                              : Kept(head_class.slab_class, first_given_up(head_class),
                                     static_cast<uint32_t>(head_class.retention.n_heavy));
    KVM_TRY_ASSIGN(ref, make_charged(seq->account, std::move(own)));
  }
  return ref.get();
}

// The same; `begin`: of a new one.
Result<Masses*> StoreImpl::own_masses(Sequence* seq, uint32_t list, uint64_t begin) {
  if (seq->masses.empty()) {
    seq->masses.resize(seq->space().n_lists);
  }
  MassesRef& ref = seq->masses[list];
  if (ref.data.use_count() != 1 || ref.limit != UINT64_MAX) {
    const Kept* kept = seq->kept.empty() ? nullptr : seq->kept[list].get();
    Masses own;
    own.begin = begin;
    if (ref.data != nullptr) {
      own = *ref.data;
      const uint64_t n_held = ref.limit <= own.begin ? 0 : ref.limit - own.begin;
      own.recent.resize(std::min<uint64_t>(own.recent.size(), n_held));
    }
    own.kept.resize(kept == nullptr ? 0 : kept->tokens().size());
    KVM_TRY_ASSIGN(ref.data, make_charged(seq->account, std::move(own)));
    ref.limit = UINT64_MAX;
  }
  return ref.data.get();
}

void StoreImpl::add_masses(Sequence* seq, uint32_t layer, uint32_t class_index,
                           std::span<const float> sums, uint64_t position, bool is_packed) {
  const Layer& own_layer = seq->space().storage(layer);
  const HeadClass& head_class = own_layer.classes[class_index];
  const uint32_t list = own_layer.first_list + class_index;
  const Kept* kept = seq->kept.empty() ? nullptr : seq->kept[list].get();
  const uint64_t begin = kept == nullptr ? first_given_up(head_class) : kept->end();
  const Result<Masses*> owned = own_masses(seq, list, begin);
  if (!owned.is_ok()) {
    return;
  }
  Masses* masses = owned.value();
  const uint64_t end = position + sums.size();
  const uint64_t n_wanted = end > begin ? end - begin : 0;
  const uint64_t n_before = masses->recent.size();
  if (n_wanted > n_before) {
    if (!charge_observed(seq->account, (n_wanted - n_before) * sizeof(float)).is_ok()) {
      return;
    }
    masses->recent.resize(n_wanted);
  }
  add_sums(sums, position, kept, is_packed, masses);
}

Status StoreImpl::open_keep(Aging* aging, const policies::Action& action,
                            std::span<const uint64_t> positions) {
  Sequence* seq = aging->seq();
  const Layer& layer = seq->space().layers[action.layer];
  const HeadClass& head_class = layer.classes[action.class_index];
  KVM_ASSERT(head_class.retention.kind == KVM_RETAIN_HEAVY);
  Aging::Work work;
  work.action = action;
  work.list = layer.first_list + action.class_index;
  KVM_TRY_ASSIGN(Masses * masses, own_masses(seq, work.list, action.range.begin));
  const bool is_new = seq->kept.empty() || seq->kept[work.list].use_count() != 1;
  KVM_TRY_ASSIGN(Kept * kept, own_kept(seq, work.list, head_class));
  aging->add_bytes(is_new ? kept->size_bytes() : 0);
  KVM_ASSERT(kept->end() == action.range.begin && masses->begin == kept->end());
  collect_between(seq, action.layer, action.class_index, action.range.begin / kPageTokens,
                  action.range.end / kPageTokens, &work.runs);
  size_t old = 0;
  for (const uint64_t position : positions) {
    while (old < kept->tokens().size() && kept->tokens()[old].position < position) {
      ++old;
    }
    const bool is_old = old < kept->tokens().size() && kept->tokens()[old].position == position;
    const uint64_t at = position - masses->begin;
    work.kept_masses.push_back(is_old                       ? masses->kept[old]
                               : at < masses->recent.size() ? masses->recent[at]
                                                            : 0.0f);
  }
  // Room for the masses now, since nothing may fail once rows have been copied.
  const uint64_t n_before = masses->kept.size();
  if (positions.size() > n_before) {
    KVM_TRY(charge_observed(seq->account, (positions.size() - n_before) * sizeof(float)));
    masses->kept.resize(positions.size());
  }
  work.kept = kept;
  work.choice = kept->plan(positions);
  aging->add_keep(std::move(work), head_class.slab_class);
  return Status::ok();
}

void StoreImpl::close_keep(Sequence* seq, Aging::Work* work) {
  Masses* masses = seq->masses[work->list].data.get();
  const uint64_t end = work->action.range.end;
  uncharge_observed(seq->account, (masses->kept.size() - work->kept_masses.size()) * sizeof(float));
  masses->kept = std::move(work->kept_masses);
  work->kept->choose(std::move(work->choice), end);
  const uint64_t n_gone = std::min<uint64_t>(masses->recent.size(), end - masses->begin);
  masses->recent.erase(masses->recent.begin(),
                       masses->recent.begin() + static_cast<ptrdiff_t>(n_gone));
  masses->begin = end;
  uncharge_observed(seq->account, n_gone * sizeof(float));
  drop_pages(seq, *work);
}

// As cut_folded.
void StoreImpl::cut_kept(Sequence* seq, uint64_t n_tokens) {
  for (uint32_t list = 0; list < seq->masses.size(); ++list) {
    const bool is_gone =
        !seq->kept.empty() && seq->kept[list] != nullptr && n_tokens < seq->kept[list]->end();
    if (is_gone) {
      seq->kept[list].reset();
      seq->masses[list] = {};
    }
    MassesRef& ref = seq->masses[list];
    if (ref.data != nullptr && n_tokens < ref.data->begin + ref.data->recent.size()) {
      ref.limit = std::min(ref.limit, n_tokens);
    }
  }
}

Status StoreImpl::demote(Sequence* seq, const policies::Action& action) {
  PageList& list = seq->layer_lists(action.layer)[action.class_index];
  tiers::SlabClass target = seq->space().head_class(action.layer, action.class_index).slab_class;
  target.dtype_k = action.dtype_k;
  target.dtype_v = action.dtype_v;
  if (target.page_bytes() > tiers::kExtentBytes) {
    return Status(KVM_ERR_INVALID, "a page would have " + text(target.page_bytes()) +
                                       " bytes; it must fit " + text(tiers::kExtentBytes));
  }
  std::vector<PageEntry> old_pages;
  list.for_each([&](const PageEntry& entry, bool) {
    if (entry.position() >= action.range.begin && entry.end() <= action.range.end &&
        pool_.slab_class(entry.page) != target) {
      old_pages.push_back(entry);
    }
  });
  const uint64_t need = old_pages.size() * target.page_bytes();
  Account* account = seq->account;
  KVM_TRY(make_quota_room(account, need, "re-encoding, for a moment"));
  std::vector<PageRef> new_pages;
  for (size_t i = 0; i < old_pages.size(); ++i) {
    Result<PageRef> page = bank(seq).allocate(target);
    if (!page.is_ok()) {
      for (const PageRef unused : new_pages) {
        bank(seq).release(unused);
      }
      return page.status();
    }
    new_pages.push_back(page.value());
  }
  for (size_t i = 0; i < old_pages.size(); ++i) {
    copy_page_rows(pool_, old_pages[i].page, new_pages[i], old_pages[i].first, old_pages[i].count);
    list.replace(old_pages[i].block, new_pages[i], bank(seq));
  }
  return Status::ok();
}

// --- Indexes ------------------------------------------------------------------------------------

// What the index of the first n_tokens covers stays.
void StoreImpl::cut_indexes(Sequence* seq, uint64_t n_tokens) {
  for (uint32_t layer = 0; layer < seq->indexes.size(); ++layer) {
    IndexRef& ref = seq->indexes[layer];
    if (ref.data == nullptr) {
      continue;
    }
    ref.limit = std::min(ref.limit, indexable_blocks(std::min(n_tokens, length(seq, layer))));
    if (ref.data.use_count() == 1) {
      own_index(&ref, seq->space().layers[layer].indexes, index_bank(seq));
    }
  }
}

void StoreImpl::drop_from_index(Sequence* seq, const policies::Action& action) {
  if (seq->indexes.empty() || seq->indexes[action.layer].data == nullptr) {
    return;
  }
  const HeadClass& head_class = seq->space().head_class(action.layer, action.class_index);
  LayerIndex* index = own_index(&seq->indexes[action.layer],
                                seq->space().layers[action.layer].indexes, index_bank(seq));
  for (const uint16_t head : head_class.kv_heads) {
    index->drop(head, action.range.begin / kPageTokens, action.range.end / kPageTokens);
  }
}

// Memory that nothing is lost without, a bit of it: tables that are not needed any more, or else
// the index that was used longest ago.
bool StoreImpl::relieve() {
  if (yard_.unmap_some(kUnmapForRoom)) {
    return true;
  }
  Account* oldest = oldest_index(nullptr);
  return oldest != nullptr && oldest->indexes.drop_oldest();
}

// tenant == nullptr: of all.
Account* StoreImpl::oldest_index(const QuotaAccount* tenant) {
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

Status StoreImpl::make_quota_room(Account* account, uint64_t need, std::string_view what) {
  QuotaAccount* quota = account->quota;
  if (quota->room(Resource::kBytes) >= need) {
    return Status::ok();
  }
  // Nothing makes way where it would not fit without a single index either.
  const QuotaAccount* tenant = quota->tenant();
  uint64_t tenant_index_bytes = 0;
  for (const auto& [client, other] : accounts_) {
    tenant_index_bytes += other->quota->tenant() == tenant ? other->indexes.bytes : 0;
  }
  const auto could_fit = [need](const QuotaAccount& of, uint64_t index_bytes) {
    const uint64_t limit = of.limits()[Resource::kBytes];
    return need <= limit && of.used(Resource::kBytes) - index_bytes <= limit - need;
  };
  if (could_fit(*quota, account->indexes.bytes) && could_fit(*tenant, tenant_index_bytes)) {
    while (quota->own_room(Resource::kBytes) < need && account->indexes.drop_oldest()) {
    }
    while (quota->room(Resource::kBytes) < need) {
      Account* oldest = oldest_index(tenant);
      if (oldest == nullptr || !oldest->indexes.drop_oldest()) {
        break;
      }
    }
  }
  return quota->check(Resource::kBytes, need, what);
}

std::unique_ptr<IndexBuild> StoreImpl::plan_index(Sequence* seq, uint32_t layer, uint64_t n_append,
                                                  uint64_t max_cost) {
  const Space& space = seq->space();
  const uint32_t own = space.layers[layer].storage_layer;
  if (seq->indexes.empty() || space.layers[own].indexes.empty()) {
    return nullptr;
  }
  const IndexRef& ref = seq->indexes[own];
  const uint64_t present = length(seq, own);
  const uint64_t n_blocks = std::min(present / kPageTokens, indexable_blocks(present + n_append));
  if (!IndexBuild::is_needed(space, own, ref, n_blocks)) {
    return nullptr;
  }
  auto build = std::make_unique<IndexBuild>(seq, space, own, ref, n_blocks, max_cost);
  std::vector<std::vector<KvRun>> class_runs(space.layers[own].classes.size());
  for (uint32_t c = 0; c < class_runs.size(); ++c) {
    collect_between(seq, own, c, build->position_begin() / kPageTokens,
                    div_up(build->position_end(), kPageTokens), &class_runs[c]);
  }
  std::vector<SeenQueries> seen;
  for (uint32_t i = 0; i < seq->observed.size(); ++i) {
    if (space.layers[i].storage_layer == own) {
      const ObservedView view = observed(seq, i);
      seen.push_back({view.q, view.n_rows});
    }
  }
  build->start(std::move(class_runs), std::move(seen), index_bank(seq));
  return build;
}

IndexPin StoreImpl::pin_index(const Sequence* seq, uint32_t layer) {
  return seq->indexes.empty()
             ? IndexPin()
             : IndexPin(seq->indexes[seq->space().layers[layer].storage_layer].data.get());
}

void StoreImpl::open_index(IndexBuild* build) {
  Sequence* seq = build->seq();
  build->open(&seq->indexes[build->layer()], index_bank(seq));
}

void StoreImpl::close_index(IndexBuild* build) {
  Sequence* seq = build->seq();
  build->close(&seq->indexes[build->layer()], index_bank(seq));
}

void StoreImpl::collect_index(const Sequence* seq, uint32_t layer, uint32_t kv_head,
                              uint64_t length, std::vector<attention::SketchedRun>* sketches,
                              std::vector<attention::HashedRun>* hashes) const {
  const Space& space = seq->space();
  const uint32_t own = space.layers[layer].storage_layer;
  if (seq->indexes.empty() || seq->indexes[own].data == nullptr) {
    return;
  }
  const IndexRef& ref = seq->indexes[own];
  const IndexConfig config = space.index(layer, kv_head);
  const uint64_t n_blocks = indexable_blocks(length);
  collect_sketches(ref, kv_head, config, n_blocks, pool_, space.head_dim_k, sketches);
  collect_hashes(ref, kv_head, config, n_blocks, hashes);
}

// --- Memory and statistics ----------------------------------------------------------------------

bool StoreImpl::housekeep() {
  yard_.unmap_some(kUnmapHousekeeping);
  return pool_.trim(kTrimHousekeeping) || yard_.size_bytes() != 0;
}

void StoreImpl::add_stats(kvm_stats* stats) const {
  stats->n_spaces = spaces_.size();
  stats->n_sequences = sequences_.size();
  stats->n_pages = pool_.n_pages() - index_totals_.n_pages;
  stats->host_used_bytes = pool_.extent_bytes();
  stats->host_capacity_bytes = budget_.capacity_bytes();
  stats->host_peak_bytes = pool_.peak_extent_bytes();
  stats->host_page_bytes = pool_.page_bytes_in_use();
  stats->observed_bytes = observed_bytes_;
  stats->index_bytes = index_totals_.bytes();
  stats->n_index_blocks = index_totals_.n_blocks;
  stats->n_index_refused = index_totals_.n_refused;
  stats->n_index_dropped = index_totals_.n_dropped;
  stats->n_tokens_appended = n_tokens_appended_;
  stats->bytes_appended = bytes_appended_;
  stats->n_pages_dropped = n_pages_dropped_;
  stats->n_pages_copied = n_pages_copied_;
}

void StoreImpl::check_accounts() const {
  pool_.check_accounts();
  std::unordered_map<PageRef, uint32_t> page_refs;
  std::unordered_map<const Root*, uint32_t> root_refs;
  std::unordered_map<const Segment*, uint32_t> segment_refs;
  std::unordered_map<const Account*, std::unordered_map<PageRef, uint64_t>> held;
  std::unordered_map<const Observed*, const Account*> observations;
  // Of lists: (address, bytes).
  std::unordered_map<const void*, std::pair<uint64_t, const Account*>> beside;
  std::unordered_map<const LayerIndex*, const Account*> indexes;
  std::unordered_map<const Account*, uint64_t> n_sequences;
  sequences_.for_each([&](uint64_t, const Sequence& seq) {
    ++n_sequences[seq.account];
    for (const PageList& list : seq.lists) {
      if (list.root() != nullptr && ++root_refs[list.root()] == 1) {
        for (const Segment* segment : list.root()->segments) {
          KVM_ASSERT(!segment->entries.empty() && segment->entries.size() <= kSegmentEntries);
          if (++segment_refs[segment] > 1) {
            continue;
          }
          for (const PageEntry& entry : segment->entries) {
            ++page_refs[entry.page];
          }
        }
      }
      for (const PageRef page : {list.tail().page, list.pending_tail()}) {
        page_refs[page] += page != kNoPage ? 1 : 0;
      }
      for (const PageRef page : list.pending()) {
        ++page_refs[page];
      }
      uint64_t n_stored = 0;
      uint64_t position = 0;
      list.for_each([&](const PageEntry& entry, bool) {
        KVM_ASSERT(entry.count > 0 && entry.position() >= position);
        position = entry.end();
        n_stored += entry.count;
      });
      KVM_ASSERT(n_stored + list.n_dropped() == list.reserved_length());
      std::unordered_map<PageRef, uint64_t>& mine = held[seq.account];
      list.for_each(
          [&](const PageEntry& entry, bool) { mine[entry.page] = pool_.page_bytes(entry.page); });
      if (list.pending_tail() != kNoPage && list.tail().page != kNoPage) {
        mine[list.tail().page] = pool_.page_bytes(list.tail().page);
      }
    }
    for (const ObservedRef& ref : seq.observed) {
      if (ref.data != nullptr) {
        observations[ref.data.get()] = seq.account;
      }
    }
    for (const std::shared_ptr<Folded>& ref : seq.folded) {
      if (ref != nullptr) {
        beside[ref.get()] = {ref->size_bytes(), seq.account};
      }
    }
    for (const std::shared_ptr<Kept>& ref : seq.kept) {
      if (ref != nullptr) {
        beside[ref.get()] = {ref->size_bytes(), seq.account};
      }
    }
    for (const MassesRef& ref : seq.masses) {
      if (ref.data != nullptr) {
        beside[ref.data.get()] = {ref.data->size_bytes(), seq.account};
      }
    }
    for (const IndexRef& ref : seq.indexes) {
      if (ref.data != nullptr) {
        indexes[ref.data.get()] = seq.account;
      }
    }
  });
  std::unordered_map<const void*, std::pair<uint64_t, const Account*>> charged;
  std::unordered_map<PageRef, const Account*> index_pages;
  uint64_t n_index_pages = 0;
  uint64_t index_page_bytes = 0;
  for (const auto& [index, account] : indexes) {
    for (const HeadIndex& head : index->heads) {
      for (const IndexPage& page : head.pages) {
        KVM_ASSERT(page.page != kNoPage || page.blocks == 0);
        if (page.page != kNoPage) {
          const bool is_new = ++page_refs[page.page] == 1;
          const uint64_t page_bytes = pool_.page_bytes(page.page);
          held[account][page.page] = page_bytes;
          index_pages[page.page] = account;
          n_index_pages += is_new ? 1 : 0;
          index_page_bytes += is_new ? page_bytes : 0;
        }
      }
      for (const IndexFramePtr& frame : head.frames) {
        if (frame != nullptr) {
          charged[frame.get()] = {frame->memory.size_bytes(), account};
        }
      }
      for (const IndexTablesPtr& tables : head.tables) {
        charged[tables.get()] = {tables->tables.size_bytes(), account};
      }
    }
  }
  KVM_ASSERT(n_index_pages == index_totals_.n_pages);
  KVM_ASSERT(index_page_bytes == index_totals_.page_bytes);
  page_refs.erase(kNoPage);
  KVM_ASSERT(page_refs.size() == pool_.n_pages());
  for (const auto& [page, n_refs] : page_refs) {
    KVM_ASSERT(pool_.n_refs(page) == n_refs);
  }
  for (const auto& [root, n_refs] : root_refs) {
    KVM_ASSERT(root->n_refs == n_refs);
  }
  for (const auto& [segment, n_refs] : segment_refs) {
    KVM_ASSERT(segment->n_refs == n_refs);
  }
  std::unordered_map<const QuotaAccount*, uint64_t> tenant_bytes;
  std::unordered_map<const Account*, uint64_t> account_bytes;
  std::unordered_map<const Account*, uint64_t> index_bytes;
  for (const auto& [page, account] : index_pages) {
    index_bytes[account] += pool_.page_bytes(page);
  }
  uint64_t observed_bytes = 0;
  for (const auto& [account, pages] : held) {
    for (const auto& [page, page_bytes] : pages) {
      account_bytes[account] += page_bytes;
    }
  }
  for (const auto& [observation, account] : observations) {
    account_bytes[account] += observation->size_bytes();
    observed_bytes += observation->size_bytes();
  }
  for (const auto& [memory, charge] : beside) {
    account_bytes[charge.second] += charge.first;
    observed_bytes += charge.first;
  }
  for (const auto& [memory, charge] : charged) {
    account_bytes[charge.second] += charge.first;
    index_bytes[charge.second] += charge.first;
  }
  for (const auto& [client, account] : accounts_) {
    KVM_ASSERT(account->quota->used(Resource::kBytes) == account_bytes[account.get()]);
    KVM_ASSERT(account->quota->used(Resource::kSequences) == n_sequences[account.get()]);
    KVM_ASSERT(account->indexes.bytes == index_bytes[account.get()]);
    tenant_bytes[account->quota->tenant()] += account_bytes[account.get()];
  }
  for (const auto& [tenant, tenant_total] : tenant_bytes) {
    KVM_ASSERT(tenant->used(Resource::kBytes) == tenant_total);
  }
  KVM_ASSERT(observed_bytes == observed_bytes_);
  KVM_ASSERT(budget_.used_bytes() == pool_.extent_bytes() + observed_bytes_ +
                                         index_totals_.charged_bytes + yard_.size_bytes());
}

}  // namespace

Result<std::unique_ptr<Store>> Store::open(const StoreOptions& options) {
  KVM_ASSERT(options.host_capacity_bytes > 0);
  uint32_t random = 0;
  if (getrandom(&random, sizeof random, 0) != static_cast<ssize_t>(sizeof random)) {
    return Status(KVM_ERR_INTERNAL, "getrandom gives no bytes");
  }
  const uint32_t epoch_tag = random % 0xfffff + 1;
  return std::unique_ptr<Store>(std::make_unique<StoreImpl>(options, epoch_tag));
}

}  // namespace kvm::engine
