// SPDX-License-Identifier: Apache-2.0
// check_disk reads all that objects have in the directories of a DiskView, and says of each object
// whether an owner would find it whole, and of each file what in it is not as it was written.
//
//   manifests, both copies --> headers and tables of segments --> segments from end to end: the
//   checksum of each record --> bodies
//
// Segments in which no object has anything are free space to whoever owns the directories next, and
// are not read. Nor is it damage where what no object names is not whole: it may have been on its
// way when the process ended.
//
// Directories are read at the same time, each from one end of a file to the other.
//
// Threads: one; its time goes into checksums, some 8 GB/s.  Memory: the DiskView's buffers, 24
// bytes a record, and the largest body.
#ifndef KVM_TIERS_DISK_DISK_CHECK_H_
#define KVM_TIERS_DISK_DISK_CHECK_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "tiers/disk/disk_view.h"

namespace kvm::tiers {

struct DiskCheckOptions {
  // Says what is wrong with the body of an object; "": nothing. The body is aligned as memory of
  // the heap is. None: bodies are compared with their checksums alone.
  std::function<std::string(const FoundObject& object, std::span<const std::byte> body)> check_body;
  // Called now and then: bytes that were looked at, of so many.
  std::function<void(uint64_t n_read, uint64_t n_all)> on_progress;
};

// Something that is not as it was written.
struct DiskDamage {
  std::string path;                // of the file, or of a directory
  std::optional<uint64_t> offset;  // in it; none: all of it
  std::string what;
  // Whether something has been lost by it; else it is there a second time, or can be had otherwise.
  bool is_loss = false;
};

struct CheckedObject {
  std::string damage;            // "": it is whole
  uint64_t n_damaged_pages = 0;  // of its pages: those that are damaged, or not there
};

struct DiskCheck {
  // LIMIT: of damages that are described; more are counted.
  static constexpr size_t kMaxDamages = 1000;

  std::vector<CheckedObject> objects;  // as DiskView::found().objects
  std::vector<DiskDamage> damages;
  uint64_t n_damages = 0;
  uint64_t n_damaged_objects = 0;
  uint64_t n_segments = 0;
  uint64_t n_free_segments = 0;    // in which no object has anything
  uint64_t segment_bytes = 0;      // of all segment files
  uint64_t n_live_records = 0;     // that objects name, each once
  uint64_t live_bytes = 0;         // of these, headers and all
  uint64_t n_damaged_records = 0;  // of these
  // That no object names, in segments that were read.
  uint64_t n_dead_records = 0;
  uint64_t dead_bytes = 0;
  uint64_t n_torn_records = 0;  // of these, those that are not whole
  uint64_t n_read_bytes = 0;
  uint64_t duration_ns = 0;

  bool is_whole() const { return n_damages == 0 && n_damaged_objects == 0; }
};

// Fails: IO, where the list of objects cannot be read; NO_MEMORY.
Result<DiskCheck> check_disk(DiskView* view, const DiskCheckOptions& options);

}  // namespace kvm::tiers

#endif  // KVM_TIERS_DISK_DISK_CHECK_H_
