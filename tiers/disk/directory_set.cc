// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/directory_set.h"

#include <fcntl.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/kill_point.h"
#include "tiers/disk/crc32c.h"

namespace kvm::tiers {
namespace {

std::string mark_path(const std::string& directory) { return directory + "/" + kSetMarkName; }

Status io_error(const std::string& what, const std::string& path, int error) {
  return Status(KVM_ERR_IO, "disk tier: " + what + " " + path + ": " + ::strerror(error));
}

uint32_t crc_of(const SetMark& mark) {
  return crc32c(std::as_bytes(std::span(&mark, 1)).first(offsetof(SetMark, mark_crc)));
}

// False: there is none.
Result<bool> read_mark(const std::string& directory, SetMark* mark) {
  const std::string path = mark_path(directory);
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
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
      mark->mark_bytes != expected.mark_bytes || mark->mark_crc != crc_of(*mark)) {
    return Status(KVM_ERR_CORRUPT,
                  "disk tier: " + path +
                      ", which says what directories belong together, is damaged; without this "
                      "file in any of them, those that are named are taken for all there are");
  }
  return true;
}

Status sync_directory(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) {
    return io_error("opening", path, errno);
  }
  const int error = ::fsync(fd) == 0 ? 0 : errno;
  ::close(fd);
  return error == 0 ? Status::ok() : io_error("syncing", path, error);
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
  DirectorySet set;
  std::vector<std::string> marked;
  std::vector<std::string> strangers;
  std::string first;  // of those that must be there
  uint64_t set_id = 0;
  for (std::string& path : paths) {
    Member member{.path = std::move(path), .is_marked = false, .mark = {}};
    KVM_TRY_ASSIGN(const bool has_mark, read_mark(member.path, &member.mark));
    member.is_marked = has_mark;
    // One of a set that had no directory yet stands for nothing.
    if (has_mark && member.mark.n_directories != 0) {
      if (!first.empty() && member.mark.set_id != set_id) {
        return Status(KVM_ERR_INVALID,
                      "disk tier: " + first + " and " + member.path +
                          " hold snapshots of two services; name the directories of one");
      }
      if (first.empty()) {
        first = member.path;
        set_id = member.mark.set_id;
      }
      set.n_directories_ = std::max(set.n_directories_, member.mark.n_directories);
    }
    set.members_.push_back(std::move(member));
  }
  // Which has each index. Where two have one, it is not that of which the mark was never finished.
  std::vector<Member*> of_index(set.n_directories_);
  for (Member& member : set.members_) {
    const SetMark& mark = member.mark;
    if (!std::exchange(member.is_marked, false) || mark.set_id != set_id ||
        mark.index >= set.n_directories_) {
      continue;
    }
    Member*& other = of_index[mark.index];
    const bool is_finished = mark.index < mark.n_directories;
    if (other != nullptr && is_finished && other->mark.index < other->mark.n_directories) {
      return Status(KVM_ERR_INVALID, "disk tier: " + member.path + " is a copy of " + other->path +
                                         "; name one of the two");
    }
    if (other == nullptr || is_finished) {
      other = &member;
    }
  }
  for (Member* member : of_index) {
    if (member != nullptr) {
      member->is_marked = true;
    }
  }
  for (const Member& member : set.members_) {
    (member.is_marked ? marked : strangers).push_back(member.path);
  }
  if (marked.size() < set.n_directories_) {
    return Status(
        KVM_ERR_INVALID,
        "disk tier: snapshots lie in " + std::to_string(set.n_directories_) +
            " directories that belong together, of which " + std::to_string(marked.size()) +
            (marked.size() == 1 ? " is" : " are") + " named: " + joined(marked) +
            (strangers.empty() ? "" : "; not one of them is " + joined(strangers)) +
            ". Name all, in any order, with their drives mounted. To give up for good what lies in "
            "the others, remove the file " +
            kSetMarkName + " from those that are there");
  }
  return set;
}

Status DirectorySet::write(const Member& member) {
  const std::string path = mark_path(member.path);
  const std::string made = path + ".new";
  SetMark mark = member.mark;
  mark.mark_crc = crc_of(mark);
  const int fd = ::open(made.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) {
    return io_error("creating", made, errno);
  }
  errno = EIO;  // of a write that was short
  const bool is_written =
      ::pwrite(fd, &mark, sizeof(mark), 0) == static_cast<ssize_t>(sizeof(mark)) &&
      ::fsync(fd) == 0;
  const int error = errno;
  ::close(fd);
  if (!is_written) {
    (void)::unlink(made.c_str());
    return io_error("writing", made, error);
  }
  if (::rename(made.c_str(), path.c_str()) != 0) {
    return io_error("renaming", made, errno);
  }
  return sync_directory(member.path);
}

Status DirectorySet::mark() {
  const auto n_members = static_cast<uint32_t>(members_.size());
  const auto names_all = [&](const Member& member) {
    return member.is_marked && member.mark.n_directories == n_members;
  };
  if (std::all_of(members_.begin(), members_.end(), names_all)) {
    return Status::ok();
  }
  uint64_t set_id = 0;
  std::vector<bool> is_taken(n_members);
  for (const Member& member : members_) {
    if (member.is_marked) {
      set_id = member.mark.set_id;
      is_taken[member.mark.index] = true;
    }
  }
  while (set_id == 0) {
    set_id = now_ns();
    (void)!::getrandom(&set_id, sizeof(set_id), 0);
  }
  uint32_t next = 0;
  for (Member& member : members_) {
    if (member.is_marked) {
      continue;
    }
    while (is_taken[next]) {
      ++next;
    }
    Member marked = member;
    marked.mark = {.set_id = set_id, .index = next, .n_directories = n_directories_};
    KVM_TRY(write(marked));
    member.mark = marked.mark;
    member.is_marked = true;
    is_taken[next] = true;
    KVM_KILL_POINT("disk/directory_joined");
  }
  for (Member& member : members_) {
    Member marked = member;
    marked.mark.n_directories = n_members;
    KVM_TRY(write(marked));
    member.mark = marked.mark;
    KVM_KILL_POINT("disk/directory_marked");
  }
  n_directories_ = n_members;
  return Status::ok();
}

void DirectorySet::unmark() noexcept {
  for (Member& member : members_) {
    if (member.is_marked) {
      (void)::unlink(mark_path(member.path).c_str());
      member.is_marked = false;
    }
  }
  n_directories_ = 0;
}

}  // namespace kvm::tiers
