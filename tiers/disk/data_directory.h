// SPDX-License-Identifier: Apache-2.0
// DataDirectory: a directory of segment files with one owner, a lock (flock on its file kvm.lock)
// that goes with the process, however that ends.
//
// Threads: one.
#ifndef KVM_TIERS_DISK_DATA_DIRECTORY_H_
#define KVM_TIERS_DISK_DATA_DIRECTORY_H_

#include <cstdint>
#include <string>
#include <utility>

#include "base/status.h"

namespace kvm::tiers {

// The file of a segment: its name alone.
std::string segment_file_name(uint32_t segment);

class DataDirectory {
 public:
  // Fails: NOT_FOUND; INVALID: it is no directory; PERMISSION: nothing can be written there; BUSY:
  // it has an owner, whom the sentence names; IO.
  static Result<DataDirectory> open(const std::string& path);
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
  // Fails: VERSION: one is of another version of the format, and nothing has been removed; IO.
  Result<uint64_t> remove_segments();
  const std::string& path() const { return path_; }

 private:
  DataDirectory(std::string path, int lock_fd) : path_(std::move(path)), lock_fd_(lock_fd) {}

  std::string path_;
  int lock_fd_;
};

}  // namespace kvm::tiers

#endif  // KVM_TIERS_DISK_DATA_DIRECTORY_H_
