// SPDX-License-Identifier: Apache-2.0
// DataDirectory: a directory of segment files with one owner, a lock (flock on its file kvm.lock)
// that goes with the process, however that ends.
//
// Threads: one.
#ifndef KVM_TIERS_DISK_DATA_DIRECTORY_H_
#define KVM_TIERS_DISK_DATA_DIRECTORY_H_

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"

namespace kvm::tiers {

// The file of a segment: its name alone.
std::string segment_file_name(uint32_t segment);
// What a file is called, behind its name, until it has the size that it is made with.
inline constexpr char kUnfinishedSuffix[] = ".new";

struct SegmentOnDisk {
  uint32_t number = 0;
  uint32_t directory = 0;  // which of several
  std::string path;
  uint64_t size_bytes = 0;
  uint64_t made_bytes = 0;  // the size it was made with, by its header; 0: that cannot be read
};

// Takes out those that are not as large as the others were made, and returns them: files that were
// cut off, or are no segments.
std::vector<SegmentOnDisk> take_cut_segments(std::vector<SegmentOnDisk>* segments);
// What is wrong with the size of one of these, beside those that were left in.
std::string wrong_size_text(const SegmentOnDisk& cut, const std::vector<SegmentOnDisk>& others);

class DataDirectory {
 public:
  // Fails: NOT_FOUND; INVALID: it is no directory; PERMISSION: nothing can be written there; BUSY:
  // it has an owner, whom the sentence names; IO.
  static Result<DataDirectory> open(const std::string& path);
  // Takes it to be looked at, with others who do: nothing in it changes, and nobody owns it
  // meanwhile. Fails: NOT_FOUND: also, nothing in it is of an owner before; INVALID; PERMISSION;
  // BUSY; IO.
  static Result<DataDirectory> look(const std::string& path);
  DataDirectory(DataDirectory&& other) noexcept : lock_fd_(std::exchange(other.lock_fd_, -1)) {
    path_.swap(other.path_);
  }
  DataDirectory& operator=(DataDirectory&& other) noexcept {
    path_.swap(other.path_);
    std::swap(lock_fd_, other.lock_fd_);
    return *this;
  }
  ~DataDirectory();

  // Removes the segment files that an owner before has left; returns how many. Other files stay.
  // Fails: VERSION: one is of a later version of the format, and nothing has been removed; IO.
  Result<uint64_t> remove_segments();
  // Finds them, in the order of their numbers. Those of an earlier version, which nothing outlives,
  // are removed. Fails likewise.
  Result<std::vector<SegmentOnDisk>> find_segments();
  // The same, with nothing removed: *older is set to the paths of those.
  Result<std::vector<SegmentOnDisk>> list_segments(std::vector<std::string>* older) const;
  // Removes files whose making had not come to its end.
  void remove_unfinished() const noexcept;
  // Whether there is a list of objects, readable or not. Fails: IO.
  Result<bool> has_manifest() const;
  // What these files take on the disk. Fails: IO.
  Result<uint64_t> segment_bytes() const;
  const std::string& path() const { return path_; }

 private:
  DataDirectory(std::string path, int lock_fd) : path_(std::move(path)), lock_fd_(lock_fd) {}

  // Fails: IO.
  Result<std::vector<std::string>> segments() const;

  std::string path_;
  int lock_fd_;
};

// Takes them all. Fails: as DataDirectory::open, with none taken.
Result<std::vector<DataDirectory>> open_directories(const std::vector<std::string>& paths);

// What the owner of the directories can have: what their file systems have free for a user like
// this one, each counted once, and what the segments take that one before has left. Fails: IO.
Result<uint64_t> free_bytes(std::span<const DataDirectory> directories);

}  // namespace kvm::tiers

#endif  // KVM_TIERS_DISK_DATA_DIRECTORY_H_
