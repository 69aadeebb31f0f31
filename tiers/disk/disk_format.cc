// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/disk_format.h"

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
  if (found.place != expected.place) {
    return "the record is of another place";
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
  return opening.version == kDiskFormatVersion ? SegmentFile::kOurs : SegmentFile::kForeign;
}

}  // namespace kvm::tiers
