// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/disk_files.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/assert.h"
#include "base/kill_point.h"
#include "tiers/disk/data_directory.h"
#include "tiers/disk/disk_io.h"
#include "tiers/disk/disk_system.h"

namespace kvm::tiers {
namespace {

constexpr int kCreate = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
constexpr int kAttach = O_NOFOLLOW | O_CLOEXEC;

Status refused(const std::string& path, const char* what, int error) {
  const kvm_status code = error == ENOSPC || error == EDQUOT ? KVM_ERR_NO_SPACE
                          : error == EEXIST                  ? KVM_ERR_EXISTS
                                                             : KVM_ERR_IO;
  return Status(code, path + ": " + what + ": " + ::strerror(error));
}

// What direct I/O on the file has to be aligned to; 0: it is not to be had.
uint32_t direct_block_bytes(int fd) {
  struct statx about {};
#ifdef STATX_DIOALIGN
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &about) == 0 &&
      (about.stx_mask & STATX_DIOALIGN) != 0) {
    const uint32_t block = std::max({about.stx_dio_offset_align, about.stx_dio_mem_align, 512u});
    return about.stx_dio_offset_align == 0 || block > kMaxDiskBlockBytes ? 0 : block;
  }
#endif
  return kMaxDiskBlockBytes;  // an older kernel: this does for all
}

// Some file systems cannot set room aside. There the file is as long all the same, and a write may
// find the disk full.
int set_room_aside(int fd, uint64_t size_bytes) {
  int rc = 0;
  do {
    rc = ::fallocate(fd, 0, 0, static_cast<off_t>(size_bytes)) == 0 ? 0 : errno;
  } while (rc == EINTR);
  if (rc == EOPNOTSUPP) {
    rc = ::ftruncate(fd, static_cast<off_t>(size_bytes)) == 0 ? 0 : errno;
  }
  return rc;
}

}  // namespace

DiskFiles::~DiskFiles() {
  for (const File& file : files_) {
    if (file.fd >= 0) {
      ::close(file.fd);
    }
  }
}

Status DiskFiles::create(uint32_t file, const std::string& path, uint64_t size_bytes) {
  KVM_ASSERT(file < files_.size() && files_[file].fd < 0 && size_bytes % kMaxDiskBlockBytes == 0);
  std::string kept = path;
  // Who finds it under its name finds it whole.
  const std::string made = path + kUnfinishedSuffix;
  if (::access(path.c_str(), F_OK) == 0) {
    return refused(path, "making the file", EEXIST);
  }
  ::unlink(made.c_str());
  int fd = ::open(made.c_str(), kCreate | O_DIRECT, 0600);
  bool is_direct = fd >= 0;
  uint32_t block = is_direct ? direct_block_bytes(fd) : 0;
  if (is_direct && block == 0) {
    is_direct = false;
    ::close(fd);
    ::unlink(made.c_str());
  }
  if (!is_direct && (fd >= 0 || errno == EINVAL)) {
    // Where direct I/O is refused, some file systems have made the file nevertheless.
    if (fd < 0) {
      ::unlink(made.c_str());
    }
    fd = ::open(made.c_str(), kCreate, 0600);
    block = 512;
  }
  if (fd < 0) {
    return refused(path, "making the file", errno);
  }
  KVM_KILL_POINT("disk/file_begun");
  int error = set_room_aside(fd, size_bytes);
  const bool has_room = error == 0;
  if (has_room && ::rename(made.c_str(), path.c_str()) != 0) {
    error = errno;
  }
  if (error != 0) {
    ::close(fd);
    ::unlink(made.c_str());
    return refused(path, has_room ? "naming the file" : "setting room aside", error);
  }
  files_[file] = {fd, std::move(kept)};
  is_direct_ = is_direct_ && is_direct;
  block_bytes_ = std::max(block_bytes_, block);
  return Status::ok();
}

Result<uint64_t> DiskFiles::attach(uint32_t file, const std::string& path) {
  KVM_ASSERT(file < files_.size() && files_[file].fd < 0);
  std::string kept = path;
  const int flags = kAttach | (is_read_only_ ? O_RDONLY : O_RDWR);
  int fd = ::open(path.c_str(), flags | O_DIRECT);
  uint32_t block = fd >= 0 ? direct_block_bytes(fd) : 0;
  bool is_direct = block != 0;
  if (!is_direct && (fd >= 0 || errno == EINVAL)) {
    if (fd >= 0) {
      ::close(fd);
    }
    fd = ::open(path.c_str(), flags);
    block = 512;
  }
  if (fd < 0) {
    const int error = errno;
    const Status status = refused(path, "opening the file", error);
    return error == ENOENT ? Status(KVM_ERR_NOT_FOUND, std::string(status.message())) : status;
  }
  struct stat about {};
  if (::fstat(fd, &about) != 0 || !S_ISREG(about.st_mode)) {
    ::close(fd);
    return Status(KVM_ERR_IO, path + " is no regular file");
  }
  files_[file] = {fd, std::move(kept)};
  is_direct_ = is_direct_ && is_direct;
  block_bytes_ = std::max(block_bytes_, block);
  return static_cast<uint64_t>(about.st_size);
}

Status DiskFiles::sync_entry(uint32_t file) const {
  (void)fd(file);
  const std::string& path = files_[file].path;
  return sync_directory(path.substr(0, path.rfind('/') + 1));
}

void DiskFiles::remove(uint32_t file) noexcept {
  ::unlink(files_[file].path.c_str());
  forget(file);
}

void DiskFiles::forget(uint32_t file) noexcept {
  ::close(fd(file));
  files_[file].fd = -1;
}

int DiskFiles::fd(uint32_t file) const {
  KVM_ASSERT(file < files_.size() && files_[file].fd >= 0);
  return files_[file].fd;
}

}  // namespace kvm::tiers
