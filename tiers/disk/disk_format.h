// SPDX-License-Identifier: Apache-2.0
// What lies in the files of the disk tier; docs/disk_format.md shows it byte by byte.
//
//   segment file = segment header (4 KiB) | record | record | zeros up to 4 KiB | record | ...
//                  | table of the records, once there will be no more
//   record       = record header (64 bytes) | page | up to a multiple of 64 bytes
//   object       = object header (64 bytes) | names of records | body, cut into chunks; each is a
//                  page of a record
//
// Records are appended, and a file is begun again as a whole: a place within one generation of a
// segment is written once. So run, generation and offset tell a record from one left over. Its name
// tells what it holds: a record that is copied elsewhere keeps its name, and no other ever has it.
//
// What objects there are the manifest says (manifest.h).
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
inline constexpr uint16_t kDiskFormatVersion = 2;
inline constexpr uint32_t kSegmentMagic = 0x53'4d'56'4b;  // "KVMS"
inline constexpr uint32_t kRecordMagic = 0x52'4d'56'4b;   // "KVMR"
inline constexpr uint32_t kTableMagic = 0x54'4d'56'4b;    // "KVMT"
inline constexpr uint32_t kObjectMagic = 0x4f'4d'56'4b;   // "KVMO"
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
  uint32_t run_number = 0;    // one more than that of every run before, as far as its files show
  uint32_t reserved[5] = {};  // zeros; so is the rest of the 4 KiB
  uint32_t header_crc = 0;    // CRC-32C of the bytes before it
};
static_assert(sizeof(SegmentHeader) == 64 && offsetof(SegmentHeader, header_crc) == 60);

struct RecordHeader {
  uint32_t magic = kRecordMagic;
  uint16_t version = kDiskFormatVersion;
  uint16_t header_bytes = 64;
  uint64_t name = 0;
  uint64_t run_id = 0;
  uint64_t generation = 0;
  uint64_t offset = 0;  // of the record, in its file
  uint32_t segment = 0;
  uint32_t reserved = 0;
  uint32_t size_bytes = 0;  // of the page
  uint32_t page_crc = 0;    // CRC-32C of the page
  uint32_t reserved_too = 0;
  uint32_t header_crc = 0;  // CRC-32C of the bytes before it
};
static_assert(sizeof(RecordHeader) == 64 && offsetof(RecordHeader, header_crc) == 60);
static_assert(sizeof(RecordHeader) == kRecordUnitBytes);

// Names count up within a run, from its first one on; those of later runs are above.
inline constexpr uint32_t kRunBits = 24;  // of its number; the rest counts
inline constexpr uint32_t kMaxRunNumber = (1u << kRunBits) - 1;
constexpr uint64_t first_name(uint32_t run_number) {
  return uint64_t{run_number} << (64 - kRunBits);
}

// One record of the table. Tables list those that are of use when the segment ends.
struct TableEntry {
  uint64_t name = 0;
  uint32_t unit = 0;  // of its offset: kRecordUnitBytes
  uint32_t size_bytes = 0;
  bool operator==(const TableEntry&) const = default;
};
static_assert(sizeof(TableEntry) == 16);

// The last bytes of a segment that has a table.
struct TableTrailer {
  uint32_t magic = kTableMagic;
  uint16_t version = kDiskFormatVersion;
  uint16_t trailer_bytes = 64;
  uint64_t run_id = 0;  // as of the segment's header, like the generation
  uint64_t generation = 0;
  uint64_t offset = 0;  // of the first entry
  uint32_t n_records = 0;
  uint32_t segment = 0;
  uint32_t table_crc = 0;  // CRC-32C of the entries
  uint32_t reserved[4] = {};
  uint32_t header_crc = 0;  // CRC-32C of the bytes before it
};
static_assert(sizeof(TableTrailer) == 64 && offsetof(TableTrailer, header_crc) == 60);

// LIMIT: what is written as one page; segments of kMinSegmentBytes hold one.
inline constexpr uint32_t kChunkBytes = 128 << 10;
// LIMIT: 256 MiB; their names fit into the first.
inline constexpr uint32_t kMaxChunks = 2048;

// The beginning of an object.
struct ObjectHeader {
  uint32_t magic = kObjectMagic;
  uint16_t version = kDiskFormatVersion;
  uint16_t header_bytes = 64;
  uint64_t body_bytes = 0;
  uint32_t n_pages = 0;
  uint32_t n_chunks = 0;               // this one is the first
  uint32_t chunk_bytes = kChunkBytes;  // of each but the last
  // CRC-32C of all behind the header: names of the other chunks, names of the pages, body.
  uint32_t stream_crc = 0;
  uint32_t reserved[7] = {};
  uint32_t header_crc = 0;  // CRC-32C of the bytes before it
};
static_assert(sizeof(ObjectHeader) == 64 && offsetof(ObjectHeader, header_crc) == 60);
// How many chunks an object has, more than kMaxChunks where it is too large.
constexpr uint64_t object_chunks(uint64_t n_pages, uint64_t body_bytes) {
  const uint64_t fixed = sizeof(ObjectHeader) + n_pages * sizeof(uint64_t) + body_bytes;
  // Each but the first takes a name more.
  uint64_t n = 1;
  while (n <= kMaxChunks && fixed + (n - 1) * sizeof(uint64_t) > n * kChunkBytes) {
    const uint64_t all = fixed + (n - 1) * sizeof(uint64_t);
    n = (all + kChunkBytes - 1) / kChunkBytes;
  }
  return n;
}

constexpr uint64_t align_down(uint64_t n, uint64_t to) { return n / to * to; }
constexpr uint64_t align_up(uint64_t n, uint64_t to) { return align_down(n + to - 1, to); }
// In a file, of what begins at a unit.
constexpr uint64_t offset_of(uint32_t unit) { return uint64_t{unit} * kRecordUnitBytes; }
// Of the record of a page, header and all.
constexpr uint64_t record_bytes(uint32_t page_bytes) {
  return sizeof(RecordHeader) + align_up(page_bytes, kRecordUnitBytes);
}

// Of the table of so many records, trailer and all: a multiple of 4 KiB at the end of the file.
constexpr uint64_t table_bytes(uint64_t n_records) {
  return align_up(n_records * sizeof(TableEntry) + sizeof(TableTrailer), kSegmentHeaderBytes);
}

// Writes a header with its checksum to `to`; of a segment all 4 KiB.
void write_segment_header(SegmentHeader header, std::byte* to);
void write_record_header(RecordHeader header, std::byte* to);
// Writes the table of a segment to the table_bytes(records.size()) bytes at `to`.
void write_table(const SegmentHeader& header, std::span<const TableEntry> records, std::byte* to);
void write_object_header(ObjectHeader header, std::byte* to);

// Reads the header of a segment. False: there is none of this version.
bool read_segment_header(std::span<const std::byte> from, SegmentHeader* header);
// Reads the header of whatever record of the segment is at `offset`. False: there is none.
bool read_record_header(std::span<const std::byte> from, const SegmentHeader& segment,
                        uint64_t offset, RecordHeader* header);
// Reads the trailer of a segment's table. False: it has none, or what it says cannot be.
bool read_table_trailer(std::span<const std::byte> from, const SegmentHeader& segment,
                        TableTrailer* trailer);
// Whether these are the entries of the table, and each is where a record can be.
bool check_table(const TableTrailer& trailer, const SegmentHeader& segment,
                 std::span<const TableEntry> entries);
// Reads the header of an object. False: there is none, or what it says cannot be.
bool read_object_header(std::span<const std::byte> first_chunk, ObjectHeader* header);

// Says what is wrong with the header at `from`, where `expected` (its checksums apart) should be;
// null: nothing. Sets *page_crc to what the page has to have.
const char* check_record_header(const RecordHeader& expected, std::span<const std::byte> from,
                                uint32_t* page_crc);

enum class SegmentFile : uint8_t {
  kOurs,   // of this version
  kOlder,  // of one in which nothing outlived the process
  kNewer,  // of a later version
  kNone,   // no segment header
};
// What a file with these first bytes is; *version is set of both kinds of segments.
SegmentFile kind_of_file(std::span<const std::byte> first, uint16_t* version);

}  // namespace kvm::tiers

#endif  // KVM_TIERS_DISK_DISK_FORMAT_H_
