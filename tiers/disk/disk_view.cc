// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/disk_view.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <new>
#include <system_error>
#include <utility>

#include "tiers/disk/crc32c.h"
#include "tiers/disk/directory_set.h"
#include "tiers/disk/manifest.h"

namespace kvm::tiers {
namespace {

constexpr uint32_t kManifestFiles = kManifestSlots * kManifestCopies;
// LIMIT: of pages that are read at a time and wait for their turn.
constexpr uint64_t kBatchBytes = 16 << 20;
constexpr size_t kBatchPages = DiskReader::kMaxReads;

Status invalid(const std::string& what) { return Status(KVM_ERR_INVALID, "disk: " + what); }

std::string bytes_text(uint64_t n) { return std::to_string(n) + " bytes"; }

}  // namespace

Result<std::unique_ptr<DiskView>> DiskView::open(const std::vector<std::string>& directories) {
  try {
    std::unique_ptr<DiskView> view(new DiskView());
    for (const std::string& path : directories) {
      std::error_code error;
      const auto same =
          std::find_if(view->paths_.begin(), view->paths_.end(), [&](const std::string& other) {
            return std::filesystem::equivalent(path, other, error) && !error;
          });
      if (same != view->paths_.end()) {
        return invalid("the directory " + path + " is named twice");
      }
      KVM_TRY_ASSIGN(DataDirectory directory, DataDirectory::look(path));
      view->directories_.push_back(std::move(directory));
      view->paths_.push_back(path);
    }
    KVM_TRY(view->look_at_set());
    KVM_TRY(view->attach());
    return view;
  } catch (const std::bad_alloc&) {
    return Status::fixed(KVM_ERR_NO_MEMORY,
                         "disk: there is no memory to look at what its files hold");
  }
}

// As an owner would.
Status DiskView::look_at_set() {
  Result<DirectorySet> set = DirectorySet::find(paths_);
  if (set.status().code() == KVM_ERR_CORRUPT) {
    // Those that are named are looked at nevertheless.
    for (const std::string& path : paths_) {
      if (DirectorySet::find({path}).status().code() == KVM_ERR_CORRUPT) {
        wrong_.push_back({path + "/" + kSetMarkName,
                          "the file, which says what directories belong together, is damaged: no "
                          "kvmd starts here, until a copy of it is put back, or kvm.set is removed "
                          "from each directory; those that are named are taken for all there are "
                          "then"});
      }
    }
    is_marked_ = true;
    return Status::ok();
  }
  KVM_TRY(set.status());
  is_marked_ = set.value().is_any();
  must_have_list_ = set.value().has_list();
  for (size_t d = 0; d < directories_.size(); ++d) {
    is_joining_.push_back(set.value().is_any() && !set.value().is_member(d));
  }
  for (size_t d = 0; d < directories_.size(); ++d) {
    KVM_TRY_ASSIGN(const bool has_list, directories_[d].has_manifest());
    if (has_list && set.value().is_any() && !set.value().is_member(d)) {
      return invalid("the snapshots in " + paths_[d] +
                     " are not those of the other directories; name it without them");
    }
  }
  return Status::ok();
}

Status DiskView::find_files(std::vector<SegmentOnDisk>* segments) {
  for (uint32_t d = 0; d < directories_.size(); ++d) {
    if (!is_joining_.empty() && is_joining_[d]) {
      continue;  // an owner would remove them: they are of another set
    }
    std::vector<std::string> older;  // an owner would remove them: nothing in them outlived it
    KVM_TRY_ASSIGN(std::vector<SegmentOnDisk> found, directories_[d].list_segments(&older));
    for (SegmentOnDisk& segment : found) {
      segment.directory = d;
      segments->push_back(std::move(segment));
    }
  }
  for (const SegmentOnDisk& cut : take_cut_segments(segments)) {
    wrong_.push_back({cut.path, wrong_size_text(cut, *segments) +
                                    ": no kvmd starts here, until a copy of it is put back or the "
                                    "file is removed"});
  }
  return Status::ok();
}

Status DiskView::attach() {
  std::vector<SegmentOnDisk> segments;
  KVM_TRY(find_files(&segments));
  n_segments_ = static_cast<uint32_t>(segments.size());
  KVM_TRY_ASSIGN(io_,
                 open_disk_io(DiskBackend::kAny, {.n_files = n_segments_ + kManifestFiles,
                                                  .queue_depth = DiskReader::kMaxReads,
                                                  .buffer_bytes = uint64_t{kPieces} * kPieceBytes,
                                                  .is_read_only = true}));
  std::vector<FoundFile> found;
  for (SegmentOnDisk& segment : segments) {
    const auto file = static_cast<uint32_t>(files_.size());
    KVM_TRY_ASSIGN(const uint64_t size_bytes, io_->attach(file, segment.path));
    found.push_back({file, size_bytes});
    files_.push_back({std::move(segment.path), size_bytes, segment.directory});
  }
  for (uint32_t slot = 0; slot < kManifestSlots; ++slot) {
    for (uint32_t copy = 0; copy < kManifestCopies; ++copy) {
      for (uint32_t d = 0; d < paths_.size() && !manifests_[slot][copy].has_value(); ++d) {
        const auto file = static_cast<uint32_t>(files_.size());
        const std::string path = paths_[d] + "/" + manifest_file_name(slot, copy);
        const Result<uint64_t> size_bytes = io_->attach(file, path);
        if (size_bytes.status().code() == KVM_ERR_NOT_FOUND) {
          continue;
        }
        KVM_TRY(size_bytes.status());
        files_.push_back({path, size_bytes.value(), d});
        if (size_bytes.value() % kManifestBlockBytes != 0) {
          wrong_.push_back({path, "it has " + bytes_text(size_bytes.value()) +
                                      ", and no whole number of blocks of 4096"});
        }
        // What is behind the last whole block would never be read.
        manifests_[slot][copy] =
            FoundFile{file, align_down(size_bytes.value(), kManifestBlockBytes)};
      }
    }
  }
  KVM_TRY_ASSIGN(found_, find_objects(io_.get(), found, manifests_, io_->buffers(), kPieceBytes));
  found_.is_list_lost |= must_have_list_ && !found_.manifest.has_value();
  headers_.assign(n_segments_, -1);
  for (size_t i = 0; i < found_.segments.size(); ++i) {
    headers_[found_.segments[i].file.file] = static_cast<int32_t>(i);
  }
  return Status::ok();
}

const FoundObject* DiskView::object(std::string_view key) const {
  const auto found = std::find_if(found_.objects.begin(), found_.objects.end(),
                                  [&](const FoundObject& one) { return one.key == key; });
  return found == found_.objects.end() ? nullptr : &*found;
}

const SegmentHeader* DiskView::header_of(uint32_t file) const {
  return headers_[file] < 0 ? nullptr
                            : &found_.segments[static_cast<size_t>(headers_[file])].header;
}

bool DiskView::read_bytes(uint32_t file, uint64_t begin, std::span<std::byte> to) {
  return DiskReader(io_.get(), io_->buffers(), kPieceBytes).read(file, begin, to);
}

Status DiskView::check_page(const FoundPage& page, std::span<const std::byte> record) const {
  const SegmentHeader& header = *header_of(page.segment);
  const RecordHeader expected{.name = page.name,
                              .run_id = header.run_id,
                              .generation = header.generation,
                              .offset = offset_of(page.unit),
                              .segment = header.segment,
                              .size_bytes = page.size_bytes};
  uint32_t page_crc = 0;
  const char* reason = check_record_header(expected, record, &page_crc);
  if (reason == nullptr && crc32c(record.subspan(sizeof(RecordHeader))) != page_crc) {
    reason = "the checksum of the page does not match";
  }
  return reason == nullptr
             ? Status::ok()
             : Status(KVM_ERR_CORRUPT, files_[page.segment].path + ", offset " +
                                           std::to_string(offset_of(page.unit)) + ": " + reason);
}

Status DiskView::read_pages(std::span<const uint32_t> parts, const TakePage& take) {
  DiskReader reader(io_.get(), io_->buffers(), kPieceBytes);
  const auto page_of = [&](size_t i) -> const FoundPage& { return found_.pages[parts[i]]; };
  const auto bytes_of = [&](size_t i) { return sizeof(RecordHeader) + page_of(i).size_bytes; };
  std::vector<std::vector<std::byte>> records;
  for (size_t begin = 0; begin < parts.size();) {
    uint64_t sum = 0;
    size_t end = begin;
    while (end < parts.size() && end - begin < kBatchPages &&
           (end == begin || sum + bytes_of(end) <= kBatchBytes)) {
      sum += bytes_of(end++);
    }
    records.resize(end - begin);
    std::vector<size_t> small;
    for (size_t i = begin; i < end; ++i) {
      records[i - begin].assign(bytes_of(i), std::byte{});
      if (bytes_of(i) <= reader.max_bytes()) {
        small.push_back(i);
      } else {
        (void)reader.read(page_of(i).segment, offset_of(page_of(i).unit), records[i - begin]);
      }
    }
    reader.run(
        small.size(),
        [&](size_t s) {
          const FoundPage& page = page_of(small[s]);
          return DiskReader::Stretch{page.segment, offset_of(page.unit), bytes_of(small[s])};
        },
        [&](size_t s, std::span<const std::byte> bytes) {
          std::copy(bytes.begin(), bytes.end(), records[small[s] - begin].begin());
        });
    KVM_TRY(reader.error());
    for (size_t i = begin; i < end; ++i) {
      const std::span<const std::byte> record = records[i - begin];
      KVM_TRY(check_page(page_of(i), record));
      KVM_TRY(take(i, record.subspan(sizeof(RecordHeader))));
    }
    begin = end;
  }
  return Status::ok();
}

Result<std::vector<std::byte>> DiskView::read_body(const FoundObject& object) {
  const std::span<const uint32_t> chunks = std::span(object.parts).subspan(object.n_pages);
  std::vector<std::byte> stream;
  KVM_TRY(read_pages(chunks, [&](size_t, std::span<const std::byte> chunk) {
    stream.insert(stream.end(), chunk.begin(), chunk.end());
    return Status::ok();
  }));
  ObjectHeader header;
  const uint64_t n_names = object.n_chunks - 1 + uint64_t{object.n_pages};
  const std::span<const std::byte> bytes(stream);
  if (!read_object_header(bytes, &header) || header.n_pages != object.n_pages ||
      header.body_bytes != object.body_bytes || header.n_chunks != object.n_chunks ||
      bytes.size() != sizeof(header) + n_names * sizeof(uint64_t) + object.body_bytes ||
      header.stream_crc != crc32c(bytes.subspan(sizeof(header)))) {
    return Status(KVM_ERR_CORRUPT, "the checksum of its body does not match, or its size");
  }
  stream.erase(stream.begin(), stream.end() - static_cast<ptrdiff_t>(object.body_bytes));
  return stream;
}

}  // namespace kvm::tiers
