// SPDX-License-Identifier: Apache-2.0
// DiskFiles: the open files of a real DiskIo: numbers, descriptors, and how each wants its I/O.
//
// Threads: one, but for fd().
#ifndef KVM_TIERS_DISK_DISK_FILES_H_
#define KVM_TIERS_DISK_DISK_FILES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace kvm::tiers {

class DiskFiles {
 public:
  // Throws std::bad_alloc.
  DiskFiles(uint32_t n_files, bool is_read_only) : files_(n_files), is_read_only_(is_read_only) {}
  ~DiskFiles();
  DiskFiles(const DiskFiles&) = delete;
  DiskFiles& operator=(const DiskFiles&) = delete;

  // As of DiskIo. Files are the user's alone (mode 0600).
  Status create(uint32_t file, const std::string& path, uint64_t size_bytes);
  Result<uint64_t> attach(uint32_t file, const std::string& path);
  Status sync_entry(uint32_t file) const;
  void remove(uint32_t file) noexcept;
  // Closes it: it stays on the disk, and the number is free.
  void forget(uint32_t file) noexcept;
  bool is_direct() const { return is_direct_; }
  uint32_t block_bytes() const { return block_bytes_; }
  // REQUIRES: the file is there.
  int fd(uint32_t file) const;

 private:
  struct File {
    int fd = -1;
    std::string path;
  };

  std::vector<File> files_;
  const bool is_read_only_;
  bool is_direct_ = true;
  uint32_t block_bytes_ = 512;
};

}  // namespace kvm::tiers

#endif  // KVM_TIERS_DISK_DISK_FILES_H_
