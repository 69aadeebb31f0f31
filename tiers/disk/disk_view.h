// SPDX-License-Identifier: Apache-2.0
// A DiskView is what lies in the directories of a disk tier while nobody owns them: its objects,
// and their pages, to be checked (disk_check.h) and copied. Nothing in the directories changes by
// it, not even what they say of their owners; and no owner comes while there is one.
//
//   open --> found(): as an owner would find it --> read(): records, each as it was written or not
//   at all
//
// A file that no owner could use is left out, and files_wrong() says why.
//
// Threads: one.  Memory: 16 MiB for transfers; what recovery takes (disk_recovery.h).
#ifndef KVM_TIERS_DISK_DISK_VIEW_H_
#define KVM_TIERS_DISK_DISK_VIEW_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "tiers/disk/data_directory.h"
#include "tiers/disk/disk_io.h"
#include "tiers/disk/disk_reader.h"
#include "tiers/disk/disk_recovery.h"

namespace kvm::tiers {

class DiskView {
 public:
  // A transfer of it; a multiple of 4 KiB.
  static constexpr uint32_t kPieceBytes = 1 << 20;
  static constexpr uint32_t kPieces = 16;

  struct File {
    std::string path;
    uint64_t size_bytes = 0;
    uint32_t directory = 0;  // which of them
  };
  // What is wrong with a file as a whole, or, where path is a directory's, with what lies there.
  struct WrongFile {
    std::string path;
    std::string what;
  };

  // Fails: as DataDirectory::look; INVALID: not all that belong together are named, or one twice;
  // VERSION: there is a file of a later version; IO: what has to be read cannot be; LIMIT;
  // NO_MEMORY.
  static Result<std::unique_ptr<DiskView>> open(const std::vector<std::string>& directories);

  const Found& found() const { return found_; }
  // Null: there is none of this key.
  const FoundObject* object(std::string_view key) const;
  const std::vector<WrongFile>& files_wrong() const { return wrong_; }
  const std::vector<std::string>& directories() const { return paths_; }
  // Segments, by the number that the DiskIo knows them by, and then manifests.
  const std::vector<File>& files() const { return files_; }
  uint32_t n_segments() const { return n_segments_; }
  // Whether the directories say that they belong together, readably or not.
  bool is_marked() const { return is_marked_; }
  // Whether there was a list, as the directories say, and there is to be one.
  bool must_have_list() const { return must_have_list_; }
  // Which file has a copy of a manifest.
  const std::optional<FoundFile>& manifest(uint32_t slot, uint32_t copy) const {
    return manifests_[slot][copy];
  }

  // Reads the pages of records, each whole, and hands them over in this order; their memory is good
  // until take() returns, and what that fails with ends it. parts: indexes into found().pages.
  // Fails: CORRUPT, IO: naming file and offset.
  using TakePage = std::function<Status(size_t index, std::span<const std::byte> page)>;
  Status read_pages(std::span<const uint32_t> parts, const TakePage& take);
  // The body of an object that is not lost. Fails: CORRUPT; IO.
  Result<std::vector<std::byte>> read_body(const FoundObject& object);
  // Bytes of a file. False: they cannot be read.
  bool read_bytes(uint32_t file, uint64_t begin, std::span<std::byte> to);

  DiskIo* io() { return io_.get(); }
  // The segment's header, as its file has it; null: it has none.
  const SegmentHeader* header_of(uint32_t file) const;

 private:
  DiskView() = default;
  Status attach();
  Status look_at_set();
  Status find_files(std::vector<SegmentOnDisk>* segments);
  Status check_page(const FoundPage& page, std::span<const std::byte> record) const;

  std::vector<std::string> paths_;
  std::vector<DataDirectory> directories_;
  std::vector<WrongFile> wrong_;
  bool is_marked_ = false;
  bool must_have_list_ = false;   // by the marks
  std::vector<bool> is_joining_;  // by them, of each directory; none: they are damaged
  std::vector<File> files_;
  uint32_t n_segments_ = 0;
  std::optional<FoundFile> manifests_[kManifestSlots][kManifestCopies];
  std::unique_ptr<DiskIo> io_;
  std::vector<int32_t> headers_;  // of each segment file, its index in found_.segments; -1: none
  Found found_;
};

}  // namespace kvm::tiers

#endif  // KVM_TIERS_DISK_DISK_VIEW_H_
