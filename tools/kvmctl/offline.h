// SPDX-License-Identifier: Apache-2.0
// What the commands share that work on the directories of a kvmd that is stopped. Online they could
// not: the directories have one owner, and what it holds in them changes.
//
// Threads: one.
#ifndef KVM_TOOLS_KVMCTL_OFFLINE_H_
#define KVM_TOOLS_KVMCTL_OFFLINE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/status.h"
#include "engine/store/snapshot_info.h"
#include "tiers/object_store.h"

namespace kvm::tools {

// Ends the program with what has failed, and what to do about it.
[[noreturn]] void fail_offline(const Status& status);

// What a key names, for people; keys that are of no snapshot are shown with what can be printed.
engine::SnapshotInfo snapshot_of(const tiers::ObjectInfo& object);

// What is wrong with the body of an object of this key; "": nothing that can be told without the
// space that it was saved of, or it is of no snapshot. body: aligned as memory of the heap is.
std::string wrong_with_body(const std::string& key, uint64_t n_pages,
                            std::span<const std::byte> body);

// A Progress shows how far something has come that takes long, each second: on a terminal in a line
// of standard error that it takes away again; elsewhere, where that is asked for, in lines of it.
class Progress {
 public:
  // what: is being done.
  explicit Progress(std::string what, bool is_asked_for = false);
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void show(uint64_t n_done, uint64_t n_all);
  // Something else is done from now on.
  void begin(std::string what);

 private:
  void clear();

  std::string what_;
  const bool is_terminal_;
  const bool is_asked_for_;
  bool is_shown_ = false;
  uint64_t begin_ns_ = 0;
  uint64_t next_ns_ = 0;  // when it is shown again
};

// "3.1 GB/s".
std::string rate_text(uint64_t n_bytes, uint64_t duration_ns);

}  // namespace kvm::tools

#endif  // KVM_TOOLS_KVMCTL_OFFLINE_H_
