// SPDX-License-Identifier: Apache-2.0
// DiskTier: objects, and how they are made durable.
//
//   put     chunks but the first --> the first, which names them --> ready
//   remove  ready
//   round   of all that are ready: sync segments --> write the manifest --> sync it --> they count
//   get     references on all parts --> chunks are read --> checked
#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>

#include "base/assert.h"
#include "base/kill_point.h"
#include "tiers/disk/crc32c.h"
#include "tiers/disk/disk_tier.h"

namespace kvm::tiers {
namespace {

constexpr uint64_t kNameBytes = sizeof(uint64_t);
// A manifest has room for several times what it begins with, so that new ones are few.
constexpr uint64_t kManifestGrowth = 4;

// Sentences of a few words, where there is memory.
Status refusal(kvm_status code, const char* what, const std::string& key) noexcept {
  try {
    return Status(code, "disk: the snapshot '" + key + "' " + what);
  } catch (const std::bad_alloc&) {
    return Status::fixed(code, "disk: a snapshot was refused");
  }
}

}  // namespace

// --- Any thread ----------------------------------------------------------------------------------

void DiskTier::submit(ObjectRequest* request) noexcept {
  request->status = Status();
  bool must_wake = false;
  try {
    if (request->key.empty() || request->key.size() > kMaxObjectKeyBytes ||
        request->label.size() > kMaxObjectLabelBytes) {
      request->status = Status::fixed(KVM_ERR_LIMIT, "disk: the key or the label is too long");
    } else {
      ObjectWorks one;
      one.push_back(std::make_unique<ObjectWork>());
      one.back()->tier = this;
      one.back()->request = request;
      const std::lock_guard lock(mutex_);
      new_works_.splice(new_works_.end(), one);
      ++n_transfers_;
      must_wake = nudge_locked();
    }
  } catch (const std::bad_alloc&) {
    request->status = Status::fixed(KVM_ERR_NO_MEMORY, "disk: there is no memory for the request");
  }
  if (!request->status.is_ok()) {
    return request->on_done();
  }
  if (must_wake) {
    io_->wake();
  }
}

std::vector<ObjectInfo> DiskTier::list(std::string_view after, size_t n_max) const {
  std::vector<ObjectInfo> infos;
  const std::lock_guard lock(mutex_);
  for (auto it = objects_.upper_bound(after); it != objects_.end() && infos.size() < n_max; ++it) {
    const auto& [key, object] = *it;
    infos.push_back({.key = key,
                     .label = object.label,
                     .n_pages = object.entry.n_pages,
                     .page_bytes = object.entry.page_bytes,
                     .body_bytes = object.entry.body_bytes,
                     .is_lost = object.is_lost});
  }
  return infos;
}

// --- The tier's thread: from requests to what is ready for a round -------------------------------

void DiskTier::ObjectWork::Chunk::on_done() noexcept {
  if (--work->n_left == 0) {
    // There is room: each work has one place.
    work->tier->chunked_works_.push_back(work);
  }
}

void DiskTier::go_on_with_objects() {
  {
    const std::lock_guard lock(mutex_);
    if (new_works_.empty() && works_.empty() && round_.stage == Round::Stage::kIdle &&
        !is_freed_by_sync_locked()) {
      return;
    }
    for (auto it = new_works_.begin(); it != new_works_.end(); ++it) {
      (*it)->at = it;
    }
    are_works_waiting_ |= !new_works_.empty();
    works_.splice(works_.end(), new_works_);
  }
  try {
    ready_works_.reserve(works_.size());
    chunked_works_.reserve(works_.size());
  } catch (const std::bad_alloc&) {
    return;  // whatever ends next brings it here again
  }
  while (!chunked_works_.empty() || are_works_waiting_) {
    end_transfers();
    begin_works();
  }
  begin_round();
  go_on_with_round();
}

void DiskTier::end_transfers() {
  while (!chunked_works_.empty()) {
    ObjectWork* const work = chunked_works_.back();
    chunked_works_.pop_back();
    if (work->request->kind == ObjectRequest::Kind::kPut) {
      end_chunks(work);
    } else {
      end_get(work);
    }
  }
}

// Those whose keys no other has that came before.
void DiskTier::begin_works() {
  are_works_waiting_ = false;
  for (auto it = works_.begin(); it != works_.end();) {
    ObjectWork* const work = it->get();
    ++it;  // it may end at once
    if (!work->has_begun && busy_keys_.insert(work->request->key).second) {
      work->has_begun = true;
      begin_work(work);
    }
  }
}

void DiskTier::begin_work(ObjectWork* work) {
  try {
    if (work->request->kind == ObjectRequest::Kind::kPut) {
      return begin_put(work);
    }
    bool is_there = false;
    {
      const std::lock_guard lock(mutex_);
      is_there = objects_.contains(work->request->key);
    }
    const bool is_removal = work->request->kind == ObjectRequest::Kind::kRemove;
    if (!is_there && !(is_removal && manifest_.is_unsure)) {
      end_work(work, refusal(KVM_ERR_NOT_FOUND, "is not there", work->request->key));
    } else if (!is_removal) {
      begin_get(work);
    } else {
      ready_works_.push_back(work);
    }
  } catch (const std::bad_alloc&) {
    release_parts(work->object.parts);
    end_work(work, Status::fixed(KVM_ERR_NO_MEMORY, "disk: there is no memory for it"));
  }
}

void DiskTier::begin_put(ObjectWork* work) {
  const ObjectRequest& request = *work->request;
  const uint64_t n_pages = request.pages.size();
  const uint64_t n_chunks = object_chunks(n_pages, request.body.size());
  if (n_chunks > kMaxChunks || n_pages > UINT32_MAX) {
    return end_work(work,
                    refusal(KVM_ERR_LIMIT, "is larger than 256 MiB beside its pages", request.key));
  }
  ManifestEntryHeader& entry = work->object.entry;
  entry.n_pages = static_cast<uint32_t>(n_pages);
  entry.body_bytes = request.body.size();
  work->object.label = request.label;
  Objects one;
  work->node = one.extract(one.emplace(request.key, Object()).first);
  work->object.parts.reserve(n_pages + n_chunks);
  work->chunks.reserve(n_chunks);
  work->stream.resize(sizeof(ObjectHeader) + (n_chunks - 1 + n_pages) * kNameBytes +
                      request.body.size());
  std::byte* at = work->stream.data() + sizeof(ObjectHeader) + (n_chunks - 1) * kNameBytes;
  {
    const std::lock_guard lock(mutex_);
    for (const ObjectRequest::Page& page : request.pages) {
      Place& place = written_place_locked(page.place);
      ++place.n_refs;
      work->object.parts.push_back(page.place);
      entry.page_bytes += place.size_bytes;
      std::memcpy(at, &place.name, kNameBytes);
      at += kNameBytes;
    }
  }
  std::copy(request.body.begin(), request.body.end(), at);
  work->n_pages = entry.n_pages;
  // The first, which has the names of the others, comes last.
  for (uint64_t i = 0; i < n_chunks; ++i) {
    ObjectWork::Chunk& chunk = work->chunks.emplace_back();
    chunk.work = work;
    chunk.kind = Transfer::Kind::kWrite;
    chunk.data = work->stream.data() + i * kChunkBytes;
    chunk.size_bytes = static_cast<uint32_t>(
        std::min<uint64_t>(kChunkBytes, work->stream.size() - i * kChunkBytes));
  }
  if (n_chunks == 1) {
    return write_chunks(work);
  }
  std::vector<Transfer*> others;
  others.reserve(n_chunks - 1);
  for (uint64_t i = 1; i < n_chunks; ++i) {
    others.push_back(&work->chunks[i]);
  }
  work->n_left = static_cast<uint32_t>(n_chunks - 1);
  SlowTier& pages = *this;
  pages.submit(others);
}

// Writes the first chunk; the others are there.
void DiskTier::write_chunks(ObjectWork* work) {
  std::byte* at = work->stream.data() + sizeof(ObjectHeader);
  {
    const std::lock_guard lock(mutex_);
    for (size_t i = 1; i < work->chunks.size(); ++i) {
      const uint64_t name = written_place_locked(work->chunks[i].place).name;
      std::memcpy(at, &name, kNameBytes);
      at += kNameBytes;
    }
  }
  const ManifestEntryHeader& entry = work->object.entry;
  write_object_header({.body_bytes = entry.body_bytes,
                       .n_pages = entry.n_pages,
                       .n_chunks = static_cast<uint32_t>(work->chunks.size()),
                       .stream_crc = crc32c(std::span(work->stream).subspan(sizeof(ObjectHeader)))},
                      work->stream.data());
  work->n_left = 1;
  Transfer* const first = &work->chunks[0];
  SlowTier& pages = *this;
  pages.submit({&first, 1});
}

// Some chunks of a put have ended: all but the first, or that.
void DiskTier::end_chunks(ObjectWork* work) {
  const auto has_failed = [](const ObjectWork::Chunk& chunk) { return !chunk.status.is_ok(); };
  const auto failed = std::find_if(work->chunks.begin(), work->chunks.end(), has_failed);
  if (failed == work->chunks.end() && work->chunks[0].place == kNoPlace) {
    return write_chunks(work);
  }
  for (const ObjectWork::Chunk& chunk : work->chunks) {
    if (chunk.place != kNoPlace) {
      work->object.parts.push_back(chunk.place);
    }
  }
  if (failed != work->chunks.end()) {
    release_parts(work->object.parts);
    return end_work(work, std::move(failed->status));
  }
  KVM_KILL_POINT("disk/object_written");
  {
    const std::lock_guard lock(mutex_);
    const Place& first = written_place_locked(work->chunks[0].place);
    work->object.entry.first_chunk = first.name;
    work->object.entry.first_chunk_bytes = first.size_bytes;
  }
  // The first chunk is the first of the chunks in parts too: they were added in their order.
  work->stream = {};
  ready_works_.push_back(work);
}

void DiskTier::begin_get(ObjectWork* work) {
  {
    const std::lock_guard lock(mutex_);
    const Object& object = objects_.find(work->request->key)->second;
    work->object.entry = object.entry;
    work->object.is_lost = object.is_lost;
    if (!object.is_lost) {
      work->object.parts = object.parts;
      for (const PlaceId part : object.parts) {
        ++written_place_locked(part).n_refs;
      }
    }
  }
  if (work->object.is_lost) {
    return end_work(work, refusal(KVM_ERR_LOST,
                                  "is not there as a whole any more: a directory or "
                                  "a file is missing, or is damaged",
                                  work->request->key));
  }
  work->n_pages = work->object.entry.n_pages;
  const size_t n_chunks = work->object.parts.size() - work->n_pages;
  work->stream.resize(sizeof(ObjectHeader) + (n_chunks - 1 + work->n_pages) * kNameBytes +
                      work->object.entry.body_bytes);
  work->chunks.reserve(n_chunks);
  std::vector<Transfer*> all;
  all.reserve(n_chunks);
  for (size_t i = 0; i < n_chunks; ++i) {
    ObjectWork::Chunk& chunk = work->chunks.emplace_back();
    chunk.work = work;
    chunk.kind = Transfer::Kind::kRead;
    chunk.place = work->object.parts[work->n_pages + i];
    chunk.data = work->stream.data() + i * kChunkBytes;
    chunk.size_bytes = static_cast<uint32_t>(
        std::min<uint64_t>(kChunkBytes, work->stream.size() - i * kChunkBytes));
    all.push_back(&chunk);
  }
  work->n_left = static_cast<uint32_t>(n_chunks);
  SlowTier& pages = *this;
  pages.submit(all);
}

void DiskTier::end_get(ObjectWork* work) {
  Status status;
  for (ObjectWork::Chunk& chunk : work->chunks) {
    if (status.is_ok() && !chunk.status.is_ok()) {
      status = std::move(chunk.status);
    }
  }
  const std::span<const std::byte> stream(work->stream);
  ObjectHeader header;
  if (status.is_ok() &&
      (!read_object_header(stream, &header) || header.n_chunks != work->chunks.size() ||
       header.n_pages != work->n_pages || header.body_bytes != work->object.entry.body_bytes ||
       header.stream_crc != crc32c(stream.subspan(sizeof(header))))) {
    status = refusal(KVM_ERR_CORRUPT, "is damaged", work->request->key);
  }
  const std::span<const PlaceId> parts(work->object.parts);
  if (status.is_ok()) {
    try {
      ObjectRequest& request = *work->request;
      request.pages.resize(work->n_pages);
      request.body.assign(stream.end() - static_cast<ptrdiff_t>(header.body_bytes), stream.end());
      const std::lock_guard lock(mutex_);
      for (uint32_t i = 0; i < work->n_pages; ++i) {
        request.pages[i] = {parts[i], written_place_locked(parts[i]).size_bytes};
      }
    } catch (const std::bad_alloc&) {
      status = Status::fixed(KVM_ERR_NO_MEMORY, "disk: there is no memory for the object");
    }
  }
  release_parts(status.is_ok() ? parts.subspan(work->n_pages) : parts);
  end_work(work, std::move(status));
}

// The work is gone when this returns.
void DiskTier::end_work(ObjectWork* work, Status status) {
  ObjectRequest* const request = work->request;
  busy_keys_.erase(request->key);
  are_works_waiting_ = true;  // perhaps one of this key
  // What it took goes before the answer: whoever has that may end the tier.
  works_.erase(work->at);
  {
    const std::lock_guard lock(mutex_);
    --n_transfers_;
    has_news_ = true;
  }
  request->status = std::move(status);
  request->on_done();
}

void DiskTier::release_parts(std::span<const PlaceId> parts) {
  for (const PlaceId part : parts) {
    release(part);
  }
}

// --- Rounds --------------------------------------------------------------------------------------

void DiskTier::begin_round() {
  if (round_.stage != Round::Stage::kIdle) {
    return;
  }
  const std::lock_guard lock(mutex_);
  if (ready_works_.empty() && !is_freed_by_sync_locked()) {
    return;
  }
  try {
    round_.files.reserve(segments_.size());
    round_.held.reserve(segments_.size());
    size_t n_parts = limbo_.size();
    for (const ObjectWork* work : ready_works_) {
      n_parts += work->object.parts.size();
    }
    limbo_.reserve(n_parts);
  } catch (const std::bad_alloc&) {
    return;
  }
  round_.stage = Round::Stage::kSync;
  round_.works.swap(ready_works_);
  ready_works_.clear();
  round_.status = Status();
  round_.has_touched_manifest = false;
  for (uint32_t i = 0; i < segments_.size(); ++i) {
    Segment& segment = segments_[i];
    const bool has_pages =
        segment.state == Segment::State::kOpen || segment.state == Segment::State::kSealed;
    if (segment.is_dirty && has_pages) {
      round_.files.push_back(i);
      segment.is_dirty = false;
    }
    if (segment.state == Segment::State::kHeld) {
      round_.held.push_back(i);
    }
  }
}

void DiskTier::go_on_with_round() {
  if (round_.stage == Round::Stage::kSync) {
    sync_more();
  }
  if (round_.stage == Round::Stage::kSync && round_.files.empty() && round_.n_jobs == 0) {
    end_sync();
  }
}

void DiskTier::sync_more() {
  while (!round_.files.empty() && n_round_jobs_ < kRoundJobs) {
    const uint32_t file = round_.files.back();
    bool is_new = false;
    bool is_headless = false;
    {
      const std::lock_guard lock(mutex_);
      const Segment& segment = segments_[file];
      if (segment.header == Segment::Header::kInFlight) {
        return;  // without it nothing there would be found
      }
      if (segment.end_bytes == 0 || segment.state == Segment::State::kFree) {
        round_.files.pop_back();  // it is empty now, or was begun again, with nothing written yet
        continue;
      }
      is_headless = segment.header == Segment::Header::kNone;
      is_new = std::exchange(segments_[file].is_new, false);
    }
    round_.files.pop_back();
    if (is_headless) {
      write_header(file);
      continue;
    }
    if (is_new) {
      Status status = io_->sync_entry(file);
      if (!status.is_ok()) {
        const std::lock_guard lock(mutex_);
        segments_[file].is_new = true;
        segments_[file].is_dirty = true;
        round_.status = std::move(status);
        continue;
      }
    }
    begin_round_job(file, DiskOp::Kind::kSync);
  }
}

// It could not be written with the first records.
void DiskTier::write_header(uint32_t segment) {
  Job* const job = take_job(Job::Purpose::kRound, 0);
  job->kind = DiskOp::Kind::kWrite;
  job->file = segment;
  job->offset = 0;
  job->size_bytes = kSegmentHeaderBytes;
  job->data = job->own;
  const std::lock_guard lock(mutex_);
  write_segment_header(segment_header(segments_[segment].filling), job->data);
  ++segments_[segment].n_transfers;
  ++round_.n_jobs;
  begun_.push_back(job);
}

void DiskTier::begin_round_job(uint32_t file, DiskOp::Kind kind) {
  Job* const job = take_job(Job::Purpose::kRound, 0);
  job->kind = kind;
  job->file = file;
  job->offset = 0;
  job->size_bytes = 0;
  job->data = nullptr;
  if (kind == DiskOp::Kind::kWrite) {
    job->offset = (round_.begins_manifest ? 0 : manifest_.n_blocks) * kManifestBlockBytes;
    job->size_bytes = static_cast<uint32_t>(round_.n_blocks * kManifestBlockBytes);
    job->data = round_.blocks.bytes().data();
  }
  ++round_.n_jobs;
  begun_.push_back(job);
}

void DiskTier::finish_round_job(Job* job) {
  --round_.n_jobs;
  if (job->file < segments_.size() && job->kind == DiskOp::Kind::kWrite) {
    const std::lock_guard lock(mutex_);
    --segments_[job->file].n_transfers;
    recycle_if_empty_locked(job->file);
  }
  if (!job->status.is_ok()) {
    const std::lock_guard lock(mutex_);
    ++stats_.n_io_errors;
    if (job->file < segments_.size()) {
      segments_[job->file].is_dirty = true;
      round_.status = io_error(*job);
    } else {
      round_.status = std::move(job->status);
    }
  } else if (job->file < segments_.size() && job->kind == DiskOp::Kind::kWrite) {
    const std::lock_guard lock(mutex_);
    segments_[job->file].header = Segment::Header::kWritten;
    round_.files.push_back(job->file);
  }
  give_job_back(job);
  if (round_.n_jobs != 0 || round_.stage == Round::Stage::kSync) {
    return;
  }
  if (round_.status.is_ok() && round_.stage == Round::Stage::kWrite) {
    KVM_KILL_POINT("disk/manifest_written");
    round_.stage = Round::Stage::kSyncManifest;
    for (uint32_t copy = 0; copy < kManifestCopies; ++copy) {
      begin_round_job(manifest_file(round_.slot, copy), DiskOp::Kind::kSync);
    }
    return;
  }
  end_round();
}

void DiskTier::end_sync() {
  {
    const std::lock_guard lock(mutex_);
    has_sync_failed_ = !round_.status.is_ok();
    for (const uint32_t i : round_.held) {
      if (round_.status.is_ok()) {
        segments_[i].state = Segment::State::kFree;
        segments_[i].waits_for_sync = false;
        --n_held_;
        ++n_idle_;
      }
    }
    round_.held.clear();
    has_news_ = true;
  }
  if (!round_.status.is_ok() || round_.works.empty()) {
    return end_round();
  }
  KVM_KILL_POINT("disk/objects_synced");
  write_manifest();
}

// All that is ready, or, in a new manifest, all that there will be.
void DiskTier::write_manifest() {
  round_.stage = Round::Stage::kWrite;
  Status status;
  try {
    status = aim_manifest();
  } catch (const std::bad_alloc&) {
    status = Status::fixed(KVM_ERR_NO_MEMORY, "disk: there is no memory for the manifest");
  }
  if (!status.is_ok()) {
    round_.status = std::move(status);
    return end_round();
  }
  round_.has_touched_manifest = true;
  for (uint32_t copy = 0; copy < kManifestCopies; ++copy) {
    begin_round_job(manifest_file(round_.slot, copy), DiskOp::Kind::kWrite);
  }
}

Status DiskTier::aim_manifest() {
  const auto change_of = [](const ObjectWork& work) {
    const bool is_put = work.request->kind == ObjectRequest::Kind::kPut;
    ManifestChange change{.header = work.object.entry, .key = work.request->key, .label = {}};
    change.header.kind = is_put ? ManifestEntryHeader::kPut : ManifestEntryHeader::kRemove;
    if (is_put) {
      change.label = work.object.label;
    } else {
      change.header = {.kind = ManifestEntryHeader::kRemove};
    }
    return change;
  };
  ManifestWriter changes(manifest_.number, manifest_.n_blocks, run_number_);
  for (const ObjectWork* work : round_.works) {
    changes.add(change_of(*work));
  }
  changes.end();
  round_.begins_manifest =
      manifest_.must_be_new || manifest_.n_blocks + changes.n_blocks() > manifest_.max_blocks;
  round_.slot = manifest_.slot;
  ManifestWriter all(manifest_.number + 1, 0, run_number_);
  if (round_.begins_manifest) {
    // A key is in one work of a round at most.
    std::map<std::string_view, const ObjectWork*> changed;
    for (const ObjectWork* work : round_.works) {
      changed.emplace(work->request->key, work);
    }
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [key, object] : objects_) {
        if (!changed.contains(key)) {
          all.add({object.entry, key, object.label});
        }
      }
    }
    for (const auto& [key, work] : changed) {
      if (work->request->kind == ObjectRequest::Kind::kPut) {
        all.add(change_of(*work));
      }
    }
    all.end();
    // The slot of the last one that counts is the other one.
    round_.slot = manifest_.number == 0 ? 0 : (manifest_.slot + 1) % kManifestSlots;
    round_.max_blocks = std::max(kMinManifestBlocks, kManifestGrowth * all.n_blocks());
  }
  const ManifestWriter& chosen = round_.begins_manifest ? all : changes;
  round_.n_blocks = chosen.n_blocks();
  if (round_.n_blocks * kManifestBlockBytes > UINT32_MAX / 2) {
    return Status::fixed(KVM_ERR_LIMIT, "disk: there are too many objects");
  }
  round_.blocks = DiskMemory(chosen.bytes().size());
  if (round_.blocks.bytes().empty()) {
    return Status::fixed(KVM_ERR_NO_MEMORY, "disk: there is no memory for the manifest");
  }
  std::copy(chosen.bytes().begin(), chosen.bytes().end(), round_.blocks.bytes().begin());
  if (!round_.begins_manifest) {
    return Status::ok();
  }
  KVM_TRY(set_.mark());
  for (uint32_t copy = 0; copy < kManifestCopies; ++copy) {
    bool& has_file = manifest_.has_files[round_.slot][copy];
    const uint32_t file = manifest_file(round_.slot, copy);
    if (std::exchange(has_file, false)) {
      io_->remove(file);
    }
    KVM_TRY(io_->create(file, manifest_path(round_.slot, copy),
                        round_.max_blocks * kManifestBlockBytes));
    has_file = true;
    KVM_TRY(io_->sync_entry(file));
  }
  return Status::ok();
}

// It is over, well or not.
void DiskTier::end_round() {
  round_.stage = Round::Stage::kIdle;
  round_.blocks = DiskMemory();
  const bool is_ok = round_.status.is_ok();
  if (is_ok && round_.has_touched_manifest) {
    // It guards against a list that is lost later, and is tried again with the next change.
    const bool is_marked = set_.note_list();
    const std::lock_guard lock(mutex_);
    stats_.is_list_unmarked = !is_marked;
  }
  std::vector<PlaceId> gone;
  if (round_.has_touched_manifest) {
    // After a failure nobody knows what is on the disk, and a part that would be written behind it
    // might count or not: the next round writes all anew.
    manifest_.must_be_new = !is_ok;
    manifest_.is_unsure = !is_ok;
    if (is_ok) {
      KVM_KILL_POINT("disk/manifest_synced");
      gone.swap(limbo_);
      if (round_.begins_manifest) {
        const uint32_t before = (round_.slot + 1) % kManifestSlots;
        for (uint32_t copy = 0; copy < kManifestCopies; ++copy) {
          if (std::exchange(manifest_.has_files[before][copy], false)) {
            io_->remove(manifest_file(before, copy));
          }
        }
        ++manifest_.number;
        manifest_.slot = round_.slot;
        manifest_.n_blocks = 0;
        manifest_.max_blocks = round_.max_blocks;
      }
      manifest_.n_blocks += round_.n_blocks;
    }
  }
  std::vector<ObjectWork*> works = std::exchange(round_.works, {});
  for (ObjectWork* work : works) {
    const bool is_put = work->request->kind == ObjectRequest::Kind::kPut;
    std::vector<PlaceId> released;
    if (is_ok) {
      const std::lock_guard lock(mutex_);
      const auto it = objects_.find(work->request->key);
      if (it != objects_.end()) {
        released = std::move(it->second.parts);
        if (is_put) {
          it->second = std::move(work->object);
        } else {
          objects_.erase(it);
        }
      } else if (!is_put) {
        // One may have been in a manifest that could not be written.
        work->status = refusal(KVM_ERR_NOT_FOUND, "is not there", work->request->key);
      } else {
        work->node.mapped() = std::move(work->object);
        objects_.insert(std::move(work->node));
      }
    } else if (round_.has_touched_manifest) {
      limbo_.insert(limbo_.end(), work->object.parts.begin(), work->object.parts.end());
    } else {
      released = std::move(work->object.parts);
    }
    release_parts(released);
  }
  release_parts(gone);
  for (ObjectWork* work : works) {
    end_work(work, is_ok ? std::move(work->status) : round_.status);
  }
}

}  // namespace kvm::tiers
