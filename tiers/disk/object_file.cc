// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/object_file.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <type_traits>

#include "base/assert.h"
#include "tiers/disk/crc32c.h"
#include "tiers/disk/disk_format.h"
#include "tiers/disk/disk_system.h"
#include "tiers/object_store.h"

namespace kvm::tiers {
namespace {

constexpr size_t kBufferBytes = 1 << 20;
constexpr uint64_t kUnit = kObjectFileUnitBytes;
// LIMIT: as of an object's chunks, which it has to fit into again.
constexpr uint64_t kMaxBodyBytes = uint64_t{kMaxChunks} * kChunkBytes;
// LIMIT: a page lies in one segment. More of it than this is read into memory as it comes, so that
// a size that is wrong takes no memory that the file does not have bytes for.
constexpr uint64_t kPieceBytes = 16 << 20;

template <typename T>
std::span<const std::byte> bytes_of(const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  return std::as_bytes(std::span(&value, 1));
}

template <typename T>
uint32_t header_crc_of(const T& header) {
  return crc32c(bytes_of(header).first(offsetof(T, header_crc)));
}

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

uint64_t names_bytes(const ObjectFileHeader& header) {
  return align_up(uint64_t{header.key_bytes} + header.label_bytes, kUnit);
}

kvm_status code_of(int error) {
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return KVM_ERR_NOT_FOUND;
    case EACCES:
    case EPERM:
    case EROFS:
      return KVM_ERR_PERMISSION;
    case EEXIST:
      return KVM_ERR_EXISTS;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return KVM_ERR_NO_SPACE;
    default:
      return KVM_ERR_IO;
  }
}

std::string directory_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash + 1);
}

Status no_memory(const std::string& path) {
  return Status(KVM_ERR_NO_MEMORY, path + ": there is no memory for what it holds");
}

}  // namespace

// --- Writing -------------------------------------------------------------------------------------

void ObjectFileWriter::swap(ObjectFileWriter& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(replaces_, other.replaces_);
  path_.swap(other.path_);
  made_path_.swap(other.made_path_);
  buffer_.swap(other.buffer_);
  std::swap(written_bytes_, other.written_bytes_);
  std::swap(file_bytes_, other.file_bytes_);
  std::swap(file_crc_, other.file_crc_);
  std::swap(n_pages_, other.n_pages_);
}

Status ObjectFileWriter::refused(const char* what, int error) const {
  return Status(code_of(error), path_ + ": " + what + ": " + ::strerror(error));
}

Result<ObjectFileWriter> ObjectFileWriter::create(const std::string& path, bool replaces,
                                                  const ObjectFileHead& head,
                                                  std::span<const uint32_t> page_sizes) {
  KVM_ASSERT(head.n_pages == page_sizes.size());
  ObjectFileWriter made;
  made.path_ = path;
  made.replaces_ = replaces;
  struct stat about {};
  if (::lstat(path.c_str(), &about) == 0) {
    if (!replaces) {
      return Status(KVM_ERR_EXISTS, path + " is there already");
    }
    if (!S_ISREG(about.st_mode)) {
      return Status(KVM_ERR_INVALID, path + " is no regular file, and is not replaced");
    }
  }
  if (head.key.empty() || head.key.size() > kMaxObjectKeyBytes ||
      head.label.size() > kMaxObjectLabelBytes || head.body.size() > kMaxBodyBytes) {
    return Status(KVM_ERR_LIMIT, path + ": what is to be written is larger than any object is");
  }
  ObjectFileHeader header{.key_bytes = static_cast<uint16_t>(head.key.size()),
                          .label_bytes = static_cast<uint16_t>(head.label.size()),
                          .body_bytes = head.body.size(),
                          .n_pages = head.n_pages,
                          .name_crc = crc32c(bytes_of(head.label), crc32c(bytes_of(head.key))),
                          .body_crc = crc32c(head.body)};
  header.file_bytes = sizeof(header) + names_bytes(header) + align_up(head.body.size(), kUnit) +
                      sizeof(ObjectFileEnd);
  for (const uint32_t size : page_sizes) {
    header.page_bytes += size;
    header.file_bytes += sizeof(ObjectFilePage) + align_up(size, kUnit);
  }
  header.header_crc = header_crc_of(header);
  made.file_bytes_ = header.file_bytes;

  std::string name = path + ".XXXXXX";
  made.fd_ = ::mkostemp(name.data(), O_CLOEXEC);
  if (made.fd_ < 0) {
    return made.refused("it cannot be made", errno);
  }
  made.made_path_ = name;
  const int rc = ::fallocate(made.fd_, 0, 0, static_cast<off_t>(header.file_bytes));
  if (rc != 0 && (errno == ENOSPC || errno == EDQUOT || errno == EFBIG)) {
    const int error = errno;
    struct statvfs volume {};
    const bool is_known = ::fstatvfs(made.fd_, &volume) == 0;
    return Status(
        KVM_ERR_NO_SPACE,
        path + ": " + ::strerror(error) + ": it takes " + std::to_string(header.file_bytes) +
            " bytes" +
            (is_known ? ", and " + std::to_string(uint64_t{volume.f_bavail} * volume.f_frsize) +
                            " are free there"
                      : std::string()));
  }
  made.buffer_.reserve(kBufferBytes);
  KVM_TRY(made.put(bytes_of(header)));
  KVM_TRY(made.put(bytes_of(head.key)));
  KVM_TRY(made.put(bytes_of(head.label)));
  KVM_TRY(made.pad());
  KVM_TRY(made.put(head.body));
  KVM_TRY(made.pad());
  return made;
}

ObjectFileWriter::~ObjectFileWriter() {
  if (fd_ >= 0) {
    ::close(fd_);
    (void)::unlink(made_path_.c_str());
  }
}

Status ObjectFileWriter::put(std::span<const std::byte> bytes) {
  file_crc_ = crc32c(bytes, file_crc_);
  written_bytes_ += bytes.size();
  while (!bytes.empty()) {
    const size_t n = std::min(bytes.size(), kBufferBytes - buffer_.size());
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(n));
    bytes = bytes.subspan(n);
    if (buffer_.size() == kBufferBytes) {
      KVM_TRY(flush());
    }
  }
  return Status::ok();
}

Status ObjectFileWriter::pad() {
  constexpr std::array<std::byte, kUnit> kZeros{};
  return put(std::span(kZeros).first(align_up(written_bytes_, kUnit) - written_bytes_));
}

Status ObjectFileWriter::flush() {
  std::span<const std::byte> left(buffer_);
  while (!left.empty()) {
    const ssize_t n = ::write(fd_, left.data(), left.size());
    if (n < 0 && errno != EINTR) {
      return refused("writing", errno);
    }
    left = left.subspan(n > 0 ? static_cast<size_t>(n) : 0);
  }
  buffer_.clear();
  return Status::ok();
}

Status ObjectFileWriter::add_page(std::span<const std::byte> page) {
  ObjectFilePage header{.index = n_pages_++,
                        .size_bytes = static_cast<uint32_t>(page.size()),
                        .page_crc = crc32c(page)};
  header.header_crc = header_crc_of(header);
  KVM_TRY(put(bytes_of(header)));
  KVM_TRY(put(page));
  return pad();
}

Status ObjectFileWriter::finish() {
  ObjectFileEnd end{.file_crc = file_crc_, .file_bytes = file_bytes_};
  end.header_crc = header_crc_of(end);
  KVM_TRY(put(bytes_of(end)));
  KVM_ASSERT(written_bytes_ == file_bytes_);
  KVM_TRY(flush());
  if (::fsync(fd_) != 0) {
    return refused("syncing", errno);
  }
  // Somebody may have made one of that name meanwhile.
  int rc = ::renameat2(AT_FDCWD, made_path_.c_str(), AT_FDCWD, path_.c_str(),
                       replaces_ ? 0 : RENAME_NOREPLACE);
  if (rc != 0 && errno == EINVAL) {
    // The file system knows renames that replace alone: links are what it makes of none.
    rc = replaces_ ? ::rename(made_path_.c_str(), path_.c_str())
                   : ::link(made_path_.c_str(), path_.c_str());
    (void)::unlink(made_path_.c_str());
  }
  if (rc != 0) {
    return refused("naming it so", errno);
  }
  ::close(fd_);
  fd_ = -1;
  return sync_directory(directory_of(path_));
}

// --- Reading -------------------------------------------------------------------------------------

void ObjectFileReader::swap(ObjectFileReader& other) noexcept {
  std::swap(fd_, other.fd_);
  path_.swap(other.path_);
  std::swap(head_, other.head_);
  std::swap(file_bytes_, other.file_bytes_);
  std::swap(pages_begin_, other.pages_begin_);
  std::swap(head_crc_, other.head_crc_);
  std::swap(at_, other.at_);
  std::swap(crc_, other.crc_);
}

ObjectFileReader::~ObjectFileReader() {
  if (fd_ >= 0) {
    ::close(fd_);
  }
}

Status ObjectFileReader::corrupt(const std::string& what) const {
  return Status(KVM_ERR_CORRUPT, path_ + " is damaged: " + what);
}

Result<ObjectFileReader> ObjectFileReader::open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    return Status(code_of(errno), path + " cannot be opened: " + ::strerror(errno));
  }
  return over(fd, path);
}

Result<ObjectFileReader> ObjectFileReader::over(int fd, const std::string& path) {
  ObjectFileReader reader;
  reader.fd_ = fd;
  reader.path_ = path;
  struct stat about {};
  if (::fstat(fd, &about) != 0 || !S_ISREG(about.st_mode)) {
    return Status(KVM_ERR_INVALID, path + " is no regular file");
  }
  reader.file_bytes_ = static_cast<uint64_t>(about.st_size);
  (void)::posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
  try {
    KVM_TRY(reader.read_head());
  } catch (const std::bad_alloc&) {
    return no_memory(path);
  }
  return reader;
}

// What is read is part of the sum.
Status ObjectFileReader::read(std::span<std::byte> to) {
  for (size_t n_done = 0; n_done < to.size();) {
    const ssize_t n =
        ::pread(fd_, to.data() + n_done, to.size() - n_done, static_cast<off_t>(at_ + n_done));
    if (n < 0 && errno != EINTR) {
      return Status(KVM_ERR_IO, path_ + ": reading at " + std::to_string(at_ + n_done) + ": " +
                                    ::strerror(errno));
    }
    if (n == 0) {
      return corrupt("it ends at " + std::to_string(at_ + n_done) + ", before what it says it has");
    }
    n_done += n > 0 ? static_cast<size_t>(n) : 0;
  }
  crc_ = crc32c(to, crc_);
  at_ += to.size();
  return Status::ok();
}

Status ObjectFileReader::skip_padding() {
  std::array<std::byte, kUnit> padding;
  return read(std::span(padding).first(align_up(at_, kUnit) - at_));
}

Status ObjectFileReader::read_head() {
  const ObjectFileHeader expected;
  ObjectFileHeader header;
  if (file_bytes_ < sizeof(header)) {
    return Status(KVM_ERR_INVALID,
                  path_ + " is no snapshot file: it has " + std::to_string(file_bytes_) + " bytes");
  }
  KVM_TRY(read(std::as_writable_bytes(std::span(&header, 1))));
  if (header.magic != expected.magic) {
    return Status(KVM_ERR_INVALID, path_ + " is no snapshot file: it does not begin as one");
  }
  if (header.header_crc != header_crc_of(header)) {
    return corrupt("the checksum of its header does not match");
  }
  if (header.version != expected.version) {
    return Status(KVM_ERR_VERSION, path_ + " has version " + std::to_string(header.version) +
                                       " of the format, this program knows version " +
                                       std::to_string(expected.version));
  }
  if (header.header_bytes != expected.header_bytes || header.key_bytes == 0 ||
      header.key_bytes > kMaxObjectKeyBytes || header.label_bytes > kMaxObjectLabelBytes ||
      header.body_bytes > kMaxBodyBytes ||
      object_chunks(header.n_pages, header.body_bytes) > kMaxChunks) {
    return corrupt("its header says what none can");
  }
  if (header.file_bytes != file_bytes_) {
    return corrupt("it has " + std::to_string(file_bytes_) + " bytes, and " +
                   std::to_string(header.file_bytes) + " when it was written");
  }
  // Before any memory is taken for what it says.
  const uint64_t fewest = sizeof(header) + names_bytes(header) +
                          align_up(header.body_bytes, kUnit) + sizeof(ObjectFileEnd);
  const uint64_t left_bytes = file_bytes_ - std::min(fewest, file_bytes_);
  if (fewest > file_bytes_ || uint64_t{header.n_pages} * sizeof(ObjectFilePage) > left_bytes ||
      header.page_bytes > left_bytes) {
    return corrupt("its header says that there is more than it has bytes for");
  }
  head_.key.resize(header.key_bytes);
  head_.label.resize(header.label_bytes);
  head_.body.resize(header.body_bytes);
  head_.n_pages = header.n_pages;
  head_.page_bytes = header.page_bytes;
  KVM_TRY(read(std::as_writable_bytes(std::span(head_.key))));
  KVM_TRY(read(std::as_writable_bytes(std::span(head_.label))));
  if (crc32c(bytes_of(head_.label), crc32c(bytes_of(head_.key))) != header.name_crc) {
    return corrupt("the checksum of its name does not match");
  }
  KVM_TRY(skip_padding());
  KVM_TRY(read(head_.body));
  if (crc32c(head_.body) != header.body_crc) {
    return corrupt("the checksum of its body does not match");
  }
  KVM_TRY(skip_padding());
  pages_begin_ = at_;
  head_crc_ = crc_;
  return Status::ok();
}

Status ObjectFileReader::read_pages(const TakePage& take) {
  try {
    at_ = pages_begin_;
    crc_ = head_crc_;
    uint64_t page_bytes = 0;
    std::vector<std::byte> page;
    for (uint32_t i = 0; i < head_.n_pages; ++i) {
      const std::string which = "page " + std::to_string(i) + " at " + std::to_string(at_);
      const ObjectFilePage expected;
      ObjectFilePage header;
      KVM_TRY(read(std::as_writable_bytes(std::span(&header, 1))));
      if (header.magic != expected.magic || header.header_crc != header_crc_of(header) ||
          header.index != i || header.size_bytes == 0 ||
          align_up(header.size_bytes, kUnit) > file_bytes_ - std::min(at_, file_bytes_)) {
        return corrupt("the header of " + which + " is not as it was written");
      }
      page.clear();
      while (page.size() < header.size_bytes) {
        const size_t begin = page.size();
        page.resize(std::min<uint64_t>(header.size_bytes, begin + kPieceBytes));
        KVM_TRY(read(std::span(page).subspan(begin)));
      }
      if (crc32c(page) != header.page_crc) {
        return corrupt("the checksum of " + which + " does not match");
      }
      KVM_TRY(skip_padding());
      page_bytes += page.size();
      KVM_TRY(take(i, page));
    }
    const uint32_t crc = crc_;
    const ObjectFileEnd expected;
    ObjectFileEnd end;
    KVM_TRY(read(std::as_writable_bytes(std::span(&end, 1))));
    if (end.magic != expected.magic || end.header_crc != header_crc_of(end) ||
        end.file_bytes != file_bytes_ || at_ != file_bytes_ || page_bytes != head_.page_bytes) {
      return corrupt("its end is not as it was written");
    }
    if (end.file_crc != crc) {
      return corrupt("the checksum of all of it does not match");
    }
    return Status::ok();
  } catch (const std::bad_alloc&) {
    return no_memory(path_);
  }
}

}  // namespace kvm::tiers
