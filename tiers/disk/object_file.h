// SPDX-License-Identifier: Apache-2.0
// An object in a file of its own, to be carried elsewhere; docs/snapshot_file.md shows it byte by
// byte.
//
//   header (64 bytes) | key | label | body | page | page | ... | end (64 bytes)
//   page = page header (64 bytes) | bytes
//
// Each begins at a multiple of 64 bytes. Each has a checksum, and the end has one of all before it:
// a file that is cut off, or in which a bit has changed, is told from a whole one.
//
// Threads: one.  Memory: the body and a page, and 1 MiB.
#ifndef KVM_TIERS_DISK_OBJECT_FILE_H_
#define KVM_TIERS_DISK_OBJECT_FILE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace kvm::tiers {

// DISK: all of this is frozen by kObjectFileVersion. Numbers are little-endian.
inline constexpr uint64_t kObjectFileMagic = 0x31'50'41'4e'53'4d'56'4b;  // "KVMSNAP1"
inline constexpr uint16_t kObjectFileVersion = 1;
inline constexpr uint32_t kObjectFilePageMagic = 0x50'4d'56'4b;  // "KVMP"
inline constexpr uint32_t kObjectFileEndMagic = 0x45'4d'56'4b;   // "KVME"
inline constexpr uint64_t kObjectFileUnitBytes = 64;

struct ObjectFileHeader {
  uint64_t magic = kObjectFileMagic;
  uint16_t version = kObjectFileVersion;
  uint16_t header_bytes = 64;
  uint16_t key_bytes = 0;
  uint16_t label_bytes = 0;
  uint64_t file_bytes = 0;
  uint64_t body_bytes = 0;
  uint64_t page_bytes = 0;  // of all pages together
  uint32_t n_pages = 0;
  uint32_t name_crc = 0;  // CRC-32C of key and label
  uint32_t body_crc = 0;  // CRC-32C of the body
  uint32_t reserved[2] = {};
  uint32_t header_crc = 0;  // CRC-32C of the bytes before it
};
static_assert(sizeof(ObjectFileHeader) == 64 && offsetof(ObjectFileHeader, header_crc) == 60);

struct ObjectFilePage {
  uint32_t magic = kObjectFilePageMagic;
  uint32_t index = 0;
  uint32_t size_bytes = 0;
  uint32_t page_crc = 0;  // CRC-32C of the page
  uint32_t reserved[11] = {};
  uint32_t header_crc = 0;  // CRC-32C of the bytes before it
};
static_assert(sizeof(ObjectFilePage) == 64 && offsetof(ObjectFilePage, header_crc) == 60);

struct ObjectFileEnd {
  uint32_t magic = kObjectFileEndMagic;
  uint32_t file_crc = 0;    // CRC-32C of all bytes of the file before the end
  uint64_t file_bytes = 0;  // with the end
  uint32_t reserved[11] = {};
  uint32_t header_crc = 0;  // CRC-32C of the bytes before it
};
static_assert(sizeof(ObjectFileEnd) == 64 && offsetof(ObjectFileEnd, header_crc) == 60);

// What a file says before its pages.
struct ObjectFileHead {
  std::string key;
  std::string label;
  std::vector<std::byte> body;
  uint32_t n_pages = 0;
  uint64_t page_bytes = 0;
};

// An ObjectFileWriter makes a file. It has another name until all of it is on the disk.
class ObjectFileWriter {
 public:
  // Sets the room aside. Fails: EXISTS, unless it is to replace what is there; NO_SPACE;
  // PERMISSION; NOT_FOUND (the directory); LIMIT; IO.
  // page_sizes: of all pages, in their order.
  static Result<ObjectFileWriter> create(const std::string& path, bool replaces,
                                         const ObjectFileHead& head,
                                         std::span<const uint32_t> page_sizes);
  ObjectFileWriter(ObjectFileWriter&& other) noexcept { swap(other); }
  ObjectFileWriter& operator=(ObjectFileWriter&& other) noexcept {
    swap(other);
    return *this;
  }
  // Without finish() nothing of it stays.
  ~ObjectFileWriter();

  // REQUIRES: it is the next one, and of the size that was said. Fails: NO_SPACE; IO.
  Status add_page(std::span<const std::byte> page);
  // From now on a crash does not take it. Fails: EXISTS; NO_SPACE; IO. REQUIRES: all pages were
  // added.
  Status finish();
  uint64_t file_bytes() const { return file_bytes_; }

 private:
  ObjectFileWriter() = default;
  void swap(ObjectFileWriter& other) noexcept;
  Status put(std::span<const std::byte> bytes);
  Status pad();
  Status flush();
  Status refused(const char* what, int error) const;

  int fd_ = -1;
  bool replaces_ = false;
  std::string path_;
  std::string made_path_;  // until it is done
  std::vector<std::byte> buffer_;
  uint64_t written_bytes_ = 0;  // with what is in the buffer
  uint64_t file_bytes_ = 0;
  uint32_t file_crc_ = 0;
  uint32_t n_pages_ = 0;  // that were added
};

// An ObjectFileReader reads one. Whatever the bytes of the file are, it says what is wrong with
// them, or hands over what was written.
class ObjectFileReader {
 public:
  // Reads what is before the pages. Fails: NOT_FOUND; PERMISSION; INVALID: it is no such file;
  // VERSION; CORRUPT; IO; NO_MEMORY.
  static Result<ObjectFileReader> open(const std::string& path);
  // The same of a file that is open, which is the reader's from then on; `path` names it.
  static Result<ObjectFileReader> over(int fd, const std::string& path);
  ObjectFileReader(ObjectFileReader&& other) noexcept { swap(other); }
  ObjectFileReader& operator=(ObjectFileReader&& other) noexcept {
    swap(other);
    return *this;
  }
  ~ObjectFileReader();

  const ObjectFileHead& head() const { return head_; }
  uint64_t file_bytes() const { return file_bytes_; }

  // Reads all pages, in their order, and the end; the memory of a page is good until take()
  // returns, and what that fails with ends it. That all of the file is as it was written is known
  // when this has returned, and not before. May be called again. Fails: CORRUPT; IO; NO_MEMORY.
  using TakePage = std::function<Status(uint32_t index, std::span<const std::byte> page)>;
  Status read_pages(const TakePage& take);

 private:
  ObjectFileReader() = default;
  void swap(ObjectFileReader& other) noexcept;
  Status read_head();
  Status read(std::span<std::byte> to);
  Status skip_padding();
  Status corrupt(const std::string& what) const;

  int fd_ = -1;
  std::string path_;
  ObjectFileHead head_;
  uint64_t file_bytes_ = 0;
  uint64_t pages_begin_ = 0;
  uint32_t head_crc_ = 0;  // of all before it
  uint64_t at_ = 0;
  uint32_t crc_ = 0;  // of all before at_
};

}  // namespace kvm::tiers

#endif  // KVM_TIERS_DISK_OBJECT_FILE_H_
