// SPDX-License-Identifier: Apache-2.0
#include "engine/store/store.h"

#include <fmt/format.h>
#include <sys/random.h>

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "base/counted.h"
#include "base/round.h"
#include "base/undo.h"
#include "engine/space/space_info.h"
#include "engine/store/id_table.h"
#include "engine/store/observations.h"
#include "engine/store/sequence.h"
#include "engine/store/store_check.h"
#include "engine/store/store_memory.h"
#include "engine/store/stored_runs.h"

namespace kvm::engine {
namespace {

// LIMIT: page references counted for one part of a list of sequences, but for its first sequence:
// the driver does nothing else meanwhile.
constexpr uint64_t kMaxListedPages = 65536;

// Freeing a sequence costs so many pages besides its own.
constexpr uint64_t kPagesPerSequence = 16;

kvm_space_info info_of(const SpaceRecord& record) {
  const Space& space = *record.space;
  kvm_space_info info = describe_space(space);
  info.space = record.id;
  info.uid = record.uid;
  info.n_sequences = record.n_sequences;
  std::copy(space.layout_digest.begin(), space.layout_digest.end(), info.layout_digest);
  std::copy(space.policy_digest.begin(), space.policy_digest.end(), info.policy_digest);
  std::copy(space.index_digest.begin(), space.index_digest.end(), info.index_digest);
  return info;
}

// Gives up the pages of a sequence that comes to nothing, or goes.
void clear_lists(StoreMemory* memory, Sequence* seq) {
  const PageBank bank = memory->bank(seq->account);
  for (PageList& list : seq->lists) {
    list.clear(bank);
  }
}

}  // namespace

std::unique_ptr<Sequence> make_seq(Account* account, SpaceRecord* record, uint32_t flags) {
  auto seq = std::make_unique<Sequence>();
  seq->account = account;
  seq->record = record;
  seq->flags = flags;
  seq->lists.resize(record->space->n_lists);
  seq->next_commits.resize(record->governed.size());
  seq->settled_ends.resize(record->space->settles ? record->space->n_lists : 0);
  seq->indexes.resize(record->space->has_indexes ? record->space->n_layers : 0);
  return seq;
}

Store::Store(const StoreOptions& options, uint32_t epoch_tag)
    : options_(options),
      memory_(options),
      spaces_("space", epoch_tag, 0),
      sequences_("sequence", epoch_tag, 1) {}

Store::~Store() {
  while (!asides_.empty()) {
    free_aside_part(asides_.back().get(), UINT64_MAX);
  }
  // What is published, and what clients have that are still there. Nothing is allocated here.
  uint64_t next = 0;
  while (sequences_.size() != 0) {
    Sequence* seq = nullptr;
    sequences_.walk_from(next, [&](uint64_t id, Sequence& at) {
      next = id;
      seq = &at;
      return false;
    });
    free_seq(seq);
  }
}

// --- Clients ------------------------------------------------------------------------------------

ClientId Store::add_client(const ClientSpec& spec) {
  Amounts limits = no_limits();
  limits[Resource::kBytes] = options_.default_quota_bytes != 0 ? options_.default_quota_bytes
                                                               : options_.host_capacity_bytes;
  if (options_.memory_quota_bytes != 0) {
    limits[Resource::kMemoryBytes] = options_.memory_quota_bytes;
  }
  limits[Resource::kSequences] = options_.max_sequences_per_client;
  return memory_.open(spec, limits)->client;
}

void Store::remove_client(ClientId client) {
  std::vector<Sequence*> owned;
  sequences_.for_each([&](uint64_t, Sequence& seq) {
    if (seq.account->client == client) {
      owned.push_back(&seq);
    }
  });
  for (Sequence* seq : owned) {
    free_seq(seq);
  }
  if (Account* account = memory_.find(client); account != nullptr) {
    memory_.leave(account);
  }
}

bool Store::free_some(ClientId client, uint64_t max_pages, std::vector<kvm_seq_id>* gone) {
  Account* account = memory_.find(client);
  if (account == nullptr) {
    return false;
  }
  uint64_t n_seen = 0;
  while (account->quota->used(Resource::kSequences) != 0) {
    Sequence* seq = nullptr;
    sequences_.walk_from(account->next_freed, [&](uint64_t id, Sequence& at) {
      seq = at.account == account ? &at : nullptr;
      account->next_freed = seq == nullptr ? id + 1 : id;
      return seq == nullptr && ++n_seen < max_pages;
    });
    if (seq == nullptr) {
      return true;
    }
    if (!give_up_some(&memory_, seq, max_pages, &n_seen)) {
      return true;
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

uint64_t Store::client_bytes(ClientId client) const {
  const Account* account = memory_.find(client);
  return account == nullptr ? 0 : account->quota->used(Resource::kBytes);
}

// --- Spaces -------------------------------------------------------------------------------------

Result<kvm_space_id> Store::register_space(const SpaceSpec& spec, uint32_t uid) {
  KVM_TRY_ASSIGN(std::shared_ptr<const Space> offered, resolve_space(spec));
  const Result<kvm_space_id> known = find_space(offered->name, uid);
  if (known.is_ok()) {
    KVM_TRY(compare_spaces(*spaces_.find(known.value()).value()->space, *offered));
    return known.value();
  }
  if (spaces_.size() >= options_.max_spaces || spaces_.full()) {
    return Status(KVM_ERR_LIMIT, fmt::format("there are {} spaces already; at most {} are allowed",
                                             spaces_.size(), options_.max_spaces));
  }
  auto record = std::make_unique<SpaceRecord>();
  SpaceRecord* added = record.get();
  added->uid = uid;
  added->governed = find_governed(*offered);
  added->space = std::move(offered);
  added->id = spaces_.insert(std::move(record));
  return added->id;
}

Result<kvm_space_id> Store::find_space(std::string_view name, uint32_t uid) const {
  kvm_space_id found = 0;
  spaces_.for_each([&](uint64_t id, const SpaceRecord& record) {
    found = record.uid == uid && record.space->name == name ? id : found;
  });
  if (found == 0) {
    return Status(KVM_ERR_NOT_FOUND, fmt::format("no space is named \"{}\"", name));
  }
  return found;
}

Result<const Space*> Store::space(kvm_space_id id) const {
  KVM_TRY_ASSIGN(const SpaceRecord* record, spaces_.find(id));
  return record->space.get();
}

Result<SpaceRecord*> Store::record_for(ClientId client, kvm_space_id id) {
  KVM_TRY_ASSIGN(SpaceRecord * record, spaces_.find(id));
  if (record->uid != kEverybody && record->uid != memory_.quotas().uid(client)) {
    return Status(KVM_ERR_PERMISSION,
                  fmt::format("space {:#x} is one of user {}", id, record->uid));
  }
  return record;
}

Result<const Space*> Store::space_for(ClientId client, kvm_space_id id) {
  KVM_TRY_ASSIGN(const SpaceRecord* record, record_for(client, id));
  return record->space.get();
}

Result<std::shared_ptr<const Space>> Store::shared_space_for(ClientId client, kvm_space_id id) {
  KVM_TRY_ASSIGN(const SpaceRecord* record, record_for(client, id));
  return record->space;
}

Result<kvm_space_info> Store::space_info(kvm_space_id id) const {
  KVM_TRY_ASSIGN(const SpaceRecord* record, spaces_.find(id));
  return info_of(*record);
}

std::vector<kvm_space_info> Store::list_spaces() const {
  std::vector<kvm_space_info> infos;
  spaces_.for_each([&](uint64_t, const SpaceRecord& record) { infos.push_back(info_of(record)); });
  return infos;
}

Status Store::drop_space(kvm_space_id id) {
  KVM_TRY_ASSIGN(const SpaceRecord* record, spaces_.find(id));
  if (record->n_sequences > 0) {
    return Status(KVM_ERR_BUSY, fmt::format("space \"{}\" has {}", record->space->name,
                                            counted(record->n_sequences, "sequence")));
  }
  spaces_.erase(id);
  return Status::ok();
}

// --- Sequences ----------------------------------------------------------------------------------

Result<Sequence*> Store::find_seq(ClientId client, kvm_seq_id id, Access access) {
  KVM_TRY_ASSIGN(Sequence * seq, sequences_.find(id));
  if (seq->account->client == client) {
    return seq;
  }
  const Account* account = memory_.find(client);
  const bool is_users = seq->account->is_library && account != nullptr &&
                        account->quota->tenant() == seq->account->quota->tenant();
  if (!is_users) {
    return Status(KVM_ERR_PERMISSION, fmt::format("sequence {:#x} belongs to another client", id));
  }
  if (access == Access::kChange) {
    return Status(
        KVM_ERR_PERMISSION,
        fmt::format("sequence {:#x} is published, and stays as it is: fork it, or take it", id));
  }
  return seq;
}

Account* Store::account_for(const Sequence* seq, ClientId client) const {
  if (client == 0) {
    return seq->account;
  }
  Account* account = memory_.find(client);
  KVM_ASSERT(account != nullptr);
  return account;
}

Status Store::check_limits(Account* account, std::string_view what) const {
  KVM_TRY(account->quota->check(Resource::kSequences, 1, what));
  if (sequences_.full()) {
    return Status(KVM_ERR_LIMIT, fmt::format("the service has {} sequences and can name no more",
                                             sequences_.size()));
  }
  return Status::ok();
}

kvm_seq_id Store::add_seq(std::unique_ptr<Sequence>&& seq) {
  Sequence* added = seq.get();
  added->id = sequences_.insert(std::move(seq));
  added->account->quota->charge(Resource::kSequences, 1);
  ++added->record->n_sequences;
  return added->id;
}

Result<kvm_seq_id> Store::create_seq(ClientId client, kvm_space_id space, uint32_t flags,
                                     uint64_t n_expected) {
  Account* account = memory_.find(client);
  KVM_ASSERT(account != nullptr);
  KVM_TRY_ASSIGN(SpaceRecord * record, record_for(client, space));
  if ((flags & ~kSeqFlags) != 0) {
    return Status(KVM_ERR_INVALID,
                  fmt::format("flags is {}; only KVM_SEQ_MANUAL_COMMIT (1) is defined", flags));
  }
  KVM_TRY(check_limits(account, "a new sequence"));
  std::unique_ptr<Sequence> seq = make_seq(account, record, flags);
  Undo clearing([&] { clear_lists(&memory_, seq.get()); });
  const uint64_t n_of_list =
      std::min(n_expected, kMaxExpectedOfLists / std::max<size_t>(1, seq->lists.size()));
  for (PageList& list : seq->lists) {
    list.expect(n_of_list);
  }
  const kvm_seq_id id = add_seq(std::move(seq));
  clearing.dismiss();
  return id;
}

Status Store::check_fork(const Sequence* parent, uint64_t n_tokens, ClientId client) const {
  const uint64_t longest = longest_layer(parent);
  if (n_tokens != KVM_POSITION_END && n_tokens > longest) {
    return Status(KVM_ERR_INVALID, fmt::format("n_tokens is {}; the longest layer has {}", n_tokens,
                                               counted(longest, "token")));
  }
  KVM_TRY(check_cut(parent, n_tokens));
  return check_limits(account_for(parent, client), "a fork");
}

Result<kvm_seq_id> Store::fork_seq(Sequence* parent, uint64_t n_tokens, ClientId client) {
  KVM_TRY(check_fork(parent, n_tokens, client));
  Account* account = account_for(parent, client);
  std::unique_ptr<Sequence> child = make_seq(account, parent->record, parent->flags);
  Undo clearing([&] { clear_lists(&memory_, child.get()); });
  const PageBank bank = memory_.bank(account);
  for (size_t i = 0; i < parent->lists.size(); ++i) {
    const PageList& list = parent->lists[i];
    child->lists[i].share(list, std::min(n_tokens, list.length()), bank);
  }
  child->n_committed = std::min(parent->n_committed, n_tokens);
  child->settled_ends = parent->settled_ends;
  cut_settled(child.get(), n_tokens);
  child->observed = parent->observed;
  for (ObservedRef& ref : child->observed) {
    ref.limit = std::min(ref.limit, n_tokens);
  }
  child->mean_entries = parent->mean_entries;
  cut_mean_entries(child.get(), n_tokens);
  child->kept = parent->kept;
  child->masses = parent->masses;
  cut_kept_tokens(child.get(), n_tokens);
  child->prompt_end = parent->prompt_end;
  child->budgets = parent->budgets;
  cut_prompt(child.get(), n_tokens);
  prepare_index_fork(&memory_, parent, n_tokens);
  child->indexes = parent->indexes;
  cut_indexes(child.get(), n_tokens);
  const kvm_seq_id id = add_seq(std::move(child));
  clearing.dismiss();
  return id;
}

Status Store::truncate_seq(Sequence* seq, uint64_t n_tokens) {
  return truncate_part(seq, n_tokens, UINT64_MAX).status();
}

Result<bool> Store::truncate_part(Sequence* seq, uint64_t n_tokens, uint64_t max_pages) {
  if (n_tokens >= longest_layer(seq)) {
    return true;  // observed queries may lie further on, and stay
  }
  KVM_TRY(check_cut(seq, n_tokens));
  const PageBank bank = memory_.bank(seq->account);
  for (PageList& list : seq->lists) {
    list.prepare_truncate(std::min(n_tokens, list.length()), bank);
  }
  // What goes with its tokens goes first, so that at any time what is left fits together.
  if (n_tokens < seq->n_committed) {
    seq->n_committed = n_tokens;
    std::fill(seq->next_commits.begin(), seq->next_commits.end(), 0);
  }
  cut_settled(seq, n_tokens);
  cut_observed(&memory_, seq, n_tokens);
  cut_mean_entries(seq, n_tokens);
  cut_kept_tokens(seq, n_tokens);
  cut_indexes(seq, n_tokens);
  uint64_t n_given = 0;
  for (PageList& list : seq->lists) {
    if (n_given >= max_pages) {
      break;
    }
    n_given += list.shorten(n_tokens, max_pages - n_given, bank);
  }
  const bool is_last = n_given < max_pages;
  if (is_last) {
    for (PageList& list : seq->lists) {
      list.truncate(std::min(n_tokens, list.length()), bank);
    }
    cut_prompt(seq, n_tokens);
  }
  memory_.trim_after_free();
  return is_last;
}

Result<bool> Store::drop_part(Sequence* seq, uint64_t begin, uint64_t end, uint64_t max_pages) {
  if (end == KVM_POSITION_END) {
    end = seq->n_committed;
  }
  if (begin > end || end > seq->n_committed) {
    return Status(KVM_ERR_INVALID,
                  fmt::format("[{}, {}) are to be dropped; what is final ends at {}", begin, end,
                              seq->n_committed));
  }
  // Of a list such blocks are looked at together. Those that went before take no time.
  constexpr uint64_t kStepBlocks = 4096;
  const Space& space = seq->space();
  const PageBank bank = memory_.bank(seq->account);
  const uint64_t block_begin = div_up(begin, kPageTokens);
  uint64_t n_pages = 0;
  const auto drop_until_full = [&] {
    for (const Layer& own : space.layers) {
      for (uint32_t i = 0; own.kind == KVM_LAYER_OWN && i < own.classes.size(); ++i) {
        if (own.classes[i].retention.kind != KVM_RETAIN_FULL) {
          continue;
        }
        PageList& list = seq->lists[own.first_list + i];
        const uint64_t block_end = std::min(end, list.length()) / kPageTokens;
        for (uint64_t at = block_begin; at < block_end; at += kStepBlocks) {
          const uint64_t step_end = std::min(at + kStepBlocks, block_end);
          n_pages += list.drop(static_cast<uint32_t>(at), static_cast<uint32_t>(step_end), bank);
          if (n_pages >= max_pages) {
            return false;
          }
        }
      }
    }
    return true;
  };
  const bool is_done = drop_until_full();
  memory_.counts().n_pages_dropped += n_pages;
  memory_.trim_after_free();
  return is_done;
}

Status Store::commit_seq(Sequence* seq, uint64_t n_tokens) {
  if (n_tokens == KVM_POSITION_END) {
    n_tokens = shortest_layer(seq);
  }
  const uint64_t longest = longest_layer(seq);
  if (n_tokens > longest) {
    return Status(KVM_ERR_INVALID, fmt::format("n_tokens is {}; the longest layer has {}", n_tokens,
                                               counted(longest, "token")));
  }
  advance_commit(seq, n_tokens);
  return Status::ok();
}

void Store::free_seq(Sequence* seq) {
  remove_seq(seq);
  memory_.trim_after_free();
}

bool Store::free_part(Sequence* seq, uint64_t max_pages) {
  uint64_t n_given = 0;
  const bool is_empty = give_up_some(&memory_, seq, max_pages, &n_given);
  if (is_empty) {
    remove_seq(seq);
  }
  memory_.trim_after_free();
  return is_empty;
}

void Store::clear_seq(Sequence* seq) {
  clear_lists(&memory_, seq);
  seq->observed.clear();
  seq->mean_entries.clear();
  seq->kept.clear();
  seq->masses.clear();
  seq->indexes.clear();
}

void Store::remove_seq(Sequence* seq) {
  end_giving(seq);
  clear_seq(seq);
  seq->account->quota->give_back(Resource::kSequences, 1);
  --seq->record->n_sequences;
  sequences_.erase(seq->id);
}

uint64_t Store::reserved_length(const Sequence* seq, uint32_t layer) const {
  const std::span<const PageList> lists = seq->stored_lists(layer);
  return lists.empty() ? 0 : lists[0].reserved_length();
}

uint64_t Store::estimate_away_bytes(const Sequence* seq, uint64_t n_tokens) const {
  // LIMIT: some 0.1 ms.
  constexpr uint64_t kMaxLooked = 4096;
  const tiers::PageTable& pages = memory_.pages();
  if (pages.n_pages_away() == 0) {
    return 0;
  }
  const uint64_t n_blocks = div_up(std::min(n_tokens, longest_layer(seq)), kPageTokens);
  const uint64_t stride = std::max<uint64_t>(div_up(n_blocks * seq->lists.size(), kMaxLooked), 1);
  uint64_t size_bytes = 0;
  for (size_t i = 0; i < seq->lists.size(); ++i) {
    for (uint64_t block = i % stride; block < n_blocks; block += stride) {
      seq->lists[i].for_each_between(block, block + 1, [&](const PageEntry& entry) {
        size_bytes += pages.is_in_memory(entry.page) ? 0 : pages.page_bytes(entry.page);
      });
    }
  }
  return size_bytes * stride;
}

kvm_seq_info Store::seq_info(const Sequence* seq) const {
  const tiers::PageTable& pages = memory_.pages();
  kvm_seq_info info{};
  info.struct_size = sizeof info;
  info.flags = seq->flags | (seq->account->is_library ? uint32_t{KVM_SEQ_PUBLISHED} : 0u);
  info.seq = seq->id;
  info.space = seq->record->id;
  info.client_id = seq->account->client;
  info.n_tokens_min = shortest_layer(seq);
  info.n_committed = seq->n_committed;
  info.n_tokens_max = longest_layer(seq);
  const auto is_paid = [seq](const auto& charged) {
    return charged != nullptr && StoreMemory::payer(charged) == seq->account;
  };
  for (uint32_t i = 0; i < seq->lists.size(); ++i) {
    const PageList& list = seq->lists[i];
    info.n_entries_dropped += list.n_dropped();
    const codecs::PairSide side = seq->space().list_side(i);
    list.for_each([&](const PageEntry& entry, bool shared) {
      // A page of a pair is in two lists: it counts in the deeper layer's.
      const bool is_pair = pages.slab_class(entry.page).k().is_pair();
      if (is_pair && side == codecs::PairSide::kShallow) {
        return;
      }
      const uint32_t n_own = is_pair ? 2 : 1;
      const uint64_t page_bytes = pages.page_bytes(entry.page);
      ++info.n_pages;
      info.bytes += page_bytes;
      info.bytes_paid += pages.payer(entry.page) == seq->account->payer ? page_bytes : 0;
      info.bytes_away += pages.is_in_memory(entry.page) ? 0 : page_bytes;
      info.bytes_shared += shared || pages.n_refs(entry.page) > n_own ? page_bytes : 0;
    });
  }
  for (const ObservedRef& ref : seq->observed) {
    info.bytes_observed += ref.data != nullptr ? ref.data->size_bytes() : 0;
  }
  for (const std::shared_ptr<MeanEntry>& mean : seq->mean_entries) {
    const uint64_t mean_bytes = mean != nullptr ? mean->size_bytes() : 0;
    info.bytes += mean_bytes;
    info.bytes_paid += is_paid(mean) ? mean_bytes : 0;
    info.bytes_shared += mean.use_count() > 1 ? mean_bytes : 0;
  }
  for (const std::shared_ptr<KeptTokens>& kept : seq->kept) {
    const uint64_t kept_bytes = kept != nullptr ? kept->size_bytes() : 0;
    info.bytes += kept_bytes;
    info.bytes_paid += is_paid(kept) ? kept_bytes : 0;
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
    info.bytes_index += ref.data != nullptr ? ref.data->size_bytes() : 0;
  }
  return info;
}

SeqPage Store::list_seqs(ClientId client, kvm_space_id space, bool all_clients, kvm_seq_id begin,
                         size_t n_max) const {
  SeqPage page;
  const Account* account = memory_.find(client);
  const QuotaAccount* tenant = account == nullptr ? nullptr : account->quota->tenant();
  uint64_t n_visited = 0;
  sequences_.walk_from(begin, [&](uint64_t, const Sequence& seq) {
    const bool is_seen = all_clients || seq.account->client == client ||
                         (seq.account->is_library && seq.account->quota->tenant() == tenant);
    if (!is_seen || (space != 0 && seq.record->id != space)) {
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

void Store::add_stats(kvm_stats* stats) const {
  stats->n_spaces = spaces_.size();
  stats->n_sequences = sequences_.size();
  memory_.add_stats(stats);
}

Result<std::unique_ptr<Store>> Store::open(const StoreOptions& options) {
  KVM_ASSERT(options.host_capacity_bytes > 0);
  uint32_t random = 0;
  if (getrandom(&random, sizeof random, 0) != static_cast<ssize_t>(sizeof random)) {
    return Status(KVM_ERR_INTERNAL, "getrandom gives no bytes");
  }
  const uint32_t epoch_tag = random % 0xfffff + 1;
  return std::unique_ptr<Store>(new Store(options, epoch_tag));
}

}  // namespace kvm::engine
