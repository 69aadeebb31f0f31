// SPDX-License-Identifier: Apache-2.0
// DirectorySet: which directories belong together. A directory that is not there must not be taken
// for one in which there is nothing. So each has a mark, the file kvm.set: of which set it is,
// which of it, and how many there are. There are marks before there is a list of objects, and they
// go after it.
//
//   mark   all that are new: a mark with the number there was so far --> all: with the new number
//
// A mark speaks of directories only when each of these has one. So whatever of this a crash leaves,
// the marks that are there name no directory that has none.
//
// Threads: one at a time.
#ifndef KVM_TIERS_DISK_DIRECTORY_SET_H_
#define KVM_TIERS_DISK_DIRECTORY_SET_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "tiers/disk/disk_format.h"

namespace kvm::tiers {

// DISK: all of this is frozen by kDiskFormatVersion.
inline constexpr uint32_t kSetMarkMagic = 0x44'4d'56'4b;  // "KVMD"
inline constexpr char kSetMarkName[] = "kvm.set";

struct SetMark {
  uint32_t magic = kSetMarkMagic;
  uint16_t version = kDiskFormatVersion;
  uint16_t mark_bytes = 64;
  uint64_t set_id = 0;
  uint32_t index = 0;          // of the directory
  uint32_t n_directories = 0;  // that must be there: those with indexes below it
  uint32_t reserved[9] = {};
  uint32_t mark_crc = 0;  // CRC-32C of the bytes before it
};
static_assert(sizeof(SetMark) == 64 && offsetof(SetMark, mark_crc) == 60);

class DirectorySet {
 public:
  // Of no directory: nothing to mark.
  DirectorySet() = default;
  // Looks at the marks. Fails, with nothing written: INVALID: a directory that must be there is not
  // among these, or they are of two sets; CORRUPT: a mark cannot be read; VERSION; IO.
  static Result<DirectorySet> find(std::vector<std::string> paths);

  // Has each directory marked, durably. Fails: IO: some may be; to be called again.
  Status mark();
  // Removes the marks. REQUIRES: there is no list of objects.
  void unmark() noexcept;

 private:
  struct Member {
    std::string path;
    bool is_marked = false;
    SetMark mark;
  };

  static Status write(const Member& member);

  std::vector<Member> members_;
  uint32_t n_directories_ = 0;  // the largest of the marks
};

}  // namespace kvm::tiers

#endif  // KVM_TIERS_DISK_DIRECTORY_SET_H_
