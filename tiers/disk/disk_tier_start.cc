// SPDX-License-Identifier: Apache-2.0
// DiskTier: how it begins, with what an owner before has left, and how it ends.
#include <algorithm>
#include <array>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <utility>

#include "base/assert.h"
#include "tiers/disk/disk_system.h"
#include "tiers/disk/disk_tier.h"

namespace kvm::tiers {
namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kAlign = kMaxDiskBlockBytes;
constexpr uint32_t kManifestFiles = kManifestSlots * kManifestCopies;

Status invalid(std::string what) { return Status(KVM_ERR_INVALID, "disk: " + what); }

std::string bytes_text(uint64_t n) { return std::to_string(n) + " bytes"; }

uint64_t default_segment_bytes(uint64_t capacity_bytes) {
  const uint64_t wanted = std::min(capacity_bytes / 8, 64 * kMiB);
  const uint64_t fewest = align_up(capacity_bytes / DiskTier::kMaxSegments + 1, kAlign);
  return std::min(std::max({align_down(wanted, kAlign), DiskTier::kMinSegmentBytes, fewest}),
                  DiskTier::kMaxSegmentBytes);
}

// As much as segments of this size may hold: who says how much there may be knows nothing of them.
uint64_t fitting_capacity(uint64_t capacity_bytes, uint64_t segment_bytes) {
  return std::min(capacity_bytes, DiskTier::kMaxSegments * segment_bytes);
}

// With all that can be chosen chosen.
Result<DiskTierOptions> checked(const DiskTierOptions& given) {
  DiskTierOptions options = given;
  if (options.directories.empty()) {
    return invalid("no directory is named");
  }
  if (options.segment_bytes == 0) {
    options.segment_bytes = default_segment_bytes(options.capacity_bytes);
    options.capacity_bytes = fitting_capacity(options.capacity_bytes, options.segment_bytes);
  }
  const uint64_t segment = options.segment_bytes;
  if (segment % kAlign != 0 || segment < DiskTier::kMinSegmentBytes ||
      segment > DiskTier::kMaxSegmentBytes) {
    return invalid("segments of " + bytes_text(segment) + "; they have a multiple of 4096, from " +
                   std::to_string(DiskTier::kMinSegmentBytes) + " to " +
                   std::to_string(DiskTier::kMaxSegmentBytes));
  }
  const uint64_t n = options.capacity_bytes / segment;
  if (n < 2) {
    return invalid("a capacity of " + bytes_text(options.capacity_bytes) +
                   " is too small: it takes two segments, of " + bytes_text(segment) + " each");
  }
  if (n > DiskTier::kMaxSegments) {
    return invalid("a capacity of " + bytes_text(options.capacity_bytes) + " takes " +
                   std::to_string(n) + " segments of " + bytes_text(segment) + "; there are " +
                   std::to_string(DiskTier::kMaxSegments) + " at most: make them larger");
  }
  if (options.transfer_bytes % kAlign != 0 || options.transfer_bytes < 64 << 10 ||
      options.transfer_bytes > 16 << 20) {
    return invalid("transfers of " + bytes_text(options.transfer_bytes) +
                   "; they have a multiple of 4096, from 64 KiB to 16 MiB");
  }
  if (options.queue_depth < 2 || options.queue_depth > 1024) {
    return invalid("a queue depth of " + std::to_string(options.queue_depth) +
                   "; 2 to 1024 are allowed");
  }
  return options;
}

// Segments are as large as those that are there.
DiskTierOptions suited(const DiskTierOptions& given, const std::vector<SegmentOnDisk>& left) {
  DiskTierOptions options = given;
  if (!left.empty() && options.segment_bytes == 0) {
    options.segment_bytes = left.front().size_bytes;
    options.capacity_bytes = fitting_capacity(options.capacity_bytes, options.segment_bytes);
  }
  return options;
}

// How many segments there may be, with those that are there.
Result<uint32_t> slots_for(const DiskTierOptions& options, const std::vector<SegmentOnDisk>& left) {
  for (const SegmentOnDisk& segment : left) {
    if (segment.size_bytes != options.segment_bytes) {
      return invalid(segment.path + " has " + bytes_text(segment.size_bytes) +
                     ", other segments have " + bytes_text(options.segment_bytes));
    }
  }
  return static_cast<uint32_t>(
      std::max<uint64_t>(options.capacity_bytes / options.segment_bytes, left.size()));
}

// how: what is the matter with the list.
Status list_lost(const std::string& how, const std::vector<std::string>& directories) {
  std::string places;
  for (const std::string& directory : directories) {
    places += (places.empty() ? "" : ", ") + directory;
  }
  return Status(KVM_ERR_CORRUPT,
                "disk: the list of snapshots, kvm-*.manifest in " + places + ", " + how +
                    "; put back a copy of it, or, to begin anew with nothing, remove kvm.set and "
                    "kvm-*.manifest from each directory: all snapshots are given up, and kvmd "
                    "removes what they had");
}

uint32_t n_jobs_of(const DiskTierOptions& options, uint32_t beside) {
  return options.queue_depth + beside;
}

Status no_memory() { return Status::fixed(KVM_ERR_NO_MEMORY, "disk: there is no memory for it"); }

Status no_thread() { return Status::fixed(KVM_ERR_LIMIT, "disk: the system refuses a thread"); }

}  // namespace

// --- The beginning -------------------------------------------------------------------------------

uint64_t DiskTier::job_bytes(const DiskTierOptions& options) {
  // In front there is room for a segment's header; reads begin and end at blocks of the disk.
  return kSegmentHeaderBytes + options.transfer_bytes + kHeaderRoom + 2 * kAlign;
}

Result<DiskIoOptions> DiskTier::io_options(const DiskTierOptions& given) {
  KVM_TRY_ASSIGN(const DiskTierOptions options, checked(given));
  const uint32_t n_jobs = n_jobs_of(options, kMoveJobs + kEndedJobs + kRoundJobs);
  return DiskIoOptions{
      .n_files =
          static_cast<uint32_t>(options.capacity_bytes / options.segment_bytes) + kManifestFiles,
      .queue_depth = n_jobs,
      .buffer_bytes = n_jobs * job_bytes(options)};
}

Result<std::unique_ptr<DiskTier>> DiskTier::over(std::unique_ptr<DiskIo> io,
                                                 const DiskTierOptions& given) {
  try {
    KVM_TRY_ASSIGN(const DiskTierOptions options, checked(given));
    const auto n_slots = static_cast<uint32_t>(options.capacity_bytes / options.segment_bytes);
    std::unique_ptr<DiskTier> tier(new DiskTier(std::move(io), options, n_slots));
    std::vector<FoundFile> found;
    for (uint32_t i = 0; i < n_slots; ++i) {
      const Result<uint64_t> size_bytes = tier->io_->attach(i, tier->path_of(i));
      if (size_bytes.is_ok()) {
        found.push_back({i, size_bytes.value()});
      }
    }
    KVM_TRY(tier->recover(found, 1));
    tier->start();
    return tier;
  } catch (const std::system_error&) {
    return no_thread();
  } catch (const std::bad_alloc&) {
    return no_memory();
  }
}

Result<std::unique_ptr<DiskTier>> DiskTier::open(const DiskTierOptions& given) {
  try {
    KVM_TRY(checked(given).status());
    KVM_TRY_ASSIGN(std::vector<DataDirectory> directories, open_directories(given.directories));
    return open_in(std::move(directories), given);
  } catch (const std::bad_alloc&) {
    return no_memory();
  }
}

Result<std::unique_ptr<DiskTier>> DiskTier::open_in(std::vector<DataDirectory> directories,
                                                    const DiskTierOptions& given) {
  try {
    KVM_ASSERT(directories.size() == given.directories.size());
    // What is not there must not be taken for nothing: all below removes what nothing needs.
    KVM_TRY_ASSIGN(DirectorySet set, DirectorySet::find(given.directories));
    bool has_manifest = false;
    for (size_t d = 0; d < directories.size(); ++d) {
      KVM_TRY_ASSIGN(const bool has_one, directories[d].has_manifest());
      if (has_one && set.is_any() && !set.is_member(d)) {
        return invalid("the snapshots in " + directories[d].path() +
                       " are not those of the other directories; name it without them");
      }
      has_manifest |= has_one;
    }
    if (!has_manifest && set.has_list()) {
      return list_lost("is not there", given.directories);
    }
    if (!has_manifest) {
      set.unmark();
    }
    uint64_t n_leftover = 0;
    std::vector<SegmentOnDisk> left;
    for (uint32_t d = 0; d < directories.size(); ++d) {
      directories[d].remove_unfinished();
      // Without a manifest there are no objects; and in a directory that joins there are none of
      // this set: what lies there may have their names nevertheless.
      if (!has_manifest || (set.is_any() && !set.is_member(d))) {
        KVM_TRY_ASSIGN(const uint64_t n, directories[d].remove_segments());
        n_leftover += n;
        continue;
      }
      KVM_TRY_ASSIGN(std::vector<SegmentOnDisk> found, directories[d].find_segments());
      for (SegmentOnDisk& segment : found) {
        segment.directory = d;
        left.push_back(std::move(segment));
      }
    }
    const std::vector<SegmentOnDisk> cut = take_cut_segments(&left);
    if (!cut.empty()) {
      // Without it, what it says is needed of others would be removed.
      return Status(KVM_ERR_CORRUPT,
                    "disk: " + cut.front().path +
                        " cannot be used: " + wrong_size_text(cut.front(), left) +
                        ". Put back a copy of the file as it was, or remove it: the snapshots that "
                        "need it, which kvmctl fsck names, are lost then");
    }
    KVM_TRY_ASSIGN(const DiskTierOptions options, checked(suited(given, left)));
    KVM_TRY_ASSIGN(const uint32_t n_slots, slots_for(options, left));
    KVM_TRY_ASSIGN(DiskIoOptions io_options, DiskTier::io_options(options));
    io_options.n_files = n_slots + kManifestFiles;
    KVM_TRY_ASSIGN(std::unique_ptr<DiskIo> io, open_disk_io(options.backend, io_options));
    std::unique_ptr<DiskTier> tier(new DiskTier(std::move(io), options, n_slots));
    tier->directories_ = std::move(directories);
    tier->set_ = std::move(set);
    tier->stats_.n_leftover_files = n_leftover;
    tier->stats_.is_capacity_cut = options.capacity_bytes < given.capacity_bytes;
    KVM_TRY_ASSIGN(const std::vector<FoundFile> found, tier->attach_segments(left));
    KVM_TRY(tier->recover(found, random_id()));
    if (has_manifest) {
      // Before anything is written to one that is new.
      KVM_TRY(tier->set_.mark());
      if (tier->manifest_.number != 0) {
        tier->stats_.is_list_unmarked = !tier->set_.note_list();
      }
    }
    tier->start();
    return tier;
  } catch (const std::system_error&) {
    return no_thread();
  } catch (const std::bad_alloc&) {
    return no_memory();
  }
}

DiskTier::DiskTier(std::unique_ptr<DiskIo> io, const DiskTierOptions& options, uint32_t n_slots)
    : options_(options),
      n_segments_(static_cast<uint32_t>(options.capacity_bytes / options.segment_bytes)),
      io_(std::move(io)),
      segments_(n_slots),
      drives_(options.directories.size()),
      day_ns_(options.clock->now_ns()),
      jobs_(n_jobs_of(options, kMoveJobs + kEndedJobs + kRoundJobs)) {
  stats_.backend = io_->name();
  stats_.capacity_bytes = n_segments_ * options.segment_bytes;
  stats_.n_directories = drives_.size();
  for (uint32_t i = 0; i < n_slots; ++i) {
    segments_[i].directory = static_cast<uint16_t>(i % drives_.size());
    segments_[i].filling.number = i;
  }
  const uint64_t stride = job_bytes(options);
  const std::span<std::byte> buffers = io_->buffers();
  KVM_ASSERT(buffers.size() >= stride * jobs_.size());
  idle_.reserve(jobs_.size());
  begun_.reserve(jobs_.size());
  for (size_t i = 0; i < jobs_.size(); ++i) {
    jobs_[i].own = buffers.data() + i * stride;
    jobs_[i].parts.reserve(kMaxParts);
    idle_.push_back(&jobs_[i]);
  }
}

// Each gets a slot; those left over get numbers that no file of their directories has.
Result<std::vector<FoundFile>> DiskTier::attach_segments(const std::vector<SegmentOnDisk>& left) {
  std::vector<FoundFile> found;
  std::vector<std::set<uint32_t>> numbers(drives_.size());
  for (uint32_t i = 0; i < left.size(); ++i) {
    segments_[i].directory = static_cast<uint16_t>(left[i].directory);
    segments_[i].filling.number = left[i].number;
    numbers[left[i].directory].insert(left[i].number);
    is_abandoned_ = true;  // until it is known what is there
    KVM_TRY_ASSIGN(const uint64_t size_bytes, io_->attach(i, path_of(i)));
    found.push_back({i, size_bytes});
  }
  uint32_t next = 0;
  for (auto i = static_cast<uint32_t>(left.size()); i < segments_.size(); ++i) {
    while (!numbers[segments_[i].directory].insert(next).second) {
      ++next;
    }
    segments_[i].filling.number = next++;
  }
  return found;
}

uint32_t DiskTier::manifest_file(uint32_t slot, uint32_t copy) const {
  return static_cast<uint32_t>(segments_.size()) + slot * kManifestCopies + copy;
}

// The copies lie in the first directory and in the last.
std::string DiskTier::manifest_path(uint32_t slot, uint32_t copy) const {
  const std::string& directory =
      copy == 0 ? options_.directories.front() : options_.directories.back();
  return directory + "/" + manifest_file_name(slot, copy);
}

Status DiskTier::recover(std::span<const FoundFile> segments, uint64_t run_id) {
  std::optional<FoundFile> manifests[kManifestSlots][kManifestCopies];
  std::string paths[kManifestSlots][kManifestCopies];
  for (uint32_t slot = 0; slot < kManifestSlots; ++slot) {
    for (uint32_t copy = 0; copy < kManifestCopies; ++copy) {
      const uint32_t file = manifest_file(slot, copy);
      paths[slot][copy] = manifest_path(slot, copy);
      // The directories may have been named in another order.
      for (const std::string& directory : options_.directories) {
        const std::string path = directory + "/" + manifest_file_name(slot, copy);
        const Result<uint64_t> size_bytes = io_->attach(file, path);
        if (size_bytes.status().code() == KVM_ERR_NOT_FOUND) {
          continue;
        }
        // It is there, and must not be taken for nothing.
        KVM_TRY(size_bytes.status());
        manifests[slot][copy] =
            FoundFile{file, align_down(size_bytes.value(), kManifestBlockBytes)};
        manifest_.has_files[slot][copy] = true;
        paths[slot][copy] = path;
        break;
      }
    }
  }
  is_abandoned_ = true;  // until it is known what is there
  KVM_TRY_ASSIGN(const Found found, find_objects(io_.get(), segments, manifests, io_->buffers(),
                                                 static_cast<uint32_t>(job_bytes(options_))));
  if (found.is_list_lost || (set_.has_list() && !found.manifest.has_value())) {
    return list_lost("is damaged", options_.directories);
  }
  if (found.report.n_lost_objects != 0 && !found.headless.empty()) {
    // What lies there may be whole, and would be removed.
    return Status(KVM_ERR_CORRUPT,
                  "disk: the header of " + path_of(found.headless.front()) +
                      " is damaged, and snapshots need what cannot be found without it. Put back a "
                      "copy of the file, or remove it: the snapshots that need it, which kvmctl "
                      "fsck names, are lost then");
  }
  if (found.run_number == kMaxRunNumber) {
    return Status::fixed(KVM_ERR_LIMIT, "disk: the directories were opened too often");
  }
  run_id_ = run_id + found.run_number;
  run_number_ = found.run_number + 1;
  next_name_ = first_name(run_number_);
  recovery_ = found.report;
  adopt(found);
  note_list_fault(found, paths);
  for (const FoundFile& file : segments) {
    if (segments_[file.file].live_bytes == 0) {
      segments_[file.file].state = Segment::State::kAbsent;
      io_->remove(file.file);
      ++stats_.n_leftover_files;
    }
  }
  for (uint32_t i = 0; i < segments_.size(); ++i) {
    const bool is_there = segments_[i].state != Segment::State::kAbsent;
    stats_.n_segments += is_there ? 1 : 0;
    stats_.physical_bytes += is_there ? options_.segment_bytes : 0;
    drive_of(i).n_absent += !is_there && i < n_segments_ ? 1 : 0;
  }
  if (stats_.physical_bytes > stats_.capacity_bytes) {
    return invalid("a capacity of " + bytes_text(stats_.capacity_bytes) +
                   " is too small: what is kept there lies in segments of " +
                   bytes_text(stats_.physical_bytes));
  }
  is_abandoned_ = false;
  return Status::ok();
}

void DiskTier::adopt(const Found& found) {
  manifest_.number = found.manifest.value_or(0);
  manifest_.slot = found.manifest_slot;
  std::vector<PlaceId> places(found.pages.size());
  for (const FoundSegment& one : found.segments) {
    segments_[one.file.file].filling = {one.header.segment, one.header.run_id,
                                        one.header.generation};
  }
  for (size_t i = 0; i < found.pages.size(); ++i) {
    const FoundPage& page = found.pages[i];
    places[i] = take_place_locked(page.size_bytes);
    Place& place = places_[static_cast<uint32_t>(places[i])];
    place.unit = page.unit;
    place.segment = static_cast<uint16_t>(page.segment);
    place.state = Place::State::kWritten;
    place.n_refs = 0;
    place.name = page.name;
    Segment& segment = segments_[page.segment];
    segment.state = Segment::State::kSealed;
    segment.header = Segment::Header::kWritten;
    segment.end_bytes = options_.segment_bytes;
    segment.live_bytes += record_bytes(page.size_bytes);
    segment.places.push_back(places[i]);
  }
  for (const FoundObject& one : found.objects) {
    Object object{.label = one.label, .entry = one.header, .parts = {}, .is_lost = one.is_lost};
    for (const uint32_t part : one.parts) {
      object.parts.push_back(places[part]);
      ++places_[static_cast<uint32_t>(places[part])].n_refs;
    }
    objects_.emplace(one.key, std::move(object));
  }
}

void DiskTier::note_list_fault(const Found& found,
                               const std::string (&paths)[kManifestSlots][kManifestCopies]) {
  const std::string(&copies)[kManifestCopies] = paths[manifest_.slot];
  const auto damaged = std::find_if(
      found.list_faults.begin(), found.list_faults.end(),
      [](const ManifestFault& fault) { return fault.kind == ManifestFault::Kind::kOneCopy; });
  if (damaged != found.list_faults.end()) {
    stats_.list_fault = copies[damaged->copy] + " is damaged";
    return;
  }
  // One that was given up, and whose files were on their way out, says nothing any more.
  const bool is_needed = !found.objects.empty() || set_.has_list();
  for (uint32_t copy = 0; copy < kManifestCopies && found.manifest.has_value(); ++copy) {
    if (!manifest_.has_files[manifest_.slot][copy] && is_needed) {
      stats_.list_fault = copies[copy] + " is not there";
    }
  }
}

void DiskTier::start() {
  if (!options_.is_manual) {
    thread_ = std::thread([this] { run(); });
  }
}

// --- The end -------------------------------------------------------------------------------------

DiskTier::~DiskTier() {
  if (is_abandoned_) {
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    KVM_ASSERT(n_transfers_ == 0);
    is_stopping_ = true;
    (void)nudge_locked();
  }
  if (thread_.joinable()) {
    io_->wake();
    thread_.join();
  }
  while (idle_.size() != jobs_.size() || round_.stage != Round::Stage::kIdle) {
    do_turn(false);
  }
  remove_files();
}

void DiskTier::remove_files() noexcept {
  for (const auto& [key, object] : objects_) {
    for (const PlaceId part : object.parts) {
      segments_[places_[static_cast<uint32_t>(part)].segment].is_kept = true;
    }
  }
  // Copies of moved pages are safe before what they are copies of goes.
  bool is_safe = true;
  for (uint32_t i = 0; i < segments_.size(); ++i) {
    if (segments_[i].is_kept && segments_[i].is_dirty) {
      Job& sync = jobs_[0];
      sync.kind = DiskOp::Kind::kSync;
      sync.file = i;
      sync.offset = 0;
      sync.size_bytes = 0;
      DiskOp* op = &sync;
      io_->submit({&op, 1});
      while (io_->reap(ended_, UINT64_MAX) == 0) {
      }
      is_safe &= sync.status.is_ok();
    }
  }
  for (uint32_t i = 0; i < segments_.size() && is_safe; ++i) {
    if (segments_[i].state != Segment::State::kAbsent && !segments_[i].is_kept) {
      io_->remove(i);
    }
  }
  // A list that is not there must not be missed.
  if (!objects_.empty() || !set_.give_up_list()) {
    return;
  }
  for (uint32_t slot = 0; slot < kManifestSlots; ++slot) {
    for (uint32_t copy = 0; copy < kManifestCopies; ++copy) {
      if (manifest_.has_files[slot][copy]) {
        io_->remove(manifest_file(slot, copy));
      }
    }
  }
  set_.unmark();
}

}  // namespace kvm::tiers
