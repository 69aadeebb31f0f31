// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/disk_recovery.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "base/clock.h"
#include "tiers/disk/crc32c.h"
#include "tiers/disk/disk_reader.h"

namespace kvm::tiers {
namespace {

constexpr uint64_t kBlock = kMaxDiskBlockBytes;
using Stretch = DiskReader::Stretch;

class Finder {
 public:
  Finder(DiskIo* io, std::span<std::byte> buffers, uint32_t piece_bytes)
      : reader_(io, buffers, piece_bytes) {}

  Result<Found> find(std::span<const FoundFile> segments,
                     const std::optional<FoundFile> (&manifests)[kManifestSlots][kManifestCopies]) {
    const uint64_t begin_ns = now_ns();
    find_manifest(manifests);
    find_segments(segments);
    if (state_.has_value()) {
      find_records(found_.segments);
    }
    // What cannot be read may be there nevertheless, and must not be taken for free space.
    KVM_TRY(reader_.error());
    if (state_.has_value()) {
      find_parts();
      choose_copies();
      build_objects();
    }
    found_.report.duration_ns = now_ns() - begin_ns;
    return std::move(found_);
  }

  Result<bool> has_chunks(std::span<const FoundSegment> segments,
                          const std::function<void(size_t)>& on_progress) {
    for (size_t i = 0; i < segments.size(); ++i) {
      const FoundSegment& segment = segments[i];
      records_.clear();
      find_records({&segment, 1});
      std::erase_if(records_, [](const Record& record) {
        return record.page.size_bytes < sizeof(ObjectHeader);
      });
      bool has_one = false;
      reader_.run(
          records_.size(),
          [&](size_t r) {
            return Stretch{segment.file.file, offset_of(records_[r].page.unit),
                           sizeof(RecordHeader) + sizeof(ObjectHeader)};
          },
          [&](size_t r, std::span<const std::byte> bytes) {
            RecordHeader header;
            ObjectHeader object;
            has_one |= !bytes.empty() &&
                       read_record_header(bytes, segment.header, offset_of(records_[r].page.unit),
                                          &header) &&
                       read_object_header(bytes.subspan(sizeof(header)), &object);
          });
      if (has_one) {
        return true;
      }
      KVM_TRY(reader_.error());
      if (on_progress) {
        on_progress(i + 1);
      }
    }
    return false;
  }

 private:
  struct Record {
    FoundPage page;
    bool operator<(const Record& other) const { return page.name < other.page.name; }
  };
  struct Object {
    std::string key;
    ManifestState::Object manifest;
    ObjectHeader header;
    std::vector<uint64_t> names;  // of all chunks, then of pages, where these were read
    bool is_read = false;
    std::vector<uint64_t> unread;  // else: chunks that have them, and are not whole
  };

  void find_manifest(const std::optional<FoundFile> (&manifests)[kManifestSlots][kManifestCopies]) {
    for (uint32_t slot = 0; slot < kManifestSlots; ++slot) {
      std::vector<std::byte> bytes[kManifestCopies];
      for (uint32_t copy = 0; copy < kManifestCopies; ++copy) {
        if (manifests[slot][copy].has_value()) {
          // What cannot be read of it is zero.
          bytes[copy].resize(manifests[slot][copy]->size_bytes);
          (void)reader_.read(manifests[slot][copy]->file, 0, bytes[copy]);
        }
      }
      ManifestState state;
      bool counted = false;
      const bool is_read = read_manifest({bytes[0], bytes[1]}, &state, &counted);
      const bool is_cut =
          std::max(bytes[0].size(), bytes[1].size()) < kMinManifestBlocks * kManifestBlockBytes;
      if (!is_read || is_cut) {
        // What counted behind the cut is not there.
        found_.is_list_lost |= counted || is_read;
      } else if (!state_.has_value() || state.number > state_->number) {
        state_ = std::move(state);
        state_->slot = slot;
        found_.list_faults = find_manifest_faults({bytes[0], bytes[1]}, state_->number);
        for (uint32_t copy = 0; copy < kManifestCopies; ++copy) {
          if (manifests[slot][copy].has_value() && bytes[copy].empty()) {
            found_.list_faults.push_back({.copy = copy});  // it was cut off to nothing
          }
        }
      }
    }
    found_.is_list_lost &= !state_.has_value();
    if (state_.has_value()) {
      found_.manifest = state_->number;
      found_.manifest_slot = state_->slot;
      found_.run_number = state_->run_number;
      found_.report.n_damaged_blocks = state_->n_damaged_blocks;
      found_.report.n_torn_blocks = state_->n_torn_blocks;
    }
  }

  void find_segments(std::span<const FoundFile> files) {
    reader_.run(
        files.size(),
        [&](size_t i) {
          return Stretch{files[i].file, 0, sizeof(SegmentHeader)};
        },
        [&](size_t i, std::span<const std::byte> bytes) {
          SegmentHeader header;
          if (read_segment_header(bytes, &header) && header.segment_bytes == files[i].size_bytes) {
            found_.segments.push_back({files[i], header});
            found_.run_number = std::max(found_.run_number, header.run_number);
          } else if (std::any_of(bytes.begin(), bytes.end(),
                                 [](std::byte byte) { return byte != std::byte{}; })) {
            found_.headless.push_back(files[i].file);
          }
        });
  }

  void find_records(std::span<const FoundSegment> segments) {
    std::vector<size_t> untabled;
    std::vector<std::pair<size_t, TableTrailer>> tabled;
    reader_.run(
        segments.size(),
        [&](size_t i) {
          return Stretch{segments[i].file.file, segments[i].file.size_bytes - sizeof(TableTrailer),
                         sizeof(TableTrailer)};
        },
        [&](size_t i, std::span<const std::byte> bytes) {
          TableTrailer trailer;
          if (read_table_trailer(bytes, segments[i].header, &trailer)) {
            tabled.emplace_back(i, trailer);
          } else {
            untabled.push_back(i);
          }
        });
    for (const auto& [i, trailer] : tabled) {
      if (!read_table(segments[i], trailer)) {
        untabled.push_back(i);
      }
    }
    found_.report.n_open_segments = untabled.size();
    for (const size_t i : untabled) {
      scan(segments[i]);
    }
    std::stable_sort(records_.begin(), records_.end());
  }

  bool read_table(const FoundSegment& segment, const TableTrailer& trailer) {
    std::vector<TableEntry> entries(trailer.n_records);
    if (!reader_.read(segment.file.file, trailer.offset,
                      std::as_writable_bytes(std::span(entries))) ||
        !check_table(trailer, segment.header, entries)) {
      return false;
    }
    for (const TableEntry& entry : entries) {
      records_.push_back({{entry.name, segment.file.file, entry.unit, entry.size_bytes}});
    }
    return true;
  }

  // From record to record. Where there is none, which may be what a write has left that was not
  // ended, or one that is damaged, it goes on at each place where one can begin.
  void scan(const FoundSegment& segment) {
    const uint64_t piece = align_down(reader_.max_bytes(), kBlock);
    const uint64_t end = segment.header.segment_bytes;
    uint64_t at = kSegmentHeaderBytes;
    while (at < end) {
      const uint64_t begin = align_down(at, kBlock);
      const uint64_t n_bytes = std::min(piece, end - begin);
      reader_.run(
          1,
          [&](size_t) {
            return Stretch{segment.file.file, begin, n_bytes};
          },
          [&](size_t, std::span<const std::byte> bytes) {
            if (bytes.empty()) {
              at = begin + n_bytes;
              return;
            }
            while (at < begin + n_bytes) {
              RecordHeader header;
              const std::span<const std::byte> here = bytes.subspan(at - begin);
              if (read_record_header(here, segment.header, at, &header)) {
                records_.push_back(
                    {{header.name, segment.file.file, static_cast<uint32_t>(at / kRecordUnitBytes),
                      header.size_bytes}});
                at += record_bytes(header.size_bytes);
                continue;
              }
              at += kRecordUnitBytes;
            }
          });
    }
  }

  std::pair<size_t, size_t> range_of(uint64_t name) const {
    const auto range = std::equal_range(records_.begin(), records_.end(), Record{{.name = name}});
    return {static_cast<size_t>(range.first - records_.begin()),
            static_cast<size_t>(range.second - records_.begin())};
  }

  // The page of a record, out of what was read from where it begins. Empty: it is not whole.
  std::span<const std::byte> page_of(const FoundPage& page,
                                     std::span<const std::byte> record) const {
    const auto segment =
        std::find_if(found_.segments.begin(), found_.segments.end(),
                     [&](const FoundSegment& s) { return s.file.file == page.segment; });
    RecordHeader header;
    if (record.size() < sizeof(header) + page.size_bytes ||
        !read_record_header(record, segment->header, offset_of(page.unit), &header) ||
        header.name != page.name || header.size_bytes != page.size_bytes) {
      return {};
    }
    const std::span<const std::byte> bytes = record.subspan(sizeof(header), page.size_bytes);
    return crc32c(bytes) == header.page_crc ? bytes : std::span<const std::byte>();
  }

  // Names of chunks and pages, from the first chunks; where these go on, from the next ones.
  void find_parts() {
    for (auto& [key, object] : state_->objects) {
      objects_.push_back({key, std::move(object), {}, {}, false, {}});
    }
    std::vector<std::vector<std::byte>> heads(objects_.size());
    read_chunks(
        objects_.size(), [&](size_t i) { return objects_[i].manifest.header.first_chunk; },
        [&](size_t i, std::span<const std::byte> chunk) {
          if (read_object_header(chunk, &objects_[i].header)) {
            const ObjectHeader& header = objects_[i].header;
            const uint64_t n_wanted =
                sizeof(header) + (header.n_chunks - 1 + uint64_t{header.n_pages}) * 8;
            heads[i].assign(
                chunk.begin(),
                chunk.begin() + static_cast<ptrdiff_t>(std::min<uint64_t>(n_wanted, chunk.size())));
          }
        });
    for (size_t i = 0; i < objects_.size(); ++i) {
      read_names(&objects_[i], std::move(heads[i]));
    }
  }

  void read_names(Object* object, std::vector<std::byte> head) {
    const ObjectHeader& header = object->header;
    const ManifestEntryHeader& entry = object->manifest.header;
    object->unread = {entry.first_chunk};
    if (head.empty() || header.n_pages != entry.n_pages || header.body_bytes != entry.body_bytes) {
      return;
    }
    const uint64_t n_names = header.n_chunks - 1 + uint64_t{header.n_pages};
    const uint64_t end = sizeof(header) + n_names * sizeof(uint64_t);
    const auto name_at = [&](uint64_t i) {
      uint64_t name = 0;
      std::memcpy(&name, head.data() + sizeof(header) + i * sizeof(name), sizeof(name));
      return name;
    };
    if (head.size() < std::min<uint64_t>(end, kChunkBytes)) {
      return;
    }
    // The names of all chunks are in the first.
    const uint64_t n_more = (end + kChunkBytes - 1) / kChunkBytes - 1;
    head.resize(end);
    std::vector<bool> is_read(n_more);
    read_chunks(
        n_more, [&](size_t i) { return name_at(i); },
        [&](size_t i, std::span<const std::byte> chunk) {
          const uint64_t at = (i + 1) * kChunkBytes;
          const uint64_t n = std::min<uint64_t>(end - at, kChunkBytes);
          is_read[i] = chunk.size() >= n;
          if (is_read[i]) {
            std::copy_n(chunk.begin(), n, head.begin() + static_cast<ptrdiff_t>(at));
          }
        });
    object->unread.clear();
    for (uint64_t i = 0; i < n_more; ++i) {
      if (!is_read[i]) {
        object->unread.push_back(name_at(i));
      }
    }
    if (!object->unread.empty()) {
      return;
    }
    object->names.reserve(n_names + 1);
    object->names.push_back(entry.first_chunk);
    for (uint64_t i = 0; i < n_names; ++i) {
      object->names.push_back(name_at(i));
    }
    object->is_read = true;
  }

  // Calls take(i, chunk) for each of n chunks that is whole, from the first copy that is.
  template <typename NameOf, typename Take>
  void read_chunks(size_t n, NameOf name_of, Take take) {
    struct Try {
      size_t index;
      size_t record;
      size_t end;
    };
    std::vector<Try> tries;
    for (size_t i = 0; i < n; ++i) {
      const auto [begin, end] = range_of(name_of(i));
      if (begin != end) {
        tries.push_back({i, begin, end});
      }
    }
    while (!tries.empty()) {
      std::vector<Try> next;
      const auto end_try = [&](const Try& one, std::span<const std::byte> record) {
        const std::span<const std::byte> chunk = page_of(records_[one.record].page, record);
        if (!chunk.empty()) {
          take(one.index, chunk);
        } else if (one.record + 1 != one.end) {
          next.push_back({one.index, one.record + 1, one.end});
        }
      };
      // Of large ones each is read in pieces.
      std::erase_if(tries, [&](const Try& one) {
        const FoundPage& page = records_[one.record].page;
        const bool is_large = sizeof(RecordHeader) + page.size_bytes > reader_.max_bytes();
        if (is_large) {
          end_try(one, read_record(page));
        }
        return is_large;
      });
      reader_.run(
          tries.size(),
          [&](size_t t) {
            const FoundPage& page = records_[tries[t].record].page;
            return Stretch{page.segment, offset_of(page.unit),
                           sizeof(RecordHeader) + page.size_bytes};
          },
          [&](size_t t, std::span<const std::byte> record) { end_try(tries[t], record); });
      tries = std::move(next);
    }
  }

  // A record that was moved may be there twice, and one of the two not whole: of names that objects
  // have, one copy stays in records_ that is.
  void choose_copies() {
    std::vector<uint64_t> twice;
    for (size_t i = 1; i < records_.size(); ++i) {
      if (records_[i].page.name == records_[i - 1].page.name) {
        twice.push_back(records_[i].page.name);
      }
    }
    twice.erase(std::unique(twice.begin(), twice.end()), twice.end());
    if (twice.empty()) {
      return;
    }
    std::vector<uint64_t> named;
    for (const Object& object : objects_) {
      named.insert(named.end(), object.names.begin(), object.names.end());
    }
    std::sort(named.begin(), named.end());
    std::erase_if(twice, [&](uint64_t name) {
      return !std::binary_search(named.begin(), named.end(), name);
    });
    for (const uint64_t name : twice) {
      const auto [begin, end] = range_of(name);
      for (size_t i = begin; i < end; ++i) {
        if (!page_of(records_[i].page, read_record(records_[i].page)).empty()) {
          std::swap(records_[begin], records_[i]);
          break;
        }
      }
    }
  }

  // Empty: it cannot be read.
  std::vector<std::byte> read_record(const FoundPage& page) {
    std::vector<std::byte> record(sizeof(RecordHeader) + page.size_bytes);
    const bool is_read = reader_.read(page.segment, offset_of(page.unit), record);
    return is_read ? record : std::vector<std::byte>();
  }

  void build_objects() {
    std::vector<uint32_t> page_of_record(records_.size(), UINT32_MAX);
    for (Object& object : objects_) {
      const ManifestEntryHeader& entry = object.manifest.header;
      FoundObject made{.key = std::move(object.key),
                       .label = std::move(object.manifest.label),
                       .page_bytes = entry.page_bytes,
                       .body_bytes = entry.body_bytes,
                       .n_pages = entry.n_pages,
                       .parts = {},
                       .n_chunks = object.is_read ? object.header.n_chunks : 0,
                       .header = entry,
                       .is_lost = !object.is_read,
                       .lost_parts = {}};
      for (const uint64_t name : object.unread) {
        const auto [begin, end] = range_of(name);
        made.lost_parts.push_back(begin == end ? FoundPage{.name = name} : records_[begin].page);
      }
      // Pages first.
      std::rotate(object.names.begin(), object.names.begin() + made.n_chunks, object.names.end());
      for (const uint64_t name : object.names) {
        const auto [begin, end] = range_of(name);
        if (begin == end) {
          made.is_lost = true;
          made.lost_parts.push_back({.name = name});
          continue;
        }
        uint32_t& page = page_of_record[begin];
        if (page == UINT32_MAX) {
          page = static_cast<uint32_t>(found_.pages.size());
          found_.pages.push_back(records_[begin].page);
        }
        made.parts.push_back(page);
      }
      found_.report.n_lost_objects += made.is_lost ? 1 : 0;
      found_.report.n_pages += made.n_pages;
      found_.report.page_bytes += made.page_bytes;
      found_.objects.push_back(std::move(made));
    }
    found_.report.n_objects = found_.objects.size();
  }

  DiskReader reader_;
  Found found_;
  std::optional<ManifestState> state_;
  std::vector<Record> records_;  // by name
  std::vector<Object> objects_;
};

}  // namespace

Result<bool> has_chunks(DiskIo* io, std::span<const FoundSegment> segments,
                        std::span<std::byte> buffers, uint32_t piece_bytes,
                        const std::function<void(size_t)>& on_progress) {
  try {
    return Finder(io, buffers, piece_bytes).has_chunks(segments, on_progress);
  } catch (const std::bad_alloc&) {
    return Status::fixed(KVM_ERR_NO_MEMORY,
                         "disk: there is no memory to look at what its files hold");
  }
}

Result<Found> find_objects(
    DiskIo* io, std::span<const FoundFile> segments,
    const std::optional<FoundFile> (&manifests)[kManifestSlots][kManifestCopies],
    std::span<std::byte> buffers, uint32_t piece_bytes) {
  try {
    return Finder(io, buffers, piece_bytes).find(segments, manifests);
  } catch (const std::bad_alloc&) {
    return Status::fixed(KVM_ERR_NO_MEMORY,
                         "disk: there is no memory to look at what its files hold");
  }
}

}  // namespace kvm::tiers
