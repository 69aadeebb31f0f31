// SPDX-License-Identifier: Apache-2.0
#include "engine/run/kept_prefixes.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <new>
#include <string_view>

#include "base/assert.h"
#include "base/splitmix.h"
#include "engine/run/snapshot_label.h"

namespace kvm::engine {
namespace {

// Snapshots asked for at a time.
constexpr size_t kListed = 256;
// LIMIT: of a step, some 0.1 ms each.
constexpr uint64_t kStepPages = 256;     // listed
constexpr uint32_t kStepExpired = 1024;  // removed

// DISK: equal prefixes of one space of a user have one name, whichever service saved them.
std::string snapshot_name(const kvm_prefix_hash& last, std::string_view space) {
  uint64_t of_space = space.size();
  for (const char c : space) {
    of_space = splitmix64(of_space + static_cast<uint8_t>(c));
  }
  return fmt::format("{}{:02x}{:016x}", kPrefixSnapshots, fmt::join(last.bytes, ""), of_space);
}

}  // namespace

KeptPrefixes::KeptPrefixes(Store* store, Snapshots* snapshots, Prefixes* prefixes,
                           const Clock* clock, SavePrefixes which)
    : store_(store), snapshots_(snapshots), prefixes_(prefixes), clock_(clock), which_(which) {
  const uint64_t now = clock_->now_ns();
  for (SnapshotName after;;) {
    std::vector<SnapshotInfo> infos = snapshots_->list(kEverybody, after, kListed);
    if (infos.empty()) {
      break;
    }
    after = infos.back().name;
    for (SnapshotInfo& info : infos) {
      if (!info.name.name.starts_with(kPrefixSnapshots)) {
        continue;
      }
      if (info.is_lost || info.space_name.empty()) {
        ++stats_.n_failed_loads;
        remove(std::move(info.name));
        continue;
      }
      const uint64_t keep_ns = uint64_t{info.keep_s} * 1'000'000'000u;
      const SpaceName space(info.name.uid, info.space_name);
      waiting_[space].push_back(
          {.name = std::move(info.name),
           .n_tokens = info.n_tokens,
           .keep_ns = keep_ns,
           .due_ns = keep_ns == 0 ? UINT64_MAX : add_saturating(now, keep_ns)});
      ++n_waiting_;
    }
  }
  // One that is part of a longer one is refused behind it.
  for (auto& [space, all] : waiting_) {
    std::sort(all.begin(), all.end(),
              [](const Waiting& a, const Waiting& b) { return a.n_tokens > b.n_tokens; });
  }
  find_due();
}

// --- What happens -------------------------------------------------------------------------------

void KeptPrefixes::note_listed(kvm_seq_id seq) {
  if (which_ == SavePrefixes::kAll) {
    save(seq);
  }
}

void KeptPrefixes::note_fork(kvm_seq_id seq) {
  if (which_ == SavePrefixes::kUsed && prefixes_->has(seq)) {
    save(seq);
  }
}

void KeptPrefixes::save(kvm_seq_id seq) {
  const Result<Sequence*> found = store_->find_any_seq(seq);
  const bool stays = found.is_ok() && found.value()->space().has_pairs;  // Snapshots saves none
  if (stays || kept_.contains(seq)) {
    return;
  }
  try {
    to_save_.push_back(seq);
    kept_.try_emplace(seq);
  } catch (const std::bad_alloc&) {
    ++stats_.n_failed_saves;
  }
}

void KeptPrefixes::note_freed(kvm_seq_id seq) {
  if (const auto found = kept_.find(seq); found != kept_.end()) {
    if (found->second.is_saved) {
      remove(std::move(found->second.name));
    }
    kept_.erase(found);
  } else if (seq == listing_ && seq != 0) {
    remove(std::move(loading_->from.name));
    loading_.reset();
    listing_ = 0;
  }
}

void KeptPrefixes::note_space(uint32_t uid, const std::string& name, kvm_space_id space) {
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    const bool is_same = it->first.second == name && (uid == kEverybody || it->first.first == uid);
    if (!is_same) {
      ++it;
      continue;
    }
    try {
      claims_.push_back({space, it->first, {}});
    } catch (const std::bad_alloc&) {
      break;  // the rest waits for the next time
    }
    claims_.back().all = std::move(it->second);
    it = waiting_.erase(it);
  }
  find_due();
}

void KeptPrefixes::remove(SnapshotName&& name) {
  try {
    to_remove_.push_back(std::move(name));
  } catch (const std::bad_alloc&) {
    // It is loaded by the next service, and goes when nobody asks for it there.
  }
}

// --- Steps --------------------------------------------------------------------------------------

bool KeptPrefixes::is_ready() const {
  return listing_ != 0 || (!is_removing_ && !to_remove_.empty()) ||
         (!loading_ && !claims_.empty()) ||
         (!saving_ && !is_removing_ && to_remove_.empty() && !to_save_.empty()) ||
         (due_ns_ != UINT64_MAX && clock_->now_ns() >= due_ns_);
}

uint64_t KeptPrefixes::patience_ns() const { return clock_->patience_ns(due_ns_); }

bool KeptPrefixes::go_on() {
  if (due_ns_ != UINT64_MAX && clock_->now_ns() >= due_ns_) {
    expire();
    return true;
  }
  return list_more() || begin_removal() || begin_load() || begin_save();
}

// A name may be saved under again right after its prefix is gone: what goes goes first.
bool KeptPrefixes::begin_removal() {
  if (is_removing_ || to_remove_.empty()) {
    return false;
  }
  SnapshotName name = std::move(to_remove_.front());
  to_remove_.pop_front();
  Snapshots::Errand errand;
  errand.what.verb = SnapshotVerb::kRemove;
  errand.what.name = std::move(name.name);
  errand.uid = name.uid;
  try {
    is_removing_ = snapshots_->begin(std::move(errand), nullptr).is_ok();
  } catch (const std::bad_alloc&) {
    // As remove().
  }
  return true;
}

bool KeptPrefixes::begin_save() {
  if (saving_ || is_removing_ || !to_remove_.empty() || to_save_.empty()) {
    return false;
  }
  const kvm_seq_id id = to_save_.front();
  to_save_.pop_front();
  const auto kept = kept_.find(id);
  const Result<Sequence*> found = store_->find_any_seq(id);
  if (kept == kept_.end() || !found.is_ok() || !prefixes_->has(id)) {
    return true;  // it is gone, or going
  }
  const Sequence& seq = *found.value();
  try {
    Snapshots::Errand errand;
    errand.uid = store_->quotas().uid(seq.account->client);
    errand.prefix = prefixes_->image(seq);
    errand.what.verb = SnapshotVerb::kSave;
    errand.what.name = snapshot_name(errand.prefix.hashes.back(), seq.space().name);
    kept->second.name = {errand.uid, errand.what.name};
    saving_.emplace(id, kept->second.name);
    if (Status status = snapshots_->begin(std::move(errand), &seq); !status.is_ok()) {
      end_save(status);
    }
  } catch (const std::bad_alloc&) {
    ++stats_.n_failed_saves;
    kept_.erase(kept);
    saving_.reset();
  }
  return true;
}

void KeptPrefixes::end_save(const Status& status) {
  const auto [seq, name] = std::move(*saving_);
  saving_.reset();
  // A service before has saved the same, and nobody has loaded it.
  const bool is_there = status.is_ok() || status.code() == KVM_ERR_EXISTS;
  const auto found = kept_.find(seq);
  if (!is_there) {
    ++stats_.n_failed_saves;
    kept_.erase(seq);
  } else if (found == kept_.end()) {
    remove(SnapshotName(name));
  } else {
    found->second.is_saved = true;
  }
}

bool KeptPrefixes::begin_load() {
  if (loading_ || claims_.empty()) {
    return false;
  }
  Claim& claim = claims_.front();
  try {
    loading_.emplace(Load{claim.space, claim.space_name, {}});
  } catch (const std::bad_alloc&) {
    return false;
  }
  loading_->from = std::move(claim.all.back());
  claim.all.pop_back();
  --n_waiting_;
  if (claim.all.empty()) {
    claims_.pop_front();
  }
  Snapshots::Errand errand;
  errand.what.verb = SnapshotVerb::kLoad;
  errand.what.space = loading_->space;
  errand.uid = loading_->from.name.uid;
  try {
    errand.what.name = loading_->from.name.name;
    const Status status = snapshots_->begin(std::move(errand), nullptr);
    KVM_ASSERT(status.is_ok());
  } catch (const std::bad_alloc&) {
    ++stats_.n_failed_loads;
    put_back(std::move(*loading_));
    loading_.reset();
  }
  return true;
}

void KeptPrefixes::end_load(Snapshots::Ended&& ended) {
  Status status = std::move(ended.status);
  PrefixImage& prefix = ended.errand.prefix;
  if (status.is_ok()) {
    const Result<Sequence*> seq = store_->find_any_seq(ended.seq);
    KVM_ASSERT(seq.is_ok());
    try {
      for (kvm_prefix_hash& hash : prefix.hashes) {
        hash = hash_in_space(hash, seq.value()->record->id);
      }
      const uint32_t uid = loading_->from.name.uid;
      status = prefix.hashes.empty()
                   ? Status::fixed(KVM_ERR_CORRUPT, "what was saved as a prefix has no hashes")
                   : prefixes_->check(*seq.value(), uid, prefix.hashes);
      if (status.is_ok()) {
        prefixes_->begin(ended.seq, uid, std::move(prefix.hashes), prefix.keep_ns);
        listing_ = ended.seq;
        return;
      }
    } catch (const std::bad_alloc&) {
      status = Status::fixed(KVM_ERR_NO_MEMORY, "the machine refused memory for a prefix");
    }
    try {
      unwanted_.push_back(ended.seq);
    } catch (const std::bad_alloc&) {
      // It stays as a published sequence.
    }
  }
  switch (status.code()) {
    case KVM_ERR_EXISTS:
      // Published anew, as it is, which has the snapshot then; or as part of a longer one.
      if (std::none_of(kept_.begin(), kept_.end(), [this](const auto& one) {
            return one.second.name.uid == loading_->from.name.uid &&
                   one.second.name.name == loading_->from.name.name;
          })) {
        remove(std::move(loading_->from.name));
      }
      break;
    case KVM_ERR_NOT_FOUND:
      break;
    case KVM_ERR_LOST:
    case KVM_ERR_CORRUPT:
      ++stats_.n_failed_loads;
      remove(std::move(loading_->from.name));
      break;
    default:
      ++stats_.n_failed_loads;
      put_back(std::move(*loading_));
  }
  loading_.reset();
}

bool KeptPrefixes::list_more() {
  if (listing_ == 0) {
    return false;
  }
  const Result<Sequence*> seq = store_->find_any_seq(listing_);
  const bool is_there = seq.is_ok() && prefixes_->has(listing_);
  if (is_there && !prefixes_->list_part(*seq.value(), kStepPages)) {
    return true;
  }
  if (is_there) {
    try {
      kept_.emplace(listing_, Kept{loading_->from.name, true});
    } catch (const std::bad_alloc&) {
      // Its snapshot stays when it goes, and with the next service it comes once more.
    }
    ++stats_.n_restored;
    loading_.reset();
    listing_ = 0;
  } else {
    note_freed(listing_);
  }
  return true;
}

void KeptPrefixes::put_back(Load&& load) {
  if (load.from.keep_ns != 0) {
    load.from.due_ns = add_saturating(clock_->now_ns(), load.from.keep_ns);
  }
  try {
    WaitingList& all = waiting_[load.space_name];
    all.reserve(all.size() + 1);
    const auto at = std::upper_bound(
        all.begin(), all.end(), load.from,
        [](const Waiting& a, const Waiting& b) { return a.n_tokens > b.n_tokens; });
    all.insert(at, std::move(load.from));
    ++n_waiting_;
  } catch (const std::bad_alloc&) {
    // It waits for the next service.
  }
  find_due();
}

void KeptPrefixes::expire() {
  const uint64_t now = clock_->now_ns();
  uint32_t n_left = kStepExpired;
  for (auto it = waiting_.begin(); it != waiting_.end() && n_left != 0;) {
    WaitingList& all = it->second;
    size_t n_kept = 0;
    for (Waiting& one : all) {
      if (one.due_ns <= now && n_left != 0) {
        remove(std::move(one.name));
        --n_left;
        --n_waiting_;
        ++stats_.n_expired;
      } else {
        std::swap(all[n_kept++], one);
      }
    }
    all.resize(n_kept);
    it = it->second.empty() ? waiting_.erase(it) : std::next(it);
  }
  find_due();
}

void KeptPrefixes::find_due() {
  due_ns_ = UINT64_MAX;
  for (const auto& [space, all] : waiting_) {
    for (const Waiting& one : all) {
      due_ns_ = std::min(due_ns_, one.due_ns);
    }
  }
}

void KeptPrefixes::end(Snapshots::Ended&& ended) {
  switch (ended.errand.what.verb) {
    case SnapshotVerb::kSave:
      end_save(ended.status);
      break;
    case SnapshotVerb::kLoad:
      end_load(std::move(ended));
      break;
    case SnapshotVerb::kRemove:
      is_removing_ = false;
      break;
  }
}

kvm_seq_id KeptPrefixes::take_unwanted() {
  if (unwanted_.empty()) {
    return 0;
  }
  const kvm_seq_id seq = unwanted_.back();
  unwanted_.pop_back();
  return seq;
}

void KeptPrefixes::add_stats(PrefixStats* stats) const {
  stats->n_saved = static_cast<uint64_t>(std::count_if(
      kept_.begin(), kept_.end(), [](const auto& one) { return one.second.is_saved; }));
  stats->n_waiting = n_waiting_ + (loading_ ? 1 : 0);
  stats->n_restored = stats_.n_restored;
  stats->n_failed_saves = stats_.n_failed_saves;
  stats->n_failed_loads = stats_.n_failed_loads;
  stats->n_expired += stats_.n_expired;
}

}  // namespace kvm::engine
