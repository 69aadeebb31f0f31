// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/directory_set.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

#include "base/assert.h"
#include "base/kill_point.h"
#include "tiers/disk/crc32c.h"
#include "tiers/disk/disk_system.h"

namespace kvm::tiers {
namespace {

std::string mark_path(const std::string& directory) { return directory + "/" + kSetMarkName; }

Status io_error(const std::string& what, const std::string& path, int error) {
  return Status(KVM_ERR_IO, "disk: " + what + " " + path + ": " + ::strerror(error));
}

uint32_t crc_of(const SetMark& mark) {
  return crc32c(std::as_bytes(std::span(&mark, 1)).first(offsetof(SetMark, mark_crc)));
}

// False: there is none.
Result<bool> read_mark(const std::string& directory, SetMark* mark) {
  const std::string path = mark_path(directory);
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0 && errno == ENOENT) {
    return false;
  }
  if (fd < 0) {
    return io_error("opening", path, errno);
  }
  std::array<std::byte, sizeof(SetMark) + 1> bytes{};
  const ssize_t n = ::pread(fd, bytes.data(), bytes.size(), 0);
  const int error = errno;
  ::close(fd);
  if (n < 0) {
    return io_error("reading", path, error);
  }
  std::memcpy(mark, bytes.data(), sizeof(*mark));
  if (n >= 8 && mark->magic == kSetMarkMagic && mark->version > kDiskFormatVersion) {
    return Status(KVM_ERR_VERSION, path + " has version " + std::to_string(mark->version) +
                                       " of the format, this program knows version " +
                                       std::to_string(kDiskFormatVersion));
  }
  const SetMark expected;
  if (n != sizeof(SetMark) || mark->magic != expected.magic || mark->version != expected.version ||
      mark->mark_bytes != expected.mark_bytes || mark->mark_crc != crc_of(*mark) ||
      mark->n_directories > kMaxSetDirectories || mark->index >= kMaxSetDirectories) {
    return Status(KVM_ERR_CORRUPT,
                  "disk: " + path +
                      ", which says what directories belong together, is damaged; without this "
                      "file in any of them, those that are named are taken for all there are");
  }
  return true;
}

std::string joined(const std::vector<std::string>& paths) {
  std::string text;
  for (const std::string& path : paths) {
    text += (text.empty() ? "" : ", ") + path;
  }
  return text;
}

}  // namespace

Result<DirectorySet> DirectorySet::find(std::vector<std::string> paths) {
  if (paths.size() > kMaxSetDirectories) {
    return Status(KVM_ERR_INVALID, "disk: " + std::to_string(paths.size()) +
                                       " directories are named; at most " +
                                       std::to_string(kMaxSetDirectories) + " are allowed");
  }
  DirectorySet set;
  std::vector<bool> has_mark;
  const Member* last = nullptr;  // of those that are finished, one of the largest number
  set.members_.reserve(paths.size());
  for (std::string& path : paths) {
    Member& member = set.members_.emplace_back();
    member.path = std::move(path);
    KVM_TRY_ASSIGN(const bool is_there, read_mark(member.path, &member.mark));
    has_mark.push_back(is_there);
    if (!is_there || !member.mark.is_finished()) {
      continue;
    }
    if (last != nullptr && member.mark.set_id != last->mark.set_id) {
      return Status(KVM_ERR_INVALID,
                    "disk: " + last->path + " and " + member.path +
                        " hold snapshots of two services; name the directories of one");
    }
    if (last != nullptr && member.mark.n_directories == last->mark.n_directories &&
        member.mark.growth_id != last->mark.growth_id) {
      return Status(KVM_ERR_INVALID, "disk: " + last->path + " and " + member.path +
                                         " belonged together once, and were used apart since; "
                                         "name those that were used together last");
    }
    if (last == nullptr || member.mark.n_directories > last->mark.n_directories) {
      last = &member;
    }
  }
  if (last == nullptr) {
    return set;
  }
  set.set_id_ = last->mark.set_id;
  set.growth_id_ = last->mark.growth_id;
  set.n_directories_ = last->mark.n_directories;
  std::vector<const Member*> of_index(set.n_directories_);
  for (size_t i = 0; i < set.members_.size(); ++i) {
    Member& member = set.members_[i];
    const SetMark& mark = member.mark;
    const bool counts = mark.is_finished() || mark.growth_id == set.growth_id_;
    if (!has_mark[i] || mark.set_id != set.set_id_ || !counts || mark.index >= set.n_directories_) {
      continue;
    }
    if (of_index[mark.index] != nullptr) {
      return Status(KVM_ERR_INVALID, "disk: " + member.path + " is a copy of " +
                                         of_index[mark.index]->path + "; name one of the two");
    }
    of_index[mark.index] = &member;
    member.is_marked = true;
    set.has_list_ |= mark.has_list != 0;
  }
  if (std::find(of_index.begin(), of_index.end(), nullptr) != of_index.end()) {
    return set.missing();
  }
  return set;
}

Status DirectorySet::missing() const {
  std::vector<std::string> marked;
  std::vector<std::string> strangers;
  for (const Member& member : members_) {
    (member.is_marked ? marked : strangers).push_back(member.path);
  }
  return Status(
      KVM_ERR_INVALID,
      "disk: snapshots lie in " + std::to_string(n_directories_) +
          " directories that belong together, of which " + std::to_string(marked.size()) +
          (marked.size() == 1 ? " is" : " are") + " named: " + joined(marked) +
          (strangers.empty() ? "" : "; not one of them is " + joined(strangers)) +
          ". Name all, in any order, with their drives mounted. To give up for good what lies in "
          "the others, remove the file " +
          kSetMarkName + " from those that are there");
}

Status DirectorySet::write(Member* member, const SetMark& mark) {
  const std::string path = mark_path(member->path);
  const std::string made = path + ".new";
  SetMark sealed = mark;
  sealed.mark_crc = crc_of(sealed);
  const int fd = ::open(made.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) {
    return io_error("creating", made, errno);
  }
  errno = EIO;  // of a write that was short
  const bool is_written =
      ::pwrite(fd, &sealed, sizeof(sealed), 0) == static_cast<ssize_t>(sizeof(sealed)) &&
      ::fsync(fd) == 0;
  int error = errno;
  ::close(fd);
  if (!is_written) {
    (void)::unlink(made.c_str());
    return io_error("writing", made, error);
  }
  if (::rename(made.c_str(), path.c_str()) != 0) {
    error = errno;
    (void)::unlink(made.c_str());
    return io_error("renaming", made, error);
  }
  KVM_TRY(sync_directory(member->path));
  member->mark = sealed;
  return Status::ok();
}

// Has all that belong to the set say so.
Status DirectorySet::finish(bool with_list) {
  for (Member& member : members_) {
    const SetMark& now = member.mark;
    if (!member.is_marked || (now.n_directories == n_directories_ && now.growth_id == growth_id_ &&
                              (!with_list || (now.has_list != 0) == has_list_))) {
      continue;
    }
    SetMark mark = now;
    mark.n_directories = n_directories_;
    mark.growth_id = growth_id_;
    mark.has_list = has_list_ ? 1 : 0;
    KVM_TRY(write(&member, mark));
    KVM_KILL_POINT("disk/directory_marked");
  }
  return Status::ok();
}

Status DirectorySet::mark() {
  // What a crash has left half done is done first: marks of two growths are told apart by that.
  KVM_TRY(finish(false));
  const auto n_members = static_cast<uint32_t>(members_.size());
  if (n_directories_ == n_members) {
    return Status::ok();
  }
  const uint64_t set_id = n_directories_ == 0 ? random_id() : set_id_;
  const uint64_t growth_id = random_id();
  uint32_t next = n_directories_;
  std::vector<Member*> joined;
  for (Member& member : members_) {
    if (!member.is_marked) {
      KVM_TRY(write(&member, {.set_id = set_id,
                              .index = next++,
                              .n_directories = n_directories_,
                              .growth_id = growth_id,
                              .has_list = has_list_ ? 1u : 0u}));
      joined.push_back(&member);
      KVM_KILL_POINT("disk/directory_joined");
    }
  }
  for (Member* member : joined) {
    member->is_marked = true;
  }
  set_id_ = set_id;
  growth_id_ = growth_id;
  n_directories_ = n_members;
  return finish(false);
}

bool DirectorySet::try_finish(bool with_list) noexcept {
  try {
    return finish(with_list).is_ok();
  } catch (const std::bad_alloc&) {
    return false;
  }
}

bool DirectorySet::note_list() noexcept {
  has_list_ = is_any();
  return try_finish(true);
}

bool DirectorySet::give_up_list() noexcept {
  has_list_ = false;
  return try_finish(true);
}

void DirectorySet::unmark() noexcept {
  KVM_ASSERT(!has_list_);
  const uint32_t n_before = std::exchange(n_directories_, 0);
  if (!try_finish(false)) {
    // They are a set still, all of which is here: what joins them joins this one.
    n_directories_ = n_before;
    return;
  }
  for (Member& member : members_) {
    if (std::exchange(member.is_marked, false)) {
      (void)::unlink(mark_path(member.path).c_str());
    }
  }
}

}  // namespace kvm::tiers
