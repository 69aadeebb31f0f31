// SPDX-License-Identifier: Apache-2.0
// DirectorySet: which directories belong together. A directory that is not there must not be taken
// for one in which there is nothing. So each has a mark, the file kvm.set: of which set it is,
// which of it, and how many there are. There are marks before there is a list of objects, and they
// go after it.
//
//   mark     all that are new: a mark with the number there was so far --> all: with the new number
//   unmark   all: a mark with the number 0 --> without one
//
// They say, too, whether there is a list. So one that cannot be found, or read, is told from one
// that was being begun.
//
//   a list counts --> note_list --> ... --> it is empty --> give_up_list --> the list is removed
//
// A mark speaks of directories only when each of these has one. So whatever of this a crash leaves,
// the marks that are there name no directory that has none. What was marked and never finished is
// told from what was by the growth that it was part of.
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
// LIMIT: of one set.
inline constexpr uint32_t kMaxSetDirectories = 4096;

struct SetMark {
  uint32_t magic = kSetMarkMagic;
  uint16_t version = kDiskFormatVersion;
  uint16_t mark_bytes = 64;
  uint64_t set_id = 0;
  uint32_t index = 0;          // of the directory
  uint32_t n_directories = 0;  // that must be there: those with indexes below it
  uint64_t growth_id = 0;      // of the marking that it was written by, drawn anew for each
  uint32_t has_list = 0;       // 1: a list of objects has counted, and was not given up
  uint32_t reserved[6] = {};
  uint32_t mark_crc = 0;  // CRC-32C of the bytes before it

  // Else it was written by a marking that had not come to its end.
  bool is_finished() const { return index < n_directories; }
};
static_assert(sizeof(SetMark) == 64 && offsetof(SetMark, mark_crc) == 60);

class DirectorySet {
 public:
  // Of no directory: nothing to mark.
  DirectorySet() = default;
  // Looks at the marks. Fails, with nothing written: INVALID: a directory that must be there is not
  // among these, or they are of two sets, or too many; CORRUPT: a mark cannot be read; VERSION; IO.
  static Result<DirectorySet> find(std::vector<std::string> paths);

  // Whether the i-th belongs to a set that is there; false of all: there is none.
  bool is_member(size_t i) const { return members_[i].is_marked; }
  bool is_any() const { return n_directories_ != 0; }
  // Whether there must be a list of objects.
  bool has_list() const { return has_list_; }

  // Has each directory marked, durably; what marks say of the list need not be right then. Fails:
  // IO: some may be; to be called again.
  Status mark();
  // Has the marks say that there is a list, or none any more. Costs nothing where they do. False:
  // some may not; to be called again.
  bool note_list() noexcept;
  bool give_up_list() noexcept;
  // Removes the marks. REQUIRES: there is no list of objects, and !has_list().
  void unmark() noexcept;

 private:
  struct Member {
    std::string path;
    bool is_marked = false;  // it belongs to the set
    SetMark mark;
  };

  // Fails: IO.
  static Status write(Member* member, const SetMark& mark);
  // Writes those that do not say how many there are, or, with_list, whether there is a list.
  Status finish(bool with_list);
  bool try_finish(bool with_list) noexcept;
  // Says that not all are there.
  Status missing() const;

  std::vector<Member> members_;
  uint64_t set_id_ = 0;
  uint64_t growth_id_ = 0;      // of the last marking that came so far that it counts
  uint32_t n_directories_ = 0;  // of it; 0: there is no set
  bool has_list_ = false;       // some mark says so, or is to
};

}  // namespace kvm::tiers

#endif  // KVM_TIERS_DISK_DIRECTORY_SET_H_
