// SPDX-License-Identifier: Apache-2.0
// Movement: which pages are in memory and which in the slow tier. Where memory fills up, or an
// append finds none, pages of the sequences go that leave first (engine/store/leaving_order.h);
// where it is free again, those of sequences that are used again and again come back.
//
//            used by pages, indexes, rings, ...
//   0 ---------------- low --------- high ------- capacity
//     come back, to low  |            |  are sent, until low
//                        |  stay      |
//
// What has the lowest priority goes first (engine/store/priorities.h); of that, pages that others
// share go after those that none does, and those of sequences that requests use last, and only
// where an append waits for room.
//
// Threads: the driver, but for the ends of transfers.  Memory: of three batches.
#ifndef KVM_ENGINE_RUN_MOVEMENT_H_
#define KVM_ENGINE_RUN_MOVEMENT_H_

#include <cstdint>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "engine/run/arrivals.h"
#include "engine/run/page_batches.h"
#include "engine/run/sequence_order.h"
#include "engine/store/leaving_order.h"
#include "engine/store/movement_options.h"
#include "engine/store/store.h"

namespace kvm::engine {

class Movement {
 public:
  // What the arguments name outlives it.
  Movement(const MovementOptions& options, const Clock* clock, Store* store,
           const SequenceOrder* sequence_order, Arrivals* arrivals);

  // --- What requests say. O(1), and nothing is allocated, but for the priorities of a fork. -----

  // A request uses the sequence: some layers of it, to which it may append.
  // A use that counts is a pass over the layers which is not that of a prompt: those that append
  // more than a page of tokens write what is there for the first time.
  void touch(Sequence* seq, uint32_t layer, uint32_t n_layers, uint64_t n_append);
  void note_fork(const Sequence& parent, Sequence* child) noexcept;
  // A sequence of which all pages are away. Where somebody is about to use it they come back, if
  // this is automatic, and as far as there is room.
  void note_load(Sequence* seq, bool is_used);
  // Something has ended: there may be something to do now.
  void note_change();

  // --- What callers ask for ---------------------------------------------------------------------

  // What is in memory of the sequence will go, behind what was asked for before; or will come
  // back, as far as there is room below `high`. Throw std::bad_alloc.
  void send(kvm_seq_id seq);
  void fetch(Sequence* seq);
  // Whether something is asked for, or due, that has not ended.
  bool is_sending() const;
  bool is_fetching() const { return fetches_.has_begun() || !asked_fetches_.empty(); }
  // What a part of it is worth from now on. Fails: LIMIT. Throws std::bad_alloc; nothing has
  // changed either way.
  Status set_priority(Sequence* seq, PriorityRange range);

  // --- Room -------------------------------------------------------------------------------------

  bool is_automatic() const { return options_.is_automatic; }
  // Whether appends wait for room: pages go until none does.
  void set_has_waiters(bool has_waiters);
  // Whether they do so in vain: nothing can be sent, and whoever read frames that were left when
  // that was found out has ended. It holds until pages go, or nobody waits.
  bool has_given_up() const { return verdict_ == Verdict::kGivenUp; }
  // Why the tier did not take a page in the search that has_given_up() tells of; OK: it took all
  // that it was given.
  const Status& last_refusal() const { return last_refusal_; }
  // Whether pages have gone since this was asked last.
  bool take_freed();
  void count_waiting_append() { ++stats_.n_appends_waited; }

  // --- For the driver ---------------------------------------------------------------------------

  // Ends a batch that is over, or begins one; some 0.1 ms at most. Returns whether it did anything.
  bool go_on();
  // Whether go_on() has something to do that no transfer has to end for.
  bool is_ready() const { return has_news_ || is_due() || is_second_look_due(); }
  // How long the driver may sleep for this.
  uint64_t patience_ns() const { return clock_->patience_ns(wake_ns_); }
  // Waits for transfers in flight, and forgets the rest.
  void stop();
  const MovementStats& stats() const { return stats_; }

 private:
  enum class Aim : uint8_t { kNone, kAsked, kChosen };
  // What may go in a pass. There is one of kOwn and one of kShared for each priority from the
  // lowest on, and where an append waits one of kBusy.
  enum class Level : uint8_t { kOwn, kShared, kBusy };
  enum class Verdict : uint8_t { kOpen, kWaitsForReaders, kSecondLook, kGivenUp };

  bool end_sends();
  bool end_fetches();
  bool send_some();
  bool send_asked();
  bool fetch_some();
  bool begin_fetch(uint64_t limit_bytes, kvm_seq_id id);
  // Whether pages are to go that nobody named.
  bool wants_room();
  // Looks for whose they are. False: nobody's, for now.
  bool choose();
  bool begin_next_pass();
  // To the pass that goes further than this one. False: there is none.
  bool go_further();
  void begin_priority(uint32_t priority);
  void end_passes();
  // What becomes of the sequence whose pages were sent.
  void settle(Residence* residence, const PageBatches::Batch& batch);
  void forget_target();
  bool begin_send(const PageBatches::Limits& limits, uint64_t max_bytes);
  // Starts to look through all sequences.
  void begin_search();
  void end_target();
  void give_up_fetch(Residence* residence);
  // null: it is gone.
  Sequence* find(kvm_seq_id seq) noexcept;
  Residence* residence_of(kvm_seq_id seq);
  // Whether all readers of the first look have ended.
  bool is_second_look_due() const {
    return verdict_ == Verdict::kWaitsForReaders && !fetches_.has_begun() && !sends_.has_begun() &&
           epochs().has_ended(verdict_epoch_);
  }
  // Whether a time has come that it waited for.
  bool is_due() const { return wake_ns_ != UINT64_MAX && clock_->now_ns() >= wake_ns_; }
  // Whether that time is still to come; go_on() is called again then.
  bool must_wait_until(uint64_t time_ns);
  // The cap on bytes. What an append waits for is not under it.
  bool hold() { return options_.bytes_per_s != 0 && must_wait_until(due_ns_); }
  void charge(uint64_t begin_ns, uint64_t size_bytes);
  uint64_t capped(uint64_t max_bytes) const;
  tiers::ReadEpochs& epochs() const { return store_->memory().pages().epochs(); }

  using Returning =
      boost::intrusive::list<Residence, boost::intrusive::base_hook<ResidenceHook<ByReturning>>,
                             boost::intrusive::constant_time_size<false>>;

  const MovementOptions options_;
  const Clock* const clock_;
  Store* const store_;
  const SequenceOrder* const sequence_order_;
  const uint64_t high_bytes_;
  const uint64_t low_bytes_;
  LeavingOrder order_;
  Returning returning_;  // those with pages away that are used again, the last used first
  bool has_news_ = false;
  bool has_waiters_ = false;
  bool has_freed_ = false;

  PageBatches sends_;
  uint64_t sends_begin_ns_ = 0;
  bool is_send_capped_ = false;  // of the batch that has begun
  std::vector<kvm_seq_id> asked_sends_;
  Aim aim_ = Aim::kNone;
  bool is_lowering_ = false;      // from high to low
  bool is_resting_ = false;       // nothing could go, and nothing has changed since
  bool is_tier_full_ = false;     // it said so in the passes from Level::kOwn on
  uint64_t failed_until_ns_ = 0;  // the tier refuses: only appends that wait ask again
  Status last_refusal_;
  Level level_ = Level::kOwn;
  uint32_t priority_ = 0;      // the highest that may go in this pass
  bool has_met_busy_ = false;  // in the passes of this priority
  bool is_in_pass_ = false;
  bool has_sent_ = false;  // in the passes from Level::kOwn on
  uint64_t n_looks_left_ = 0;
  Verdict verdict_ = Verdict::kOpen;
  uint64_t verdict_epoch_ = 0;

  PageBatches fetches_;
  uint64_t fetches_begin_ns_ = 0;
  std::vector<kvm_seq_id> asked_fetches_;
  bool is_fetch_ending_ = false;      // no batch begins until those that have begun have ended
  bool are_fetches_resting_ = false;  // there was no frame, and nothing has changed since

  uint64_t due_ns_ = 0;  // by the cap
  uint64_t wake_ns_ = UINT64_MAX;
  MovementStats stats_;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RUN_MOVEMENT_H_
