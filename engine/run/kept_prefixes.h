// SPDX-License-Identifier: Apache-2.0
// KeptPrefixes makes prefixes outlive the service (docs/adr/0024-prefixes-that-are-kept.md). Each
// is a snapshot of its user's, with its hashes in the image and a name of the service's:
//
//   listed --> saved --> | the next service | --> waits for its space --> loaded --> listed
//                 \--> freed: the snapshot is removed         \--> not asked for: removed
//
// It decides, and Snapshots do: one save, one load and one removal at a time. A prefix that could
// not be saved is one that ends with the service.
//
// Threads: the driver.  Memory: some 200 bytes for each that is kept, or waits.
#ifndef KVM_ENGINE_RUN_KEPT_PREFIXES_H_
#define KVM_ENGINE_RUN_KEPT_PREFIXES_H_

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "engine/run/prefixes.h"
#include "engine/run/snapshots.h"
#include "engine/store/prefix_stats.h"
#include "engine/store/store.h"

namespace kvm::engine {

class KeptPrefixes {
 public:
  // What the arguments name outlives it. Those that a service before has saved wait from now on.
  // Throws std::bad_alloc.
  KeptPrefixes(Store* store, Snapshots* snapshots, Prefixes* prefixes, const Clock* clock,
               SavePrefixes which);

  // A prefix was published, and is listed; or it was forked. It is saved, as `which` says.
  void note_listed(kvm_seq_id seq);
  void note_fork(kvm_seq_id seq);
  // A sequence is gone. Where it was a prefix, its snapshot goes, too.
  void note_freed(kvm_seq_id seq);
  // There is a space of a user. What waits for it is loaded. uid: kEverybody: of any user.
  void note_space(uint32_t uid, const std::string& name, kvm_space_id space);

  // Takes a step, some 0.1 ms at most. Returns whether there was one to take.
  bool go_on();
  // Whether go_on() has one to take, and how long until it may have.
  bool is_ready() const;
  uint64_t patience_ns() const;
  // An errand has ended.
  void end(Snapshots::Ended&& ended);
  // A sequence that was loaded, and is no prefix, for the caller to free; 0: there is none.
  kvm_seq_id take_unwanted();

  void add_stats(PrefixStats* stats) const;

 private:
  struct Kept {
    SnapshotName name;  // from when it is being saved
    bool is_saved = false;
  };
  // A snapshot that waits for its space.
  struct Waiting {
    SnapshotName name;
    uint64_t n_tokens = 0;
    uint64_t keep_ns = 0;
    uint64_t due_ns = UINT64_MAX;  // when it is removed
  };
  // The longest first: they are taken from the end.
  using WaitingList = std::vector<Waiting>;
  using SpaceName = std::pair<uint32_t, std::string>;  // uid, name
  // A space that has come, with what waited for it.
  struct Claim {
    kvm_space_id space = 0;
    SpaceName space_name;
    WaitingList all;
  };
  struct Load {
    kvm_space_id space = 0;
    SpaceName space_name;
    Waiting from;
  };

  void save(kvm_seq_id seq);
  bool begin_save();
  bool begin_load();
  bool begin_removal();
  bool list_more();
  void end_save(const Status& status);
  void end_load(Snapshots::Ended&& ended);
  // It waits again: for another registration of its space, or its end.
  void put_back(Load&& load);
  void remove(SnapshotName&& name);
  // Removes some of those that nobody asked for in time.
  void expire();
  void find_due();

  Store* const store_;
  Snapshots* const snapshots_;
  Prefixes* const prefixes_;
  const Clock* const clock_;
  const SavePrefixes which_;
  std::unordered_map<kvm_seq_id, Kept> kept_;  // saved, or to be
  std::map<SpaceName, WaitingList> waiting_;
  uint64_t n_waiting_ = 0;        // of these, and of those that are claimed and not loaded
  uint64_t due_ns_ = UINT64_MAX;  // the first of waiting_
  std::deque<kvm_seq_id> to_save_;
  std::deque<Claim> claims_;
  std::deque<SnapshotName> to_remove_;
  // Under way.
  std::optional<std::pair<kvm_seq_id, SnapshotName>> saving_;
  std::optional<Load> loading_;
  bool is_removing_ = false;
  kvm_seq_id listing_ = 0;  // loaded; loading_ says of what
  std::vector<kvm_seq_id> unwanted_;
  PrefixStats stats_;  // counters
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RUN_KEPT_PREFIXES_H_
