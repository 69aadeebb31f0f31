// SPDX-License-Identifier: Apache-2.0
// Snapshots carries out requests about sequences that outlive the service
// (docs/adr/0022-snapshots.md), beside other requests, a bounded step at a time:
//
//   kSave    a fork that nobody sees -> its pages are numbered -> those without a place are written
//            -> the image (a task) -> put
//   kLoad    get -> the image is read (a task) -> a sequence of pages that are away -> those that
//            must be in memory are fetched -> it is the client's
//   kRemove  remove
//
// The service has errands of its own, too, in the name of a user's library, which gets what is
// loaded (engine/run/kept_prefixes.h).
//
// One whose answer nobody wants stops at the next step, but for what the store of objects was asked
// to do: that happens. Whatever it has is freed in steps, too, before it ends.
//
// What a user has saved is charged to the user's library, each snapshot whole
// (Resource::kSnapshotBytes), from before it is put until it is removed.
//
// Threads: the driver, but for tasks and for the ends of transfers and of objects.
// Memory: 20 bytes a page and the image, of each that is under way; 100 bytes and the key of each
// snapshot that there is.
#ifndef KVM_ENGINE_RUN_SNAPSHOTS_H_
#define KVM_ENGINE_RUN_SNAPSHOTS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/request.h"
#include "base/status.h"
#include "engine/image/sequence_image.h"
#include "engine/run/arrivals.h"
#include "engine/run/movement.h"
#include "engine/store/snapshot_info.h"
#include "engine/store/store.h"
#include "engine/tasks/scheduler.h"
#include "tiers/object_store.h"

namespace kvm::engine {

struct Request;

class Snapshots {
 public:
  // What the arguments name outlives it. Charges what is there already, whatever the limits are.
  // REQUIRES: the store's slow tier keeps objects. Throws std::bad_alloc.
  Snapshots(Store* store, Movement* movement, Arrivals* arrivals, Scheduler* scheduler,
            uint32_t lane);
  // Lets go of what is under way. REQUIRES: stop(), and no task runs any more.
  ~Snapshots();
  Snapshots(const Snapshots&) = delete;
  Snapshots& operator=(const Snapshots&) = delete;

  // Begins what a request asks for. seq: of kSave, else null; nothing of it is needed any more when
  // this returns. Until take_ended() returns the request, it stays. Fails: EXISTS, QUOTA. Throws
  // std::bad_alloc. Nothing has begun then.
  Status begin(Request* request, const Sequence* seq, uint32_t uid);
  // The same for the service itself. What it asks for is done; nobody takes it back.
  struct Errand {
    SnapshotRequest what;
    uint32_t uid = 0;
    PrefixImage prefix;  // of kSave
  };
  Status begin(Errand&& errand, const Sequence* seq);
  // Pages may be still that were on their way.
  void note_change() { ++n_changes_; }
  // Takes a step of one, some 0.2 ms at most. Returns whether there was one to take.
  bool go_on();
  // Whether go_on() has one to take.
  bool is_ready();
  // A job has ended. Returns whether it was one of these.
  bool end_job(const TaskSet* set);
  // What became of a request, or of an errand.
  struct Ended {
    Request* request = nullptr;  // null: of an errand
    Status status;
    kvm_seq_id seq = 0;  // of kLoad
    Errand errand;       // of kLoad with its prefix
  };
  bool take_ended(Ended* ended);

  // As Engine::list_snapshots.
  std::vector<SnapshotInfo> list(uint32_t uid, const SnapshotName& after, size_t n_max) const;
  SnapshotStats stats() const;
  // Waits for what is in flight, before anything that it uses goes; no request hears of it.
  void stop();
  // Aborts where what is charged is not what there is.
  void check_accounts() const;

 private:
  struct Work;
  Status begin(std::unique_ptr<Work> work, const Sequence* seq);
  // Who is to have what is loaded.
  ClientId taker(const Work& work);
  // What is known of a key.
  struct Name {
    uint64_t bytes = 0;     // charged
    bool is_there = false;  // there is an object
    bool is_busy = false;   // one is put or removed just now
  };
  using Names = std::map<std::string, Name, std::less<>>;

  bool is_ready(Work* work);
  // Returns whether it did anything.
  bool step(Work* work);
  bool step_save(Work* work);
  bool step_load(Work* work);
  bool begin_writes(Work* work);
  bool end_writes(Work* work);
  // Begins the job of a work. False: not now.
  bool start_job(Work* work);
  bool take_places(Work* work);
  bool begin_put(Work* work);
  void end_put(Work* work);
  bool begin_restore(Work* work);
  bool begin_reads(Work* work);
  bool end_reads(Work* work);
  void admit(Work* work);
  bool begin_remove(Work* work);
  void end_remove(Work* work);
  bool free_some(Work* work);
  // It comes to nothing, or has come to its end, and has only to be freed.
  static void end(Work* work, Status status);
  // It ends, where nobody wants its answer. Returns whether it does.
  static bool drop_unwanted(Work* work);
  bool is_busy(const Work& work) const;
  void forget_name(const std::string& key);
  // What there is under a name from now on.
  void set(Name* name, bool is_there, uint64_t size_bytes);
  void count_end(const Work& work);
  QuotaAccount* library(uint32_t uid) { return store_->library(uid)->quota; }
  tiers::PageTable& pages() { return store_->memory().pages(); }
  tiers::SlowTier* tier() { return pages().slow_tier(); }

  Store* const store_;
  Movement* const movement_;
  Arrivals* const arrivals_;
  Scheduler* const scheduler_;
  const uint32_t lane_;
  tiers::ObjectStore* const objects_;
  Names names_;
  std::vector<std::unique_ptr<Work>> works_;
  size_t next_ = 0;  // whose turn it is
  uint64_t n_changes_ = 0;
  std::vector<Ended> ended_;  // has room for all
  SnapshotStats stats_;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RUN_SNAPSHOTS_H_
