// SPDX-License-Identifier: Apache-2.0
#include "engine/run/prefixes.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/assert.h"
#include "base/limits.h"
#include "base/undo.h"

namespace kvm::engine {
namespace {

// LIMIT: hashes that a user's prefixes have together, for each page that may be found: what
// prefixes share is listed once, but each knows all of its own.
constexpr uint64_t kHashesPerPage = 16;
// An expired prefix that is still there is taken again after so long.
constexpr uint64_t kRetryNs = 1'000'000'000;
// Renewed ones that are looked at, at a time.
constexpr uint32_t kMaxRenewed = 64;
// So many prefixes that share a page take as long to go through as a page to forget.
constexpr uint64_t kIdsPerPage = 16;

bool keeps_by_queries(const Space& space) {
  for (uint32_t i = 0; i < space.n_layers; ++i) {
    if (space.layers[i].kind != KVM_LAYER_OWN) {
      continue;
    }
    for (const HeadClass& head_class : space.layers[i].classes) {
      if (head_class.retention.kind == KVM_RETAIN_HEAVY) {
        return true;
      }
    }
  }
  return false;
}

}  // namespace

Status Prefixes::check(const Sequence& seq, uint32_t uid, std::span<const kvm_prefix_hash> hashes) {
  KVM_ASSERT(!hashes.empty() && hashes.size() <= kMaxPrefixPages);
  const Space& space = store_->seq_space(&seq);
  const uint64_t n_tokens = hashes.size() * kPageTokens;
  for (uint32_t i = 0; i < space.n_layers; ++i) {
    if (space.layers[i].kind == KVM_LAYER_OWN && store_->length(&seq, i) < n_tokens) {
      return Status(KVM_ERR_INVALID,
                    fmt::format("{} hashes stand for {} tokens, and layer {} of the sequence has "
                                "{}",
                                hashes.size(), n_tokens, i, store_->length(&seq, i)));
    }
  }
  if (keeps_by_queries(space)) {
    return Status::fixed(KVM_ERR_UNSUPPORTED,
                         "the space has heads with KVM_RETAIN_HEAVY, which keep tokens by what "
                         "queries asked: equal tokens do not mean equal contents");
  }
  if (has(seq.id)) {
    return Status::fixed(KVM_ERR_EXISTS, "the sequence is a prefix already");
  }
  KVM_TRY_ASSIGN(const User* who, user(uid));
  const auto last = who->pages.find(hashes.back());
  const bool is_there = last != who->pages.end() && !last->second.forkable.empty();
  if (is_there || who->coming.contains(hashes.back())) {
    return Status(KVM_ERR_EXISTS,
                  fmt::format("a prefix of these {} tokens is there: fork it", n_tokens));
  }
  // Those that are there come first.
  const auto first_new =
      std::partition_point(hashes.begin(), hashes.end(),
                           [&](const kvm_prefix_hash& hash) { return who->pages.contains(hash); });
  const auto n_new = static_cast<uint64_t>(hashes.end() - first_new);
  if (who->n_hashes + hashes.size() > kHashesPerPage * n_pages_) {
    return Status(KVM_ERR_LIMIT,
                  fmt::format("prefixes of a user have {} hashes together at most; those of this "
                              "one have {}: free some",
                              kHashesPerPage * n_pages_, who->n_hashes));
  }
  if (who->pages.size() + who->n_coming + n_new > n_pages_) {
    return Status(
        KVM_ERR_LIMIT,
        fmt::format("prefixes of a user have {} pages at most; those of this one have {}, "
                    "and this prefix adds {}: free some",
                    n_pages_, who->pages.size() + who->n_coming, n_new));
  }
  return Status::ok();
}

void Prefixes::begin(kvm_seq_id seq, uint32_t uid, std::vector<kvm_prefix_hash>&& hashes,
                     uint64_t keep_ns) {
  User* const user = users_.at(uid).get();  // check() has made it
  const auto [it, is_new] = prefixes_.try_emplace(seq);
  KVM_ASSERT(is_new);
  Undo erasing([this, it = it] { prefixes_.erase(it); });
  const auto [last, is_last_new] = user->coming.insert(hashes.back());
  KVM_ASSERT(is_last_new);
  Undo forgetting([user, last = last] { user->coming.erase(last); });
  Prefix& prefix = it->second;
  prefix.used_ns = clock_->now_ns();
  if (keep_ns != 0) {
    prefix.due_ns = add_saturating(prefix.used_ns, keep_ns);
    due_.emplace(prefix.due_ns, seq);
  }
  forgetting.dismiss();
  erasing.dismiss();
  prefix.user = user;
  prefix.hashes = std::move(hashes);
  prefix.last = prefix.hashes.back();
  prefix.keep_ns = keep_ns;
  user->n_coming += prefix.hashes.size();
  user->n_hashes += prefix.hashes.size();
}

PrefixImage Prefixes::image(const Sequence& seq) const {
  const Prefix& prefix = prefixes_.at(seq.id);
  PrefixImage image{.hashes = prefix.hashes, .keep_ns = prefix.keep_ns};
  for (kvm_prefix_hash& hash : image.hashes) {
    hash = hash_in_space(hash, seq.record->id);  // which undoes itself
  }
  return image;
}

bool Prefixes::list_part(const Sequence& seq, uint64_t max_pages) {
  Prefix& prefix = prefixes_.at(seq.id);
  User* const user = prefix.user;
  const auto cut = [&] {
    user->n_coming -= prefix.coming_pages();
    user->n_hashes -= prefix.coming_pages();
    prefix.hashes.resize(prefix.n_listed);
  };
  for (uint64_t i = 0; i < max_pages && prefix.n_listed < prefix.hashes.size(); ++i) {
    // Hashes need not be those of a chain, by which check() has counted.
    if (user->pages.size() >= n_pages_ && !user->pages.contains(prefix.hashes[prefix.n_listed])) {
      cut();
      break;
    }
    try {
      list_page(seq, &prefix);
      --user->n_coming;
    } catch (const std::bad_alloc&) {
      cut();
      break;
    }
  }
  if (prefix.n_listed != prefix.hashes.size()) {
    return false;
  }
  prefix.user->coming.erase(prefix.last);
  ++stats_.n_published;
  return true;
}

void Prefixes::list_page(const Sequence& seq, Prefix* prefix) {
  const kvm_prefix_hash& hash = prefix->hashes[prefix->n_listed];
  const auto n_pages = static_cast<uint32_t>(prefix->n_listed + 1);
  User* const user = prefix->user;
  const auto [it, is_new] = user->pages.try_emplace(hash);
  Page& page = it->second;
  Undo erasing([user, it = it, is_new = is_new] {
    if (is_new) {
      user->pages.erase(it);
    }
  });
  // Hashes are a client's: those of two places of a prompt need not differ.
  const bool fits = is_new || page.n_pages == n_pages;
  if (fits && Store::check_cut(&seq, uint64_t{n_pages} * kPageTokens).is_ok()) {
    page.forkable.push_back(seq.id);
  }
  erasing.dismiss();
  if (is_new) {
    page.n_pages = n_pages;
  }
  ++page.n_prefixes;
  ++prefix->n_listed;
  write(user, hash, &page);
}

void Prefixes::write(User* user, const kvm_prefix_hash& hash, Page* page) {
  page->is_in_table = user->table->put(
      hash, {.seq = page->forkable.empty() ? 0 : page->forkable.front(), .n_pages = page->n_pages});
}

uint64_t Prefixes::forget_page(kvm_seq_id seq, Prefix* prefix) {
  const kvm_prefix_hash hash = prefix->hashes[--prefix->n_listed];
  const auto it = prefix->user->pages.find(hash);
  KVM_ASSERT(it != prefix->user->pages.end());
  Page& page = it->second;
  const uint64_t n_ids = page.forkable.size();
  std::erase(page.forkable, seq);
  prefix->hashes.pop_back();
  --prefix->user->n_hashes;
  if (--page.n_prefixes == 0) {
    if (page.is_in_table) {
      prefix->user->table->remove(hash);
    }
    prefix->user->pages.erase(it);
  } else {
    write(prefix->user, hash, &page);
  }
  return n_ids;
}

bool Prefixes::forget_part(kvm_seq_id seq, uint64_t max_pages) {
  const auto found = prefixes_.find(seq);
  if (found == prefixes_.end()) {
    return true;
  }
  Prefix& prefix = found->second;
  // What is yet to be listed will not be.
  User* const user = prefix.user;
  user->n_coming -= prefix.coming_pages();
  user->n_hashes -= prefix.coming_pages();
  prefix.hashes.resize(prefix.n_listed);
  for (uint64_t n_done = 0; n_done < max_pages && prefix.n_listed != 0;) {
    n_done += 1 + forget_page(seq, &prefix) / kIdsPerPage;
  }
  if (prefix.n_listed != 0) {
    return false;
  }
  due_.erase({prefix.due_ns, seq});
  prefix.user->coming.erase(prefix.last);
  prefixes_.erase(found);
  return true;
}

void Prefixes::note_fork(kvm_seq_id seq) {
  const auto found = prefixes_.find(seq);
  if (found != prefixes_.end()) {
    found->second.used_ns = clock_->now_ns();
    found->second.is_expired = false;
    ++stats_.n_forked;
  }
}

kvm_seq_id Prefixes::take_expired() {
  const uint64_t now = due_.empty() ? 0 : clock_->now_ns();
  for (uint32_t i = 0; i < kMaxRenewed && !due_.empty() && due_.begin()->first <= now; ++i) {
    auto node = due_.extract(due_.begin());
    const kvm_seq_id seq = node.value().second;
    Prefix& prefix = prefixes_.at(seq);
    const uint64_t end_ns = add_saturating(prefix.used_ns, prefix.keep_ns);
    prefix.is_expired = end_ns <= now;
    prefix.due_ns = prefix.is_expired ? add_saturating(now, kRetryNs) : end_ns;
    node.value().first = prefix.due_ns;
    due_.insert(std::move(node));
    if (prefix.is_expired) {
      return seq;
    }
  }
  return 0;
}

bool Prefixes::is_expired(kvm_seq_id seq) const {
  const auto found = prefixes_.find(seq);
  return found != prefixes_.end() && found->second.is_expired;
}

uint64_t Prefixes::patience_ns() const {
  return clock_->patience_ns(due_.empty() ? UINT64_MAX : due_.begin()->first);
}

Result<Prefixes::User*> Prefixes::user(uint32_t uid) {
  if (const auto found = users_.find(uid); found != users_.end()) {
    return found->second.get();
  }
  users_.reserve(users_.size() + 1);
  auto made = std::make_unique<User>();
  KVM_TRY_ASSIGN(made->memory, memory_(uid, prefix_table_bytes(n_pages_)));
  made->table.emplace(made->memory);
  made->pages.reserve(n_pages_);
  User* const user = made.get();
  users_.emplace(uid, std::move(made));
  return user;
}

Result<std::span<const std::byte>> Prefixes::table(uint32_t uid) {
  KVM_TRY_ASSIGN(const User* found, user(uid));
  return std::span<const std::byte>(found->memory);
}

PrefixStats Prefixes::stats() const {
  PrefixStats stats = stats_;
  stats.n_prefixes = prefixes_.size();
  for (const auto& [uid, user] : users_) {
    stats.n_pages += user->pages.size();
    stats.n_pages_hidden += user->pages.size() - user->table->n_used();
    stats.table_bytes += user->memory.size();
  }
  return stats;
}

void Prefixes::check_accounts() const {
  std::unordered_map<const User*, std::unordered_map<kvm_prefix_hash, uint32_t, Hasher, Equal>>
      counted;
  for (const auto& [seq, prefix] : prefixes_) {
    for (size_t i = 0; i < prefix.n_listed; ++i) {
      ++counted[prefix.user][prefix.hashes[i]];
    }
    KVM_ASSERT(prefix.keep_ns == 0 || due_.contains({prefix.due_ns, seq}));
  }
  for (const auto& [uid, user] : users_) {
    const auto reader = PrefixTableReader::over(user->memory);
    KVM_ASSERT(reader.has_value());
    KVM_ASSERT(counted[user.get()].size() == user->pages.size());
    uint64_t n_coming = 0;
    uint64_t n_hashes = 0;
    for (const auto& [seq, prefix] : prefixes_) {
      n_coming += prefix.user == user.get() ? prefix.coming_pages() : 0;
      n_hashes += prefix.user == user.get() ? prefix.hashes.size() : 0;
    }
    KVM_ASSERT(n_coming == user->n_coming && n_hashes == user->n_hashes);
    uint64_t n_in_table = 0;
    for (const auto& [hash, page] : user->pages) {
      KVM_ASSERT(counted[user.get()][hash] == page.n_prefixes);
      const auto found = reader->look_up(hash);
      KVM_ASSERT(found.has_value() == page.is_in_table);
      n_in_table += found.has_value() ? 1 : 0;
      if (found.has_value()) {
        KVM_ASSERT(found->n_pages == page.n_pages);
        KVM_ASSERT(found->seq == (page.forkable.empty() ? 0 : page.forkable.front()));
      }
      for (const kvm_seq_id seq : page.forkable) {
        KVM_ASSERT(prefixes_.contains(seq));
      }
    }
    KVM_ASSERT(n_in_table == user->table->n_used());
  }
}

}  // namespace kvm::engine
