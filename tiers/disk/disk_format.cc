// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/disk_format.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "tiers/disk/crc32c.h"

namespace kvm::tiers {
namespace {

static_assert(std::endian::native == std::endian::little, "headers are copied as they are");

// The magic and the version stand where they do in every version; so does the checksum.
struct Opening {
  uint32_t magic;
  uint16_t version;
};

template <typename Header>
uint32_t crc_of(const Header& header) {
  return crc32c({reinterpret_cast<const std::byte*>(&header), offsetof(Header, header_crc)});
}

}  // namespace

void write_segment_header(SegmentHeader header, std::byte* to) {
  header.header_crc = crc_of(header);
  std::memset(to, 0, kSegmentHeaderBytes);
  std::memcpy(to, &header, sizeof(header));
}

void write_record_header(RecordHeader header, std::byte* to) {
  header.header_crc = crc_of(header);
  std::memcpy(to, &header, sizeof(header));
}

void write_table(const SegmentHeader& header, std::span<const TableEntry> records, std::byte* to) {
  const uint64_t all_bytes = table_bytes(records.size());
  std::memset(to, 0, all_bytes);
  std::memcpy(to, records.data(), records.size_bytes());
  TableTrailer trailer{.run_id = header.run_id,
                       .generation = header.generation,
                       .offset = header.segment_bytes - all_bytes,
                       .n_records = static_cast<uint32_t>(records.size()),
                       .segment = header.segment,
                       .table_crc = crc32c(std::as_bytes(records))};
  trailer.header_crc = crc_of(trailer);
  std::memcpy(to + all_bytes - sizeof(trailer), &trailer, sizeof(trailer));
}

void write_object_header(ObjectHeader header, std::byte* to) {
  header.header_crc = crc_of(header);
  std::memcpy(to, &header, sizeof(header));
}

bool read_segment_header(std::span<const std::byte> from, SegmentHeader* header) {
  uint16_t version = 0;
  if (kind_of_file(from, &version) != SegmentFile::kOurs) {
    return false;
  }
  std::memcpy(header, from.data(), sizeof(*header));
  return header->header_bytes == kSegmentHeaderBytes;
}

bool read_record_header(std::span<const std::byte> from, const SegmentHeader& segment,
                        uint64_t offset, RecordHeader* header) {
  const RecordHeader expected;
  if (from.size() < sizeof(*header)) {
    return false;
  }
  std::memcpy(header, from.data(), sizeof(*header));
  return header->magic == expected.magic && header->version == expected.version &&
         header->header_bytes == expected.header_bytes && header->header_crc == crc_of(*header) &&
         header->run_id == segment.run_id && header->generation == segment.generation &&
         header->segment == segment.segment && header->offset == offset &&
         header->size_bytes != 0 &&
         header->size_bytes <= segment.segment_bytes - sizeof(*header) - offset;
}

bool read_table_trailer(std::span<const std::byte> from, const SegmentHeader& segment,
                        TableTrailer* trailer) {
  const TableTrailer expected;
  if (from.size() < sizeof(*trailer)) {
    return false;
  }
  std::memcpy(trailer, from.data(), sizeof(*trailer));
  return trailer->magic == expected.magic && trailer->version == expected.version &&
         trailer->trailer_bytes == expected.trailer_bytes &&
         trailer->header_crc == crc_of(*trailer) && trailer->run_id == segment.run_id &&
         trailer->generation == segment.generation && trailer->segment == segment.segment &&
         table_bytes(trailer->n_records) <= segment.segment_bytes - kSegmentHeaderBytes &&
         trailer->offset == segment.segment_bytes - table_bytes(trailer->n_records);
}

bool check_table(const TableTrailer& trailer, const SegmentHeader& segment,
                 std::span<const TableEntry> entries) {
  if (entries.size() != trailer.n_records || crc32c(std::as_bytes(entries)) != trailer.table_crc) {
    return false;
  }
  return std::all_of(entries.begin(), entries.end(), [&](const TableEntry& entry) {
    const uint64_t at = offset_of(entry.unit);
    return at >= kSegmentHeaderBytes && at < trailer.offset && entry.size_bytes != 0 &&
           record_bytes(entry.size_bytes) <= segment.segment_bytes - at;
  });
}

bool read_object_header(std::span<const std::byte> first_chunk, ObjectHeader* header) {
  const ObjectHeader expected;
  if (first_chunk.size() < sizeof(*header)) {
    return false;
  }
  std::memcpy(header, first_chunk.data(), sizeof(*header));
  const uint64_t n_chunks = header->n_chunks;
  if (header->magic != expected.magic || header->version != expected.version ||
      header->header_bytes != expected.header_bytes || header->header_crc != crc_of(*header) ||
      header->chunk_bytes != kChunkBytes || n_chunks == 0 || n_chunks > kMaxChunks ||
      header->body_bytes > uint64_t{kMaxChunks} * kChunkBytes) {
    return false;
  }
  return n_chunks == object_chunks(header->n_pages, header->body_bytes);
}

const char* check_record_header(const RecordHeader& expected, std::span<const std::byte> from,
                                uint32_t* page_crc) {
  RecordHeader found;
  std::memcpy(&found, from.data(), sizeof(found));
  *page_crc = found.page_crc;
  if (found.magic != expected.magic) {
    return "there is no record";
  }
  if (found.header_crc != crc_of(found)) {
    return "the checksum of the record's header does not match";
  }
  if (found.version != expected.version || found.header_bytes != expected.header_bytes) {
    return "the record is of another version of the format";
  }
  if (found.run_id != expected.run_id || found.generation != expected.generation) {
    return "the record is one that lay there before";
  }
  if (found.segment != expected.segment || found.offset != expected.offset) {
    return "the record belongs to another offset";
  }
  if (found.name != expected.name) {
    return "the record is another one";
  }
  return found.size_bytes == expected.size_bytes ? nullptr : "the record's page has another size";
}

SegmentFile kind_of_file(std::span<const std::byte> first, uint16_t* version) {
  SegmentHeader header;
  if (first.size() < sizeof(header)) {
    return SegmentFile::kNone;
  }
  Opening opening{};
  std::memcpy(&opening, first.data(), sizeof(opening));
  std::memcpy(&header, first.data(), sizeof(header));
  if (opening.magic != kSegmentMagic || header.header_crc != crc_of(header)) {
    return SegmentFile::kNone;
  }
  *version = opening.version;
  return opening.version == kDiskFormatVersion  ? SegmentFile::kOurs
         : opening.version < kDiskFormatVersion ? SegmentFile::kOlder
                                                : SegmentFile::kNewer;
}

}  // namespace kvm::tiers
