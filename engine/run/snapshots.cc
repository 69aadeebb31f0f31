// SPDX-License-Identifier: Apache-2.0
#include "engine/run/snapshots.h"

#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>

#include "base/assert.h"
#include "base/round.h"
#include "engine/image/image_pages.h"
#include "engine/image/image_restore.h"
#include "engine/image/sequence_image.h"
#include "engine/run/request.h"
#include "engine/run/snapshot_label.h"
#include "engine/stream/page_transfers.h"

namespace kvm::engine {
namespace {

// LIMIT: of a step: some 0.1 to 0.2 ms of the driver each.
constexpr uint64_t kStepPages = 4096;     // visited, or freed
constexpr uint64_t kStepPlaces = 16384;   // listed, or released
constexpr uint64_t kStepRestored = 1024;  // given a name
constexpr size_t kBatchPages = 256;       // written, or fetched
constexpr uint64_t kBatchBytes = uint64_t{8} << 20;
// Objects asked for at a time.
constexpr size_t kListed = 256;

// A tier knows keys of objects; whoever asked, a name.
Status in_words_of_users(Status status, const std::string& key) {
  const auto name = parse_snapshot_key(key);
  if (status.is_ok() || !name) {
    return status;
  }
  try {
    if (status.code() == KVM_ERR_NOT_FOUND) {
      return {KVM_ERR_NOT_FOUND,
              fmt::format("user {} has no snapshot \"{}\"", name->uid, name->name)};
    }
    std::string text(status.message());
    const size_t at = text.find(key);
    return at == std::string::npos
               ? status
               : Status(status.code(), text.replace(at, key.size(), name->name));
  } catch (const std::bad_alloc&) {
    return status;
  }
}

Status no_memory() {
  return Status::fixed(KVM_ERR_NO_MEMORY, "the machine refused memory for a snapshot");
}

uint64_t real_time_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

enum class Stage : uint8_t {
  kNumber,
  kWrite,
  kEncode,
  kPlaces,
  kPut,
  kGet,
  kDecode,
  kRestore,
  kFetch,
  kRemove,
  kFree,
};

}  // namespace

// One that is under way.
struct Snapshots::Work final : TaskSet, StreamListener {
  struct Object final : tiers::ObjectRequest {
    explicit Object(Arrivals* listener) : arrivals(listener) {}
    void on_done() noexcept override {
      const std::lock_guard lock(mutex);
      is_done = true;
      arrivals->post();
    }
    bool is_over() {
      const std::lock_guard lock(mutex);
      return is_done;
    }
    Arrivals* const arrivals;
    std::mutex mutex;  // held to the end of on_done()
    bool is_done = false;
  };

  Work(Request* of, Errand&& own, Arrivals* listener)
      : request(of), errand(std::move(own)), arrivals(listener), object(listener) {}

  void on_arrival() noexcept override { arrivals->post(); }

  void run(uint32_t, uint32_t) override {
    try {
      if (stage == Stage::kEncode) {
        Result<std::vector<std::byte>> body =
            encode_image(*aside->seq, numbers.lists(), errand.prefix);
        job_status = body.status();
        if (body.is_ok()) {
          object.body = std::move(body).value();
        }
        return;
      }
      std::vector<uint32_t> sizes;
      sizes.reserve(restore->places().size());
      for (const tiers::ObjectRequest::Page& page : restore->places()) {
        sizes.push_back(page.size_bytes);
      }
      Result<SequenceImage> read = decode_image(object.body, *space, sizes);
      job_status = read.status();
      if (read.is_ok()) {
        errand.prefix = std::move(read.value().prefix);
        restore->take(std::move(read).value());
        page_bytes = restore->page_bytes(*space);
      }
    } catch (const std::bad_alloc&) {
      job_status = no_memory();
    }
  }

  const SnapshotRequest& what() const {
    return request != nullptr ? std::get<SnapshotRequest>(request->what) : errand.what;
  }
  bool is_wanted() const { return request == nullptr || request->is_wanted(); }

  Request* const request;  // null: it is an errand
  Errand errand;
  Arrivals* const arrivals;
  Stage stage = Stage::kNumber;
  uint32_t uid = 0;
  Status status;
  kvm_seq_id seq = 0;      // that was loaded
  Aside* aside = nullptr;  // the fork, or what is to be the client's
  Object object;           // its key and label from the start
  bool is_asked = false;   // the object's request was submitted
  bool has_job = false;    // one has started
  bool is_job_over = false;
  Status job_status;
  uint64_t charged_bytes = 0;  // for what is being put

  // kSave.
  ImagePages numbers;
  std::vector<tiers::PageRef> again;  // of them, those that could not be written
  std::vector<tiers::PageRef> later;  // likewise, in this pass
  bool is_again = false;              // this pass goes through `again`
  uint64_t cursor = 0;                // in what it goes through
  uint64_t n_changes_seen = UINT64_MAX;
  PageTransfers transfers;

  // kLoad.
  std::shared_ptr<const Space> space;
  KvBytes page_bytes;                   // of all pages
  std::optional<ImageRestore> restore;  // from when the object was got
  uint32_t list = 0;                    // where the search for pages to be fetched goes on
  uint64_t block = 0;
};

SnapshotStats Snapshots::stats() const {
  SnapshotStats stats = stats_;
  for (const std::unique_ptr<Work>& work : works_) {
    const SnapshotVerb verb = work->what().verb;
    // The service's own are told elsewhere (PrefixStats).
    if (work->request == nullptr || work->stage == Stage::kFree || verb == SnapshotVerb::kRemove) {
      continue;
    }
    if (verb == SnapshotVerb::kLoad) {
      ++stats.n_loading;
      continue;
    }
    ++stats.n_saving;
    const uint64_t n_pages = work->numbers.pages().size();
    const uint64_t n_in_pass = work->is_again ? work->again.size() : n_pages;
    const uint64_t n_left =
        work->stage == Stage::kNumber ? n_pages
        : work->stage == Stage::kWrite
            ? n_in_pass - work->cursor + work->later.size() + work->transfers.size()
            : 0;
    stats.n_pages_saved += n_pages - n_left;
    stats.n_pages_to_save += n_left;
  }
  return stats;
}

Snapshots::Snapshots(Store* store, Movement* movement, Arrivals* arrivals, Scheduler* scheduler,
                     uint32_t lane)
    : store_(store),
      movement_(movement),
      arrivals_(arrivals),
      scheduler_(scheduler),
      lane_(lane),
      objects_(store->memory().pages().slow_tier()->objects()) {
  std::string after;
  for (;;) {
    const std::vector<tiers::ObjectInfo> infos = objects_->list(after, kListed);
    for (const tiers::ObjectInfo& info : infos) {
      if (const auto name = parse_snapshot_key(info.key)) {
        const uint64_t size_bytes = info.page_bytes + info.body_bytes;
        set(&names_[info.key], true, size_bytes);
        library(name->uid)->charge(Resource::kSnapshotBytes, size_bytes);
      }
    }
    if (infos.empty()) {
      break;
    }
    after = infos.back().key;
  }
  stats_.n_lost = objects_->recovery().n_lost_objects;
}

Status Snapshots::begin(Request* request, const Sequence* seq, uint32_t uid) {
  const auto& what = std::get<SnapshotRequest>(request->what);
  if (what.verb == SnapshotVerb::kSave && what.name.starts_with(kPrefixSnapshots)) {
    return {KVM_ERR_INVALID, fmt::format("the snapshot's name is \"{}\"; names that begin with {} "
                                         "are those of prefixes",
                                         what.name, kPrefixSnapshots)};
  }
  auto work = std::make_unique<Work>(request, Errand(), arrivals_);
  work->uid = uid;
  return begin(std::move(work), seq);
}

Status Snapshots::begin(Errand&& errand, const Sequence* seq) {
  auto work = std::make_unique<Work>(nullptr, std::move(errand), arrivals_);
  work->uid = work->errand.uid;
  return begin(std::move(work), seq);
}

ClientId Snapshots::taker(const Work& work) {
  return work.request != nullptr ? work.request->client : store_->library(work.uid)->client;
}

Status Snapshots::begin(std::unique_ptr<Work> work, const Sequence* seq) {
  const SnapshotRequest& what = work->what();
  work->object.key = snapshot_key({work->uid, what.name});
  works_.reserve(works_.size() + 1);
  ended_.reserve(works_.size() + 1 + ended_.size());
  switch (what.verb) {
    case SnapshotVerb::kSave: {
      if (seq->space().has_pairs) {
        return {
            KVM_ERR_UNSUPPORTED,
            fmt::format("the space \"{}\" has layers with KVM_LAYER_PAIR; pages that two layers "
                        "share stay in memory, and sequences of it are not saved",
                        seq->space().name)};
      }
      const auto found = names_.find(work->object.key);
      if ((what.flags & kSaveReplace) == 0 && found != names_.end() && found->second.is_there) {
        return {KVM_ERR_EXISTS, fmt::format("there is a snapshot \"{}\" already", what.name)};
      }
      work->object.kind = tiers::ObjectRequest::Kind::kPut;
      const uint64_t keep_s = div_up(work->errand.prefix.keep_ns, 1'000'000'000u);
      work->object.label =
          snapshot_label(seq->space(), longest_layer(seq), real_time_ns(),
                         static_cast<uint32_t>(std::min<uint64_t>(keep_s, UINT32_MAX)));
      KVM_TRY_ASSIGN(work->aside, store_->fork_aside(seq));
      break;
    }
    case SnapshotVerb::kLoad:
      work->object.kind = tiers::ObjectRequest::Kind::kGet;
      work->stage = Stage::kGet;
      break;
    case SnapshotVerb::kRemove:
      work->object.kind = tiers::ObjectRequest::Kind::kRemove;
      work->stage = Stage::kRemove;
      break;
  }
  works_.push_back(std::move(work));
  return Status::ok();
}

// --- Steps --------------------------------------------------------------------------------------

bool Snapshots::is_busy(const Work& work) const {
  const auto found = names_.find(work.object.key);
  return found != names_.end() && found->second.is_busy;
}

bool Snapshots::is_ready(Work* work) {
  switch (work->stage) {
    case Stage::kWrite:
      return work->transfers.is_empty() ? work->n_changes_seen != n_changes_ || !work->is_wanted()
                                        : work->transfers.is_over();
    case Stage::kFetch:
      return work->transfers.is_empty() || work->transfers.is_over();
    case Stage::kEncode:
    case Stage::kDecode:
      return work->has_job ? work->is_job_over : scheduler_->has_room();
    case Stage::kPlaces:
    case Stage::kRemove:
      return work->is_asked ? work->object.is_over() : !is_busy(*work);
    case Stage::kPut:
      return work->object.is_over();
    case Stage::kGet:
      return !work->is_asked || work->object.is_over();
    default:
      return true;
  }
}

bool Snapshots::is_ready() {
  return std::any_of(works_.begin(), works_.end(),
                     [this](const std::unique_ptr<Work>& work) { return is_ready(work.get()); });
}

bool Snapshots::go_on() {
  for (size_t n = works_.size(); n > 0; --n) {
    next_ = next_ + 1 < works_.size() ? next_ + 1 : 0;
    Work* work = works_[next_].get();
    if (!is_ready(work)) {
      continue;
    }
    try {
      step(work);
    } catch (const std::bad_alloc&) {
      end(work, no_memory());  // nothing of it is in flight
    }
    return true;
  }
  return false;
}

bool Snapshots::step(Work* work) {
  switch (work->stage) {
    case Stage::kFree:
      return free_some(work);
    case Stage::kRemove:
      return work->is_asked ? (end_remove(work), true) : begin_remove(work);
    case Stage::kGet:
    case Stage::kDecode:
    case Stage::kRestore:
    case Stage::kFetch:
      return step_load(work);
    default:
      return step_save(work);
  }
}

void Snapshots::end(Work* work, Status status) {
  work->status = std::move(status);
  work->stage = Stage::kFree;
}

bool Snapshots::drop_unwanted(Work* work) {
  if (work->is_wanted()) {
    return false;
  }
  end(work, work->request->reason_unwanted());
  return true;
}

bool Snapshots::start_job(Work* work) {
  if (!scheduler_->has_room()) {
    return false;
  }
  work->has_job = true;
  const uint64_t size_bytes = std::max<uint64_t>(work->object.body.size(), 4096);
  scheduler_->start(work, {.n_tasks = 1, .n_wake = 1, .cost = size_bytes, .lane = lane_});
  return true;
}

bool Snapshots::end_job(const TaskSet* set) {
  for (const std::unique_ptr<Work>& work : works_) {
    if (static_cast<const TaskSet*>(work.get()) == set) {
      work->is_job_over = true;
      return true;
    }
  }
  return false;
}

bool Snapshots::free_some(Work* work) {
  if (work->aside != nullptr) {
    if (store_->free_aside_part(work->aside, kStepPages)) {
      work->aside = nullptr;
    }
    return true;
  }
  if (work->restore) {
    if (work->restore->release_some(tier(), kStepPlaces)) {
      work->restore.reset();
    }
    return true;
  }
  if (work->request != nullptr) {
    count_end(*work);
  }
  ended_.push_back({work->request, std::move(work->status), work->seq, std::move(work->errand)});
  const auto found = std::find_if(works_.begin(), works_.end(),
                                  [work](const auto& one) { return one.get() == work; });
  works_.erase(found);
  return true;
}

namespace {

SnapshotEnd end_of(kvm_status status) {
  switch (status) {
    case KVM_OK:
      return SnapshotEnd::kOk;
    case KVM_ERR_QUOTA:
      return SnapshotEnd::kQuota;
    case KVM_ERR_NO_SPACE:
      return SnapshotEnd::kNoSpace;
    case KVM_ERR_IO:
      return SnapshotEnd::kIo;
    case KVM_ERR_LOST:
      return SnapshotEnd::kLost;
    case KVM_ERR_CORRUPT:
      return SnapshotEnd::kCorrupt;
    default:
      return SnapshotEnd::kOther;
  }
}

}  // namespace

void Snapshots::count_end(const Work& work) {
  const auto end = static_cast<size_t>(end_of(work.status.code()));
  switch (work.what().verb) {
    case SnapshotVerb::kSave:
      ++stats_.n_saves[end];
      break;
    case SnapshotVerb::kLoad:
      ++stats_.n_loads[end];
      break;
    case SnapshotVerb::kRemove:
      break;
  }
}

bool Snapshots::take_ended(Ended* ended) {
  if (ended_.empty()) {
    return false;
  }
  *ended = std::move(ended_.back());
  ended_.pop_back();
  return true;
}

// --- Saving -------------------------------------------------------------------------------------

bool Snapshots::step_save(Work* work) {
  switch (work->stage) {
    case Stage::kNumber:
      if (drop_unwanted(work)) {
        return true;
      }
      if (work->numbers.go_on(pages(), *work->aside->seq, kStepPages)) {
        // Early, so that nothing is written for nothing.
        Status room = library(work->uid)->check(Resource::kSnapshotBytes,
                                                work->numbers.page_bytes(), "the snapshot");
        if (!room.is_ok()) {
          end(work, std::move(room));
          return true;
        }
        work->stage = Stage::kWrite;
      }
      return true;
    case Stage::kWrite:
      return work->transfers.is_empty() ? begin_writes(work) : end_writes(work);
    case Stage::kEncode:
      if (!work->has_job) {
        return drop_unwanted(work) || start_job(work);
      }
      if (!work->job_status.is_ok()) {
        end(work, std::move(work->job_status));
      } else {
        work->cursor = 0;
        work->stage = Stage::kPlaces;
      }
      return true;
    case Stage::kPlaces:
      return drop_unwanted(work) || take_places(work);
    default:
      end_put(work);
      return true;
  }
}

// Pages that have a place are in the tier already: of an earlier save, or away. Those that move, or
// are written by others, are looked at again.
bool Snapshots::begin_writes(Work* work) {
  if (drop_unwanted(work)) {
    return true;
  }
  work->transfers.reserve(kBatchPages);
  const std::vector<tiers::PageRef>& todo = work->is_again ? work->again : work->numbers.pages();
  uint64_t size_bytes = 0;
  size_t n_begun = 0;
  for (uint64_t n = 0; n < kStepPages && work->cursor < todo.size() && n_begun < kBatchPages &&
                       size_bytes < kBatchBytes;
       ++n, ++work->cursor) {
    const tiers::PageRef page = todo[work->cursor];
    if (pages().place(page) != tiers::kNoPlace) {
      continue;
    }
    try {
      if (!pages().is_sealed(page)) {
        work->later.push_back(page);
        continue;
      }
      work->transfers.add(pages().begin_leave(page), tiers::kNoPlace);
    } catch (const std::bad_alloc&) {
      work->status = no_memory();
      break;
    }
    ++n_begun;
    size_bytes += pages().page_bytes(page);
  }
  if (n_begun != 0) {
    work->transfers.submit(tier(), work);
    return true;
  }
  work->transfers.end([](const auto&, const auto&) {});  // takes the room back
  if (!work->status.is_ok()) {
    end(work, std::move(work->status));
  } else if (work->cursor == todo.size()) {
    work->cursor = 0;
    if (work->later.empty()) {
      work->stage = Stage::kEncode;
      return true;
    }
    std::swap(work->again, work->later);
    work->later.clear();
    work->is_again = true;
    work->n_changes_seen = n_changes_;
  }
  return true;
}

bool Snapshots::end_writes(Work* work) {
  work->transfers.end([&](const tiers::PageTable::Move& move, const tiers::Transfer& write) {
    pages().end_copy(move, write.status.is_ok() ? write.place : tiers::kNoPlace);
    if (write.status.is_ok()) {
      stats_.bytes_written += pages().page_bytes(move.page);
    } else if (work->status.is_ok()) {
      work->status = write.status;
    }
  });
  note_change();  // others may have waited for these pages
  if (!work->status.is_ok()) {
    end(work, std::move(work->status));
  } else {
    work->n_changes_seen = UINT64_MAX;
  }
  return true;
}

bool Snapshots::take_places(Work* work) {
  std::vector<tiers::ObjectRequest::Page>& places = work->object.pages;
  const std::vector<tiers::PageRef>& of = work->numbers.pages();
  places.reserve(of.size());
  const uint64_t n_end = std::min<uint64_t>(of.size(), places.size() + kStepPlaces);
  for (uint64_t i = places.size(); i < n_end; ++i) {
    places.push_back({pages().place(of[i]), static_cast<uint32_t>(pages().page_bytes(of[i]))});
    KVM_ASSERT(places.back().place != tiers::kNoPlace);
  }
  return places.size() < of.size() || begin_put(work);
}

bool Snapshots::begin_put(Work* work) {
  Name& name = names_[work->object.key];
  if (name.is_there && (work->what().flags & kSaveReplace) == 0) {
    end(work,
        {KVM_ERR_EXISTS, fmt::format("there is a snapshot \"{}\" meanwhile", work->what().name)});
    return true;
  }
  const uint64_t size_bytes = work->numbers.page_bytes() + work->object.body.size();
  QuotaAccount* account = library(work->uid);
  if (Status room = account->check(Resource::kSnapshotBytes, size_bytes, "the snapshot");
      !room.is_ok()) {
    forget_name(work->object.key);
    end(work, std::move(room));
    return true;
  }
  account->charge(Resource::kSnapshotBytes, size_bytes);
  work->charged_bytes = size_bytes;
  name.is_busy = true;
  work->is_asked = true;
  work->stage = Stage::kPut;
  objects_->submit(&work->object);
  return true;
}

void Snapshots::end_put(Work* work) {
  Name& name = names_.at(work->object.key);
  const bool is_put = work->object.status.is_ok();
  // What was there before goes, or what was to come does not.
  const uint64_t gone_bytes = is_put ? name.bytes : work->charged_bytes;
  library(work->uid)->give_back(Resource::kSnapshotBytes, gone_bytes);
  if (is_put) {
    set(&name, true, work->charged_bytes);
  }
  name.is_busy = false;
  work->charged_bytes = 0;
  forget_name(work->object.key);
  end(work, in_words_of_users(std::move(work->object.status), work->object.key));
}

void Snapshots::set(Name* name, bool is_there, uint64_t size_bytes) {
  stats_.n_snapshots = stats_.n_snapshots - (name->is_there ? 1 : 0) + (is_there ? 1 : 0);
  stats_.bytes = stats_.bytes - name->bytes + size_bytes;
  name->bytes = size_bytes;
  name->is_there = is_there;
}

// Where there is nothing to know of it.
void Snapshots::forget_name(const std::string& key) {
  const auto found = names_.find(key);
  if (found != names_.end() && !found->second.is_there && !found->second.is_busy) {
    names_.erase(found);
  }
}

// --- Removing -----------------------------------------------------------------------------------

bool Snapshots::begin_remove(Work* work) {
  if (drop_unwanted(work)) {
    return true;
  }
  names_[work->object.key].is_busy = true;
  work->is_asked = true;
  objects_->submit(&work->object);
  return true;
}

void Snapshots::end_remove(Work* work) {
  Name& name = names_.at(work->object.key);
  name.is_busy = false;
  if (work->object.status.is_ok()) {
    if (name.bytes != 0) {
      library(work->uid)->give_back(Resource::kSnapshotBytes, name.bytes);
    }
    set(&name, false, 0);
  }
  forget_name(work->object.key);
  end(work, in_words_of_users(std::move(work->object.status), work->object.key));
}

// --- Loading ------------------------------------------------------------------------------------

bool Snapshots::step_load(Work* work) {
  switch (work->stage) {
    case Stage::kGet:
      if (!work->is_asked) {
        if (!drop_unwanted(work)) {
          work->is_asked = true;
          objects_->submit(&work->object);
        }
        return true;
      }
      if (!work->object.status.is_ok()) {
        end(work, in_words_of_users(std::move(work->object.status), work->object.key));
        return true;
      }
      work->restore.emplace(std::move(work->object.pages));
      work->stage = Stage::kDecode;
      return true;
    case Stage::kDecode:
      return begin_restore(work);
    case Stage::kRestore: {
      if (drop_unwanted(work)) {
        return true;
      }
      const Result<bool> is_done = work->restore->go_on(store_, work->aside, kStepRestored);
      if (!is_done.is_ok()) {
        end(work, is_done.status());
      } else if (is_done.value()) {
        work->stage = Stage::kFetch;
      }
      return true;
    }
    default:
      return work->transfers.is_empty() ? begin_reads(work) : end_reads(work);
  }
}

bool Snapshots::begin_restore(Work* work) {
  if (drop_unwanted(work)) {
    return true;
  }
  const kvm_space_id id = work->what().space;
  if (!work->has_job) {
    Result<std::shared_ptr<const Space>> space = store_->shared_space_for(taker(*work), id);
    if (!space.is_ok()) {
      end(work, space.status());
      return true;
    }
    work->space = std::move(space).value();
    return start_job(work);
  }
  work->object.body = {};
  Status status = std::move(work->job_status);
  if (status.is_ok()) {
    const Result<Aside*> aside = store_->begin_aside(taker(*work), id, work->page_bytes);
    status = aside.status();
    work->aside = aside.is_ok() ? aside.value() : nullptr;
  }
  if (status.is_ok()) {
    work->stage = Stage::kRestore;
  } else {
    end(work, std::move(status));
  }
  return true;
}

namespace {

// Whether pages of a list have to be in memory, whatever it takes: those that a policy reads when
// it gives them up, and those that are to be encoded anew.
bool has_needed(const Sequence& seq, uint32_t list) {
  const HeadClass& head_class = class_of_list(seq.space(), list);
  return head_class.retention.is_per_head() || head_class.settles();
}

// From which block on they are. Of any list the last page comes, where it is not full: it is
// appended to, it does not come later with the others, and no index is used where one is away.
uint64_t first_fetched(const Sequence& seq, uint32_t list) {
  const HeadClass& head_class = class_of_list(seq.space(), list);
  if (head_class.retention.is_per_head()) {
    return 0;
  }
  return (head_class.settles() ? seq.settled_ends[list] : seq.lists[list].length()) / kPageTokens;
}

}  // namespace

bool Snapshots::begin_reads(Work* work) {
  if (drop_unwanted(work)) {
    return true;
  }
  const Sequence& seq = *work->aside->seq;
  std::vector<tiers::PageRef> away;
  bool is_needed = false;
  uint64_t size_bytes = 0;
  for (uint64_t n = 0; work->list < seq.lists.size(); ++work->list, work->block = 0, ++n) {
    const PageList& list = seq.lists[work->list];
    const uint64_t end = div_up(list.length(), kPageTokens);
    work->block = std::max(work->block, first_fetched(seq, work->list));
    while (work->block < end && n < kStepPages && away.size() < kBatchPages &&
           size_bytes < kBatchBytes) {
      list.for_each_between(work->block, work->block + 1, [&](const PageEntry& entry) {
        if (!pages().is_in_memory(entry.page)) {
          away.push_back(entry.page);
          is_needed |= has_needed(seq, work->list);
          size_bytes += pages().page_bytes(entry.page);
        }
      });
      ++work->block;
      ++n;
    }
    if (work->block < end) {
      break;
    }
  }
  if (away.empty()) {
    if (work->list == seq.lists.size()) {
      admit(work);
    }
    return true;
  }
  work->transfers.reserve(away.size());
  size_t n_begun = 0;
  try {
    for (const tiers::PageRef page : away) {
      const Result<tiers::PageTable::Move> move = store_->memory().begin_fetch(page);
      if (!move.is_ok()) {
        const bool is_full = move.status().code() == KVM_ERR_NO_SPACE;
        work->status = is_full && !is_needed ? Status::ok() : move.status();
        break;
      }
      work->transfers.add(move.value(), pages().place(page));
      ++n_begun;
    }
  } catch (const std::bad_alloc&) {
    work->status = no_memory();
  }
  if (n_begun != 0) {
    work->transfers.submit(tier(), work);
    return true;
  }
  work->transfers.end([](const auto&, const auto&) {});  // takes the room back
  if (!work->status.is_ok()) {
    end(work, std::move(work->status));
  }
  return true;
}

bool Snapshots::end_reads(Work* work) {
  work->transfers.end([&](const tiers::PageTable::Move& move, const tiers::Transfer& read) {
    pages().end_fetch(move, read.status.is_ok());
    if (!read.status.is_ok() && work->status.is_ok()) {
      work->status = read.status;
    }
  });
  if (!work->status.is_ok()) {
    end(work, std::move(work->status));
  }
  return true;
}

void Snapshots::admit(Work* work) {
  work->seq = store_->admit_aside(work->aside);
  work->aside = nullptr;
  const Result<Sequence*> seq = store_->find_any_seq(work->seq);
  KVM_ASSERT(seq.is_ok());
  movement_->note_load(seq.value(), work->request != nullptr);
  end(work, Status::ok());
}

// --- Looking, and stopping ----------------------------------------------------------------------

std::vector<SnapshotInfo> Snapshots::list(uint32_t uid, const SnapshotName& after,
                                          size_t n_max) const {
  std::vector<SnapshotInfo> infos;
  std::string last = uid == kEverybody ? snapshot_key(after)
                                       : snapshot_key({uid, after.uid == uid ? after.name : ""});
  while (infos.size() < n_max) {
    const std::vector<tiers::ObjectInfo> objects =
        objects_->list(last, std::min(kListed, n_max - infos.size()));
    for (const tiers::ObjectInfo& object : objects) {
      std::optional<SnapshotInfo> info = snapshot_info(object);
      if (info && uid != kEverybody && info->name.uid != uid) {
        return infos;
      }
      if (info) {
        infos.push_back(std::move(*info));
      }
      last = object.key;
    }
    if (objects.empty()) {
      break;
    }
  }
  return infos;
}

void Snapshots::stop() {
  for (const std::unique_ptr<Work>& work : works_) {
    while (!work->transfers.is_empty() && !work->transfers.is_over()) {
      std::this_thread::yield();
    }
    while (work->is_asked && !work->object.is_over()) {
      std::this_thread::yield();
    }
    const bool is_write = work->stage == Stage::kWrite;
    work->transfers.end([&](const tiers::PageTable::Move& move, const tiers::Transfer& transfer) {
      if (is_write) {
        pages().end_copy(move, transfer.status.is_ok() ? transfer.place : tiers::kNoPlace);
      } else {
        pages().end_fetch(move, transfer.status.is_ok());
      }
    });
    if (work->stage == Stage::kGet && work->is_asked && work->object.status.is_ok()) {
      work->restore.emplace(std::move(work->object.pages));
    }
  }
}

Snapshots::~Snapshots() {
  for (const std::unique_ptr<Work>& work : works_) {
    if (work->restore) {
      work->restore->release_some(tier(), UINT64_MAX);
    }
  }
  // What they forked or began goes with the store.
}

void Snapshots::check_accounts() const {
  std::unordered_map<uint32_t, uint64_t> charged;
  uint64_t n_snapshots = 0;
  uint64_t size_bytes = 0;
  for (const auto& [key, name] : names_) {
    charged[parse_snapshot_key(key)->uid] += name.bytes;
    n_snapshots += name.is_there ? 1 : 0;
    size_bytes += name.bytes;
  }
  KVM_ASSERT(stats_.n_snapshots == n_snapshots && stats_.bytes == size_bytes);
  for (const std::unique_ptr<Work>& work : works_) {
    charged[work->uid] += work->charged_bytes;
  }
  for (const auto& [uid, charged_bytes] : charged) {
    KVM_ASSERT(store_->library(uid)->quota->used(Resource::kSnapshotBytes) == charged_bytes);
  }
}

}  // namespace kvm::engine
