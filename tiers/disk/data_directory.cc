// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/data_directory.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <map>
#include <string_view>
#include <system_error>
#include <vector>

#include "tiers/disk/disk_format.h"
#include "tiers/disk/disk_io.h"
#include "tiers/disk/manifest.h"

namespace kvm::tiers {
namespace {

constexpr char kLockName[] = "kvm.lock";
constexpr std::string_view kSegmentPrefix = "kvm-";
constexpr std::string_view kSegmentSuffix = ".segment";

Status refused(const std::string& path, const std::string& what, int error) {
  kvm_status code = KVM_ERR_IO;
  if (error == ENOENT) {
    code = KVM_ERR_NOT_FOUND;
  } else if (error == EACCES || error == EPERM || error == EROFS) {
    code = KVM_ERR_PERMISSION;
  }
  return Status(code, "directory " + path + ": " + what + ": " + ::strerror(error));
}

// Who has the lock, as that wrote it down. Who only looks writes nothing: what is there is of an
// owner before then.
std::string owner_of(int lock_fd) {
  std::array<char, 32> text{};
  const ssize_t n = ::pread(lock_fd, text.data(), text.size() - 1, 0);
  const std::string_view pid(text.data(), n > 0 ? static_cast<size_t>(n) : 0);
  const size_t n_digits = pid.find_first_not_of("0123456789");
  const std::string number(pid.substr(0, n_digits));
  const auto id = static_cast<pid_t>(std::strtol(number.c_str(), nullptr, 10));
  const bool is_there = id > 0 && (::kill(id, 0) == 0 || errno != ESRCH);
  return is_there ? "the process " + number : "another process";
}

// advice: what to do where it is not there.
Status check_directory(const std::string& path, const char* advice) {
  struct stat about {};
  if (::stat(path.c_str(), &about) != 0) {
    if (errno == ENOENT) {
      return Status(KVM_ERR_NOT_FOUND, "directory " + path + " is not there" + advice);
    }
    return refused(path, "it cannot be used", errno);
  }
  return S_ISDIR(about.st_mode) ? Status::ok()
                                : Status(KVM_ERR_INVALID, path + " is not a directory");
}

// Closes the file where it fails. what: how the directory is to be used.
Status lock(const std::string& path, int fd, int how, const char* what) {
  if (::flock(fd, how | LOCK_NB) == 0) {
    return Status::ok();
  }
  const int error = errno;
  const std::string owner = owner_of(fd);
  ::close(fd);
  if (error != EWOULDBLOCK) {
    return refused(path, std::string("locking ") + kLockName, error);
  }
  return Status(KVM_ERR_BUSY, "directory " + path + " is in use by " + owner + ": " + what);
}

bool is_segment_name(std::string_view name) {
  if (!name.starts_with(kSegmentPrefix) || !name.ends_with(kSegmentSuffix) ||
      name.size() <= kSegmentPrefix.size() + kSegmentSuffix.size()) {
    return false;
  }
  name.remove_prefix(kSegmentPrefix.size());
  name.remove_suffix(kSegmentSuffix.size());
  return name.find_first_not_of("0123456789") == std::string_view::npos;
}

// Fails where the file is of a later version; *is_older: of an earlier one; *made_bytes: the size
// it was made with, 0 where it does not say.
Status look_at_header(const std::string& path, bool* is_older, uint64_t* made_bytes) {
  *is_older = false;
  *made_bytes = 0;
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) {
    return Status::ok();  // removing it will say what is wrong
  }
  std::array<std::byte, sizeof(SegmentHeader)> first{};
  const ssize_t n = ::pread(fd, first.data(), first.size(), 0);
  ::close(fd);
  uint16_t version = 0;
  const SegmentFile kind =
      n == static_cast<ssize_t>(first.size()) ? kind_of_file(first, &version) : SegmentFile::kNone;
  *is_older = kind == SegmentFile::kOlder;
  if (kind == SegmentFile::kNewer) {
    return Status(KVM_ERR_VERSION, path + " has version " + std::to_string(version) +
                                       " of the format, this program knows version " +
                                       std::to_string(kDiskFormatVersion) +
                                       ": remove the file if nothing needs it");
  }
  SegmentHeader header;
  if (kind != SegmentFile::kNone && read_segment_header(first, &header)) {
    *made_bytes = header.segment_bytes;
  }
  return Status::ok();
}

}  // namespace

std::string segment_file_name(uint32_t segment) {
  std::array<char, 8> digits{};
  (void)std::snprintf(digits.data(), digits.size(), "%05u", segment % 100'000);
  return std::string(kSegmentPrefix) + digits.data() + std::string(kSegmentSuffix);
}

std::vector<SegmentOnDisk> take_cut_segments(std::vector<SegmentOnDisk>* segments) {
  std::map<uint64_t, uint64_t> n_made;  // by the size
  for (const SegmentOnDisk& segment : *segments) {
    const uint64_t size = segment.made_bytes != 0 ? segment.made_bytes : segment.size_bytes;
    if (size % kMaxDiskBlockBytes == 0 && size >= uint64_t{2} * kSegmentHeaderBytes) {
      ++n_made[size];
    }
  }
  // Of two sizes the larger is that of files that nobody has cut off.
  uint64_t usual = 0;
  for (const auto& [size, n] : n_made) {
    usual = usual == 0 || n >= n_made[usual] ? size : usual;
  }
  const auto cut = std::stable_partition(
      segments->begin(), segments->end(), [usual](const SegmentOnDisk& segment) {
        return usual != 0 && segment.size_bytes == usual &&
               (segment.made_bytes == 0 || segment.made_bytes == usual);
      });
  std::vector<SegmentOnDisk> taken(std::make_move_iterator(cut),
                                   std::make_move_iterator(segments->end()));
  segments->erase(cut, segments->end());
  return taken;
}

std::string wrong_size_text(const SegmentOnDisk& cut, const std::vector<SegmentOnDisk>& others) {
  const std::string size = "it has " + std::to_string(cut.size_bytes) + " bytes, ";
  if (cut.made_bytes != 0 && cut.made_bytes != cut.size_bytes) {
    return size + "and was made with " + std::to_string(cut.made_bytes);
  }
  if (others.empty()) {
    return size + "which no segment has";
  }
  const std::string theirs = std::to_string(others.front().size_bytes);
  return cut.made_bytes != 0 ? size + "as it was made, and others here have " + theirs +
                                   ": segments of two services"
                             : size + "and segments here have " + theirs;
}

Result<DataDirectory> DataDirectory::open(const std::string& path) {
  KVM_TRY(check_directory(path, "; make it first: kvmd makes files in it, and no directories"));
  const std::string file = path + "/" + kLockName;
  const int fd = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) {
    return refused(path, std::string("opening ") + kLockName, errno);
  }
  KVM_TRY(lock(path, fd, LOCK_EX, "each kvmd needs directories of its own"));
  DataDirectory directory(path, fd);
  const std::string pid = std::to_string(::getpid()) + "\n";
  if (::ftruncate(fd, 0) != 0 ||
      ::pwrite(fd, pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    return refused(path, std::string("writing ") + kLockName, errno);
  }
  return directory;
}

Result<DataDirectory> DataDirectory::look(const std::string& path) {
  KVM_TRY(check_directory(path, ""));
  const std::string file = path + "/" + kLockName;
  const int fd = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0 && errno != ENOENT) {
    return refused(path, std::string("opening ") + kLockName, errno);
  }
  if (fd >= 0) {
    KVM_TRY(lock(path, fd, LOCK_SH, "it can be looked at while no kvmd runs on it"));
    return DataDirectory(path, fd);
  }
  // A copy may have been made without the lock.
  DataDirectory directory(path, fd);
  KVM_TRY_ASSIGN(const bool has_list, directory.has_manifest());
  if (!has_list) {
    return Status(KVM_ERR_NOT_FOUND, "directory " + path +
                                         " holds nothing of a kvmd; is its drive mounted, and is "
                                         "this the directory that disk.directories names?");
  }
  return directory;
}

DataDirectory::~DataDirectory() {
  if (lock_fd_ >= 0) {
    // The file stays: were it removed, who has it open already would lock one that nobody finds.
    ::close(lock_fd_);
  }
}

Result<std::vector<std::string>> DataDirectory::segments() const {
  std::vector<std::string> found;
  std::error_code error;
  for (std::filesystem::directory_iterator it(path_, error), end; !error && it != end;
       it.increment(error)) {
    std::error_code ignored;
    if (is_segment_name(it->path().filename().string()) &&
        it->symlink_status(ignored).type() == std::filesystem::file_type::regular) {
      found.push_back(it->path().string());
    }
  }
  if (error) {
    return refused(path_, "listing it", error.value());
  }
  return found;
}

Result<uint64_t> DataDirectory::remove_segments() {
  KVM_TRY_ASSIGN(const std::vector<std::string> found, segments());
  for (const std::string& file : found) {
    bool is_older = false;
    uint64_t made_bytes = 0;
    KVM_TRY(look_at_header(file, &is_older, &made_bytes));
  }
  for (const std::string& file : found) {
    if (::unlink(file.c_str()) != 0) {
      return refused(path_, "removing " + file, errno);
    }
  }
  return uint64_t{found.size()};
}

Result<std::vector<SegmentOnDisk>> DataDirectory::list_segments(
    std::vector<std::string>* older) const {
  KVM_TRY_ASSIGN(const std::vector<std::string> files, segments());
  std::vector<SegmentOnDisk> found;
  for (const std::string& file : files) {
    bool is_older = false;
    uint64_t made_bytes = 0;
    KVM_TRY(look_at_header(file, &is_older, &made_bytes));
    struct stat about {};
    if (is_older) {
      older->push_back(file);
    } else if (::lstat(file.c_str(), &about) != 0) {
      return refused(path_, "looking at " + file, errno);
    } else {
      const std::string name = file.substr(file.rfind('/') + 1 + kSegmentPrefix.size());
      found.push_back({.number = static_cast<uint32_t>(std::strtoul(name.c_str(), nullptr, 10)),
                       .path = file,
                       .size_bytes = static_cast<uint64_t>(about.st_size),
                       .made_bytes = made_bytes});
    }
  }
  std::sort(found.begin(), found.end(),
            [](const SegmentOnDisk& a, const SegmentOnDisk& b) { return a.number < b.number; });
  return found;
}

Result<std::vector<SegmentOnDisk>> DataDirectory::find_segments() {
  std::vector<std::string> older;
  KVM_TRY_ASSIGN(std::vector<SegmentOnDisk> found, list_segments(&older));
  for (const std::string& file : older) {
    if (::unlink(file.c_str()) != 0) {
      return refused(path_, "removing " + file, errno);
    }
  }
  return found;
}

void DataDirectory::remove_unfinished() const noexcept {
  try {
    const std::string suffix = kUnfinishedSuffix;
    std::error_code error;
    for (std::filesystem::directory_iterator it(path_, error), end; !error && it != end;
         it.increment(error)) {
      const std::string name = it->path().filename().string();
      if (name.starts_with(kSegmentPrefix) &&
          (name.ends_with(std::string(kSegmentSuffix) + suffix) ||
           name.ends_with(".manifest" + suffix))) {
        (void)::unlink(it->path().c_str());
      }
    }
  } catch (const std::exception&) {
    // They take room, and nothing else.
  }
}

Result<bool> DataDirectory::has_manifest() const {
  for (uint32_t slot = 0; slot < kManifestSlots; ++slot) {
    for (uint32_t copy = 0; copy < kManifestCopies; ++copy) {
      struct stat about {};
      const std::string file = path_ + "/" + manifest_file_name(slot, copy);
      if (::lstat(file.c_str(), &about) == 0) {
        return true;
      }
      if (errno != ENOENT) {
        return refused(path_, "looking for " + file, errno);
      }
    }
  }
  return false;
}

Result<uint64_t> DataDirectory::segment_bytes() const {
  constexpr uint64_t kStatBlockBytes = 512;  // whatever the file system's are
  KVM_TRY_ASSIGN(const std::vector<std::string> found, segments());
  uint64_t sum = 0;
  for (const std::string& file : found) {
    struct stat about {};
    if (::lstat(file.c_str(), &about) != 0) {
      return refused(path_, "looking at " + file, errno);
    }
    sum += static_cast<uint64_t>(about.st_blocks) * kStatBlockBytes;
  }
  return sum;
}

Result<std::vector<DataDirectory>> open_directories(const std::vector<std::string>& paths) {
  std::vector<DataDirectory> directories;
  for (const std::string& path : paths) {
    KVM_TRY_ASSIGN(DataDirectory directory, DataDirectory::open(path));
    directories.push_back(std::move(directory));
  }
  return directories;
}

Result<uint64_t> free_bytes(std::span<const DataDirectory> directories) {
  std::vector<dev_t> seen;
  uint64_t sum = 0;
  for (const DataDirectory& directory : directories) {
    const std::string& path = directory.path();
    struct stat file {};
    struct statvfs volume {};
    if (::stat(path.c_str(), &file) != 0 || ::statvfs(path.c_str(), &volume) != 0) {
      return refused(path, "looking at its file system", errno);
    }
    if (std::find(seen.begin(), seen.end(), file.st_dev) == seen.end()) {
      seen.push_back(file.st_dev);
      sum += uint64_t{volume.f_bavail} * volume.f_frsize;
    }
    // Not looked at after they are removed: some file systems take their time to free what was.
    KVM_TRY_ASSIGN(const uint64_t left, directory.segment_bytes());
    sum += left;
  }
  return sum;
}

}  // namespace kvm::tiers
