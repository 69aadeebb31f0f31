// SPDX-License-Identifier: Apache-2.0
// What lies in the files of the disk tier; docs/disk_format.md shows it byte by byte.
//
//   segment file = segment header (4 KiB) | record | record | zeros up to 4 KiB | record | ...
//   record       = record header (64 bytes) | page | up to a multiple of 64 bytes
//
// Records are appended, and a file is begun again as a whole: a place within one generation of a
// segment is written once. So generation and offset name a record, and one left over from an older
// generation, or from another run, is told by its header.
//
// Threads: pure functions.
#ifndef KVM_TIERS_DISK_DISK_FORMAT_H_
#define KVM_TIERS_DISK_DISK_FORMAT_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"

namespace kvm::tiers {

// DISK: all of this is frozen by kDiskFormatVersion. Numbers are little-endian.
inline constexpr uint16_t kDiskFormatVersion = 1;
inline constexpr uint32_t kSegmentMagic = 0x53'4d'56'4b;  // "KVMS"
inline constexpr uint32_t kRecordMagic = 0x52'4d'56'4b;   // "KVMR"
inline constexpr uint32_t kSegmentHeaderBytes = 4096;
inline constexpr uint32_t kRecordUnitBytes = 64;  // offsets of records are multiples of it

struct SegmentHeader {
  uint32_t magic = kSegmentMagic;
  uint16_t version = kDiskFormatVersion;
  uint16_t header_bytes = kSegmentHeaderBytes;
  uint64_t run_id = 0;         // of the tier that wrote it, drawn anew whenever one is opened
  uint64_t generation = 0;     // how often a segment was begun before it, in this run
  uint64_t segment_bytes = 0;  // of the file
  uint32_t segment = 0;
  uint32_t reserved[6] = {};  // zeros; so is the rest of the 4 KiB
  uint32_t header_crc = 0;    // CRC-32C of the bytes before it
};
static_assert(sizeof(SegmentHeader) == 64 && offsetof(SegmentHeader, header_crc) == 60);

struct RecordHeader {
  uint32_t magic = kRecordMagic;
  uint16_t version = kDiskFormatVersion;
  uint16_t header_bytes = 64;
  uint64_t sequence = 0;  // one more for each record of a run
  uint64_t run_id = 0;
  uint64_t generation = 0;
  uint64_t offset = 0;  // of the record, in its file
  uint32_t segment = 0;
  uint32_t place = 0;
  uint32_t size_bytes = 0;  // of the page
  uint32_t page_crc = 0;    // CRC-32C of the page
  uint32_t reserved = 0;
  uint32_t header_crc = 0;  // CRC-32C of the bytes before it
};
static_assert(sizeof(RecordHeader) == 64 && offsetof(RecordHeader, header_crc) == 60);
static_assert(sizeof(RecordHeader) == kRecordUnitBytes);

constexpr uint64_t align_down(uint64_t n, uint64_t to) { return n / to * to; }
constexpr uint64_t align_up(uint64_t n, uint64_t to) { return align_down(n + to - 1, to); }
// In a file, of what begins at a unit.
constexpr uint64_t offset_of(uint32_t unit) { return uint64_t{unit} * kRecordUnitBytes; }
// Of the record of a page, header and all.
constexpr uint64_t record_bytes(uint32_t page_bytes) {
  return sizeof(RecordHeader) + align_up(page_bytes, kRecordUnitBytes);
}

// Writes a header with its checksum to `to`; of a segment all 4 KiB.
void write_segment_header(SegmentHeader header, std::byte* to);
void write_record_header(RecordHeader header, std::byte* to);

// Says what is wrong with the header at `from`, where `expected` (its checksums apart) should be;
// null: nothing. Sets *page_crc to what the page has to have.
const char* check_record_header(const RecordHeader& expected, std::span<const std::byte> from,
                                uint32_t* page_crc);

enum class SegmentFile : uint8_t {
  kOurs,     // of this version
  kForeign,  // of another version
  kNone,     // no segment header
};
// What a file with these first bytes is; *version is set of both kinds of segments.
SegmentFile kind_of_file(std::span<const std::byte> first, uint16_t* version);

}  // namespace kvm::tiers

#endif  // KVM_TIERS_DISK_DISK_FORMAT_H_
