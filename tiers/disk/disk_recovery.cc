// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/disk_recovery.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <new>
#include <utility>

#include "base/assert.h"
#include "base/clock.h"
#include "tiers/disk/crc32c.h"

namespace kvm::tiers {
namespace {

constexpr uint64_t kBlock = kMaxDiskBlockBytes;

// A DiskReader reads stretches of files, many at a time.
class DiskReader {
 public:
  struct Read : DiskOp {
    // What of it is wanted: [begin, begin + n_bytes) of the file.
    uint64_t begin = 0;
    uint64_t n_bytes = 0;
    size_t index = 0;
  };
  // Takes the bytes, which are gone when it returns. Empty: they could not be read.
  using Taker = std::function<void(size_t index, std::span<const std::byte> bytes)>;
  // Why, of the last that could not. OK: all could.
  const Status& error() const { return error_; }

  // LIMIT: reads at a time; more gain nothing.
  static constexpr size_t kMaxReads = 32;

  DiskReader(DiskIo* io, std::span<std::byte> buffers, uint32_t piece_bytes)
      : io_(io),
        buffers_(buffers),
        piece_bytes_(piece_bytes),
        reads_(std::min(kMaxReads, buffers.size() / piece_bytes)) {
    KVM_ASSERT(!reads_.empty());
    for (size_t i = 0; i < reads_.size(); ++i) {
      reads_[i].data = buffers.data() + i * piece_bytes;
      idle_.push_back(&reads_[i]);
    }
  }

  // The largest stretch that can be read at once, wherever it begins.
  uint64_t max_bytes() const { return piece_bytes_ - 2 * kBlock; }

  // Reads n stretches: of(index) says which; take() is called for each, in any order.
  // REQUIRES: none is empty, or larger than max_bytes(); each lies within its file.
  template <typename Of>
  void run(size_t n, Of of, const Taker& take) {
    size_t n_begun = 0;
    size_t n_ended = 0;
    while (n_ended < n) {
      std::vector<DiskOp*> begun;
      while (n_begun < n && !idle_.empty()) {
        Read* const read = idle_.back();
        idle_.pop_back();
        const auto [file, begin, n_bytes] = of(n_begun);
        KVM_ASSERT(n_bytes != 0 && n_bytes <= max_bytes());
        read->kind = DiskOp::Kind::kRead;
        read->file = file;
        read->begin = begin;
        read->n_bytes = n_bytes;
        read->index = n_begun++;
        const uint64_t block = io_->block_bytes();
        read->offset = align_down(begin, block);
        read->size_bytes = static_cast<uint32_t>(align_up(begin + n_bytes, block) - read->offset);
        begun.push_back(read);
      }
      io_->submit(begun);
      std::array<DiskOp*, kMaxReads> ended;
      const size_t n_now = io_->reap(ended, UINT64_MAX);
      for (size_t i = 0; i < n_now; ++i) {
        auto* const read = static_cast<Read*>(ended[i]);
        if (!read->status.is_ok()) {
          error_ = read->status;
        }
        const std::span<const std::byte> all(read->data, read->size_bytes);
        take(read->index, read->status.is_ok()
                              ? all.subspan(read->begin - read->offset, read->n_bytes)
                              : std::span<const std::byte>());
        idle_.push_back(read);
      }
      n_ended += n_now;
    }
  }

  struct Stretch {
    uint32_t file;
    uint64_t begin;
    uint64_t n_bytes;
  };

  // The whole of a file, or of what of it can be read: the rest is zero.
  std::vector<std::byte> read_all(const FoundFile& file) {
    std::vector<std::byte> all(file.size_bytes);
    const uint64_t piece = align_down(max_bytes(), kBlock);
    run((all.size() + piece - 1) / piece,
        [&](size_t i) {
          const uint64_t begin = i * piece;
          return Stretch{file.file, begin, std::min<uint64_t>(piece, all.size() - begin)};
        },
        [&](size_t i, std::span<const std::byte> bytes) {
          std::copy(bytes.begin(), bytes.end(), all.begin() + static_cast<ptrdiff_t>(i * piece));
        });
    return all;
  }

 private:
  DiskIo* io_;
  std::span<std::byte> buffers_;
  uint32_t piece_bytes_;
  std::vector<Read> reads_;
  std::vector<Read*> idle_;
  Status error_;
};

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
      find_records();
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

 private:
  struct Record {
    FoundPage page;
    bool operator<(const Record& other) const { return page.name < other.page.name; }
  };
  struct Object {
    std::string key;
    ManifestState::Object manifest;
    ObjectHeader header;
    std::vector<uint64_t> names;  // of all chunks, then of pages, where the header was read
    bool is_read = false;
  };

  void find_manifest(const std::optional<FoundFile> (&manifests)[kManifestSlots][kManifestCopies]) {
    for (uint32_t slot = 0; slot < kManifestSlots; ++slot) {
      std::vector<std::byte> bytes[kManifestCopies];
      for (uint32_t copy = 0; copy < kManifestCopies; ++copy) {
        if (manifests[slot][copy].has_value()) {
          bytes[copy] = reader_.read_all(*manifests[slot][copy]);
        }
      }
      ManifestState state;
      bool counted = false;
      if (!read_manifest({bytes[0], bytes[1]}, &state, &counted)) {
        found_.is_list_lost |= counted;
      } else if (!state_.has_value() || state.number > state_->number) {
        state_ = std::move(state);
        state_->slot = slot;
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
          }
        });
  }

  void find_records() {
    std::vector<size_t> untabled;
    std::vector<std::pair<size_t, TableTrailer>> tabled;
    const std::vector<FoundSegment>& segments = found_.segments;
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
    const std::span<std::byte> to = std::as_writable_bytes(std::span(entries));
    const uint64_t piece = align_down(reader_.max_bytes(), kBlock);
    bool is_read = true;
    reader_.run((to.size() + piece - 1) / piece,
                [&](size_t i) {
                  return Stretch{segment.file.file, trailer.offset + i * piece,
                                 std::min<uint64_t>(piece, to.size() - i * piece)};
                },
                [&](size_t i, std::span<const std::byte> bytes) {
                  is_read &= !bytes.empty();
                  std::copy(bytes.begin(), bytes.end(),
                            to.begin() + static_cast<ptrdiff_t>(i * piece));
                });
    if (!is_read || !check_table(trailer, segment.header, entries)) {
      return false;
    }
    for (const TableEntry& entry : entries) {
      records_.push_back({{entry.name, segment.file.file, entry.unit, entry.size_bytes}});
    }
    return true;
  }

  // From record to record. Where there is none, which may be what a write has left that was not
  // ended, it goes on at each block: the next transfer may have begun there.
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
              at = align_down(at, kBlock) + kBlock;
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
      objects_.push_back({key, std::move(object), {}, {}, false});
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
    bool is_read = true;
    read_chunks(
        n_more, [&](size_t i) { return name_at(i); },
        [&](size_t i, std::span<const std::byte> chunk) {
          const uint64_t at = (i + 1) * kChunkBytes;
          const uint64_t n = std::min<uint64_t>(end - at, kChunkBytes);
          is_read &= chunk.size() >= n;
          if (is_read) {
            std::copy_n(chunk.begin(), n, head.begin() + static_cast<ptrdiff_t>(at));
          }
        });
    if (!is_read) {
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
    const uint64_t n_bytes = sizeof(RecordHeader) + page.size_bytes;
    std::vector<std::byte> record(n_bytes);
    const uint64_t piece = align_down(reader_.max_bytes(), kBlock);
    bool is_read = true;
    reader_.run((n_bytes + piece - 1) / piece,
                [&](size_t i) {
                  return Stretch{page.segment, offset_of(page.unit) + i * piece,
                                 std::min<uint64_t>(piece, n_bytes - i * piece)};
                },
                [&](size_t i, std::span<const std::byte> bytes) {
                  is_read &= !bytes.empty();
                  std::copy(bytes.begin(), bytes.end(),
                            record.begin() + static_cast<ptrdiff_t>(i * piece));
                });
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
                       .is_lost = !object.is_read};
      // Pages first.
      std::rotate(object.names.begin(), object.names.begin() + made.n_chunks, object.names.end());
      for (const uint64_t name : object.names) {
        const auto [begin, end] = range_of(name);
        if (begin == end) {
          made.is_lost = true;
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

Result<Found> find_objects(
    DiskIo* io, std::span<const FoundFile> segments,
    const std::optional<FoundFile> (&manifests)[kManifestSlots][kManifestCopies],
    std::span<std::byte> buffers, uint32_t piece_bytes) {
  try {
    return Finder(io, buffers, piece_bytes).find(segments, manifests);
  } catch (const std::bad_alloc&) {
    return Status::fixed(KVM_ERR_NO_MEMORY,
                         "disk tier: there is no memory to look at what its files hold");
  }
}

}  // namespace kvm::tiers
