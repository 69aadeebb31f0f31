// SPDX-License-Identifier: Apache-2.0
// What an owner before has left in the files of a disk tier: its objects, and where the pages are
// that these name.
//
//   manifest --> objects --> first chunks --> names of pages
//   tables of segments, or where there is none all of its record headers --> where each name lies
//
// Nothing is written. Memory: 40 bytes a record while it runs; what is returned.
// disk_view.h has the files of an owner that is gone, for who wants no more than to look.
//
// Threads: that of the DiskIo.
#ifndef KVM_TIERS_DISK_DISK_RECOVERY_H_
#define KVM_TIERS_DISK_DISK_RECOVERY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "tiers/disk/disk_format.h"
#include "tiers/disk/disk_io.h"
#include "tiers/disk/manifest.h"
#include "tiers/object_store.h"

namespace kvm::tiers {

// A file that the DiskIo has attached.
struct FoundFile {
  uint32_t file = 0;
  uint64_t size_bytes = 0;
};

struct FoundPage {
  uint64_t name = 0;
  uint32_t segment = 0;  // its file
  uint32_t unit = 0;
  uint32_t size_bytes = 0;
};

struct FoundObject {
  std::string key;
  std::string label;
  uint64_t page_bytes = 0;
  uint64_t body_bytes = 0;
  uint32_t n_pages = 0;
  // Of pages, then of chunks: indexes into Found::pages. Of a lost one, those that are there.
  std::vector<uint32_t> parts;
  uint32_t n_chunks = 0;
  ManifestEntryHeader header;  // as the manifest has it
  bool is_lost = false;        // not all is there
  // Of a lost one: records that are not there, with a size of 0, and the one of names that is there
  // and not as it was written.
  std::vector<FoundPage> lost_parts;
};

struct FoundSegment {
  FoundFile file;
  SegmentHeader header;
};

struct Found {
  std::optional<uint64_t> manifest;  // the number of the last one
  uint32_t manifest_slot = 0;
  bool is_list_lost = false;  // there was one, of which too much is damaged
  std::vector<ManifestFault> list_faults;
  uint32_t run_number = 0;             // the largest of all that wrote here
  std::vector<FoundSegment> segments;  // that have a header of this version
  // Files of segments that were written, and whose headers cannot be read.
  std::vector<uint32_t> headless;
  std::vector<FoundPage> pages;  // that objects name, each once
  std::vector<FoundObject> objects;
  RecoveryReport report;
};

// manifests: [slot][copy], nullopt where there is none. buffers: aligned, of at least two pieces of
// piece_bytes, a multiple of 4 KiB. An object of which the body cannot be read is lost.
// Fails: IO: manifests, or where the records of segments are, cannot be read; NO_MEMORY.
Result<Found> find_objects(
    DiskIo* io, std::span<const FoundFile> segments,
    const std::optional<FoundFile> (&manifests)[kManifestSlots][kManifestCopies],
    std::span<std::byte> buffers, uint32_t piece_bytes);

// Whether an object was ever put into one of these segments, whatever the manifest says. Reads
// tables and the first bytes of records; where there is no table, the segment. on_progress: is told
// how many of the segments were looked at. Fails: IO; NO_MEMORY.
Result<bool> has_chunks(DiskIo* io, std::span<const FoundSegment> segments,
                        std::span<std::byte> buffers, uint32_t piece_bytes,
                        const std::function<void(size_t)>& on_progress);

}  // namespace kvm::tiers

#endif  // KVM_TIERS_DISK_DISK_RECOVERY_H_
